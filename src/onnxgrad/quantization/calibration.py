"""Data of users as the feeds by which onnxruntime calibrates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.data.indices import tables
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.fields import Fields
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import BATCH
from onnxgrad.training.objective import Objective

_LABELS = frozenset({"label", "weight"})  # what batches may have, and no input takes


def feeds(proto: ModelProto, data: Any, batch_size: int, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the feeds of a model for the first rows of data, batch by batch.

    Raises:
        ValueError: data that the inputs do not accept.
    """
    model = prepare(proto, batch=BATCH)  # which tells symbols of one name apart
    graph, inputs = model.graph, list(model.graph.inputs)
    objective = Objective(Job(proto), model, inputs, [], WrittenLoss(), {}, tables(graph, inputs))
    fields = Fields(objective)
    fields.left_out = _LABELS
    size = fields.fixed_rows or min(batch_size, rows)
    source = Dataset(as_dataset(data).X).source(fields, size)
    left = rows
    for piece in source.epoch(None, 0, lambda batch: 1):
        arrays = piece.one_batch()
        if fields.fixed_rows is None and piece.own > left:
            arrays = fields.row_axes.take_rows(arrays, slice(0, left))
        data = fields.row_axes.as_declared(arrays)
        yield {name: np.ascontiguousarray(array) for name, array in data.items()}
        left -= piece.own
        if left <= 0:
            return
