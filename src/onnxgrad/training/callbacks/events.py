"""The callbacks of a training: their events, in order, and their `on_train_end`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from onnxgrad.checks import check_count
from onnxgrad.errors import first_line
from onnxgrad.training.callbacks.base import Callback, Control

_EVENTS = {name for name in vars(Callback) if name.startswith("on_")} - {"on_not_finite"}


class Callbacks:
    """Calls the events of callbacks in their order, and gives each its own key.

    Args:
        callbacks: instances of `Callback`.

    Raises:
        ValueError: one of them is none, or stands twice in the list, or its `every_steps` is no
            positive integer.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        if isinstance(callbacks, Callback):
            raise ValueError(f"callbacks is a list: pass [{type(callbacks).__name__}(...)]")
        self.all = self.callbacks = list(callbacks)  # `without_writers` calls fewer
        self.silent = False
        keys: set[str] = set()
        for i, callback in enumerate(self.callbacks):
            _check_callback(callback)
            if any(callback is other for other in self.callbacks[:i]):
                raise ValueError(f"callback {callback.key} is twice in the list: pass it once")
            key, number = callback.key, 2
            while callback.key in keys:
                callback.key, number = f"{key}-{number}", number + 1
            keys.add(callback.key)
        folders: set[str] = set()
        for callback in self.callbacks:
            folder = _checkpoint_folder(callback)
            if folder in folders:
                raise ValueError(
                    f"{callback.key} writes to {folder}, as another callback does: they would "
                    "remove each other's checkpoints; pass another folder"
                )
            folders.update([] if folder is None else [folder])

    def check_members(self) -> None:
        """Raise `ValueError` for a callback that knows nothing of the members of a stack."""
        for callback in self.all:
            if not callback.of_members:
                raise ValueError(
                    f"{callback.key} describes the training of one model: pass it to a Trainer"
                )

    def without_writers(self) -> Callbacks:
        """Return the callbacks of a process other than the first: without the ones that write."""
        new = copy.copy(self)
        new.callbacks = [c for c in self.callbacks if not c.writes]
        new.silent = True
        return new

    @property
    def gradient_norms(self) -> bool:
        """Whether any callback needs the norms of gradients."""
        return any(callback.gradient_norms for callback in self.callbacks)

    def steps_until_stop(self, step: int) -> int | None:
        """Return the steps from `step` to the next multiple of an `every_steps`; None: no limit."""
        every = [c.every_steps for c in self.all if c.every_steps is not None]
        return min((n - step % n for n in every), default=None)

    def call(self, event: str, trainer: Any, state: Any, control: Control) -> None:
        """Call the method `event`, such as "on_step_end", of every callback."""
        assert event in _EVENTS, event
        for callback in self.callbacks:
            getattr(callback, event)(trainer, state, control)

    def writes_to(self, folder: Any) -> bool:
        """Return whether a callback writes checkpoints into `folder`."""
        return os.path.realpath(folder) in (_checkpoint_folder(c) for c in self.callbacks)

    def save(self, trainer: Any, state: Any) -> None:
        """Let the callbacks that write checkpoints write one.

        Raises:
            ValueError: there is none, though one was asked for.
        """
        writers = [c for c in self.callbacks if c.checkpoints is not None]
        if not writers and not self.silent:
            raise ValueError("control.save asks for a checkpoint: add Checkpoint(folder)")
        for callback in writers:
            callback.write_checkpoint(state)

    def on_not_finite(self, trainer: Any, state: Any, control: Control) -> str:
        """Return sentences of the callbacks on a loss or a weight that is not finite; or "".

        An error in one of them becomes part of the text: the loss that is not finite matters more.
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
        control: Control,
        held: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Iterator[None]:
        """Call `on_train_begin` of all, and `on_train_end` after the block, also after an error.

        `on_train_end` is called for each callback whose `on_train_begin` succeeded, even if another
        one raises. The first error is raised, with errors of `on_train_end` as its notes. Callbacks
        that write checkpoints come first: others, such as `EarlyStopping`, may change the weights.
        While they write, signals are `held`.
        """
        begun: list[Callback] = []
        error: BaseException | None = None

        def end(callbacks: Iterable[Callback]) -> None:
            nonlocal error
            for callback in callbacks:
                try:
                    callback.on_train_end(trainer, state, control)
                except BaseException as e:
                    error = _with_note(error, e, callback)

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


def _with_note(
    first: BaseException | None, second: BaseException, callback: Callback
) -> BaseException:
    """Return the first error, with the second one of a callback as a note."""
    if first is None:
        return second
    first.add_note(f"{callback.key}.on_train_end failed, too: {type(second).__name__}: {second}")
    return first


def _checkpoint_folder(callback: Callback) -> str | None:
    """Return the folder into which a callback writes checkpoints; None: it writes none."""
    folder = callback.checkpoints
    return None if folder is None else os.path.realpath(folder)


def _check_callback(callback: Any) -> None:
    """Raise `ValueError` for a class, an object of another kind, or an invalid `every_steps`."""
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise ValueError(f"{callback.__name__} is a class: pass an instance, {callback.__name__}()")
    if not isinstance(callback, Callback):
        raise ValueError(
            f"a callback is an instance of Callback, not {callback!r}: derive a class from "
            "onnxgrad.Callback, and override its events, such as on_step_end"
        )
    if callback.every_steps is not None:
        check_count(f"every_steps of {callback.key}", callback.every_steps)
