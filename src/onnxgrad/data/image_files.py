"""Image files: opening them upright in 8 bits, their sizes, and lists of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # modes of Pillow by number of channels
_ORIENTATION, _TURNED = 0x0112, 5  # tag of Exif, and its least value that swaps the sides


def pillow() -> Any:
    """Return the module `PIL.Image`; raise an `ImportError` that says how to install Pillow."""
    try:
        from PIL import Image
    except ImportError as e:
        raise not_installed("reading images", "pillow", "images") from e
    return Image


def is_image(path: Path) -> bool:
    """Return whether a path is a file with the suffix of an image, and not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def open_image(source: Any, mode: str | None = "RGB") -> Any:
    """Return an image of Pillow of 8 bits a value, turned upright as its Exif data state.

    Args:
        source: a path, an array (height, width[, channels]) of uint8, or an image of Pillow.
        mode: the mode of the result, such as "RGB" or "L"; None: the mode of the source.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: it cannot be read, or has values of 32 bits (16 bits are divided by 256).

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> og.data.open_image(np.zeros((2, 3), np.uint8)).size  # width and height
        (3, 2)
    """
    from_file = is_path(source)
    image = pillow()
    try:
        from PIL import ImageOps

        opened = image.open(source) if from_file else source
        opened = image.fromarray(opened) if isinstance(opened, np.ndarray) else opened
        try:
            upright = ImageOps.exif_transpose(_as_8_bit_image(opened))
            return upright if mode in (None, upright.mode) else upright.convert(mode)
        finally:
            if from_file:
                opened.close()
    except (OSError, SyntaxError, TypeError, ValueError) as e:  # by Pillow, for damaged files
        raise ValueError(f"cannot read the image {image_name(source)}: {e}") from e


def image_size(source: Any) -> tuple[int, int]:
    """Return (width, height) of what `open_image` returns, without decoding a file.

    Args:
        source: as of `open_image`.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: it cannot be read.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> og.data.image_size(np.zeros((2, 3), np.uint8))
        (3, 2)
    """
    if not is_path(source):
        return open_image(source, None).size
    try:
        with pillow().open(source) as opened:
            turned = opened.getexif().get(_ORIENTATION, 1) >= _TURNED
            return opened.size[::-1] if turned else opened.size
    except (OSError, SyntaxError, ValueError) as e:
        raise ValueError(f"cannot read the image {image_name(source)}: {e}") from e


def list_images(inputs: Any) -> list[tuple[str, Any]]:
    """Return (name, image) of a folder, sorted by name, of a file, or of a list of images.

    Args:
        inputs: a folder; an image as `open_image` takes it; or several images, also as one array
            (N, height, width, channels).

    Returns:
        For each image, a name and what `open_image` takes. The name is the name of the file without
        its suffix, or the number of the image.

    Raises:
        ValueError: there is no image.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> [name for name, image in og.data.list_images([np.zeros((2, 3), np.uint8), "a/cat.png"])]
        ['0', 'cat']
    """
    found = inputs
    if is_path(inputs):
        path = Path(inputs)
        found = sorted(filter(is_image, path.iterdir())) if path.is_dir() else [path]
    elif not isinstance(inputs, Iterable) or (isinstance(inputs, np.ndarray) and inputs.ndim < 4):
        found = [inputs]
    named = [(Path(x).stem if is_path(x) else str(i), x) for i, x in enumerate(found)]
    if not named:
        raise ValueError(f"there is no image in {inputs!r} ({' '.join(sorted(SUFFIXES))})")
    return named


def is_path(source: Any) -> bool:
    """Return whether an image or a sound is given by a path."""
    return isinstance(source, (str, os.PathLike))


def image_name(source: Any) -> str:
    """Return the words by which messages call an image."""
    if isinstance(source, np.ndarray):
        return f"of shape {source.shape}"
    return repr(str(source)) if is_path(source) else f"of type {type(source).__name__}"


def _as_8_bit_image(image: Any) -> Any:
    """Return an image in 8 bits a value; from 16 bits, Pillow would cut values above 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        exif = image.getexif()
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image.getexif().update(exif)  # it says how the image is turned
        return image
    if image.mode in ("I", "F"):
        raise ValueError(
            "it has 32 bits a value, of which the value of white is unknown: convert it to 8 bits"
        )
    return image
