"""Readers of text records, from files, lists, tables and datasets."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from onnxgrad.data.arrays import DataError
from onnxgrad.data.columns import is_table
from onnxgrad.data.torch_data import is_hugging_face, is_hugging_face_stream

Record = tuple[str, Any]  # (place, such as "line 3 of 'a.csv'"; a text or {column: cell})

LINES, TABLES = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")
TEXTS = (".txt", ".text", ".md")
DELIMITED = (".csv", ".tsv")


def is_stream(source: Any) -> bool:
    """Return whether `source` is a stream, which each pass over the data reads again."""
    return is_hugging_face_stream(source) or callable(source)


def read_records(source: Any, by_line: bool = True) -> Iterator[Record]:
    """Yield (place, content) of each record of `source`; place is a text such as "line 3 of 'x'".

    Args:
        source: the path of a file of JSON lines, of Parquet, or of plain text, or a list of such
            `Path`s; texts or dicts in a list; a table of pandas, polars or pyarrow; a dataset of
            Hugging Face; or a function that returns an iterable of texts or dicts.
        by_line: whether each line of a plain text is a record; False: the whole file is one.

    Raises:
        DataError: a file that cannot be read, or a line that is no JSON.
    """
    if isinstance(source, (str, os.PathLike)):
        yield from _file_records(Path(source), by_line)
        return
    if isinstance(source, (list, tuple)) and source and isinstance(source[0], os.PathLike):
        for path in source:
            yield from _file_records(Path(path), by_line)
        return
    if callable(source):
        source = source()
    for number, record in enumerate(_iterate_rows(source)):
        yield f"row {number}", record


def column_records(source: Any) -> Iterator[Record]:
    """Yield (place, {column: cell}) of each record; place is a text such as "line 3 of 'x'".

    Raises:
        DataError: a file that cannot be read, or that has no columns.
    """
    if not isinstance(source, (str, os.PathLike)):
        yield from read_records(source)
        return
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in DELIMITED:
        yield from _delimited_records(path)
    elif suffix in (*LINES, *TABLES):
        yield from read_records(path)
    else:
        raise DataError(f"{str(path)!r}: expected a file .csv, .tsv, .jsonl or .parquet")


def _delimited_records(path: Path) -> Iterator[Record]:
    """Yield the records of a CSV or TSV file; cells in quotes may hold delimiters and line ends.

    The delimiter of CSV is a comma or a semicolon, whichever its header has more of.
    """
    with _open_text(path, newline="") as file:
        first = file.readline()
        header = re.sub('"[^"]*"', "", first)
        delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;", key=header.count)
        table = csv.DictReader(chain([first], file), delimiter=delimiter)
        for number, row in enumerate(table, 1):
            place = f"row {number} of {str(path)!r}"
            if any(row.pop(None, ())):
                raise DataError(
                    f"{place} has more cells than the header: quote texts with {delimiter!r}"
                )
            yield place, row


@contextmanager
def _open_text(path: Path, newline: str | None = None) -> Iterator[Any]:
    """Open a UTF-8 file for a `with` block; raise `DataError` if the file cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError as e:
        raise DataError(f"{str(path)!r} is not UTF-8, save it as UTF-8: {e}") from None
    except (OSError, csv.Error) as e:
        missing = isinstance(e, FileNotFoundError)
        more = "; to pass texts themselves, put them in a list" if missing else ""
        why = getattr(e, "strerror", None) or e
        raise DataError(f"{str(path)!r} cannot be read: {why}{more}") from None


def _iterate_rows(source: Any) -> Any:
    """Return an iterator or a list of the rows, mostly dicts, of a table, dataset or iterable."""
    if is_hugging_face(source):
        return iter(source)
    if hasattr(source, "to_pylist"):
        return source.to_pylist()
    if is_table(source):
        return source.to_dicts() if hasattr(source, "to_dicts") else source.to_dict("records")
    if isinstance(source, Mapping):
        names, columns = list(source), list(source.values())
        return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    try:
        return iter(source)
    except TypeError:
        raise DataError(
            f"texts are in a file, a list, a table or a dataset, not in {type(source).__name__}"
        ) from None


def _file_records(path: Path, by_line: bool) -> Iterator[Record]:
    """Yield (place, content) of each record of a file of Parquet, JSON lines or plain text."""
    name, suffix = str(path), path.suffix.lower()
    if suffix in TABLES:
        from pyarrow import ArrowException, parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, ArrowException) as e:
            raise DataError(f"{name!r} cannot be read as Parquet: {e}") from None
        yield from ((f"row {i} of {name!r}", row) for i, row in enumerate(rows))
        return
    with _open_text(path) as file:
        if suffix in LINES:
            yield from _json_records(name, file)
        elif by_line:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"line {number} of {name!r}", line.rstrip("\n")
        else:
            yield f"{name!r}", file.read()


def _json_records(name: str, file: Any) -> Iterator[Record]:
    """Yield (place, content) of each record of a file of JSON lines, or of a JSON array."""
    first = next((line for line in file if line.strip()), "")
    file.seek(0)
    if first.lstrip().startswith("["):
        try:
            content = json.load(file)
        except ValueError as e:
            raise DataError(f"{name!r} begins with '[', and is no JSON array: {e}") from None
        yield from ((f"entry {i} of {name!r}", record) for i, record in enumerate(content))
        return
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield f"line {number} of {name!r}", json.loads(line)
            except ValueError as e:
                raise DataError(
                    f"line {number} of {name!r} is no JSON: {e}; write an object on each line, as "
                    '{"text": "..."}'
                ) from None
