"""Image files, opened upright in 8 bits, lists of image files, and COCO files that list images."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnxgrad.errors import not_installed

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())
PASS_IMAGES = f"pass files with one of the suffixes {' '.join(sorted(SUFFIXES))}"  # in messages
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # modes of Pillow by number of channels
_ORIENTATION, _TURNED = 0x0112, 5  # Exif tag; values of at least 5 swap width and height


def load_pillow() -> Any:
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
    """Return an image as a `PIL.Image` with 8 bits for each channel, turned upright by its Exif
    orientation.

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
    image = load_pillow()
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
    except (OSError, SyntaxError, TypeError, ValueError) as e:  # raised by Pillow for damaged files
        raise ValueError(f"cannot read the image {image_name(source)}: {e}") from e


def image_size(source: Any) -> tuple[int, int]:
    """Return (width, height) of an image after turning it upright, without decoding a file.

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
        with load_pillow().open(source) as opened:
            turned = opened.getexif().get(_ORIENTATION, 1) >= _TURNED
            return opened.size[::-1] if turned else opened.size
    except (OSError, SyntaxError, ValueError) as e:
        raise ValueError(f"cannot read the image {image_name(source)}: {e}") from e


def list_images(inputs: Any) -> list[tuple[str, Any]]:
    """Return a list of (name, image) for the images in a folder, for one image, or for a list of
    images.

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
        raise ValueError(f"there is no image in {inputs!r}: {PASS_IMAGES}")
    return named


def is_path(source: Any) -> bool:
    """Return whether an image or a sound is given by a path."""
    return isinstance(source, (str, os.PathLike))


def image_name(source: Any) -> str:
    """Return the name of an image in messages: the quoted path, or the shape or type of an image in
    memory.
    """
    if isinstance(source, np.ndarray):
        return f"of shape {source.shape}"
    return repr(str(source)) if is_path(source) else f"of type {type(source).__name__}"


def _as_8_bit_image(image: Any) -> Any:
    """Return an image with 8 bits for each channel; Pillow itself would cut values of 16 bits at
    255.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        exif = image.getexif()
        image = load_pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image.getexif().update(exif)  # Exif data hold the orientation
        return image
    if image.mode in ("I", "F"):
        raise ValueError(
            "it has values of 32 bits, and the value of white is unknown: convert it to 8 bits"
        )
    return image


# -- images in COCO files --------------------------------------------------------------------------


class CocoFile(NamedTuple):
    """The content of a COCO file, checked: every annotation names an image and a category of the
    file.

    - `files`, `sizes`: path, and (width, height), of each image by its id, in the file's order.
    - `categories`: names by id, in the order of the ids.
    - `annotations`: each with the words by which messages call it.
    """

    files: dict[Any, Path]
    sizes: dict[Any, tuple[int, int]]
    categories: dict[Any, str]
    annotations: list[tuple[str, dict[str, Any]]]


def read_coco(path: Path, folders: Sequence[Path]) -> CocoFile:
    """Return the content of a COCO file, whose images are looked for in `folders`.

    Raises:
        ValueError: the file is no COCO file, an image is missing, or an annotation names an image
            or a category that the file does not list.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ordered = sorted(content["categories"], key=lambda category: category["id"])
        categories = {category["id"]: str(category["name"]) for category in ordered}
        images = {image["id"]: image for image in content["images"]}
        sizes = {i: (image["width"], image["height"]) for i, image in images.items()}
        names = {i: image["file_name"] for i, image in images.items()}
        where = f"{str(path)!r}, annotation"
        listed = enumerate(content["annotations"])
        annotations = [(f"{where} {row} (id {entry.get('id')})", entry) for row, entry in listed]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f"{str(path)!r} is no COCO file with images, annotations and categories: "
            f"{type(e).__name__}: {e}"
        ) from e
    files = {}
    for i, name in names.items():
        found = [folder / name for folder in folders if (folder / name).is_file()]
        if not found:
            places = " or ".join(repr(str(folder)) for folder in folders)
            raise ValueError(
                f"{str(path)!r}: the image {name!r} is not in {places}: copy it there, or correct "
                "its file_name"
            )
        files[i] = found[0]
    for where, annotation in annotations:
        for kind, known in (("image", images), ("category", categories)):
            if (named := annotation.get(f"{kind}_id")) not in known:
                raise ValueError(
                    f"{where}: no {kind} has the id {named!r}: correct the {kind}_id, or add the "
                    f"{kind}"
                )
    return CocoFile(files, sizes, categories, annotations)


def coco_image_ids(images: Iterable[Any]) -> dict[Path, Any]:
    """Return {path: COCO id} of images, from COCO files in the folders of the images or in the
    folders above.
    """
    folders = {Path(image).parent for image in images if is_path(image)}
    homes = folders | {folder.parent for folder in folders if folder.name == "images"}
    found: dict[Path, Any] = {}
    for file in (file for home in sorted(homes) for file in sorted(home.glob("*.json"))):
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))["images"]
            ids = {image["file_name"]: image["id"] for image in listed}
        except (KeyError, TypeError, ValueError):  # the JSON file is no COCO file
            continue
        for place in (file.parent, file.parent / "images"):
            found |= {place / name: number for name, number in ids.items()}
    return found
