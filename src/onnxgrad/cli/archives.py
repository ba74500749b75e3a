"""Limits on data files that are much larger once they are decompressed."""

from __future__ import annotations

import os
import zipfile
from typing import BinaryIO

from onnxgrad.limits import check_limit

_RATIO = 10  # expanded size divided by file size, above which the limit is checked


def check_expansion(file: BinaryIO, suffix: str, error: type[Exception]) -> None:
    """Raise `error` if a compressed file expands to more than the limit `table_bytes`.

    A file that expands less than tenfold passes, however large it is.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if suffix == ".npz" and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            expanded = sum(entry.file_size for entry in archive.infolist())
    elif suffix == ".parquet":
        from pyarrow import parquet

        metadata = parquet.ParquetFile(file).metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        columns = (group.column(i) for group in groups for i in range(group.num_columns))
        expanded = sum(max(c.total_uncompressed_size, 8 * c.num_values) for c in columns)
    else:
        expanded = 0
    file.seek(0)
    if expanded > _RATIO * size:
        check_limit("table_bytes", expanded, "expands to too many bytes", error)
