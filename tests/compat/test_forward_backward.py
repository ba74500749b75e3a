"""The forward and the backward pass, called one after the other."""

from __future__ import annotations

import pickle

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad.compat import (
    EvaluationError,
    OrtGradientForwardBackward,
    ProviderError,
    onnx_derivative,
    random_feed,
)
from onnxgrad.runtime.values import to_numpy
from tests.support.errors import naming
from tests.support.line_models import DTYPES_OF_KINDS, kind_model
from tests.support.models import parse_model
from tests.support.running import run, run_named, session_of

rng = np.random.default_rng(0)
X = rng.standard_normal((7, 3)).astype(np.float32)
W = rng.standard_normal((3, 2)).astype(np.float32)
B = rng.standard_normal(2).astype(np.float32)
G = rng.standard_normal((7, 2)).astype(np.float32)


def linear_of_kind(kind: str = "float") -> onnx.ModelProto:
    text = f"g ({kind}[N, 3] x) => ({kind}[N, 2] y) {{ h = MatMul(x, w)  y = Add(h, b) }}"
    return kind_model(text, kind, w=W, b=B)


def new_passes(model=None, weights=None, **options):
    return OrtGradientForwardBackward(model or linear_of_kind(), weights, **options).new_instance()


@pytest.mark.parametrize("kind", ["float", "double", "float16"])
def test_a_linear_model(kind):
    dtype = DTYPES_OF_KINDS[kind]
    x, w, b, g = (a.astype(dtype) for a in (X, W, B, G))
    made = new_passes(linear_of_kind(kind), ["w", "b"])
    (y,) = made.forward([x, w, b], training=True)
    tol = {"rtol": 1e-2, "atol": 1e-2} if kind == "float16" else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(y, x @ w + b, **tol)
    dx, dw, db = made.backward([g])
    np.testing.assert_allclose(dx, g @ w.T, **tol)
    np.testing.assert_allclose(dw, x.T @ g, **tol)
    np.testing.assert_allclose(db, g.sum(0), **tol)
    assert {a.dtype for a in (y, dx, dw, db)} == {np.dtype(dtype)}


@pytest.mark.parametrize("order", [["w", "b"], ["b", "w"]])
def test_weights_are_passed_in_the_order_asked(order):
    made = new_passes(weights=order)
    values = {"w": 2 * W, "b": 3 * B}
    (y,) = made.forward([X, *(values[name] for name in order)], training=True)
    np.testing.assert_allclose(y, 2 * X @ W + 3 * B, rtol=1e-5)
    _, *found = made.backward([G])
    expected = {"w": X.T @ G, "b": G.sum(0)}
    for name, g in zip(order, found, strict=True):
        np.testing.assert_allclose(g, expected[name], rtol=1e-4, atol=1e-5)


def test_ortvalues_give_ortvalues():
    made = new_passes(weights=["w", "b"])
    inputs = [ort.OrtValue.ortvalue_from_numpy(a) for a in (X, W, B)]
    (y,) = made.forward(inputs, training=True)
    gradients = made.backward([ort.OrtValue.ortvalue_from_numpy(G)])
    assert all(isinstance(v, ort.OrtValue) for v in (y, *gradients))
    np.testing.assert_allclose(y.numpy(), X @ W + B, rtol=1e-5)
    np.testing.assert_allclose(gradients[1].numpy(), X.T @ G, rtol=1e-4)


def test_results_stay_what_they_are_when_the_passes_run_again():
    made = new_passes(weights=["w", "b"])
    inputs = [ort.OrtValue.ortvalue_from_numpy(a) for a in (X, W, B)]
    (first,) = made.forward(inputs, training=True)
    gradients = made.backward([ort.OrtValue.ortvalue_from_numpy(G)])
    before = [v.numpy().copy() for v in (first, *gradients)]
    made.forward([ort.OrtValue.ortvalue_from_numpy(-X), *inputs[1:]], training=True)
    made.backward([ort.OrtValue.ortvalue_from_numpy(-G)])
    for value, old in zip((first, *gradients), before, strict=True):
        np.testing.assert_array_equal(value.numpy(), old)


def test_the_same_memory_with_other_contents_shape_or_dtype():
    """What is where it was is not bound again, and is read again."""
    made = new_passes(weights=["w", "b"])
    buffer = np.concatenate([X, X])
    for rows in (7, 14, 3):
        for scale in (1, 5):
            x = buffer[:rows]
            x[:] = scale * np.resize(X, (rows, 3))
            (y,) = made.forward([x, W, B])
            np.testing.assert_allclose(y, x @ W + B, rtol=1e-4, atol=1e-5)
    steps = np.ascontiguousarray(X.T).T  # not contiguous
    np.testing.assert_allclose(made.forward([steps, W, B])[0], X @ W + B, rtol=1e-5)


