"""Batches that are divided: the gradients of parts of the rows add up to the gradient of the batch.

Where the loss is a sum over rows, parts of a batch share nothing but the count of terms of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, prod
from typing import Literal

import onnx_ir as ir

from onnxgrad.autodiff.row_proofs import UnprovenRows, reduction_over_rows, require_sums_over_rows
from onnxgrad.errors import ModelError
from onnxgrad.graph.tidy import take_apart
from onnxgrad.operators import VIEWS, marks, operator_of
from onnxgrad.operators.shapes import coefficient, dims, is_stated, static
from onnxgrad.parallel.process_groups import Part
from onnxgrad.reporting import logger
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.training.objective import Objective
from onnxgrad.training.row_axes import AxisByInput
from onnxgrad.training.step.inputs import feed_inputs, feed_of

Shapes = Mapping[str, tuple[int, ...]]
FORWARD_BYTES = 1 << 27  # bytes of the values of a forward pass, above which a batch is divided
# least multiply-adds of a part for each weight: adding up the gradients of parts then takes a
# fiftieth of the time, by the rates of a product and of a copy
WORK_PER_WEIGHT = 800


class Footprint:
    """The memory and work of a forward pass, which say how many rows of a batch to compute at once.

    Args:
        graph: the graph of an objective.
        data: the names of the data inputs.
        weights: the names of the inputs of weights.

    Attributes:
        unknown: whether the graph has values of unknown shapes.
    """

    def __init__(self, graph: ir.Graph, data: Collection[str], weights: Collection[str]) -> None:
        shapes = {str(x.name): dims(x) or () for x in graph.inputs}
        self._data, self._work = {name: shapes[name] for name in data}, count_multiply_adds(graph)
        sizes = [prod(static(shapes[n]) or ()) for n in weights]
        self._weights = sum(sizes)
        self._bytes: dict[tuple[str, ...], int] = {}  # bytes by symbols, times their lengths
        self.unknown = False
        for node in graph:
            for y in node.outputs if node.op_type not in VIEWS else ():
                self._add_bytes(y, operator_of(node).kept_results)
        self._bytes.pop((), None)

    def _add_bytes(self, value: ir.Value, times: int) -> None:
        """Add `times` times the bytes of `value`: nodes may keep several results of this size."""
        shape = dims(value)
        if shape is None or value.dtype is None or not all(map(is_stated, shape)):
            self.unknown |= bool(value.uses())
            return
        factors = [coefficient(d) for d in shape if isinstance(d, str)]
        lengths = [d for d in shape if isinstance(d, int)] + [n for n, _ in factors]
        symbols = tuple(sorted(symbol for _, symbol in factors))
        size = int(times * prod(lengths) * value.dtype.itemsize)
        self._bytes[symbols] = self._bytes.get(symbols, 0) + size

    def part_rows(self, shapes: Shapes, rows: int) -> int | None:
        """Return how many rows of a batch to compute at once at most; None: all `rows` rows."""
        pairs = [(self._data[n], shape) for n, shape in shapes.items() if n in self._data]
        lengths = {d: n for own, s in pairs for d, n in zip(own, s, strict=False)}
        total = sum(n * prod(lengths.get(s, 0) for s in own) for own, n in self._bytes.items())
        if total <= FORWARD_BYTES or not self._work:
            return None
        most = max(
            1, FORWARD_BYTES * rows // total, ceil(WORK_PER_WEIGHT * self._weights / self._work)
        )
        return most if most < rows else None


def measure_footprint(objective: Objective, axes: AxisByInput, shapes: Shapes) -> Footprint | None:
    """Return the footprint for data of these `shapes`; None unless `is_sum_over_rows` is true."""
    names = [[str(x.name) for x in own] for own in (objective.data, objective.weights)]
    with _proven_sums(objective, axes, shapes) as proven:
        return None if proven is None else Footprint(proven.graph, *names)


def is_sum_over_rows(objective: Objective, axes: AxisByInput, lengths: Shapes) -> bool:
    """Return whether the gradient of a batch is proven to be the sum of the gradients of its parts.

    Args:
        objective: the loss to minimize.
        axes: the axis of the rows of each data input; None for an input without rows.
        lengths: the shapes of the data, by input.
    """
    with _proven_sums(objective, axes, lengths) as proven:
        return proven is not None


@contextmanager
def _proven_sums(
    objective: Objective, axes: AxisByInput, lengths: Shapes
) -> Iterator[ir.Model | None]:
    """Yield a copy of the model whose outputs are proven to be sums over rows; None if not proven.

    The copy has the shapes that the proof has inferred.
    """
    if mixes_rows(objective):
        yield None
        return
    proven: ir.Model | None
    with _copy_with_outputs(objective, _loss_sums(objective)) as proven:
        try:
            require_sums_over_rows(proven, axes, lengths, list(proven.graph.outputs))
        except (UnprovenRows, ModelError) as e:
            logger.debug("the rows of batches are not independent: %s", e)
            proven = None
        yield proven


def micro_batch_effect(
    objective: Objective, axes: AxisByInput, lengths: Shapes
) -> tuple[Literal["sum", "mean"], str]:
    """Return whether the losses of micro-batches add up to the loss of a batch: "sum" or "mean".

    Also return a reason why it may be neither sum nor mean, a node that may mix rows; "" if proven.

    A loss with a sum and a count is the "mean" by counts, and so is a loss that a model computes as
    one number of the batch, unless it is proven to be a "sum" over rows.
    """
    own = objective.written.batch_loss
    outputs = _loss_sums(objective) if own is None else [own]
    with _copy_with_outputs(objective, outputs) as copied:
        try:
            if own is not None:
                return reduction_over_rows(copied, axes, lengths, copied.graph.outputs[0]), ""
            require_sums_over_rows(copied, axes, lengths, list(copied.graph.outputs))
        except (UnprovenRows, ModelError) as e:
            return "mean", str(e)
    return "mean", ""


def mixes_rows(objective: Objective) -> bool:
    """Return whether an objective has statistics of a batch, or draws random numbers for rows."""
    feeds = map(feed_of, feed_inputs(objective.model.graph).values())
    return bool(objective.buffers) or any(feed and feed.of_rows for feed in feeds)


def has_loss_in_blocks(objective: Objective) -> bool:
    """Return whether an objective computes its loss in blocks of rows, whose gradients add up."""
    return any(marks.PLAIN_SUM in value.meta for value in objective.reported)


def _loss_sums(objective: Objective) -> list[ir.Value]:
    """Return sums and counts of the loss: plain sums in place of sums computed in blocks."""
    return [v.meta.get(marks.PLAIN_SUM, v) for v in objective.reported]


@contextmanager
def _copy_with_outputs(objective: Objective, outputs: Sequence[ir.Value]) -> Iterator[ir.Model]:
    """Yield a copy of the model of an objective whose outputs are `outputs`."""
    graph = objective.model.graph
    before = list(graph.outputs)
    graph.outputs[:] = outputs
    copy = objective.model.clone()
    graph.outputs[:] = before
    try:
        yield copy
    finally:
        take_apart(copy.graph)


def rows_per_part(rows: int, most: int) -> int:
    """Return how many rows each part of a batch of `rows` rows gets, if `most` rows are allowed.

    The last part may have fewer rows; the count of parts is chosen so that few rows are left.
    """
    least = -(-rows // most)
    counts = range(least, min(2 * least, rows) + 1)
    return rows // min(counts, key=lambda count: (rows % count, count))


def process_rows_per_part(rows: int, part: Part, most: int | None = None) -> int:
    """Return how many rows of a batch of `rows` rows a process computes at once, `most` at most."""
    own = part.count(rows)
    return own if most is None else rows_per_part(own, most)
