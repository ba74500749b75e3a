"""The terms of the loss of one output, written into a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.losses.applied_to import before_activation, decide_options
from onnxgrad.losses.class_columns import logits_of_two, refuse_other_columns, scores_of_votes
from onnxgrad.losses.formula_nodes import wide
from onnxgrad.losses.in_graph import label_input
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.mixed_rows import MixedRows
from onnxgrad.losses.positions import Labels
from onnxgrad.losses.spec import LossSpec, Terms
from onnxgrad.losses.vocabulary import labels_of_words

Shape = Sequence[int]
OwnGradient = tuple[ir.Value, ir.Value] | None  # a value, and the gradient of the sum w.r.t. it


@dataclass(frozen=True)
class OutputTerms:
    """The loss of one output in a graph: the label, the terms, and what limits the label.

    `gradient`: a value, and the gradient of the sum of the terms with respect to it, where the loss
    writes that itself. `of_partners`: the label of the row that each is mixed with, and its terms.
    `of_words`: logits of so many classes that they are better computed in chunks, and the labels.
    """

    label: ir.Value
    terms: Terms
    info: LossInfo
    gradient: OwnGradient = None
    of_partners: tuple[ir.Value, Terms] | None = None
    of_words: tuple[ir.Value, Labels] | None = None


def formula_terms(
    op: Any,
    spec: LossSpec,
    prediction: ir.Value,
    label_name: str,
    shape: Shape | None = None,
    mixed: MixedRows | None = None,
) -> OutputTerms:
    """Write the terms of a formula; `shape` is that of the labels, None if it is unknown."""
    if shape is not None:
        spec = spec.for_labels(shape)
    refuse_other_columns(spec, prediction)
    prediction = scores_of_votes(spec, prediction)
    logits = logits_of_two(op, spec, prediction)
    if logits is not None:
        spec, prediction = spec.with_options({**spec.options, "from_logits": True}), logits
    plain = decide_options(spec, prediction)
    applied, value = before_activation(op, spec, plain, prediction)
    logits, value = value, wide(op, value)
    label = label_input(op, prediction, plain.label_kind, plain.name, label_name)
    widen_label(label)
    options = plain.all_options
    info = replace(
        LossInfo.of(plain, prediction),
        axis=options.get("axis"),
        from_logits=options.get("from_logits"),
        shift=options.get("shift") or None,
    )
    terms, of_partners = applied.terms(op, value, label), None
    if mixed is not None:
        other = mixed.label_of_partners(op, label)
        of_partners = other, applied.terms(op, value, other)
    words = labels_of_words(applied, logits, label)
    of_words = None if words is None else (logits, words)
    return OutputTerms(label, terms, info, of_partners=of_partners, of_words=of_words)


def widen_label(label: ir.Value) -> None:
    """Declare a label of 16 bits in float32."""
    if label.dtype is not None and label.dtype.is_floating_point() and label.dtype.bitwidth == 16:
        label.type = ir.TensorType(ir.DataType.FLOAT)
