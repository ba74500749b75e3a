"""DATA: a table in memory, Parquet files that are read while training, or a folder of images."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.cli.cells import Table, counting, missing
from onnxgrad.cli.data_files import STDIN, read_table
from onnxgrad.cli.data_options import InputOptions
from onnxgrad.data.arrays import DataError
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.images import ImageFolder
from onnxgrad.data.readers import Reader
from onnxgrad.errors import unknown

_STREAMED = (".arrow", ".feather", ".ipc")
_PARQUET = (".parquet", ".pq")
_IMAGES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
_SEEN = 10_000  # files of a folder that say what it holds
_IN_MEMORY = 1 << 30  # bytes of a Parquet file that is read as a whole


@dataclass
class _Source:
    """Data of this name: a path, or "standard input"."""

    name: str
    kept: np.ndarray | None = field(default=None, init=False)  # indices, if rows are left out

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Begin the errors of the block with the name, and count rows as the file does."""
        try:
            with counting(self.kept):
                yield
        except ValueError as e:
            if repr(self.name) in str(e):
                raise
            raise DataError(f"{self.name!r}: {e}") from e


@dataclass
class TableSource(_Source):
    """Columns in memory; `note` says which rows were left out."""

    table: Table
    note: str = ""


@dataclass
class ArrowSource(_Source):
    """Parquet or Arrow files; `types` are those of the columns."""

    types: dict[str, str]

    @property
    def examples(self) -> Table:
        """A row of each column, by which columns are chosen: with its rank, and text as text."""
        table: Table = {}
        for name, kind in self.types.items():
            shape = (1, 1) if "list" in kind or "tensor" in kind else (1,)
            table[name] = np.full(shape, "text", object) if "string" in kind else np.zeros(shape)
        return table

    def reader(self, columns: Any, y: list[str], weight: str | None) -> Reader:
        """Return what reads these columns."""
        return arrow_dataset(self.name, y=y or None, sample_weight=weight, columns=columns)


@dataclass
class ImageSource(_Source):
    """A folder with a folder of images for each class."""

    size: int | None

    def reader(self, shape: Any) -> ImageFolder:
        """Return what reads the images, for an input of this declared shape."""
        from onnxgrad.data.images import image_folder

        lengths = [d for d in (shape or ())[1:] if isinstance(d, int) and d > 4]
        if self.size is None and len(lengths) != 2:
            raise DataError(
                f"{self.name!r} holds images, and the input of the model declares no height and "
                f"width, but {shape}: pass --image-size"
            )
        return image_folder(self.name, self.size or (lengths[0], lengths[1]))


Source = TableSource | ArrowSource | ImageSource


def open_data(path: str, options: InputOptions) -> Source:
    """Return the data at `path`; `--ignore` and `--drop-missing` are applied to tables.

    Raises:
        DataError: it cannot be read, or holds no such column.
    """
    if path != STDIN and os.path.isdir(path):
        if _holds_images(Path(path)):
            return ImageSource(path, options.image_size)
        return _arrow(path, options)
    suffix = Path(path).suffix.lower()
    if suffix in _STREAMED or (suffix in _PARQUET and _is_large(path)):
        return _arrow(path, options)
    table = read_table(path)
    source = TableSource("standard input" if path == STDIN else path, table)
    _check_ignored(options, table)
    source.table = {n: array for n, array in table.items() if n not in options.ignore}
    if options.drop_missing and source.table:
        _drop_missing(source)
    return source


def _check_ignored(options: InputOptions, names: Any) -> None:
    for name in options.ignore:
        if name not in names:
            raise unknown("column (--ignore)", name, names)


def _drop_missing(source: TableSource) -> None:
    gone = missing(source.table)
    if not gone.any():
        return
    if gone.all():
        raise DataError(f"{source.name!r}: every row has a missing value, and none is left")
    source.table = {name: array[~gone] for name, array in source.table.items()}
    source.kept, rows = np.flatnonzero(~gone), (np.flatnonzero(gone) + 1).tolist()
    more = ", ..." if len(rows) > 5 else ""
    source.note = (
        f"left out {len(rows)} of {len(gone)} rows with missing values: "
        f"{', '.join(map(str, rows[:5]))}{more}"
    )


def _arrow(path: str, options: InputOptions) -> ArrowSource:
    types = arrow_dataset(path).describe()["columns"]
    _check_ignored(options, types)
    if options.drop_missing:
        raise DataError(
            f"{path!r} is read while training, where --drop-missing cannot count rows: leave them "
            "out of the files"
        )
    return ArrowSource(path, {n: t for n, t in types.items() if n not in options.ignore})


def _holds_images(folder: Path) -> bool:
    """Return whether a folder holds images rather than tables, by the first file that tells."""
    files = (name for _, _, names in os.walk(folder) for name in sorted(names))
    for name in islice(files, _SEEN):
        suffix = Path(name).suffix.lower()
        if suffix in _IMAGES:
            return True
        if suffix in (*_STREAMED, *_PARQUET):
            return False
    raise DataError(
        f"{str(folder)!r} is a folder without Parquet files, and without images in a folder for "
        "each class"
    )


def _is_large(path: str) -> bool:
    """Return whether the columns of a Parquet file need more memory than a table may take."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ArrowException):
        return False  # `read_table` says what is wrong
    groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return sum(groups) > _IN_MEMORY


def split_images(reader: ImageFolder, first: np.ndarray) -> ImageFolder:
    """Return the reader of some of the images."""
    part = copy.copy(reader)
    part.files = [reader.files[i] for i in first]
    part.labels = reader.labels[first]
    part.rows = len(first)
    return part
