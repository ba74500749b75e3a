"""RNN, GRU and LSTM: their Scan against the fused kernels, their gradients against PyTorch."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.model.convert import to_proto
from tests.support.cases import run_in_dtype
from tests.support.errors import naming
from tests.support.models import add_initializers, operator_names, parse_model
from tests.support.packs import side_by_side
from tests.support.running import in_sweep

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TIME, BATCH, INPUT, HIDDEN = 4, 3, 2, 3
FILLED = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad


def outputs_of(kind: str) -> list[str]:
    return ["y", "yh", "yc"][: 2 + (kind == "LSTM")]


def node_model(
    kind: str,
    attributes: str = f"hidden_size={HIDDEN}",
    used: str = "",
    directions: int = 1,
    size: tuple = (TIME, BATCH),
    dtype: str = "float",
    opset: int = 22,
    rows_first: bool = False,
) -> onnx.ModelProto:
    """Return one node; `used` says which operands it has beside X, W, R: b, n, h, c, p."""
    wide, d = GATES[kind] * HIDDEN, directions
    time, batch = size
    state = f"{dtype}[{batch}, {d}, {HIDDEN}]" if rows_first else f"{dtype}[{d}, {batch}, {HIDDEN}]"
    x = f"{dtype}[{batch}, {time}, {INPUT}]" if rows_first else f"{dtype}[{time}, {batch}, {INPUT}]"
    types = {
        "x": x,
        "w": f"{dtype}[{d}, {wide}, {INPUT}]",
        "r": f"{dtype}[{d}, {wide}, {HIDDEN}]",
        "b": f"{dtype}[{d}, {2 * wide}]",
        "n": f"int32[{batch}]",
        "h": state,
        "c": state,
        "p": f"{dtype}[{d}, {3 * HIDDEN}]",
    }
    given = {v: t for v, t in types.items() if v in "xwr" + used}
    inputs = ", ".join(f"{t} {v}" for v, t in given.items())
    operands = ", ".join(v if v in given else "" for v in types).rstrip(", ")
    names = outputs_of(kind)
    made = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> g ({inputs}) => '
        f"({', '.join(f'{dtype} {y}' for y in names)}) "
        f"{{ {', '.join(names)} = {kind}<{attributes}>({operands}) }}"
    )
    for y in made.graph.output:
        y.type.tensor_type.ClearField("shape")
    return made


def drawn_operands(model: onnx.ModelProto, lengths=(2, 4, 1), seed=0) -> dict[str, np.ndarray]:
    """Return operands; lengths known by a symbol are those of the constants above."""
    rng, known = np.random.default_rng(seed), {"T": TIME, "N": BATCH}
    made = {}
    for x in model.graph.input:
        shape = [d.dim_value or known[d.dim_param] for d in x.type.tensor_type.shape.dim]
        made[x.name] = rng.standard_normal(shape)
    return made | ({"n": np.array(lengths, np.int32)} if "n" in made else {})


def lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with Scans in place of what is recurrent."""
    made = to_proto(prepare(model, on_demand=True))
    assert {n.op_type for n in made.graph.node}.isdisjoint(GATES)
    assert "Scan" in {n.op_type for n in made.graph.node}
    return made


