"""Groups of stacked weights that are updated together, and their states as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.shapes import dims, static
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.step.weight_groups import numpy_dtype

Shape = tuple[int, ...]
Slots = Mapping[str, Mapping[str, np.ndarray]]


@dataclass
class Rows:
    """The members of a group that have one optimizer; their slots are inputs, (rows, ...)."""

    optimizer: Optimizer
    members: list[int]
    slots: dict[str, ir.Value]


@dataclass
class StackGroup:
    """Weights of all members that are updated together.

    Attributes:
        shapes: of the weights of one member, by name.
        own: the optimizer of each member for these weights.
        state: the input of the weights: (members, ...), or (members, elements) for several.
        rows: the members by optimizer.
    """

    shapes: dict[str, Shape]
    own: list[Optimizer]
    state: ir.Value
    rows: list[Rows]

    @property
    def inputs(self) -> list[ir.Value]:
        """The state, then the slots."""
        return [self.state, *(slot for rows in self.rows for slot in rows.slots.values())]

    def initial(self, weights: Sequence[Mapping], slots: Sequence[Slots]) -> list[np.ndarray]:
        """Return the arrays of the inputs, from the weights and slots of each member by name."""
        arrays = [np.stack([self._packed(w, self.shapes) for w in weights])]
        for rows in self.rows:
            arrays += [self._slot(rows, slot, weights, slots) for slot in rows.slots]
        dtype = numpy_dtype(self.state)
        inputs = [static(dims(v)) or () for v in self.inputs]
        return [
            np.ascontiguousarray(a.reshape(shape), dtype)
            for a, shape in zip(arrays, inputs, strict=True)
        ]

    def _slot(
        self, rows: Rows, slot: str, weights: Sequence[Mapping], slots: Sequence[Slots]
    ) -> np.ndarray:
        """Return a slot of the members of `rows`."""
        arrays = []
        for k in rows.members:
            own, values = self.own[k], {}
            for name, shape in self.shapes.items():
                value: Any = slots[k].get(name, {}).get(slot)
                if value is None:
                    value = own.slot_initial(slot, np.asarray(weights[k][name]))
                values[name] = np.broadcast_to(value, own.slot_shape(slot, shape))
            shared = all(own.slot_shape(slot, s) == () for s in self.shapes.values())
            first = next(iter(self.shapes))
            arrays.append(
                self._packed({first: values[first]}, [first])
                if shared
                else self._packed(values, values)
            )
        return np.stack(arrays)

    def _packed(self, arrays: Mapping[str, np.ndarray], names: Any) -> np.ndarray:
        return np.concatenate([np.ravel(arrays[name]) for name in names])

    def split(self, arrays: Sequence[np.ndarray], k: int) -> tuple[dict, dict]:
        """Return the weights and slots of member `k`, by name, from the arrays of the inputs."""
        rows, start = self._rows_of(k)
        row = rows.members.index(k)
        weights = self._unpacked(arrays[0][k], self.shapes)
        slots: dict[str, dict[str, np.ndarray]] = {name: {} for name in self.shapes}
        for i, slot in enumerate(rows.slots):
            own, array = self.own[k], arrays[start + i][row]
            wanted = {name: own.slot_shape(slot, s) for name, s in self.shapes.items()}
            if all(s == () for s in wanted.values()):
                values = {name: array.reshape(()).copy() for name in wanted}
            else:
                values = self._unpacked(array, wanted)
            for name, value in values.items():
                slots[name][slot] = value
        return weights, slots

    def _rows_of(self, k: int) -> tuple[Rows, int]:
        """Return the rows of member `k`, and the index of their first slot among the inputs."""
        start = 1
        for rows in self.rows:
            if k in rows.members:
                return rows, start
            start += len(rows.slots)
        raise IndexError(k)

    def _unpacked(self, array: np.ndarray, wanted: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        parts = np.split(array.ravel(), np.cumsum([prod(s) for s in wanted.values()])[:-1])
        return {
            name: part.reshape(shape).copy()
            for (name, shape), part in zip(wanted.items(), parts, strict=True)
        }

    def restore(self, arrays: Sequence[np.ndarray], before: Sequence[np.ndarray], k: int) -> None:
        """Set member `k` back in `arrays` to what it is in `before`."""
        rows, start = self._rows_of(k)
        arrays[0][k] = before[0][k]
        row = rows.members.index(k)
        for i in range(start, start + len(rows.slots)):
            arrays[i][row] = before[i][row]

    def finite(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return which members have only finite values, (members,)."""
        count = len(self.own)
        fine = np.isfinite(arrays[0].reshape(count, -1)).all(axis=1)
        start = 1
        for rows in self.rows:
            for array in arrays[start : start + len(rows.slots)]:
                fine[rows.members] &= np.isfinite(array.reshape(len(rows.members), -1)).all(axis=1)
            start += len(rows.slots)
        return fine
