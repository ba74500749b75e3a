"""The loss that a trainer minimizes: a weighted mean over the terms of a batch for each output."""

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
from onnxgrad.losses.formulas import LOSSES, loss_spec
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.info import LossInfo
from onnxgrad.losses.logits import keep_scores_opposite
from onnxgrad.losses.output_terms import MixedRows, OutputTerms, check_losses_can_mix, formula_terms
from onnxgrad.losses.spec import ALIASES, LEFT_OPEN, LossSpec
from onnxgrad.losses.sums import scale_rows, sum_and_count, sum_without_label
from onnxgrad.losses.vocabulary import OwnGradients, cross_entropy_in_chunks, gradient_scaler
from onnxgrad.operators.shapes import dims, rank

LABEL, WEIGHT = "label", "weight"  # names of the inputs

Shape = Sequence[int]
Values = Mapping[str, ir.Value]


class LossObject(Protocol):
    """A loss of one output that is an object with methods, such as a `BaseLearningLoss`, not a
    formula in `LOSSES`.
    """

    @staticmethod
    def select(loss: Any, **options: Any) -> LossObject:
        """Return `loss` if it is an object, or create an object of the class `loss` with these
        options.
        """

    def output_terms(self, op: Emit, prediction: ir.Value, label_name: str) -> OutputTerms:
        """Write the losses and weights of a prediction and a new label, which is not yet an input
        of the graph.
        """


Loss = LossSpec | LossObject


