"""The predictions of rows as columns: the most probable class of each row, and the outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.arrays import DataError
from onnxgrad.errors import printable
from onnxgrad.graph.infer import infer
from onnxgrad.losses.applied_to import is_probability
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.model.class_labels import Labels, stored_labels
from onnxgrad.model.convert import to_ir
from onnxgrad.model.notes import CLASSES, read_note
from onnxgrad.operators.shapes import rank
from onnxgrad.tasks.base import softmax
from onnxgrad.tasks.model_with_loss import noted_loss_name

Columns = dict[str, np.ndarray]


def output_columns(
    results: Mapping[str, Any], outputs: Collection[str], chosen: Collection[str], notes: list[str]
) -> Columns:
    """Return the columns of outputs with a row each, which are arrays or lists of maps.

    Args:
        results: the outputs of a call that have a row for each row of the data.
        outputs: the names of all outputs of the call.
        chosen: the outputs that must have rows.
        notes: gets messages about outputs that are left out.

    Raises:
        DataError: a chosen output without rows, or none with any.
    """
    columns: Columns = {}
    for name in outputs:
        value = results.get(name)
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            for key in value[0]:
                columns[f"{name}_{key}"] = np.array([row[key] for row in value])
        elif isinstance(value, np.ndarray):
            columns[name] = value
        elif name in chosen:
            raise DataError(f"output {name!r} has no row for each row of the data: leave it out")
        elif (text := f"output {printable(name)} has no rows, and is left out") not in notes:
            notes.append(text)
    if not columns:
        raise DataError("no output has a row for each row of the data")
    return columns


@dataclass(frozen=True)
class ClassLabels:
    """The classes of an output, as columns `label` and `probability`.

    - `probable`: whether the output holds probabilities; others are scores, of which softmax, or of
      a single one sigmoid, gives them.
    """

    output: str
    classes: Labels
    probable: bool

    @classmethod
    def of(cls, proto: ModelProto, outputs: Collection[str]) -> ClassLabels | None:
        """Return the classes of one of the outputs; None if none has as many, or has its labels.

        Nor has a model that was trained by a loss of other scores, such as of labels that do not
        exclude each other.
        """
        classes: Labels = read_note(proto, CLASSES)
        if not classes or stored_labels(proto) or {"label", "probability"} & {*outputs}:
            return None
        model = to_ir(proto)
        infer(model)
        known = [y for y in model.graph.outputs if y.name in outputs]
        fitting = [y for y in known if _class_count(y) == len(classes)]
        if len(fitting) != 1 or not _has_shares(noted_loss_name(proto), fitting[0]):
            return None
        return cls(str(fitting[0].name), classes, is_probability(fitting[0]))

    def columns(self, results: Mapping[str, Any], count: int) -> Columns:
        """Return the label and the probability of the first `count` rows of results."""
        shares = np.asarray(results[self.output][:count], np.float64).reshape(count, -1)
        if shares.shape[1] == 1:
            second = shares if self.probable else 1 / (1 + np.exp(-shares))
            shares = np.concatenate([1 - second, second], axis=1)
        elif not self.probable:
            shares = softmax(shares)
        best = shares.argmax(axis=1)
        labels = np.array(self.classes)[best]
        return {"label": labels, "probability": shares.max(axis=1).astype(np.float32)}


def _is_single(output: Any) -> bool:
    """Return whether an output has one score for each row."""
    return rank(output) == 1 or (rank(output) == 2 and output.shape[-1] == 1)


def _class_count(output: Any) -> Any:
    """Return the number of classes of which an output has scores: two of a single score."""
    if _is_single(output):
        return 2
    return output.shape[-1] if rank(output) == 2 else None


def _has_shares(loss: str | None, output: Any) -> bool:
    """Return whether a model that a loss trained has scores whose shares are probabilities."""
    if loss not in LOSSES:
        return True
    spec = LOSSES[loss]
    logits = "from_logits" in spec.all_options
    if _is_single(output):
        return logits and spec.threshold is not None
    return spec.threshold is None and (logits or spec.label_kind.dtype is not None)
