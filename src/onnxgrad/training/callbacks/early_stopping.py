"""`EarlyStopping`: ends training when a monitored value no longer improves."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrad.checks import check_choice, check_count, check_number
from onnxgrad.errors import argument, unknown
from onnxgrad.reporting import logger
from onnxgrad.training.callbacks.base import UNFINISHED, Callback, TrainingControl
from onnxgrad.training.saving import flatten_slots, nest_slots

# words in names of values that are better if they are lower, or higher
_LOWER, _HIGHER = (
    {"loss", "error", "mse", "rmse", "mae", "rmsle", "mape", "perplexity", "deviance", "norm"},
    {"accuracy", "auc", "f1", "fbeta", "precision", "recall", "r2", "iou", "dice", "ap", "map"}
    | {"mcc", "kappa", "score", "bleu", "psnr", "ssim", "ndcg", "jaccard", "specificity"},
)

_WEIGHT, _BUFFER, _SLOT = "weight:", "buffer:", "slot:"  # how the names of kept arrays begin


class EarlyStopping(Callback):
    """Ends training when a value of the history has not improved for some evaluations.

    A value improves if it is lower than the best one so far by more than `min_delta`, or higher
    with `mode="max"`; NaN is no improvement. Values that begin with "validation_" count after every
    evaluation, others, such as "loss", after every epoch.

    At the end of training, the best weights and buffers are restored, if an earlier step had them.
    After Ctrl-C and after an error of data or callbacks, the state of the last step stays, from
    which training can resume. The slots of the optimizer after the last step stay, except where it
    averages weights, as `ema`: then slots are restored too, as the averages are computed from them,
    and the optimizer goes on counting from their step. A training that had stopped and is resumed
    stops again, unless `patience` is larger now; members of a stack that had stopped cannot go on.
    `partial_fit` forgets the counts and the kept weights of the calls before it: it always trains,
    and its weights stay.

    The entry in `state.callbacks` has `best` and its `step` and `epoch`, the number `waiting` of
    evaluations without improvement since then, `stopped`, whether this callback ended training,
    and `restored`, the step whose weights were restored or None.

    In a stack, each member is watched: it is frozen when its value has not improved, and gets its
    own best weights back; training ends when all are frozen. The entry has such a dict for each of
    them in the list `members`.

    Args:
        monitor: name of the value in the records of `trainer.history`.
        patience: number of evaluations in a row without improvement after which training ends.
        restore: whether to restore the weights and buffers of the best evaluation. They are kept
            in the state, and so in checkpoints.
        min_delta: the least improvement that counts, in the units of the value.
        mode: "min" if lower is better, "max" if higher is; "auto" asks the trainer's metric of
            that name, or else decides by the name, such as "loss" or "accuracy".

    Raises:
        ValueError: an invalid argument; when training begins, a value for which "auto" cannot
            decide; in training, a `monitor` that the history does not have.

    Examples:
        >>> from onnxgrad.training.callbacks.early_stopping import EarlyStopping
        >>> EarlyStopping("validation_accuracy", patience=5, min_delta=0.001).patience
        5
    """

    compared_arguments = ("monitor", "restore", "min_delta", "mode")

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 3,
        restore: bool = True,
        min_delta: float = 0.0,
        mode: str = "auto",
    ) -> None:
        check_number("min_delta", min_delta)
        self.monitor, self.restore, self.min_delta = monitor, restore, min_delta
        self.patience = check_count("patience", patience)
        self.mode = check_choice("mode", mode, ("auto", "min", "max"))

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Continue the counts of a resumed training; stop it if this callback had stopped it."""
        metrics = getattr(trainer, "metrics", ())
        self._better = better_direction(self.monitor, metrics) if self.mode == "auto" else self.mode
        if state.further:  # the data may differ, so that values do not compare
            state.callbacks.pop(self.key, None)
            state.kept.pop(self.key, None)
        for k, own in enumerate(self._callback_entries(state)):
            own |= {"best": None, "step": None, "epoch": None, "waiting": 0} | own
            stopped = own["waiting"] >= self.patience
            if state.members is not None and own.get("stopped") and not stopped:
                raise ValueError(
                    f"patience={self.patience}: member {k} had stopped after {own['waiting']} "
                    "evaluations without improvement, and has not trained while others did: resume "
                    f"with patience={own['waiting']}, or call fit "
                    f"without {argument('resume')}"
                )
            own |= {"stopped": stopped, "restored": None}
            if stopped:
                self._stop_member(state, control, k)
        self._epochs = 0  # epochs that began in this call of `fit`

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Raise `ValueError` if no record of the history has the value `monitor` after an epoch."""
        self._epochs += 1
        if self._epochs > 1 and not self._has_monitored_value(state):
            raise self._missing_monitor_error(state)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Compare an evaluation with the best, if the monitored value is of validation data."""
        if self._monitors_validation:
            self._compare_record_with_best(trainer, state, control)

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Compare an epoch with the best, if the monitored value is not of validation data."""
        if not self._monitors_validation:
            self._compare_record_with_best(trainer, state, control)

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Restore the best weights and buffers, unless training broke off and may be resumed."""
        if state.stop_reason in UNFINISHED:
            return
        if not self._has_monitored_value(state):
            if state.stop_reason != "not finite":
                never = f"EarlyStopping never counted: {self._missing_monitor_error(state)}"
                warnings.warn(never, stacklevel=2)
            return
        frozen, best = state.frozen, [own["step"] for own in self._callback_entries(state)]
        # members whose last step did not give their best weights
        late = [k for k, n in enumerate(best) if n not in (None, frozen.get(k, state.step))]
        if not self.restore or not late:
            return
        kept = state.kept.get(self.key)
        if not kept:
            raise ValueError(
                f"the best weights, of step {best[late[0]]}, are not in the state: resume from a "
                "checkpoint of a training with restore=True, or pass restore=False"
            )
        self._restore_weights(state, kept, late)

    def reason(self, state: Any) -> str | None:
        """Return why this callback ended the training of one model; None if it did not end it."""
        own = self.entry(state)
        if state.members is not None or not own.get("stopped"):
            return None
        times = "epoch" if all("loss" in record for record in state.history) else "evaluation"
        since = "" if own["epoch"] is None else f" since epoch {own['epoch']}"
        plural = "s" * (own["waiting"] > 1)
        return f"{self.monitor} has not improved for {own['waiting']} {times}{plural}{since}"

    def _restore_weights(self, state: Any, kept: dict[str, np.ndarray], late: list[int]) -> None:
        """Restore the best weights and buffers; in a stack, only those of the members `late`."""
        members, entries = state.members, self._callback_entries(state)
        slots = _arrays_with_prefix(_SLOT, kept)
        if members is not None:
            current = _prefixed_state_arrays(state, with_slots=bool(slots))
            kept = {n: _replace_members(a, kept[n], late) for n, a in current.items() if n in kept}
        state.weights = _arrays_with_prefix(_WEIGHT, kept)
        if buffers := _arrays_with_prefix(_BUFFER, kept):
            state.buffers = buffers
        if slots:  # from which averages are computed, by the number of steps
            state.slots = nest_slots(_arrays_with_prefix(_SLOT, kept))
            steps = {k: entries[k]["step"] for k in late}
            if members is None:
                undone = state.step - steps[0]
                state.values = replace(state.values, steps=state.values.steps - undone)
                state.undone += undone
            else:
                state.values = replace(state.values, frozen=state.frozen | steps)
        for k in late:
            entries[k]["restored"] = step = entries[k]["step"]
            which = "" if members is None else f" of member {k}"
            logger.info("EarlyStopping: the weights%s are from step %d", which, step)

    @property
    def _monitors_validation(self) -> bool:
        """Whether the monitored value is computed from validation data."""
        return self.monitor.startswith("validation_")

    def _has_monitored_value(self, state: Any) -> bool:
        """Return whether an entry of the history has the monitored value."""
        return any(self.monitor in record for record in state.history)

    def _missing_monitor_error(self, state: Any) -> ValueError:
        """Return the error to raise if no record of the history has the value `monitor`."""
        names = dict.fromkeys(name for record in state.history for name in record)
        error = unknown("monitor", self.monitor, [n for n in names if n not in ("step", "epoch")])
        remedy = f" Pass {argument('validation')} data to fit." if self._monitors_validation else ""
        return ValueError(f"{error} These are in the history.{remedy}")

    def _callback_entries(self, state: Any) -> list[dict[str, Any]]:
        """Return this callback's entries in a list: one for each member of a stack, or one."""
        entry, members = self.entry(state), state.members
        if members is None:
            return [entry]
        return entry.setdefault("members", [{} for _ in range(members)])

    def _stop_member(self, state: Any, control: TrainingControl, k: int) -> None:
        """Ask the loop to end training, or in a stack to freeze the member `k`."""
        if state.members is None:
            control.stop = True
        else:
            control.freeze.add(k)

    def _compare_record_with_best(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Compare the last record with the best: keep the weights of a member, or stop it."""
        record = state.history[-1]
        if self.monitor not in record:
            raise self._missing_monitor_error(state)
        values, frozen = np.ravel(record[self.monitor]), state.frozen
        better = []
        for k, own in enumerate(self._callback_entries(state)):
            if k in frozen:
                continue
            value = float(values[k])
            if self._is_improvement(value, own["best"]):
                own |= {"best": value, "step": state.step, "epoch": state.epoch, "waiting": 0}
                better.append(k)
                continue
            own["waiting"] += 1
            if own["waiting"] >= self.patience:
                own["stopped"] = True
                self._stop_member(state, control, k)
                which = "" if state.members is None else f" of member {k}"
                text = "EarlyStopping: %s%s has not improved in %d evaluations since step %s"
                logger.info(text, self.monitor, which, own["waiting"], own["step"])
        if better and self.restore:
            self._keep_best_weights(trainer, state, better)

    def _is_improvement(self, value: float, best: float | None) -> bool:
        """Return whether a value is better than the best so far by more than `min_delta`."""
        sign = -1.0 if self._better == "max" else 1.0
        if best is None:
            return not math.isnan(value)
        return sign * value < sign * best - self.min_delta  # False for NaN

    def _keep_best_weights(self, trainer: Any, state: Any, better: list[int]) -> None:
        """Copy the weights and buffers of the members `better` into `state.kept`.

        Training may update the arrays of the state in place.
        """
        # slots of averages hold the weights that were evaluated
        new = _prefixed_state_arrays(state, with_slots=trainer._job.averages_weights)
        old = state.kept.get(self.key)
        if old and state.members is not None:
            state.kept[self.key] = {n: _replace_members(old[n], a, better) for n, a in new.items()}
        else:
            state.kept[self.key] = {name: np.array(array) for name, array in new.items()}


def _prefixed_state_arrays(state: Any, with_slots: bool) -> dict[str, np.ndarray]:
    """Return weights, buffers and slots by name; prefixes such as "weight:" tell them apart."""
    slots = flatten_slots(state.slots) if with_slots else {}
    parts = {_WEIGHT: state.weights, _BUFFER: state.buffers, _SLOT: slots}
    return {prefix + name: a for prefix, arrays in parts.items() for name, a in arrays.items()}


def _replace_members(array: np.ndarray, other: np.ndarray, rows: list[int]) -> np.ndarray:
    """Return a copy of `array` whose rows `rows` (models of a stack) are taken from `other`."""
    new = np.array(array)
    new[rows] = other[rows]
    return new


def _arrays_with_prefix(prefix: str, kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return copies of the arrays whose names begin with `prefix`, by name without the prefix."""
    return {n.removeprefix(prefix): np.array(a) for n, a in kept.items() if n.startswith(prefix)}


def better_direction(monitor: str, metrics: Iterable[Any] = ()) -> str:
    """Return "min" if lower values of `monitor` are better, "max" if higher values are.

    A metric of that name decides, or else the words of the name. The name of an output may stand
    before the metric, as in "validation_boxes_map50".

    Raises:
        ValueError: neither a metric nor the name says whether lower or higher is better.
    """
    for metric in metrics:
        higher_is_better = getattr(metric, "higher_is_better", None)
        measured = monitor.startswith("validation_") and monitor.endswith(f"_{metric.name}")
        if measured and higher_is_better is not None:
            return "max" if higher_is_better else "min"
    words = set(re.findall("[a-z0-9]+", monitor.lower()))
    lower, higher = bool(words & _LOWER), bool(words & _HIGHER)
    if lower == higher:
        raise ValueError(
            f"mode='auto' cannot tell whether a higher or a lower {monitor!r} is better: "
            "pass mode='min' or mode='max'"
        )
    return "min" if lower else "max"