def test_several_outputs_integers_and_what_has_no_gradient():
    text = """g (float[N, 3] x, int64[N] i, float[N, 2] unused)
        => (float[N, 2] y, int64[N] best, float[N, 2] z, float[N, 2] a) {
        e = Gather(table, i)  h = MatMul(x, w)  y = Add(h, e)  f = Add(y, frozen)
        best = ArgMax<axis=1, keepdims=0>(f)  z = Tanh(y)  a = Add(unused, unused) }"""
    table, frozen = rng.standard_normal((5, 2)).astype(np.float32), np.float32([1, 2])
    model = parse_model(text, w=W, table=table, frozen=frozen)
    names = ["table", "frozen", "w"]
    made = new_passes(model, names, input_names=["x", "i"], output_names=["y", "best", "z"])
    i = np.array([0, 1, 4, 4, 2, 0, 1])
    y, best, z = made.forward([X, i, table, frozen, W], training=True)
    np.testing.assert_array_equal(best, (y + frozen).argmax(1))
    np.testing.assert_allclose(z, np.tanh(y), rtol=1e-5)
    dx, di, dtable, dfrozen, dw = made.backward([G, None, 2 * G])
    total = G + 2 * G * (1 - z * z)
    np.testing.assert_allclose(dx, total @ W.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, X.T @ total, rtol=1e-4, atol=1e-5)
    expected = np.zeros_like(table)
    np.add.at(expected, i, total)
    np.testing.assert_allclose(dtable, expected, rtol=1e-4, atol=1e-5)
    assert di is None
    assert dfrozen is None
    made.forward([X, i, table, frozen, W], training=True)
    dx, *_ = made.backward([None, None, G])
    np.testing.assert_allclose(dx, (G * (1 - z * z)) @ W.T, rtol=1e-4, atol=1e-5)


def test_inputs_and_outputs_in_another_order():
    text = "g (float[N] a, float[N] b) => (float[N] p, float[N] q) { p = Mul(a, b)  q = Sub(a, b) }"
    made = new_passes(parse_model(text), [], input_names=["b", "a"], output_names=["q", "p"])
    a, b = np.float32([1, 2]), np.float32([3, 5])
    q, p = made.forward([b, a], training=True)
    np.testing.assert_array_equal((q, p), (a - b, a * b))
    db, da = made.backward([np.float32([1, 1]), np.float32([10, 10])])
    np.testing.assert_array_equal((db, da), (10 * a - 1, 10 * b + 1))


def test_a_name_that_its_gradient_would_have_is_taken():
    text = """g (float[N] x, float[N] x_grad) => (float[N] y, float[N] y_grad) {
        y = Mul(x, x_grad)  y_grad = Neg(x) }"""
    made = new_passes(parse_model(text), [])
    a, b, g = np.float32([1, 2]), np.float32([3, 5]), np.float32([1, 1])
    made.forward([a, b], training=True)
    da, db = made.backward([g, 10 * g])
    np.testing.assert_array_equal(da, b - 10)
    np.testing.assert_array_equal(db, a)


def test_an_output_has_the_name_of_a_gradient():
    """As a model that is itself a gradient has it."""
    text = "g (float[N] x, float[N] g) => (float[N] x_grad) { a = Mul(x, g)  x_grad = Mul(a, x) }"
    made = new_passes(parse_model(text), [])
    x, g, v = np.float32([1, 2]), np.float32([3, 5]), np.float32([7, 9])
    [y] = made.forward([x, g], training=True)
    np.testing.assert_array_equal(y, x * x * g)
    dx, dg = made.backward([v])
    np.testing.assert_array_equal(dx, 2 * x * g * v)
    np.testing.assert_array_equal(dg, x * x * v)


def test_without_training_nothing_is_saved_and_what_was_saved_stays():
    made = new_passes(weights=["w", "b"])
    with pytest.raises(EvaluationError, match=r"forward\(inputs, training=True\)"):
        made.backward([G])
    made.forward([X, W, B])
    with pytest.raises(
        EvaluationError, match=naming("forward(inputs, training=True)", "before backward")
    ):
        made.backward([G])
    made.forward([X, W, B], training=True)
    made.forward([9 * X, W, B])
    np.testing.assert_allclose(made.backward([G])[1], X.T @ G, rtol=1e-4)
    with pytest.raises(EvaluationError, match=naming("already", "training=True) again")):
        made.backward([G])


def test_what_was_returned_may_be_changed():
    made = new_passes(parse_model("g (float[N] x) => (float[N] y) { y = Exp(x) }"), [])
    (y,) = made.forward([np.float32([0, 1])], training=True)
    y *= 0
    np.testing.assert_allclose(made.backward([np.float32([1, 1])])[0], np.exp([0, 1]), rtol=1e-6)


