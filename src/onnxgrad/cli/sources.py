"""DATA: a table in memory, Parquet files that are read while training, or a folder of images."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxgrad.cli.data_options import IMAGES, TABLES, TEXTS as OF_TEXTS, InputOptions
from onnxgrad.cli.image_source import PARQUET, STREAMED, ImageSource, holds_images
from onnxgrad.cli.model_files import STDIN, folder_of, standard_input
from onnxgrad.cli.options import Described
from onnxgrad.data.arrays import DataError
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.readers import Reader
from onnxgrad.data.tables import FileTable, read_table
from onnxgrad.errors import unknown
from onnxgrad.language.folders import is_folder, load_folder
from onnxgrad.language.records import LINES, TEXTS
from onnxgrad.language.text_readers import Texts, texts

_IN_MEMORY = 1 << 30  # bytes of a Parquet file that is read as a whole


@contextmanager
def begin_errors(source: Source) -> Iterator[None]:
    """Begin the errors of the block with the name of the data."""
    try:
        yield
    except ValueError as e:
        if repr(source.name) in str(e):
            raise
        raise DataError(f"{source.name!r}: {e}") from e


@dataclass(frozen=True)
class ArrowSource:
    """Parquet or Arrow files; `types` are those of the columns."""

    name: str
    types: dict[str, str]

    @property
    def lists(self) -> list[str]:
        """The columns that hold an array for each row."""
        return [name for name, kind in self.types.items() if "list" in kind or "tensor" in kind]

    def check_numbers(self, names: Collection[str]) -> None:
        """Raise `DataError` if one of these columns is text."""
        if text := next((n for n in names if "string" in self.types[n]), None):
            raise DataError(
                f"{self.name!r}: column {text!r} is text; write numbers, name the classes of a "
                f"target with --classes, or leave it out with --ignore {text}"
            )

    def reader(self, columns: Any, y: list[str], weight: str | None) -> Reader:
        """Return what reads these columns."""
        return arrow_dataset(self.name, y=y or None, sample_weight=weight, columns=columns)


@dataclass(frozen=True)
class TextSource:
    """A file of texts, and how `texts` reads it for the model."""

    name: str
    reader: Texts


Source = FileTable | ArrowSource | ImageSource | TextSource


def open_data(path: str, options: InputOptions, proto: ModelProto) -> Source:
    """Return the data at `path`; `--ignore` and `--drop-missing` are applied to tables.

    Raises:
        ValueError: it cannot be read, or an option has no effect on data of its kind.
    """
    kind = _kind(path, options)
    _check_kind(path, kind, options)
    if kind == OF_TEXTS:
        return TextSource(path, _read_texts(path, options))
    if kind == IMAGES:
        return ImageSource.of(path, options, proto)
    suffix = Path(path).suffix.lower()
    streamed = path != STDIN and (os.path.isdir(path) or suffix in STREAMED)
    if not streamed and not (suffix in PARQUET and _is_large(path)):
        opened = standard_input("CSV file") if path == STDIN else path
        return read_table(opened, options.ignore, options.drop_missing)
    types = dict(arrow_dataset(path).describe()["columns"])
    for name in options.ignore:
        if name not in types:
            raise unknown("column (--ignore)", name, types)
    if options.drop_missing:
        raise DataError(
            f"{path!r} is read while training, where --drop-missing cannot count rows: leave them "
            "out of the files"
        )
    return ArrowSource(path, {n: t for n, t in types.items() if n not in options.ignore})


def _kind(path: str, options: InputOptions) -> str:
    """Return what the data at `path` are."""
    if path != STDIN and _holds_texts(path, options):
        return OF_TEXTS
    return IMAGES if path != STDIN and holds_images(Path(path)) else TABLES


def _check_kind(path: str, kind: str, options: InputOptions) -> None:
    """Raise `ValueError` if an option has no effect on data of this kind."""
    for name, each in Described.fields_of(type(options)).items():
        if each.data and kind not in each.data and each.is_set(options, name):
            raise ValueError(
                f"{each.flag} has no effect on {kind}, which {path!r} holds, but on "
                f"{' and '.join(each.data)}: leave it out"
            )


def _holds_texts(path: str, options: Any) -> bool:
    """Return whether a file holds texts for a language model."""
    suffix = Path(path).suffix.lower()
    if suffix in PARQUET and folder_of(options.model) is not None and os.path.isfile(path):
        from pyarrow import parquet

        return bool({"text", "prompt", "messages"} & {*parquet.read_schema(path).names})
    return suffix in (*LINES, *TEXTS)


def _read_texts(path: str, options: Any) -> Texts:
    if not hasattr(options, "max_length"):
        raise DataError(f"{path!r} holds texts: `onnxgrad generate` goes on with prompts")
    source: Any = folder_of(options.model)
    if options.tokenizer is not None:
        source = options.tokenizer
    elif source is None and is_folder(home := Path(options.model).parent):
        source = load_folder(home, Path(options.model).name)
    if source is None:
        raise DataError(
            f"{path!r} holds texts: MODEL must be the folder of a language model, or --tokenizer "
            "name the folder of its tokenizer"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader has them as notes
        reader = texts(
            path,
            source,
            options.max_length,
            completion_only=options.completion_only,
            packing=options.packing,
        )
    assert isinstance(reader, Texts)  # a file is no stream
    return reader


def _is_large(path: str) -> bool:
    """Return whether the columns of a Parquet file need more memory than a table may take."""
    from pyarrow import ArrowException, parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ArrowException):
        return False  # `read_table` says what is wrong
    groups = (metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return sum(groups) > _IN_MEMORY
