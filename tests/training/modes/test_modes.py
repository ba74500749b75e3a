"""The form of a model that trains, and the form that predicts: BatchNormalization and Dropout."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onnxgrad import Trainer, rule
from onnxgrad.autodiff.derivative import make_weights_inputs
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import ModelError
from onnxgrad.graph import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.training.modes.inference_form import inference_form, names_of_training_nodes
from onnxgrad.training.modes.training_form import training_form
from onnxgrad.training.parameters.equal_constants import separate_statistics
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import in_sweep, run, run_named
from tests.support.trainings import normalized_model

RNG = np.random.default_rng(0)
GAMMA = 0x9E3779B97F4A7C15


def training_model(proto, batch_norm="frozen", dropout=None, seed=0, weights=(), gradients=()):
    """Return the training form as a model, and the names of the new statistics.

    Outputs: those of `proto`, the new statistics, and the gradients of the sum of squares of the
    first output. Inputs: those of `proto`, `draw`, the weights and the statistics.
    """
    model = prepare(proto, batch="rows", keep_dropout=True)
    op, graph = Emit(model.graph), model.graph
    draw = ir.Value(name="draw", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.inputs.append(draw)
    values = make_weights_inputs(proto, graph, list(weights))
    values += [x for x in graph.inputs if x.name in gradients]
    buffers = training_form(op, batch_norm=batch_norm, dropout=dropout or {}, draw=draw, seed=seed)
    y = graph.outputs[0]
    protected = {*graph.inputs, *graph.outputs}
    outputs = list(graph.outputs)
    with op:
        for old, new in buffers.items():
            outputs.append(op.name_output(new, f"{old.name}.new", old, protected))
        if values:
            found = sweep(op, {y: 2.0 * y}, values)
            outputs += [op.name_output(g, f"{v.name}_grad", v, protected) for v, g in found.items()]
    graph.outputs[:] = outputs
    tidy(model)
    if not draw.uses():
        graph.inputs.remove(draw)
    order = {node: i for i, node in enumerate(graph)}
    for node, i in order.items():
        assert all(order.get(x.producer(), -1) < i for x in node.inputs if x is not None)
    return to_proto(model), [str(v.name) for v in buffers]


# -- BatchNormalization ------------------------------------------------------------------------

STORED = (
    """<float[2] s = {1, 2}, float[2] b = {1, 2}, float[2] m = {0.5, 0}, float[2] v = {2, 1}>"""
)
BN = f"g (float[N,2,3] X) => (float[N,2,3] Y) {STORED}"
FLAT = f"g (float[N,2] X) => (float[N,2] Y) {STORED}"
EXPORTS = [
    (7, "Y = BatchNormalization<momentum=0.8>(X, s, b, m, v)"),
    (9, "Y = BatchNormalization<momentum=0.8>(X, s, b, m, v)"),
    (12, "Y, a, c, d, e = BatchNormalization<momentum=0.8>(X, s, b, m, v)"),
    (13, "Y = BatchNormalization<momentum=0.8>(X, s, b, m, v)"),
    (14, "Y, a, c = BatchNormalization<momentum=0.8, training_mode=1>(X, s, b, m, v)"),
    (15, "Y = BatchNormalization<momentum=0.8, training_mode=1>(X, s, b, m, v)"),
    (17, "Y = BatchNormalization<momentum=0.8>(X, s, b, m, v)"),
]


@pytest.mark.parametrize(("opset", "body"), EXPORTS)
def test_batch_statistics_of_every_opset(opset, body):
    model, names = training_model(parse_model(f"{BN} {{ {body} }}", opset=opset), "train")
    X = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    m, v = np.float32([0.5, 0]), np.float32([2, 1])
    got = run_named(model, X=X, m=m, v=v)
    mean, variance = X.mean((0, 2)), X.var((0, 2), ddof=1)
    z = (X - mean[:, None]) / np.sqrt(X.var((0, 2)) + 1e-5)[:, None]
    s = np.float32([1, 2])[:, None]
    assert names == ["m", "v"]
    np.testing.assert_allclose(got["Y"], z * s + s, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["m.new"], 0.8 * m + 0.2 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["v.new"], 0.8 * v + 0.2 * variance, rtol=1e-5)


@pytest.mark.parametrize(("opset", "body"), EXPORTS)
def test_stored_statistics_of_every_opset(opset, body):
    proto = parse_model(f"{BN} {{ {body} }}", opset=opset)
    model, names = training_model(proto, "frozen", weights=["s", "b"])
    X = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    s, b = np.float32([1, 2]), np.float32([1, 2])
    got = run_named(model, X=X, s=s, b=b)
    r = np.sqrt(np.float32([2, 1]) + 1e-5)[:, None]
    z = (X - np.float32([[0.5], [0]])) / r
    y = z * s[:, None] + b[:, None]
    assert not names
    np.testing.assert_allclose(got["Y"], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["s_grad"], (2 * y * z).sum((0, 2)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(inference_form(proto), X=X)[0], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [2, 4, *map(in_sweep, (3, 5))])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), in_sweep(np.float32, 2e-5)])
@pytest.mark.parametrize("static", [True, False])
def test_gradients_of_batch_statistics_agree_with_pytorch(rank, dtype, tolerance, static):
    torch = pytest.importorskip("torch")
    shape = (5, 3, 2, 4, 2)[:rank]
    kind = {np.float64: "double", np.float32: "float"}[dtype]
    lengths = ",".join(map(str, shape if static else ("N", *shape[1:])))
    init = {n: RNG.normal(size=3).astype(dtype) for n in "sbm"} | {"v": np.full(3, 0.7, dtype)}
    text = f"""g ({kind}[{lengths}] X) => ({kind}[{lengths}] Y) {{
        Z = BatchNormalization<epsilon=0.001>(X, s, b, m, v)  Y = Tanh(Z) }}"""
    proto = parse_model(text, **init)
    model, _ = training_model(proto, "train", weights=["s", "b"], gradients=["X"])
    X = RNG.normal(size=shape).astype(dtype)
    got = run_named(model, {"X": X, **init})

    x, s, b = (torch.tensor(a, requires_grad=True) for a in (X, init["s"], init["b"]))
    m, v = torch.tensor(init["m"]), torch.tensor(init["v"])
    momentum = 0.9
    y = torch.nn.functional.batch_norm(
        x, m, v, s, b, training=True, momentum=1 - momentum, eps=float(np.float32(0.001))
    ).tanh()
    (y**2).sum().backward()
    want = {"Y": y, "m.new": m, "v.new": v, "X_grad": x.grad, "s_grad": s.grad, "b_grad": b.grad}
    for name, value in want.items():
        np.testing.assert_allclose(
            got[name], value.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.fixture(scope="module")
def normalizing_network():
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.b3, self.conv = nn.BatchNorm3d(2), nn.Conv3d(2, 3, 2)
            self.b2, self.b1 = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm1d(3)
            self.drop, self.head = nn.Dropout(0.25), nn.Linear(3, 4)
            self.plain = nn.BatchNorm1d(4, affine=False)

        def forward(self, x):
            x = torch.relu(self.b2(self.conv(self.b3(x)).flatten(3)))
            x = self.b1(torch.tanh(x).flatten(2) + 1).mean(2)
            return self.plain(self.head(self.drop(x)))

    torch.manual_seed(0)
    return Network()


def export_by(network, mode: str) -> onnx.ModelProto:
    import torch

    exporter, form = mode.split()
    x = (torch.randn(4, 2, 4, 4, 4, generator=torch.Generator().manual_seed(0)),)
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
    if exporter == "dynamo":
        options = {"optimize": False, "dynamic_shapes": ({0: torch.export.Dim("N", min=2)},)}
    return export_module(network, x, dynamo=exporter == "dynamo", train=form == "train", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "mode", ["script eval", "script train", in_sweep("dynamo eval"), in_sweep("dynamo train")]
)
def test_statistics_after_five_batches_agree_with_pytorch(normalizing_network, mode):
    import copy

    import torch

    network = copy.deepcopy(normalizing_network)
    proto = separate_statistics(export_by(network, mode))
    dropouts = [n for n in proto.graph.node if n.op_type == "Dropout"]
    off = {n.name: 0 for n in dropouts}
    assert bool(off) == ("train" in mode)
    model, names = training_model(proto, "train", off)
    assert sorted(names) == sorted(n for n, _ in network.named_buffers() if "num_batches" not in n)
    state = {name: initializer_arrays(proto)[name] for name in names}
    for name, value in network.named_buffers():  # an export in training form may have moved them
        if name in state:
            value.copy_(torch.tensor(state[name]))
    network.train()
    network.drop.p = 0.0
    for size in (4, 3, 5, 2, 6):
        x = RNG.normal(1, 2, (size, 2, 4, 4, 4)).astype(np.float32)
        got = run_named(model, {"x": x, **state})
        with torch.no_grad():
            want = network(torch.from_numpy(x))
        np.testing.assert_allclose(next(iter(got.values())), want, rtol=1e-4, atol=1e-4)
        state = {name: got[f"{name}.new"] for name in names}
    for name, value in network.named_buffers():
        if name in state:
            np.testing.assert_allclose(state[name], value, rtol=1e-5, atol=1e-6)
    # the file in inference form, with these statistics, predicts as the module does in eval mode
    for tensor in proto.graph.initializer:
        if tensor.name in state:
            tensor.CopyFrom(numpy_helper.from_array(state[tensor.name], tensor.name))
    inference = inference_form(proto)
    onnx.checker.check_model(inference)
    assert not names_of_training_nodes(inference)
    with torch.no_grad():
        want = network.eval()(torch.from_numpy(x))
    np.testing.assert_allclose(run(inference, x=x)[0], want, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_applied_twice_updates_its_statistics_twice():
    text = (
        FLAT
        + """{ h = BatchNormalization(X, s, b, m, v)
        Y = BatchNormalization(h, s, b, m, v) }"""
    )
    model, names = training_model(parse_model(text), "train")
    X = RNG.normal(size=(6, 2)).astype(np.float32)
    m, v = np.float32([0.5, 0]), np.float32([2, 1])
    got = run_named(model, X=X, m=m, v=v)
    np.testing.assert_array_equal([m, v], [[0.5, 0], [2, 1]])  # onnxruntime might write to them
    s = np.float32([1, 2])
    h = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-5) * s + s
    for z in (X, h):
        m, v = 0.9 * m + 0.1 * z.mean(0), 0.9 * v + 0.1 * z.var(0, ddof=1)
    assert names == ["m", "v"]
    np.testing.assert_allclose(got["m.new"], m, rtol=1e-5)
    np.testing.assert_allclose(got["v.new"], v, rtol=1e-5)


def test_statistics_in_half_precision_are_kept_in_float32():
    text = """g (float16[N,2] X) => (float16[N,2] Y) <float16[2] s = {1, 2}, float16[2] b = {0, 0},
        float16[2] m = {1, 1}, float16[2] v = {2, 1}> { Y = BatchNormalization(X, s, b, m, v) }"""
    model, _ = training_model(parse_model(text), "train", weights=["s"])
    X = RNG.normal(size=(6, 2)).astype(np.float16)
    m, v, s = np.float32([1, 1]), np.float32([2, 1]), np.float16([1, 2])
    x = X.astype(float)
    mean, variance = 0.9 * m + 0.1 * x.mean(0), 0.9 * v + 0.1 * x.var(0, ddof=1)
    got = run_named(model, X=X, m=m, v=v, s=s)
    assert got["Y"].dtype == got["s_grad"].dtype == np.float16
    assert got["m.new"].dtype == np.float32
    np.testing.assert_allclose(got["m.new"], mean, rtol=1e-5)
    np.testing.assert_allclose(got["v.new"], variance, rtol=1e-5)
    np.testing.assert_allclose(got["Y"], (x - x.mean(0)) / x.std(0) * s, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch_norm", ["frozen", "train"])
def test_outputs_of_running_statistics(batch_norm):
    """A model exported for training may return them, by themselves or as copies."""
    text = """g (float[N,2] X) => (float[N,2] Y, float[2] mean, float[2] var) <float[2] s = {1, 2},
        float[2] b = {1, 2}, float[2] m = {0.5, 0}, float[2] v = {2, 1}> {
        Y, mean, w = BatchNormalization<training_mode=1>(X, s, b, m, v) var = Identity(w) }"""
    proto = parse_model(text)
    model, names = training_model(proto, batch_norm)
    X = RNG.normal(size=(6, 2)).astype(np.float32)
    m, v = np.float32([0.5, 0]), np.float32([2, 1])
    got = run_named(model, {"X": X, "m": m, "v": v})
    if batch_norm == "train":
        assert names == ["m", "v"]
        m, v = 0.9 * m + 0.1 * X.mean(0), 0.9 * v + 0.1 * X.var(0, ddof=1)
        np.testing.assert_allclose(got["v.new"], v, rtol=1e-5)
    np.testing.assert_allclose(got["mean"], m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["var"], v, rtol=1e-5)
    _, mean, variance = run(inference_form(proto), X=X)
    np.testing.assert_array_equal([mean, variance], [[0.5, 0], [2, 1]])


FROZEN, SEPARATE = "batch_norm='frozen'", "separate_merged"
REFUSED = {  # nodes, and what the message must name
    "Y = Relu(X)": ["the model has none", FROZEN],
    "k = Mul(m, s) Y = BatchNormalization(X, s, b, k, v)": ["'k' is no constant", FROZEN],
    "Y = BatchNormalization(X, s, b, m, s)": ["'s' is a running statistic", SEPARATE],
    "Z = BatchNormalization(X, s, b, m, v) Y = Add(Z, m)": ["'m' is a running", SEPARATE],
    """c = ReduceSum<keepdims=0>(X) d = Cast<to=9>(c)
    Y = If (d) <then_branch = f () => (float[N,2] y) { y = BatchNormalization(X, s, b, m, v) },
    else_branch = e () => (float[N,2] z) { z = Relu(X) }>""": ["is in a subgraph of If", FROZEN],
}


@pytest.mark.parametrize("body", REFUSED)
def test_statistics_that_cannot_be_updated_are_refused(body):
    proto = parse_model(f"{FLAT} {{ {body} }}")
    with pytest.raises(ValueError, match=naming(*REFUSED[body])):
        training_model(proto, "train")
    training_model(proto, "frozen")


def test_computed_statistics_are_left_as_they_are():
    text = """g (float[N,2] X, float[2] m, float[2] v) => (float[N,2] Y) <float[2] s = {1, 2}> {
        Y, a, c = BatchNormalization<training_mode=1>(X, s, s, m, v) }"""
    model, _ = training_model(parse_model(text), "frozen")
    X = RNG.normal(size=(6, 2)).astype(np.float32)
    want = (X - X.mean(0)) / X.std(0) * np.float32([1, 2]) + np.float32([1, 2])
    np.testing.assert_allclose(
        run(model, X=X, m=np.zeros(2, "f"), v=np.ones(2, "f"))[0], want, atol=1e-3
    )


def test_one_value_per_channel_fails():
    text = """g (float[{}] X) => (float[{}] Y) <float[2] s = {{1, 2}}, float[2] b = {{1, 2}},
        float[2] m = {{0.5, 0}}, float[2] v = {{2, 1}}> {{
        Y = BatchNormalization(X, s, b, m, v) }}"""
    with pytest.raises(ValueError, match=naming("per channel", "[1, 2]", "batch_norm='frozen'")):
        training_model(parse_model(text.format("1,2", "1,2")), "train")
    model, _ = training_model(parse_model(text.format("N,2", "N,2")), "train")
    v = np.ones(2, np.float32)
    with pytest.raises(Exception, match="per channel"):
        run(model, X=np.ones((1, 2), np.float32), m=v, v=v)
    unranked = parse_model(text.format("N,2", "N,2"))
    unranked.graph.input[0].type.tensor_type.ClearField("shape")
    unranked.graph.output[0].type.tensor_type.ClearField("shape")
    model, _ = training_model(unranked, "train")
    X = RNG.normal(size=(3, 2, 4)).astype(np.float32)
    new = run_named(model, X=X, m=v, v=v)["v.new"]
    np.testing.assert_allclose(new, 0.9 + 0.1 * X.var((0, 2), ddof=1), rtol=1e-5)


def test_a_momentum_that_changes_nothing_is_reported(caplog):
    text = f"{BN} {{ Y = BatchNormalization<momentum=1.0>(X, s, b, m, v) }}"
    with caplog.at_level("WARNING", "onnxgrad"):
        training_model(parse_model(text), "train")
    assert "statistics" in caplog.text


# -- merged statistics -------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [True, False])
def test_merged_tensors_are_separated(copied):
    if copied:
        nodes = [f"{n} = Identity({c})" for n, c in (("m", "zero"), ("v", "one"), ("w", "one"))]
        body = f"{' '.join(nodes)} h = BatchNormalization(X, one, zero, m, v)"
        body += "k = BatchNormalization(h, w, zero, zero, one)"
    else:
        body = """h = BatchNormalization(X, one, zero, zero, one)
            k = BatchNormalization(h, one, zero, zero, one)"""
    text = f"""g (float[N,2] X) => (float[N,2] Y) <float[2] one = {{1, 1}},
        float[2] zero = {{0, 0}}> {{ {body} Y = Add(k, zero) }}"""
    proto = parse_model(text)
    with pytest.raises(ValueError, match=naming("running statistic", "separate_merged")):
        training_model(proto, "train")
    separate = separate_statistics(proto)
    onnx.checker.check_model(separate, full_check=True)
    first, second = (n for n in separate.graph.node if n.op_type == "BatchNormalization")
    tensors = {*first.input[1:], *second.input[1:]}
    assert len(tensors) == 8
    assert "zero" not in tensors  # it is left to the Add
    assert first.input[1] == "one"
    if copied:
        assert list(first.input[3:]) == ["m", "v"]
        assert second.input[1] == "w"
    for operand in range(1, 5):
        for node in (first, second):
            want = np.full(2, operand in (1, 4), np.float32)
            np.testing.assert_array_equal(initializer_arrays(separate)[node.input[operand]], want)
    _, names = training_model(separate, "train")
    assert len(names) == 4
    assert separate_statistics(separate) is separate


def test_merged_tensors_that_do_not_train_stay_merged():
    proto = parse_model("""g (float[N,2] X) => (float[N,2] Y) <float[2] one = {1, 1},
        float[2] zero = {0, 0}, float[2,2] w = {1, 2, 3, 4}> { h = MatMul(X, w)
        Y = BatchNormalization(h, one, zero, zero, one) }""")
    X = RNG.normal(size=(4, 2)).astype(np.float32)
    frozen = Trainer(proto, "mse", train="w").fit(X, X + 1)
    assert list(frozen.model.graph.node) == list(proto.graph.node)
    assert [t.name for t in frozen.model.graph.initializer] == ["one", "zero", "w"]
    affine = Trainer(proto, "mse", train=["w", "one"]).fit(X, X + 1)
    stored = initializer_arrays(affine.model)
    assert (stored["one"] != 1).all()
    assert (stored[affine.model.graph.node[1].input[4]] == 1).all()
    updated = Trainer(proto, "mse", train="w", batch_norm="train").fit(X, X + 1)
    assert len(updated.state.buffers) == 2


def test_statistics_that_only_layers_share_stay_shared():
    nodes = "h = BatchNormalization(X, s, b, m, v)  Y = BatchNormalization(h, s, b, m, v)"
    proto = parse_model(f"{FLAT} {{ {nodes} }}")
    assert separate_statistics(proto) is proto


# -- the form that predicts --------------------------------------------------------------------


def test_a_model_in_inference_form_is_returned_itself():
    proto = parse_model("""g (float[N,2] X) => (float[N,2] Y) <float[2] s = {1, 2}, float r = {0.5},
        bool off = {0}> { h = BatchNormalization(X, s, s, s, s) k = Dropout(h, r)
        Y = Dropout(k, r, off) }""")
    assert inference_form(proto) is proto
    assert names_of_training_nodes(proto) == []


def test_a_mode_that_may_be_fed_counts_as_training():
    proto = parse_model("g (float[N,2] X, bool t) => (float[N,2] Y) { Y = Dropout(X, , t) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.array(False), "t"))
    assert names_of_training_nodes(proto) == ["Y"]
    got = inference_form(proto)
    assert [list(n.input) for n in got.graph.node] == [["X"]]
    assert [x.name for x in got.graph.input] == ["X", "t"]


INFERENCE = [  # opset, what the file has, what its inference form has
    (6, "Y = BatchNormalization(X, s, b, m, v)", "BatchNormalization<is_test=1>(X, s, b, m, v)"),
    (6, "Y = Dropout<ratio=0.3>(X)", "Dropout<ratio=0.3, is_test=1>(X)"),
    (9, "Y, m, v, c, d = BatchNormalization(X, s, b, m, v)", "BatchNormalization(X, s, b, m, v)"),
    (
        15,
        "Y, c, d = BatchNormalization<momentum=0.5, training_mode=1>(X, s, b, m, v)",
        "BatchNormalization<momentum=0.5>(X, s, b, m, v)",
    ),
    (13, "Y = Dropout<seed=7>(X, r, t)", "Dropout<seed=7>(X, r)"),
    (13, "k, Y = Dropout<seed=7>(X, , t) ".replace("k, Y", "Y, k"), "Dropout<seed=7>(X)"),
]


@pytest.mark.parametrize(("opset", "body", "want"), INFERENCE)
def test_inference_form(opset, body, want):
    text = """g (float[N,2,3] X) => (float[N,2,3] Y) <float[2] s = {1, 2}, float[2] b = {1, 2},
        float[2] m = {0.5, 0}, float[2] v = {2, 1}, float r = {0.5}, bool t = {1}>"""
    proto = parse_model(f"{text} {{ {body} }}", opset=opset)
    proto.graph.node[0].name = "n"
    proto.metadata_props.add(key="k", value="v")
    before = proto.SerializeToString()
    got = inference_form(proto)
    assert names_of_training_nodes(proto) == ["n"]
    assert proto.SerializeToString() == before
    outputs = body.split("=")[0].split(",")[:1] + (["k"] if "k = " in body else [])
    expected = parse_model(f"{text} {{ {', '.join(outputs)} = {want} }}", opset=opset)
    expected.graph.node[0].name = "n"
    expected.metadata_props.add(key="k", value="v")
    if "Dropout" in want and opset > 6:  # nothing else read it
        tensors = expected.graph.initializer
        tensors.remove(next(t for t in tensors if t.name == "t"))
    assert got == expected


def test_inference_form_of_subgraphs_functions_and_constants():
    proto = parse_model("""<ir_version: 8, opset_import: ["": 17, "f": 1]>
        g (float[N,2] X, bool c) => (float[N,2] Y) <float[2] s = {1, 2}> {
            t = Constant<value = bool {1}>()
            h = If (c) <then_branch = a () => (float[N,2] y) { r = Constant<value = float {0.5}>()
                y = Dropout(X, r, t) }, else_branch = e () => (float[N,2] z) { z = Relu(X) }>
            Y = f.norm(h, s) }
        <domain: "f", opset_import: ["": 17]> norm (x, s) => (y) {
            y, m, v = BatchNormalization<training_mode=1>(x, s, s, s, s) }""")
    got = inference_form(proto)
    assert [n.op_type for n in got.graph.node] == ["If", "norm"]
    branch = next(a.g for a in got.graph.node[0].attribute if a.name == "then_branch")
    assert [n.op_type for n in branch.node] == ["Constant", "Dropout"]  # of the ratio
    assert list(got.functions[0].node[0].output) == ["y"]
    assert not got.functions[0].node[0].attribute
    X = RNG.normal(size=(3, 2)).astype(np.float32)
    s = np.float32([1, 2])
    want = (X - s) / np.sqrt(s + 1e-5) * s + s
    np.testing.assert_allclose(run(got, X=X, c=np.True_)[0], want, rtol=1e-5, atol=1e-5)


def test_statistics_of_the_batch_that_are_used_are_refused():
    proto = parse_model(
        """g (float[N,2] X) => (float[N,2] Y, float[2] d) <float[2] s = {1, 2}> {
        Y, a, c, d, e = BatchNormalization(X, s, s, s, s) }""",
        opset=9,
    )
    with pytest.raises(ModelError, match=naming("'d'", "statistic", "export")):
        inference_form(proto)


# -- dropout -----------------------------------------------------------------------------------


def splitmix(z):
    """The finalizer of SplitMix64 as it is published, for one Python int."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def published_mask(seed, draw, index, size, ratio):
    """The mask, one number after the other."""
    stream = splitmix((splitmix(seed % 2**64) + (index + 1) * GAMMA) % 2**64)
    key = splitmix((stream + draw * GAMMA) % 2**64)
    words = [splitmix((key + i * GAMMA) % 2**64) for i in range(-(-size // 4))]
    sixteen = [w >> shift & 0xFFFF for shift in (0, 16, 32, 48) for w in words]
    return np.array([s ^ 0x8000 >= round(ratio * 65536) for s in sixteen[:size]])


DROPOUT = "g (float[N,K] X) => (float[N,K] Y) { a = Relu(X) Y = Abs(a) }"


@pytest.mark.parametrize(("shape", "declared"), [((3, 7), "N,K"), ((5, 4), "N,4"), ((2, 3), "2,3")])
def test_masks_are_those_of_the_published_generator(shape, declared):
    proto = parse_model(DROPOUT.replace("N,K", declared))
    model, _ = training_model(proto, dropout={"a": 0.3, "Y": 0.6}, seed=-5, gradients=["X"])
    X = 1 + np.abs(RNG.normal(size=shape)).astype(np.float32)
    for draw in (0, 12345678901):
        y, gradient = run(model, X=X, draw=np.int64(draw))
        masks = [
            published_mask(-5, draw, i, X.size, p).reshape(shape) for i, p in enumerate((0.3, 0.6))
        ]
        scale = masks[0] / (1 - round(0.3 * 65536) / 65536) * masks[1] / (1 - 39322 / 65536)
        np.testing.assert_allclose(y, X * scale, rtol=1e-6)
        np.testing.assert_allclose(gradient, 2 * X * scale**2, rtol=1e-5)


def test_masks_have_the_statistics_of_independent_draws():
    proto = parse_model("""g (float[N,K] X) => (float[N,K] A, float[N,K] B, float[N,K] C) {
        A = Identity(X) B = Abs(X) C = Relu(X) }""")
    dropout = {"A": 0.5, "B": 0.5, "C": 0.1}
    model, _ = training_model(proto, dropout=dropout)
    X = np.ones((200, 500), np.float32)
    a, b, c = (y != 0 for y in run(model, X=X, draw=np.float32(3).astype(np.int64)))
    other = run(model, X=X, draw=np.int64(4))[0] != 0
    seeded = run(training_model(proto, dropout=dropout, seed=1)[0], X=X, draw=np.int64(3))[0] != 0
    assert abs(c.mean() - 0.9) < 4 * np.sqrt(0.09 / c.size)
    quarter = a.ravel().reshape(4, -1)  # the elements that one 64-bit number serves
    pairs = [(a, b), (a, other), (a, seeded), (a[:, 1:], a[:, :-1]), (a[1:], a[:-1])]
    pairs += [(quarter[i], quarter[j]) for i in range(4) for j in range(i)]
    for mask in (a, b, other):
        assert abs(mask.mean() - 0.5) < 4 * 0.5 / np.sqrt(mask.size)
    for left, right in pairs:
        agree = (left == right).mean()
        assert abs(agree - 0.5) < 4 * 0.5 / np.sqrt(left.size)
    for mask in (a, b, other, seeded, quarter.T):  # of eight bits, each pattern is as likely
        counts = np.bincount(np.packbits(mask.ravel()), minlength=256)
        expected = counts.sum() / 256
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 4.5 * np.sqrt(2 * 255)
    rows = a.sum(1)  # binomial in each row
    assert abs(rows.var() / (500 * 0.25) - 1) < 4.5 * np.sqrt(2 / 200)


def test_a_second_session_draws_the_same_masks():
    model, _ = training_model(parse_model(DROPOUT), dropout={"a": 0.5})
    X = np.ones((30, 5), np.float32)
    first = [run(model, X=X, draw=np.int64(i))[0] for i in range(3)]
    np.testing.assert_array_equal(first[2], run(model, X=X, draw=np.int64(2))[0])
    assert not np.array_equal(first[0], first[1])


NODES = """g (float[N,4] X) => (float[N,4] Y, bool[N,4] mask) <float r = {0.25}, bool t = {1}> {
    a = Relu(X) b, mask = Dropout(a, r, t) c = Dropout(b, r) Y = Neg(c) }"""


@pytest.mark.parametrize(
    ("dropout", "chances"),
    [
        ({}, (0.25, 0.0)),
        ({"b": 0}, (0.0, 0.0)),
        ({"c": 0.5}, (0.25, 0.5)),
        ({"*": 0.5}, (0.5, 0.5)),  # the nodes of the file only
        ({"*": 0.5, "c": 0.0}, (0.5, 0.0)),
        ({"first": 0.6, "?": 0.0}, (0.0, 0.0)),
        ({"?": 0.0, "first": 0.6}, (0.6, 0.0)),
    ],
)
def test_dropout_nodes_of_the_file(dropout, chances):
    proto = parse_model(NODES)
    proto.graph.node[1].name = "first"
    model, _ = training_model(proto, dropout=dropout)
    assert "Dropout" not in operator_names(model)
    X = 1 + np.abs(RNG.normal(size=(500, 4))).astype(np.float32)
    y, mask = run(model, {"X": X, "draw": np.int64(1)})
    keep = (1 - chances[0]) * (1 - chances[1])
    assert abs(mask.mean() - (1 - chances[0])) < 4 * 0.5 / np.sqrt(X.size)
    assert abs((y != 0).mean() - keep) < 4 * 0.5 / np.sqrt(X.size)
    assert not (y != 0)[~mask].any()
    np.testing.assert_allclose(y[y != 0], (-X / keep)[y != 0], rtol=1e-4)


@pytest.mark.parametrize("batch_norm", ["frozen", "train"])
def test_dropout_after_a_batch_normalization(batch_norm):
    proto = parse_model(f"{BN} {{ Y, a, c = BatchNormalization<training_mode=1>(X, s, b, m, v) }}")
    feed = {"X": RNG.normal(size=(4, 2, 3)), "m": [0.5, 0], "v": [2, 1]}
    feed = {name: np.float32(value) for name, value in feed.items()}
    whole = run_named(training_model(proto, batch_norm)[0], feed)
    for pattern in ("Y", "*"):
        model, names = training_model(proto, batch_norm, {pattern: 0.5}, gradients=["X"])
        got = run_named(model, feed, draw=np.int64(0))
        mask = published_mask(0, 0, 0, 24, 0.5).reshape(4, 2, 3)
        np.testing.assert_allclose(got["Y"], 2 * whole["Y"] * mask, rtol=1e-6)
        for name in names:
            np.testing.assert_array_equal(got[f"{name}.new"], whole[f"{name}.new"])


def test_a_dropout_behind_a_batch_normalization_of_unknown_rank():
    proto = parse_model(
        f"{BN} {{ h = BatchNormalization(X, s, b, m, v) k = Dropout(X) Y = Add(h, k) }}"
    )
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    model, _ = training_model(proto, "train", {"k": 0.5})
    v = np.ones(2, np.float32)
    X = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    new = run_named(model, X=X, m=v, v=v, draw=np.int64(0))["v.new"]
    np.testing.assert_allclose(new, 0.9 + 0.1 * X.var((0, 2), ddof=1), rtol=1e-5)


def test_dropout_in_a_branch_but_in_no_loop():
    branch = """g (float[N,4] X, bool c) => (float[N,4] Y) {
        Y = If (c) <then_branch = a () => (float[N,4] y) { y = Relu(X) },
        else_branch = e () => (float[N,4] z) { z = Neg(X) }> }"""
    model, _ = training_model(parse_model(branch), dropout={"y": 0.5}, gradients=["X"])
    X = np.ones((100, 4), np.float32)
    for c in (True, False):
        y, gradient = run(model, X=X, c=np.bool_(c), draw=np.int64(0))
        assert (0.4 < (y == 0).mean() < 0.6) if c else (y == -1).all()
        np.testing.assert_array_equal(gradient == 0, y == 0)
    loop = """g (float[N,4] X) => (float[N,4] Y) <int64 n = {3}, bool t = {1}> {
        Y = Loop (n, t, X) <body = b (int64 i, bool k, float[N,4] h) => (bool l, float[N,4] z) {
            l = Identity(k) z = Relu(h) }> }"""
    with pytest.raises(ValueError, match=naming("'z'", "Loop", "dropout={'z': 0}")):
        training_model(parse_model(loop), dropout={"z": 0.5})


USED = "g (float[N,4] X) => (float[N,4] Y) <float r = {{0.5}}, bool t = {{1}}, bool f = {{0}}> {}"
IN_GRAPH = "{{ a = Neg(X)  d = Dropout(a{})  Y = Neg(d) }}"
IN_BRANCH = """{{ a = Neg(X)  s = ReduceSum<keepdims = 0>(X)  c = Equal(s, s)  k = If(c)<
    then_branch = u () => (float[N,4] e) {{ d = Dropout(a{})  e = Identity(d) }},
    else_branch = v () => (float[N,4] z) {{ z = Exp(a) }}>  Y = Neg(k) }}"""


@pytest.mark.parametrize("settings", ["", ", r, f", ", r, t"])
@pytest.mark.parametrize("nodes", [IN_GRAPH, in_sweep(IN_BRANCH)])
@pytest.mark.parametrize("dropout", [{}, {"d": 0}, {"d": 0.5}, {"a": 0.5}])
def test_a_rule_of_a_user_gives_the_gradient_of_dropout(dropout, nodes, settings):
    """It reads what a Dropout has, also where a mask is written for one that the file lacks."""
    operands = set()

    @rule("Dropout")
    def triple(op, node, g, *_):
        """y = x mask:  dx = 3 g, whatever the mask."""
        operands.add((node.op_type, len(node.inputs)))
        return [3.0 * g, *[None] * (len(node.inputs) - 1)]

    proto = parse_model(USED.format(nodes.format(settings)))
    model, _ = training_model(proto, dropout=dropout, gradients=["X"])
    active = "a" in dropout or dropout.get("d", 0.5 * settings.endswith("t"))
    X = RNG.normal(size=(100, 4)).astype(np.float32)
    found = run_named(model, {"X": X, "draw": np.int64(0)} if active else {"X": X})
    assert ((found["Y"] == 0).mean() > 0.4) if active else (found["Y"] == X).all()
    dropouts = 1 + ("a" in dropout)
    np.testing.assert_allclose(found["X_grad"], 2 * 3**dropouts * found["Y"], rtol=1e-6)
    assert operands <= {("Dropout", 1), ("Dropout", 3)}


FED_MODE = NODES.replace("N,4] X)", "N,4] X, bool t)").replace(", bool t = {1}", "")
FED_RATIO = NODES.replace("N,4] X)", "N,4] X, float r)").replace("float r = {0.25},", "")


@pytest.mark.parametrize(
    ("text", "dropout", "message"),
    [
        (DROPOUT, {"aa": 0.5}, r"dropout=\) 'aa'.* 'a'"),
        (DROPOUT, {"layer*": 0.5}, r"dropout=\) 'layer\*'"),
        (DROPOUT, {"a": 1.0}, r"'a' .*1.0.*\[0, 1\)"),
        (FED_MODE, {}, "training_mode of Dropout .*dropout="),
        (FED_RATIO, {}, "ratio of Dropout .*dropout="),
    ],
)
def test_refused_dropout(text, dropout, message):
    with pytest.raises(ValueError, match=message):
        training_model(parse_model(text), dropout=dropout)


def test_dropout_needs_a_draw_and_an_unknown_mode_is_refused():
    def form(**options):
        op = Emit(prepare(parse_model(DROPOUT)).graph)
        return training_form(op, **({"batch_norm": "frozen", "draw": None, "seed": 0} | options))

    assert form(dropout={}) == {}
    assert form(dropout={"a": 0}) == {}
    with pytest.raises(ValueError, match=naming("dropout at", "draw=")):
        form(dropout={"a": 0.5})
    with pytest.raises(ValueError, match=naming("batch_norm", "'trian'", "'train'")):
        form(dropout={}, batch_norm="trian")


FOLDED = {
    "plain": "h = Conv<pads=[1,1,1,1]>(x, w)  y = BatchNormalization(h, s, b, m, v)",
    "bias": "h = Conv(x, w, c)  y = BatchNormalization<epsilon=0.01>(h, s, b, m, v)",
    "groups": "h = Conv<group=2>(x, u)  y = BatchNormalization(h, s, b, m, v)",
    "in training": "h = Conv(x, w)  y = BatchNormalization<training_mode=0>(h, s, b, m, v)",
}
SEPARATE = {
    "read twice": "h = Conv(x, w)  k = BatchNormalization(h, s, b, m, v)  y = Add(h, k)",
    "a large weight": "h = Conv(x, l)  y = BatchNormalization(h, s, b, m, v)",
    "before": "h = BatchNormalization(x, s0, b0, m0, v0)  y = Conv(h, w)",
}


def convolution_model(nodes: str, pixels: str = "12,12") -> onnx.ModelProto:
    shapes = {"w": (4, 2, 3, 3), "u": (4, 1, 3, 3), "l": (4, 2, 12, 12), "c": 4, "s": 4, "b": 4}
    shapes |= {"m": 4, "v": 4, "s0": 2, "b0": 2, "m0": 2, "v0": 2}
    rng, read = np.random.default_rng(0), re.findall(r"\w+", nodes)
    arrays = {
        name: rng.uniform(0.2, 1.5, shape) * (1 if name[0] in "vl" else rng.choice([-1, 1], shape))
        for name, shape in shapes.items()
    }
    text = f"""g (float[N,2,{pixels}] x) => (float[N,1] o) {{
        {nodes}  q = Mul(y, y)  f = Flatten(q)  o = ReduceMean<keepdims=1>(f, axes) }}"""
    weights = {name: array.astype("f4") for name, array in arrays.items() if name in read}
    return parse_model(text, axes=np.array([1]), **weights)


def weights_after_two_steps(model, **options) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the weights after two steps, and the operators of the step."""
    trainer = Trainer(model, "squared_error", optimizer="sgd", learning_rate=0.01, **options)
    x = np.random.default_rng(1).normal(size=(6, 2, 12, 12)).astype("f4")
    trainer.fit(x, np.ones((6, 1), "f4"), batch_size=3, epochs=1, shuffle=False)
    gradients, _ = trainer.step_models(x, np.ones((6, 1), "f4"))
    return initializer_arrays(trainer.model), operator_names(gradients)


@pytest.mark.parametrize("name", [*FOLDED, *SEPARATE])
def test_frozen_statistics_are_part_of_the_convolution(name, monkeypatch):
    model = convolution_model((FOLDED | SEPARATE)[name])
    weights, operators = weights_after_two_steps(model)
    assert ("BatchNormalization" in operators) == (name in SEPARATE)
    monkeypatch.setattr("onnxgrad.training.recipe.fold_normalizations", lambda *_: None)
    wanted, operators = weights_after_two_steps(model)
    assert "BatchNormalization" in operators
    start = initializer_arrays(model)
    for weight, array in wanted.items():
        np.testing.assert_allclose(weights[weight], array, rtol=1e-4, atol=1e-5)
        fixed = weight == "axes" or weight[0] in "mv"
        assert (np.abs(array - start[weight]).max() == 0) == fixed


@pytest.mark.parametrize("options", [{"freeze": ["w"]}, {"batch_norm": "train"}])
def test_normalizations_that_are_not_folded(options):
    _, operators = weights_after_two_steps(convolution_model(FOLDED["plain"]), **options)
    assert "BatchNormalization" in operators


def test_images_of_any_size_train_as_those_of_one_size():
    """The number of pixels decides about folding: unknown, both nodes stay."""
    wanted, _ = weights_after_two_steps(convolution_model(FOLDED["plain"]))
    weights, operators = weights_after_two_steps(convolution_model(FOLDED["plain"], "H,W"))
    assert "BatchNormalization" in operators
    assert weights.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(weights[name], array, rtol=1e-4, atol=1e-5)


def test_a_folded_normalization_as_torch():
    torch = pytest.importorskip("torch")
    model = convolution_model(FOLDED["bias"])
    start = {name: torch.tensor(array) for name, array in initializer_arrays(model).items()}
    trained = {n: start[n].double().requires_grad_() for n in "wcsb"}
    optimizer = torch.optim.SGD(trained.values(), 0.01)
    x = np.random.default_rng(1).normal(size=(6, 2, 12, 12)).astype(np.float32)
    for part in (x[:3], x[3:]):
        h = torch.nn.functional.conv2d(torch.tensor(part).double(), trained["w"], trained["c"])
        mean, variance = start["m"].double(), start["v"].double()
        parts = (mean, variance, trained["s"], trained["b"], False, 0.1, 0.01)
        loss = ((torch.nn.functional.batch_norm(h, *parts) ** 2).mean((1, 2, 3)) - 1) ** 2
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    weights, _ = weights_after_two_steps(model)
    for name, tensor in trained.items():
        np.testing.assert_allclose(weights[name], tensor.detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "last"),
    [
        ("arrays", 5),
        ("list", 3),
        ("arrays", 17),
        *map(in_sweep, ["list", "arrays", "list"], [5, 3, 17]),
    ],
)
def test_accumulating_does_not_cut_a_short_batch_into_single_rows(form, last):
    """Against PyTorch, which steps on the halves of a whole batch and on a short one as it is."""
    torch = pytest.importorskip("torch")
    parts, size = (4 if last == 3 else 2), 32
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double()
    tensors = [net[0].weight, net[0].bias, net[0].running_mean, net[0].running_var]
    names = dict(zip("s b mean var w c".split(), [*tensors, *net[1].parameters()], strict=True))
    model = parse_model(
        """f (double[N,3] x) => (double[N,1] y) {
            n = BatchNormalization(x, s, b, mean, var)  y = Gemm<transB = 1>(n, w, c) }""",
        **{name: tensor.detach().numpy().copy() for name, tensor in names.items()},
    )
    X = np.random.default_rng(0).normal(size=(size + last, 3))
    Y = X.sum(axis=1, keepdims=True) ** 2
    pairs = [(X[:size], Y[:size]), (X[size:], Y[size:])]
    made = Trainer(
        model, "mse", optimizer="sgd", learning_rate=0.1, batch_norm="train", accumulate=parts
    )
    made.fit(*((X, Y) if form == "arrays" else (pairs,)), batch_size=size, shuffle=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for count, (x, y) in zip((parts, 1), pairs, strict=True):
        optimizer.zero_grad()
        for a, b in zip(np.split(x, count), np.split(y, count), strict=True):
            loss = torch.nn.functional.mse_loss(net(torch.from_numpy(a)), torch.from_numpy(b))
            (loss / count).backward()
        optimizer.step()
    values = made.state.weights | made.state.buffers
    for name in ("s", "b", "w", "c"):
        np.testing.assert_allclose(values[name], names[name].detach(), rtol=1e-9)
    np.testing.assert_allclose(values["mean"], names["mean"], rtol=1e-9)


ROWS_9 = RNG.normal(size=(9, 3)).astype(np.float32)
BATCHES_OF_4 = [(ROWS_9[i : i + 4], ROWS_9[i : i + 4, :1]) for i in (0, 4, 8)]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ((ROWS_9, ROWS_9[:, :1]), {}),
        ((BATCHES_OF_4,), {}),
        (([{"x": x, "label": y} for x, y in BATCHES_OF_4],), {}),
        ((ROWS_9[:8], ROWS_9[:8, :1]), {"accumulate": 4}),
    ],
)
def test_a_row_without_others_has_no_statistics(data, options):
    trainer = Trainer(normalized_model(), "squared_error", batch_norm="train", **options)
    parts = ["BatchNormalization", "two rows", "batch_size=", "batch_norm='frozen'"]
    with pytest.raises(ValueError, match=naming(*parts)):
        trainer.fit(*data, batch_size=4, epochs=2)
    assert not trainer.history
    with pytest.raises(ValueError, match=naming(*parts)):  # known when the batch is read
        trainer.fit(lambda: iter(BATCHES_OF_4))
    fine = Trainer(normalized_model(), "squared_error", batch_norm="train", accumulate=2)
    assert fine.fit(ROWS_9, ROWS_9[:, :1], batch_size=3).state.step == 3
