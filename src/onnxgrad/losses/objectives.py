"""What a trainer minimizes: losses of outputs, each the weighted mean of the terms of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import named, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.causal import CAUSAL, labels_of_tokens, write_causal
from onnxgrad.losses.class_columns import keep_opposite
from onnxgrad.losses.formulas import LOSSES, loss_spec
from onnxgrad.losses.in_graph import choose_output, label_input
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.mixed_rows import MixedRows, check_mixable
from onnxgrad.losses.output_terms import OutputTerms, formula_terms
from onnxgrad.losses.spec import LEFT_OPEN, LossSpec
from onnxgrad.losses.sums import scaled_rows, sum_and_count, totals
from onnxgrad.losses.vocabulary import OwnGradients, in_chunks, scaled
from onnxgrad.operators.shapes import dims, rank

ALIASES = {
    "mse": "squared_error",
    "mae": "absolute_error",
    "bce": "binary_cross_entropy",
    "ce": "cross_entropy",
}
LABEL, WEIGHT = "label", "weight"  # names of the inputs

Shape = Sequence[int]
Values = Mapping[str, ir.Value]


class LossObject(Protocol):
    """A loss of one output that is no formula of `LOSSES`: an object, or a class that has options.

    A `BaseLearningLoss` is one.
    """

    @staticmethod
    def select(loss: Any, **options: Any) -> LossObject:
        """Return the object for itself, or for its class and options."""

    def output_terms(self, op: Emit, prediction: ir.Value, label_name: str) -> OutputTerms:
        """Write the terms for a prediction; the label is not yet an input of the graph."""


Loss = LossSpec | LossObject


@dataclass
class Written:
    """The losses of a batch, as nodes in a graph: total = sum_k factors_k sums_k / counts_k.

    Attributes:
        sums: for each output, the weighted sum of the terms, a scalar; in float32 for predictions
            of 16 bits.
        counts: for each output, the sum of the weights, a scalar of the same dtype. It depends on
            labels and sample weights only. It is 0 if all labels of the batch are ignored.
        factors: for each output, its weight in the total.
        labels: new inputs, not yet inputs of the graph.
        infos: for each label, by the name of its input, what limits it, and its prediction.
        weight: the new input of sample weights, or None. They multiply the weights of the terms:
            (N,), those of a row; or with as many axes as the losses, to whose shape they are
            broadcast.
        gradients: for each output, what writes gradients of the scaled sum, where the loss writes
            these itself; else None.
        needs_no_label: whether it is known that no input is a label.
        batch_loss: a loss that a model computes as one number of a batch, whose product with the
            number of rows is the only sum; None where rows or elements have losses of their own.
    """

    sums: list[ir.Value] = field(default_factory=list)
    counts: list[ir.Value] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    labels: list[ir.Value] = field(default_factory=list)
    infos: dict[str, LossInfo] = field(default_factory=dict)
    weight: ir.Value | None = None
    gradients: list[OwnGradients | None] = field(default_factory=list)
    needs_no_label: bool = False
    batch_loss: ir.Value | None = None

    def add(
        self,
        total: ir.Value,
        count: ir.Value,
        factor: float = 1.0,
        own: OwnGradients | None = None,
    ) -> None:
        """Add the sums of one output."""
        self.sums.append(total)
        self.counts.append(count)
        self.factors.append(factor)
        self.gradients.append(own)

    def add_losses(self, op: Any, losses: ir.Value, factor: float = 1.0) -> None:
        """Add losses of rows or elements that are not those of one label, of known rank."""
        total, count = totals(op, losses, self.weight, self.labels)
        self.add(total, count, factor)

    def add_label(self, label: ir.Value, prediction: str | None, info: LossInfo) -> None:
        """Add a label, and what limits it; the reduction of all losses is the mean."""
        name = str(label.name)
        self.labels.append(label)
        self.infos[name] = replace(info, label=name, prediction=prediction, reduction="mean")

    def seeds(self, op: Any, scales: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return the cotangents that a sweep of sum_k scales_k sums_k starts with.

        Args:
            op: emitter of the graph.
            scales: for each output a scalar of the dtype of its sum, such as factors_k / counts_k.
        """
        seeds: dict[ir.Value, list[ir.Value]] = {}
        with op:
            for total, scale, own in zip(self.sums, scales, self.gradients, strict=True):
                for value, g in [(total, scale)] if own is None else own(op, scale):
                    seeds.setdefault(value, []).append(g)
            return {value: op.total(gs) for value, gs in seeds.items()}


