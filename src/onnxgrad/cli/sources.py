"""DATA: a table in memory, Parquet files that are read while training, or a folder of images."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from onnxgrad.cli.data_options import InputOptions
from onnxgrad.cli.model_files import STDIN, folder_of, standard_input
from onnxgrad.data.arrays import DataError
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.image_files import SUFFIXES
from onnxgrad.data.images import ImageFolder
from onnxgrad.data.readers import Reader
from onnxgrad.data.tables import FileTable, read_table
from onnxgrad.errors import unknown
from onnxgrad.language.folders import is_folder, load_folder
from onnxgrad.language.records import LINES, TEXTS
from onnxgrad.language.texts import Texts, texts

_STREAMED = (".arrow", ".feather", ".ipc")
_PARQUET = (".parquet", ".pq")
_SEEN = 10_000  # files of a folder that say what it holds
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
                f"{self.name!r}: column {text!r} is text; write numbers, class indices for a "
                f"target, or leave it out with --ignore {text}"
            )

    def reader(self, columns: Any, y: list[str], weight: str | None) -> Reader:
        """Return what reads these columns."""
        return arrow_dataset(self.name, y=y or None, sample_weight=weight, columns=columns)


@dataclass(frozen=True)
class ImageSource:
    """A folder with a folder of images for each class."""

    name: str
    size: tuple[int, int] | None

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


def image_size(text: str | None) -> tuple[int, int] | None:
    """Return height and width from the value of `--image-size`.

    Raises:
        ValueError: it is neither a number of pixels nor two of them.
    """
    if text is None:
        return None
    if not re.fullmatch(r"0*[1-9]\d*([x,]0*[1-9]\d*)?", text.strip()):
        raise ValueError(
            f"--image-size {text!r} is neither a number of pixels, as 224, nor a height and a "
            "width, as 48x320"
        )
    numbers = [int(number) for number in re.split("[x,]", text)]
    return numbers[0], numbers[-1]


@dataclass(frozen=True)
class TextSource:
    """A file of texts, and how `texts` reads it for the model."""

    name: str
    reader: Texts


Source = FileTable | ArrowSource | ImageSource | TextSource


def open_data(path: str, options: InputOptions) -> Source:
    """Return the data at `path`; `--ignore` and `--drop-missing` are applied to tables."""
    suffix = Path(path).suffix.lower()
    size = image_size(options.image_size)
    if size is not None and (path == STDIN or not os.path.isdir(path)):
        raise ValueError(f"--image-size is of a folder of images, and {path!r} is none")
    if path != STDIN and _holds_texts(path, options):
        return TextSource(path, _read_texts(path, options))
    if path != STDIN and os.path.isdir(path):
        if _holds_images(Path(path)):
            return ImageSource(path, size)
    elif suffix not in _STREAMED and not (suffix in _PARQUET and _is_large(path)):
        opened = standard_input("CSV file") if path == STDIN else path
        return read_table(opened, options.ignore, options.drop_missing)
    if size is not None:
        raise ValueError(f"--image-size is of a folder of images, and {path!r} holds tables")
    types = arrow_dataset(path).describe()["columns"]
    for name in options.ignore:
        if name not in types:
            raise unknown("column (--ignore)", name, types)
    if options.drop_missing:
        raise DataError(
            f"{path!r} is read while training, where --drop-missing cannot count rows: leave them "
            "out of the files"
        )
    return ArrowSource(path, {n: t for n, t in types.items() if n not in options.ignore})


def _holds_texts(path: str, options: Any) -> bool:
    """Return whether a file holds texts for a language model."""
    suffix = Path(path).suffix.lower()
    if suffix in _PARQUET and folder_of(options.model) is not None and os.path.isfile(path):
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


def _holds_images(folder: Path) -> bool:
    """Return whether a folder holds images rather than tables, by the first file that tells."""
    files = (name for _, _, names in os.walk(folder) for name in sorted(names))
    for name in islice(files, _SEEN):
        suffix = Path(name).suffix.lower()
        if suffix in SUFFIXES:
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
