"""Rows of a batch that are mixed with others of it: the losses of both labels, by their shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.losses.spec import LossSpec
from onnxgrad.operators.shapes import dims, rank


@dataclass(frozen=True)
class MixedRows:
    """Each row i is mixed with its partner, `share` x_i + (1 - `share`) x_partners[i].

    - `partners`: a permutation of the rows, int64 (N,).
    - `share`: of each row itself, a scalar of any float dtype.
    - `of_parts`: whether a row has some elements of its own, and others of its partner: its label
      must be that of a row, not of its elements.
    """

    partners: ir.Value
    share: ir.Value
    of_parts: bool = False

    def label_of_partners(self, op: Any, label: ir.Value) -> ir.Value:
        """Return the labels of the partners.

        Raises:
            ValueError: labels of elements, which are not mixed as these are.
        """
        if self.of_parts and (rank(label) or 0) > 2:
            raise ValueError(
                f"cutmix mixes one label of a row, and {label.name!r} has the shape "
                f"{list(dims(label) or ())}: use mixup, which mixes labels of pixels"
            )
        return self.of_partners(op, label)

    def of_partners(self, op: Any, x: ir.Value) -> ir.Value:
        """Return the rows of the partners, along the first axis."""
        rows = op.Gather(x, self.partners, axis=0)
        if (dims(x) or (None,))[0] != (dims(self.partners) or ())[0]:
            rows = op.Reshape(rows, op.Shape(x))  # which fails if `x` has other rows
        return op.set_type_like(rows, x)

    def blend(self, op: Any, own: ir.Value, other: ir.Value) -> ir.Value:
        """Return `share` own + (1 - `share`) other, in the dtype of `own`."""
        share = op.Cast(self.share, to=own.dtype)
        rest = op.Sub(op.const(1.0, own.dtype), share)
        return op.set_type_like(op.Add(op.Mul(own, share), op.Mul(other, rest)), own)


def check_mixable(losses: Mapping[str | None, Any]) -> None:
    """Raise `ValueError` for a loss that is not a mean over rows, each with labels of its own."""
    for loss in losses.values():
        if not isinstance(loss, LossSpec):
            raise ValueError(
                f"mix takes losses of onnxgrad.losses.LOSSES and functions, not {loss!r}: leave it "
                "out"
            )
        if not loss.mixes:
            raise ValueError(
                f"mix does not take the loss {loss.name!r}, whose rows are sequences, or are "
                "compared with each other: leave out mix"
            )
