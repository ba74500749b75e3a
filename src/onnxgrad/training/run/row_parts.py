"""Batches whose rows are divided: the gradients of the parts add up to that of the batch.

Kernels of onnxruntime use several threads one node at a time, and many of them only one. Where the
loss is a sum over rows, parts of a batch need nothing of each other but the number of terms of the
whole batch: each thread computes the gradient of one, as each process of a group does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.row_sums import NotASum, require_sums
from onnxgrad.errors import ModelError
from onnxgrad.parallel import Part
from onnxgrad.reporting import logger
from onnxgrad.training.batches import rows_of
from onnxgrad.training.objective import Objective
from onnxgrad.training.row_axes import Axes

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


def splits(objective: Objective, axes: Mapping[str, int | None], lengths: Shapes) -> bool:
    """Return whether the gradient of a batch is proven to be the sum of those of its parts.

    Args:
        objective: what is minimized.
        axes: the axis of the rows of each input of data, None for one without.
        lengths: the shapes of these inputs.
    """
    if not mixes_no_rows(objective):
        return False
    again = _with_outputs(objective, objective.reported)
    try:
        require_sums(again, axes, lengths, list(again.graph.outputs))
    except (NotASum, ModelError) as e:
        logger.debug("the rows of batches are not independent: %s", e)
        return False
    return True


def mixes_no_rows(objective: Objective) -> bool:
    """Return whether there are neither statistics of a batch nor random numbers."""
    random = objective.draw is not None and objective.draw.uses()
    return not objective.buffers and not random


def _with_outputs(objective: Objective, outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a copy of the model of an objective that returns `outputs`."""
    graph = objective.model.graph
    before = list(graph.outputs)
    graph.outputs[:] = outputs
    copy = objective.model.clone()
    graph.outputs[:] = before
    return copy


class Splitting:
    """How batches are divided into `parts` parts, for which `axes` and `shapes` are proven.

    The proof holds for any number of rows, and for these lengths of all other axes: other batches
    are one part.
    """

    def __init__(self, parts: int, axes: Axes, shapes: Shapes) -> None:
        self.parts = parts
        self._proven = _lengths(axes, shapes)

    def of(self, batch: Arrays, axes: Axes) -> list[Arrays]:
        """Return the parts of a batch, whose numbers of rows differ by one at most."""
        shapes = {name: array.shape for name, array in batch.items()}
        if not axes or _lengths(axes, shapes) != self._proven:
            return [batch]
        rows = min(n for name, shape in shapes.items() if (n := _rows(shape, axes[name])))
        if rows < self.parts:
            return [batch]
        return [
            {
                name: np.ascontiguousarray(rows_of(array, axes[name], part.rows(rows)))
                for name, array in batch.items()
            }
            for part in self.each()
        ]

    def each(self) -> list[Part]:
        """Return the parts."""
        return [Part(i, self.parts) for i in range(self.parts)]


def _rows(shape: tuple[int, ...], axis: int | None) -> int:
    return 0 if axis is None else shape[axis]


def _lengths(axes: Axes, shapes: Shapes) -> dict[str, tuple[int | None, ...]]:
    """Return the lengths of all axes but that of the rows, which is None."""
    rows = {name: None if a is None else a % len(shapes[name]) for name, a in axes.items()}
    return {
        name: tuple(None if i == rows[name] else n for i, n in enumerate(shape))
        for name, shape in shapes.items()
    }


def part_shapes(shapes: Shapes, axes: Axes, part: Part) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a part of a batch of these shapes."""
    own = {}
    for name, shape in shapes.items():
        axis = axes[name]
        rows = None if axis is None else axis % len(shape)
        own[name] = tuple(
            len(range(n)[part.fed(n)]) if i == rows else n for i, n in enumerate(shape)
        )
    return own
