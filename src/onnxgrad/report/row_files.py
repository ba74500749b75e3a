"""The file of a row, for readers of files: its name, and a small picture of an image."""

from __future__ import annotations

import base64
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxgrad.data.image_files import is_image, is_path, open_image

EDGE = 64  # pixels of a picture, on its longer side
_LOSSLESS = 32 * 32  # pixels, up to which PNG is as small as JPEG


def describe_row(reader: Any, row: int) -> dict[str, str]:
    """Return `file`, relative to the folder of the reader, and `picture`, a data URI.

    Empty for a reader without `files`; without `picture` if the file is no readable image.
    """
    files = getattr(reader, "files", None)
    if not isinstance(files, list) or not is_path(files[row]):
        return {}
    file, folder = Path(files[row]), Path(getattr(reader, "path", "."))
    name = file.relative_to(folder) if file.is_relative_to(folder) else file
    shown = {"file": name.as_posix()}
    if is_image(file):
        with suppress(OSError, ValueError, ImportError):  # the name says which one it is
            shown["picture"] = picture(file)
    return shown


def picture(file: str | os.PathLike) -> str:
    """Return a small copy of an image as a data URI."""
    image = open_image(file)
    image.thumbnail((EDGE, EDGE))
    kind = "png" if image.width * image.height <= _LOSSLESS else "jpeg"
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 80} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
