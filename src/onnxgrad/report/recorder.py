"""`Recorder`, the callback that writes the values of a report of a training."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import first_line
from onnxgrad.language.generation import generate
from onnxgrad.model.files import replacement_file, resolve_target
from onnxgrad.plot.text import onnx_simple_text_plot
from onnxgrad.report.environment import machine_and_versions, peak_memory
from onnxgrad.report.predictions import examine_predictions, histogram
from onnxgrad.reporting import logger
from onnxgrad.runtime.session import operator_times
from onnxgrad.training.callbacks.base import UNFINISHED, Callback, TrainingControl
from onnxgrad.training.callbacks.history import json_value
from onnxgrad.training.callbacks.trackers import logged_arguments
from onnxgrad.training.diagnose import KeptWeights, end_reason, runnable_step
from onnxgrad.training.state import TrainState
from onnxgrad.training.trainer import Trainer

FILE, FORMAT = "run.json", "onnxgrad.run.1"
MOST_NORMS = 256  # records of norms, above which every second one is removed
_STEPS = 1000  # points of the loss by step, above which neighbors are joined
_LINES = 400  # lines of the text of the model


class Recorder(Callback):
    """A callback that records a training, for the page of `write_report` and `onnxgrad report`.

    `folder/run.json` gets the history, the loss by step, norms of gradients, weights and updates,
    histograms of the weights before and after, the model as text, versions and the machine. When
    training has ended, it also gets confusions or residuals of the predictions for the validation
    data (without any, for the training data, if they are in memory), the rows with the largest
    loss, with small copies of their images if rows are files, and the time and memory of each
    operator.

    The weights are the same, bit for bit, as without it. It costs a copy of the weights, which it
    reads from the device at each record of norms, and at the end an evaluation, `seconds` for the
    losses of single rows, and `profile` + 1 steps. Norms of gradients are computed in the step.

    Put it behind `EarlyStopping` in the list, so that the restored weights are examined. A
    checkpoint holds the records so far; a resumed training adds to them.

    Args:
        folder: where to write; created if it is missing.
        every_steps: number of steps from one record of norms to the next; None records them at the
            end of each epoch.
        gradient_norms: whether to record norms of gradients, before clipping.
        seconds: how long to compute losses of single rows, at most; 0: none.
        profile: number of steps to profile at the end; 0: none.
        classes: names of the classes, in their order.
        about: facts on the start of the training, such as `{"command": "make train"}`.
        row_numbers: numbers of the rows of the validation data; None: their positions.
        prompts: texts or chats that a trained language model continues.
        tokenizer: of the prompts, as for `texts`.

    Raises:
        OSError: when training begins, if the file cannot be written.

    Examples:
        >>> import tempfile, numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     callbacks = [og.callbacks.Recorder(folder)]
        ...     trainer = og.Trainer(model, "squared_error", callbacks=callbacks)
        ...     trainer = trainer.fit(X, y, epochs=3, validation=0.2)
        ...     page = og.plot.write_report(folder)
        ...     page.name
        'report.html'
    """

    writes = True
    of_members = False

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        every_steps: int | None = None,
        gradient_norms: bool = True,
        seconds: float = 10.0,
        profile: int = 3,
        classes: Sequence[Any] | None = None,
        about: Mapping[str, Any] | None = None,
        row_numbers: np.ndarray | None = None,
        prompts: Sequence[Any] = (),
        tokenizer: Any = None,
    ) -> None:
        self.folder_written = Path(folder)  # `folder` is an attribute of checkpoints
        self.every_steps, self.gradient_norms = every_steps, gradient_norms
        self.seconds, self.profile = seconds, profile
        self.classes, self.about, self.row_numbers = classes, dict(about or {}), row_numbers
        self.prompts, self.tokenizer = list(prompts), tokenizer
        self.first_row = 0

    @property
    def path(self) -> Path:
        """The path of the file that the recorder writes."""
        return self.folder_written / FILE

    # -- events -------------------------------------------------------------------------------

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record weights, model, arguments and machine before the first step."""
        self.folder_written.mkdir(parents=True, exist_ok=True)
        resolve_target(self.path)
        entry, machine = self.entry(state), machine_and_versions()
        self._weights = dict(state.weights)
        self._since, self._sum, self._rows = state.step, 0.0, 0
        self._clock, self._before = time.perf_counter(), entry.get("seconds", 0.0)
        if "begun" not in entry:
            entry |= {
                "format": FORMAT,
                "begun": datetime.now(UTC).isoformat(timespec="seconds"),
                "first_step": state.step,
                "environments": [],
                "about": self.about,
                "parameters": json_value(logged_arguments(trainer)),
                "model": _model_summary(trainer._job.proto),
                "weights": {n: describe_weight(w) for n, w in self._weights.items()},
                "before": {n: histogram(w) for n, w in self._weights.items()},
                "classes": None if self.classes is None else [str(c) for c in self.classes],
                "steps": [],
                "norms": [],
                "stride": 1,
            }
        if not entry["environments"] or entry["environments"][-1]["machine"] != machine:
            entry["environments"].append({"step": state.step, "machine": machine})

    def on_epoch_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Set the sums of losses and rows to zero, as `trainer.progress` does at the start of an
        epoch.
        """
        self._sum, self._rows = 0.0, 0

    def on_step_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record the mean loss since the last record; after every `every_steps` steps, record norms
        too.
        """
        loss, rows = trainer.progress.loss, trainer.progress.rows
        if rows > self._rows and math.isfinite(loss):
            mean = (loss * rows - self._sum) / (rows - self._rows)
            steps = self.entry(state)["steps"]
            steps.append([state.step, rows - self._rows, mean, state.learning_rate])
            _average_neighboring_points(steps)
            self._sum, self._rows = loss * rows, rows
        if self.every_steps is not None and state.step % self.every_steps == 0:
            self._record_norms(trainer, state)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Write the record so far into the file."""
        self._write_record(state)

    def on_epoch_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Record norms of weights if `every_steps` is None, and write the record into the file."""
        if self.every_steps is None:
            self._record_norms(trainer, state)
        self._write_record(state)

    def on_train_end(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Examine the predictions of the trained model, and write the record into the file."""
        kept = KeptWeights.from_state(state)  # behind `EarlyStopping`, which restores weights
        ended: dict[str, Any] = {
            "seconds": self._before + time.perf_counter() - self._clock,
            "after": {n: histogram(w) for n, w in state.weights.items()},
            "stop_reason": state.stop_reason,
            "reason": end_reason(trainer),
            "kept": {"epoch": kept.epoch, "step": kept.step, "whole": kept.whole},
            "epochs": state.epoch,
            "step": state.step,
        }
        absent: dict[str, str] = {}
        parts = {"examined": self._examine_predictions, "operators": self._profile_operators}
        if state.stop_reason in (*UNFINISHED, "not finite"):
            absent = dict.fromkeys(parts, f"the training broke off ({state.stop_reason})")
            parts = {}
        elif self.prompts:
            parts["samples"] = self._continue_prompts
        for name, record_part in parts.items():
            try:
                ended[name] = record_part(trainer)
            except Exception as e:  # the training has not failed
                absent[name] = first_line(e)
                if not isinstance(e, ValueError):
                    logger.warning("Recorder: %s: %s", name, absent[name])
        self._write_record(state, {**ended, "absent": absent, "peak_memory": peak_memory()})

    # -- parts of the record ------------------------------------------------------------------

    def _record_norms(self, trainer: Trainer, state: TrainState) -> None:
        """Record norms of weights, updates and gradients at this step, at most once a step."""
        entry = self.entry(state)
        entry["calls"] = calls = entry.get("calls", 0) + 1
        records = entry["norms"]
        if calls % entry["stride"] or state.step == self._since:
            return
        new, old = state.weights, self._weights
        gradients = trainer.gradient_norms if self.gradient_norms else {}
        records.append(
            {
                "step": state.step,
                "since": self._since,
                "gradient": {n: float(v) for n, v in (gradients or {}).items()},
                "weight": {n: two_norm(w) for n, w in new.items()},
                "update": {n: two_norm(w, old[n]) for n, w in new.items()},
            }
        )
        self._weights, self._since = dict(new), state.step
        if len(records) > MOST_NORMS:
            del records[-2::-2]  # every second record, without the last
            entry["stride"] *= 2

    def _examine_predictions(self, trainer: Trainer) -> Any:
        return examine_predictions(trainer, self.seconds, self.row_numbers, self.first_row)

    def _continue_prompts(self, trainer: Trainer) -> Any:
        """Return pairs of a prompt and the text with which the trained model continues it."""
        new = generate(trainer, self.prompts, tokenizer=self.tokenizer)
        return [[str(prompt), text] for prompt, text in zip(self.prompts, new, strict=True)]

    def _profile_operators(self, trainer: Trainer) -> Any:
        """Return the time and the memory of each operator in a step."""
        if self.profile < 1:
            raise ValueError("the recorder has profile=0: pass profile=3 to measure 3 steps")
        call = trainer._call
        if call is None or (sample := runnable_step(call)) is None:
            raise ValueError(
                "no step can be profiled: none was run, or several processes share each step"
            )
        model, inputs, work, in_order = sample
        times = operator_times(model, inputs, call.job.device, work, in_order, self.profile)
        rows = [[t.operator, t.nodes, t.seconds, t.nbytes] for t in times]
        return {"steps": self.profile, "rows": rows}

    def _write_record(self, state: TrainState, ended: Mapping[str, Any] | None = None) -> None:
        entry = self.entry(state)
        entry["seconds"] = self._before + time.perf_counter() - self._clock
        written = {**entry, "history": state.history, **(ended or {})}
        text = json.dumps(json_value(written), allow_nan=False)
        with replacement_file(self.path) as file:
            file.write_text(text, encoding="utf-8")


def describe_weight(array: np.ndarray) -> dict[str, Any]:
    """Return {"shape", "dtype", "size"} of a weight, as values for JSON."""
    return {"shape": list(array.shape), "dtype": array.dtype.name, "size": int(array.size)}


def two_norm(array: np.ndarray, subtracted: Any = 0) -> float:
    """Return the 2-norm of `array - subtracted`, computed in float64."""
    return float(np.linalg.norm(np.subtract(array, subtracted, dtype=np.float64)))


def _average_neighboring_points(steps: list[list[Any]]) -> None:
    """Average pairs of neighboring points, weighted by rows, of a loss curve that has too many
    points.
    """
    if len(steps) <= _STEPS:
        return
    pairs = list(zip(steps[0::2], steps[1::2], strict=False))
    for i, (first, second) in enumerate(pairs):
        rows = first[1] + second[1]
        loss = (first[1] * first[2] + second[1] * second[2]) / rows
        steps[i] = [second[0], rows, loss, second[3]]
    del steps[len(pairs) : 2 * len(pairs)]


def _model_summary(proto: ModelProto) -> dict[str, Any]:
    """Return the name, producer, opsets, node counts and first lines of text of a model."""
    lines = onnx_simple_text_plot(proto).splitlines()
    return {
        "name": proto.graph.name,
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import},
        "nodes": len(proto.graph.node),
        "operators": dict(Counter(node.op_type for node in proto.graph.node)),
        "text": lines[:_LINES],
        "lines": len(lines),
    }
