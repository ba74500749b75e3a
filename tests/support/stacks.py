"""A stack of members and the trainers of its members, trained alike and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from tests.support.models import initializer_arrays
from tests.support.trainings import assert_close_arrays

MEMBERS = 3
LISTS = ("learning_rate", "optimizer")  # arguments that may differ between members


def stack_and_trainers(
    model: onnx.ModelProto, loss: Any = "cross_entropy", callbacks: Any = list, **options: Any
) -> tuple[og.TrainerStack, list[og.Trainer]]:
    """Return a stack, and the trainers of its members with the weights that these begin with.

    `callbacks` makes the callbacks of each of them.
    """
    options = {"optimizer": "adam", "init": "redrawn"} | options
    stack = og.TrainerStack(model, loss, members=MEMBERS, callbacks=callbacks(), **options)
    del options["init"]
    trainers = []
    for k in range(MEMBERS):
        own = {n: v[k] for n, v in options.items() if n in LISTS and isinstance(v, list)}
        trainers.append(og.Trainer(model, loss, callbacks=callbacks(), **options | own))
        trainers[k].state.weights = stack.state.values[k].weights
    return stack, trainers


def fit_all(stack: og.TrainerStack, trainers: list[og.Trainer], *data: Any, **options: Any) -> None:
    """Train a stack and the trainers of its members on the same data."""
    for trainer in (stack, *trainers):
        trainer.fit(*data, **options)


def assert_equal_members(
    stack: og.TrainerStack,
    trainers: list[og.Trainer],
    X: Any,
    y: Any,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    batch_size: int = 9,
) -> None:
    """Assert that weights, slots, buffers, history, predictions, scores and models are equal."""
    predicted = stack.predict(X, batch_size=batch_size)
    evaluated = stack.evaluate(X, y, batch_size=batch_size)
    for k, trainer in enumerate(trainers):
        ours, theirs = stack.state.values[k], trainer.state.values
        assert ours.steps == theirs.steps
        assert_close_arrays(ours.weights, theirs.weights, atol=atol)
        for name, slots in theirs.slots.items():
            for slot, value in slots.items():
                assert ours.slots[name][slot].shape == value.shape
                np.testing.assert_allclose(ours.slots[name][slot], value, 10 * rtol, atol)
        assert ours.buffers.keys() == theirs.buffers.keys()
        for name, buffer in theirs.buffers.items():
            np.testing.assert_allclose(ours.buffers[name], buffer, rtol=1e-5, atol=atol)
        for mine, entry in zip(stack.history, trainer.history, strict=True):
            assert mine.keys() == entry.keys()
            own = {key: np.broadcast_to(value, MEMBERS)[k] for key, value in mine.items()}
            assert_close_arrays(own, entry, rtol, atol)
        own = trainer.predict(X, batch_size=batch_size)
        np.testing.assert_allclose(predicted[k], own, 10 * rtol, 10 * atol)
        scores = trainer.evaluate(X, y, batch_size=batch_size)
        assert_close_arrays({n: v[k] for n, v in evaluated.items()}, scores, rtol, 10 * atol)
        saved = initializer_arrays(stack.model(k))
        assert_close_arrays(saved, initializer_arrays(trainer.model), atol=atol)
