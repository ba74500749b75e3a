"""Batches whose rows processes divide: the gradients of the parts add up to that of the batch.

Where the loss is a sum over rows, parts of a batch need nothing of each other but the number of
terms of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxgrad.autodiff.row_sums import NotASum, require_sums
from onnxgrad.errors import ModelError
from onnxgrad.losses.vocabulary import PLAIN
from onnxgrad.parallel import Part
from onnxgrad.reporting import logger
from onnxgrad.training.objective import Objective
from onnxgrad.training.row_axes import Axes

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
    again = _with_outputs(objective, [v.meta.get(PLAIN, v) for v in objective.reported])
    try:
        require_sums(again, axes, lengths, list(again.graph.outputs))
    except (NotASum, ModelError) as e:
        logger.debug("the rows of batches are not independent: %s", e)
        return False
    return True


def mixes_no_rows(objective: Objective) -> bool:
    """Return whether there are neither statistics of a batch nor random numbers."""
    random = objective.draw is not None and objective.draw.uses()
    return not objective.buffers and not random and objective.mixing is None


def _with_outputs(objective: Objective, outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a copy of the model of an objective that returns `outputs`."""
    graph = objective.model.graph
    before = list(graph.outputs)
    graph.outputs[:] = outputs
    copy = objective.model.clone()
    graph.outputs[:] = before
    return copy


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
