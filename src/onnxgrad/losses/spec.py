"""The record of a loss: its formula, labels and options; and nodes that several formulas write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import check_options, unknown
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import Dims, dims, equal, rank

# options that the model or the labels decide, if users do not set them
LEFT_OPEN = ("from_logits", "soft_labels")

LOWEST = -1e30  # a logit of probability zero, finite so that differences are not NaN
_LOWEST_FLOAT16 = -1e4

Formula = Callable[..., ir.Value]
Options = Mapping[str, Any]


class LabelBounds(NamedTuple):
    """The values that labels may have, as a list or a range; `text` describes them in messages."""

    text: str
    values: tuple[float, ...] = ()
    least: float = -math.inf
    most: float = math.inf

    def test(self, labels: np.ndarray) -> np.ndarray:
        """Return a mask of the labels whose value is allowed."""
        if self.values:
            return np.isin(labels, self.values)
        return (labels >= self.least) & (labels <= self.most)

    def write(self, op: Any, label: ir.Value) -> ir.Value:
        """Write nodes that compute a mask of the labels whose value is allowed."""
        if self.values:
            return reduce(op.Or, (op.Equal(label, value) for value in self.values))
        sides = []
        if self.least > -math.inf:
            sides.append(op.GreaterOrEqual(label, self.least))
        if self.most < math.inf:
            sides.append(op.LessOrEqual(label, self.most))
        return reduce(op.And, sides)


@dataclass(frozen=True)
class LabelKind:
    """The dtype and shape of labels for a prediction; by default, equal to the prediction's.

    Attributes:
        dtype: dtype of the labels; None: the dtype of the prediction.
        shape: function from the shape of the prediction to the shape of the labels; None is an
            unknown rank.
        accepts: function that returns whether a prediction may have this shape.
        needs: the accepted predictions in words.
        classes: function from the shape of the prediction to the number of classes, or the symbol
            of that dimension; None where labels are not class indices.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad.losses import LabelKind
        >>> boxes = LabelKind(ir.DataType.FLOAT, lambda prediction: (prediction[0], None, 5))
        >>> boxes.shape(("N", 8400, 6))
        ('N', None, 5)
    """

    dtype: ir.DataType | None = None
    shape: Callable[[Dims | None], Dims | None] = lambda prediction: prediction
    accepts: Callable[[Dims | None], bool] = lambda prediction: True
    needs: str = "any prediction"
    classes: Callable[[Dims | None], int | str | None] = lambda prediction: None


LIKE_PREDICTION = LabelKind()


def labels_like_prediction(rank: int, needs: str) -> LabelKind:
    """Return the `LabelKind` of labels with the dtype and shape of the prediction, which has `rank`
    axes or more.
    """
    return LabelKind(accepts=lambda f: f is not None and len(f) >= rank, needs=needs)


def class_index_kind(axis: int | None = None, rank: int = 2, needs: str | None = None) -> LabelKind:
    """Return the `LabelKind` of labels that are class indices, for a prediction with classes along
    `axis`.

    Labels have the shape of the prediction without that axis: (N, d1, ...) for (N, C, d1, ...).
    The prediction has at least `rank` axes.
    """
    at = 1 if axis is None else axis
    default = "a prediction (N, C, ...)" if at == 1 else f"a prediction with an axis {at}"
    return LabelKind(
        dtype=ir.DataType.INT64,
        shape=lambda f: None if f is None else (*f[:at], *f[at:][1:]),
        accepts=lambda f: f is not None and len(f) >= rank and -len(f) <= at < len(f),
        needs=needs or default,
        classes=lambda f: (f and f[at]) or "C",
    )


CLASS_INDICES = class_index_kind()

# labels 0 and 1, (N, 1), for the probabilities of both classes, (N, 2)
COLUMN_OF_TWO_CLASSES = LabelKind(
    dtype=ir.DataType.INT64,
    shape=lambda f: (f[0] if f else None, 1),
    accepts=lambda f: f is None or (len(f) == 2 and f[1] in (2, None)),
    needs="(N, 2) probabilities",
    classes=lambda f: 2,
)


@dataclass(frozen=True)
class Terms:
    """Losses with weights: sum(w l) / sum(w) of the losses l and weights w is the loss of a batch.

    Attributes:
        losses: one loss for every label element or row, of any shape.
        weights: class weights, 0 where a label is ignored; computed from labels alone. They are
            broadcast to the shape of `losses`, along axes of static length 1. None: all are 1.
    """

    losses: ir.Value
    weights: ir.Value | None = None


@dataclass(frozen=True)
class LossSpec:
    """A loss: its formula, its labels and its options, with the facts that trainers need.

    Attributes:
        formula: function `(op, prediction, label, **options)` that writes the loss of every element
            or every row, or returns their `Terms`.
        name: name of the loss in messages and in files.
        reduction: how the losses of a batch become one number: "sum" or "mean".
        labels: function from the options to the kind of the labels.
        has_ignore_index: whether an option `ignore_index` names a label whose loss is zero.
        bounds: the values that labels may have; None: all values of their dtype.
        threshold: the prediction between two classes, as a function of the options; None where a
            prediction is not one of two classes.
        write_terms: function like `formula` that returns the `Terms`, where the mean of the losses
            that `formula` writes is not the loss of a batch; None where it is.
        activation: operator that computes the probabilities that `from_logits=False` expects.
        ignore_nan: whether labels that are NaN are left out; an option of each loss with float
            labels that has one term for each of them. A `formula` with a parameter `ignore_nan`
            gets these labels, and leaves them out itself.
        mixes: whether the loss of a mixture of two rows is the mean of the losses with the labels
            of both, weighted by the shares of the rows.
        weighted_mean: whether a trainer divides the weighted sum of the losses by the sum of the
            sample weights. Otherwise, it divides by the same number as without sample weights, and
            sample weights may be negative.
        options: options that the user set.
        label_shape: shape of the labels that the user passes, if the caller knows it.

    Examples:
        >>> import onnxgrad as og
        >>> og.losses.LOSSES["log"].reduction
        'mean'
        >>> og.losses.LOSSES["huber"].with_options({"delta": 0.5}).all_options
        {'delta': 0.5}
    """

    formula: Formula
    name: str
    reduction: str = "sum"
    labels: Callable[[Options], LabelKind] = lambda options: LIKE_PREDICTION
    has_ignore_index: bool = False
    bounds: LabelBounds | None = None
    threshold: Callable[[Options], float] | None = None
    write_terms: Callable[..., Terms] | None = None
    activation: str | None = None
    ignore_nan: bool = False
    mixes: bool = True
    weighted_mean: bool = True
    options: Options = field(default_factory=dict)
    label_shape: tuple[int, ...] | None = None

    def with_options(self, options: Options, reduction: str | None = None) -> LossSpec:
        """Return the loss with these options, and with this reduction unless it is None.

        Raises:
            ValueError: an unknown option or reduction, or `ignore_nan` for labels that are no
                floats.
        """
        options = {**options}
        ignore_nan = bool(options.pop("ignore_nan", self.ignore_nan))
        if ignore_nan and not self.may_ignore_nan:
            instead = (
                "use ignore_index" if self.has_ignore_index else "its labels are class indices"
            )
            raise ValueError(f"ignore_nan=True: {self.name!r} cannot leave out labels: {instead}")
        check_options(f"option of loss {self.name!r}", options, self.formula, skip=3)
        if reduction not in (None, "sum", "mean"):
            raise unknown("reduction", reduction, ["sum", "mean"])
        chosen = reduction or self.reduction
        return replace(self, options=options, reduction=chosen, ignore_nan=ignore_nan)

    @property
    def all_options(self) -> dict[str, Any]:
        """The options that the user set, and the defaults of all other options."""
        parameters = list(signature(self.formula).parameters.values())[3:]
        defaults = {p.name: p.default for p in parameters if p.default is not Parameter.empty}
        return defaults | {**self.options}

    @property
    def may_ignore_nan(self) -> bool:
        """Whether NaN may mark ignored labels: the labels are floats, and the loss has no
        `ignore_index`.
        """
        return not self.has_ignore_index and self.label_kind.dtype is None

    @property
    def label_kind(self) -> LabelKind:
        """The dtype and shape of the labels."""
        return self.labels(self.all_options)

    def losses(self, op: Any, prediction: ir.Value, label: ir.Value) -> ir.Value:
        """Write the loss of every element or row times its weight; their sum is the loss of a
        batch.
        """
        terms, _ = self._write_loss_terms(self.formula, op, prediction, label)
        return terms.losses if terms.weights is None else terms.losses * terms.weights

    def terms(self, op: Any, prediction: ir.Value, label: ir.Value) -> Terms:
        """Write losses and weights, whose weighted mean is the loss of a batch."""
        terms, nan = self._write_loss_terms(self.write_terms or self.formula, op, prediction, label)
        if nan is None:
            return terms
        zero = op.const(0.0, terms.losses.dtype)
        weights = op.const(1.0, zero.dtype) if terms.weights is None else terms.weights
        return Terms(terms.losses, op.Where(nan, zero, weights))

    def _write_loss_terms(
        self, write: Callable[..., Any], op: Any, prediction: ir.Value, label: ir.Value
    ) -> tuple[Terms, ir.Value | None]:
        """Write losses and weights by the formula `write`; also return the mask of NaN labels, None
        if NaN labels are not ignored.
        """
        label = known = match_label_shape(op, label, prediction)
        options, nan = self.options, None
        if self.ignore_nan and "ignore_nan" in signature(self.formula).parameters:
            options = {**options, "ignore_nan": True}
        elif self.ignore_nan:
            nan = op.IsNaN(label)
            known = op.set_type_like(op.Where(nan, 0.0, label), label)
        terms = write(op, prediction, known, **options)
        terms = terms if isinstance(terms, Terms) else Terms(terms)
        if nan is None:
            return terms, None
        return replace(terms, losses=self._zero_nan_losses(op, terms.losses, label, nan)), nan

    def _zero_nan_losses(
        self, op: Any, losses: ir.Value, label: ir.Value, nan: ir.Value
    ) -> ir.Value:
        """Write the losses with 0 in place of each loss whose label is NaN.

        Raises:
            ValueError: there is not one loss for each label.
        """
        if rank(losses) != rank(label):
            raise ValueError(
                f"ignore_nan=True: {self.name!r} computes one loss for a row from all its labels, "
                "and a label that is NaN makes it unknown: leave out such rows, or replace NaN and "
                "give these rows sample weights of zero"
            )
        if not equal(dims(losses), dims(label)):
            losses = op.set_type_like(op.Reshape(losses, op.Shape(label)), label)
        return op.Where(nan, op.const(0.0, losses.dtype), losses)

    def for_labels(self, shape: Sequence[int]) -> LossSpec:
        """Return the loss for labels of this shape, by which one-hot labels are told from class
        indices.

        One-hot and soft labels have as many axes as the prediction, class indices one less (or an
        additional last axis of length 1). `losses.applied_to.decide_options` compares them.
        """
        return replace(self, label_shape=tuple(shape))


AnyFormula = TypeVar("AnyFormula", bound=Callable[..., Any])

LOSSES: dict[str, LossSpec] = {}  # by name; filled when `onnxgrad.losses` is imported
ALIASES = {
    "mse": "squared_error",
    "mae": "absolute_error",
    "bce": "binary_cross_entropy",
    "ce": "cross_entropy",
}


def register(*names: str, **fields: Any) -> Callable[[AnyFormula], AnyFormula]:
    """Return a decorator that registers a formula under `names` in `LOSSES`, with `fields` as
    attributes of its `LossSpec`.
    """

    def register_formula(formula: AnyFormula) -> AnyFormula:
        LOSSES.update({name: LossSpec(formula, name, **fields) for name in names})
        return formula

    return register_formula


def match_label_shape(op: Any, label: ir.Value, prediction: ir.Value) -> ir.Value:
    """Return a label of unknown shape reshaped to the prediction's shape, and a label of known
    shape unchanged or with nodes that check its lengths.

    If a label should have the shape of the prediction, and the model computes a length of it, the
    nodes fail for a batch in which the lengths differ: the label would be broadcast silently.
    """
    declared, wanted, known = dims(label), op.Shape(prediction), dims(prediction)
    if declared is None:
        return op.Reshape(label, wanted)  # otherwise (N,) and (N, 1) would be broadcast to (N, N)
    shape_of_kind = label.meta.get(marks.LABEL_SHAPE)
    if None not in declared or shape_of_kind is None or shape_of_kind(known) != known:
        return label
    # the first Reshape fails for a shorter label, the second one for a shorter prediction
    both = op.Reshape(op.Expand(label, wanted), op.Shape(label))
    return op.set_type_like(op.Reshape(both, wanted), prediction)


# -- nodes that formulas write ---------------------------------------------------------------------


def known_dims(x: ir.Value) -> Dims:
    """Return the dimensions of a value whose rank is known."""
    shape = dims(x)
    assert shape is not None
    return shape


def lowest_logit(op: Any, like: ir.Value) -> ir.Value:
    """Write a constant logit whose probability is 0, large and negative, in the dtype of `like`."""
    return op.const(_LOWEST_FLOAT16 if like.dtype == ir.DataType.FLOAT16 else LOWEST, like.dtype)


def where_const(op: Any, condition: ir.Value, yes: Any, no: Any, like: ir.Value) -> ir.Value:
    """Write the number `yes` where `condition` is true, and the number `no` elsewhere, in the dtype
    of `like`.
    """
    return op.Where(condition, op.const(yes, like.dtype), op.const(no, like.dtype))


def widen_to_float32(op: Any, x: ir.Value) -> ir.Value:
    """Write `x` cast to float32 if it is float16 or bfloat16, whose sums overflow or lose digits;
    else return `x`.
    """
    is_wide = x.dtype in (None, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return x if is_wide else op.Cast(x, to=ir.DataType.FLOAT)


def softplus(op: Any, x: ir.Value) -> ir.Value:
    """log(1 + e^x), smooth at 0, without overflow.

    onnxruntime has a kernel of Softplus for float32 only. For other dtypes it expands the function
    body of the opset, which overflows or fails. For float64: max(x, 0) - log sigmoid |x|.
    """
    if x.dtype != ir.DataType.DOUBLE:
        return op.Cast(op.Softplus(op.Cast(x, to=ir.DataType.FLOAT)), to=x.dtype)
    positive = op.Greater(x, 0.0)
    return op.Where(positive, x, 0.0) - op.Log(op.Sigmoid(op.Where(positive, x, -x)))


def axis_positions(op: Any, x: ir.Value, axis: int) -> ir.Value:
    """Write the int64 vector 0, 1, ..., n - 1, n the length of an axis of `x`."""
    y = op.arange(op.dim(x, axis))
    y.shape = ir.Shape([known_dims(x)[axis]])
    return y


def write_class_indices(op: Any, x: ir.Value, axis: int = 1) -> ir.Value:
    """Write 0, 1, ..., C - 1 along an axis of `x`, in a shape that is broadcast to `x`."""
    return op.Reshape(axis_positions(op, x, axis), [-1] + [1] * (len(known_dims(x)) - 1 - axis))


def take_at_index(op: Any, x: ir.Value, i: int) -> ir.Value:
    """Write `x[:, i]`: the (N, ...) elements at index `i` of axis 1 of `x` (N, k, ...)."""
    y = op.Gather(x, np.int64(i), axis=1)
    n, _, *rest = known_dims(x)
    y.shape = ir.Shape([n, *rest])
    return y


def move_classes_to_axis_1(op: Any, x: ir.Value, axis: int | None) -> ir.Value:
    """Write `x` with its class axis `axis` moved to axis 1; `axis=None` means that the classes are
    along axis 1 already.
    """
    n = len(known_dims(x))
    axis = 1 if axis is None else axis % n
    if axis == 1:
        return x
    rest = [i for i in range(n) if i != axis]
    return op.Transpose(x, perm=[rest[0], axis, *rest[1:]])
