"""A reader of Parquet files and pyarrow datasets that are larger than memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.checks import check_count
from onnxgrad.data.arrays import column_array
from onnxgrad.data.arrow_blocks import ColumnArrays, RowBlock
from onnxgrad.data.arrow_files import list_pieces, read_piece
from onnxgrad.data.prefetch import read_ahead
from onnxgrad.data.readers import Reader, describe_files, keep_arguments
from onnxgrad.errors import unknown

_BUFFER_BYTES = 1 << 26  # most bytes of rows that are shuffled together
_BUFFER_ROWS = 1 << 16  # most rows that are shuffled together
_SAMPLED = 64  # rows whose size is measured
_READ_BYTES = 1 << 22  # bytes of a record batch that is decoded at once
_LISTED = 1000  # files of a folder whose suffixes are compared
_Y, _WEIGHT = "/y", "/weight"  # keys of labels and sample weights beside names of inputs

BlockGenerator = Generator[RowBlock, None, None]
Columns = Sequence[str] | Mapping[str, str | Sequence[str]]


def is_arrow_dataset(X: Any) -> bool:
    """Return whether `X` is a pyarrow dataset, whose rows are in files, rather than a pyarrow table
    in memory.
    """
    return type(X).__module__.startswith("pyarrow") and hasattr(X, "get_fragments")


@keep_arguments(data="source")
def arrow_dataset(
    source: Any,
    y: str | Sequence[str] | None = None,
    sample_weight: str | Sequence[str] | None = None,
    columns: Columns | None = None,
    shuffle_rows: int | None = None,
) -> Reader:
    """Return the rows of Parquet or Arrow files as data that `fit` reads while it trains.

    The order is shuffled in two steps: of the row groups (files, where a format has none), and of
    `shuffle_rows` consecutive rows at a time. Rows of one row group that are farther apart stay
    apart: write files in a random order, or with small row groups. Memory holds twice
    `shuffle_rows` rows, and the slices of batches that wait for the session; row groups of Parquet
    files may be larger than it.

    Args:
        source: path of a file, or of a folder of Parquet files (with partitions); a list of paths;
            or a `pyarrow.dataset.Dataset` or `pyarrow.Table`.
        y: names of the columns of the label. None: the column that is called as the label input.
        sample_weight: name of the column of sample weights.
        columns: names of the columns to read, in the order of the model's input, or a dict
            `{input: name or names}`. None: all columns except `y` and `sample_weight`.
        shuffle_rows: rows that are shuffled together; None: 64 MB of them, 65536 at most.

    Returns:
        A reader, which `fit(reader)` takes as X. Lists in a column become axes.

    Raises:
        ValueError: a file that cannot be read or lacks a column of inputs, no rows, unknown
            columns, or a dataset that was filtered.

    Examples:
        >>> import tempfile, numpy as np, pyarrow as pa, pyarrow.parquet as pq
        >>> from onnxgrad.data import arrow_dataset
        >>> path = tempfile.mkdtemp() + "/rows.parquet"
        >>> pq.write_table(pa.table({"a": [1.0, 2.0, 3.0], "price": [4.0, 5.0, 6.0]}), path)
        >>> reader = arrow_dataset(path, y="price")
        >>> [(X["a"].tolist(), y["price"].tolist()) for X, y in reader.batches(2, None, 0)]
        [([1.0, 2.0], [4.0, 5.0]), ([3.0], [6.0])]
    """
    targets = [y] if isinstance(y, str) else list(y or ())
    weights = [sample_weight] if isinstance(sample_weight, str) else list(sample_weight or ())
    if shuffle_rows is not None:
        check_count("shuffle_rows", shuffle_rows)
    opened = _open_arrow_dataset(source)
    return ArrowReader(opened, targets, weights, columns, shuffle_rows, opened is source)


def _file_suffixes(paths: Sequence[str]) -> set[str]:
    """Return the suffixes of the files in `paths`; for a folder, the suffixes of the first 1000
    files in it.
    """
    suffixes = set()
    for path in map(Path, paths):
        inside = (f for f in path.rglob("*") if f.is_file() and f.name[0] not in "._")
        files = islice(inside, _LISTED) if path.is_dir() else [path]
        suffixes |= {file.suffix.lower() for file in files}
    return suffixes


def _open_arrow_dataset(source: Any) -> Any:
    """Return `source` as a dataset of pyarrow."""
    import pyarrow as pa
    from pyarrow import dataset

    if is_arrow_dataset(source):
        return source
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        return dataset.dataset(source)
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    names = [os.fspath(path) for path in paths]
    suffixes = _file_suffixes(names)
    form = {".feather": "feather", ".arrow": "ipc", ".ipc": "ipc"}.get(min(suffixes, default=""))
    if len(suffixes) > 1 or suffixes - {".parquet", ".pq", ".feather", ".arrow", ".ipc", ""}:
        raise ValueError(
            f"{', '.join(map(repr, names))}: files of one kind, .parquet or .arrow, can be read "
            "while training; load other files first, as an array or a table"
        )
    try:
        return dataset.dataset(
            names[0] if len(names) == 1 else names, format=form or "parquet", partitioning="hive"
        )
    except (OSError, pa.ArrowException) as e:
        raise ValueError(f"cannot read {names[0]!r}: {str(e).splitlines()[0]}") from e


def _order_in_block(rows: int, seed: int, number: int) -> np.ndarray:
    """Return the order of the rows of block `number` of a pass."""
    return np.random.default_rng([seed, number]).permutation(rows)


class ArrowReader(Reader):
    """Rows of a pyarrow dataset, read row group by row group, or file by file."""

    def __init__(
        self,
        dataset: Any,
        targets: list[str],
        weights: list[str],
        columns: Columns | None,
        shuffle_rows: int | None,
        selected: bool = True,
    ) -> None:
        names = dataset.schema.names
        taken = [*targets, *weights]
        if columns is None:
            columns = [name for name in names if name not in taken]
        by_input = columns if isinstance(columns, Mapping) else {"": columns}  # "": all features
        inputs = {n: [c] if isinstance(c, str) else list(c) for n, c in by_input.items()}
        self._groups = inputs, targets, weights
        used = [name for group in inputs.values() for name in group]
        self._names = list(dict.fromkeys([*used, *taken]))
        for name in self._names:
            if name not in names:
                raise unknown("column", name, names)
        self._dataset = dataset
        # a file without a label column is read as NaN, which may stand for rows without a label
        needed = [name for name in self._names if name not in targets]
        self._pieces = list(list_pieces(dataset, selected, needed))
        self.rows: int = sum(piece.rows for piece in self._pieces)
        if not self.rows:
            raise ValueError("the dataset has no rows: pass files that hold rows")
        with closing(self.decode(np.arange(len(self._pieces)), 0, _SAMPLED)) as parts:
            sampled = sum(array.nbytes for array in next(parts).values())
        self._row_bytes = max(1, sampled // min(self.rows, _SAMPLED))
        default = min(_BUFFER_ROWS, _BUFFER_BYTES // self._row_bytes)
        self._shuffle_rows = shuffle_rows or max(1, default)

    def first(self) -> tuple[Any, ...]:
        """Return the first row."""
        with closing(self._decode_row_blocks(np.arange(len(self._pieces)), 0, 1)) as blocks:
            return _batch_tuple(next(blocks).tables(slice(0, 1)))

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of one pass; the first `skip` batches are left out without decoding.

        A thread decodes the next block of rows while this one is cut into batches.
        """
        together, order = self._rows_of_block(size), self._piece_order(seed)
        first, start = divmod(skip * size, together)
        decoded = self._decode_row_blocks(order, first * together, together)
        with closing(read_ahead(decoded, 1)) as blocks:
            for number, block in enumerate(blocks, first):
                inside = None if seed is None else _order_in_block(block.rows, seed, number)
                for at in range(start, block.rows, size):
                    cut = slice(at, min(at + size, block.rows))
                    yield _batch_tuple(block.tables(cut if inside is None else inside[cut]))
                start = 0
                del block  # otherwise the block stays in memory while the thread fills the next

    def _rows_of_block(self, size: int) -> int:
        """Return the rows of a block, which ends where batches of `size` rows do."""
        return max(self._shuffle_rows // size, 1) * size

    def _piece_order(self, seed: int | None) -> np.ndarray:
        """Return the order of row groups, permuted by `seed`."""
        order = np.arange(len(self._pieces))
        return order if seed is None else np.random.default_rng(seed).permutation(order)

    def row_order(self, size: int, seed: int | None) -> np.ndarray:
        """Return all rows, permuted by `seed`: row groups, and the rows of each block."""
        starts = np.cumsum([0, *(piece.rows for piece in self._pieces)])
        groups = [np.arange(starts[i], starts[i + 1]) for i in self._piece_order(seed)]
        rows = np.concatenate(groups)
        if seed is None:
            return rows
        together = self._rows_of_block(size)
        blocks = (rows[at : at + together] for at in range(0, len(rows), together))
        return np.concatenate(
            [b[_order_in_block(len(b), seed, number)] for number, b in enumerate(blocks)]
        )

    def changes_rows(self) -> bool:
        """Return False, as rows are read as they are stored."""
        return False

    def _decode_row_blocks(self, order: np.ndarray, start: int, size: int) -> BlockGenerator:
        """Yield blocks of `size` rows from row `start` on, with the row groups in the order
        `order`.
        """
        if start >= self.rows:
            return
        inputs, y, weight = self._groups
        groups = {key: g for key, g in (inputs | {_Y: y, _WEIGHT: weight}).items() if g}
        left = self.rows - start
        block = RowBlock(groups, min(size, left))
        step = min(size, max(1, _READ_BYTES // self._row_bytes))
        with closing(self.decode(order, start, step)) as parts:
            for part in parts:
                at, count = 0, len(next(iter(part.values())))
                while at < count:
                    taken = min(count - at, block.size - block.rows)
                    block.append({name: array[at : at + taken] for name, array in part.items()})
                    at += taken
                    left -= taken
                    if block.rows == block.size and left:
                        yield block
                        block = RowBlock(groups, min(size, left))
        yield block

    def decode(
        self, order: np.ndarray, start: int, size: int
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """Yield {column: array} of up to `size` rows, from row `start` of the row groups
        `order`.
        """
        for i in order:
            piece = self._pieces[i]
            if start >= piece.rows:
                start -= piece.rows
                continue
            for columns in read_piece(piece, self._dataset.schema, self._names, size):
                count = len(next(iter(columns.values())))
                if start >= count:
                    start -= count
                    continue
                arrays = {
                    n: column_array(n, c.slice(start) if start else c) for n, c in columns.items()
                }
                start = 0
                yield arrays

    def describe(self) -> dict[str, Any]:
        """Return the columns, the count of rows, and a digest of the sizes and times of files."""
        schema = self._dataset.schema
        columns = [[name, str(schema.field(name).type)] for name in self._names]
        entries = {"kind": "arrow", "rows": self.rows, "columns": columns}
        files = getattr(self._dataset, "files", [])
        return entries | {"files": len(files), "digest": describe_files(files)}


def _batch_tuple(tables: dict[str, ColumnArrays]) -> tuple[Any, ...]:
    """Return tables by input, label and weight as (X,), (X, y) or (X, y, sample_weight)."""
    y, weight = tables.pop(_Y, None), tables.pop(_WEIGHT, None)
    X = tables.get("", tables)
    return (X, y, weight)[: 1 if y is weight else 2 if weight is None else 3]
