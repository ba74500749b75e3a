"""Running the models of training: the epoch, and the loss of validation data."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session
from onnxgrad.training.data import Fields, Slice
from onnxgrad.training.objective import Objective
from onnxgrad.training.state import Values
from onnxgrad.training.step import Step

SECONDS_PER_CALL = 0.2  # so that progress, callbacks and Ctrl-C get their turn
ROWS = 1024  # rows per call of an evaluation


class Runner:
    """Runs slices of batches; keeps the states on the device between calls."""

    def __init__(self, model: ModelProto, step: Step, mean: bool, device: Any, work: float) -> None:
        self.device = Device.of(device)
        self.session = session(model, self.device, work)
        self.step, self.mean = step, mean
        self.names = [x.name for x in self.session.get_inputs()]
        self.outputs = [y.name for y in self.session.get_outputs()]
        self.now: tuple[list[ort.OrtValue], int] = ([], 0)  # the states, and the steps done
        self.seconds_per_batch = SECONDS_PER_CALL
        self.last = 1

    def load(self, values: Values) -> None:
        """Set the states; a slot that is missing starts at zero."""
        states = []
        for group in self.step.groups:
            states.append(group.pack(values.weights))
            for slot in group.slots:
                zeros = {name: np.zeros(shape) for name, shape in group.shapes.items()}
                saved = {n: s[slot] for n, s in values.slots.items() if slot in s and n in zeros}
                states.append(group.pack(zeros | saved))
        self.now = [self.device.ortvalue(state) for state in states], values.steps

    def budget(self) -> int:
        """Return how many batches the next call may run."""
        return max(1, min(8 * self.last, int(SECONDS_PER_CALL / self.seconds_per_batch)))

    def run(self, piece: Slice, rate: float) -> np.ndarray | None:
        """Train on the batches of `piece`; return the summed loss of each.

        Return None, and leave the states unchanged, if the loss or a weight is not finite.
        """
        start = time.perf_counter()
        binding, (states, done) = self.session.io_binding(), self.now
        fed = [*piece.arrays.values(), *self._scalars(piece, rate, done)]
        for name, state in zip(self.names, states, strict=False):
            binding.bind_ortvalue_input(name, state)
        for name, array in zip(self.names[len(states) :], fed, strict=True):
            binding.bind_cpu_input(name, array)
        self.device.bind_outputs(binding, self.outputs)
        with escaping():
            self.session.run_with_iobinding(binding)
        *states, losses = binding.get_outputs()
        values = losses.numpy().astype(np.float64)
        if not np.isfinite(values).all() or not all(np.isfinite(s.numpy()).all() for s in states):
            return None
        self.now = states, done + piece.batches  # in one assignment, which cannot be interrupted
        self.last = piece.batches
        self.seconds_per_batch = (time.perf_counter() - start) / piece.batches
        return values.ravel() * (piece.rows if self.mean else 1)

    def _scalars(self, piece: Slice, rate: float, done: int) -> list[np.ndarray]:
        """Return the inputs of the epoch other than states and data.

        The gradient of a loss that is a sum over rows is divided by the number of rows.
        """
        step, count, inverse = self.step, piece.batches, 1.0 if self.mean else 1 / piece.rows
        kind = step.rate_dtype
        minus_rate = -rate * (inverse if step.inverse_rows is None else 1.0)
        fed = [np.full(count, minus_rate, kind)]
        if not fed[0][0]:
            raise ValueError(f"a learning rate of {-minus_rate:g} is zero in {kind}: raise it")
        if step.counts:
            fed.append(np.arange(done + 1, done + 1 + count).astype(kind))
        if step.inverse_rows is not None:
            fed.append(step.like_loss(inverse))
        return fed

    def unpacked(
        self, states: Sequence[ort.OrtValue]
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return the weights in `states`, and the slots of every weight, by name."""
        weights: dict[str, np.ndarray] = {}
        slots: dict[str, dict[str, np.ndarray]] = {}
        arrays = (state.numpy() for state in states)
        for group in self.step.groups:
            weights |= group.unpack(next(arrays))
            slots |= {name: {} for name in group.shapes}
            for slot in group.slots:
                for name, array in group.unpack(next(arrays)).items():
                    slots[name][slot] = array
        return weights, slots


class Evaluation:
    """The loss of fixed data for any weights."""

    def __init__(
        self,
        objective: Objective,
        fields: Fields,
        data: dict[str, np.ndarray],
        device: Any,
        work: float,
    ) -> None:
        self.rows, self.mean = fields.fixed_rows or ROWS, fields.mean
        self.session = session(
            objective.compute(objective.loss), Device.of(device), work * self.rows
        )
        self.data = data

    @escaping()
    def loss(self, weights: dict[str, np.ndarray]) -> float:
        """Return the mean loss of a row."""
        count, total = len(next(iter(self.data.values()))), 0.0
        for part, rows in pieces(self.data, self.rows):
            (value,) = self.session.run(None, {**part, **weights})
            total += float(np.sum(value)) * (rows if self.mean else 1)
        return total / count


def pieces(
    arrays: Mapping[str, np.ndarray], size: int
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """Yield the arrays in pieces of `size` rows, the last one shorter, and the rows of a piece."""
    count = len(next(iter(arrays.values())))
    for start in range(0, count, size):
        rows = min(size, count - start)
        yield {name: array[start : start + rows] for name, array in arrays.items()}, rows
