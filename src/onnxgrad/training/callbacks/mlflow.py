"""Logging to MLflow."""

from __future__ import annotations

import re
from typing import Any

from onnxgrad.training.callbacks.tracker import Tracker, optional

_STATUS = {"interrupted": "KILLED", "error": "FAILED", "not finite": "FAILED"}


class MLflow(Tracker):
    """Logs the numbers of training as metrics of an MLflow run, and the trainer's arguments.

    It logs the numbers of the history by step, `step_loss`, the mean loss of a row since it was
    logged last, and what other callbacks publish, such as `Norms`. If a run of MLflow is active,
    that one is used and stays open. Otherwise a run is started and ended; where training resumes,
    it is the run of before. Characters that MLflow does not allow in names become "_".

    Args:
        experiment: name of the experiment; None is MLflow's.
        run_name: name of a new run; None lets MLflow choose.
        tracking_uri: server or folder; None is MLflow's, such as of `MLFLOW_TRACKING_URI`.
        every_steps: number of steps from one `step_loss` to the next; None logs it after calls of
            the runtime, at most once a second.

    Raises:
        ImportError: mlflow is not installed.

    Examples:
        >>> from onnxgrad.training.callbacks.mlflow import MLflow
        >>> try:
        ...     callbacks = [MLflow(experiment="vision", run_name="a")]
        ... except ImportError:  # pip install 'onnxgrad[mlflow]'
        ...     callbacks = []
    """

    def __init__(
        self,
        experiment: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        every_steps: int | None = None,
    ) -> None:
        super().__init__(every_steps)
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        _mlflow()

    def begin(self, state: Any, parameters: dict[str, Any]) -> None:
        """Use the active run, that of before, or a new one."""
        mlflow, entry = _mlflow(), self.entry(state)
        self._own = mlflow.active_run() is None
        if self._own:
            if self.tracking_uri is not None:
                mlflow.set_tracking_uri(self.tracking_uri)
            if self.experiment is not None:
                mlflow.set_experiment(self.experiment)
            before = entry.get("run_id")
            run = mlflow.start_run(run_id=before, run_name=None if before else self.run_name)
        else:
            run = mlflow.active_run()
        if entry.get("run_id") != run.info.run_id:  # MLflow refuses parameters that change
            mlflow.log_params({name: str(value)[:250] for name, value in parameters.items()})
        entry["run_id"] = run.info.run_id

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Log the numbers as metrics."""
        allowed = {re.sub(r"[^\w\-. /]", "_", n, flags=re.ASCII): v for n, v in scalars.items()}
        _mlflow().log_metrics(allowed, step=step)

    def end(self, state: Any) -> None:
        """End the run, if it was started here."""
        if self._own:
            _mlflow().end_run(_STATUS.get(state.stop_reason, "FINISHED"))


def _mlflow() -> Any:
    return optional("MLflow", "mlflow", "mlflow")
