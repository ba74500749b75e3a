"""The predictions of rows as columns: the most probable class of each row, and the outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.data.arrays import DataError
from onnxgrad.errors import printable, unknown
from onnxgrad.graph.infer import infer
from onnxgrad.losses.applied_to import is_probability
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.spec import ALIASES
from onnxgrad.model.class_labels import Labels, stored_labels
from onnxgrad.model.convert import to_ir
from onnxgrad.model.files import replacement_file
from onnxgrad.model.notes import CLASSES, read_metadata
from onnxgrad.operators.shapes import rank
from onnxgrad.tasks.base import safe_cell, softmax
from onnxgrad.training.job import LOSS

Columns = dict[str, np.ndarray]
Write = Callable[[Columns], None]
_PARQUET = (".parquet", ".pq")
_ENDINGS = (".csv", ".tsv", *_PARQUET, ".npz")


def check_predictions_suffix(output: str) -> None:
    """Raise `ValueError` unless predictions can be written to a file of this suffix."""
    if Path(output).suffix.lower() not in _ENDINGS:
        raise unknown("ending of a file of predictions", Path(output).suffix, _ENDINGS)


@contextmanager
def column_writer(output: str | Path | None) -> Iterator[Write]:
    """Yield a function that appends rows to a file, which is written completely or not at all.

    Without an output, they are written to standard output, as CSV.
    """
    suffix = ".csv" if output is None else Path(output).suffix.lower()
    with ExitStack() as stack:
        target: Any = (
            sys.stdout.buffer if output is None else stack.enter_context(replacement_file(output))
        )
        if suffix == ".npz":
            parts: list[Columns] = []
            yield parts.append
            joined = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
            with open(target, "wb") as file:  # to a path, savez would append .npz
                np.savez(file, **joined)  # type: ignore[arg-type]
            return
        opened: list[Any] = []

        def write_columns(columns: Columns) -> None:
            table = _arrow_table(columns, binary=suffix in _PARQUET)
            if not opened:  # the first table decides the columns of the file
                opened.append(stack.enter_context(_table_writer(target, suffix, table.schema)))
            opened[0].write_table(table)

        yield write_columns
        if output is None:
            sys.stdout.buffer.flush()


def _arrow_table(columns: Columns, binary: bool) -> Any:
    """Return a pyarrow table of columns; a 2-D array becomes the columns name_0, name_1, ...

    Unless it goes to a `binary` file, it holds no formulas.
    """
    import pyarrow as pa

    flat: dict[str, Any] = {}
    for name, array in columns.items():
        values = array.reshape(len(array), -1)
        if array.dtype.kind in "OSU":
            values = values.astype(str)
        if values.dtype == np.float16:
            values = values.astype(np.float32)
        several = values.shape[1] > 1
        flat |= {f"{name}_{i}" if several else name: part for i, part in enumerate(values.T)}
    if not binary:
        flat = {
            safe_cell(name): list(map(safe_cell, a.tolist())) if a.dtype.kind == "U" else a
            for name, a in flat.items()
        }
    return pa.table(flat)


def _table_writer(target: Any, suffix: str, schema: Any) -> Any:
    """Return a writer of pyarrow for a CSV or Parquet file."""
    from pyarrow import csv, parquet

    if suffix in _PARQUET:
        return parquet.ParquetWriter(target, schema)
    delimiter = "\t" if suffix == ".tsv" else ","
    options = csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
    return csv.CSVWriter(target, schema, write_options=options)


def output_columns(
    results: Mapping[str, Any], outputs: Collection[str], chosen: Collection[str], notes: list[str]
) -> Columns:
    """Return `{column: array}` of the outputs that have a row for each row of data.

    Args:
        results: the outputs of a call that have a row for each row of the data.
        outputs: the names of all outputs of the call.
        chosen: the outputs that must have rows.
        notes: gets messages about outputs that are left out.

    Raises:
        DataError: a chosen output without rows, or none with any.
    """
    columns: Columns = {}
    for name in outputs:
        value = results.get(name)
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            for key in value[0]:
                columns[f"{name}_{key}"] = np.array([row[key] for row in value])
        elif isinstance(value, np.ndarray):
            columns[name] = value
        elif name in chosen:
            raise DataError(
                f"output {name!r} has no row for each row of the data: leave out this output"
            )
        elif (text := f"output {printable(name)} has no rows, and is left out") not in notes:
            notes.append(text)
    if not columns:
        raise DataError(
            "nothing to write: no output of the model has a row for each row of the data"
        )
    return columns


@dataclass(frozen=True)
class ClassLabels:
    """The classes that an output scores, for columns `label` and `probability`.

    - `probable`: whether the output holds probabilities; others are scores, of which softmax, or of
      a single one sigmoid, gives them.
    """

    output: str
    classes: Labels
    probable: bool

    @classmethod
    def of_model(cls, proto: ModelProto, outputs: Collection[str]) -> ClassLabels | None:
        """Return the `ClassLabels` of a model; None if no output scores its stored classes.

        Nor has a model that was trained by a loss of other scores, such as of labels that do not
        exclude each other.
        """
        classes: Labels = read_metadata(proto, CLASSES)
        if not classes or stored_labels(proto) or {"label", "probability"} & {*outputs}:
            return None
        model = to_ir(proto)
        infer(model)
        known = [y for y in model.graph.outputs if y.name in outputs]
        fitting = [y for y in known if _class_count(y) == len(classes)]
        if len(fitting) != 1 or not _gives_probabilities(stored_loss_name(proto), fitting[0]):
            return None
        return cls(str(fitting[0].name), classes, is_probability(fitting[0]))

    def columns(self, results: Mapping[str, Any], count: int) -> Columns:
        """Return `{"label", "probability"}` of the most probable class, for the first `count`
        rows.
        """
        shares = np.asarray(results[self.output][:count], np.float64).reshape(count, -1)
        if shares.shape[1] == 1:
            second = shares if self.probable else 1 / (1 + np.exp(-shares))
            shares = np.concatenate([1 - second, second], axis=1)
        elif not self.probable:
            shares = softmax(shares)
        best = shares.argmax(axis=1)
        labels = np.array(self.classes)[best]
        return {"label": labels, "probability": shares.max(axis=1).astype(np.float32)}


def _has_single_score(output: Any) -> bool:
    """Return whether an output has one score for each row."""
    return rank(output) == 1 or (rank(output) == 2 and output.shape[-1] == 1)


def _class_count(output: Any) -> Any:
    """Return the count of classes that an output scores: 2 for one score a row."""
    if _has_single_score(output):
        return 2
    return output.shape[-1] if rank(output) == 2 else None


def _gives_probabilities(loss: str | None, output: Any) -> bool:
    """Return whether an output trained by `loss` has scores that softmax or sigmoid normalizes."""
    if loss not in LOSSES:
        return True
    spec = LOSSES[loss]
    logits = "from_logits" in spec.all_options
    if _has_single_score(output):
        return logits and spec.threshold is not None
    return spec.threshold is None and (logits or spec.label_kind.dtype is not None)


def stored_loss(proto: ModelProto) -> dict[str, Any]:
    """Return a model's stored loss as arguments of a `Trainer`; {} if it stores none."""
    note = read_metadata(proto, LOSS)
    return dict(note[0]) if note else {}


def stored_loss_name(proto: ModelProto) -> str | None:
    """Return the name of a model's only stored loss; None for no loss or several."""
    loss = stored_loss(proto).get("loss")
    names: list[Any] = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    return ALIASES.get(names[0], names[0]) if len(names) == 1 else None
