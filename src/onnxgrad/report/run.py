"""The records of a training, from the folder of a `Recorder`, a history or a checkpoint."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgrad.report.predictions import histogram
from onnxgrad.report.recorder import FILE, FORMAT, describe_weight
from onnxgrad.training import saving
from onnxgrad.training.callbacks.checkpoint import newest_checkpoint

Run = dict[str, Any]


def load_run(path: str | os.PathLike) -> Run:
    """Return the records of a training; `source` is "run", "history" or "checkpoint".

    Parts that were not recorded have no key.

    Args:
        path: the folder of a `Recorder` or its `run.json`; a history in CSV or JSON; the folder of
            checkpoints or one of them, of which the newest is read.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the file is damaged, or of another kind.
    """
    path = Path(path)
    if path.is_dir():
        return _load_run_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass the folder or history of a training")
    if path.suffix == ".csv":
        return {"source": "history", "history": _read_csv(path)}
    if path.suffix != ".json":
        raise ValueError(
            f"{path} is no record of a training: pass the folder of a Recorder (--record), a "
            "history (.csv or .json), or the folder of a checkpoint"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is damaged, as it is no JSON: record it again: {e}") from None
    if isinstance(content, list) and all(isinstance(record, dict) for record in content):
        return {"source": "history", "history": content}
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return {"source": "run", **content}
    raise ValueError(
        f"{path} is neither a history (a list of records) nor a file of a Recorder ({FORMAT}): "
        "pass the folder of a Recorder, a history or a checkpoint"
    )


def _load_run_folder(folder: Path) -> Run:
    """Return the records in the folder of a `Recorder` or of a `Checkpoint`."""
    if (folder / FILE).is_file():
        return load_run(folder / FILE)
    found = newest_checkpoint(folder, saving.read_state)
    if found is None:
        raise FileNotFoundError(
            f"{folder} has no {FILE} and no checkpoint: `onnxgrad train --record {folder}` or "
            "Recorder(folder) writes one"
        )
    arrays, numbers = found[1]
    callbacks: Mapping[str, Any] = numbers.get("callbacks", {})
    run: Run = {"source": "checkpoint", "history": numbers.get("history", [])}
    run |= {"epochs": numbers.get("epoch"), "stop_reason": numbers.get("stop_reason")}
    if weights := arrays.get("weights"):
        run["after"] = {n: histogram(w) for n, w in weights.items()}
        run["weights"] = {n: describe_weight(w) for n, w in weights.items()}
    for entry in callbacks.values():
        if entry.get("format") == FORMAT:
            run = entry | run
        elif "records" in entry and isinstance(entry["records"], list):
            run.setdefault("norms", [_run_of_norms_record(record) for record in entry["records"]])
    return run


def _run_of_norms_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the norms at a step, from a record of the callback `Norms`, which has no norms of
    updates.
    """
    gradient, weight = (record.get(f"{kind}_norms", {}) for kind in ("gradient", "weight"))
    return {"step": record["step"], "gradient": gradient, "weight": weight, "update": {}}


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Return a history read from a CSV file, without its empty cells."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if "step" not in (reader.fieldnames or ()):
            raise ValueError(f"{path} has no column 'step': pass a history, as History writes it")
        rows = list(reader)
    return [{str(n): _parse_cell(v) for n, v in row.items() if v not in (None, "")} for row in rows]


def _parse_cell(text: Any) -> Any:
    with suppress(TypeError, ValueError):
        return float(text)
    return text
