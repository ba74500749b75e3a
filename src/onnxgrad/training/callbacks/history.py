"""`History`: writes the history of training into a CSV or JSON file."""

from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import unknown
from onnxgrad.model.files import replacement_file, resolve_target
from onnxgrad.training.callbacks.base import Callback, TrainingControl
from onnxgrad.training.state import split_by_member


class History(Callback):
    """Writes the history of training into a CSV or JSON file after every evaluation and epoch.

    The file always has exactly the records of `trainer.history`, also where training resumes; it is
    replaced as a whole, so that a reader never sees half of it. A CSV file has a column for every
    name in any record, and empty cells where a record lacks the name; of a stack, a column for each
    member, such as "loss/0". A JSON file has a list with one record on each line; NaN and infinity,
    which JSON lacks, are null.

    Args:
        path: file that ends with ".csv" or ".json". Its folder is created; an existing file is
            replaced when the first record is written.

    Raises:
        ValueError: another ending.
        OSError: when training begins, if the file cannot be written.

    Examples:
        >>> from onnxgrad.training.callbacks.history import History
        >>> History("runs/a/history.csv").key
        'History'
    """

    writes = True

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if self.path.suffix not in _WRITERS:
            raise unknown("ending of a history file", self.path.suffix, _WRITERS)

    def on_train_begin(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Create the folder, and check that the file can be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        resolve_target(self.path)

    def on_evaluate(self, trainer: Any, state: Any, control: TrainingControl) -> None:
        """Write all records of the history, and replace an earlier file."""
        if state.history:
            with replacement_file(self.path) as file:
                _WRITERS[self.path.suffix](file, state)

    on_epoch_end = on_evaluate
    on_train_end = on_evaluate  # callbacks may have added to the last record


def _python_value(value: Any) -> Any:
    """Return a numpy number as a Python number, an array as lists, other values unchanged."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _write_csv(file: Path, state: Any) -> None:
    """Write the history of a state into a CSV file."""
    flat = [split_by_member(record, state) for record in state.history]
    records = [{name: _python_value(v) for name, v in record.items()} for record in flat]
    columns = dict.fromkeys(name for record in records for name in record)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _write_json(file: Path, state: Any) -> None:
    """Write the history of a state into a JSON file."""
    lines = ",\n".join(json.dumps(json_value(record), allow_nan=False) for record in state.history)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def json_value(value: Any) -> Any:
    """Return `value` in types of JSON: Python numbers, lists and dicts; None for NaN, infinity."""
    value = _python_value(value)
    if isinstance(value, dict):
        return {name: json_value(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_WRITERS = {".csv": _write_csv, ".json": _write_json}
