"""`TrainerStack`: trains many copies of one model, its members, in one graph."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import prod
from typing import Any, Self

import numpy as np
from onnx import ModelProto

from onnxgrad.checks import check_choice, check_count
from onnxgrad.errors import ConvergenceWarning, named, printable, unknown
from onnxgrad.estimator import NotFittedError
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import fill_weights
from onnxgrad.model.write import save_filled
from onnxgrad.optimizers.base import Optimizer
from onnxgrad.optimizers.presets import select as select_optimizer
from onnxgrad.reporting import frames_inside
from onnxgrad.schedules.base import LearningRate
from onnxgrad.training.fit import Fit
from onnxgrad.training.job import require_known_arguments, select_rate
from onnxgrad.training.loop import Loop
from onnxgrad.training.modes.inference_form import export_model
from onnxgrad.training.state import StateValues, TrainState
from onnxgrad.training.trainer import LossLike, RateLike, TrainerBase

# a stack trains in one process
_ARGUMENTS = [n for n in signature(TrainerBase).parameters if n != "parallel"]


class TrainerStack(TrainerBase):
    """Trains several copies of a model, its members, in one graph.

    Every weight has a leading axis of members, so that one run of the runtime trains all. For small
    networks the time of a step depends on the number of nodes, and many members take little longer
    than one. All members see the same batches, and the same masks of dropout. Weights, slots and
    running statistics differ by member, and optimizers and learning rates may; each member trains
    as in a `Trainer` with its arguments, up to rounding. The optimizers are of one class, with
    options that may differ.

    A member whose loss or weights become NaN or infinite is frozen: it keeps the values from before
    that step, and does not disturb the other members. `state.frozen` names it, and `fit` warns. A
    callback freezes a member by `control.freeze`, as `EarlyStopping` does, which watches each
    member. Frozen members stay frozen until `fit` is called again; `partial_fit` warns of them.

    Callbacks see the values of all members: weights (members, ...), and losses, learning rates
    and metrics (members,) in the history.

    Args:
        model: model, serialized model or path; never modified.
        loss: as for `Trainer`.
        members: number of copies; None: the length of the first list among the next arguments.
        weights: for each member `{name: array}` of the weights with which it begins; weights that
            are missing are the model's.
        init: how members begin without `weights`. "model": all with the weights of the model.
            "redrawn": weights with two or more axes are drawn from the normal distribution with the
            mean and standard deviation that they have in the model. "glorot": they are drawn by
            Glorot's rule. Others, such as biases, are the model's. Member k draws by `seed` and k.
        optimizer: one for all, by name or as an object, or a list of one for each member; `fit`
            raises ValueError if their classes differ.
        learning_rate: a number or a schedule for all, or a list of one for each member. None:
            the usual rate of the optimizer, as for `Trainer`.
        train: as for `Trainer`.
        freeze: as for `Trainer`.
        train_ranges: as for `Trainer`.
        clip_norm: largest 2-norm of all gradients of a member together.
        accumulate: as for `Trainer`.
        batch_norm: as for `Trainer`.
        dropout: as for `Trainer`.
        mix: as for `Trainer`; all members see the same mixed rows.
        class_weight, classes: as for `Trainer`.
        loss_options: as for `Trainer`.
        loss_weights: as for `Trainer`.
        metrics: as for `Trainer`.
        callbacks: as for `Trainer`; `Recorder` describes one model, and is refused.
        batch_axes: as for `Trainer`.
        carry: as for `Trainer`.
        recompute: as for `Trainer`.
        precision: as for `Trainer`; in "mixed", the loss scale adapts to each member.
        device: "cpu", "cuda" or "cuda:1".
        seed: of the order of the rows, dropout, the split of validation data, and `init`.

    Attributes:
        members: number of copies.
        optimizers: the optimizer of each member; replace elements for the next `fit`.
        learning_rates: the learning rate of each member, in the same way.
        trained: the names of the weights that train.
        precision: "float32", "mixed" or "file", in which the models train.
        metrics: the metrics, of all outputs.
        rounding: the errors of rounding the weights to the 16 bits of the file.
        models: the models of all members.
        state: the `TrainState`: `weights` (members, ...) by name, `values[k]` of the member k,
            `frozen`, `step`, `epoch`, `history`.
        history: an entry for each epoch: `step`, `epoch`, and arrays (members,) as `loss`,
            `learning_rate`, `validation_loss` and metrics. The loss of a frozen member is NaN.
        progress: the `FitProgress` of the training that runs or ran last.
        gradient_norms: 2-norms (members,) of the gradient of each weight in the last step, if a
            callback needs them.

    Raises:
        ValueError: an invalid argument; lists of different lengths; members that are all equal.
        ModelError: the model cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> stack = og.TrainerStack(
        ...     model, "squared_error", optimizer="adam", learning_rate=[0.001, 0.01, 0.1])
        >>> stack.fit(X[:80], y[:80], validation=(X[80:], y[80:]), epochs=50).best()
        2
        >>> stack.predict(np.float32([[1, 1]])).shape
        (3, 1, 1)
        >>> best = stack.model(2)  # a `ModelProto`
    """

    def __init__(
        self,
        model: ModelLike,
        loss: LossLike | None = None,
        *,
        members: int | None = None,
        weights: Sequence[Mapping[str, Any]] | None = None,
        init: str = "model",
        optimizer: str | Optimizer | Sequence[str | Optimizer] = "adamw",
        learning_rate: RateLike | Sequence[RateLike] | None = None,
        **arguments: Any,
    ) -> None:
        require_known_arguments(arguments, _ARGUMENTS)
        count = count_members(
            members, weights=weights, learning_rate=learning_rate, optimizer=optimizer
        )
        optimizers = [select_optimizer(o) for o in values_of_members("optimizer", optimizer, count)]
        rates = values_of_members("learning_rate", learning_rate, count)
        super().__init__(model, loss, optimizer=optimizers[0], learning_rate=rates[0], **arguments)
        own = self.state.weights
        self._change_job(
            members=count,
            optimizers=optimizers,
            learning_rates=[*map(select_rate, rates, optimizers)],
            parallel=False,
        )
        self._job.callbacks.check_for_stack()
        if weights is None:  # member k draws by the seed and k, whatever the number of members
            draw = _INITS[check_choice("init", init, tuple(_INITS))]
            seeds = [np.random.default_rng([self._job.seed, 2, k]) for k in range(count)]
            begun = [{name: draw(rng, w) for name, w in own.items()} for rng in seeds]
        elif init != "model":
            raise ValueError("both weights= and init= say how members begin: pass one of them")
        else:
            begun = weights_of_members(own, values_of_members("weights", list(weights), count))
        first, *others = begun
        begin_equal = others and all(
            np.array_equal(w[name], first[name], equal_nan=True) for w in others for name in w
        )
        lists = (rates, optimizers)
        if begin_equal and all(value == listed[0] for listed in lists for value in listed):
            raise ValueError(
                "all members are equal: pass init='redrawn' or weights= for members that begin "
                "with different weights, or a list as learning_rate or optimizer"
            )
        self.state = TrainState(seed=self._job.seed, members=count)
        self.state.values = StateValues({n: np.stack([w[n] for w in begun]) for n in first})

    @property
    def members(self) -> int:
        """The number of members, that is, copies of the model."""
        return len(self._job.optimizers)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizer of each member."""
        return self._job.optimizers

    @property
    def learning_rates(self) -> Sequence[LearningRate]:
        """The learning rate of each member."""
        return self._job.learning_rates

    def _run_loop(self, call: Fit, loop: Loop) -> Self:
        """Run a loop, and warn of members that it froze as a loss or a weight is not finite."""
        super()._run_loop(call, loop)
        if frozen := sorted(loop.runner.not_finite.items()):
            named = ", ".join(f"member {k} after step {step}" for k, step in frozen)
            warnings.warn(
                "the loss or weights of some members became NaN or infinite, and these were "
                f"frozen: {named}. Lower their learning rates",
                ConvergenceWarning,
                stacklevel=frames_inside() + 1,
            )
        return self

    def model(self, member: int) -> ModelProto:
        """Return the model with the weights and statistics of a member, in its inference form.

        Raises:
            IndexError: there is no such member.
            ValueError: a weight beyond the range of the 16 bits that it has in the file.
        """
        values = self._weights_of_member(member)
        return fill_weights(export_model(self._job.proto, values, self._names), values)

    def save(self, path: str | os.PathLike, member: int) -> None:
        """Write the model of a member, in its inference form, to a file.

        Raises:
            IndexError: there is no such member.
            ValueError: a weight beyond the range of the 16 bits that it has in the file.
            OSError: the file cannot be written; an existing file is unchanged.
        """
        values = self._weights_of_member(member)
        save_filled(export_model(self._job.proto, values, self._names), values, path)

    def _weights_of_member(self, member: int) -> dict[str, np.ndarray]:
        """Return the weights and statistics of a member, in the dtypes of the file."""
        values = self._job.values_for_file(self.state)
        return {name: array[member] for name, array in values.items()}

    @property
    def models(self) -> list[ModelProto]:
        """The models of all members."""
        return [self.model(k) for k in range(self.members)]

    def best(self) -> int:
        """Return the member with the lowest validation loss.

        A member counts with its loss after the last epoch, or with the loss of its best weights if
        `EarlyStopping` restored these.

        Raises:
            NotFittedError: there was no validation data yet.
            ValueError: no member has a finite validation loss.
        """
        state = self.state
        if not state.validation_losses:
            raise NotFittedError("no validation loss is known: call fit with validation= first")
        losses = np.array(state.validation_losses[-1])
        by_step = {r["step"]: r["validation_loss"] for r in state.history if "validation_loss" in r}
        for entry in state.callbacks.values():
            for k, own in enumerate(entry.get("members", ())):
                if own["restored"] in by_step:
                    losses[k] = by_step[own["restored"]][k]
        if not np.isfinite(losses).any():
            raise ValueError("no validation loss is finite: train with lower learning rates")
        return int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))