def assert_same_arrays(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# -- the forward pass: onnxruntime's fused kernels are the witness --------------------------------


FLAGS = {"RNN": ("",), "GRU": ("linear_before_reset=1", ""), "LSTM": ("input_forget=1", "")}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("way", [in_sweep("forward"), in_sweep("reverse"), "bidirectional"])
@pytest.mark.parametrize(
    "size",
    [(TIME, BATCH), in_sweep(("T", "N"))],
    ids=["lengths", "symbols"],
)
def test_forward_is_that_of_the_kernel(kind, way, size):
    """Every flag beside every set of operands, each a node of one model."""
    initial = "hc" if kind == "LSTM" else "h"
    optional = ["b", "n", initial] + ["p"] * (kind == "LSTM")
    given = "".join(optional)
    made = node_model(kind, used=given, directions=1 + (way == "bidirectional"), size=size)
    del made.graph.node[:], made.graph.output[:]
    for i, (flag, clip, *used) in enumerate(
        product(FLAGS[kind], ("", "clip=0.3"), *(("", o) for o in optional))
    ):
        attributes = [f'direction="{way}"', f"hidden_size={HIDDEN}", flag, clip]
        node = node_model(kind, ", ".join(filter(None, attributes)), "".join(used))
        for y in node.graph.output:
            y.name += str(i)
        for k, name in enumerate(node.graph.node[0].output):
            node.graph.node[0].output[k] = f"{name}{i}"
        made.graph.node.extend(node.graph.node)
        made.graph.output.extend(node.graph.output)
    arrays = drawn_operands(made)
    assert_same_arrays(run_in_dtype(lowered(made), arrays), run_in_dtype(made, arrays))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("way", ["forward", "reverse"])
def test_sequences_without_a_step_end_with_zeros(kind, way):
    model = node_model(kind, f'direction="{way}", hidden_size={HIDDEN}', "nh")
    arrays = drawn_operands(model, lengths=(0, 3, 0))
    found = run_in_dtype(lowered(model), arrays)
    assert_same_arrays(found, run_in_dtype(model, arrays))
    assert not found[1][0, 0].any()


FUNCTIONS = """Relu Tanh Sigmoid Affine LeakyRelu ThresholdedRelu ScaledTanh HardSigmoid Elu
    Softsign Softplus""".split()


def assert_as_kernels(models: list[onnx.ModelProto]) -> None:
    """Compare lowered nodes with the kernels, all in one model."""
    whole = side_by_side(models)
    feed = {f"r{i}_{n}": a for i, m in enumerate(models) for n, a in drawn_operands(m).items()}
    assert_same_arrays(run_in_dtype(lowered(whole), feed), run_in_dtype(whole, feed))


@pytest.mark.parametrize("kind", GATES)
def test_activations(kind):
    count, models = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind], []
    for function in FUNCTIONS:
        names = ([function, "Tanh", "Softplus", "Sigmoid"] * 2)[1 : 1 + 2 * count]
        names[-1] = function  # only the last direction has it, and what its numbers are is counted
        listed = ", ".join(f'"{name}"' for name in names)
        attributes = f"""direction="bidirectional", hidden_size={HIDDEN}, activations=[{listed}],
            activation_alpha=[0.3, 0.8], activation_beta=[0.2, 0.7]"""
        models.append(node_model(kind, attributes, "b", 2))
    assert_as_kernels(models)


def test_numbers_of_activations_by_default():
    names = [f for f in FUNCTIONS if f not in ("Affine", "ScaledTanh")]
    attributes = [f'hidden_size={HIDDEN}, activations=["{name}"]' for name in names]
    assert_as_kernels([node_model("RNN", a, "b") for a in attributes])


def test_numbers_are_consumed_in_order_by_those_that_take_them():
    attributes = f"""hidden_size={HIDDEN}, activations=["Sigmoid", "ScaledTanh", "Affine"],
        activation_alpha=[0.5, 0.7], activation_beta=[0.3, 0.4]"""
    model = node_model("LSTM", attributes)
    arrays = drawn_operands(model)
    assert_same_arrays(run_in_dtype(lowered(model), arrays), run_in_dtype(model, arrays))


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ('activations=["Affine"]', ["affine", "activation_alpha"]),
        ('activations=["ScaledTanh"], activation_alpha=[1.0]', ["scaledtanh", "activation_beta"]),
        ('activations=["Foo"]', ["RNN", "'foo'", "relu"]),
        (
            'activations=["Tanh"], direction="bidirectional"',
            ["RNN", "must list 2 names"],
        ),
    ],
)
def test_refusals(attributes, named):
    model = node_model("RNN", attributes, directions=1 + ("bi" in attributes))
    with pytest.raises(NoGradientRule, match=naming(*named)):
        onnx_derivative(model)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("way", ["forward", "bidirectional"])
def test_rows_first(kind, way):
    """onnxruntime has no kernel: the same with the axes moved has, and so has onnx.reference."""
    attributes, d = f'direction="{way}", hidden_size={HIDDEN}', 1 + (way == "bidirectional")
    initial = "hc" if kind == "LSTM" else "h"
    model = node_model(kind, f"{attributes}, layout=1", "b" + initial, d, rows_first=True)
    arrays = {n: a.astype(np.float32) for n, a in drawn_operands(model).items()}
    found = run_in_dtype(lowered(model), arrays)
    moved = {n: a.swapaxes(0, 1) if n in "xhc" else a for n, a in arrays.items()}
    y, *states = run_in_dtype(node_model(kind, attributes, "b" + initial, d), moved)
    assert_same_arrays(found, [y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in states)])
    assert_same_arrays(found, ReferenceEvaluator(model).run(None, arrays))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", ["double", "float16"])
