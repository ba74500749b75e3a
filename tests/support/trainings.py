"""Small models of trainings, callbacks that end them, and comparisons of what comes out."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike

import onnxgrad as og
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import ComputedLoss
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe, build_objective
from tests.support.models import parse_model


def linear_model(weight: ArrayLike, bias: ArrayLike | None = None) -> onnx.ModelProto:
    """Return y = x w + b of float32, or y = x w, whose weights are called `w` and `b`."""
    w = np.asarray(weight, np.float32)
    b = {} if bias is None else {"b": np.asarray(bias, np.float32)}
    product = "y = MatMul(x, w)" if bias is None else "h = MatMul(x, w)  y = Add(h, b)"
    text = f"f (float[N,{w.shape[0]}] x) => (float[N,{w.shape[1]}] y) {{ {product} }}"
    return parse_model(text, opset=20, w=w, **b)


def two_layer_model(
    sizes: tuple[int, int, int], activation: str = "Tanh", dtype: Any = np.float32, seed: int = 1
) -> onnx.ModelProto:
    """Return a perceptron of two layers, whose weights `w0`, `b0`, `w1`, `b1` are drawn."""
    kind = {"f": "float", "d": "double"}[np.dtype(dtype).char]
    rng, (inputs, units, outputs) = np.random.default_rng(seed), sizes
    shapes = {"w0": (inputs, units), "b0": (units,), "w1": (units, outputs), "b1": (outputs,)}
    return parse_model(
        f"""f ({kind}[N,{inputs}] x) => ({kind}[N,{outputs}] y) {{
            a = MatMul(x, w0)  b = Add(a, b0)  h = {activation}(b)  y = Gemm(h, w1, b1) }}""",
        opset=20,
        **{name: rng.normal(0, 0.5, shape).astype(dtype) for name, shape in shapes.items()},
    )


def normalized_model() -> onnx.ModelProto:
    """Return a product behind a BatchNormalization that has statistics of other rows."""
    return parse_model(
        """f (float[N,3] x) => (float[N,1] y) {
            h = BatchNormalization(x, scale, shift, mean, variance)  y = MatMul(h, w) }""",
        opset=20,
        scale=[1.0, 1.1, 1.2],
        shift=[0.1, 0.2, 0.3],
        mean=[0.5, 0.0, 0.0],
        variance=[2.0, 1.0, 1.5],
        w=[[0.1], [0.2], [0.3]],
    )


class ActAtStep(og.callbacks.Callback):
    """Calls `act(control)` once, in one event, from one step on."""

    def __init__(self, event: str, step: int, act: Any, every_steps: int | None = 1) -> None:
        self.step, self.act, self.done, self.every_steps = step, act, False, every_steps
        setattr(self, f"on_{event}", self.act_once)

    def act_once(self, trainer: Any, state: Any, control: Any) -> None:
        if state.step >= self.step and not self.done:
            self.done = True
            self.act(control)


def interrupt_training(control: Any) -> None:
    """Break a training off, as Ctrl-C does."""
    raise KeyboardInterrupt


def stop_training(control: Any) -> None:
    """End a training, as EarlyStopping does."""
    control.stop = True


@contextmanager
def default_signal_handlers() -> Iterator[None]:
    """Let signals raise what they raise in a program, and require that they still do at the end.

    pytest has handlers, and so has `conftest.py` for signals that are ignored, as under nohup.
    """
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    try:
        yield
        assert {number: signal.getsignal(number) for number in own} == own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def assert_close_arrays(
    actual: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert that arrays are close to all expected ones, of which there must be some."""
    assert expected
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol, atol, err_msg=name)


def assert_equal_trainings(one: Any, two: Any) -> None:
    """Assert that two trainers have equal states and histories, bit for bit."""
    a, b = one.state, two.state
    assert (a.history, a.step, a.epoch) == (b.history, b.step, b.epoch)
    np.testing.assert_equal([a.weights, a.slots, a.buffers], [b.weights, b.slots, b.buffers])
    for name in ("schedule", "position", "pending"):
        np.testing.assert_equal(getattr(a, name), getattr(b, name))


def objective_with_loss(
    model: onnx.ModelProto, weights: Sequence[str], loss: str = "loss", row_weight: str = "weight"
) -> Objective:
    """Return the objective of a model whose output `loss` is the loss."""
    return build_objective(Recipe(Job(model, weights, ComputedLoss(loss, row_weight))))