@dataclass
class WrittenLoss:
    """The loss of a batch as nodes in a graph, total = sum_k factors_k sums_k / counts_k over the
    outputs k.

    Attributes:
        sums: for each output, the weighted sum of the terms, a scalar; in float32 for predictions
            of 16 bits.
        counts: for each output, the sum of the weights, a scalar of the same dtype. It depends on
            labels and sample weights only, and on labels only without `weighted_mean`. It is 0 if
            all labels of the batch are ignored.
        factors: for each output, its weight in the total.
        labels: new inputs, not yet inputs of the graph.
        infos: for each label, by the name of its input, the facts that limit it.
        weight: the new input of sample weights, or None. They multiply the weights of the terms:
            one for each row, (N,); or with as many axes as the losses, to whose shape they are
            broadcast.
        gradients: for each output, the function that writes gradients of the scaled sum, where the
            loss writes them itself; else None.
        needs_no_label: whether the graph computes the labels, from tokens.
        batch_loss: a loss that a model computes as one number for a batch, whose product with the
            number of rows is the only sum; None where rows or elements have losses.
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

    def add_sums(
        self,
        total: ir.Value,
        count: ir.Value,
        factor: float = 1.0,
        own: OwnGradients | None = None,
    ) -> None:
        """Add the loss of one output: the weighted sum of its losses and the sum of weights."""
        self.sums.append(total)
        self.counts.append(count)
        self.factors.append(factor)
        self.gradients.append(own)

    def add_losses(self, op: Any, losses: ir.Value, factor: float = 1.0) -> None:
        """Add the loss of one output, from losses of rows or elements computed without a label."""
        total, count = sum_without_label(op, losses, self.weight, self.labels)
        self.add_sums(total, count, factor)

    def add_label(self, label: ir.Value, prediction: str | None, info: LossInfo) -> None:
        """Add a label input, with the `LossInfo` that says which values it may have."""
        name = str(label.name)
        self.labels.append(label)
        self.infos[name] = replace(info, label=name, prediction=prediction, reduction="mean")

    def initial_cotangents(self, op: Any, scales: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return {value: cotangent}, where the backward pass of sum_k scales_k sums_k begins.

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
    """The loss that a trainer minimizes, of one or several outputs of a model; `training_loss`
    returns it.

    Attributes:
        losses: the loss of each output by its name; the name None stands for the only float output.
        factors: weights of the outputs in the total; 1 for an output without one.
        label_shapes: shapes of the labels by the name of the output, or of the label input.
        weight_shape: shape of the sample weights: (N,), (N, 1), or the shape of the losses, for one
            weight for each loss; axes of unknown length may have length 1.
        labeled: whether there are labels; a language model without has the tokens of its input.
        in_chunks: whether a loss over a large vocabulary may be a Scan that depends on weights.
        wrt: the values w.r.t. which the graph will be differentiated; None: not known, so that
            nothing is written in chunks.
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

    def for_gradients(
        self, wrt: Sequence[ir.Value], mixed: MixedRows | None = None
    ) -> TrainingLoss:
        """Return a copy of the loss for a graph that will be differentiated w.r.t. the values in
        `wrt`.

        Raises:
            ValueError: rows are `mixed`, and a loss has no meaning for a mixture of them.
        """
        if mixed is not None:
            check_losses_can_mix(self.losses)
        return replace(self, wrt=wrt, mixed=mixed)

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the model's float tensors to which the losses are applied.

        Raises:
            ValueError: an unknown name, or a model with no float output or several and no name.
        """
        if None not in self.losses:
            return [choose_output(proto, name) for name in self.losses]
        remedy = f"name it, as {named('loss={output: loss}')}"
        return [choose_output(proto, None, remedy, inside=True)]

    def write(self, op: Emit, predictions: Values, weighted: bool = False) -> WrittenLoss:
        """Write the losses of all outputs into the graph of `op`, whose operators `prepare` has
        replaced by differentiable ones.

        This appends nodes; the new inputs are in the result. The label of a single output is
        called "label", the labels of several outputs "label_<output>"; sample weights are called
        "weight". A name that the graph has already gets a numeric suffix.

        Args:
            op: emitter of the graph.
            predictions: the values by the names that `outputs` returns.
            weighted: whether to add an input of sample weights.

        Raises:
            ValueError: a prediction that its loss does not take, or an option that the graph does
                not decide.
        """
        written, predictions = WrittenLoss(), keep_scores_opposite(op, predictions)
        labels = {
            name: LABEL if len(predictions) == 1 else f"{LABEL}_{name}" for name in predictions
        }
        for name in self.label_shapes:
            if name not in (*labels, *labels.values()):
                raise unknown("label", name, [*labels, *labels.values()])
        with op:
            found: dict[str, OutputTerms] = {}
            for name, x in predictions.items():
                loss, label = self.losses[name if name in self.losses else None], labels[name]
                if isinstance(loss, LossSpec):
                    shape = self.label_shapes.get(name, self.label_shapes.get(label))
                    found[name] = formula_terms(op, loss, x, label, shape, self.mixed, self.labeled)
                else:
                    found[name] = loss.output_terms(op, x, label)
            if weighted and _have_common_rows(predictions.values()):
                shape = tuple(self.weight_shape or ())
                by_row = len(shape) - (shape[-1:] == (1,)) <= 1  # (N,) or (N, 1)
                first, *others = found.values()
                axes = 1 if by_row or others else rank(first.terms.losses) or 1
                written.weight = new_sample_weight(op, predictions.values(), axes, first.label)
            for name, one in found.items():
                self._write_output_loss(op, written, name, one)
        return written

    def _write_output_loss(
        self, op: Emit, written: WrittenLoss, name: str, one: OutputTerms
    ) -> None:
        """Write the weighted sum of the losses of one output, and add it to `written`."""
        weight, own = written.weight, None
        wrt = self.wrt if self.in_chunks and self.mixed is None else None
        if one.info.shift and weight is not None and rank(weight) == 2:  # weights move with labels
            every = op.emit("Expand", [weight, op.Shape(one.label)], {}, fresh=True)
            weight = op.Slice(every, [1], [np.iinfo(np.int64).max], [1])
        total, count = sum_and_count(op, one.terms, one.label, weight)
        # own and partner label weigh as one
        if self.mixed is not None and one.of_partners is not None:
            label, terms = one.of_partners
            other = None if weight is None else self.mixed.take_partners(op, weight)
            partners_total, _ = sum_and_count(op, terms, label, other)
            total = self.mixed.blend(op, total, partners_total)
        if one.gradient is not None:
            value, g = one.gradient
            own = gradient_scaler([(value, g if weight is None else scale_rows(op, g, weight))])
        elif one.of_words is not None and wrt is not None:
            logits, words = one.of_words
            words = replace(words, weight=written.weight)
            total, count, own = cross_entropy_in_chunks(op, logits, words, wrt, (total, count))
        if not one.weighted_mean:
            _, count = sum_and_count(op, one.terms, one.label)
        written.add_sums(total, count, float(self.factors.get(name, 1.0)), own)
        if one.label.producer() is None and one.label not in op.graph.inputs:
            written.add_label(one.label, name, one.info)
        else:  # the labels are computed from the input of tokens
            written.needs_no_label = True


def _have_common_rows(predictions: Iterable[ir.Value]) -> bool:
    """Return whether the predictions may have one row for each sample weight: they have axes, and
    no two have first axes of different static lengths.
    """
    shapes = [dims(x) for x in predictions]
    lengths = {shape[0] for shape in shapes if shape and isinstance(shape[0], int)}
    return () not in shapes and len(lengths) < 2


def new_sample_weight(
    op: Emit, predictions: Iterable[ir.Value], axes: int = 1, label: ir.Value | None = None
) -> ir.Value:
    """Return a new input of sample weights, float64 if a prediction is float64, else float32.

    Its shape is (N,), or has this number of axes; it is not yet an input of the graph. N is the
    number of rows of `label`, or without one, of the first prediction.
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
    """Return the loss of a trainer: the weighted mean of the losses of a batch's labels, for one or
    more outputs.

    The graph and the labels decide the options `from_logits`, `axis` and `soft_labels` that are not
    set. Where a Softmax or Sigmoid computes the prediction, the loss is computed from the
    logits before it. See `losses.applied_to`.

    Args:
        loss: a key of `LOSSES`, "mse", "mae", "bce" or "ce"; a `LossSpec`; a `BaseLearningLoss` or
            a class of them; a function `(op, prediction, label) -> loss of every element or row`;
            or `{output: any of these}`.
        options: options of the loss, or for several outputs `{output: options}`. `weighted_mean` is
            an attribute of the `LossSpec`.
        loss_weights: `{output: factor}` in the total, 1 by default.
        class_weight: weights of the classes, (C,) or `{class: weight}`, for losses that have this
            option; for several outputs `{output: weights}`.
        label_shapes: shapes of the labels, by the name of the output or of the label input: they
            tell one-hot labels from class indices.
        weight_shape: shape of the sample weights, if they are not (N,): (N, 1), or one weight for
            each loss, whose axes but the first may have length 1.
        labeled, in_chunks: as in `TrainingLoss`.

    Raises:
        ValueError: an unknown loss, option or output, or a factor that is not a finite number.
    """
    if isinstance(loss, Mapping):
        by_output = {"options": options, "loss_weights": loss_weights, "class_weight": class_weight}
        _check_arguments_by_output(loss, by_output)
    elif loss_weights:
        raise ValueError(
            f"{named('loss_weights')} takes the factors of several losses: give one loss for each "
            f"output, {named('loss={output: loss}')}"
        )
    else:
        loss, options, class_weight = {None: loss}, {None: options}, {None: class_weight}
    losses: dict[str | None, Loss] = {
        name: _select_output_loss(one, (options or {}).get(name), (class_weight or {}).get(name))
        for name, one in loss.items()
    }
    factors = {name: float(f) for name, f in (loss_weights or {}).items()}
    shapes = dict(label_shapes or {})
    return TrainingLoss(losses, factors, shapes, weight_shape, labeled, in_chunks)


def _check_arguments_by_output(losses: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an argument that is not a dict by output, or names an output that has
    no loss.
    """
    if not losses:
        raise ValueError("loss is an empty dict: give {output: loss}")
    for name, values in arguments.items():
        given = named(name)
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(
                f"{given} must be a dict {{output: ...}} for several losses; their outputs are "
                f"{list(losses)}"
            )
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


def _select_output_loss(loss: Any, options: Mapping[str, Any] | None, class_weight: Any) -> Loss:
    """Return the loss object of one output, with None for options that the user left open."""
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
    weighted_mean = bool(chosen.pop("weighted_mean", getattr(loss, "weighted_mean", True)))
    if isinstance(loss, LossSpec):
        spec = loss.with_options({**loss.options, **chosen})
    elif callable(name) or (isinstance(name, str) and name in LOSSES):
        spec = loss_spec(name, None, chosen)
    else:
        raise unknown("loss", loss, [*LOSSES, *ALIASES])
    left_open = {name: None for name in LEFT_OPEN if name in spec.all_options}
    return replace(spec.with_options(left_open | {**spec.options}), weighted_mean=weighted_mean)
