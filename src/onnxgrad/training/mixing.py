"""Mixup and CutMix: the rows of a batch are mixed with each other, in the graph of a step.

The random numbers of a batch are a function of the seed and the number of the draw, and inputs of
the step, so that a resumed training mixes the same rows by the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.checks import check_positive
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.objectives import TrainingLoss
from onnxgrad.losses.output_terms import MixedRows
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.training.model_loss import ComputedLoss
from onnxgrad.training.step.inputs import Feed, RuntimeCall, draw_numbers

_DOUBLE = ir.DataType.DOUBLE
# the stream of random numbers [seed, 3, draw]; other streams of a trainer are [seed, 1], [seed, 2]
_STREAM = 3
_MOST_CHANNELS = 4  # an axis of at most this length may be the axis of channels


@dataclass(frozen=True)
class Mixup:
    """The argument `mix` of a trainer that blends each row with another row: see `mixup`."""

    alpha: float
    inputs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def random_numbers(self, rng: np.random.Generator) -> list[float]:
        """Draw the share of each row's values in the mix with its partner row."""
        return [rng.beta(self.alpha, self.alpha)]

    def mixed_inputs(self, features: Sequence[str]) -> Sequence[str]:
        """Return the names of the inputs that are mixed; `features` are the inputs of the model."""
        return self.inputs or _single_feature(features, "mixup(inputs=[...])")

    def write_mixed_inputs(
        self, op: Emit, inputs: Sequence[ir.Value], partners: ir.Value, numbers: ir.Value
    ) -> tuple[list[ir.Value], MixedRows]:
        """Return share x_i + (1 - share) x_partners[i] for each input x, and the `MixedRows`.

        The `MixedRows` tell the loss the partners and the share.
        """
        mixed = MixedRows(partners, op.Reshape(numbers, []))
        for x in inputs:
            if x.dtype is None or not x.dtype.is_floating_point():
                raise ValueError(
                    f"mixup: the input {x.name!r} has no floats, but {x.dtype}: name float inputs "
                    "with mixup(inputs=[...]), or use cutmix"
                )
        return [mixed.blend(op, x, mixed.take_partners(op, x)) for x in inputs], mixed


@dataclass(frozen=True)
class CutMix:
    """The argument `mix` of a trainer that pastes a box of another row: see `cutmix`."""

    alpha: float
    input: str | None = None
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def random_numbers(self, rng: np.random.Generator) -> list[float]:
        """Draw the share that an image keeps, and the center of the box by axis, from 0 to 1."""
        centers = rng.random(8)  # an input has at most eight axes
        return [rng.beta(self.alpha, self.alpha), *centers]

    def mixed_inputs(self, features: Sequence[str]) -> Sequence[str]:
        """Return the name of the input that is mixed; `features` are the inputs of the model."""
        return (
            _single_feature(features, "cutmix(input=...)") if self.input is None else [self.input]
        )

    def write_mixed_inputs(
        self, op: Emit, inputs: Sequence[ir.Value], partners: ir.Value, numbers: ir.Value
    ) -> tuple[list[ir.Value], MixedRows]:
        """Return the images with a box of the partner's image, and the `MixedRows`.

        The `MixedRows` tell the loss the partners, and the share of the area outside of the box.
        """
        [x] = inputs
        axes, n = self._box_axes(x), rank(x) or 0
        drawn = op.Gather(numbers, [0], axis=0)
        rest = op.Sub(op.const(1.0, drawn.dtype), drawn)
        power = op.const(1 / len(axes), drawn.dtype)
        half = op.Mul(op.const(0.5, drawn.dtype), op.Pow(rest, power))
        inside, shares = [], []
        for i, axis in enumerate(axes):
            length = op.Shape(x, start=axis, end=axis + 1)
            whole = op.Cast(length, to=drawn.dtype)
            center = op.Floor(op.Mul(op.Gather(numbers, [i + 1], axis=0), whole))
            reach = op.Floor(op.Mul(half, whole))
            begin = op.Max(op.Sub(center, reach), op.const(0.0, drawn.dtype))
            end = op.Min(op.Add(center, reach), whole)
            shares.append(op.Div(op.Sub(end, begin), whole))
            at = op.Cast(op.arange(length), to=drawn.dtype)
            along = op.And(op.GreaterOrEqual(at, begin), op.Less(at, end))
            inside.append(op.Reshape(along, [-1] + [1] * (n - 1 - axis)))
        share = op.Reshape(op.Sub(op.const(1.0, drawn.dtype), reduce(op.Mul, shares)), [])
        mixed = MixedRows(partners, share, of_parts=True)
        cut = op.Where(reduce(op.And, inside), mixed.take_partners(op, x), x)
        return [op.set_type_like(cut, x)], mixed

    def _box_axes(self, x: ir.Value) -> tuple[int, ...]:
        """Return the axes of the box, counted from the first axis.

        Raises:
            ValueError: the input lacks an axis of `axes`, or `axes` must be given.
        """
        n, shape = rank(x), dims(x) or ()
        if n is None:
            raise ValueError(f"cutmix: declare the shape of the input {x.name!r} in the model")
        if self.axes is not None:
            axes = tuple(axis % n if -n <= axis < n else -1 for axis in self.axes)
            if not axes or len(set(axes)) < len(axes) or any(axis < 1 for axis in axes):
                raise ValueError(
                    f"cutmix: axes={self.axes} do not fit the input {x.name!r} of the shape "
                    f"{list(shape)}: name different axes from 1 to {n - 1}, as axis 0 has the rows"
                )
            return axes
        few = [isinstance(d, int) and d <= _MOST_CHANNELS for d in shape]
        if n != 4 or (few[3] and not few[1]):
            raise ValueError(
                f"cutmix: the input {x.name!r} has the shape {list(shape)}, which is not (rows, "
                "channels, height, width): name the axes of height and width, as "
                "cutmix(axes=(1, 2))"
            )
        return 2, 3


