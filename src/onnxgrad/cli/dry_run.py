"""`onnxgrad train --dry-run`: a few steps are measured, and no file is written."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.console import print_json, print_message, print_rows
from onnxgrad.cli.job import Job, prepare_job
from onnxgrad.cli.model_files import STDOUT
from onnxgrad.data.class_numbers import first_class_names
from onnxgrad.report.environment import peak_memory
from onnxgrad.training.callbacks.base import Callback, TrainingControl

_STEPS = 4  # of which the first is not timed, as the runtime allocates memory in it
_MEASURED = "the measured peak of this process, with its libraries and data"
# on Windows, which does not report the peak
_ESTIMATE = "an estimate: weights, slots and data, without activations"


class Probe(Callback):
    """A callback that times a few steps and two evaluations, and then ends the training."""

    every_steps = 1

    def __init__(self, validates: bool) -> None:
        self.validates = validates
        self.steps: list[float] = []
        self.evaluations: list[float] = []
        self.slots = self.batch_size = 0

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Start the clock of the steps."""
        self._began = time.perf_counter()

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record the time of a step; after the last step, request an evaluation or stop."""
        self.steps.append(time.perf_counter() - self._began)
        self.batch_size = self.batch_size or trainer.progress.rows  # rows after the first step
        last = len(self.steps) >= _STEPS
        if last and not self.slots:
            self.slots = _count_bytes(state.slots)
        control.evaluate = self.validates and len(self.steps) >= _STEPS - 1
        control.stop = last and not control.evaluate
        self._began = time.perf_counter()

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record the time of an evaluation; stop after the second."""
        self.evaluations.append(time.perf_counter() - self._began)
        control.stop = len(self.evaluations) > 1
        self._began = time.perf_counter()


def _count_bytes(values: Any) -> int:
    if isinstance(values, Mapping):
        return sum(map(_count_bytes, values.values()))
    if isinstance(values, (list, tuple)):
        return sum(map(_count_bytes, values))
    return int(getattr(values, "nbytes", 0))


def dry_run(options: TrainOptions, proto: Any) -> None:
    """Print what would be trained, and the time and memory it would take; write nothing."""
    probe = Probe(validates=False)
    job = prepare_job(options, proto, [probe])
    job.trainer._change_job(shows_progress=False)
    probe.validates = job.task.validation is not None
    job.fit(options, max(options.epochs, _STEPS))
    measured = _measured_time_and_memory(job, options, probe)
    if options.json:
        print_json(measured)
    else:
        _print_time_and_memory(measured, options.output == STDOUT)


def _measured_time_and_memory(job: Job, options: TrainOptions, probe: Probe) -> dict[str, Any]:
    """Return the measured values by the documented keys of `--dry-run --json`."""
    state, rows = job.trainer.state, job.rows
    size = probe.batch_size
    batches = None if rows is None else -(-rows // size)
    step = statistics.median(probe.steps[1:] or probe.steps)
    evaluation = probe.evaluations[-1] if probe.evaluations else 0.0
    seconds = None if batches is None else options.epochs * (batches * step + evaluation)
    weights = state.weights
    memory = peak_memory()
    parts = {
        "weights": _count_bytes(weights),
        "slots": probe.slots,
        "data": _count_bytes([job.task.data, job.task.validation]),
    }
    return {
        "trained": {name: list(array.shape) for name, array in weights.items()},
        "parameters": sum(int(np.size(array)) for array in weights.values()),
        "rows": rows,
        "validation_rows": job.validation_rows,
        "batch_size": size,
        "epochs": options.epochs,
        "steps": None if batches is None else options.epochs * batches,
        "seconds_per_step": step,
        "seconds_per_evaluation": evaluation,
        "seconds": seconds,
        "memory_bytes": memory or sum(parts.values()),
        "memory_is": _MEASURED if memory else _ESTIMATE,
        **{f"{name}_bytes": size for name, size in parts.items()},
        "remarks": job.messages,
    }


def _print_time_and_memory(measured: dict[str, Any], stderr: bool) -> None:
    trained, validation = measured["trained"], measured["validation_rows"] or "no"
    steps = f"{measured['epochs']} epochs of batches of {measured['batch_size']}"
    per_step = f"{1000 * measured['seconds_per_step']:.3g} ms a step"
    if measured["seconds_per_evaluation"]:
        per_step += f", {1000 * measured['seconds_per_evaluation']:.3g} ms an evaluation"
    total = "unknown" if measured["seconds"] is None else f"{measured['seconds']:.3g} s"
    parts = ", ".join(
        f"{name} {measured[f'{name}_bytes'] / 1e6:.3g} MB" for name in ("weights", "slots", "data")
    )
    memory = f"{measured['memory_bytes'] / 1e6:,.0f} MB: {measured['memory_is']}; {parts}"
    rows = {
        "trains": f"{measured['parameters']:,} numbers in {len(trained)} tensors",
        "rows": f"{measured['rows']}, and {validation} for validation",
        "steps": f"{measured['steps']}: {steps}",
        "time": f"{total} ({per_step}, measured one at a time)",
        "memory": memory,
    }
    print_rows(rows, stderr)
    print_message(f"trained: {first_class_names(list(trained))}", stderr)
    for remark in measured["remarks"]:
        print_message(remark, stderr)
    print_message("nothing was written", stderr)
