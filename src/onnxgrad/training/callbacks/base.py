"""The base class of callbacks, and their requests to the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

UNFINISHED = ("interrupted", "error")  # `state.stop_reason` of a training that broke off


@dataclass
class Control:
    """Requests of callbacks to the loop, which resets them when it has carried them out.

    Attributes:
        stop: end training after this step.
        save: save a checkpoint now.
        evaluate: evaluate the validation data now.
        freeze: numbers of members of a `TrainerStack` that are to train no further.

    Examples:
        >>> import onnxgrad as og
        >>> class Often(og.Callback):
        ...     every_steps = 100
        ...     def on_step_end(self, trainer, state, control):
        ...         control.evaluate = True
        >>> control = og.Control()
        >>> Often().on_step_end(None, None, control)
        >>> control
        Control(stop=False, save=False, evaluate=True, freeze=set())
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    freeze: set[int] = field(default_factory=set)


class Callback:
    """Base class of callbacks: override the events that you need.

    An event gets the `Trainer` or `TrainerStack`, its live `TrainState`, and a `Control`, in which
    it sets `stop`, `save` or `evaluate`. `trainer.progress` has the numbers of the moment, and
    `state.history` the records so far: when `on_evaluate` and `on_epoch_end` are called, its last
    record describes the evaluation or the epoch. Reading `state.weights` copies the weights
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
        >>> from onnxgrad.training.callbacks.base import Callback, Control
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
        return {name: value for name, value in vars(self).items() if name not in self._open}

    @property
    def key(self) -> str:
        """The name of this callback's entry in `state.callbacks`: the name of its class.

        A second callback of the same class in a list is named `<class>-2`, and so on.
        """
        return self._key or type(self).__name__

    @key.setter
    def key(self, key: str) -> None:
        self._key = key

    def entry(self, state: Any) -> dict[str, Any]:
        """Return this callback's dict in `state.callbacks`, which is empty at first."""
        return state.callbacks.setdefault(self.key, {})

    def publish(self, state: Any, scalars: dict[str, float]) -> None:
        """Pass numbers of the current step to the trackers, which log them once."""
        self.entry(state)["scalars"] = {"step": state.step, "values": scalars}

    def on_train_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the beginning of `fit`, also where it resumes."""

    def on_epoch_begin(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the beginning of an epoch, also where training resumes within one."""

    def on_step_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the end of a call of the runtime, which ran one or more steps."""

    def on_evaluate(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the end of an evaluation, which is in the last record of the history."""

    def on_save(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle a checkpoint that was written."""

    def on_epoch_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the end of an epoch, which is in the last record of the history."""

    def on_train_end(self, trainer: Any, state: Any, control: Control) -> None:
        """Handle the end of `fit`, also after an error; `state.stop_reason` says why it ended."""

    def write_checkpoint(self, state: Any) -> None:
        """Write a checkpoint into the folder `checkpoints`: a callback has set `control.save`."""

    def on_not_finite(self, trainer: Any, state: Any, control: Control) -> str | None:
        """Return a sentence for the error that the loss or a weight became NaN or infinite."""
        return None