Mix = Mixup | CutMix


def check_mix(mix: Any) -> Mix | None:
    """Return the argument `mix` of a trainer unchanged, if it is valid.

    Raises:
        ValueError: `mix` is neither a `Mix` nor None.
    """
    if mix is None or isinstance(mix, Mix):
        return mix
    raise ValueError(f"mix must be mixup(...) or cutmix(...), not {mix!r}")


def mixup(alpha: float = 0.2, inputs: Iterable[str] | None = None) -> Mixup:
    """Mix rows to l x_i + (1 - l) x_j, and their losses in the same way, l ~ Beta(alpha, alpha).

    An argument of a trainer, `mix=mixup()`, that mixes the rows of each batch while it trains
    (Zhang et al. 2017, arXiv:1710.09412): row i with the row j of a random permutation, by one
    share l for all rows. Labels may be of any kind. A loss that is linear in the label, as cross
    entropy, equals the loss of the mixed label, and the squared error has the same gradient. Sample
    weights, class weights and ignored labels count for each of both labels.
    Evaluations and predictions mix nothing.

    Draws are functions of seed and step. With `accumulate`, and where processes share a batch, rows
    are mixed within their part of it, each part with another share.

    Args:
        alpha: a number above 0; the shares are near 0 and 1 for a small one, and uniform for 1.
        inputs: names of the float inputs that are mixed; None: the only input. Other inputs keep
            the values of the row i.

    Returns:
        The argument `mix` of a trainer.

    Raises:
        ValueError: another alpha. When training begins: inputs without floats; losses whose rows
            are sequences, or are compared with each other, or that a model computes; rows that are
            not along the first axis; or `carry`.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] y) <float[2,3] w = {0.0, 0, 0, 0, 0, 0}> {
        ...         y = MatMul(x, w) }''')
        >>> X, y = np.float32(np.eye(2)[[0, 1] * 8]), np.array([0, 2] * 8)
        >>> mix = og.losses.mixup(alpha=0.2)
        >>> trainer = og.Trainer(model, "cross_entropy", learning_rate=0.1, mix=mix)
        >>> trainer.fit(X, y, epochs=20).predict(X[:2]).argmax(axis=1).tolist()
        [0, 2]
    """
    if isinstance(inputs, str):  # its letters would be the names
        raise ValueError(f"inputs is a list of names: write inputs=[{inputs!r}]")
    chosen = None if inputs is None else tuple(inputs)
    if chosen == ():
        raise ValueError("inputs is empty: name one input or more")
    return Mixup(alpha, chosen)


def cutmix(
    alpha: float = 1.0, input: str | None = None, axes: Iterable[int] | None = None
) -> CutMix:
    """Paste a box of image x_j into image x_i, and mix their losses by the area of the box.

    An argument of a trainer, `mix=cutmix()` (Yun et al. 2019, arXiv:1905.04899, algorithm 1). With
    l ~ Beta(alpha, alpha), the sides of the box are sqrt(1 - l) times the sides of the image, and
    its center is uniform; where the image cuts it off, l becomes the share that is left. All rows
    of a batch have one box, at random places from batch to batch. For rows, labels and draws, see
    `mixup`.

    Args:
        alpha: a number above 0.
        input: name of the input with the images, of any dtype; None: the only input.
        axes: its axes of height and width, or any axes, up to eight; None: (2, 3), for
            images (rows, channels, height, width). A box of n axes has sides of (1 - l)^(1/n).

    Returns:
        The argument `mix` of a trainer.

    Raises:
        ValueError: another alpha. When training begins: as `mixup`; an input without such axes, or
            labels of pixels.

    Examples:
        >>> import onnxgrad as og
        >>> og.losses.cutmix(axes=(1, 2))  # of images (rows, height, width, channels)
        CutMix(alpha=1.0, input=None, axes=(1, 2))
    """
    chosen = None if axes is None else tuple(int(axis) for axis in axes)
    if chosen is not None and not 0 < len(chosen) < 9:
        raise ValueError(f"cutmix: axes={chosen} must name one to eight axes")
    return CutMix(alpha, input, chosen)


