"""Groups of weights that are updated together, and the arrays of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph import shapes
from onnxgrad.optimizers import Optimizer

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]


@dataclass
class Group:
    """Weights that are updated together: a large one, or small ones in one flat vector.

    Attributes:
        shapes: the shapes of the weights, by name.
        state: the input that holds the weights: of the shape of the only one, or two axes if it is
            updated in blocks, or flat.
        slots: an input for each slot.
        optimizer: that of each weight of the group, as `for_weight` returns it.
        in_blocks: whether the state consists of blocks, which are updated one after the other.
    """

    shapes: dict[str, Shape]
    state: ir.Value
    slots: dict[str, ir.Value]
    optimizer: Optimizer
    in_blocks: bool

    @property
    def inputs(self) -> list[ir.Value]:
        """The weights' state, then its slots."""
        return [self.state, *self.slots.values()]

    def initial(
        self, weights: Mapping[str, np.ndarray], slots: Mapping[str, Mapping[str, np.ndarray]]
    ) -> list[np.ndarray]:
        """Return the arrays of the inputs, in their order.

        Args:
            weights: the weights by name, also of other groups.
            slots: `{weight: {slot: array}}`; a slot that is missing starts at its initial value.

        Raises:
            ValueError: a slot of another shape, or one that weights of the group must share and
                that differs between them.
        """
        arrays = [self.pack(weights)]
        for slot in self.slots:
            if (constant := self._constant(slot, weights, slots)) is not None:
                arrays.append(constant)
                continue
            values = {}
            for name, shape in self.shapes.items():
                value = slots.get(name, {}).get(slot)
                if value is None:
                    initial = self.optimizer.slot_initial(slot, np.asarray(weights[name]))
                    value = np.broadcast_to(initial, self.optimizer.slot_shape(slot, shape))
                values[name] = value
            arrays.append(self.pack(values, slot))
        return arrays

    def _constant(
        self, slot: str, weights: Mapping[str, np.ndarray], slots: Mapping[str, Mapping]
    ) -> np.ndarray | None:
        """Return the array of a slot that starts at one number; None if there is another value.

        Zeros take memory only when they are written.
        """
        if any(slot in slots.get(name, {}) for name in self.shapes):
            return None
        initial = [self.optimizer.slot_initial(slot, np.asarray(weights[n])) for n in self.shapes]
        if any(np.ndim(value) or value != initial[0] for value in initial):
            return None
        like = self.slots[slot]
        shape, dtype = shapes.static(shapes.dims(like)) or (), numpy_dtype(like)
        return np.full(shape, initial[0], dtype) if initial[0] else np.zeros(shape, dtype)

    def split(self, arrays: Iterable[np.ndarray]) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the weights, and the slots by weight, from the arrays of the inputs."""
        state, *rest = arrays
        slots: dict[str, Arrays] = {name: {} for name in self.shapes}
        for slot, array in zip(self.slots, rest, strict=True):
            for name, value in self.unpack(array, slot).items():
                slots[name][slot] = value
        return self.unpack(state), slots

    def pack(self, arrays: Mapping[str, np.ndarray], slot: str | None = None) -> np.ndarray:
        """Return the weights, or one slot of each, as one array, a copy: that of an input."""
        like = self.state if slot is None else self.slots[slot]
        parts = []
        for name, shape in self._shapes(slot).items():
            part = np.asarray(arrays[name], numpy_dtype(like))
            if part.shape != shape:
                what = "" if slot is None else f"the slot {slot!r} of "
                raise ValueError(f"{what}{printable(name)} has the shape {part.shape}, not {shape}")
            parts.append(part.ravel())
        if slot is not None and self._shared(slot):
            if any(part != parts[0] for part in parts):
                raise ValueError(
                    f"the slot {slot!r} is shared by {', '.join(map(printable, self.shapes))}, "
                    "and differs between them: set all of them, or none"
                )
            parts = parts[:1]
        joined = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
        return joined.reshape(shapes.static(shapes.dims(like)) or ())

    def unpack(self, array: np.ndarray, slot: str | None = None) -> Arrays:
        """Return the array of an input as one array per weight, copies."""
        wanted = self._shapes(slot)
        if slot is not None and self._shared(slot):
            return {name: array.copy() for name in wanted}
        parts = np.split(array.ravel(), np.cumsum([prod(s) for s in wanted.values()])[:-1])
        return {
            name: part.reshape(shape).copy()
            for (name, shape), part in zip(wanted.items(), parts, strict=True)
        }

    def _shapes(self, slot: str | None) -> dict[str, Shape]:
        if slot is None:
            return self.shapes
        return {name: self.optimizer.slot_shape(slot, s) for name, s in self.shapes.items()}

    def _shared(self, slot: str) -> bool:
        """Return whether the weights of the group, all elementwise, have one number in common."""
        return len(self.shapes) > 1 and not shapes.dims(self.slots[slot])


def numpy_dtype(value: ir.Value) -> np.dtype:
    """Return the numpy dtype of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()
