"""Sparse weights: differentiated as dense ones, trained and written back as sparse ones."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnxgrad import add_loss_output, check_gradient, onnx_derivative
from onnxgrad.compat import OrtGradientForwardBackwardOptimizer, OrtGradientOptimizer
from onnxgrad.graph import get_train_initializer, onnx_rename_weights, select_model_inputs_outputs
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import load_session
from tests.support.running import in_sweep, run_named

VALUES, FLAT = np.float32([1, 2, 3]), np.array([0, 4, 5])
DENSE = np.float32([[1, 0, 0], [0, 2, 3], [0, 0, 0]])
X = np.random.default_rng(0).standard_normal((30, 3)).astype(np.float32)
Y = X @ np.float32([[2, 1, 1], [1, 1, 1], [1, 1, 1]])


def sparse_matrix(name: str, flat: bool = True) -> onnx.SparseTensorProto:
    indices = FLAT if flat else np.stack(np.unravel_index(FLAT, (3, 3)), 1)
    return helper.make_sparse_tensor(
        numpy_helper.from_array(VALUES, name), numpy_helper.from_array(indices, "i"), [3, 3]
    )


def sparse_model(form: str) -> onnx.ModelProto:
    """Return y = x W, W sparse, as an initializer or as a Constant, wherever that may be."""
    head = '<ir_version: 10, opset_import: ["": 18, "own": 1]> g (float[N,3] X) => (float[N,3] Y)'
    body = "{ Y = MatMul(X, W) }"
    holder = lambda m: m.graph  # noqa: E731
    if form == "branch":
        head += " <bool c = {1}>"
        body = """{ Y = If(c) <then_branch = a () => (float[N,3] t) { t = MatMul(X, W) },
                               else_branch = b () => (float[N,3] e) { e = Neg(X) }> }"""
        holder = lambda m: m.graph.node[0].attribute[0].g  # noqa: E731
    elif form == "function":
        body = '{ Y = own.f(X) } <domain: "own", opset_import: ["": 18]> f (x) => (y) {'
        body += " y = MatMul(x, W) }"
        holder = lambda m: m.functions[0]  # noqa: E731
    parsed = onnx.parser.parse_model(f"{head} {body}")
    if form in ("initializer", "indices", "branch"):
        holder(parsed).sparse_initializer.append(sparse_matrix("W", form != "indices"))
    else:
        constant = helper.make_node("Constant", [], ["W"], sparse_value=sparse_matrix("values"))
        holder(parsed).node.insert(0, constant)
    onnx.checker.check_model(parsed)
    return parsed


FORMS = pytest.mark.parametrize(
    "form", ["initializer", "indices", "branch", "function", "constant"]
)


def stored_tensor(made: onnx.ModelProto) -> onnx.SparseTensorProto:
    graphs = [made.graph, *(a.g for n in made.graph.node for a in n.attribute if a.HasField("g"))]
    nodes = [*made.graph.node, *(n for f in made.functions for n in f.node)]
    tensors = [t for g in graphs for t in g.sparse_initializer]
    [tensor] = tensors or [
        a.sparse_tensor for n in nodes for a in n.attribute if a.HasField("sparse_tensor")
    ]
    return tensor


def run_by_package(made: onnx.ModelProto) -> list[np.ndarray]:
    """Run a model as the package does: onnxruntime may crash where a branch is sparse."""
    session = load_session(made, ort.SessionOptions(), providers=CPU.providers)
    return session.run(["Y"], {"X": X})


@FORMS
def test_onnxruntime_gets_nothing_sparse_inside_of_nodes_and_functions(form, monkeypatch):
    made, given, session = sparse_model(form), [], ort.InferenceSession

    def spy(text, *args, **more):
        given.append(onnx.load_from_string(text))
        return session(text, *args, **more)

    monkeypatch.setattr(ort, "InferenceSession", spy)
    np.testing.assert_allclose(run_by_package(made)[0], X @ DENSE, rtol=1e-5)
    if form in ("branch", "function"):
        assert "sparse" not in str(given[0])
    else:
        assert given == [made]


@FORMS
def test_the_gradient_is_that_of_the_dense_tensor(form):
    made = sparse_model(form)
    [(name, (array, _))] = get_train_initializer(made).items()
    assert name == "W"
    np.testing.assert_array_equal(array, DENSE)
    assert check_gradient(made).ok
    g = np.ones_like(Y)
    dw = run_named(onnx_derivative(made), X=X, W=DENSE, Y_grad=g)["W_grad"]
    np.testing.assert_allclose(dw, X.T @ g, rtol=1e-5)


@FORMS
@pytest.mark.parametrize(
    ("optimizer", "inside"),
    [("sgd", True), ("adamw", False), in_sweep("adamw", True), in_sweep("sgd", False)],
)
def test_what_is_not_stored_stays_zero(form, optimizer, inside):
    made = sparse_model(form)
    options = {"training_optimizer_name": optimizer, "learning_rate": 0.1, "max_iter": 60}
    options["random_state"] = 0
    if inside:
        trainer = OrtGradientOptimizer(add_loss_output(made), **options)
    else:
        trainer = OrtGradientForwardBackwardOptimizer(made, **options)
    trained = trainer.fit(X, Y).get_trained_onnx(made)
    before, after = stored_tensor(made), stored_tensor(trained)
    assert after.indices == before.indices
    target = np.linalg.lstsq(X[:, [0]], Y[:, [0]] - 0, rcond=None)  # one column of one weight
    np.testing.assert_allclose(numpy_helper.to_array(after.values)[0], target[0][0, 0], atol=0.1)
    assert (numpy_helper.to_array(after.values) != VALUES).all()
    again = trainer.fit(X, Y).get_trained_onnx(made)
    assert stored_tensor(again).indices == before.indices
    [y] = run_by_package(trained)
    state = get_train_initializer(trained)["W"][0]
    np.testing.assert_allclose(y, X @ state, rtol=1e-5)
    assert (state[DENSE == 0] == 0).all()


def test_other_tools_keep_the_values():
    made = sparse_model("initializer")
    cut = select_model_inputs_outputs(made, ["Y"])
    renamed = onnx_rename_weights(made)
    for changed in (cut, renamed, add_loss_output(made)):
        y = run_named(changed, {"X": X, "label": Y})["Y"]
        np.testing.assert_allclose(y, X @ DENSE, rtol=1e-5)
