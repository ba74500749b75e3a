"""The terms of the loss of one model output, written into a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxgrad.losses.applied_to import decide_options, loss_before_activation
from onnxgrad.losses.classification import CAUSAL, labels_from_input_ids, refuse_last_position
from onnxgrad.losses.in_graph import make_label_input
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.logits import require_class_columns, scores_without_votes, two_class_logits
from onnxgrad.losses.positions import WeightedLabels
from onnxgrad.losses.spec import LossSpec, Terms, widen_to_float32
from onnxgrad.losses.vocabulary import labels_for_chunks
from onnxgrad.operators.shapes import dims, rank

Shape = Sequence[int]
OwnGradient = tuple[ir.Value, ir.Value] | None  # a value, and the gradient of the sum w.r.t. it


@dataclass(frozen=True)
class MixedRows:
    """Rows of a batch, each mixed with a partner: `share` x_i + (1 - `share`) x_partners[i].

    - `partners`: a permutation of the rows, int64 (N,).
    - `share`: the share of the row itself, a scalar of any float dtype.
    - `of_parts`: whether some elements of a row are replaced by elements of its partner, so that
      only one label for a whole row can be mixed.
    """

    partners: ir.Value
    share: ir.Value
    of_parts: bool = False

    def label_of_partners(self, op: Any, label: ir.Value) -> ir.Value:
        """Write the labels of the partner rows with which the rows are mixed.

        Raises:
            ValueError: labels of elements, where elements are replaced.
        """
        if self.of_parts and (rank(label) or 0) > 2:
            raise ValueError(
                f"cutmix mixes one label of a row, and {label.name!r} has the shape "
                f"{list(dims(label) or ())}: use mixup, which mixes labels of pixels"
            )
        return self.take_partners(op, label)

    def take_partners(self, op: Any, x: ir.Value) -> ir.Value:
        """Write for each row of `x` the row of its partner, gathered along the first axis."""
        rows = op.Gather(x, self.partners, axis=0)
        if (dims(x) or (None,))[0] != (dims(self.partners) or ())[0]:
            # a Reshape that fails if `x` has another number of rows
            rows = op.Reshape(rows, op.Shape(x))
        return op.set_type_like(rows, x)

    def blend(self, op: Any, own: ir.Value, other: ir.Value) -> ir.Value:
        """Write the mix `share` * own + (1 - `share`) * other, in the dtype of `own`."""
        share = op.Cast(self.share, to=own.dtype)
        rest = op.Sub(op.const(1.0, own.dtype), share)
        return op.set_type_like(op.Add(op.Mul(own, share), op.Mul(other, rest)), own)


def check_losses_can_mix(losses: Mapping[str | None, Any]) -> None:
    """Raise `ValueError` for a loss that mixup cannot use, because it has no meaning for a mixture
    of two rows.
    """
    for loss in losses.values():
        if not isinstance(loss, LossSpec):
            raise ValueError(
                f"mix does not take the loss {loss!r}, only names and functions: leave out mix"
            )
        if not loss.mixes:
            raise ValueError(
                f"mix does not take the loss {loss.name!r}, whose rows are sequences, or are "
                "compared with each other: leave out mix"
            )


@dataclass(frozen=True)
class OutputTerms:
    """The losses of one model output and their weights, as values of a graph.

    - `label`: the label, which is not yet an input of the graph; or a value that the graph computes
      from its inputs.
    - `terms`: the terms.
    - `info`: the facts that limit the label.
    - `gradient`: a value, and the gradient of the sum of the terms w.r.t. it, where the loss writes
      that itself.
    - `of_partners`: for mixed rows, the label of each row's partner, and the terms with it.
    - `of_words`: logits of so many classes that they are better computed in chunks, and the labels.
    - `weighted_mean`: as in `LossSpec`.
    """

    label: ir.Value
    terms: Terms
    info: LossInfo
    gradient: OwnGradient = None
    of_partners: tuple[ir.Value, Terms] | None = None
    of_words: tuple[ir.Value, WeightedLabels] | None = None
    weighted_mean: bool = True


def formula_terms(
    op: Any,
    spec: LossSpec,
    prediction: ir.Value,
    label_name: str,
    shape: Shape | None = None,
    mixed: MixedRows | None = None,
    labeled: bool = True,
) -> OutputTerms:
    """Write the losses and weights of one output by a loss formula, applied to logits if a Softmax
    or Sigmoid computes the prediction.

    Args:
        op: emitter of the graph.
        spec: the loss, with the options that the user set.
        prediction: the prediction.
        label_name: name of the label input.
        shape: shape of the labels; None: unknown.
        mixed: how rows are mixed; None: they are not.
        labeled: whether there are labels; a language model without has the tokens of its input.

    Raises:
        ValueError: a prediction that the loss does not take, or an option that the graph does not
            decide.
    """
    if shape is not None:
        spec = spec.for_labels(shape)
    # otherwise, the user has said what the columns are
    if spec.all_options.get("from_logits") is None:
        if spec.activation == "Softmax" or spec.label_kind.dtype is not None:
            require_class_columns(prediction)
        if spec.activation == "Softmax":
            prediction = scores_without_votes(prediction)
            if (logits := two_class_logits(op, prediction)) is not None:
                prediction = logits
                spec = spec.with_options({**spec.options, "from_logits": True})
    plain = decide_options(spec, prediction)
    applied, logits = loss_before_activation(op, spec, plain, prediction)
    label = make_label_input(op, prediction, plain.label_kind, plain.name, label_name)
    widen_label(label)
    options = plain.all_options
    if plain.name == CAUSAL:
        refuse_last_position(op, logits)
        options = options | {"axis": 2, "from_logits": True, "shift": True}
        label = label if labeled else labels_from_input_ids(op, int(options["ignore_index"]))
    info = replace(
        LossInfo.of(plain, prediction),
        axis=options.get("axis"),
        from_logits=options.get("from_logits"),
        shift=options.get("shift") or None,
    )
    value, of_partners = widen_to_float32(op, logits), None
    terms = applied.terms(op, value, label)
    if mixed is not None:
        other = mixed.label_of_partners(op, label)
        of_partners = other, applied.terms(op, value, other)
    words = labels_for_chunks(applied, logits, label)
    of_words = None if words is None else (logits, words)
    return OutputTerms(label, terms, info, None, of_partners, of_words, spec.weighted_mean)


def widen_label(label: ir.Value) -> None:
    """Declare the label input as float32 if its dtype is float16 or bfloat16."""
    if label.dtype is not None and label.dtype.is_floating_point() and label.dtype.bitwidth == 16:
        label.type = ir.TensorType(ir.DataType.FLOAT)