Arrays = dict[str, np.ndarray]


def _redraw_weight(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return a random weight of the shape of `w`, from a normal distribution.

    A vector is returned unchanged. The distribution has the mean and the standard deviation of the
    elements of `w`.
    """
    if w.ndim < 2:
        return w
    values = np.asarray(w, np.float64)
    return rng.normal(values.mean(), values.std(), w.shape).astype(w.dtype)


def draw_glorot(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return a random weight of the shape of `w`, by the rule of Glorot & Bengio (2010).

    A vector is returned unchanged. Elements are uniform from -l to l, l = sqrt(6 / (fan in + fan
    out)).
    """
    if w.ndim < 2:
        return w
    limit = np.sqrt(6 / ((w.shape[0] + w.shape[1]) * prod(w.shape[2:])))
    return rng.uniform(-limit, limit, w.shape).astype(w.dtype)


_INITS: Mapping[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "model": lambda rng, w: w,
    "redrawn": _redraw_weight,
    "glorot": draw_glorot,
}


def weights_of_members(own: Arrays, weights: Sequence[Mapping[str, Any]]) -> list[Arrays]:
    """Return a list of the weights by name with which each member of a stack begins.

    Args:
        own: the weights of the model, by name.
        weights: the argument `weights`: for each member, arrays in place of weights of the model.

    Raises:
        ValueError: a weight that does not train, or of another shape.
    """
    members = []
    for k, given in enumerate(weights):
        new = dict(own)
        for name, value in given.items():
            if name not in own:
                raise unknown(f"weight of member {k}", name, own)
            array = np.asarray(value)
            if array.shape != own[name].shape:
                raise ValueError(
                    f"weights[{k}][{printable(name)!r}] has the shape {array.shape}, and the "
                    f"weight of the model has the shape {own[name].shape}: pass an array of this "
                    "shape"
                )
            new[name] = array.astype(own[name].dtype)
        members.append(new)
    return members


def values_of_members(name: str, value: Any, members: int) -> list[Any]:
    """Return the value of the argument `name` for each of the `members` of a stack.

    `value` is a list of one value for each member, or one value for all.

    Raises:
        ValueError: a list of another length.
    """
    if not is_list_of_members(value):
        return [value] * members
    if len(value) != members:
        raise ValueError(
            f"{named(name)} is a list of {len(value)} values, and the stack has {members} members: "
            "pass one value for each member, or one for all"
        )
    return list(value)


def is_list_of_members(value: Any) -> bool:
    """Return whether an argument is a list or vector, and so has one value for each member."""
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def count_members(members: int | None, **lists: Any) -> int:
    """Return the count of members of a stack: `members`, or the length of the first list.

    Raises:
        ValueError: there is neither `members` nor a list; a count below 1.
    """
    if members is not None:
        return check_count("members", members)
    for value in lists.values():
        if is_list_of_members(value):
            return check_count("members", len(value))
    raise ValueError(
        "a stack needs the count of its members: pass members=, such as members=4, or a list with "
        f"a value for each member as one of {', '.join(lists)}"
    )
