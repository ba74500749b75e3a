"""Small steps: fewer nodes in their loop, and epochs that one call of the runtime runs."""

import signal
import warnings

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad import native
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.training import loop as training_loop
from onnxgrad.training.run.runner import Runner
from onnxgrad.training.step import build
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep
from tests.support.trainings import (
    assert_close_arrays,
    assert_equal_trainings,
    default_signal_handlers,
)

RNG = np.random.default_rng(0)


class Look(og.callbacks.Callback):
    """Looks at nothing; but a training with callbacks runs epoch by epoch."""


def normal_rows(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# -- the loop -------------------------------------------------------------------------------------

LAYERS = {
    "Gemm": "y = Gemm(x, w, b)",
    "row": "y = Gemm<transB=1>(x, w, b)",
    "MatMul": "a = MatMul(x, w)  y = Add(a, b)",
    "Add of a bias": "a = MatMul(x, w)  y = Add(b, a)",
    "hidden": "a = Gemm(x, w, b)  h = Relu(a)  c = MatMul(h, v)  y = Add(c, d)",
    "bias read twice": "a = Gemm(x, w, b)  y = Add(a, b)",
    "transposed": "y = Gemm<transB=1>(x, w, b)",
    "scaled": "y = Gemm<alpha = 0.5>(x, w, b)",
    "bias apart": "a = MatMul(x, w)  h = Tanh(a)  y = Add(h, b)",
}
WITH_ONES = {"Gemm", "row", "MatMul", "Add of a bias", "hidden"}


def layer_model(name, dtype=np.float32):
    """Return the model of layers, and the number of its outputs."""
    units = 1 if name == "row" else 3
    shape = (units, 5) if name in ("row", "transposed") else (5, 3)
    rng = np.random.default_rng(1)
    shapes = {"w": shape, "b": (units,), "v": (3, 3), "d": (3,)}
    used = {n: s for n, s in shapes.items() if n in "wb" or name == "hidden"}
    kind = {"float32": "float", "float64": "double", "float16": "float16"}[np.dtype(dtype).name]
    model = parse_model(
        f"g ({kind}[N,5] x) => ({kind}[N,{units}] y) {{ {LAYERS[name]} }}",
        **{n: rng.standard_normal(s).astype(dtype) for n, s in used.items()},
    )
    return model, units


def train_twice(model, X, Y, **options):
    """Return the trainer of two epochs of batches of 4 rows, the last one shorter."""
    options = {"optimizer": "nesterov", "learning_rate": 0.01} | options
    trainer = og.Trainer(model, "squared_error", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights in 16 bits
        trainer.fit(X, Y, epochs=2, batch_size=4)
    return trainer


@pytest.fixture
def loops(monkeypatch):
    """Return the operators of the loops that are built, in the native form."""
    seen: list[list[str]] = []

    def loop_to_native(graph, target):
        native.loop_to_native(graph, target)
        seen.append([node.op_type for node in all_nodes(graph)])

    monkeypatch.setattr(build, "loop_to_native", loop_to_native)
    return seen


CASES = [(name, o, n) for name in LAYERS for o in ("sgd", "nesterov", "adamw") for n in (1, 2)]
CHOSEN = {("hidden", "adamw", 2), ("row", "sgd", 2), *((name, "nesterov", 1) for name in LAYERS)}


@pytest.mark.parametrize(
    ("name", "optimizer", "accumulate"),
    [case if case in CHOSEN else in_sweep(*case) for case in CASES],
)
def test_loop_trains_as_the_plain_step(name, optimizer, accumulate, monkeypatch, loops):
    model, units = layer_model(name)
    X, Y = normal_rows(18, 5), normal_rows(18, units)
    options = {"optimizer": optimizer, "accumulate": accumulate}
    mine = train_twice(model, X, Y, **options)
    if accumulate == 1:
        assert ("Pad" in loops[0]) == (name in WITH_ONES)
        assert "Expand" in loops[0]  # how many rows count stays the same
    for function in ("to_native", "loop_to_native"):
        monkeypatch.setattr(build, function, lambda *arguments: None)
    want = train_twice(model, X, Y, **options)
    np.testing.assert_allclose(mine.state.losses, want.state.losses, rtol=1e-6)
    assert_close_arrays(mine.state.weights, want.state.weights, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["row", "hidden"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loop_against_torch(name, weighted):
    torch = pytest.importorskip("torch")
    model, units = layer_model(name)
    X, Y, rate = normal_rows(16, 5), normal_rows(16, units), 0.01
    counts = np.where(np.arange(16) % 3, 1, 2).astype(np.float32)
    trainer = og.Trainer(
        model, "squared_error", optimizer=og.optimizers.momentum(0.9), learning_rate=rate
    )
    more = {"sample_weight": counts} if weighted else {}
    trainer.fit(X, Y, epochs=3, batch_size=4, shuffle=False, **more)
    w = {name: torch.tensor(a.copy()) for name, a in initializer_arrays(model).items()}
    leaves = [v.requires_grad_() for v in w.values()]
    descent = torch.optim.SGD(leaves, rate, momentum=0.9)
    for i in [0, 4, 8, 12] * 3:
        x = torch.tensor(X[i : i + 4])
        h = x @ w["w"].T + w["b"] if name == "row" else torch.relu(x @ w["w"] + w["b"])
        y = h if name == "row" else h @ w["v"] + w["d"]
        squares = ((y - torch.tensor(Y[i : i + 4])) ** 2).mean(1)
        c = torch.tensor(counts[i : i + 4]) if weighted else torch.ones(4)
        descent.zero_grad()
        ((squares * c).sum() / c.sum()).backward()
        descent.step()
    expected = {key: value.detach().numpy() for key, value in w.items()}
    assert_close_arrays(trainer.state.weights, expected, rtol=1e-5, atol=1e-6)
    velocities = {key: descent.state[value]["momentum_buffer"].numpy() for key, value in w.items()}
    slots = {key: own["velocity"] for key, own in trainer.state.slots.items()}
    assert_close_arrays(slots, velocities, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_loop_in_other_dtypes(dtype):
    model, _ = layer_model("hidden", dtype)
    X, Y = normal_rows(16, 5).astype(dtype), normal_rows(16, 3).astype(dtype)
    mine = train_twice(model, X, Y)
    want = train_twice(layer_model("hidden", np.float64)[0], X.astype(float), Y.astype(float))
    close = 1e-6 if dtype == np.float64 else 2e-2
    assert_close_arrays(mine.state.weights, want.state.weights, rtol=close, atol=close)


def test_members_of_a_stack_train_as_trainers():
    model, _ = layer_model("hidden")
    X, Y = normal_rows(16, 5), normal_rows(16, 3)
    stack = og.TrainerStack(model, "squared_error", optimizer=og.optimizers.nesterov(0.9),
                            learning_rate=[0.01, 0.02])  # fmt: skip
    stack.fit(X, Y, epochs=2, batch_size=4, shuffle=False)
    for k, rate in enumerate((0.01, 0.02)):
        one = og.Trainer(
            model, "squared_error", optimizer=og.optimizers.nesterov(0.9), learning_rate=rate
        )
        one.fit(X, Y, epochs=2, batch_size=4, shuffle=False)
        expected = one.state.weights
        assert_close_arrays(stack.state.values[k].weights, expected, rtol=1e-5, atol=1e-6)


# -- epochs at once -------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Return how many epochs each call may run; a call of the runtime takes no time."""
    seen: list[int] = []
    plain = training_loop.Loop.epochs_per_call

    def epochs_per_call(loop):
        loop.runner.seconds_per_batch, loop.runner.last_batches = 1e-6, 1000
        seen.append(plain(loop))
        return seen[-1]

    monkeypatch.setattr(training_loop.Loop, "epochs_per_call", epochs_per_call)
    return seen


def fit_hidden(epochs=7, rows=16, callbacks=(), resume=None, **options):
    model, _ = layer_model("hidden")
    rng = np.random.default_rng(5)
    X, Y = (rng.standard_normal((rows, n)).astype(np.float32) for n in (5, 3))
    options = {"optimizer": "nesterov", "learning_rate": 0.01} | options
    trainer = og.Trainer(model, "squared_error", callbacks=list(callbacks), **options)
    return trainer.fit(X, Y, epochs=epochs, batch_size=4, resume=resume)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learning_rate": og.schedules.cosine(0.02, 28)},
        {"accumulate": 2},
        {"optimizer": og.optimizers.ema(og.optimizers.adam(), 0.9)},
    ],
    ids=["constant", "schedule", "accumulate", "average"],
)
def test_epochs_at_once_change_no_bit(options, calls):
    mine = fit_hidden(**options)
    assert calls == [7]
    assert_equal_trainings(mine, fit_hidden(callbacks=[Look()], **options))
    assert calls[1:] == [1] * 7


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 18},  # the last batch is shorter
        {"learning_rate": og.schedules.plateau(0.01, monitor="loss")},
    ],
    ids=["short batch", "plateau"],
)
def test_what_runs_epoch_by_epoch(options, calls):
    fit_hidden(**options)
    assert max(calls) <= 1


