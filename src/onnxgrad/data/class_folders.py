"""Folders of images: the files, and the classes that the names of folders say."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.class_numbers import ClassNames, first_class_names
from onnxgrad.data.image_files import PASS_IMAGES, is_image
from onnxgrad.errors import argument

_CLASSES = 100_000  # a folder named by a larger number is a date or similar, and no class
_PARTS = {  # names of folders that are data sets, not classes
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def read_classes(
    path: Path, classes: Sequence[Any] | None
) -> tuple[list[Path], np.ndarray, list[str]]:
    """Return (image paths, class indices, class names) of a folder with one sub-folder for each
    class.
    """
    folders = class_folders(path)
    if not folders:
        raise ValueError(
            f"{str(path)!r} holds no folders: put the images of each class into a folder with the "
            "name of the class"
        )
    if parts := data_set_folders(path):
        named = " and ".join(f"{str(part)!r}" for part in parts.values())
        raise ValueError(f"{str(path)!r} has the folders of several data sets: pass one of {named}")
    numbers, names = assign_class_indices(str(path), [folder.name for folder in folders], classes)
    found = [_images_in(folder) for folder in folders]
    if empty := [str(f) for f, files in zip(folders, found, strict=True) if not files]:
        text = f"there is no image in {', '.join(map(repr, empty))}: {PASS_IMAGES}"
        if len(empty) == len(folders):
            raise ValueError(text)
        warnings.warn(text, stacklevel=3)
    labels = np.repeat(np.array(numbers, np.int64), [len(files) for files in found])
    return [file for files in found for file in files], labels, names


def assign_class_indices(
    source: str, folders: list[str], classes: Sequence[Any] | None = None
) -> tuple[list[int], list[str]]:
    """Return (class index of each folder or label name, names of all classes)."""
    stated = [int(name) for name in folders] if all(map(str.isdecimal, folders)) else []
    if len({*stated}) < len(stated):
        raise ValueError(
            f"{source!r}: two of {', '.join(folders)} are the same class number: rename one"
        )
    if classes is not None:
        known = ClassNames(classes)
        order = known.texts
        if {*folders} <= {*known.numbers}:
            return [known.numbers[name] for name in folders], order
        if stated and max(stated) < len(order):
            return stated, order
        other = next(name for name in folders if name not in order)
        raise ValueError(
            f"the class {other!r} of {source!r} is none of the classes {first_class_names(order)}: "
            "rename it, or pass all classes in the order of the model's output, as "
            f"{argument('classes', folders)}"
        )
    if not stated:
        return list(range(len(folders))), folders
    if max(stated) > _CLASSES:
        raise ValueError(
            f"{source!r}: the class {str(max(stated))!r} is read as the index of a class, and "
            f"there are at most {_CLASSES} classes: if it is a name, pass "
            f"{argument('classes', folders)}"
        )
    return stated, list(map(str, range(max(stated) + 1)))


def class_folders(path: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden, sorted by name."""
    if not path.is_dir():
        raise ValueError(
            f"{str(path)!r} is no folder: pass a folder that holds a folder for each class"
        )
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def data_set_folders(path: Path) -> dict[str, Path]:
    """Return `{"train", "validation" or "test": folder}` of a folder that holds data sets.

    The result is empty for a folder whose folders are classes.
    """
    parts = {_PARTS.get(folder.name.lower(), ""): folder for folder in class_folders(path)}
    whole = (
        "train" in parts and "" not in parts and any(map(_images_in, class_folders(parts["train"])))
    )
    return parts if whole else {}


def _images_in(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders below it, sorted by path."""
    return sorted(file for file in folder.rglob("*") if is_image(file))


def find_images(path: Path) -> list[Path]:
    """Return the path of an image, or all images in a folder and the folders below it."""
    files = [path] if is_image(path) else _images_in(path)
    if not files:
        raise ValueError(f"there is no image in {str(path)!r}: {PASS_IMAGES}")
    return files
