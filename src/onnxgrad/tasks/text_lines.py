"""Images of lines of text, their texts, and the characters that a model knows."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.data.image_files import image_name, is_path
from onnxgrad.tasks.base import with_notes
from onnxgrad.tasks.image_values import as_normalization

_BLANKS = ("", "blank", "<blank>", "[blank]")


class LineForm:
    """How a model takes images of lines; without a `width`, each has its own.

    Args:
        shape: the declared shape of its input.
        options: has the arguments of `TextRecognition` as attributes.

    Raises:
        ValueError: options that contradict the shape.
    """

    def __init__(self, shape: list[int | None], options: Any) -> None:
        chosen = as_normalization(options.normalize) or options
        self.mean, self.std = chosen.mean, chosen.std
        self.colors = options.colors or ("L" if shape[1] == 1 else "BGR")
        if self.colors not in ("BGR", "RGB", "L"):
            raise ValueError(f"colors={self.colors!r} must be 'BGR', 'RGB' or 'L'")
        self.height, self.width = options.height or shape[2] or 48, options.width or shape[3]
        given = {"colors": self.channels, "height": self.height, "width": self.width}
        for (name, value), declared in zip(given.items(), shape[1:], strict=True):
            if declared not in (None, value):
                raise ValueError(f"the model takes images {shape}, which {name}= contradicts")

    @property
    def channels(self) -> int:
        """The number of channels."""
        return 1 if self.colors == "L" else 3

    def widths(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the widths of an image of this size (width, height), resized, and of its array."""
        width = max(1, -(-self.height * size[0] // size[1]))
        if self.width is None:
            return width, max(width, self.height)
        return min(width, self.width), self.width

    def array(self, image: Any) -> np.ndarray:
        """Return an image of Pillow as float32 (channels, height, width), padded with zeros."""
        if image.has_transparency_data:
            from PIL import Image

            paper = Image.new("RGBA", image.size, "white")
            paper.alpha_composite(image.convert("RGBA"))
            image = paper
        width, padded = self.widths(image.size)
        image = image.convert("L" if self.colors == "L" else "RGB")
        image = og.data.resize((self.height, width))(image, None)
        values = np.asarray(image, np.float32).reshape(self.height, width, self.channels) / 255
        values = values[..., ::-1] if self.colors == "BGR" else values
        mean, std = (np.broadcast_to(v, self.channels).tolist() for v in (self.mean, self.std))
        values = np.asarray(og.data.normalize(mean, std)(values, None))
        return np.pad(np.moveaxis(values, -1, 0), [(0, 0), (0, 0), (0, padded - width)])


class Lines(Sequence[np.ndarray]):
    """Arrays of images, which are read when they are needed.

    Attributes:
        sources: what `og.data.open_image` takes.
        shapes: of the arrays.
        widths: of the texts in them, of which a square is the least.
    """

    def __init__(self, sources: Sequence[Any], form: LineForm) -> None:
        self.sources, self.form = sources, form
        both = [form.widths(og.data.image_size(source)) for source in sources]
        self.shapes = [(form.channels, form.height, padded) for _, padded in both]
        self.widths = [min(max(width, form.height), padded) for width, padded in both]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, i: Any) -> Any:
        return self.form.array(og.data.open_image(self.sources[i], None))


def lines_of(path: str | os.PathLike) -> list[str]:
    """Return the lines of a text file, with the spaces at their ends."""
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def rows_in(data: Any) -> list[tuple[Any, str]]:
    """Return images and their texts: see `TextRecognition`.

    Raises:
        ValueError: a file without image or text, or a text of several lines.
    """
    if not is_path(data):
        rows = [(image, text) for image, text in data]
    elif (path := Path(data)).is_dir():
        files = {image: image.with_suffix(".txt") for _, image in og.data.list_images(path)}
        if bare := next((image for image, file in files.items() if not file.is_file()), None):
            raise ValueError(f"{str(bare)!r} has no text beside it, {files[bare].name!r}")
        rows = [(image, "\n".join(lines_of(file))) for image, file in files.items()]
        texts = {*files.values()}
        if alone := sorted({*path.glob("*.txt")} - texts):
            raise ValueError(
                f"{str(alone[0])!r} has no image beside it: if it lists images, pass it as the data"
            )
    else:
        rows = [(path.parent / name, text) for name, text in _read_list(path)]
    if not rows:
        raise ValueError(f"{data!r} has no rows")
    for image, text in rows:
        if is_path(image) and not Path(image).is_file():
            raise ValueError(f"there is no file {str(image)!r}, which {str(data)!r} lists")
        if "\n" in text:
            raise ValueError(f"the text of {image_name(image)} has several lines: cut the image")
    return rows


def _read_list(path: Path) -> list[tuple[str, str]]:
    """Return the names and texts of a CSV or label file."""
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if not {"file", "text"} <= {*(table.fieldnames or ())}:
                raise ValueError(
                    f"{str(path)!r} has the columns {table.fieldnames}, not file, text"
                )
            return [(row["file"], row["text"]) for row in table]
    rows = [
        (number, *line.partition("\t")) for number, line in enumerate(lines_of(path), 1) if line
    ]
    if wrong := [number for number, _, tab, _ in rows if not tab]:
        raise ValueError(f"line {wrong[0]} of {str(path)!r} has no tab between path and text")
    return [(name, text) for _, name, _, text in rows]


def characters_in(dictionary: Any, stored: dict[str, str]) -> list[str]:
    """Return the characters of a file, a list or the metadata of a model."""
    if dictionary is not None:
        return lines_of(dictionary) if is_path(dictionary) else list(dictionary)
    if "character" not in stored:
        raise ValueError("the model has no metadata 'character': pass dictionary=, a file or list")
    return stored["character"].removesuffix("\n").split("\n")


class Alphabet:
    """The text of each class, "" for the blank, of the output of a model.

    Blank and space are added where the dictionary lacks them.

    Args:
        characters: the dictionary.
        output: the layout of the scores, with the number of classes.
        blank: the class of the blank, None: as in the dictionary, or the first.
    """

    def __init__(self, characters: list[str], output: Any, blank: int | None) -> None:
        classes, count = [*characters], output.classes
        self.classes_first = output.axes[2] < output.axes[1]
        whole = count == len(characters)
        marked = [i for i, c in enumerate(classes) if c in _BLANKS]
        if blank is None and whole and not marked:
            raise ValueError(f"none of the {count} characters is the blank: say which with blank=")
        if blank is None:
            blank = marked[0] if whole else 0
        if not -count <= blank < count:
            raise ValueError(f"blank={blank}, and the model has {count} classes")
        classes += [" "] * (count - len(classes) - 1)
        classes[blank % count : blank % count + whole] = [""]
        self.classes, self.blank = classes, blank % count

    def extend(self, model: onnx.ModelProto, added: list[str], seed: int) -> onnx.ModelProto:
        """Return a model with units for more characters, and the dictionary in its metadata."""
        n = len(self.classes)
        at = n - (self.classes[-1] in ("", " "))  # these stay the last
        self.classes[at:at] = added
        self.blank += len(added) * (self.blank >= at)
        if added:
            keep = [*range(at), *[None] * len(added), *range(at, n)]
            model = og.replace_head(model, len(self.classes), keep=keep, seed=seed)
        characters = [c for i, c in enumerate(self.classes) if i != self.blank]
        if not self.blank and characters[-1:] == [" "]:
            characters.pop()  # RapidOCR adds it
        blank = str(self.blank) if self.blank else None
        return with_notes(model, {"character": "\n".join(characters), "blank": blank})

    def text(self, labels: Iterable[int]) -> str:
        """Return the text of classes."""
        return "".join(self.classes[i] for i in labels)

    def read(self, prediction: np.ndarray, label: np.ndarray) -> tuple[list[str], list[str]]:
        """Return the texts of scores, (N, T, C) or (N, C, T), and of labels (N, 1 + S)."""
        if not np.isfinite(prediction).all():
            raise ValueError("the predictions are not finite")
        if len(prediction) != len(label):  # the rows of (T, N, C) that states no shape
            prediction = np.swapaxes(prediction, 0, 1)
        scores = np.swapaxes(prediction, 1, 2) if self.classes_first else prediction
        pairs = zip(scores, label[:, 0], strict=True)
        found = [og.language.ctc_decode(row[:steps], self.blank)[0] for row, steps in pairs]
        return [*map(self.text, found)], [self.text(own[own >= 0]) for own in label[:, 1:]]