def test_every_float(kind, dtype):
    expected = run_in_dtype(
        node_model(kind, used="bh"), drawn_operands(node_model(kind, used="bh"))
    )
    model = node_model(kind, used="bh", dtype=dtype)
    kinds = {"double": np.float64, "float16": np.float16}
    arrays = {n: a.astype(kinds[dtype]) for n, a in drawn_operands(model).items()}
    session = ort.InferenceSession(lowered(model).SerializeToString())
    assert_same_arrays(session.run(None, arrays), expected, 1e-5 if dtype == "double" else 0.02)
    session = ort.InferenceSession(onnx_derivative(model, options=FILLED).SerializeToString())
    assert {a.dtype for a in session.run(None, arrays)} == {np.dtype(kinds[dtype])}


@pytest.mark.parametrize("opset", [7, 14])
@pytest.mark.parametrize("kind", GATES)
def test_older_versions_and_no_hidden_size(kind, opset):
    arrays = drawn_operands(node_model(kind))
    model = node_model(kind, 'direction="forward"', opset=opset)
    assert_same_arrays(run_in_dtype(lowered(model), arrays), run_in_dtype(node_model(kind), arrays))


def test_outputs_that_are_left_out():
    text = f"""<ir_version: 9, opset_import: ["": 22]>
        g (float[T, N, 2] x, float[1, 12, 2] w, float[1, 12, 3] r) => (float[1, N, 3] c)
        {{ , , c = LSTM<hidden_size={HIDDEN}>(x, w, r) }}"""
    model = onnx.parser.parse_model(text)
    arrays = drawn_operands(model)
    assert_same_arrays(run_in_dtype(lowered(model), arrays), run_in_dtype(model, arrays))
    assert check_gradient(model, feed=arrays).ok


# -- shapes, and what stays -----------------------------------------------------------------------


def test_shapes_are_stated_with_their_symbols():
    made = prepare(node_model("GRU", used="bn", size=("T", "N")), on_demand=True)
    shapes = {y.name: str(y.shape) for node in made.graph for y in node.outputs}
    assert shapes["y"] == "[T,1,N,3]"
    assert shapes["yh"] == "[1,N,3]"
    [scan] = [node for node in made.graph if node.op_type == "Scan"]
    body = scan.attributes["body"].as_graph()
    assert [str(v.shape) for v in body.inputs] == ["[N,3]", "[N,6]", "[N,3]", "[N,1]"]


def test_what_no_gradient_reaches_stays_as_it_is():
    text = """<ir_version: 9, opset_import: ["": 22]>
        g (float[5, 2, 2] x, float[3] s) => (float[5, 1, 2, 3] z)
        <float[1, 3, 2] w = {1, 2, 3, 4, 5, 6}, float[1, 3, 3] r = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
        { y = RNN<hidden_size=3>(x, w, r)  z = Mul(y, s) }"""
    model = onnx.parser.parse_model(text)
    frozen = operator_names(onnx_derivative(model, weights=[], inputs=["s"], options=FILLED))
    assert "RNN" in frozen
    assert "Scan" not in frozen
    asked = operator_names(onnx_derivative(model, weights=[], inputs=["x"], options=FILLED))
    assert "RNN" not in asked
    assert asked.count("Scan") == 2


def test_its_outputs_may_be_those_of_the_model():
    """The kernel is not run beside the Scan."""
    made = onnx_derivative(node_model("LSTM"), options=FILLED)
    assert "LSTM" not in operator_names(made)
    assert [y.name for y in made.graph.output][-3:] == ["y", "yh", "yc"]
    stopped = onnx_derivative(node_model("LSTM"), inputs=["x"], stop_gradient=["y"], options=FILLED)
    assert [y.name for y in stopped.graph.output] == ["x_grad", "y", "yh", "yc"]


def test_one_value_may_be_several_operands():
    text = """<ir_version: 9, opset_import: ["": 22]>
        g (float[1, 3, 3] x, float[1, 1, 3] h) => (float[1, 1, 1, 3] y)
        { i = Tanh(h)  q = Exp(i)  v = Mul(x, q)  y = RNN<hidden_size=3>(i, v, v, , , q) }"""
    assert check_gradient(onnx.parser.parse_model(text)).ok


