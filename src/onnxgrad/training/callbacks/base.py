"""The base class of callbacks, their requests to the loop, and the events of a training."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from onnxgrad.checks import check_count
from onnxgrad.errors import first_line

UNFINISHED = ("interrupted", "error")  # `state.stop_reason` of a training that broke off


@dataclass
class TrainingControl:
    """Requests of callbacks to the loop, which resets them when it has carried them out.

    Attributes:
        stop: end training after this step.
        save: save a checkpoint now.
        evaluate: evaluate the validation data now.
        freeze: numbers of members of a `TrainerStack` that are to train no further.

    Examples:
        >>> import onnxgrad as og
        >>> class Often(og.callbacks.Callback):
        ...     every_steps = 100
        ...     def on_step_end(self, trainer, state, control):
        ...         control.evaluate = True
        >>> control = og.callbacks.TrainingControl()
        >>> Often().on_step_end(None, None, control)
        >>> control
        TrainingControl(stop=False, save=False, evaluate=True, freeze=set())
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    freeze: set[int] = field(default_factory=set)


class Callback:
    """Base class of callbacks: override the events that you need.

    An event gets the `Trainer` or `TrainerStack`, its live `TrainState`, and a `TrainingControl`,
    in which it sets `stop`, `save` or `evaluate`. `trainer.progress` has the numbers of the moment,
    and `state.history` the records so far: when `on_evaluate` and `on_epoch_end` are called, its
    last record describes the evaluation or the epoch. Reading `state.weights` copies the weights
    from the device.

    Numbers and texts that must survive a restart belong into `state.callbacks[self.key]`, a dict
    that can be written as JSON, and arrays into `state.kept[self.key]`, a dict `{name: array}`. A
    callback itself holds only its settings, and open files. Numbers for trackers such as
    `TensorBoard` go to `state.callbacks[self.key]["scalars"]`, see `publish`.

    If an event raises an error, training ends: `on_train_end` of all callbacks is called, and the
    error is raised.

    Attributes:
        every_steps: the loop ends a call of the runtime at every multiple of it, so that
            `on_step_end` is called then. With None, `on_step_end` is called after every call of the
            runtime, which runs one or more steps.
        compared_arguments: the arguments on which its entry in `state.callbacks` depends: a
            training that is resumed with it must have equal ones.
        writes: whether it writes files or to the terminal: of several processes that train one
            model, only the first calls its events.
        checkpoints: the folder into which `write_checkpoint` writes; None: it writes none.
        of_members: whether it may watch a `TrainerStack`, whose numbers are arrays (members,).
        gradient_norms: whether the step also computes the 2-norm of the gradient of every weight;
            `trainer.gradient_norms` has the norms of the last step, by name.

    Examples:
        >>> from onnxgrad.training.callbacks.base import Callback, TrainingControl
        >>> class Limit(Callback):
        ...     '''Ends training after a number of steps.'''
        ...
        ...     def __init__(self, steps):
        ...         self.steps = self.every_steps = steps
        ...
        ...     def on_step_end(self, trainer, state, control):
        ...         control.stop = state.step >= self.steps
        >>> Limit(100).key
        'Limit'
    """

    every_steps: int | None = None
    gradient_norms: bool = False
    of_members: bool = True
    compared_arguments: tuple[str, ...] = ()
    writes: bool = False
    checkpoints: Any = None
    _key: str | None = None
    _open: tuple[str, ...] = ()  # attributes that no copy has: open files, consoles

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy of this callback gets: all but open files."""
        return {name: value for name, value in vars(self).items() if name not in self._open}

    @property
    def key(self) -> str:
        """The name of this callback's entry in `state.callbacks`, the name of its class.

        A second callback of the same class in a list is named `<class>-2`, and so on.
        """
        return self._key or type(self).__name__

    @key.setter
    def key(self, key: str) -> None:
        self._key = key

    def entry(self, state: Any) -> dict[str, Any]:
        """Return the dict of this callback in `state.callbacks`; it is created empty."""
        return state.callbacks.setdefault(self.key, {})

    def publish(self, state: Any, scalars: dict[str, float]) -> None:
        """Pass numbers of the current step to the trackers, which log them once."""
        self.entry(state)["scalars"] = {"step": state.step, "values": scalars}

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the beginning of `fit`, also where it resumes."""

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the beginning of an epoch, also where training resumes within the epoch."""

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the end of a call of the runtime, which ran one or more steps."""

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the end of an evaluation; the last record of `state.history` has its results."""

    def on_save(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the end of writing a checkpoint."""

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the end of an epoch; the last record of `state.history` has its results."""

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Handle the end of `fit`, also after an error; `state.stop_reason` says why it ended."""

    def write_checkpoint(self, state: Any) -> None:
        """Write a checkpoint into the folder `checkpoints`, because `control.save` is set."""

    def on_not_finite(self, trainer: Any, state: Any, control: TrainingControl) -> str | None:
        """Return a sentence for the error to raise when a loss or weight is NaN or infinite."""
        return None


_EVENTS = {name for name in vars(Callback) if name.startswith("on_")} - {"on_not_finite"}


