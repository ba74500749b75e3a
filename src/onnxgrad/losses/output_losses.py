"""Losses computed from the outputs of a model alone, without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import check_options, unknown
from onnxgrad.losses.embeddings import info_nce, nt_xent, triplet_margin
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.objectives import Values, WrittenLoss
from onnxgrad.losses.other_models import new_row_weight
from onnxgrad.losses.spec import take_at_index
from onnxgrad.losses.sums import with_known_rank
from onnxgrad.operators.shapes import dims, rank

# by name: the formula, and the number of embeddings in a row
_FORMULAS: dict[str, tuple[Callable[..., ir.Value], int]] = {
    "triplet_margin": (triplet_margin, 3),
    "info_nce": (info_nce, 2),
    "nt_xent": (nt_xent, 2),
}


class OutputLoss:
    """A loss without labels: the mean of losses of rows or elements that are computed from the
    model's outputs alone.

    Args:
        loss: "triplet_margin", "info_nce" or "nt_xent", see `losses.embeddings`; or a function
            `(op, *outputs) -> losses`, one for every row or element, that writes nodes with `op`.
        outputs: names of the outputs, or of other float tensors, that the loss takes. None: the
            only float output. A loss by name takes embeddings (N, D): anchor, positive and
            negative, or both views; or one tensor (N, 3, D) or (N, 2, D) of all embeddings.
        **options: options of the loss.

    Raises:
        ValueError: an unknown loss or option, or another number of outputs.

    Examples:
        >>> from onnxgrad.losses import OutputLoss
        >>> OutputLoss("info_nce", ["image", "text"], temperature=0.07).names
        ['image', 'text']
    """

    def __init__(
        self,
        loss: str | Callable[..., ir.Value],
        outputs: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.names = None if outputs is None else list(outputs)
        self.options = options
        self._parts = None
        if callable(loss):
            self._formula = loss
            return
        if loss not in _FORMULAS:
            raise unknown("loss without labels", loss, _FORMULAS)
        self._formula, self._parts = _FORMULAS[loss]
        check_options(f"option of loss {loss!r}", options, self._formula, skip=1 + self._parts)
        if self.names is not None and len(self.names) not in (1, self._parts):
            raise ValueError(
                f"outputs={outputs}: {loss!r} takes {self._parts} outputs, or one that holds all "
                "embeddings"
            )

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the model's tensors from which the loss is computed.

        Raises:
            ValueError: an unknown name, or several float outputs and no names.
        """
        if self.names is None:
            return [choose_output(proto, None, "name them by outputs=")]
        return [choose_output(proto, name) for name in self.names]

    def write(self, op: Any, predictions: Values, weighted: bool = False) -> WrittenLoss:
        """Write the nodes of the loss into the graph.

        Raises:
            ValueError: an output whose shape the loss does not take, or a loss that is one number
                for all rows.
        """
        values = list(predictions.values())
        if self.names is not None:
            values = [predictions[name] for name in self.names]
        with op:
            embeddings = self._split_embeddings(op, values)
            losses = with_known_rank(op, self._formula(op, *embeddings, **self.options))
            if not dims(losses):
                raise ValueError(
                    f"the loss has the shape {dims(losses)}, and needs one number for every row or "
                    "element: leave out the last mean or sum"
                )
            written = WrittenLoss(
                weight=new_row_weight(op, values[0], losses) if weighted else None
            )
            written.add_losses(op, losses)
        return written

    def _split_embeddings(self, op: Any, values: list[ir.Value]) -> list[ir.Value]:
        """Return the operands of the loss: two or three embeddings (N, D) for a loss by name, all
        outputs for a function.
        """
        if self._parts is None:
            return values
        if len(values) == 1:
            shape = dims(values[0])
            if shape is None or len(shape) != 3 or shape[1] not in (self._parts, None):
                needs = f"(N, {self._parts}, D), or {self._parts} outputs (N, D)"
                raise ValueError(
                    f"{values[0].name!r} has the shape {shape}: the loss needs {needs}. Choose "
                    "another output"
                )
            return [take_at_index(op, values[0], i) for i in range(self._parts)]
        for value in values:
            if rank(value) != 2:
                raise ValueError(
                    f"{value.name!r} has the shape {dims(value)}, and this loss takes embeddings "
                    "(N, D): choose another output"
                )
        return values