@dataclass(eq=False, repr=False)
class TrainingLoss:
    """The loss of one or several outputs of a model; `training_loss` returns it.

    Attributes:
        losses: the loss of each output by its name; the name None stands for the only float output.
        factors: weights of the outputs in the total, 1 for those that are missing.
        label_shapes: shapes of the labels by the name of the output, or of the label input.
        weight_shape: shape of the sample weights: (N,), (N, 1), or that of the losses, for one
            weight for each; axes of unknown length may have length 1.
        labeled: whether there are labels; without, a language model has its own tokens.
        in_chunks: whether the loss of a language model may be a Scan that depends on weights.
        wrt: the values with respect to which the graph will be differentiated; None: not known,
            so that nothing is written in chunks.
        mixed: how rows are mixed; None: they are not.
    """

    losses: Mapping[str | None, Loss]
    factors: Mapping[str, float]
    label_shapes: Mapping[str, Shape]
    weight_shape: Shape | None
    labeled: bool = True
    in_chunks: bool = True
    wrt: Sequence[ir.Value] | None = None
    mixed: MixedRows | None = None

    def differentiated(
        self, wrt: Sequence[ir.Value], mixed: MixedRows | None = None
    ) -> TrainingLoss:
        """Return the loss of a graph that will be differentiated with respect to these values.

        Raises:
            ValueError: rows are `mixed`, and a loss has no meaning for a mixture of them.
        """
        if mixed is not None:
            check_mixable(self.losses)
        return replace(self, wrt=wrt, mixed=mixed)

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the float tensors of the model that the losses are applied to.

        Raises:
            ValueError: an unknown name, or a model with no float output or several and no name.
        """
        if None not in self.losses:
            return [choose_output(proto, name) for name in self.losses]
        remedy = f"name it, as {named('loss={output: loss}')}"
        return [choose_output(proto, None, remedy, inside=True)]

    def write(self, op: Emit, predictions: Values, weighted: bool = False) -> Written:
        """Write the losses into the graph of `op`, which `prepare` has brought into the dialect.

        This appends nodes; the new inputs are in the result. The label of a single output is
        called "label", that of each of several "label_<output>"; sample weights are called
        "weight". A name that the graph has already gets a numeric suffix.

        Args:
            op: emitter of the graph.
            predictions: the values by the names that `outputs` returns.
            weighted: whether to add an input of sample weights.

        Raises:
            ValueError: a prediction that its loss does not take, or an option that the graph does
                not decide.
        """
        written, predictions = Written(), keep_opposite(op, predictions)
        labels = {
            name: LABEL if len(predictions) == 1 else f"{LABEL}_{name}" for name in predictions
        }
        for name in self.label_shapes:
            if name not in (*labels, *labels.values()):
                raise unknown("label", name, [*labels, *labels.values()])
        with op:
            found = {
                name: self._terms(op, x, name, labels[name])
                for name, x in predictions.items()
                if self._causal(name) is None
            }
            if weighted and all(dims(x) != () for x in predictions.values()):
                ranks = [rank(one.terms.losses) for one in found.values()]
                ranks += [2] * (len(predictions) - len(found))
                shape = tuple(self.weight_shape or ())
                by_row = len(shape) - (shape[-1:] == (1,)) <= 1  # (N,) or (N, 1)
                axes = 1 if by_row or len(ranks) > 1 else ranks[0]
                first = next((one.label for one in found.values()), None)
                written.weight = sample_weight(op, predictions.values(), axes or 1, first)
            for name, one in found.items():
                self._add_terms(op, written, name, one)
            for name, x in predictions.items():
                if (spec := self._causal(name)) is not None:
                    self._add_causal(op, written, spec, (name, x), labels[name])
        return written

    def _add_terms(self, op: Emit, written: Written, name: str, one: OutputTerms) -> None:
        """Write the sum of the terms of one output, and add it to what is written."""
        weight, own = written.weight, one.gradient
        mine: OwnGradients | None = None
        if one.info.shift and weight is not None and rank(weight) == 2:  # as the labels
            every = op.emit("Expand", [weight, op.Shape(one.label)], {}, fresh=True)
            weight = op.Slice(every, [1], [np.iinfo(np.int64).max], [1])
        total, count = sum_and_count(op, one.terms, one.label, weight)
        if self.mixed is not None and one.of_partners is not None:  # of an equal count
            label, terms = one.of_partners
            other = None if weight is None else self.mixed.of_partners(op, weight)
            theirs, _ = sum_and_count(op, terms, label, other)
            total = self.mixed.blend(op, total, theirs)
        if own is not None and weight is not None:
            own = own[0], scaled_rows(op, own[1], weight)
        if own is not None:
            mine = scaled([own])
        elif one.of_words is not None and self._divided is not None and self.mixed is None:
            logits, words = one.of_words
            words = replace(words, weight=written.weight)
            total, count, mine = in_chunks(op, logits, words, self._divided, (total, count))
        written.add(total, count, float(self.factors.get(name, 1.0)), mine)
        written.add_label(one.label, name, one.info)

    @property
    def _divided(self) -> Sequence[ir.Value] | None:
        """What gradients of losses in chunks are with respect to; None: write the plain form."""
        return self.wrt if self.in_chunks else None

    def _causal(self, name: str) -> LossSpec | None:
        """Return the loss of an output if it is that of a language model."""
        loss = self.losses[name if name in self.losses else None]
        return loss if isinstance(loss, LossSpec) and loss.name == CAUSAL else None

    def _add_causal(
        self,
        op: Emit,
        written: Written,
        spec: LossSpec,
        output: tuple[str, ir.Value],
        label_name: str,
    ) -> None:
        """Write the loss of a language model, and add it to what is written."""
        name, logits = output
        ignored = int(spec.all_options["ignore_index"])
        label = label_input(op, logits, spec.label_kind, spec.name, label_name)
        if not self.labeled:
            label, written.needs_no_label = labels_of_tokens(op, ignored), True
        else:
            info = replace(LossInfo.of(spec, logits), axis=2, from_logits=True, shift=True)
            written.add_label(label, name, info)
        of = written.weight, ignored, self._divided
        total, count, own = write_causal(op, logits, label, *of)
        written.add(total, count, float(self.factors.get(name, 1.0)), own)

    def _terms(self, op: Emit, prediction: ir.Value, name: str, label_name: str) -> OutputTerms:
        """Write the terms of one output."""
        if not isinstance(loss := self.losses[name if name in self.losses else None], LossSpec):
            return loss.output_terms(op, prediction, label_name)
        shape = self.label_shapes.get(name, self.label_shapes.get(label_name))
        return formula_terms(op, loss, prediction, label_name, shape, self.mixed)


def sample_weight(
    op: Emit, predictions: Iterable[ir.Value], axes: int = 1, label: ir.Value | None = None
) -> ir.Value:
    """Return an input of sample weights, in the widest dtype of the sums.

    It has the shape (N,), or so many axes, and is not yet an input of the graph. N is the length of
    `label`, or without one, of the first prediction.
    """
    values = list(predictions)
    double = any(x.dtype == ir.DataType.DOUBLE for x in values)
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    shape = (dims(label or values[0]) or (None,))[:1] if axes == 1 else (None,) * axes
    return ir.Value(name=op.name(WEIGHT), type=ir.TensorType(dtype), shape=ir.Shape(shape))


def training_loss(
    loss: Any,
    *,
    options: Mapping[Any, Any] | None = None,
    loss_weights: Mapping[str, float] | None = None,
    class_weight: Any = None,
    label_shapes: Mapping[str, Shape] | None = None,
    weight_shape: Shape | None = None,
    labeled: bool = True,
    in_chunks: bool = True,
) -> TrainingLoss:
    """Return what a trainer minimizes: the mean over the terms of a batch, for one or more outputs.

    Options that are not set are decided by the graph and the labels: `from_logits`, `axis` and
    `soft_labels`. Where a Softmax or Sigmoid computes the prediction, the loss is computed from the
    logits before it. See `losses.applied_to`.

    Args:
        loss: a key of `LOSSES`, "mse", "mae", "bce" or "ce"; a `LossSpec`; a `BaseLearningLoss` or
            a class of them; a function `(op, prediction, label) -> loss of every element or row`;
            or `{output: any of these}`.
        options: options of the loss, or for several outputs `{output: options}`.
        loss_weights: `{output: factor}` in the total, 1 by default.
        class_weight: weights of the classes, (C,) or `{class: weight}`, for losses that have this
            option; for several outputs `{output: weights}`.
        label_shapes: shapes of the labels, by the name of the output or of the label input: they
            tell one-hot labels from class indices.
        weight_shape: shape of the sample weights, if they are not (N,): (N, 1), or one weight for
            each loss, whose axes but the first may have length 1.
        labeled, in_chunks: as those of `TrainingLoss`.

    Raises:
        ValueError: an unknown loss, option or output, or a factor that is not a finite number.
    """
    if isinstance(loss, Mapping):
        by_output = {"options": options, "loss_weights": loss_weights, "class_weight": class_weight}
        _check_by_output(loss, by_output)
    elif loss_weights:
        raise ValueError(
            f"{named('loss_weights')} needs the losses by output, as {named('loss={output: loss}')}"
        )
    else:
        loss, options, class_weight = {None: loss}, {None: options}, {None: class_weight}
    losses: dict[str | None, Loss] = {
        name: _one(one, (options or {}).get(name), (class_weight or {}).get(name))
        for name, one in loss.items()
    }
    factors = {name: float(f) for name, f in (loss_weights or {}).items()}
    shapes = dict(label_shapes or {})
    return TrainingLoss(losses, factors, shapes, weight_shape, labeled, in_chunks)


def _check_by_output(losses: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an argument that is not by output, or names one without a loss."""
    if not losses:
        raise ValueError("loss has no output: give {output: loss}")
    for name, values in arguments.items():
        given = named(name)
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"{given} must be by output, as the losses are: {list(losses)}")
        for output in values or ():
            if output not in losses:
                raise unknown(f"output in {given}", output, losses)
    for name, factor in (arguments["loss_weights"] or {}).items():
        if not isfinite(float(factor)):
            raise ValueError(
                f"{named('loss_weights')}[{name!r}] must be a finite number, not {float(factor)}"
            )