class Callbacks:
    """Calls the events of a list of callbacks in order, and gives different keys to all of them.

    Args:
        callbacks: instances of `Callback`.

    Raises:
        ValueError: an object that is no `Callback`, or stands twice in the list, or whose
            `every_steps` is no positive integer.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        if isinstance(callbacks, Callback):
            raise ValueError(f"callbacks is a list: pass [{type(callbacks).__name__}(...)]")
        self.all = self.callbacks = list(callbacks)  # `without_writers` leaves out some of `all`
        self.silent = False
        self.watcher: Callback | None = None
        keys, folders = set[str](), set[str]()
        for i, callback in enumerate(self.callbacks):
            _check_callback(callback)
            if any(callback is other for other in self.callbacks[:i]):
                raise ValueError(f"callback {callback.key} is twice in the list: pass it once")
            key, number = callback.key, 2
            while callback.key in keys:
                callback.key, number = f"{key}-{number}", number + 1
            keys.add(callback.key)
            folder = _checkpoint_folder(callback)
            if folder in folders:
                raise ValueError(
                    f"{callback.key} writes to {folder}, as another callback does: they would "
                    "remove each other's checkpoints; pass another folder"
                )
            folders.update([] if folder is None else [folder])

    def check_for_stack(self) -> None:
        """Raise `ValueError` for a callback that cannot watch the several models of a stack."""
        for callback in self.all:
            if not callback.of_members:
                raise ValueError(
                    f"{callback.key} describes the training of one model: pass it to a Trainer"
                )

    def without_writers(self) -> Callbacks:
        """Return the callbacks that write nothing, for all processes but the first."""
        new = copy.copy(self)
        new.callbacks = [c for c in self.callbacks if not c.writes]
        new.silent = True
        return new

    def with_watcher(self, watcher: Callback) -> Callbacks:
        """Return these callbacks and `watcher`, a callback that shows progress.

        Several epochs may run in one call of the runtime, as without `watcher`.
        """
        new = copy.copy(self)
        new.callbacks, new.watcher = [*self.callbacks, watcher], watcher
        return new

    @property
    def gradient_norms(self) -> bool:
        """Whether any callback needs the 2-norms of gradients."""
        return any(callback.gradient_norms for callback in self.callbacks)

    def steps_until_stop(self, step: int) -> int | None:
        """Return the count of steps from `step` to the next multiple of a callback's `every_steps`.

        None: no callback has an `every_steps`.
        """
        every = [c.every_steps for c in self.all if c.every_steps is not None]
        return min((n - step % n for n in every), default=None)

    def call(self, event: str, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Call the method `event`, such as "on_step_end", of every callback."""
        assert event in _EVENTS, event
        for callback in self.callbacks:
            getattr(callback, event)(trainer, state, control)

    def writes_to(self, folder: Any) -> bool:
        """Return whether a callback writes checkpoints into `folder`."""
        return os.path.realpath(folder) in (_checkpoint_folder(c) for c in self.callbacks)

    def save(self, trainer: Any, state: Any) -> None:
        """Let each callback that writes checkpoints write a checkpoint.

        Raises:
            ValueError: no callback writes checkpoints.
        """
        writers = [c for c in self.callbacks if c.checkpoints is not None]
        if not writers and not self.silent:
            raise ValueError("control.save needs a callback that writes: add Checkpoint(folder)")
        for callback in writers:
            callback.write_checkpoint(state)

    def on_not_finite(self, trainer: Any, state: Any, control: TrainingControl) -> str:
        """Return what the callbacks say on a loss or a weight that is not finite, as one text.

        An error of a callback becomes part of the text, since the loss that is not finite matters
        more.
        """
        sentences = []
        for callback in self.callbacks:
            try:
                sentences.append(callback.on_not_finite(trainer, state, control))
            except Exception as e:
                sentences.append(f"{callback.key} failed: {first_line(e)}")
        return " ".join(text for text in sentences if text)

    @contextmanager
    def training(
        self,
        trainer: Any,
        state: Any,
        control: TrainingControl,
        held: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Iterator[None]:
        """Call `on_train_begin` of all callbacks before the block, and `on_train_end` after it.

        `on_train_end` is called also after an error, for each callback whose `on_train_begin`
        succeeded, even if another callback raises an error. The first error is raised, with errors
        of `on_train_end` as its notes. Callbacks that write checkpoints end first, since other
        callbacks, such as `EarlyStopping`, may change the weights. While checkpoints are written,
        signals are `held`.
        """
        begun: list[Callback] = []
        error: BaseException | None = None

        def end(callbacks: Iterable[Callback]) -> None:
            nonlocal error
            for callback in callbacks:
                try:
                    callback.on_train_end(trainer, state, control)
                except BaseException as e:
                    if error is None:
                        error = e
                    else:
                        text = f"{callback.key}.on_train_end failed, too: {type(e).__name__}: {e}"
                        error.add_note(text)

        try:
            for callback in self.callbacks:
                callback.on_train_begin(trainer, state, control)
                begun.append(callback)
            yield
        except BaseException as e:
            error = e
        try:
            with held():
                end(c for c in begun if c.checkpoints is not None)
        except (KeyboardInterrupt, SystemExit) as e:  # a signal that was held back
            if error is None or isinstance(error, Exception):
                e.__context__, error = error, e
        end(c for c in begun if c.checkpoints is None)
        if error is not None:
            raise error


def _checkpoint_folder(callback: Callback) -> str | None:
    """Return the folder into which a callback writes checkpoints; None if it writes none."""
    folder = callback.checkpoints
    return None if folder is None else os.path.realpath(folder)


def _check_callback(callback: Any) -> None:
    """Raise `ValueError` unless `callback` is a `Callback` with a valid `every_steps`."""
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ValueError(f"{callback.__name__} is a class: pass an instance, {callback.__name__}()")
    if not isinstance(callback, Callback):
        raise ValueError(
            f"a callback is an instance of Callback, not {callback!r}: derive a class from "
            "onnxgrad.callbacks.Callback, and override its events, such as on_step_end"
        )
    if callback.every_steps is not None:
        check_count(f"every_steps of {callback.key}", callback.every_steps)
