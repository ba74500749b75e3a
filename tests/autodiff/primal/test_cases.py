"""Small models in forms that files have and rules do not see: what bodies return, functions, names.

Each is run as it stands in its file, and its gradients are compared with central differences of it.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxgrad import add_loss_output, check_gradient, onnx_derivative
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.graph import get_train_initializer, replace_initializers_into_onnx
from tests.support.body_cases import BODIES, SPARSE, W
from tests.support.function_cases import ATTRIBUTES, CALLS, FUNCTIONS
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.witness import LEVELS, loadable_optimized_model, mismatches, unoptimized_session

RNG = np.random.default_rng(0)
SIZES = {"X": (2, 3), "Z": (2, 3), "s": (3,), "r": (3,)}
SETTINGS = {"n": np.array(3), "c": np.array(True), "e": np.array(False)}
DOMAINS = {"my": 1, "your.own": 1}


def model_with_sparse(text: str, sparse: str) -> onnx.ModelProto:
    """Return the model of a text; its initializers of the name `sparse` become sparse ones."""
    model = parse_model(text)
    for graph in graphs_inside(model.graph.node, [model.graph]):
        for t in [t for t in graph.initializer if t.name == sparse]:
            graph.initializer.remove(t)
            graph.sparse_initializer.append(sparse_tensor(t))
    return model


def graphs_inside(nodes, found: list) -> list:
    for node in nodes:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                found.append(a.g)
                graphs_inside(a.g.node, found)
    return found


def sparse_tensor(t: onnx.TensorProto) -> onnx.SparseTensorProto:
    array = numpy_helper.to_array(t)
    index = np.flatnonzero(array)
    return helper.make_sparse_tensor(
        numpy_helper.from_array(array.ravel()[index], t.name),
        numpy_helper.from_array(index.astype(np.int64), "index"),
        list(array.shape),
    )


def random_values(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kinds = {x.name: x.type.tensor_type.elem_type for x in model.graph.input}
    held = {t.name for t in model.graph.initializer}
    return {
        name: SETTINGS[name]
        if name in SETTINGS
        else rng.normal(size=SIZES[name]).astype(helper.tensor_dtype_to_np_dtype(kind))
        for name, kind in kinds.items()
        if name not in held
    }


def attribute_model(kind: str, call: str) -> onnx.ModelProto:
    declared, body, passed = ATTRIBUTES[kind]
    default = declared[1:-1].split("=", 1)[1]
    kinds = declared[1:-1].split(":")[1].split("=")[0].strip()
    text = CALLS[call].format(passed=passed, value=passed[1:])
    text = f"""g (float[N,3] X) => (float[A,B] Y) {{ {text} }}
        <domain: "my", opset_import: ["": 18]> f {declared}(x) => (y) {{ {body} }}
        <domain: "my", opset_import: ["": 18, "my": 1]>
        o <q: {kinds} ={default}>(x) => (y) {{ t = my.f<p: {kinds} = @q>(x)
        u = Tanh(t) v = my.f(x) y = Concat<axis = 0>(u, v) }}"""
    return parse_model(text, domains=DOMAINS)


def verify_gradients(model: onnx.ModelProto, level: str) -> None:
    try:
        file = loadable_optimized_model(model, level)
    except Exception as error:
        assert level != "plain"
        pytest.skip(f"onnxruntime does not load what it writes: {str(error)[:100]}")
    for fill in (False, True):
        assert mismatches(file, random_values(model), fill=fill) == []


def at_levels(names, *quick: str) -> list[tuple]:
    """Return names with each level, of the sweep but for the file as it is, and `quick` ones."""
    return [
        (name, level) if level == "plain" or f"{name}, {level}" in quick else in_sweep(name, level)
        for name in names
        for level in LEVELS
    ]


@pytest.mark.parametrize(
    ("name", "level"), at_levels(BODIES, "if-nested, extended", "scan-state, basic")
)
def test_results_of_graphs(name, level):
    verify_gradients(parse_model(BODIES[name], domains=DOMAINS), level)


PASSED = [(kind, call, level) for kind in ATTRIBUTES for call in CALLS for level in LEVELS]


@pytest.mark.parametrize(
    ("kind", "call", "level"), [p if i % 15 == 0 else in_sweep(*p) for i, p in enumerate(PASSED)]
)
def test_attributes_of_functions(kind, call, level):
    verify_gradients(attribute_model(kind, call), level)


@pytest.mark.parametrize(("name", "level"), at_levels(FUNCTIONS, "Constant-of-two-calls, extended"))
def test_functions(name, level):
    verify_gradients(parse_model(FUNCTIONS[name], domains=DOMAINS), level)


@pytest.mark.parametrize(("name", "level"), at_levels(SPARSE))
def test_sparse_initializers(name, level):
    model = model_with_sparse(SPARSE[name], "S")
    assert "S" in get_train_initializer(model)
    verify_gradients(model, level)


@pytest.mark.parametrize("where", ["model", "branch"])
def test_sparse_value_of_a_constant(where):
    texts = {
        "model": "g (double[N,3] X) => (double[N,3] Y) { Y = MatMul(X, S) }",
        "branch": """g (double[N,3] X, bool c) => (double[N,3] Y) { Y = If(c) <then_branch = t ()
            => (double[N,3] p) { p = MatMul(X, S) },
            else_branch = f () => (double[N,3] q) { q = Sin(X) }> }""",
    }
    model = parse_model(texts[where])
    nodes = model.graph.node if where == "model" else model.graph.node[0].attribute[0].g.node
    tensor = numpy_helper.from_array(np.float64([[1, 0, 2], [0, 3, 0], [0, 0, 4]]), "S")
    nodes.insert(0, helper.make_node("Constant", [], ["S"], sparse_value=sparse_tensor(tensor)))
    verify_gradients(model, "plain")


def test_a_sparse_initializer_takes_a_new_value():
    model = model_with_sparse(SPARSE["model"], "S")
    new = np.float64([[0, 1, 0], [2, 0, 0], [0, 0, 3]])
    X = RNG.normal(size=(2, 3))
    v = get_train_initializer(model)["v"][0]
    (Y,) = unoptimized_session(replace_initializers_into_onnx(model, {"S": new})).run(
        None, {"X": X}
    )
    np.testing.assert_allclose(Y, X @ new + v)


def test_a_constant_of_a_function_takes_a_new_value():
    model = parse_model(FUNCTIONS["Constant-of-two-calls"], domains=DOMAINS)
    assert list(get_train_initializer(model)) == ["c"]
    X, new = RNG.normal(size=(2, 3)), np.float64([3, 1, 2])
    (Y,) = unoptimized_session(replace_initializers_into_onnx(model, {"c": new})).run(
        None, {"X": X}
    )
    np.testing.assert_allclose(Y, np.sin(np.sin(X * new) * new))


@pytest.mark.parametrize("name", ["loop-scan-output", "loop-state", "if-initializer", "scan-state"])
def test_check_gradient_compares_with_the_file(name):
    model = parse_model(BODIES[name], domains=DOMAINS)
    report = check_gradient(model, feed=random_values(model))
    assert report.ok, str(report)


ALIASES = ('"ai.onnx": 18', '"": 18', '"ai.onnx": 18, "my": 1')


@pytest.mark.parametrize("domain", ["", "ai.onnx."])
@pytest.mark.parametrize("opsets", ALIASES)
def test_the_domain_ai_onnx(opsets, domain):
    text = f"""g (float[N,3] X) => (float[N,3] Y) <float[3] w = {{1, 2, 3}}> {{
        a = {domain}Mul(X, w) k = {domain}Constant<value = float[3] {{3, 1, 2}}>()
        b = Add(a, k) Y = {domain}Tanh(b) }}"""
    model = parse_model(f"<ir_version: 10, opset_import: [{opsets}]> {text}")
    verify_gradients(model, "plain")
    assert list(get_train_initializer(model)) == ["w", "k"]
    X = np.float32(RNG.normal(size=(2, 3)))
    prediction = unoptimized_session(add_loss_output(model, "l2")).run(None, {"X": X, "label": X})[
        1
    ]
    np.testing.assert_allclose(prediction, unoptimized_session(model).run(None, {"X": X})[0])


@pytest.mark.parametrize("opset", [7, 9, 12])
def test_batch_normalization_of_a_training_model(opset):
    """Old opsets have no training mode: five outputs say that the batch's moments are used."""
    model = parse_model(
        """g (float[N,2,3] X) => (float[N,2,3] Y) <float[2] s = {1, 2}, float[2] b = {1, 2},
        float[2] m = {0, 0}, float[2] v = {1, 1}> {
        Y, a, c, d, e = BatchNormalization(X, s, b, m, v) }""",
        opset=opset,
        ir_version=10,
    )
    made = onnx_derivative(model, weights=["s", "b"])
    X = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    G = RNG.normal(size=(4, 2, 3)).astype(np.float32)
    s, b = np.float32([1, 2]), np.float32([1, 2])

    def loss(x, scale, shift):
        mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
        y = (x - mean) / np.sqrt(var + 1e-5) * scale[:, None] + shift[:, None]
        return (y * G).sum()

    values = [v.astype(float) for v in (X, s, b)]
    found = unoptimized_session(made).run(None, {"X": X, "s": s, "b": b, "Y_grad": G})
    for i, gradient in enumerate(found):
        d = RNG.normal(size=values[i].shape)
        moved = [[v + h * d if j == i else v for j, v in enumerate(values)] for h in (1e-5, -1e-5)]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
        np.testing.assert_allclose((gradient * d).sum(), slope, rtol=2e-3, atol=2e-3)


