"""Images in files, as all readers of images open them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.errors import not_installed

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
_ORIENTATION, _TURNED = 0x0112, 5  # in Exif, and from which number on sides are swapped


def pillow() -> Any:
    """Return the module `PIL.Image`."""
    try:
        from PIL import Image
    except ImportError as e:
        raise not_installed("reading images", "pillow", "images") from e
    return Image


def is_image(path: Path) -> bool:
    """Return whether a file is an image by its suffix, and not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def open_image(source: Any, mode: str | None = "RGB") -> Any:
    """Return an image of Pillow, upright as its Exif states, of 8 bits a value.

    Args:
        source: a path, an array (height, width[, channels]) of uint8, or an image of Pillow.
        mode: to which it is converted, such as "RGB" or "L"; None: it stays as it is.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: it cannot be read, or has values of 32 bits; those of 16 are divided by 256.

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
            upright = ImageOps.exif_transpose(_eight_bits(opened))
            return upright if mode in (None, upright.mode) else upright.convert(mode)
        finally:
            if from_file:
                opened.close()
    except (OSError, SyntaxError, TypeError, ValueError) as e:  # of Pillow, for damaged files
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
    """Return the images of a folder, in the order of their names, of a file or of a list.

    Args:
        inputs: a folder; or an image as `open_image` takes it; or several, also as one array (N,
            height, width, channels).

    Returns:
        A name and what `open_image` takes, for each: the name of a file without its suffix, the
        number of another image.

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
    """Return whether an image is given by its path."""
    return isinstance(source, (str, os.PathLike))


def image_name(source: Any) -> str:
    """Return how a message calls an image."""
    if isinstance(source, np.ndarray):
        return f"of shape {source.shape}"
    return repr(str(source)) if is_path(source) else f"of type {type(source).__name__}"


def _eight_bits(image: Any) -> Any:
    """Return an image of 16 bits a value in 8 bits: Pillow would cut values above 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        exif = image.getexif()
        image = pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image.getexif().update(exif)  # the rotation
        return image
    if image.mode in ("I", "F"):
        raise ValueError(
            "it has more than 8 bits a value, 32 bits, and what is white is unknown: convert it"
        )
    return image
