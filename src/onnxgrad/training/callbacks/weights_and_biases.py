"""Logging to Weights & Biases."""

from __future__ import annotations

from typing import Any

from onnxgrad.training.callbacks.tracker import Tracker, optional

_FAILED = ("interrupted", "error", "not finite")


class WeightsAndBiases(Tracker):
    """Logs the numbers of training to a run of Weights & Biases, and the trainer's arguments.

    It logs the numbers of the history, `step_loss`, the mean loss of a row since it was logged
    last, and what other callbacks publish, such as `Norms`, against `step`. If a run is active,
    that one is used and stays open. Otherwise a run is started and finished; where training
    resumes, it is the run of before.

    Args:
        project: name of the project; None is that of wandb.
        name: name of a new run; None lets wandb choose.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.
        **options: other arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        ImportError: wandb is not installed.

    Examples:
        >>> from onnxgrad.training.callbacks.weights_and_biases import WeightsAndBiases
        >>> try:
        ...     callbacks = [WeightsAndBiases(project="vision", mode="offline")]
        ... except ImportError:  # pip install 'onnxgrad[wandb]'
        ...     callbacks = []
    """

    _open = ("_run",)

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        every_steps: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every_steps)
        self.project, self.name, self.options = project, name, options
        _wandb()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Use the active run, that of before, or a new one."""
        wandb, entry = _wandb(), self.entry(state)
        self._own = wandb.run is None
        if self._own:
            before = {"id": entry["run_id"], "resume": "allow"} if "run_id" in entry else {}
            options = {"project": self.project, "name": self.name, **before, **self.options}
            self._run = wandb.init(**{n: v for n, v in options.items() if v is not None})
        else:
            self._run = wandb.run
        self._axes: set[str] = set()  # names of the curves that are drawn over "step"
        self._run.config.update(parameters, allow_val_change=True)
        entry["run_id"] = self._run.id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers together with the step, as wandb's own step must not go back."""
        for name in scalars:
            if name not in self._axes:
                self._run.define_metric(name, step_metric="step")
                self._axes.add(name)
        self._run.log({**scalars, "step": step})

    def end(self, state: Any) -> None:
        """Finish the run, if it was started here."""
        if self._own:
            self._run.finish(exit_code=int(state.stop_reason in _FAILED))


def _wandb() -> Any:
    return optional("WeightsAndBiases", "wandb", "wandb")
