"""Folders of images: the images, and the classes that the names of folders say."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.class_numbers import ClassNames, first_names
from onnxgrad.data.image_files import SUFFIXES, is_image
from onnxgrad.errors import argument

_CLASSES = 100_000  # a folder of a larger number is a date or the like, and no class
_PARTS = {  # folders of data sets, rather than of classes
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def read_classes(
    path: Path, classes: Sequence[Any] | None
) -> tuple[list[Path], np.ndarray, list[str]]:
    """Return the images in the sub-folders of a folder, their labels, and the names of classes."""
    folders = class_folders(path)
    if not folders:
        raise ValueError(f"{str(path)!r} has no folder: it takes one for each class")
    if parts := parts_of(path):
        named = " and ".join(f"{str(part)!r}" for part in parts.values())
        raise ValueError(f"{str(path)!r} has the folders of several data sets: name one of {named}")
    numbers, names = number_classes(str(path), [folder.name for folder in folders], classes)
    found = [_images_in(folder) for folder in folders]
    if empty := [str(f) for f, files in zip(folders, found, strict=True) if not files]:
        text = f"there is no image in {', '.join(map(repr, empty))} ({' '.join(sorted(SUFFIXES))})"
        if len(empty) == len(folders):
            raise ValueError(text)
        warnings.warn(text, stacklevel=3)
    labels = np.repeat(np.array(numbers, np.int64), [len(files) for files in found])
    return [file for files in found for file in files], labels, names


def number_classes(
    source: str, folders: list[str], classes: Sequence[Any] | None = None
) -> tuple[list[int], list[str]]:
    """Return the number of the class of each folder or label, and the names of all classes."""
    own = [int(name) for name in folders] if all(map(str.isdecimal, folders)) else []
    if len({*own}) < len(own):
        raise ValueError(f"{source!r}: two classes are the same number: {', '.join(folders)}")
    if classes is not None:
        known = ClassNames(classes)
        order = known.texts
        if {*folders} <= {*known.numbers}:
            return [known.numbers[name] for name in folders], order
        if own and max(own) < len(order):
            return own, order
        other = next(name for name in folders if name not in order)
        raise ValueError(
            f"the class {other!r} of {source!r} is not one of the classes {first_names(order)}: "
            "rename it, or name all in the order of the model's output, as "
            f"{argument('classes', folders)}"
        )
    if not own:
        return list(range(len(folders))), folders
    if max(own) > _CLASSES:
        raise ValueError(
            f"{source!r}: the class {str(max(own))!r} is a whole number, and so the number of "
            f"a class: if it is a name, say so with {argument('classes', folders)}"
        )
    return own, list(map(str, range(max(own) + 1)))


def class_folders(path: Path) -> list[Path]:
    """Return the folders in a folder by name, without hidden ones."""
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is no folder")
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def parts_of(path: Path) -> dict[str, Path]:
    """Return the folders "train", "validation" and "test" of a folder that holds such data sets.

    Empty for a folder whose folders are classes.
    """
    parts = {_PARTS.get(folder.name.lower(), ""): folder for folder in class_folders(path)}
    whole = (
        "train" in parts and "" not in parts and any(map(_images_in, class_folders(parts["train"])))
    )
    return parts if whole else {}


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if is_image(file))


def below(path: Path) -> list[Path]:
    """Return an image, or all in a folder and those below it."""
    files = [path] if is_image(path) else _images_in(path)
    if not files:
        raise ValueError(f"there is no image in {str(path)!r} ({' '.join(sorted(SUFFIXES))})")
    return files