def takes_class_weight(loss: Any) -> bool:
    """Return whether a loss, a name or a `LossSpec`, has the option `class_weight`."""
    spec = LOSSES.get(ALIASES.get(loss, loss)) if isinstance(loss, str) else loss
    return isinstance(spec, LossSpec) and "class_weight" in spec.all_options


def _one(loss: Any, options: Mapping[str, Any] | None, class_weight: Any) -> Loss:
    """Return the loss of one output; options of a formula that are not set are None."""
    chosen = dict(options or {})
    name = ALIASES.get(loss, loss) if isinstance(loss, str) else loss
    if class_weight is not None:
        if isinstance(name, str) and name in LOSSES and not takes_class_weight(name):
            raise ValueError(
                f"{named('class_weight')} has no effect on the loss {name!r}: leave out "
                f"{named('class_weight')}"
            )
        chosen["class_weight"] = class_weight
    if hasattr(loss, "output_terms"):
        return loss.select(loss, **chosen)
    if isinstance(loss, LossSpec):
        spec = loss.with_options({**loss.options, **chosen})
    elif callable(name) or (isinstance(name, str) and name in LOSSES):
        spec = loss_spec(name, None, chosen)
    else:
        raise unknown("loss", loss, [*LOSSES, *ALIASES])
    left_open = {name: None for name in LEFT_OPEN if name in spec.all_options}
    return spec.with_options(left_open | {**spec.options})