LINEAR = "g (float[N,3] X) => (float[N,1] Y) <float[3,1] W = {1, 2, 3}> { Y = MatMul(X, W) }"


@pytest.mark.parametrize("length", [-1, -2])
def test_lengths_that_are_no_lengths_are_unknown(length):
    model = parse_model(LINEAR, opset=13)
    for v in (*model.graph.input, *model.graph.output):
        d = v.type.tensor_type.shape.dim[0]
        d.ClearField("dim_param")
        d.dim_value = length
    X = RNG.normal(size=(20, 3)).astype(np.float32)
    y = (X @ np.float32([[1], [2], [3]]) + 1).astype(np.float32)
    (slope,) = unoptimized_session(onnx_derivative(model, weights=["W"], inputs=[])).run(
        None, {"X": X, "W": np.float32([[1], [2], [3]]), "Y_grad": np.ones_like(y)}
    )
    np.testing.assert_allclose(slope, X.T @ np.ones_like(y), rtol=1e-5)
    if length < 0:
        trained = OrtGradientOptimizer(add_loss_output(model), max_iter=2).fit(X, y)
        assert len(trained.train_losses_) == 2


def test_an_output_that_declares_another_shape():
    """The old exporter of PyTorch writes 10 for a result of (2, 5)."""
    model = parse_model(
        """g (float[2,5] X, float[2,3] U) => (float[10] Y) <int64[2,3] i = {0, 1, 4, 2, 2, 1}> {
        Y = ScatterElements<axis = 1, reduction = "max">(X, i, U) }"""
    )
    X, U = (
        RNG.permutation(16).astype(np.float32).reshape(2, 8)[:, :5],
        np.float32([[20, 0.5, 30], [0.25, 40, -9]]),
    )
    G = RNG.normal(size=(2, 5)).astype(np.float32)
    made = unoptimized_session(onnx_derivative(model, inputs=["X", "U"]))
    found = made.run(None, {"X": X, "U": U, "Y_grad": G})
    before, h = unoptimized_session(model).run(None, {"X": X, "U": U})[0], np.float32(2**-6)
    for name, array, gradient in (("X", X, found[0]), ("U", U, found[1])):
        slopes = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            moved = array.copy()
            moved[place] += h
            after = unoptimized_session(model).run(None, {"X": X, "U": U} | {name: moved})[0]
            slopes[place] = ((after - before) * G).sum() / h
        np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", ["plain", in_sweep("basic")])
@pytest.mark.parametrize("shape", ["[2]", "[N,7]", "[1,3]", "[N,3,1]"])
def test_shapes_of_results_that_are_not_kept(shape, level):
    """Which onnxruntime runs, with a warning."""
    model = parse_model(
        f"""g (double[N,3] X) => (double[A,B] Y) <{W}, double{shape} h> {{
        h = Mul(X, w) t = ReduceSum<keepdims = 1>(h) u = Div(h, t) Y = Sin(u) }}"""
    )
    file = loadable_optimized_model(model, level)
    assert mismatches(file, random_values(model)) == []
