"""Fifty steps of an optimizer along fixed gradients, by the model of its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from onnxgrad.optimizers import Optimizer
from onnxgrad.training.step.update import build_update, weights_to_evaluate
from tests.support.models import parse_model
from tests.support.running import session_of

STEPS = 50
SHAPES: dict[str, tuple[int, ...]] = {
    "scale": (),
    "bias": (3,),
    "norm.weight": (7,),
    "tall": (6, 4),
    "wide": (3, 5),
    "conv": (3, 2, 2, 2),
}
RATES = 0.02 * (1 + 0.8 * np.sin(np.arange(STEPS)))
TOLERANCE = {np.float64: 1e-10, np.float32: 1e-5}
Arrays = dict[str, np.ndarray]


def first_weights(dtype: Any = np.float64) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(s), dtype) for name, s in SHAPES.items()}


def fixed_gradients(dtype: Any = np.float64) -> list[Arrays]:
    """Return gradients with a direction, some of them zero, of sizes that differ by weight."""
    rng = np.random.default_rng(1)

    def gradient(name: str, size: float) -> np.ndarray:
        direction = rng.standard_normal(SHAPES[name]) + 0.5
        return np.asarray(size * direction * (rng.random() > 0.1), dtype)

    sizes = {name: 10.0 ** (i - 2) for i, name in enumerate(SHAPES)}
    return [{name: gradient(name, size) for name, size in sizes.items()} for _ in range(STEPS)]


def update_session(
    optimizer: Optimizer, dtype: Any, shapes: Mapping = SHAPES
) -> ort.InferenceSession:
    return session_of(
        build_update({name: (shape, dtype) for name, shape in shapes.items()}, optimizer)
    )


def first_slots(optimizer: Optimizer, weights: Arrays) -> Arrays:
    """Return the slots at the start, by the names of the inputs."""
    slots = {}
    for name, w in weights.items():
        own = optimizer.for_weight(name, w.shape)
        for slot in own.slots:
            value = np.broadcast_to(own.slot_initial(slot, w), own.slot_shape(slot, w.shape))
            slots[f"{name}.{slot}"] = value.astype(w.dtype)
    return slots


def weights_after_fifty_steps(
    optimizer: Optimizer, dtype: Any, each: Callable[[Arrays], None] = lambda weights: None
) -> tuple[Arrays, Arrays]:
    """Return the weights after all steps, and those to evaluate."""
    session, weights = update_session(optimizer, dtype), first_weights(dtype)
    names = [y.name.removesuffix(".new") for y in session.get_outputs()]
    state = weights | first_slots(optimizer, weights)
    for t, (g, rate) in enumerate(zip(fixed_gradients(dtype), RATES, strict=True), 1):
        fed = {f"{name}_grad": array for name, array in g.items()}
        fed |= {"minus_learning_rate": np.array(-rate, dtype), "step": np.array(t)}
        state = dict(zip(names, session.run(None, state | fed), strict=True))
        each({name: state[name] for name in weights})
    slots: dict[str, Arrays] = {name: {} for name in weights}
    for name in names:
        weight, _, slot = name.rpartition(".")
        if weight in slots and name not in weights:
            slots[weight][slot] = state[name]
    weights = {name: state[name] for name in weights}
    return weights, weights_to_evaluate(optimizer, weights, slots, STEPS)


def assert_equal_weights(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float
) -> None:
    """Compare weights, relative to the largest element of each."""
    for name, value in theirs.items():
        value = np.asarray(value)
        limit = tolerance * max(1e-300, np.abs(value).max())
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=limit, err_msg=name)


def two_product_model(units: int, dtype: str = "double", bias: str = "b") -> onnx.ModelProto:
    """Return tanh(x w + b) u, where u has three rows of `units`."""
    rng = np.random.default_rng(0)
    kind = {"float": np.float32, "double": np.float64}[dtype]
    shapes = {"w": (4, 3), bias: (3,), "u": (3, units)}
    return parse_model(
        f"""g ({dtype}[N, 4] x) => ({dtype}[N, {units}] y)
        {{ h = MatMul(x, w)  i = Add(h, {bias})  j = Tanh(i)  y = MatMul(j, u) }}""",
        **{n: (rng.standard_normal(s) / 3).astype(kind) for n, s in shapes.items()},
    )