def test_inside_of_a_branch_and_of_a_loop():
    head = """<ir_version: 9, opset_import: ["": 22]> g (float[3, 2, 2] x, float[1, 2, 2] h,
        float[1, 6, 2] w, float[1, 6, 2] r, bool q) => (float[1, 2, 2] y)"""
    step = "= GRU<hidden_size=2>(x, w, r, , ,"
    held = f"""{{ y = If(q) <
        then_branch = a () => (float[1, 2, 2] s) {{ , s {step} h) }},
        else_branch = b () => (float[1, 2, 2] t) {{
            k = Constant<value_int=2>()  more = Constant<value = bool {{1}}>()
            t = Loop(k, more, h) <body = c (int64 i, bool go, float[1, 2, 2] e)
                => (bool on, float[1, 2, 2] f) {{ on = Identity(go)  , f {step} e) }}> }}> }}"""
    once, twice = f"{{ , y {step} h) }}", f"{{ , e {step} h)  , y {step} e) }}"
    made = onnx_derivative(onnx.parser.parse_model(head + held), options=FILLED)
    arrays = drawn_operands(made)
    for q, plain in ((True, once), (False, twice)):
        expected = onnx_derivative(onnx.parser.parse_model(head + plain), options=FILLED)
        fed = arrays | {"q": np.array(q)}
        assert_same_arrays(run_in_dtype(made, fed), run_in_dtype(expected, fed))


# -- gradients: PyTorch is the witness ------------------------------------------------------------

NAMES = ("w", "r", "b")
ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}  # PyTorch's gates in ONNX's order


def weights_of(layer, kind: str, index: int, directions: int, gradients: bool = False) -> list:
    """Return W, R and B as ONNX has them, or their gradients, of a layer of PyTorch."""

    def stacked(name):
        made = []
        for suffix in ("", "_reverse")[:directions]:
            v = getattr(layer, f"{name}_l{index}{suffix}")
            v = (v.grad if gradients else v.detach()).numpy()
            made.append(v.reshape(GATES[kind], HIDDEN, -1)[ORDER[kind]].reshape(v.shape))
        return np.stack(made)

    bias = np.concatenate([stacked("bias_ih"), stacked("bias_hh")], axis=1)
    return [stacked("weight_ih"), stacked("weight_hh"), bias]


def two_recurrent_layers(kind: str, directions: int, packed: bool) -> onnx.ModelProto:
    """Return two layers, written as PyTorch's exporter writes them."""
    d, wide = directions, GATES[kind] * HIDDEN
    way = "bidirectional" if d == 2 else "forward"
    linear = ", linear_before_reset=1" if kind == "GRU" else ""
    node = f'{kind}<hidden_size={HIDDEN}, direction="{way}"{linear}>'
    n, lengths = (", n", ", int32[N] n") if packed else (", ", "")
    declared = ", ".join(
        f"float[{d}, {wide}, {i}] w{k}, float[{d}, {wide}, {HIDDEN}] r{k}, "
        f"float[{d}, {2 * wide}] b{k}"
        for k, i in ((0, INPUT), (1, d * HIDDEN))
    )
    return parse_model(
        f"""g (float[T, N, {INPUT}] x, {declared}{lengths})
        => (float[T, N, {d * HIDDEN}] y, float[{d}, N, {HIDDEN}] s)
        {{ a = {node}(x, w0, r0, b0{n})  m = Transpose<perm=[0, 2, 1, 3]>(a)
           k = Constant<value_ints=[0, 0, -1]>()  h = Reshape(m, k)
           c, s = {node}(h, w1, r1, b1{n})  e = Transpose<perm=[0, 2, 1, 3]>(c)
           y = Reshape(e, k) }}""",
        opset=17,
    )


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("directions", "packed"), [(2, True), *map(in_sweep, (1, 1, 2), (False, True, False))]
)
def test_two_layers_as_in_torch(kind, directions, packed):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = getattr(torch.nn, kind)(INPUT, HIDDEN, 2, bidirectional=directions == 2)
    x = torch.randn(TIME, BATCH, INPUT, requires_grad=True)
    lengths = torch.tensor([2, 4, 1])
    utils = torch.nn.utils.rnn

    def forward():
        if not packed:
            y, state = layer(x)
        else:
            made, state = layer(utils.pack_padded_sequence(x, lengths, enforce_sorted=False))
            y, _ = utils.pad_packed_sequence(made, total_length=TIME)
        return y, (state[0] if kind == "LSTM" else state)[-directions:]

    u, v = torch.randn(TIME, BATCH, directions * HIDDEN), torch.randn(directions, BATCH, HIDDEN)
    weights = list(layer.parameters())

    def gradients(create_graph=False):
        y, s = forward()
        total = (u * y).sum() + (v * s).sum()
        return torch.autograd.grad(total, [x, *weights], create_graph=create_graph)

    def by_onnx(gs):
        """Return dx, then the gradients of W, R and B of each layer, as ONNX has them."""
        for p, g in zip(weights, gs[1:], strict=True):
            p.grad = g.detach()
        layers = [weights_of(layer, kind, i, directions, gradients=True) for i in (0, 1)]
        return [gs[0].detach().numpy(), *layers[0], *layers[1]]

    expected = by_onnx(gradients())
    names = ["x"] + [f"{n}{i}" for i in (0, 1) for n in NAMES]
    values = [a for i in (0, 1) for a in weights_of(layer, kind, i, directions)]
    point = dict(zip(names, [x.detach().numpy(), *values], strict=True))
    fed = point | {"n": lengths.numpy().astype(np.int32), "y_grad": u.numpy(), "s_grad": v.numpy()}
    model = two_recurrent_layers(kind, directions, packed)
    assert_same_arrays(run_in_dtype(model, fed), [t.detach().numpy() for t in forward()])
    first = onnx_derivative(model)
    assert_same_arrays(run_in_dtype(first, fed), expected)

    along = [torch.randn_like(p) for p in (x, *weights)]
    made = gradients(create_graph=True)
    product_ = sum((g * a).sum() for g, a in zip(made, along, strict=True))
    expected = by_onnx(torch.autograd.grad(product_, [x, *weights]))
    directions_ = dict(zip(names, by_onnx(along), strict=True))
    second = onnx_derivative(first, inputs=names)
    fed |= {f"{n}_grad_grad": a for n, a in directions_.items()}
    assert_same_arrays(run_in_dtype(second, fed), expected, 1e-4)