def mix_rows(
    op: Emit, job: Any, loss: Any, data: Sequence[ir.Value], rows: Any
) -> MixedRows | None:
    """Mix the rows of inputs, as the argument `mix` of a `Job` says, and return the `MixedRows`.

    None is returned for a job without `mix`. The nodes of the graph read the mixed values. The
    graph gets the inputs `partners`, the index of the row that each row is mixed with, int64 (N,),
    and `mix_numbers`, the random numbers that `mix` draws for a batch, float64 (numbers,).

    Args:
        op: writes into the graph.
        job: the arguments of a trainer.
        loss: the object that writes the loss.
        data: the inputs of a batch, without labels.
        rows: the symbol of the axis of rows.

    Raises:
        ValueError: inputs that cannot be mixed, or another argument that does not fit.
    """
    if job.mix is None:
        return None
    if not isinstance(loss, TrainingLoss):
        computed = isinstance(loss, ComputedLoss)
        kind = "computed by a model" if computed else f"a {type(loss).__name__}"
        raise ValueError(
            f"mix takes a loss of onnxgrad.losses.LOSSES, not a loss that is {kind}: leave out mix"
        )
    for name, given in (("carry", job.carry), ("batch_axes", sorted(job.inputs_with_moved_rows))):
        if given:
            raise ValueError(
                "mix mixes the rows of one batch along the first axis, which does not go with "
                f"{name} for {list(given)}: leave out mix or {name}"
            )
    mix, seed, inputs = job.mix, job.seed, {str(x.name): x for x in data}
    chosen = []
    for name in mix.mixed_inputs(list(inputs)):
        if name not in inputs:
            raise unknown("input of mix", name, inputs)
        chosen.append(inputs[name])
    length = _common_row_dim(chosen, rows)
    uses = {x: list(x.uses()) for x in chosen}
    count = len(mix.random_numbers(np.random.default_rng(0)))

    @lru_cache(maxsize=1)  # permutation and numbers of a call are drawn at once
    def draw_for_batches(draws: tuple[int, ...], rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return row permutations and random numbers that mix the rows of one batch for each draw.

        A draw, the index of a batch in the training, and the seed decide both.
        """
        generators = [np.random.default_rng([seed, _STREAM, draw]) for draw in draws]
        numbers = np.array([mix.random_numbers(rng) for rng in generators])
        return np.array([rng.permutation(rows) for rng in generators]), numbers

    def drawn_values(call: RuntimeCall, index: int) -> np.ndarray:
        """Return the row permutation (index 0) or random numbers (1) of each batch of a call."""
        draws, rows = draw_numbers(call), call.piece.own // (call.micro_batches or 1)
        return draw_for_batches(tuple(draws.ravel().tolist()), rows)[index].reshape(
            *draws.shape, -1
        )

    inputs_of_mix = ("partners", ir.DataType.INT64, length), ("mix_numbers", _DOUBLE, count)
    partners, numbers = (
        Feed(name, dtype, partial(drawn_values, index=i), (n,), of_rows=True).input_in(op)
        for i, (name, dtype, n) in enumerate(inputs_of_mix)
    )
    with op.at(next(iter(op.graph), None)):
        values, mixed = mix.write_mixed_inputs(op, chosen, partners, numbers)
    for x, value in zip(chosen, values, strict=True):
        for node, index in uses[x]:
            node.replace_input_with(index, value)
    return mixed


def _common_row_dim(inputs: Sequence[ir.Value], rows: Any) -> Any:
    """Return the common length of the first axis of `inputs`, a number or the symbol of the rows.

    Raises:
        ValueError: lengths that differ, a single row, or rows that are not on the first axis.
    """
    lengths = [(dims(x) or (None,))[0] for x in inputs]
    for x, length in zip(inputs, lengths, strict=True):
        if length == 1:
            raise ValueError(
                f"mix needs batches of several rows, and the input {x.name!r} takes one row: leave "
                "mix out"
            )
        if length != lengths[0] or (not isinstance(length, int) and length != rows):
            raise ValueError(f"mix needs the rows of {x.name!r} on its first axis: leave mix out")
    return lengths[0]


def _single_feature(features: Sequence[str], remedy: str) -> Sequence[str]:
    """Return `features`, a list of one name; raise `ValueError` if it has several names."""
    if len(features) == 1:
        return features
    raise ValueError(
        f"mix: the model has the inputs {list(features)}: name the inputs to mix by {remedy}"
    )
