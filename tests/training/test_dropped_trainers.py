"""Trainers that nobody refers to any more: all that they hold is freed without the collector."""

import copy
import gc
import pickle
import weakref

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto

import onnxgrad as og
from tests.support.collector import count_graph_objects
from tests.support.models import parse_model
from tests.support.running import run

UNITS = 400  # matrices are large, so that they are read when needed


def large_objects() -> list[tuple[str, str]]:
    """Return the kind and name of all sessions and matrices of files in memory."""
    found = []
    for item in gc.get_objects():
        if type(item) is ort.InferenceSession:
            found.append(("session", ""))
        elif type(item) is TensorProto and list(item.dims) == [UNITS, UNITS]:
            found.append(("tensor", item.name))
    return found


def references_of_training(kind: str) -> list[weakref.ref]:
    """Train a model, and return references to arrays of the trainer and of its data."""
    rng = np.random.default_rng(0)
    model = parse_model(
        f"""f (float[N,{UNITS}] x) => (float[N,3] y) {{
            h = MatMul(x, first) r = Relu(h) s = MatMul(r, second) t = Tanh(s)
            y = MatMul(t, last) }}""",
        first=rng.normal(size=(UNITS, UNITS)).astype(np.float32) / 20,
        second=rng.normal(size=(UNITS, UNITS)).astype(np.float32) / 20,
        last=rng.normal(size=(UNITS, 3)).astype(np.float32),
    )
    X, y = rng.normal(size=(64, UNITS)).astype(np.float32), np.arange(64) % 3
    chosen = ["last"] if kind == "frozen" else None
    trainer = og.Trainer(model, "cross_entropy", train=chosen, metrics=["accuracy"])
    if kind != "not trained":
        trainer.fit(X, y, validation=(X, y), epochs=2)
        trainer.partial_fit(X, y)
    trainer.predict(X)
    if kind == "gradients":
        trainer.value_and_grad(X, y)
    return [weakref.ref(array) for array in (X, y, *trainer.state.weights.values())]


@pytest.mark.parametrize("kind", ["not trained", "trained", "frozen", "gradients"])
def test_arrays_and_sessions_are_freed_without_the_collector(kind, no_collector):
    before = large_objects()
    references = references_of_training(kind)
    assert [reference() for reference in references] == [None] * len(references)
    assert large_objects() == before


# -- nodes of graphs -------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
CLASSES = 3


def normal_weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: RNG.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}


DENSE = parse_model(
    f"""f (float[N,6] x) => (float[N,{CLASSES}] y) {{
        h = MatMul(x, a) b = Add(h, c) t = Tanh(b) y = MatMul(t, d) }}""",
    **normal_weights(a=(6, 8), c=(8,), d=(8, CLASSES)),
)
CONVOLUTIONS = parse_model(
    f"""f (float[N,2,6,6] x) => (float[N,{CLASSES}] y) {{
        c = Conv<pads=[1,1,1,1]>(x, w) n = BatchNormalization(c, s, b, m, v) r = Relu(n)
        p = MaxPool<kernel_shape=[2,2]>(r) g = GlobalAveragePool(p) z = Flatten(g)
        y = MatMul(z, d) }}""",
    **normal_weights(w=(4, 2, 3, 3), b=(4,), m=(4,), d=(4, CLASSES)),
    **{name: np.ones(4, np.float32) for name in "sv"},
)
LOOP = parse_model(
    f"""f (float[N,5,2] x) => (float[N,{CLASSES}] y) <int64[1] first = {{0}}> {{
        t = Transpose<perm=[1,0,2]>(x) o, h, c = LSTM<hidden_size=4>(t, w, r, b)
        z = Squeeze(h, first) y = MatMul(z, d) }}""",
    **normal_weights(w=(1, 16, 2), r=(1, 16, 4), b=(1, 32), d=(4, CLASSES)),
)
BRANCHES = parse_model(
    f"""f (float[N,6] x) => (float[N,{CLASSES}] y) <float zero = {{0}}> {{
        s = ReduceSum<keepdims=0>(x) over = Greater(s, zero)
        h = If (over) <
            then_branch = g1 () => (float[N,8] u) {{ p = MatMul(x, a) u = Tanh(p) }},
            else_branch = g2 () => (float[N,8] v) {{ v = MatMul(x, a) }}>
        y = MatMul(h, d) }}""",
    **normal_weights(a=(6, 8), d=(8, CLASSES)),
)
TRAININGS = {
    "dense": (DENSE, {}),
    "statistics": (CONVOLUTIONS, {"batch_norm": "train"}),
    "recomputed": (CONVOLUTIONS, {"recompute": "all"}),
    "loop": (LOOP, {}),
    "branches": (BRANCHES, {}),
    "micro-batches": (DENSE, {"accumulate": 2}),
    "norms": (DENSE, {"clip_norm": 1.0, "callbacks": [og.callbacks.Norms()]}),
    "averages": (DENSE, {"optimizer": og.optimizers.adam(), "dropout": {"t": 0.5}}),
    "one layer": (DENSE, {"train": "last"}),
}


