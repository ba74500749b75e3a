"""Training of large weights, of which there is one copy in memory, with their slots.

A step is two models: the first computes all gradients, and the second updates one group of weights
by its gradient. The update runs twice: the first time, its results are only checked to be finite,
so that a step which is not finite changes no state; the second time, they replace the states, part
by part. Beside the states, there is nothing but the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.operators import made_by
from onnxgrad.operators.shapes import dims, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import Binding, array_of, bind_output, is_finite
from onnxgrad.training.run.runner import Losses, Now, Runner
from onnxgrad.training.state import Values
from onnxgrad.training.step.build import Step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.inputs import FEEDS, Call, Slice
from onnxgrad.training.step.update import is_divided
from onnxgrad.training.step.weight_groups import Group

PART = 1 << 17  # elements that are updated at once: the results stay in the cache


def new_runner(
    step: Step,
    target: Target,
    work: float,
    carried: Mapping[str, str] | None = None,
) -> Runner:
    """Return the runner of a step, which takes over its graph; `Runner` has the arguments."""
    kind, build = (Runner, build_epoch) if step.updates is None else (InPlaceRunner, build_half)
    return kind(build(step, target), step, target.device, work, carried)


def build_half(step: Step, target: Target) -> ModelProto:
    """Return the first half of a step, in the native form of sessions on `target`."""
    graph = step.model.graph
    to_native(graph, target)
    for i in range(len(step.groups)):
        y = graph.outputs[i]
        node = made_by(y, "Reshape")
        x = None if node is None else node.inputs[0]
        known = x is not None and x.producer() is not None and static(dims(x)) is not None
        if x is not None and node is not None and known and not x.is_graph_output():
            graph.outputs[i] = x  # the Reshape would copy it
            if not y.uses():
                graph.remove(node, safe=True)
    return to_proto(ir.Model(graph, ir_version=step.model.ir_version, producer_name="onnxgrad"))


class InPlaceRunner(Runner):
    """A `Runner` of one batch a call, which updates the states where they are."""

    in_place = True

    def __init__(self, model: ModelProto, step: Step, device: Any, work: float, *more: Any) -> None:
        super().__init__(model, step, device, work, *more)
        models = step.updates or ()
        self.shapes = {  # of gradients, which may have other axes than the group
            y.name: [d.dim_value for d in y.type.tensor_type.shape.dim]
            for y in model.graph.output[: len(step.groups)]
        }
        self.updates = [  # of the groups that this process updates
            None if model is None else GroupUpdate(g, model, work)
            for g, model in zip(step.groups, models, strict=True)
        ]
        # of the groups; memory that onnxruntime allocates would grow to more than they take
        self.gradients: list[np.ndarray] = []

    def load(self, values: Values) -> None:
        """Set the states, which are copies."""
        self.now = Now([], values.steps)  # which frees the states before there are new ones
        states = self.initial_states(values, copies=True)
        arrays = [a for a in states[: len(self.step.states)] if a is not None]
        self.now = Now(self.on_device(states), values.steps, arrays)

    def arrays_of(self, now: Now) -> list[Any]:
        """Return the states and buffers as arrays; the states keep their memory alive."""
        return [*now.arrays, *super().arrays_of(now)[len(now.arrays) :]]

    def budget(self) -> int:
        """Return how many batches the next call may run."""
        return 1

    def run(self, piece: Slice, rates: np.ndarray, position: int = 0) -> Losses | None:
        """Train on the batch of `piece`, as `Runner.run`."""
        assert piece.batches == 1
        start, now = time.perf_counter(), self.now
        call = self.call(piece, rates, position)
        buffers, losses = self._run_first_half(call)
        if not np.isfinite(losses.sums).all() or not all(map(is_finite, buffers)):
            return None
        jobs = zip(self.updates, self.by_group(), self.gradients, strict=True)
        pairs = [(update, own, g) for update, own, g in jobs if update is not None]
        finite = all(update.run(own, g, call, write=False) for update, own, g in pairs)
        if any(self.agree([not finite])):
            return None
        try:
            for update, own, g in pairs:
                update.run(own, g, call, write=True)
            self.exchange()
        except BaseException:
            for array in now.arrays:  # some of which the next step has replaced
                array.fill(np.nan)
            raise
        self.now = Now(
            [*now.states[: len(now.arrays)], *buffers], now.steps + piece.batches, now.arrays
        )
        self.seconds_per_batch = time.perf_counter() - start
        return losses

    def _run_first_half(self, call: Call) -> tuple[list[ort.OrtValue], Losses]:
        """Compute the gradients; return the new buffers and the losses."""
        own, states = self.step.inputs, self.states(call.piece)
        fed = own.fed(call)
        inputs = {str(v.name): states[str(v.name)] for v in own.carried}
        inputs |= {name: np.asarray(array[0], order="C") for name, array in fed.items()}
        results, count = self.half(inputs, call.piece), len(own.carried)
        losses = self.read_losses([array_of(y)[None] for y in results[count:]], call.piece)
        return results[len(own.states) : count], losses

    def half(
        self, inputs: Mapping[str, ort.OrtValue | np.ndarray], piece: Slice
    ) -> list[ort.OrtValue]:
        """Return the outputs of the first half; the gradients come into `self.gradients`."""
        running = self.sessions.of(piece.fed())
        if not self.gradients:
            self.gradients = [np.empty_like(next(iter(own))) for own in self.by_group()]
        pairs = zip(self.outputs, self.gradients, strict=False)
        into = {name: g.reshape(self.shapes.get(name, g.shape)) for name, g in pairs}
        return Binding(running, self.device).run(inputs, self.outputs, into=into)

    def release(self) -> None:
        """Free what only steps need."""
        self.gradients = []

    def exchange(self) -> None:
        """Give weights that this process has updated to the other processes."""

    def by_group(self) -> Iterator[Sequence[np.ndarray]]:
        """Yield the arrays of each group: the weights, then the slots."""
        first = 0
        for group in self.step.groups:
            yield self.now.arrays[first : first + len(group.inputs)]
            first += len(group.inputs)


class GroupUpdate:
    """The update of one group, by a session."""

    def __init__(self, group: Group, model: ModelProto, work: float) -> None:
        self.session, self.divided = session(model, CPU, work), is_divided(group)
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
        call: Call,
        write: bool,
    ) -> bool:
        """Compute the new weights and slots; return whether they are finite, or write them."""
        whole, size = [*states, gradient], gradient.size
        divided = [self.divided and array.shape == gradient.shape for array in whole]
        binding, length = self.session.io_binding(), PART if self.divided else size
        for name, dtype in self.feeds.items():
            binding.bind_cpu_input(name, np.asarray(FEEDS[name].arrays(call, dtype)[0]))
        results: list[np.ndarray] = []
        for i in range(0, size, length):
            pairs = zip(whole, divided, strict=True)
            parts = [a.reshape(-1)[i : i + length] if d else a for a, d in pairs]
            for name, array in zip(self.names, parts, strict=True):
                binding.bind_input(
                    name, CPU.kind, CPU.index, array.dtype, array.shape, array.ctypes.data
                )
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
                if write and (d or last):  # a number is read again by the next part
                    np.copyto(array, new)
        return True