def test_epochs_at_once_resume(tmp_path, calls):
    whole, part = fit_hidden(epochs=7), fit_hidden(epochs=3, callbacks=[og.Checkpoint(tmp_path)])
    assert part.state.epoch == 3
    again = fit_hidden(epochs=7, resume=tmp_path)
    assert calls[-1] == 4
    assert_equal_trainings(again, whole)


def test_epoch_that_is_not_finite_is_found(calls):
    """The epochs before it are kept, and the error names it, as without a call for several."""
    errors = []
    for callbacks in ([], [Look()]):
        with pytest.raises(og.ConvergenceError) as error:
            fit_hidden(epochs=60, learning_rate=30.0, optimizer="sgd", callbacks=callbacks)
        errors.append(str(error.value))
    assert calls[0] > 1
    assert "epoch 1 " not in errors[0]
    assert errors[0] == errors[1]


def test_estimator_runs_epochs_at_once(calls):
    model, _ = layer_model("hidden")
    X, Y = normal_rows(16, 5), normal_rows(16, 3)
    for rate, expected in (("constant", [6]), ("invscaling", [1] * 6)):
        calls.clear()
        mine = og.compat.OrtGradientForwardBackwardOptimizer(
            model, max_iter=6, batch_size=4, random_state=0, weights_to_train=list("wbvd"),
            learning_rate=og.compat.LearningRateSGD(0.01, learning_rate=rate),
        ).fit(X, Y)  # fmt: skip
        assert calls == expected
        assert len(mine.train_losses_) == 6


def test_interrupt_between_epochs_at_once(calls, monkeypatch):
    """Ctrl-C in a call takes effect behind all of its epochs."""
    model, _ = layer_model("hidden")
    trainer = og.Trainer(model, "squared_error", learning_rate=0.01)
    plain = Runner.run

    def run_and_interrupt(self, *arguments):
        losses = plain(self, *arguments)
        if self.now.steps >= 4 * 5:
            signal.raise_signal(signal.SIGINT)
        return losses

    monkeypatch.setattr(Runner, "run", run_and_interrupt)
    X, Y = normal_rows(16, 5), normal_rows(16, 3)
    with default_signal_handlers(), pytest.raises(KeyboardInterrupt):
        trainer.fit(X, Y, epochs=9, batch_size=4)
    state = trainer.state
    assert (state.epoch, state.step, len(state.history)) == (9, 36, 9)
