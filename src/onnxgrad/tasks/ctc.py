"""Text recognition: lines of text in images, by models that are trained with CTC."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.data.image_files import image_name, is_path
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import (
    Task,
    as_proto,
    fine_tuning_rate,
    input_shapes,
    model_metadata,
    output_shapes,
    with_fields,
    with_metadata,
)
from onnxgrad.tasks.image_values import as_normalization

__all__ = ["TextRecognition"]

_BLANKS = ("", "blank", "<blank>", "[blank]")


class LineFormat:
    """The format of text-line images that a model takes: their shape, colors and values.

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
                raise ValueError(
                    f"the model takes images of shape {shape}, and {name}= is for another shape: "
                    f"leave out {name}="
                )

    @property
    def channels(self) -> int:
        """The count of channels of an image."""
        return 1 if self.colors == "L" else 3

    def resized_and_padded_width(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width of an image of `size`, (width, height), after resizing, and after
        padding.
        """
        width = max(1, -(-self.height * size[0] // size[1]))
        if self.width is None:
            return width, max(width, self.height)
        return min(width, self.width), self.width

    def image_array(self, image: Any) -> np.ndarray:
        """Return an image of Pillow as float32 (channels, height, width), padded with zeros."""
        if image.has_transparency_data:
            from PIL import Image

            paper = Image.new("RGBA", image.size, "white")
            paper.alpha_composite(image.convert("RGBA"))
            image = paper
        width, padded = self.resized_and_padded_width(image.size)
        image = image.convert("L" if self.colors == "L" else "RGB")
        image = og.data.resize((self.height, width))(image, None)
        values = np.asarray(image, np.float32).reshape(self.height, width, self.channels) / 255
        values = values[..., ::-1] if self.colors == "BGR" else values
        mean, std = (np.broadcast_to(v, self.channels).tolist() for v in (self.mean, self.std))
        values = np.asarray(og.data.normalize(mean, std)(values, None))
        return np.pad(np.moveaxis(values, -1, 0), [(0, 0), (0, 0), (0, padded - width)])


class LineImages(Sequence[np.ndarray]):
    """A sequence of images as arrays; each image file is read when its index is accessed.

    Attributes:
        sources: what `og.data.open_image` takes.
        shapes: of the arrays.
        widths: of the texts in them, of which a square is the least.
    """

    def __init__(self, sources: Sequence[Any], form: LineFormat) -> None:
        self.sources, self.form = sources, form
        both = [form.resized_and_padded_width(og.data.image_size(source)) for source in sources]
        self.shapes = [(form.channels, form.height, padded) for _, padded in both]
        self.widths = [min(max(width, form.height), padded) for width, padded in both]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, i: Any) -> Any:
        return self.form.image_array(og.data.open_image(self.sources[i], None))


def read_lines(path: str | os.PathLike) -> list[str]:
    """Return the lines of a text file, including spaces at the ends of lines."""
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def image_text_pairs(data: Any) -> list[tuple[Any, str]]:
    """Return pairs of an image and its text from a folder, a list file or a list of pairs.

    Raises:
        ValueError: a file without image or text, or a text of several lines.
    """
    if not is_path(data):
        rows = [(image, text) for image, text in data]
    elif (path := Path(data)).is_dir():
        files = {image: image.with_suffix(".txt") for _, image in og.data.list_images(path)}
        if bare := next((image for image, file in files.items() if not file.is_file()), None):
            raise ValueError(
                f"the image {str(bare)!r} has no file {files[bare].name!r} beside it: write its "
                "text there"
            )
        rows = [(image, "\n".join(read_lines(file))) for image, file in files.items()]
        texts = {*files.values()}
        if alone := sorted({*path.glob("*.txt")} - texts):
            raise ValueError(
                f"{str(alone[0])!r} has no image beside it: if it lists images, pass it as the data"
            )
    else:
        rows = [(path.parent / name, text) for name, text in _read_path_text_pairs(path)]
    if not rows:
        raise ValueError(f"{data!r} has no rows: pass images with their texts")
    for image, text in rows:
        if is_path(image) and not Path(image).is_file():
            raise ValueError(f"there is no file {str(image)!r}, which {str(data)!r} lists")
        if "\n" in text:
            raise ValueError(f"the text of {image_name(image)} has several lines: cut the image")
    return rows


def _read_path_text_pairs(path: Path) -> list[tuple[str, str]]:
    """Return pairs (path, text) from a CSV file, or from a file of lines `path<TAB>text`."""
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if not {"file", "text"} <= {*(table.fieldnames or ())}:
                raise ValueError(
                    f"{str(path)!r} must have the columns 'file' and 'text', not {table.fieldnames}"
                )
            return [(row["file"], row["text"]) for row in table]
    rows = [
        (number, *line.partition("\t")) for number, line in enumerate(read_lines(path), 1) if line
    ]
    if wrong := [number for number, _, tab, _ in rows if not tab]:
        raise ValueError(f"line {wrong[0]} of {str(path)!r} must be path, tab, text: insert a tab")
    return [(name, text) for _, name, _, text in rows]


def dictionary_characters(dictionary: Any, stored: dict[str, str]) -> list[str]:
    """Return the characters of `dictionary`, a file or a list; if None, of the model's metadata."""
    if dictionary is not None:
        return read_lines(dictionary) if is_path(dictionary) else list(dictionary)
    if "character" not in stored:
        raise ValueError("the model stores no characters (metadata 'character'): pass dictionary=")
    return stored["character"].removesuffix("\n").split("\n")


class Alphabet:
    """The character of each class of a model's output; the blank class of CTC has the text "".

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
            raise ValueError(
                f"none of the {count} characters is the blank of CTC: pass its index as blank="
            )
        if blank is None:
            blank = marked[0] if whole else 0
        if not -count <= blank < count:
            raise ValueError(f"blank={blank} must be the index of one of the {count} classes")
        classes += [" "] * (count - len(classes) - 1)
        classes[blank % count : blank % count + whole] = [""]
        self.classes, self.blank = classes, blank % count

    def add_units(self, model: onnx.ModelProto, added: list[str], seed: int) -> onnx.ModelProto:
        """Return a model with output units for `added` characters; its metadata list all
        characters.
        """
        n = len(self.classes)
        # if the last class is blank or space, it stays last
        at = n - (self.classes[-1] in ("", " "))
        self.classes[at:at] = added
        self.blank += len(added) * (self.blank >= at)
        if added:
            keep = [*range(at), *[None] * len(added), *range(at, n)]
            model = og.replace_head(model, len(self.classes), keep=keep, seed=seed)
        characters = [c for i, c in enumerate(self.classes) if i != self.blank]
        if not self.blank and characters[-1:] == [" "]:
            characters.pop()  # RapidOCR appends the space to the characters
        blank = str(self.blank) if self.blank else None
        return with_metadata(model, {"character": "\n".join(characters), "blank": blank})

    def to_text(self, labels: Iterable[int]) -> str:
        """Return the text whose characters have these class indices."""
        return "".join(self.classes[i] for i in labels)

    def read_texts(self, prediction: np.ndarray, label: np.ndarray) -> tuple[list[str], list[str]]:
        """Return the texts decoded from scores, and the texts of labels.

        Args:
            prediction: scores, (N, T, C) or (N, C, T).
            label: (N, 1 + S): the count of time steps, then class indices, filled up with -1.
        """
        if not np.isfinite(prediction).all():
            raise ValueError("no text can be read: the predictions hold NaN or infinity")
        if len(prediction) != len(label):  # the output is (T, N, C), and declares no shape
            prediction = np.swapaxes(prediction, 0, 1)
        scores = np.swapaxes(prediction, 1, 2) if self.classes_first else prediction
        pairs = zip(scores, label[:, 0], strict=True)
        found = [og.language.ctc_decode(row[:steps], self.blank)[0] for row, steps in pairs]
        return [*map(self.to_text, found)], [self.to_text(own[own >= 0]) for own in label[:, 1:]]


_BATCH = 32  # images of equal width in one call of the model


@with_fields
class TextRecognition(Task):
    """Text recognition with CTC: PaddleOCR's recognizers, CRNN and models like them.

    The model takes images of lines (N, channels, height, width) and returns scores, logarithms or
    probabilities of its classes, (N, T, C) in any order: the characters of a dictionary, and the
    blank. Images are resized to its height, and padded with zeros on the right to the widest of the
    batch, at least to a square. The loss and the metrics, "cer" and "wer", leave out the time steps
    of the padding.

    The rows of data are images and their texts: a label file of PaddleOCR, `path<TAB>text` in each
    line; a CSV file with the columns file and text; a folder of images with their texts, as `1.png`
    and `1.txt`; or a list of pairs (image, text). Paths are relative to the file.

    The dictionary may lack the blank; and with it the space, which then is the last class. It is
    written into the metadata of the model if it changes: `character`, a character in each line, as
    RapidOCR reads it, and `blank` unless that is 0.

    Args:
        model: model or path, with one input and one output.
        data: the rows to train on; None for a model that was trained.
        dictionary: file with a character in each line, or a list; None: as in the metadata.
        extend: whether the last layer gets new units for characters of `data` that the dictionary
            lacks; or a text with these characters. The old units keep their weights.
        blank: class of the blank, -1 for the last. None: by the metadata or dictionary, or else 0.
        height: of images for the model; None: as declared, or else 48, as of PP-OCRv3 and later.
        width: to which all images are padded, and wider ones squeezed; None: as declared, if it is.
        colors: "BGR", "RGB" or "L" for gray. None: "L" for one channel, "BGR" for three, as
            PaddleOCR reads them.
        mean, std: as of `og.data.normalize`, in the order of `colors`; a number is for all
            channels.
        normalize: instead of these, "imagenet" or "MEAN/STD", as "0.5/0.25".
        beam: how many prefixes `predict` keeps, see `ctc_decode`; None: the best path, as metrics.
        seed: of the weights of new characters.

    Raises:
        ImportError: Pillow or rapidfuzz is not installed.
        ValueError: a model, a dictionary or data that do not fit; the message names the file.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1,2,W] x) => (float[N,W,3] y)
        ...     <int64[1] one = {1}, float[2,3] w = {3, -1, -1, 3, -1, -1}> {
        ...     s = Squeeze(x, one)  t = Transpose <perm = [0, 2, 1]> (s)  y = MatMul(t, w) }''')
        >>> image = np.full((2, 9), 255, np.uint8)  # a gray one
        >>> image[:, 2:4] = 0
        >>> reading = og.tasks.ctc.TextRecognition(
        ...     model, [(image, "c")], dictionary=["a", "b"], extend=True)
        >>> reading.classes
        ['', 'a', 'b', 'c']
        >>> trainer = reading.trainer(learning_rate=0.1).fit(reading.data, epochs=30)
        >>> [(text, confidence)] = reading.predict(trainer, [image])
        >>> text
        'c'
    """

    remembered = ("height", "width", "colors", "mean", "std", "normalize")

    model: Any
    data: Any = None
    _: KW_ONLY
    dictionary: str | os.PathLike | Sequence[str] | None = None
    extend: bool | str = False
    blank: int | None = None
    height: int | None = None
    width: int | None = None
    colors: str | None = None
    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.5
    normalize: Any = None
    beam: int | None = None
    seed: int = 0
    batch_size = 8

    def __post_init__(self) -> None:
        self.model, extend = as_proto(self.model), self.extend
        stored = model_metadata(self.model)
        characters = dictionary_characters(self.dictionary, stored)
        shape = _input_shape(self.model)
        self._format = LineFormat(shape, self)
        self._output = _CtcOutput(self.model, shape, self._format, len(characters))
        blank = int(stored["blank"]) if self.blank is None and "blank" in stored else self.blank
        self._alphabet = Alphabet(characters, self._output, blank)
        rows = [] if self.data is None else image_text_pairs(self.data)
        if extend is True and not rows:
            raise ValueError(
                "extend=True adds the characters of the texts in data: pass data=, or the "
                "characters as extend="
            )
        new = extend if isinstance(extend, str) else "".join(text for _, text in rows if extend)
        added = sorted({*new} - {*self._alphabet.classes})
        if added or self.dictionary is not None:
            self.model = self._alphabet.add_units(self.model, added, self.seed)
        self.data = self._line_image_reader(rows) if rows else None
        self.loss, self.classes, read = "ctc", self._alphabet.classes, self._alphabet.read_texts
        self.metrics = [og.metrics.TextErrorRate(read), og.metrics.TextErrorRate(read, "words")]
        options = {"blank": self._alphabet.blank, "input_lengths": True, **self._output.options}
        self.arguments = {"loss_options": options, **fine_tuning_rate(self.model)}

    def read(self, path: Any) -> og.data.Reader:
        """Return a reader of further images with texts, such as validation data, for the model.

        Raises:
            ValueError: files that cannot be read, characters that the dictionary lacks, or a text
                that needs more time steps than its image has: one a character, and one between two
                that are equal.
        """
        return self._line_image_reader(image_text_pairs(path))

    def predict(self, model: Any, inputs: Any) -> list[tuple[str, float]]:
        """Return the text of each image with a confidence, decoded by `ctc_decode`.

        Images of one width are read together, without padding: the results do not depend on others.

        Args:
            model: a trained model, a path, or a `Trainer`.
            inputs: a folder; or a list of files, arrays (height, width, 3) in RGB or (height,
                width), uint8, or images of Pillow.
        """
        predictor = Predictor(as_proto(model))
        lines = LineImages([image for _, image in og.data.list_images(inputs)], self._format)
        results: dict[int, tuple[str, float]] = {}
        groups = defaultdict(list)
        for i, (_, _, width) in enumerate(lines.shapes):
            groups[width].append(i)
        size = self._output.rows or _BATCH
        for rows in groups.values():
            for own in (rows[i : i + size] for i in range(0, len(rows), size)):
                x = np.stack([lines[i] for i in own])
                # fills a static batch by repeated images
                x = np.resize(x, (self._output.rows or len(x), *x.shape[1:]))
                for i, log_p in zip(own, self._output.log_probs(predictor.run(x)[0]), strict=False):
                    log_p = log_p[: self._output.steps(lines.widths[i])]
                    labels, sure = og.language.ctc_decode(log_p, self._alphabet.blank, self.beam)
                    results[i] = self._alphabet.to_text(labels), sure
        return [results[i] for i in range(len(lines))]

    def write(self, inputs: Any, results: Iterable[Any], folder: str | os.PathLike) -> list[Path]:
        """Write `results.txt`, lines of path, text and confidence; for arrays, path is the
        index.
        """
        file = Path(folder) / "results.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        pairs = zip(og.data.list_images(inputs), results, strict=True)
        lines = [
            f"{image if is_path(image) else name}\t{text}\t{sure:.4f}\n"
            for (name, image), (text, sure) in pairs
        ]
        file.write_text("".join(lines), encoding="utf-8")
        return [file]

    def _line_image_reader(self, rows: Sequence[tuple[Any, str]]) -> og.data.Reader:
        """Return a reader of images, whose labels are the count of time steps, then class indices.

        Raises:
            ValueError: as of `read`.
        """
        lines, labels = LineImages([source for source, _ in rows], self._format), []
        numbers = {c: i for i, c in reversed([*enumerate(self._alphabet.classes)]) if c}
        lacks = [(source, {*text} - {*numbers}) for source, text in rows]
        if missing := [(source, chars) for source, chars in lacks if chars]:
            every = "".join(sorted(set().union(*(chars for _, chars in missing))))
            raise ValueError(
                f"{image_name(missing[0][0])} has the characters {sorted(missing[0][1])}, which "
                f"the dictionary lacks; {len(missing)} of {len(rows)} texts have {every!r}: pass "
                "extend=True with the rows to train on, or correct the texts"
            )
        for (source, text), width in zip(rows, lines.widths, strict=True):
            steps = self._output.steps(width)
            needed = len(text) + sum(a == b for a, b in pairwise(text))
            if needed > steps:
                raise ValueError(
                    f"{image_name(source)} has {steps} time steps, and its text {text!r} needs "
                    f"{needed}: leave out the image, or cut it into two images"
                )
            labels.append([steps, *(numbers[c] for c in text)])
        return og.data.by_length(lines, labels, axis={"X": 2, "y": 0}, value=0, same_length=False)


def _input_shape(model: onnx.ModelProto) -> list[int | None]:
    """Return the declared shape of the model's only input, with None for lengths not static."""
    inputs, outputs = input_shapes(model), output_shapes(model)
    shape = [length for each in inputs.values() for length in each]
    if len(inputs) != 1 or len(outputs) != 1 or len(shape) != 4:
        raise ValueError(
            f"text recognition takes a model with one input (N, channels, height, width) and one "
            f"output, not with {[*inputs]} {shape} and "
            f"{[*outputs]}: see og.graph.select_model_inputs_outputs"
        )
    return shape


class _CtcOutput:
    """The axes of rows, time steps and classes in a model's output, found by running the model.

    Attributes:
        rows: the rows of a static batch, or None.
        axes: the axes of rows, time steps and classes.
        classes: their number.
        options: of the loss.
        steps: from the width of an image to its number of time steps.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        shape: list[int | None],
        form: LineFormat,
        characters: int,
    ) -> None:
        predictor, self.rows = Predictor(as_proto(model)), shape[0]

        def output_for_width(width: int) -> np.ndarray:
            size = (form.channels, form.height, width)
            return predictor.run(np.zeros((self.rows or 3, *size)))[0].astype(np.float32)

        y = output_for_width(shape[3] or 8 * form.height)
        fits = [a for a in range(y.ndim) if 0 <= y.shape[a] - characters <= 2]
        batch = [a for a in range(y.ndim) if y.shape[a] == (self.rows or 3) and a not in fits[-1:]]
        if y.ndim != 3 or not fits or not batch:
            raise ValueError(
                f"the model returns the shape {y.shape} for {self.rows or 3} images, which "
                f"has no axis for the {characters} characters of the dictionary, a blank and a "
                "space: pass the model's own characters as dictionary="
            )
        at, first = fits[-1], batch[0]
        [time] = {0, 1, 2} - {at, first}
        self.axes, self.classes = (first, time, at), y.shape[at]
        self.options = {"axis": at, "time_major": time < first}
        self._shares = y.min() >= 0 and np.allclose(y.sum(at), 1, atol=1e-3)
        self.steps = cache(lambda width: (y if shape[3] else output_for_width(width)).shape[time])

    def log_probs(self, y: np.ndarray) -> np.ndarray:
        """Return the log-probabilities (N, T, C) of an output `y` of the model."""
        y = y.astype(np.float32).transpose(self.axes)
        if self._shares:
            return np.log(np.maximum(y, 1e-30))
        y = y - y.max(axis=2, keepdims=True)
        return y - np.log(np.exp(y).sum(axis=2, keepdims=True))