def test_instances_keep_their_own():
    parent = OrtGradientForwardBackward(linear_of_kind(), ["w", "b"])
    one, two = parent.new_instance(), parent.new_instance()
    one.forward([X, W, B], training=True)
    two.forward([2 * X, W, B], training=True)
    np.testing.assert_allclose(one.backward([G])[1], X.T @ G, rtol=1e-4)
    np.testing.assert_allclose(two.backward([G])[1], 2 * X.T @ G, rtol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ([X, W], "3 inputs|['x', 'w', 'b']|2"),
        ([X[:, :2], W, B], "'x'|(N, 3)|(7, 2)"),
        ([X[0], W, B], "'x'|(N, 3)|(3,)"),
        ([X.astype(float), W, B], "'x'|FLOAT|DOUBLE"),
        ([X, W.T, B], "'w'|(3, 2)|(2, 3)"),
        ([X, W, [["a", "b"]]], "'b'|FLOAT"),
        ([None, W, B], "'x'|None"),
        ({"x": X, "w": W, "b": B}, "list|['x', 'w', 'b']|dict"),
    ],
)
def test_inputs_that_do_not_fit(inputs, parts):
    made = new_passes(weights=["w", "b"])
    made.forward([X, W, B], training=True)
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        made.forward(inputs, training=True)
    np.testing.assert_allclose(made.backward([G])[1], X.T @ G, rtol=1e-4)  # as it was


@pytest.mark.parametrize(
    ("gradients", "parts"),
    [
        ([G[:5]], "'y'|(7, 2)|(5, 2)"),
        ([G.astype(float)], "'y'|FLOAT|DOUBLE"),
        ([G, G], "1 gradients|['y']|2"),
        ([], "1 gradients|0"),
    ],
)
def test_gradients_that_do_not_fit(gradients, parts):
    made = new_passes(weights=["w", "b"])
    made.forward([X, W, B], training=True)
    with pytest.raises(ValueError, match=naming(*parts.split("|"))):
        made.backward(gradients)
    np.testing.assert_allclose(made.backward([G])[1], X.T @ G, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"providers": ["CUDAProvider"]}, ProviderError, "'CUDAProvider'"),
        ({"providers": "CPUExecutionProvider"}, ProviderError, "list|'CPUExecutionProvider'"),
        ({"weights_to_train": "w"}, ValueError, "list|weights|'w'"),
        ({"output_names": "y"}, ValueError, "list|tensors|'y'"),
        ({"graph_builder_config": 3}, ValueError, "graph_builder_config"),
        ({"input_names": ["z"]}, ValueError, "tensor 'z'"),
        ({"output_names": ["z"]}, ValueError, "tensor 'z'"),
        ({"weights_to_train": ["q"]}, ValueError, "weight 'q'"),
        ({"weights_to_train": ["w", "w"]}, ValueError, "weight 'w'|twice"),
        ({"input_names": []}, ValueError, "depend|['x']"),
    ],
)
def test_bad_arguments(options, error, parts):
    with pytest.raises(error, match=naming(*parts.split("|"))):
        OrtGradientForwardBackward(linear_of_kind(), **options)


def test_a_provider_that_is_not_installed():
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("there is one")
    with pytest.raises(ProviderError, match=naming("'CUDAExecutionProvider'", "install")):
        OrtGradientForwardBackward(linear_of_kind(), providers=["CUDAExecutionProvider"])