def data_for(model: ModelProto, rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]]
    return RNG.normal(size=(rows, *shape)).astype(np.float32), np.arange(rows) % CLASSES


@pytest.mark.parametrize("kind", [*TRAININGS])
def test_nodes_of_graphs_are_freed_without_the_collector(kind, no_collector):
    model, options = TRAININGS[kind]
    X, y = data_for(model)

    def train() -> None:
        trainer = og.Trainer(model, "cross_entropy", metrics=["accuracy"], **options)
        trainer.fit(X, y, validation=(X, y), epochs=2, batch_size=8)
        trainer.partial_fit(X[:3], y[:3])
        trainer.evaluate(X, y)
        trainer.value_and_grad(X, y)

    train()  # what the package keeps for all trainings
    before = count_graph_objects()
    train()
    assert count_graph_objects() == before


def test_nodes_of_a_stack_are_freed_without_the_collector(no_collector):
    X, y = data_for(DENSE)

    def train() -> None:
        stack = og.TrainerStack(DENSE, "cross_entropy", learning_rate=[0.1, 0.2])
        stack.fit(X, y, epochs=2).predict(X)

    train()
    before = count_graph_objects()
    train()
    assert count_graph_objects() == before


@pytest.mark.parametrize(
    "differentiate",
    [
        og.onnx_derivative, og.vjp, og.jvp, og.hvp, og.jacobian, og.partition,
        lambda model: og.jacobian(model, weights=None, batched=True),
        lambda model: og.graph.derivative_family(model),
    ],
    ids=[*"derivative vjp jvp hvp jacobian partition rows family".split()],
)  # fmt: skip
def test_nodes_of_derivatives_are_freed_without_the_collector(differentiate, no_collector):
    differentiate(DENSE)
    before = count_graph_objects()
    differentiate(DENSE)
    assert count_graph_objects() == before


# -- a trainer after its graphs were taken apart ---------------------------------------------------


class LineFit:
    """Gradient descent for y = x w with half the squared error of a row, batch by batch."""

    def __init__(self, w: np.ndarray) -> None:
        self.w = w.astype(np.float64)

    def fit(self, X: np.ndarray, y: np.ndarray, epochs: int, batch_size: int) -> None:
        for _ in range(epochs):
            for i in range(0, len(X), batch_size):
                x, t = X[i : i + batch_size], y[i : i + batch_size]
                self.w -= 0.1 * 2 * x.T @ (x @ self.w - t) / len(x)


@pytest.mark.parametrize("collects", [False, True])
def test_a_trainer_works_on_after_its_step_was_built(collects, tmp_path, no_collector):
    X = RNG.normal(size=(24, 3)).astype(np.float32)
    y = (X @ np.float32([[1], [-2], [0.5]])).astype(np.float32)
    w = np.float32([[0.1], [0.2], [0.3]])
    model = parse_model("f (float[N,3] x) => (float[N,1] y) { y = MatMul(x, w) }", w=w)
    options = {"optimizer": "sgd", "learning_rate": 0.1}
    trainer, line = og.Trainer(model, "squared_error", **options), LineFit(w)

    def check(own: og.Trainer, expected: LineFit) -> None:
        if collects:
            gc.collect()
        np.testing.assert_allclose(own.state.weights["w"], expected.w, rtol=1e-4, atol=1e-5)
        error = ((X @ expected.w - y) ** 2).mean()
        np.testing.assert_allclose(own.evaluate(X, y)["loss"], error, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(own.predict(X), X @ expected.w, rtol=1e-3, atol=1e-5)
        loss, gradients = own.value_and_grad(X, y)
        np.testing.assert_allclose(loss, error, rtol=1e-3, atol=1e-6)
        slope = 2 * X.T @ (X @ expected.w - y) / len(X)
        np.testing.assert_allclose(gradients["w"], slope, rtol=1e-3, atol=1e-4)

    trainer.fit(X, y, epochs=2, batch_size=8, shuffle=False)
    line.fit(X, y, 2, 8)
    check(trainer, line)
    copies = copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))
    for own in copies:
        other = copy.deepcopy(line)
        own.partial_fit(X[:5], y[:5])
        other.fit(X[:5], y[:5], 1, 5)
        check(own, other)
    for rows in (5, 24, 7):  # other shapes, for which sessions and steps are built anew
        trainer.partial_fit(X[:rows], y[:rows])
        line.fit(X[:rows], y[:rows], 1, rows)
        check(trainer, line)
    kept = og.callbacks.Checkpoint(tmp_path)
    trainer, line = og.Trainer(model, "squared_error", **options, callbacks=[kept]), LineFit(w)
    for epochs in (3, 5):
        resume = tmp_path if epochs == 5 else None
        trainer.fit(X, y, epochs=epochs, batch_size=12, shuffle=False, resume=resume)
        line.fit(X, y, 3 if resume is None else 2, 12)
        check(trainer, line)
    trainer.save(tmp_path / "trained.onnx")
    [result] = run(onnx.load(tmp_path / "trained.onnx"), x=X)
    np.testing.assert_allclose(result, X @ line.w, rtol=1e-3, atol=1e-5)
