"""`TrainerStack`: trains many copies of one model in one graph."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import ConvergenceWarning
from onnxgrad.estimator import NotFittedError
from onnxgrad.graph.garbage import garbage_kept
from onnxgrad.model.read import ModelLike
from onnxgrad.optimizers import Optimizer, select as select_optimizer
from onnxgrad.training.arguments import check_count, select_rate
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.stack.fit import StackFit, evaluate_members, predict_members
from onnxgrad.training.stack.starts import checked_weights, count_members, per_member, starts
from onnxgrad.training.stack.state import StackState, stacked
from onnxgrad.training.state import TrainState, Values
from onnxgrad.training.trainer import Trainer


class TrainerStack:
    """Trains several copies of a model, its members, in one graph.

    Every weight has a leading axis of members, so that one run of the runtime trains all. For small
    networks the time of a step is that of its nodes, and many members take little longer than one.
    All members see the same batches. Each has weights of its own, and may have an optimizer and a
    learning rate of its own; its result is that of a `Trainer` with these, up to rounding.

    A member whose loss or weights become NaN or infinite is frozen where it was before that step,
    and does not disturb the others: `state.frozen` names it, and `fit` warns.

    Args:
        model: model, serialized model or path; never modified.
        loss: as for `Trainer`.
        members: number of copies; None: that of the first list among the next arguments.
        weights: for each member `{name: array}` of the weights with which it begins; those that are
            missing are the model's.
        init: how members begin without `weights`. "model": all with the weights of the model.
            "redrawn": weights with two or more axes are drawn from the normal distribution with the
            mean and standard deviation that they have in the model. "glorot": they are drawn by
            Glorot's rule. Others, such as biases, are the model's. Member k draws by `seed` and k.
        optimizer: one for all, by name or as an object, or a list of one for each member. Those
            that differ in weight decay only cost no more than one.
        learning_rate: a number or a schedule for all, or a list of one for each member.
        train: as for `Trainer`.
        freeze: as for `Trainer`.
        clip_norm: largest 2-norm of all gradients of a member together.
        class_weight: as for `Trainer`.
        loss_options: as for `Trainer`.
        loss_weights: as for `Trainer`.
        metrics: as for `Trainer`.
        batch_axes: as for `Trainer`.
        device: "cpu", "cuda" or "cuda:1".
        seed: of the order of the rows, the split of validation data, and the draws of `init`.

    Attributes:
        members: number of copies.
        state: `weights` (members, ...) by name, `values` of each member, `frozen`, `history`.

    Raises:
        ValueError: an invalid argument; lists of different lengths; members that are all equal;
            a model with dropout.
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
        loss: Any = None,
        *,
        members: int | None = None,
        weights: Sequence[Mapping[str, Any]] | None = None,
        init: str = "model",
        optimizer: str | Optimizer | Sequence[str | Optimizer] = "adamw",
        learning_rate: Any = 1e-3,
        train: str | Iterable[str] | None = None,
        freeze: str | Iterable[str] = (),
        clip_norm: float | None = None,
        class_weight: Any = None,
        loss_options: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Iterable[Any] | Mapping[str, Iterable[Any]] = (),
        batch_axes: Mapping[str, int | None] | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        if members is not None:
            check_count("members", members)
        lists = {"weights": weights, "learning_rate": learning_rate, "optimizer": optimizer}
        self.members = check_count("members", count_members(members, **lists))
        self.optimizers = [
            select_optimizer(o) for o in per_member("optimizer", optimizer, self.members)
        ]
        rates = per_member("learning_rate", learning_rate, self.members)
        self.learning_rates = [select_rate(rate) for rate in rates]
        self._shared = Trainer(
            model,
            loss,
            optimizer=self.optimizers[0],
            learning_rate=self.learning_rates[0],
            train=train,
            freeze=freeze,
            clip_norm=clip_norm,
            class_weight=class_weight,
            loss_options=loss_options,
            loss_weights=loss_weights,
            metrics=metrics,
            batch_axes=batch_axes,
            device=device,
            seed=seed,
        )
        if self._shared.dropout:
            raise ValueError(
                f"the adapters of the model have dropout, {self._shared.dropout}, which a stack "
                "does not train: train each member by a Trainer"
            )
        own = self._shared.state.weights
        if weights is None:
            begun = starts(own, self.members, init, self._shared.seed)
        elif init != "model":
            raise ValueError("pass weights or init, not both")
        else:
            begun = checked_weights(own, per_member("weights", list(weights), self.members))
        self.state = StackState([Values(w) for w in begun])
        self._refuse_equal(rates)

    def _refuse_equal(self, rates: list[Any]) -> None:
        """Raise `ValueError` if all members begin with the same weights, rates and optimizers."""
        if self.members == 1:
            return
        weights = [v.weights for v in self.state.values]
        same = all(
            all(np.array_equal(w[name], weights[0][name], equal_nan=True) for name in w)
            for w in weights[1:]
        )
        lists = (rates, self.optimizers)
        if same and all(value == listed[0] for listed in lists for value in listed):
            raise ValueError(
                "all members are equal: pass init='redrawn' or weights= for members that begin "
                "with different weights, or a list as learning_rate or optimizer"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have: a state of their own."""
        own = {"state": copy.copy(self.state), "_shared": copy.copy(self._shared)}
        return vars(self) | own

    # -- training -----------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        validation: Any = None,
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> Self:
        """Train all members for `epochs` epochs, beginning with their current weights.

        A second call begins another training with the weights of the first, also of members that
        were frozen: the slots of the optimizers, the schedules and the history begin anew.

        Args:
            X: as in `Trainer.fit`.
            y: as in `Trainer.fit`.
            sample_weight: (rows,), of all members.
            validation: as in `Trainer.fit`.
            epochs: number of passes over the data.
            batch_size: rows of a step; None: 32, or those of a model with a static batch.
            shuffle: whether the rows are ordered anew for every epoch, by `seed`.

        Raises:
            ValueError: invalid arguments or data, before anything is trained; an operator that
                cannot be stacked, such as a Loop that depends on weights.
            NoGradientRule: an operator between the weights and the loss has no rule.
            ConvergenceError: the losses or weights of all members became NaN or infinite; their
                states before are kept.
            KeyboardInterrupt: Ctrl-C, between two steps; the state is kept.
        """
        if validation is not None and not isinstance(validation, float):
            validation = as_dataset(validation)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        data = as_dataset(X, y, sample_weight)
        call = StackFit(self.members, self._shared, data, batch_size, validation)
        count = check_count("epochs", epochs)
        with garbage_kept():
            loop = call.begin_stack(
                self.state, self.optimizers, self.learning_rates, count, shuffle
            )
        loop.run()
        self._shared.names = call.names
        self._shared.state.balanced = call.recipe.facts.balanced
        if self.state.frozen:
            frozen = sorted(self.state.frozen.items())
            named = ", ".join(f"member {k} after step {step}" for k, step in frozen)
            warnings.warn(
                "the loss or weights of some members became NaN or infinite, and these were "
                f"frozen: {named}. Lower their learning rates",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each epoch: `step`, `epoch`, and arrays (members,) as `loss`,
        `learning_rate`, `validation_loss` and metrics. The loss of a frozen member is NaN.
        """
        return self.state.history

    # -- results ------------------------------------------------------------------------------

    def evaluate(
        self, X: Any, y: Any = None, *, sample_weight: Any = None, batch_size: int | None = None
    ) -> dict[str, np.ndarray]:
        """Return the loss and the metrics of each member for data: `{"loss": (members,), ...}`.

        Args:
            X: as in `fit`.
            y: as in `fit`.
            sample_weight: as in `fit`.
            batch_size: rows of one call of the runtime; the result does not depend on it.

        Raises:
            ValueError: data that the model or the loss does not accept.
        """
        data = as_dataset(X, y, sample_weight)
        return evaluate_members(self.members, self._shared, data, batch_size, self._evaluated())

    def predict(self, X: Any, *, batch_size: int | None = None) -> Any:
        """Return the predictions of all members, (members, rows, ...); a dict for several outputs.

        Args:
            X: as in `Trainer.predict`.
            batch_size: rows of one call of the runtime.

        Raises:
            ValueError: data that the inputs do not accept.
        """
        data, weights = Dataset(as_dataset(X).X), self._evaluated()
        predictions = predict_members(self.members, self._shared, data, batch_size, weights)
        return predictions if len(predictions) > 1 else next(iter(predictions.values()))

    def _evaluated(self) -> dict[str, np.ndarray]:
        return stacked(self.state.evaluated(self.optimizers))

    def model(self, member: int) -> ModelProto:
        """Return the model with the weights of a member, in its inference form.

        Raises:
            IndexError: there is no such member.
        """
        one = copy.copy(self._shared)
        one.state, one.optimizer = TrainState(), self.optimizers[member]
        one.state.values = self.state.values[member]
        return one.model

    @property
    def models(self) -> list[ModelProto]:
        """The models of all members."""
        return [self.model(k) for k in range(self.members)]

    def best(self) -> int:
        """Return the member with the lowest validation loss after the last epoch.

        Raises:
            NotFittedError: there was no validation data yet.
            ValueError: no member has a finite validation loss.
        """
        losses = next((e["validation_loss"] for e in self.history if "validation_loss" in e), None)
        if losses is None:
            raise NotFittedError("there is no validation loss: call fit with validation= first")
        losses = self.history[-1]["validation_loss"]
        if not np.isfinite(losses).any():
            raise ValueError("no member has a finite validation loss")
        return int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
