"""The most probable class of each row, by the names of classes that a model stores."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.graph.infer import infer
from onnxgrad.losses.applied_to import is_probability
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.model.class_labels import Labels, stored_labels
from onnxgrad.model.convert import to_ir
from onnxgrad.model.notes import CLASSES, read_note
from onnxgrad.operators.shapes import rank
from onnxgrad.tasks.model_with_loss import noted_loss_name


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
        fitting = [
            y for y in model.graph.outputs if y.name in outputs and _scores_classes(y, len(classes))
        ]
        if len(fitting) != 1 or not _has_shares(noted_loss_name(proto), fitting[0]):
            return None
        return cls(str(fitting[0].name), classes, is_probability(fitting[0]))

    def columns(self, results: Mapping[str, Any], count: int) -> dict[str, np.ndarray]:
        """Return the label and the probability of the first `count` rows of results."""
        scores = np.asarray(results[self.output], np.float64).reshape(len(results[self.output]), -1)
        shares = class_shares(scores[:count], self.probable)
        best = shares.argmax(axis=1)
        labels = np.array(self.classes)[best]
        return {"label": labels, "probability": shares.max(axis=1).astype(np.float32)}


def class_shares(scores: np.ndarray, probable: bool) -> np.ndarray:
    """Return the probabilities of classes, (rows, classes), of probabilities or of scores.

    Of a single score, they are of two classes: 1 - p and p.
    """
    if scores.shape[1] == 1:
        second = scores if probable else 1 / (1 + np.exp(-scores))
        return np.concatenate([1 - second, second], axis=1)
    if probable:
        return scores
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _is_single(output: Any) -> bool:
    """Return whether an output has one score for each row."""
    return rank(output) == 1 or (rank(output) == 2 and output.shape[-1] == 1)


def _scores_classes(output: Any, classes: int) -> bool:
    """Return whether an output has a score for each of so many classes, or one for two of them."""
    if _is_single(output):
        return classes == 2
    return rank(output) == 2 and output.shape[-1] == classes


def _has_shares(loss: str | None, output: Any) -> bool:
    """Return whether a model that a loss trained has scores whose shares are probabilities."""
    if loss not in LOSSES:
        return True
    spec = LOSSES[loss]
    logits = "from_logits" in spec.all_options
    if _is_single(output):
        return logits and spec.threshold is not None
    return spec.threshold is None and (logits or spec.label_kind.dtype is not None)
