"""Sessions that run a step: one for the shapes of most batches, and one for all other batches."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.model import external
from onnxgrad.native import Target
from onnxgrad.native.order import reorder_for_memory
from onnxgrad.operators.shapes import dims
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.session import WORK_PER_THREAD, ordered_session, session
from onnxgrad.runtime.values import Value, bind_output
from onnxgrad.training.batches import ArraySource
from onnxgrad.training.run.states import OutputArray
from onnxgrad.training.state import Arrays
from onnxgrad.training.step.build import Step, build_epoch, gradient_half
from onnxgrad.training.step.inputs import BatchSlice


class Sessions:
    """The onnxruntime sessions of a step: one for batches of the usual shapes, one for all others.

    Batches of the shapes that `expect_shapes` announces have a session with constant shapes, which
    has fewer nodes, and on a CPU runs the nodes in an order that saves memory. All other batches,
    such as a shorter last batch, share a session. Each session is created when it is first used.
    Shapes that do not fit a branch of an If have no session: onnxruntime refuses the branch, though
    it may never run.
    """

    def __init__(self, model: ModelProto, step: Step, device: Device, work: float) -> None:
        self.model, self.step, self.device, self.work = model, step, device, work
        self.expected: dict[str, int] = {}
        self._announced: dict[str, int] = {}
        self._any: ort.InferenceSession | None = None
        self._own: tuple[dict[str, int], ort.InferenceSession] | None = None
        self._small = step.accumulate == 1 and not external.external_files(model)

    def expect_shapes(self, arrays: Mapping[str, tuple[int, ...]]) -> None:
        """Announce the shapes of most batches, by input name; empty if they are not known.

        Where each call announces other shapes than the call before, shapes get no session.
        """
        lengths = self._symbol_lengths(arrays) if self._small and arrays else {}
        again = self._own is None or lengths in (self._own[0], self._announced)
        self.expected = lengths if again else {}
        self._announced = lengths or self._announced

    def session_for(self, arrays: Mapping[str, np.ndarray]) -> ort.InferenceSession:
        """Return the session for stacked batches of the shapes of `arrays`."""
        lengths = self.expected
        if lengths and self._symbol_lengths({n: a.shape[1:] for n, a in arrays.items()}) == lengths:
            if self._own is not None and self._own[0] == lengths:
                return self._own[1]
            self._own = None  # frees the session before, so that memory does not hold two
            try:
                self._own = lengths, self._new_session(lengths)
                return self._own[1]
            except Exception:  # if the model is at fault, the session below raises the error
                logger.debug("no session for %s", lengths, exc_info=True)
                self._small = False
                self.expected = {}
        if self._any is None:
            recomputes = self.step.recomputes
            self._any = session(self.model, self.device, self.work, recomputes)
        return self._any

    @pause_garbage_collection()
    def _new_session(self, lengths: dict[str, int]) -> ort.InferenceSession:
        """Return a new session in which symbolic dimensions have the given lengths."""
        if self.device == CPU and self.work >= WORK_PER_THREAD:
            try:
                return ordered_session(
                    self.model, self.device, self.work, lengths, reorder_for_memory
                )
            except Exception:  # the order only saves memory; what else is wrong, raises below
                logger.debug("the nodes of the step keep their order", exc_info=True)
        return session(self.model, self.device, self.work, self.step.recomputes, lengths)

    def _symbol_lengths(self, arrays: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the lengths of the symbolic dimensions of the data, by symbol."""
        lengths: dict[str, int] = {}
        for name, value in self.step.data.items():
            shape, own = dims(value), arrays.get(name)
            if shape is not None and own is not None and len(own) == len(shape):
                pairs = zip(shape, own, strict=True)
                lengths.update((d, n) for d, n in pairs if isinstance(d, str))
        return lengths


class OneSession:
    """Computes a step in one session: all batches of a slice, or the gradients of one batch.

    Args:
        step: the step, whose graph is taken over.
        target: the device, and the work and rows of a batch.
        work: multiply-adds of a batch.
    """

    def __init__(self, step: Step, target: Target, work: float) -> None:
        self.device, self.joins_batches = target.device, step.updates is None
        model = build_epoch(step, target) if self.joins_batches else gradient_half(step, target)
        self._sessions = Sessions(model, step, self.device, work)
        self._inputs = [x.name for x in model.graph.input]
        self._outputs = [y.name for y in model.graph.output]

    def expect_source(self, source: ArraySource | None) -> None:
        """Announce the source of most batches, whose shapes are usual; None if unknown."""
        self._sessions.expect_shapes({} if source is None else source.batch_shapes())

    def run(
        self, states: Mapping[str, Value], fed: Arrays, piece: BatchSlice, output_array: OutputArray
    ) -> tuple[list[Value], list[np.ndarray]]:
        """Return the new states after the last batch, and the reports of the step, by batch.

        Args:
            states: the states that the step reads, by input name.
            fed: data and feeds by input name, with the axis of batches first.
            piece: the batches.
            output_array: (input name, state) -> the array for the new state, or None: onnxruntime
                allocates an array.
        """
        whole, running = self.joins_batches, self._sessions.session_for(piece.model_arrays())
        binding, into = running.io_binding(), {}
        names = iter(self._inputs)
        for state in states.values():
            binding.bind_ortvalue_input(next(names), state)
        for array in fed.values():
            binding.bind_cpu_input(next(names), array if whole else np.asarray(array[0], order="C"))
        for name, target in zip_longest(self._outputs, map(output_array, states, states.values())):
            bind_output(binding, name, self.device if target is None else target)
            if target is not None:
                into[name] = target
        with escaping():
            running.run_with_iobinding(binding)
        results = binding.get_outputs()
        new = [
            self.device.ortvalue(into[name]) if name in into else value
            for name, value in zip(self._outputs, results[: len(states)], strict=False)
        ]
        reported = [value.numpy() for value in results[len(states) :]]
        return new, reported if whole else [y[None] for y in reported]
