"""Inserted BatchNormalization and Dropout: identity first, PyTorch's steps, and folded again."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model.notes import trained_dropout
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import run, run_named

R = np.random.default_rng(0)


def draw_weights(*shape):
    return R.normal(0, 0.5, shape).astype(np.float32)


LAYERS = {  # operator: text, weights, shape of a row
    "Conv": (
        "f (float[N,3,5,5] x) => (float[N,4,3,3] y) { h = Conv(x, w, b)  y = Tanh(h) }",
        {"w": draw_weights(4, 3, 3, 3), "b": draw_weights(4)},
        (3, 5, 5),
    ),
    "Conv of 1 dimension, depthwise": (
        "f (float[N,4,L] x) => (float[N,4,M] y) { h = Conv<group = 4>(x, w)  y = Tanh(h) }",
        {"w": draw_weights(4, 1, 2)},
        (4, 6),
    ),
    "Conv of 3 dimensions": (
        "f (float[N,2,4,4,4] x) => (float[N,3,3,3,3] y) { h = Conv(x, w, b)  y = Tanh(h) }",
        {"w": draw_weights(3, 2, 2, 2, 2), "b": draw_weights(3)},
        (2, 4, 4, 4),
    ),
    "ConvTranspose": (
        "f (float[N,4,3,3] x) => (float[N,6,4,4] y) { h = ConvTranspose<group = 2>(x, w, b) "
        "y = Tanh(h) }",
        {"w": draw_weights(4, 3, 2, 2), "b": draw_weights(6)},
        (4, 3, 3),
    ),
    "Gemm": (
        "f (float[N,3] x) => (float[N,4] y) { h = Gemm<transB = 1, alpha = 0.5, beta = 2.0>"
        "(x, w, b)  y = Tanh(h) }",
        {"w": draw_weights(4, 3), "b": draw_weights(1, 4)},
        (3,),
    ),
    "Gemm without bias": (
        "f (float[N,3] x) => (float[N,4] y) { h = Gemm(x, w)  y = Tanh(h) }",
        {"w": draw_weights(3, 4)},
        (3,),
    ),
    "MatMul": (
        "f (float[N,3] x) => (float[N,4] y) { h = MatMul(x, w)  y = Tanh(h) }",
        {"w": draw_weights(3, 4)},
        (3,),
    ),
    "MatMul in front of a bias": (
        "f (float[N,3] x) => (float[N,4] y) { h = MatMul(x, w)  k = Add(h, b)  y = Tanh(k) }",
        {"w": draw_weights(3, 4), "b": draw_weights(4)},
        (3,),
    ),
    "MatMul from the left": (
        "f (float[N,3,5] x) => (float[N,4,5] y) { h = MatMul(w, x)  y = Tanh(h) }",
        {"w": draw_weights(4, 3)},
        (3, 5),
    ),
    "Add": (
        "f (float[N,3] x) => (float[N,4] y) { k = MatMul(x, w)  h = Add(b, k)  y = Tanh(h) }",
        {"w": draw_weights(3, 4), "b": draw_weights(4)},
        (3,),
    ),
    "Add behind a convolution": (
        "f (float[N,3,5] x) => (float[N,4,4] y) { k = Conv(x, w, b)  h = Add(k, c)  y = Tanh(h) }",
        {"w": draw_weights(4, 3, 2), "b": draw_weights(4), "c": draw_weights(4, 1)},
        (3, 5),
    ),
}


def rows_for(shape, count=12):
    return (R.normal(size=(count, *shape)) * 2 + 0.5).astype(np.float32)


def trained_statistics(model):
    """Return a model with random numbers in all tensors of BatchNormalization."""
    changed = {}
    for name, array in initializer_arrays(model).items():
        if ".batch_norm." in name:
            drawn_numbers = R.uniform(0.5, 2, array.shape).astype(array.dtype)
            changed[name] = drawn_numbers
    return og.graph.replace_initializers_into_onnx(model, changed)


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("case", LAYERS)
def test_a_batch_norm_changes_nothing_and_is_folded_again(case, with_data):
    text, weights, shape = LAYERS[case]
    model, operator, X = parse_model(text, **weights), case.split()[0], rows_for(shape)
    before = model.SerializeToString()
    inserted = og.insert_batch_norm(model, after=operator, data=X if with_data else None)
    assert model.SerializeToString() == before
    onnx.checker.check_model(inserted, full_check=True)
    [want], [got] = run(model, x=X), run(inserted, x=X)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    [node] = [n for n in inserted.graph.node if n.op_type == "BatchNormalization"]
    assert node.output[0] == "h"
    if with_data:
        h = run_named(og.graph.select_model_inputs_outputs(model, outputs=["h"]), x=X)["h"]
        own = initializer_arrays(inserted)
        axes = (0, *range(2, h.ndim))
        np.testing.assert_allclose(own[node.input[3]], h.mean(axes), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own[node.input[4]], h.var(axes, ddof=1), rtol=1e-5)

    changed = trained_statistics(inserted)
    folded = og.graph.fold_batch_norm(changed)
    onnx.checker.check_model(folded, full_check=True)
    assert "BatchNormalization" not in operator_names(folded)
    np.testing.assert_allclose(run(folded, x=X)[0], run(changed, x=X)[0], rtol=1e-5, atol=2e-6)
    has_bias = operator != "MatMul" or "bias" in case
    assert operator_names(folded) == (
        operator_names(model) if has_bias else ["MatMul", "Add", "Tanh"]
    )
    assert set(weights) <= set(initializer_arrays(folded))
    assert not [name for name in initializer_arrays(folded) if ".batch_norm." in name]


@pytest.mark.parametrize(
    ("dtype", "opset", "tolerance"),
    [("float16", 18, 4e-3), ("float16", 13, 4e-3), ("double", 18, 1e-13), ("float", 7, 1e-6)],
)
def test_other_dtypes_and_opsets(dtype, opset, tolerance):
    kind = {"float16": np.float16, "double": np.float64, "float": np.float32}[dtype]
    text = f"f ({dtype}[N,3] x) => ({dtype}[N,2] y) {{ y = MatMul(x, w) }}"
    model = parse_model(text, opset=opset, ir_version=8, w=draw_weights(3, 2).astype(kind))
    X = rows_for((3,)).astype(kind)
    inserted = og.insert_batch_norm(model, after="MatMul", data=X)
    onnx.checker.check_model(inserted, full_check=True)
    [want], [got] = run(model, x=X), run(inserted, x=X)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    if dtype == "float16":
        with pytest.raises(ValueError, match=naming("'y'", "FLOAT16", "after=")):
            og.insert_batch_norm(model, after="MatMul", data=300 * X)
    folded = og.graph.fold_batch_norm(trained_statistics(inserted))
    assert initializer_arrays(folded)["w"].dtype == kind
    dropping = og.insert_dropout(model, after="MatMul", rate=0.25)
    onnx.checker.check_model(dropping, full_check=True)
    np.testing.assert_array_equal(run(dropping, x=X)[0], want)
    drawn_rows = og.predict_samples(dropping, X, 200).samples
    share = (drawn_rows == 0).mean()
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / drawn_rows.size)


SHARED = """f (float[N,3] x) => (float[N,4] h, float[N,4] y, float[N,4] z) {
    h = MatMul(x, w)  y = Relu(h)  k = Add(h, y)  l = MatMul(x, w)  z = Add(k, l) }"""


def test_a_value_with_several_readers_that_is_an_output():
    model, X = parse_model(SHARED, w=draw_weights(3, 4)), rows_for((3,))
    want = run_named(model, x=X)
    for insert in (
        lambda: og.insert_batch_norm(model, after="h", data=X),
        lambda: og.insert_dropout(model, after="h", rate=0.5),
    ):
        inserted = insert()
        onnx.checker.check_model(inserted, full_check=True)
        assert list(inserted.graph.output) == list(model.graph.output)
        got = run_named(inserted, x=X)
        for name, array in want.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)
    normalized = trained_statistics(og.insert_batch_norm(model, after="h"))
    got = run_named(normalized, x=X)
    np.testing.assert_array_equal(got["y"], np.maximum(got["h"], 0))  # all readers read it
    # the second product needs the old weights: the first one gets a copy
    folded = og.graph.fold_batch_norm(normalized)
    onnx.checker.check_model(folded, full_check=True)
    assert len(initializer_arrays(folded)) == 3
    np.testing.assert_array_equal(initializer_arrays(folded)["w"], initializer_arrays(model)["w"])
    for name, array in run_named(folded, x=X).items():
        np.testing.assert_allclose(array, got[name], rtol=1e-5, atol=2e-6)


STAY = {  # a normalization that no layer in front can take
    "two readers": "h = MatMul(x, w) k = BatchNormalization(h, s, s, s, s) y = Add(h, k)",
    "an activation": "h = MatMul(x, w) r = Relu(h) y = BatchNormalization(r, s, s, s, s)",
    "an input": "h = BatchNormalization(x, s, s, s, s) y = MatMul(h, w)",
    "computed weights": "v = Neg(w) h = MatMul(x, v) y = BatchNormalization(h, s, s, s, s)",
    "computed bias": "c = Neg(s) h = Gemm(x, w, c) y = BatchNormalization(h, s, s, s, s)",
    "computed scale": "c = Neg(s) h = MatMul(x, w) y = BatchNormalization(h, c, s, s, s)",
    "two rows of inputs": "h = MatMul(x, x) y = BatchNormalization(h, s, s, s, s)",
}


@pytest.mark.parametrize("case", STAY)
def test_normalizations_that_stay(case, caplog):
    text = f"f (float[3,3] x) => (float[3,3] y) {{ {STAY[case]} }}"
    model, X = parse_model(text, w=draw_weights(3, 3), s=[1.0, 2.0, 3.0]), rows_for((3,), 3)
    with caplog.at_level("INFO", "onnxgrad"):
        folded = og.graph.fold_batch_norm(model)
    assert "BatchNormalization" in operator_names(folded)
    assert "not folded" in caplog.text
    np.testing.assert_allclose(run(folded, x=X)[0], run(model, x=X)[0], rtol=1e-6)


def test_channels_of_a_product_of_three_axes_are_not_mistaken():
    """The units of x W are on the last axis, which has the length of axis 1 here."""
    text = """f (float[N,4,3] x) => (float[N,4,4] y) {
        h = MatMul(x, w)  y = BatchNormalization(h, s, s, s, s) }"""
    model, X = parse_model(text, w=draw_weights(3, 4), s=[1.0, 2.0, 3.0, 4.0]), rows_for((4, 3))
    folded = og.graph.fold_batch_norm(model)
    assert operator_names(folded) == ["MatMul", "BatchNormalization"]
    np.testing.assert_allclose(run(folded, x=X)[0], run(model, x=X)[0], rtol=1e-6)


def test_two_normalizations_and_weights_in_other_places():
    """Constant nodes, copies by Identity, and training mode, as exporters write them."""
    text = """f (float[N,3] x) => (float[N,4] y) {
        v = Identity(w)  b = Constant<value = float[4] {1, 2, 3, 4}>()  h = Gemm(x, v, b)
        i, m, t = BatchNormalization<training_mode = 1, epsilon = 0.1>(h, s, b, s, s)
        j = BatchNormalization(i, s, s, s, s)  y = Relu(j) }"""
    model, X = parse_model(text, w=draw_weights(3, 4), s=[1.0, 2.0, 3.0, 4.0]), rows_for((3,))
    folded = og.graph.fold_batch_norm(model)
    onnx.checker.check_model(folded, full_check=True)
    assert operator_names(folded) == ["Gemm", "Relu"]
    assert len(folded.graph.initializer) == 2
    h = X @ initializer_arrays(model)["w"] + np.arange(1, 5)
    s = np.arange(1, 5)
    h = (h - s) / np.sqrt(s + 0.1) * s + s
    h = (h - s) / np.sqrt(s + 1e-5) * s + s
    np.testing.assert_allclose(run(folded, x=X)[0], np.maximum(h, 0), rtol=1e-5, atol=1e-5)


# -- patterns --------------------------------------------------------------------------------------


def partly_normalized_model():
    model = parse_model(
        """f (float[N,3,6] x) => (float[N,2] y) {
            [one] a = Conv(x, w1)  r = Relu(a)
            [two] b = Conv(r, w2)  n = BatchNormalization(b, s, s, s, s)
            [three] d = Conv(n, w3)  m = ReduceMean<keepdims = 0>(d, axes)
            k = Exp(s)  p = Mul(m, s)  y = MatMul(p, w) }""",
        w1=draw_weights(2, 3, 2),
        w2=draw_weights(2, 2, 2),
        w3=draw_weights(2, 2, 2),
        s=[1.0, 2.0],
        w=draw_weights(2, 2),
        axes=np.array([2]),
    )
    return model


def names_before(model, suffix):
    """Return the outputs behind which a layer was inserted, in the order of the graph."""
    ends = [y for node in model.graph.node for y in node.output]
    return [y.removesuffix(suffix) for y in ends if y.endswith(suffix)]


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ("Conv", ["a", "d"]),  # the second one has a BatchNormalization
        ("one", ["a"]),
        ("t*", ["d"]),
        (["d", "one", "Conv"], ["a", "d"]),
        ("y", ["y"]),
    ],
)
def test_patterns(after, found):
    inserted = og.insert_batch_norm(partly_normalized_model(), after=after)
    assert names_before(inserted, ".before_batch_norm") == found


REFUSED = {
    "two": ["'two'", "has a BatchNormalization already", "after="],
    "n": ["has a BatchNormalization already"],
    "k": ["[2]", "axis 1"],
    "Cnv": ["Unknown", "'Cnv'"],
    "nothing*": ["Unknown", "'nothing*'"],
}


@pytest.mark.parametrize("after", REFUSED)
def test_values_that_cannot_be_normalized_are_refused(after):
    with pytest.raises(ValueError, match=naming(*REFUSED[after])):
        og.insert_batch_norm(partly_normalized_model(), after=after)
    with pytest.raises(ValueError, match=naming("after=[]")):
        og.insert_batch_norm(partly_normalized_model(), after=[])


def test_values_that_cannot_be_dropped_are_refused():
    with pytest.raises(ValueError, match=naming("'k'", "depend")):
        og.insert_dropout(partly_normalized_model(), after="k", rate=0.5)
    twice = og.insert_dropout(partly_normalized_model(), after="Relu", rate=0.5)
    for after in ("Relu", "r"):  # "r" is the output of the Dropout now
        with pytest.raises(ValueError, match=naming("'r", "Dropout")):
            og.insert_dropout(twice, after=after, rate=0.5)
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match=naming("rate=")):
            og.insert_dropout(partly_normalized_model(), after="Relu", rate=rate)
    loop = parse_model("""f (float[N,2] x) => (float[N,2] y) <int64 n = {3}, bool t = {1}> {
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[N,2] h) => (bool d, float[N,2] k) {
            d = Identity(c)  k = Relu(h) }> }""")
    with pytest.raises(ValueError, match=naming("Loop", "one mask")):
        og.insert_dropout(loop, after="Relu", rate=0.5)


def test_channels_on_the_last_axis_are_refused():
    text = """f (float[N,7,3] x) => (float[N,7,4] y) { h = MatMul(x, w)  k = Add(h, b)
        t = Transpose<perm = [0, 2, 1]>(k)  y = Relu(k) }"""
    model = parse_model(text, w=draw_weights(3, 4), b=draw_weights(4))
    for after in ("MatMul", "k", "Relu"):
        with pytest.raises(ValueError, match=naming("axis 2", "7, 4]")):
            og.insert_batch_norm(model, after=after)
    assert names_before(og.insert_batch_norm(model, after="t"), ".before_batch_norm") == ["t"]


def test_quantized_and_old_models_are_refused():
    model, X = parse_model(LAYERS["MatMul"][0], w=draw_weights(3, 4)), rows_for((3,))
    quantized = og.quantize(model, X)
    with pytest.raises(og.ModelError, match=naming("quantized", "float model")):
        og.insert_batch_norm(quantized, after="MatMul")
    got = run(og.insert_dropout(quantized, after="MatMul", rate=0.5), x=X)[0]
    np.testing.assert_array_equal(got, run(quantized, x=X)[0])
    old = parse_model("f (float[N,2] x) => (float[N,2] y) { y = Relu(x) }", opset=6)
    for insert in (
        lambda: og.insert_dropout(old, after="Relu", rate=0.5),
        lambda: og.insert_batch_norm(old, after="Relu"),
        lambda: og.graph.fold_batch_norm(old),
    ):
        with pytest.raises(og.ModelError, match=naming("opset 6", "opset 7")):
            insert()


# -- functions, subgraphs, other outputs -----------------------------------------------------------

CALLS = """<ir_version: 8, opset_import: ["": 17, "f": 1]>
    g (float[N,3] x) => (float[N,2] y) { h = f.layer(x, w1)  y = f.layer(h, w2) }
    <domain: "f", opset_import: ["": 17]> layer (a, w) => (b) { c = MatMul(a, w)  b = Tanh(c) }"""
BRANCHES = """f (float[N,3] x, bool c) => (float[N,3] y) {
    y = If (c) <then_branch = a () => (float[N,3] r) { r = Relu(x) },
        else_branch = e () => (float[N,3] s) { s = Neg(x) }> }"""


def test_layers_in_functions_and_branches():
    X = rows_for((3,))
    model = parse_model(CALLS, w1=draw_weights(3, 4), w2=draw_weights(4, 2))
    inserted = og.insert_batch_norm(model, after="MatMul", data=X)
    assert operator_names(inserted).count("BatchNormalization") == 2
    np.testing.assert_allclose(run(inserted, x=X)[0], run(model, x=X)[0], rtol=1e-5, atol=1e-6)
    assert operator_names(og.graph.fold_batch_norm(inserted)).count("Add") == 2

    branches = parse_model(BRANCHES)
    with pytest.raises(ValueError, match=naming("subgraph", "If")):
        og.insert_batch_norm(branches, after="Relu")
    dropping = og.insert_dropout(branches, after="Relu", rate=0.5)
    onnx.checker.check_model(dropping, full_check=True)
    for c in (True, False):
        want = run(branches, x=X, c=np.bool_(c))[0]
        np.testing.assert_array_equal(run(dropping, x=X, c=np.bool_(c))[0], want)
        found = og.predict_samples(dropping, {"x": X, "c": np.bool_(c)}, 20).samples
        assert (found == 2 * want).any(0)[want != 0].mean() > 0.99 if c else (found == want).all()


def test_outputs_that_are_no_tensors_stay():
    sklearn = pytest.importorskip("sklearn.neural_network")
    skl2onnx = pytest.importorskip("skl2onnx")
    X = rows_for((3,), 40)
    network = sklearn.MLPClassifier([4], max_iter=20, random_state=0).fit(X, X[:, 0] > 0.5)
    model = skl2onnx.to_onnx(network, X[:1])
    inserted = og.insert_batch_norm(model, after="MatMul", data=X)
    want, got = run(model, {"X": X}), run(inserted, {"X": X})
    np.testing.assert_array_equal(got[0], want[0])
    for one, other in zip(got[1], want[1], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


# -- training --------------------------------------------------------------------------------------


def convolutional_module(torch):
    nn = torch.nn
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 3)
    )


@pytest.mark.parametrize("dynamo", [False, True])
def test_inserted_normalizations_train_as_in_pytorch(dynamo):
    torch = pytest.importorskip("torch")
    nn, network = torch.nn, convolutional_module(pytest.importorskip("torch"))
    X, y = rows_for((2, 5, 5), 16), R.integers(0, 3, 16)
    options = {"dynamic_axes": {"x": {0: "N"}}, "input_names": ["x"]}
    if dynamo:
        options = {"dynamic_shapes": ({0: torch.export.Dim("N", min=2)},)}
    model = export_module(network, (torch.tensor(X[:4]),), dynamo=dynamo, **options)
    inserted = og.insert_batch_norm(model, after="Conv", data=X)
    trainer = og.Trainer(
        inserted, "cross_entropy", optimizer="sgd", learning_rate=0.1, batch_norm="train"
    )
    new = [name for name in initializer_arrays(inserted) if ".batch_norm." in name]
    assert {n for n in new if n.endswith(("weight", "bias"))} < {*trainer.trained}
    assert not {n for n in new if "running" in n} & {*trainer.trained}

    layers, inputs = [], torch.tensor(X)
    for layer in network:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            norm = nn.BatchNorm2d(layer.out_channels)
            with torch.no_grad():
                h = nn.Sequential(*layers).eval()(inputs)
                norm.running_mean[:] = h.mean((0, 2, 3))
                norm.running_var[:] = h.transpose(0, 1).flatten(1).var(1)
                norm.bias[:] = norm.running_mean
                norm.weight[:] = (norm.running_var + norm.eps).sqrt()
            layers.append(norm)
    witness = nn.Sequential(*layers)
    with torch.no_grad():
        np.testing.assert_allclose(
            trainer.predict(X), witness.eval()(inputs).numpy(), rtol=1e-4, atol=1e-5
        )
    optimizer = torch.optim.SGD(witness.train().parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(witness(inputs), torch.tensor(y))
        loss.backward()
        optimizer.step()
        trainer.fit(X, y, epochs=1, batch_size=16, shuffle=False)
        assert trainer.history[-1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        want = witness.eval()(inputs).numpy()
    np.testing.assert_allclose(trainer.predict(X), want, rtol=1e-4, atol=1e-5)
    folded = og.graph.fold_batch_norm(trainer.model)
    assert operator_names(folded) == operator_names(model)
    np.testing.assert_allclose(
        next(iter(run(folded, {next(iter(folded.graph.input)).name: X}))),
        want,
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_network_without_batch_norm_names_the_remedy():
    model = parse_model(LAYERS["MatMul"][0], w=draw_weights(3, 4))
    trainer = og.Trainer(model, "squared_error", batch_norm="train")
    with pytest.raises(ValueError, match=naming("insert_batch_norm")):
        trainer.fit(rows_for((3,)), draw_weights(12, 4))


def test_members_of_a_stack_have_statistics_of_their_own():
    model, X = parse_model(LAYERS["MatMul"][0], w=draw_weights(3, 4)), rows_for((3,), 32)
    inserted = og.insert_batch_norm(model, after="MatMul", data=X)
    stack = og.TrainerStack(
        inserted, "squared_error", members=2, init="redrawn", batch_norm="train", learning_rate=0.1
    )
    stack.fit(X, draw_weights(32, 4), epochs=3)
    for k, folded in enumerate(map(og.graph.fold_batch_norm, stack.models)):
        np.testing.assert_allclose(run(folded, x=X)[0], stack.predict(X)[k], rtol=1e-4, atol=1e-5)


def test_trainers_drop_by_default_what_was_inserted():
    """As with the rate as an argument, until another rate is an argument."""
    text = LAYERS["MatMul in front of a bias"][0]
    model, X, Y = (
        parse_model(text, w=draw_weights(3, 4), b=draw_weights(4)),
        rows_for((3,), 32),
        draw_weights(32, 4),
    )
    dropping = og.insert_dropout(model, after="y", rate=0.25)

    def weights(model, **arguments):
        trainer = og.Trainer(model, "squared_error", learning_rate=0.1, **arguments)
        return trainer.fit(X, Y, epochs=3, batch_size=8).state.weights["w"]

    plain, own = weights(model), weights(dropping)
    np.testing.assert_array_equal(own, weights(model, dropout={"y": 0.25}))
    np.testing.assert_array_equal(plain, weights(dropping, dropout={"y": 0}))
    assert not np.array_equal(own, plain)
    # the saved file drops again, and so does a renamed one
    trained = og.Trainer(dropping, "squared_error").model
    renamed = og.graph.onnx_rename_names(dropping)
    np.testing.assert_array_equal(own, weights(trained))
    [output] = trained_dropout(renamed)
    assert output in [y for node in renamed.graph.node for y in node.output]


def test_a_dropout_that_another_tool_removed_is_reported(caplog):
    model = parse_model(LAYERS["MatMul"][0], w=draw_weights(3, 4))
    dropping = og.insert_dropout(model, after="MatMul", rate=0.25)
    del dropping.graph.node[:]
    dropping.graph.node.extend(model.graph.node)
    with caplog.at_level("WARNING", "onnxgrad"):
        og.Trainer(dropping, "squared_error").fit(rows_for((3,)), draw_weights(12, 4))
    assert "insert_dropout" in caplog.text


def test_a_dropout_on_which_the_loss_does_not_depend():
    text = """f (float[N,3] x) => (float[N,4] y, float[N,3] z) {
        h = Relu(x)  z = Abs(h)  y = MatMul(x, w) }"""
    model = og.insert_dropout(parse_model(text, w=draw_weights(3, 4)), after="Relu", rate=0.5)
    trainer = og.Trainer(model, {"y": "squared_error"})
    trainer.fit(rows_for((3,)), draw_weights(12, 4))
    assert np.isfinite(trainer.history[-1]["loss"])
