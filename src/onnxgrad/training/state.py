"""The state of training, in one object: `TrainState`; the sums of its losses, and its progress."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.training import saving

Arrays = dict[str, np.ndarray]
Slots = dict[str, Arrays]  # by the name of the weight, then of the slot


@dataclass(frozen=True, eq=False)
class StateValues:
    """Weights, slots and buffers by name, and the count of steps; replaced, never modified.

    Arrays of a stack have the axis of members, the copies of its model, first. `frozen` has the
    members that do not train any more, each with the count of its steps. `values[k]` are the values
    of the member k.
    """

    weights: Arrays = field(default_factory=dict)
    slots: Slots = field(default_factory=dict)
    steps: int = 0
    buffers: Arrays = field(default_factory=dict)
    frozen: Mapping[int, int] = field(default_factory=dict)

    def __getitem__(self, k: int) -> StateValues:
        slots = {name: {s: a[k] for s, a in each.items()} for name, each in self.slots.items()}
        weights, buffers = ({n: a[k] for n, a in d.items()} for d in (self.weights, self.buffers))
        return StateValues(weights, slots, self.frozen.get(k, self.steps), buffers)


@dataclass(eq=False)
class TrainState:
    """The state of training; no other object stores any part of it.

    While `fit` runs, weights, slots and buffers are on the device, and are read from there: a
    callback sees the values after the last call of the runtime, as read-only arrays, and may assign
    new ones.

    Attributes:
        epoch: number of finished epochs.
        epochs: number of epochs that `fit` is to train; None in `partial_fit`.
        position: batches of the unfinished epoch that are done, 0 between epochs.
        pending: whether the events of the last step are still to come, as training broke off.
        running: sums of the losses of the unfinished epoch, as `LossTotals` keeps them.
        history: an entry for each epoch and each evaluation, a dict of `step`, `epoch`, `loss`,
            `learning_rate`, and with validation data `validation_loss` and metrics.
        learning_rate: the rate of the last step.
        stop_reason: why the last `fit` ended; None while it runs.
        further: whether `partial_fit` is running, which goes on where another call had ended.
        seed: the seed of the order of rows and of dropout.
        balanced: the weights of classes that `class_weight="balanced"` means, by output, for the
            rows that the last `fit` trained on; None if no classes are balanced.
        undone: steps that were finished, and set back when earlier weights were restored together
            with their slots.
        schedule: values that a learning-rate schedule keeps between evaluations.
        callbacks: numbers and text that callbacks keep, by the callback's key.
        kept: arrays that callbacks keep, by the callback's key.
        identity: descriptions of model, loss, optimizer and data, with which a resumed training
            must agree.
        members: the number of members of a stack, the copies of its model; None for one model. In
            a stack, weights, slots and buffers have the axis of members first, losses and metrics
            are arrays (members,), and `values[k]` are the `weights`, `slots`, `buffers` and `steps`
            of the member k.

    Examples:
        >>> import tempfile, numpy as np, onnxgrad as og
        >>> state = og.callbacks.TrainState()
        >>> state.weights = {"w": np.float32([1, 2])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state.save(f"{folder}/state")
        ...     og.callbacks.TrainState.load(f"{folder}/state").weights["w"].tolist()
        [1.0, 2.0]
    """

    epoch: int = 0
    epochs: int | None = None
    position: int = 0
    pending: bool = False
    running: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    learning_rate: float | None = None
    stop_reason: str | None = None
    further: bool = False
    seed: int = 0
    undone: int = 0
    balanced: dict[str, dict[int, float]] | None = None
    schedule: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: dict[str, Arrays] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    members: int | None = None

    def __post_init__(self) -> None:
        self._values = StateValues()
        self._runner: Any = None  # the `Runner`, while `fit` runs
        self._read: tuple[object, StateValues] | None = None  # a `runner.now`, and its values
        self._names: tuple[str, ...] = ()  # the order of the weights, where `_values` lacks some

    # -- values, on the device or not ---------------------------------------------------------

    @property
    def values(self) -> StateValues:
        """The current weights, slots, buffers and count of steps."""
        runner = self._runner
        if runner is None:
            return self._values
        now, read = runner.now, self._read
        if read is None or read[0] is not now:
            values = self._merge_device_values(_make_read_only(runner.unpacked(now)))
            # one assignment of both, compared by identity: other threads read `_read`, too
            self._read = read = now, values
        return read[1]

    @values.setter
    def values(self, new: StateValues) -> None:
        if self._runner is None:
            self._values = new
        else:
            self.begin(self._runner, self.further, new)

    @property
    def weights(self) -> Arrays:
        """The weights by name; assigning a dict changes only the weights in the dict.

        Raises:
            ValueError: an assigned weight that is unknown, or of another shape.
        """
        return self.values.weights

    @weights.setter
    def weights(self, new: Mapping[str, Any]) -> None:
        old = self.values
        self.values = replace(old, weights=old.weights | _as_old_dtypes(new, old.weights, "weight"))

    @property
    def slots(self) -> Slots:
        """The slots of the optimizer, a dict of arrays by name of the slot for each weight."""
        return self.values.slots

    @slots.setter
    def slots(self, new: Mapping[str, Mapping[str, Any]]) -> None:
        old = self.values
        changed = {
            name: old.slots.get(name, {}) | _as_old_dtypes(arrays, old.slots.get(name, {}), "slot")
            for name, arrays in new.items()
        }
        self.values = replace(old, slots=old.slots | changed)

    @property
    def buffers(self) -> Arrays:
        """Running statistics and other states that are not trained, by name."""
        return self.values.buffers

    @buffers.setter
    def buffers(self, new: Mapping[str, Any]) -> None:
        old = self.values
        self.values = replace(old, buffers=old.buffers | _as_old_dtypes(new, old.buffers, "buffer"))

    @property
    def step(self) -> int:
        """The number of finished steps.

        Steps whose results were dropped, as earlier weights were restored, are included.
        """
        values = self._values if self._runner is None else self._runner.now
        return values.steps + self.undone

    @property
    def frozen(self) -> dict[int, int]:
        """The members of a stack that do not train any more, each with the number of its steps.

        The loss or weights of these members became NaN or infinite, or a callback stopped them.
        """
        return dict(self._values.frozen if self._runner is None else self._runner.now.frozen)

    @property
    def losses(self) -> list[Any]:
        """The mean training loss of every finished epoch."""
        return [entry["loss"] for entry in self.history if "loss" in entry]

    @property
    def validation_losses(self) -> list[Any]:
        """The loss of the validation data in every evaluation."""
        return [e["validation_loss"] for e in self.history if "validation_loss" in e]

    def _merge_device_values(self, new: StateValues) -> StateValues:
        """Return values read from the device, merged over the values on the host."""
        old = self._values
        weights, buffers = old.weights | new.weights, old.buffers | new.buffers
        weights = {name: weights[name] for name in self._names if name in weights} | weights
        return StateValues(weights, old.slots | new.slots, new.steps, buffers, new.frozen)

    # -- training -----------------------------------------------------------------------------

    def row_order(self) -> np.random.Generator:
        """Return the random generator that shuffles the rows of the present epoch."""
        return np.random.default_rng([self.seed, self.epoch])

    @property
    def is_running(self) -> bool:
        """Whether `fit` is running."""
        return self._runner is not None

    def begin_epoch(self, buffers: Arrays) -> None:
        """Prepare the next epoch of `partial_fit`; `buffers` has initial values of new buffers."""
        self.position, self.pending, self.running, self.stop_reason = 0, False, {}, None
        values = self.values
        self.values = replace(values, buffers=buffers | values.buffers)

    def begin(
        self,
        runner: Any,
        further: bool = False,
        values: StateValues | None = None,
        owned: bool = False,
    ) -> None:
        """Copy values to the device of `runner`, where training changes them until `end`.

        `values`: None for the current values. The copies on the host of values that the device
        holds are dropped. With `owned`, no other object refers to the arrays, so that training may
        change them instead of copies.
        """
        values = self._values if values is None else values
        runner.load(values, owned and runner.unpacks_cheaply)
        self._runner, self._read, self._values = runner, (runner.now, values), values
        if runner.unpacks_cheaply:
            self._read, self._names = None, tuple(values.weights)
            on_device = runner.unpacked(runner.now, copies=False)
            self._values = replace(
                values,
                weights={n: a for n, a in values.weights.items() if n not in on_device.weights},
                slots={n: own for n, own in values.slots.items() if n not in on_device.slots},
                buffers={n: a for n, a in values.buffers.items() if n not in on_device.buffers},
            )
        self.further = further

    def end(self) -> None:
        """Copy the values back from the device; if that fails, keep the values read last."""
        runner = self._runner
        if runner is None:
            return
        try:
            runner.states.release()
            read = runner.unpacked(runner.now, not runner.in_place)
            self._values = self._merge_device_values(read)
        except BaseException:
            if self._read is not None:
                self._values = self._read[1]
            raise
        finally:
            self._runner, self._read, self.further = None, None, False

    def memento(self) -> Callable[[], None]:
        """Return a function without arguments that sets the state back to the present state.

        This is cheap, also while `fit` runs: values are replaced, never modified. The function
        restores values that were assigned to entries of callbacks, not lists modified there.
        """
        names = ("epoch", "position", "pending", "running", "learning_rate", "schedule")
        attributes = {name: getattr(self, name) for name in (*names, "_values", "_read")}
        count, last = len(self.history), dict(self.history[-1]) if self.history else None
        callbacks = {key: dict(entry) for key, entry in self.callbacks.items()}
        kept = {key: dict(arrays) for key, arrays in self.kept.items()}
        runner = self._runner
        now: Any = None if runner is None else runner.now

        def restore() -> None:
            vars(self).update(attributes)
            self.callbacks, self.kept = callbacks, kept
            del self.history[count:]
            if last is not None:
                self.history[-1] = last
            if runner is not None:
                runner.now = now

        return restore

    def copy(self) -> Self:
        """Return an independent copy, which is not running."""
        new = copy.copy(self)
        for name in ("running", "history", "schedule", "callbacks", "identity"):
            setattr(new, name, copy.deepcopy(getattr(self, name)))
        new.kept = {key: dict(arrays) for key, arrays in self.kept.items()}
        return new

    def __getstate__(self) -> dict[str, Any]:
        ended = {"_runner": None, "_read": None, "further": False}
        return vars(self) | {"_values": self.values, **ended}

    # -- files --------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike) -> None:
        """Write the state into `folder`, all of it or nothing.

        The files are `weights.safetensors`, `slots.safetensors`, `buffers.safetensors`,
        `kept.safetensors`, `state.json`, and `files.json` with a digest of each. They are written
        beside `folder`, synced to the disk and renamed; an earlier state in `folder` is replaced.

        Raises:
            FileExistsError: `folder` holds something else.
            OSError: it cannot be written.
            RuntimeError: some slots are in other processes.
        """
        saving.write_state(Path(folder), *self.contents())

    def contents(self) -> tuple[dict[str, Arrays], dict[str, Any]]:
        """Return the arrays, by file, and the numbers that `save` writes.

        While `fit` runs, arrays may share the memory of the device, which the next step changes.

        Raises:
            RuntimeError: some slots are in other processes.
        """
        if self._runner is not None and not self._runner.has_all_slots:
            raise RuntimeError(
                "no checkpoint of this step can be written: each process has the slots of some "
                "weights only (shard_optimizer), and training broke off before they were sent. "
                "Resume from the checkpoint before"
            )
        values = self._values
        if self._runner is not None:  # a copy of all weights might not fit into memory
            runner = self._runner
            values = self._merge_device_values(runner.unpacked(runner.now, copies=False))
        arrays = {
            "weights": values.weights,
            "slots": saving.flatten_slots(values.slots),
            "buffers": values.buffers,
            "kept": {f"{key}/{n}": a for key, group in self.kept.items() for n, a in group.items()},
        }
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        numbers["history"] = [  # metrics of each class, and values of members, are arrays
            {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in record.items()}
            for record in self.history
        ]
        numbers |= {"step": self.step, "frozen": dict(values.frozen)}
        numbers["identity"] = dict(self.identity)
        return arrays, numbers

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Self:
        """Return the state that `save` wrote into `folder`.

        Raises:
            FileNotFoundError: the folder holds no state.
            ValueError: a file is damaged, missing, or of another state, by its digest.
        """
        arrays, numbers = saving.read_state(Path(folder))
        if missing := [f"{n}.safetensors" for n in _ARRAYS if n not in arrays]:
            raise saving.damage_error(Path(folder), f"incomplete, {missing} are missing")
        state = cls(**{name: numbers[name] for name in _NUMBERS if name in numbers})
        if state.balanced is not None:  # the keys of an object of JSON are text
            state.balanced = {
                name: {int(c): weight for c, weight in weights.items()}
                for name, weights in state.balanced.items()
            }
        for path, array in arrays["kept"].items():
            key, _, name = path.partition("/")
            state.kept.setdefault(key, {})[name] = array
        state.history = [
            {n: np.array(v) if isinstance(v, list) else v for n, v in record.items()}
            for record in state.history
        ]
        frozen = numbers.get("frozen", {})
        state.values = StateValues(
            arrays["weights"],
            saving.nest_slots(arrays["slots"]),
            numbers["step"] - state.undone,
            arrays["buffers"],
            {int(k): step for k, step in frozen.items()},
        )
        return state


_ARRAYS = ("weights", "slots", "buffers", "kept")
_NUMBERS = (  # the fields of the state that `state.json` holds
    *("epoch", "epochs", "position", "pending", "running", "history", "learning_rate"),
    *("undone", "stop_reason", "seed", "balanced", "schedule", "callbacks", "identity", "members"),
)


def _make_read_only(values: StateValues) -> StateValues:
    """Make the arrays of values read-only, as writing into copies has no effect; return them."""
    slots = [a for each in values.slots.values() for a in each.values()]
    for array in (*values.weights.values(), *slots, *values.buffers.values()):
        array.flags.writeable = False
    return values


def _as_old_dtypes(new: Mapping[str, Any], old: Arrays, kind: str) -> Arrays:
    """Return new values as arrays with the dtypes of the old arrays of the same names.

    Raises:
        ValueError: a name that is not in `old`, unless `old` is empty; another shape.
    """
    arrays = {}
    for name, value in new.items():
        array = np.asarray(value)
        if old and name not in old:
            raise unknown(kind, name, old)
        if name in old and array.shape != old[name].shape:
            raise ValueError(
                f"the {kind} {name!r} has the shape {old[name].shape}, and its new value the shape "
                f"{array.shape}: assign an array of the same shape"
            )
        arrays[name] = np.array(array, old[name].dtype if name in old else array.dtype)
    return arrays


# -- losses and progress -----------------------------------------------------------------------


@dataclass
class FitProgress:
    """The progress of training, as callbacks see it.

    Attributes:
        epoch: number of this epoch, from 0.
        epochs: number of all epochs.
        rows: rows trained on so far in this epoch.
        total_rows: rows of an epoch; None in the first epoch of an iterable of batches.
        loss: mean loss so far in this epoch: of a row, or of a term of the loss. Of a stack, the
            mean over the members that train.
        validation_loss: mean loss of the last validation, as `loss`; None before the first.
        rows_per_second: speed of this epoch so far.
        step: number of finished steps.
        steps: number of all steps; None if it is unknown.
        seconds_waiting: time of this epoch spent waiting for data.
        seconds_computing: time of this epoch spent in the runtime.

    Examples:
        >>> import onnxgrad as og
        >>> def stop_at_small_loss(progress: og.callbacks.FitProgress) -> bool:
        ...     return progress.loss > 1e-3  # False ends `fit(X, y, callback=stop_at_small_loss)`
        >>> stop_at_small_loss(og.callbacks.FitProgress(0, 10, 32, 100, 0.25, None, 1e5))
        True
    """

    epoch: int
    epochs: int
    rows: int
    total_rows: int | None
    loss: float
    validation_loss: float | None
    rows_per_second: float
    step: int = 0
    steps: int | None = None
    seconds_waiting: float = 0.0
    seconds_computing: float = 0.0


@dataclass
class LossTotals:
    """Sums of the losses over the batches of an epoch, from which its mean loss is computed.

    The loss is the sum of the mean losses of the outputs, each times one of `factors`. Sums and
    counts are float64 (outputs,), and in a stack (outputs, members).
    """

    factors: tuple[float, ...] = (1.0,)
    sums: np.ndarray = field(default_factory=lambda: np.zeros(1))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(1))
    rows: int = 0

    @classmethod
    def from_saved(
        cls, factors: tuple[float, ...], saved: dict[str, Any], members: int | None = None
    ) -> LossTotals:
        """Return the totals that `to_json` returned as `saved`; zeros if `saved` is empty."""
        zeros = np.zeros((len(factors), *([] if members is None else [members])))
        sums, counts = (np.array(saved.get(key, zeros)) for key in ("sums", "counts"))
        return cls(factors, sums, counts, saved.get("rows", 0))

    @classmethod
    def of_epochs(
        cls, factors: tuple[float, ...], losses: Sequence[np.ndarray], epochs: int, rows: int
    ) -> list[LossTotals]:
        """Return the totals of each of several whole epochs, of `rows` rows each.

        `losses` are the sums and the counts, arrays (batches of all epochs, outputs). The results
        are equal to the totals to which `add` adds each epoch.
        """
        by_epoch = (a.reshape(epochs, -1, *a.shape[1:]) for a in losses)
        sums, counts = (np.add.accumulate(a, axis=1)[:, -1] for a in by_epoch)
        return [cls(factors, *pair, rows) for pair in zip(sums, counts, strict=True)]

    def add(self, sums: np.ndarray, counts: np.ndarray, rows: int) -> None:
        """Add the sums and counts of several batches, each an array (batches, outputs, ...).

        The result does not depend on how many batches a call adds.
        """
        self.sums = np.add.accumulate(np.concatenate((self.sums[None], sums)))[-1]
        self.counts = np.add.accumulate(np.concatenate((self.counts[None], counts)))[-1]
        self.rows += rows

    def add_reported(self, reported: Sequence[np.ndarray], rows: int = 0) -> None:
        """Add what a graph reports for one batch: the sums, then the counts of its losses."""
        half, shape = len(reported) // 2, self.sums.shape[1:]
        numbers = [np.asarray(y, np.float64).reshape(-1) for y in reported]
        columns = [np.broadcast_to(y if shape else y[0], shape) for y in numbers]
        self.add(np.stack(columns[:half])[None], np.stack(columns[half:])[None], rows)

    @property
    def mean(self) -> Any:
        """The mean loss so far, a float, or in a stack an array (members,).

        It is NaN as long as no label counts.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = (self.sums / self.counts).T @ np.array(self.factors)
        return mean if mean.ndim else float(mean)

    def to_json(self) -> dict[str, Any]:
        """Return the totals as a dict of numbers and lists for JSON."""
        return {"sums": self.sums.tolist(), "counts": self.counts.tolist(), "rows": self.rows}


def mean_over_members(value: Any) -> Any:
    """Return the mean over the members of a stack that are not NaN; a number is unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    known = value[~np.isnan(value)]
    return float(known.mean()) if known.size else float("nan")


def number_text(value: Any, digits: str = ".4g") -> str:
    """Return a number as text; an array (members,) as its lowest and its highest number."""
    known = np.ravel(value)
    known = known[~np.isnan(known)] if np.isfinite(known).any() else known[:1]
    ends = dict.fromkeys(format(v, digits) for v in (known.min(), known.max()))
    return " to ".join(ends)


def split_by_member(record: dict[str, Any], state: Any) -> dict[str, Any]:
    """Return an entry of the history, in which each array becomes one number for each member.

    The loss of member 0 is called "loss/0".
    """
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, np.ndarray) and state.members is not None:
            flat |= {f"{name}/{k}": own for k, own in enumerate(value.tolist())}
        else:
            flat[name] = value
    return flat
