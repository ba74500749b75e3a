"""Pieces of pyarrow datasets: row groups of Parquet files, and whole files of other formats."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from onnxgrad.data.arrays import DataError

_BUFFER_BYTES = 1 << 16  # bytes of a column that are read at a time

Columns = dict[str, Any]  # arrays of pyarrow by name


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file, or a whole file (`group` is None), with its count of rows."""

    fragment: Any
    group: int | None
    rows: int


def list_pieces(
    dataset: Any, selected: bool, names: Sequence[str]
) -> Generator[RowGroup, None, None]:
    """Yield the Parquet row groups, or whole files of other formats, of a dataset that have rows.

    Where row groups may have been `selected`, the fragments keep the footers of their files in
    memory, which are large where columns are many.

    Raises:
        ValueError: a file cannot be read, or lacks one of the columns `names`.
    """
    import pyarrow as pa
    from pyarrow import dataset as dataset_module

    try:
        fragments = dataset.get_fragments()
    except ValueError as e:
        raise ValueError(
            "only a dataset of files can be read while training: write the filtered or joined "
            f"dataset to a Parquet file first: {e}"
        ) from None
    for fragment in fragments:
        try:
            counts, columns = _row_groups(fragment, selected)
        except (OSError, pa.ArrowException) as e:
            raise _unreadable_file_error(fragment, e) from e
        partitions = dataset_module.get_partition_keys(fragment.partition_expression)
        lacking = [n for n in names if n not in (*columns, *partitions)]
        if lacking and any(rows for _, rows in counts):
            file = getattr(fragment, "path", "a part")
            raise DataError(
                f"{file!r} has no column {lacking[0]!r}, which other files of the data have: all "
                "files need the same columns"
            )
        yield from (RowGroup(fragment, number, rows) for number, rows in counts if rows)


def _row_groups(fragment: Any, selected: bool) -> tuple[list[tuple[int | None, int]], list[str]]:
    """Return (index, count of rows) of each row group of a file, and the column names."""
    import pyarrow.parquet as pq

    if not hasattr(fragment, "split_by_row_group"):
        return [(None, fragment.count_rows())], fragment.physical_schema.names
    if selected:
        groups = [(group.id, group.num_rows) for group in fragment.row_groups]
        return groups, fragment.physical_schema.names
    with fragment.open() as file:
        footer = pq.ParquetFile(file).metadata
        groups = [(i, footer.row_group(i).num_rows) for i in range(footer.num_row_groups)]
        return groups, footer.schema.to_arrow_schema().names


def read_piece(
    piece: RowGroup, schema: Any, names: Sequence[str], size: int
) -> Generator[Columns, None, None]:
    """Yield the columns of a row group or a whole file, up to `size` rows at a time.

    Columns that the file lacks are null; the keys of its partition are columns.
    """
    import pyarrow as pa

    batches = _whole_file_batches if piece.group is None else _row_group_batches
    try:
        with closing(batches(piece, schema, list(names), size)) as parts:
            yield from parts
    except (OSError, pa.ArrowException) as e:
        raise _unreadable_file_error(piece.fragment, e) from e


def _whole_file_batches(
    piece: RowGroup, schema: Any, names: list[str], size: int
) -> Generator[Columns, None, None]:
    """Yield the columns of a whole file, up to `size` rows at a time."""
    options = {"batch_size": size, "use_threads": False, "batch_readahead": 1}
    for batch in piece.fragment.to_batches(schema=schema, columns=names, **options):
        yield {name: batch.column(name) for name in names}


def _row_group_batches(
    piece: RowGroup, schema: Any, names: list[str], size: int
) -> Generator[Columns, None, None]:
    """Yield the columns of a row group, up to `size` rows at a time.

    The row group is never in memory as a whole: the scanner of a dataset would decode all of it
    before its first rows.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    keys = ds.get_partition_keys(piece.fragment.partition_expression)
    kinds = {name: schema.field(name).type for name in names}
    with piece.fragment.open() as file:
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        stored = set(parquet.schema_arrow.names).difference(keys).intersection(names)
        for batch in parquet.iter_batches(
            size, row_groups=[piece.group], columns=[*stored], use_threads=False
        ):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for name, kind in kinds.items():
                if name not in stored:
                    value = pa.scalar(keys.get(name), None if name in keys else kind)
                    columns[name] = pa.repeat(value, batch.num_rows)
                if columns[name].type != kind:
                    columns[name] = columns[name].cast(kind)
            yield {name: columns[name] for name in names}


def _unreadable_file_error(fragment: Any, error: Exception) -> DataError:
    """Return the error for a file of a dataset that pyarrow cannot read."""
    path = getattr(fragment, "path", "the data")
    return DataError(f"cannot read {path!r}: {str(error).splitlines()[0]}")
