"""Images, categories and annotations in JSON files of COCO."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onnxgrad.data.image_files import is_path


class CocoFile(NamedTuple):
    """A COCO file; every annotation names an image and a category of it.

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
    """Return the ids of image files, from COCO files beside the images or their folder."""
    folders = {Path(image).parent for image in images if is_path(image)}
    homes = folders | {folder.parent for folder in folders if folder.name == "images"}
    found: dict[Path, Any] = {}
    for file in (file for home in sorted(homes) for file in sorted(home.glob("*.json"))):
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))["images"]
            ids = {image["file_name"]: image["id"] for image in listed}
        except (KeyError, TypeError, ValueError):  # another kind of file
            continue
        for place in (file.parent, file.parent / "images"):
            found |= {place / name: number for name, number in ids.items()}
    return found
