"""The kind of DATA: a table, images or texts; and which options have an effect on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnxgrad.cli.data_options import IMAGES, TABLES, TEXTS as OF_TEXTS, InputOptions
from onnxgrad.cli.model_files import STDIN, folder_of
from onnxgrad.cli.options import Described
from onnxgrad.data.arrays import DataError
from onnxgrad.language.records import LINES, TEXTS
from onnxgrad.tasks.images import holds_images
from onnxgrad.tasks.tables import PARQUET

NO_PROMPTS = "`onnxgrad generate` goes on with prompts"


def data_kind(path: str, options: InputOptions) -> str:
    """Return the kind of the data at `path`: tables, images or texts.

    Raises:
        ValueError: a folder with neither images nor tables; or texts where none are read.
    """
    if path == STDIN:
        return TABLES
    if not _holds_texts(path, options):
        return IMAGES if holds_images(Path(path)) else TABLES
    if not hasattr(options, "max_length"):
        raise DataError(f"{path!r} holds texts: {NO_PROMPTS}")
    return OF_TEXTS


def check_data_options(options: InputOptions, kind: str) -> None:
    """Raise `ValueError` if an option has no effect on data of this kind."""
    for name, each in Described.fields_of(type(options)).items():
        if each.data and kind not in each.data and each.is_set(options, name):
            raise ValueError(
                f"{each.flag} has no effect on {kind}, which {options.data!r} holds, but on "
                f"{' and '.join(each.data)}: leave it out"
            )


def _holds_texts(path: str, options: Any) -> bool:
    """Return whether a file holds texts for a language model."""
    suffix = Path(path).suffix.lower()
    if suffix in PARQUET and folder_of(options.model) is not None and os.path.isfile(path):
        from pyarrow import parquet

        return bool({"text", "prompt", "messages"} & {*parquet.read_schema(path).names})
    return suffix in (*LINES, *TEXTS)