def test_axes_of_length_one_may_differ():
    """A bias (2,) for a weight (1, 2), and the gradient of an output in one row."""
    model = parse_model(
        "g (float[N, 3] x) => (float[N, 2] y) { h = MatMul(x, w)  y = Add(h, b) }", w=W, b=B[None]
    )
    made = new_passes(model, ["w", "b"])
    for wrap in (np.asarray, ort.OrtValue.ortvalue_from_numpy):
        (y,) = made.forward([wrap(X), wrap(W), wrap(B)], training=True)
        np.testing.assert_allclose(to_numpy(y), X @ W + B, rtol=1e-5, atol=1e-6)
        dx, dw, db = map(to_numpy, made.backward([wrap(G.reshape(1, -1))]))
        np.testing.assert_allclose(dx, G @ W.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dw, X.T @ G, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(db, G.sum(0), rtol=1e-4)  # in the shape that was passed
    with pytest.raises(ValueError, match=naming("input 'w'", "shape")):
        made.forward([X, W.T.copy(), B])
    with pytest.raises(ValueError, match=naming("input 'w'", "shape")):
        made.forward([X, W.reshape(1, -1), B])
    made.forward([X, W, B], training=True)
    with pytest.raises(ValueError, match=naming("of 'y'", "shape")):
        made.backward([G.T.copy()])


def test_the_class_of_the_passes_has_the_graphs():
    parent = OrtGradientForwardBackward(linear_of_kind(), ["w", "b"], class_name="Linear")
    assert repr(parent) == "OrtGradientForwardBackward(...)"
    made = parent.new_instance()
    assert type(made) is parent.cls_type_
    assert parent.cls_type_.__name__ == "Linear"
    assert parent.cls_type_._trained_onnx == parent.partition.joint
    model = parent.cls_type_._optimized_pre_grad_model
    np.testing.assert_allclose(run(model, x=X, w=W, b=B)[0], X @ W + B, rtol=1e-5, atol=1e-6)
    assert pickle.loads(pickle.dumps(made)).parent.weights_to_train == ["w", "b"]


def test_what_a_binding_returned_is_passed_on():
    """The values of an `OrtValueVector` are of another class than `onnxruntime.OrtValue`."""
    text = """g (float[N, 3] x, float[3, 2] w, float[2] b)
        => (float[N, 3] p, float[3, 2] q, float[2] r) {
        p = Identity(x)  q = Identity(w)  r = Identity(b) }"""
    session = session_of(parse_model(text))
    binding = session.io_binding()
    for name, array in {"x": X, "w": W, "b": B}.items():
        binding.bind_cpu_input(name, array)
    for name in "pqr":
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    made = new_passes(weights=["w", "b"])
    (y,) = made.forward(binding.get_outputs_as_ortvaluevector(), training=True)
    assert isinstance(y, ort.OrtValue)
    np.testing.assert_allclose(y.numpy(), X @ W + B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.backward([G])[1], X.T @ G, rtol=1e-4)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    made = new_passes(weights=["w", "b"])
    (y,) = made.forward([torch.tensor(X, requires_grad=True), W, B], training=True)
    np.testing.assert_allclose(y, X @ W + B, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.backward([torch.tensor(G)])[1], X.T @ G, rtol=1e-4)


def test_debug_names_the_result_that_is_not_finite():
    made = new_passes(parse_model("g (float[N] x) => (float[N] y) { y = Log(x) }"), [], debug=True)
    made.forward([np.float32([1, 2])], training=True)
    with pytest.raises(EvaluationError, match=naming("forward", "'y'", "NaN")):
        made.forward([np.float32([1, -1])], training=True)


def test_pickled_and_options_of_sessions():
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    new_passes(sess_options=options).forward([X, W, B])
    made = new_passes(class_name="Linear")
    made.forward([X, W, B], training=True)
    again = pickle.loads(pickle.dumps(made))
    assert repr(again) == "Linear(OrtGradientForwardBackward(x, w, b -> y))"
    with pytest.raises(EvaluationError):
        again.backward([G])
    again.forward([X, W, B], training=True)
    np.testing.assert_allclose(again.backward([G])[1], X.T @ G, rtol=1e-4)


def test_the_graphs_are_saved(tmp_path):
    parent = OrtGradientForwardBackward(linear_of_kind(), ["w", "b"], class_name="Linear")
    paths = parent.save_onnx_graph(tmp_path / "new")
    as_bytes = parent.save_onnx_graph(bytes)
    assert list(paths) == list(as_bytes)
    assert parent.new_instance().save_onnx_graph(bytes) == as_bytes
    models = {name: onnx.load(path) for name, path in paths.items()}
    assert models == {name: onnx.load_from_string(b) for name, b in as_bytes.items()}
    assert "YieldOp" in {node.op_type for node in models.pop("_trained_onnx").graph.node}
    feed = {"x": X, "w": W, "b": B, "y_grad": G}
    for model in models.values():
        feed |= run_named(model, feed)
    np.testing.assert_allclose(feed["y"], X @ W + B, rtol=1e-5)
    np.testing.assert_allclose(feed["w_grad"], X.T @ G, rtol=1e-4)
    pre = models["_optimized_pre_grad_model"]
    assert [x.name for x in pre.graph.input] == ["x", "w", "b"]
    assert [y.name for y in pre.graph.output] == ["y"]


def test_by_default_the_weights_of_training_and_a_deeper_model():
    text = """g (float[N, 3] x) => (float[N, 2] y) { a = MatMul(x, w)  b = Mul(a, scalar)
        c = Tanh(b)  d = Softmax(c)  y = Mul(d, c) }"""
    model = parse_model(text, w=W, scalar=np.float32(2))
    made = new_passes(model)
    assert made.parent.weights_to_train == ["w"]
    made.forward([X, W], training=True)
    dx, dw = made.backward([G])
    feed = random_feed(model.graph.input, 7) | {"x": X, "w": W, "y_grad": G}
    for found, expected in zip((dx, dw), run(onnx_derivative(model, ["w"]), feed), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
