"""The states between steps, weights, slots and buffers: replaced by a step, or updated in place.

Usually, states are replaced by the outputs of a call. Large weights and slots are in memory once:
their step consists of two models, of which the first computes all gradients, and the second updates
one group of weights by its gradient. The second model runs twice: the first time, its results are
only checked to be finite, so that a step with NaN or infinity changes no state; the second time,
the results replace the states, part by part. Memory holds the states and the gradients only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce
from math import prod
from operator import and_
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.operators.shapes import dims, static
from onnxgrad.parallel.process_groups import Group
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import Value, array_of, bind_output, is_finite
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.inputs import FEEDS, RuntimeCall
from onnxgrad.training.step.update import may_update_by_parts
from onnxgrad.training.step.weight_groups import WeightGroup

PART = 1 << 17  # elements that are updated at once: the results stay in the cache
LARGE_STATE = 1 << 20  # elements from which a state is large
_DTYPES = {"tensor(float)": np.float32, "tensor(double)": np.float64}
States = Sequence[ort.OrtValue | None]
OutputArray = Callable[[str, ort.OrtValue], np.ndarray | None]


class ReplacedStates:
    """States that are replaced by the outputs of a call.

    The states of a stack have the axis of members, the copies of its model, first.
    """

    in_place = False

    def __init__(self, step: Step, device: Device) -> None:
        self.device, self.member_axes = device, int(step.members is not None)
        self._memory: dict[str, list[np.ndarray]] = {}  # arrays of large states, by input name

    def output_array(self, name: str, state: ort.OrtValue) -> np.ndarray | None:
        """Return an array into which a call writes a new state; None lets onnxruntime allocate.

        A large state gets the array of an earlier state that no object refers to any more.
        onnxruntime would divide freed memory between smaller values, and take more memory for the
        next state.
        """
        dtype = _DTYPES.get(state.data_type())
        if self.device != CPU or dtype is None or prod(state.shape()) < LARGE_STATE:
            return None
        arrays = self._memory.setdefault(name, [])
        unread = next((i for i, n in enumerate(_ref_counts(arrays)) if n == _UNREAD), None)
        if unread is not None:
            return arrays[unread]
        arrays[:] = [*arrays[-1:], np.empty(state.shape(), dtype)]
        return arrays[-1]

    def are_finite(self, new: Sequence[Value], call: RuntimeCall, old: States) -> np.ndarray:
        """Return whether all new states are finite, for each member of a stack."""
        return reduce(and_, (is_finite(value, self.member_axes) for value in new))

    def next_states(
        self, new: Sequence[Value], call: RuntimeCall, old: States, frozen: Collection[int]
    ) -> list[ort.OrtValue]:
        """Return the states after a call; `frozen` members of a stack keep their old states."""
        kept = [as_state(value, self.device) for value in new]
        if not frozen:
            return kept
        members, arrays = list(frozen), [np.array(array_of(state)) for state in kept]
        for array, before in zip(arrays, old, strict=True):
            if before is not None:
                array[members] = array_of(before)[members]
        return list(map(self.device.ortvalue, arrays))

    def release(self) -> None:
        """Free the arrays that were kept for new states."""
        self._memory.clear()


def as_state(value: Value, device: Device) -> ort.OrtValue:
    """Return a result of a step as a state on the device; an array is copied."""
    return device.ortvalue(value.copy()) if isinstance(value, np.ndarray) else value


def _ref_counts(items: list[Any]) -> list[int]:
    """Return the count of references to each item, including references of this function."""
    return [sys.getrefcount(items[i]) for i in range(len(items))]


# the count for an item to which only its list refers; versions of Python count differently
(_UNREAD,) = _ref_counts([object()])


class InPlaceStates:
    """States that models update in place, by the gradients of one batch.

    Args:
        step: the first half of a step; its `updates` are the second half.
        work: multiply-adds of the step.
        group: the group of processes; if the step has `owners`, each process updates some weights.
    """

    in_place = True

    def __init__(self, step: Step, work: float, group: Group) -> None:
        self.step, self.group = step, group
        self.updates = [  # of the groups that this process updates
            None if model is None else GroupUpdate(g, model, work)
            for g, model in zip(step.groups, step.updates or (), strict=True)
        ]
        pairs = zip(step.groups, step.model.graph.outputs, strict=False)
        # the shapes of gradients, which may have other axes than the weights
        self._shapes = {str(group.state.name): static(dims(y)) for group, y in pairs}
        # arrays for gradients by state; memory that onnxruntime allocates would grow larger
        self._gradients: dict[str, np.ndarray] = {}

    def output_array(self, name: str, state: ort.OrtValue) -> np.ndarray | None:
        """Return the array into which a call writes a gradient; None lets onnxruntime allocate."""
        if name in self._shapes and name not in self._gradients:
            shape = self._shapes[name]
            like = array_of(state)
            self._gradients[name] = np.empty(like.shape if shape is None else shape, like.dtype)
        return self._gradients.get(name)

    def are_finite(self, results: Sequence[Value], call: RuntimeCall, old: States) -> bool:
        """Return whether the update gives finite buffers, weights and slots; change nothing."""
        buffers = results[len(self.step.groups) :]
        jobs = self._group_updates_with_gradients(results, old)
        return all(map(is_finite, buffers)) and all(
            update.run(own, g, call, write=False) for update, own, g in jobs
        )

    def next_states(
        self, results: Sequence[Value], call: RuntimeCall, old: States, frozen: Collection[int]
    ) -> list[ort.OrtValue | None]:
        """Update the states in place, exchange weights between processes, and return the states."""
        arrays, count = self._state_views_by_group(old), len(self.step.states)
        try:
            for update, own, g in self._group_updates_with_gradients(results, old):
                update.run(own, g, call, write=True)
            for owner, (weights, *_) in zip(self.step.owners, arrays, strict=False):
                self.group.broadcast(weights.reshape(-1), owner)
        except BaseException:
            for array in (array for own in arrays for array in own):
                array.fill(np.nan)  # some were replaced: weights of two steps must not be mixed
            raise
        buffers = results[len(self.step.groups) :]
        return [*old[:count], *(as_state(value, CPU) for value in buffers)]

    def _group_updates_with_gradients(
        self, results: Sequence[Value], states: States
    ) -> Iterator[tuple[GroupUpdate, list[np.ndarray], np.ndarray]]:
        """Yield (update, arrays that change, gradient) for each group that this process updates."""
        arrays = self._state_views_by_group(states)
        for update, own, gradient in zip(self.updates, arrays, results, strict=False):
            if update is not None:
                yield update, own, array_of(gradient).reshape(own[0].shape)

    def _state_views_by_group(self, states: States) -> list[list[np.ndarray]]:
        """Return for each group views of the states in memory: its weights, then its slots."""
        rest = iter(states)
        return [
            [array_of(state) for _ in group.inputs if (state := next(rest)) is not None]
            for group in self.step.groups
        ]

    def release(self) -> None:
        """Free the arrays of gradients, which only steps need."""
        self._gradients.clear()


class GroupUpdate:
    """The session that updates one group of weights in place.

    Args:
        group: the group of weights.
        model: the model of the update, see `group_update_model`.
        work: multiply-adds of the step.
    """

    def __init__(self, group: WeightGroup, model: ModelProto, work: float) -> None:
        self.session, self.divided = session(model, CPU, work), may_update_by_parts(group)
        count = len(group.inputs) + 1
        self.names = [x.name for x in model.graph.input[:count]]
        self.feeds = {
            x.name: ir.DataType(x.type.tensor_type.elem_type) for x in model.graph.input[count:]
        }
        self.outputs = [y.name for y in model.graph.output]

    def run(
        self,
        states: Sequence[np.ndarray],
        gradient: np.ndarray,
        call: RuntimeCall,
        write: bool,
    ) -> bool:
        """Compute the new weights and slots of the group, and return whether they are finite.

        With `write`, the new values are written over `states` unchecked, and the result is True.
        """
        whole, size = [*states, gradient], gradient.size
        divided = [self.divided and array.shape == gradient.shape for array in whole]
        binding, length = self.session.io_binding(), PART if self.divided else size
        for name, dtype in self.feeds.items():
            binding.bind_cpu_input(name, np.asarray(FEEDS[name].arrays_of_call(call, dtype)[0]))
        results: list[np.ndarray] = []
        for i in range(0, size, length):
            pairs = zip(whole, divided, strict=True)
            parts = [a.reshape(-1)[i : i + length] if d else a for a, d in pairs]
            for name, array in zip(self.names, parts, strict=True):
                binding.bind_input(name, *CPU.memory, array.dtype, array.shape, array.ctypes.data)
            if not results or parts[0].shape != results[0].shape:
                results = [np.empty_like(array) for array in parts[:-1]]
                for name, array in zip(self.outputs, results, strict=True):
                    bind_output(binding, name, array)
            with escaping():
                self.session.run_with_iobinding(binding)
            if not write and not all(np.isfinite(array).all() for array in results):
                return False
            last = i + length >= size
            for array, new, d in zip(parts, results, divided, strict=False):
                if write and (d or last):  # the next part reads a slot of one number again
                    np.copyto(array, new)
        return True
