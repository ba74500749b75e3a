"""The loss scale of a step that computes gradients in 16 bits, where small ones would be zero.

The cotangent of the loss is multiplied by a scale, and the gradients are divided by it. A step
whose gradients are not finite is skipped, and halves the scale; it is doubled after many steps
without one (Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740; with the
numbers of `torch.amp.GradScaler`, but for the first scale, which float16 holds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.training.step.gradients import Gradients
from onnxgrad.training.step.inputs import STEP
from onnxgrad.training.step.update import Update

SCALE, SKIPPED = "onnxgrad.loss_scale", "onnxgrad.skipped_steps"  # names that no model uses
_STEPS = "onnxgrad.steps_of_loss_scale"
INITIAL: dict[str, np.ndarray] = {
    SCALE: np.array(2.0**15, np.float32),
    _STEPS: np.array(0, np.int64),
    SKIPPED: np.array(0, np.int64),
}
_LEAST, _GROWS_AFTER = 2.0**-10, 2000


@dataclass
class LossScale:
    """Buffers of a step: the scale, how many steps it has, and how many were skipped in all."""

    scale: ir.Value
    steps: ir.Value
    skipped: ir.Value

    @classmethod
    def new(cls, op: Emit) -> Self:
        """Return one whose buffers begin with the values of `INITIAL`, by their names."""
        kinds = {n: ir.TensorType(ir.DataType.from_numpy(v.dtype)) for n, v in INITIAL.items()}
        return cls(*(ir.Value(name=n, type=t, shape=ir.Shape([])) for n, t in kinds.items()))

    def unscale(self, op: Emit, parts: Gradients) -> Gradients:
        """Return the gradients of the scaled loss, divided by the scale."""
        with op:
            inverse = op.Reciprocal(self.scale)
            gradients = {
                w: op.set_type_like(op.Mul(g, op.Cast(inverse, to=g.dtype)), g)
                for w, g in parts.gradients.items()
            }
        return replace(parts, gradients=gradients)

    def guard(
        self,
        op: Emit,
        gradients: Mapping[ir.Value, ir.Value],
        update: Update,
        buffers: Mapping[ir.Value, ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Let a step whose gradients are not finite change nothing but the scale.

        Return the new values of the buffers, and of the scale. The update does not count skipped
        steps. With the least scale, a step is not skipped: then it is the model that is not
        finite.
        """
        with op:
            squares = [op.ReduceSumSquare(g, keepdims=0) for g in gradients.values()]
            total = op.total([op.Cast(s, to=ir.DataType.FLOAT) for s in squares])
            bad = op.Or(op.IsNaN(total), op.IsInf(total))
            bad = op.And(bad, op.Greater(self.scale, op.const(np.float32(_LEAST))))

            def kept(old: ir.Value, new: ir.Value) -> ir.Value:
                return op.set_type_like(op.Where(bad, old, new), new)

            update.new = [kept(*pair) for pair in zip(update.states, update.new, strict=True)]
            result = {old: kept(old, new) for old, new in buffers.items()}
            one, steps = op.const(np.int64(1)), op.Add(self.steps, op.const(np.int64(1)))
            grows = op.Equal(steps, op.const(np.int64(_GROWS_AFTER)))
            half, twice = (op.Mul(self.scale, op.const(np.float32(k))) for k in (0.5, 2.0))
            scale = op.Where(bad, half, op.Where(grows, twice, self.scale))
            zero = op.const(np.int64(0))
            new = {
                self.scale: scale,
                self.steps: op.Where(op.Or(bad, grows), zero, steps),
                self.skipped: op.Where(bad, op.Add(self.skipped, one), self.skipped),
            }
            result |= {old: op.set_type_like(value, old) for old, value in new.items()}
        self._leave_out_skipped(op)
        return result

    def _leave_out_skipped(self, op: Emit) -> None:
        """Let the update read the number of the steps that were not skipped."""
        number = STEP.input(op)
        readers = list(number.uses())
        if not readers:
            return
        with op.at(next(iter(op.graph))):
            counted = op.set_type_like(op.Sub(number, self.skipped), number)
        for node, index in readers:
            node.replace_input_with(index, counted)