# -- training -------------------------------------------------------------------------------------


def recurrent_classifier(rng: np.random.Generator) -> onnx.ModelProto:
    """Return an LSTM with a linear layer behind its last state."""
    made = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (float[N, 6, 2] X, float[N, 1] label) => (float loss, float[N, 1] p) {
            x = Transpose<perm=[1, 0, 2]>(X)
            , h, = LSTM<hidden_size=5>(x, W, R, B)
            zero = Constant<value_ints=[0]>()  s = Squeeze(h, zero)
            q = MatMul(s, V)  p = Add(q, c)
            d = Sub(p, label)  e = Mul(d, d)  loss = ReduceSum<keepdims=0>(e) }""")
    shapes = {"W": (1, 20, 2), "R": (1, 20, 5), "B": (1, 40), "V": (5, 1), "c": (1,)}
    drawn = {n: rng.standard_normal(s).astype(np.float32) * 0.4 for n, s in shapes.items()}
    add_initializers(made, drawn)
    return made


def test_training_brings_the_node_back_with_new_weights():
    rng = np.random.default_rng(0)
    model = recurrent_classifier(rng)
    X = rng.standard_normal((64, 6, 2)).astype(np.float32)
    y = X[:, -3:].sum(axis=(1, 2))[:, None].astype(np.float32) / 3
    weights = ["W", "R", "B", "V", "c"]
    fitted = OrtGradientOptimizer(model, weights, max_iter=30, learning_rate=0.1, batch_size=8)
    fitted.fit(X, y)
    assert fitted.train_losses_[-1] < 0.3 * fitted.train_losses_[0]
    trained = fitted.get_trained_onnx()
    assert operator_names(trained) == operator_names(model)
    for before, after in zip(model.graph.initializer, trained.graph.initializer, strict=True):
        assert before.name == after.name
        changed = not np.array_equal(*map(numpy_helper.to_array, (before, after)))
        assert changed
    loss, _ = run_in_dtype(trained, {"X": X, "label": y})
    np.testing.assert_allclose(loss / len(X), fitted.train_losses_[-1], rtol=0.3)


@pytest.mark.parametrize("way", ["forward", "reverse"])
@pytest.mark.parametrize("kind", GATES)
def test_all_stacks_of_a_direction_are_in_one_order(kind, way):
    """Values stacked in both orders would be in memory twice."""
    made = onnx_derivative(node_model(kind, f'direction="{way}", hidden_size={HIDDEN}', "b"))
    scans = [n for n in made.graph.node if n.op_type == "Scan"]
    assert len(scans) == 2
    for scan in scans:
        given = {a.name: a for a in scan.attribute}
        for name in ("scan_input_directions", "scan_output_directions"):
            assert name not in given or len(set(given[name].ints)) < 2
