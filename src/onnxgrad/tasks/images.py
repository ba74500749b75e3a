"""Images in folders, one for each class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_folders import class_folders, data_set_folders
from onnxgrad.data.class_numbers import check_class_count, first_class_names
from onnxgrad.data.columns import Names
from onnxgrad.data.field import Field
from onnxgrad.data.image_files import SUFFIXES, is_image
from onnxgrad.data.image_transforms import (
    IMAGES,
    as_transforms,
    normalization_from_metadata,
    transforms_from_metadata,
)
from onnxgrad.data.images import ImageFolder, image_folder
from onnxgrad.errors import argument
from onnxgrad.model.notes import read_metadata
from onnxgrad.operators.shapes import dims
from onnxgrad.tasks.base import fine_tuning_rate, output_shapes, with_fields
from onnxgrad.tasks.image_values import (
    as_image_size,
    as_normalization,
    checked_scale,
    range_warning,
)
from onnxgrad.tasks.row_predictions import Columns
from onnxgrad.tasks.rows_task import (
    CROSS_ENTROPY,
    ONE_SCORE,
    RowsTask,
    feature_inputs,
    name_data_in_errors,
)
from onnxgrad.tasks.tables import PARQUET, STREAMED
from onnxgrad.training.data import Dataset

__all__ = ["Images"]

_SEEN = 10_000  # most files of a folder whose suffixes are looked at


@with_fields
class Images(RowsTask):
    """Image classification: training on a folder of images for each class, and prediction.

    The trained model stores the classes and how images become numbers, so that
    `Images("mine.onnx")` predicts and evaluates without further arguments. A fifth of the images of
    each class is held out for `validation`, unless the folder has a folder of validation images,
    or `validation` says otherwise.

    By default, all weights of a model with ten layers or more, or with BatchNormalization, whose
    statistics are kept, train at 0.0001, in batches of 8; others at the rate of the optimizer, in
    batches of 32.

    Args:
        model: model, serialized model or path, with one input of images.
        data: a folder with a folder for each class, or with train/, validation/ and test/ of such;
            None: `model` is one that was trained.
        image_size: height and width, or a number for both; None: as the input declares, or as in an
            earlier training.
        scale: the value of white, 1 or 255; None: as in an earlier training, or 1.
        normalize: "imagenet", "none", "MEAN/STD" of values from 0 to `scale`, or what
            `og.data.normalize` returns; None: as in an earlier training, or none.
        augment: transforms for training: "flip" and "colors" by name, as "flip,colors", or a list
            of names and of transforms of `og.data.image_folder`.
        classes: the names of the classes in the order of the model's output; None: the names
            in the model, or of the folders.
        loss: as of `Trainer`. None: as in an earlier training, or the output `loss_output` of the
            model; or `cross_entropy`, of a single score `binary_cross_entropy`. Folders of other
            classes than the model has give it a new last layer.
        loss_options, loss_weights: as of `Trainer`.
        loss_output: the output of the model that is its loss.
        metrics: as of `Trainer`; None: accuracy.
        validation: the share of the images to hold out, or another folder; 0: none.
        seed: of the images that are held out.

    Attributes:
        data: a reader of images, as `Trainer.fit` takes it.
        validation: the same, of the images that are held out; None without.

    Raises:
        ImportError: Pillow is not installed.
        ValueError: folders without images, or that are no classes of the model.

    Examples:
        >>> import pathlib, tempfile, onnx, onnxgrad as og, PIL.Image
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> for name, color in (("dark", "black"), ("light", "white")):
        ...     (root / name).mkdir()
        ...     for i in range(5):
        ...         PIL.Image.new("RGB", (8, 8), color).save(root / name / f"{i}.png")
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,3,8,8] x) => (float[N,2] y)
        ...     <int64[1] axis = {1}, float[1,2] w = {0, 1}, float[2] b = {0, 0}> {
        ...     h = Flatten(x)  m = ReduceMean(h, axis)  s = MatMul(m, w)  y = Add(s, b) }''')
        >>> task = og.tasks.Images(model, root)
        >>> trainer = task.trainer(learning_rate=0.1)
        >>> trainer = trainer.fit(task.data, validation=task.validation, epochs=20)
        >>> [row["label"] for row in task.predict(trainer, root / "light" / "1.png")]
        ['light']
    """

    _: KW_ONLY
    image_size: int | str | tuple[int, int] | None = None
    scale: float | None = None
    normalize: Any = None
    augment: str | Sequence[Any] = ()
    classes: Sequence[str] | Sequence[int] | None = None
    _transforms = ()  # augmentation, set while the images to train on are opened

    def __post_init__(self) -> None:
        self._size = as_image_size(self.image_size)
        super().__post_init__()

    def _read_training_data(self, data: Any, validation: Any) -> None:
        """Set `data` and `validation`; a folder with train/ may hold validation images, too."""
        parts = data_set_folders(Path(data)) if Path(data).is_dir() else {}
        if parts and validation is None:
            validation = parts.get("validation")
        self._transforms = as_transforms(self.augment)
        super()._read_training_data(self._train_or_test_folder(Path(data), "train"), validation)
        self._transforms = ()
        self.notes[:0] = [f"{part} images: {folder}" for part, folder in parts.items()]
        if slow := fine_tuning_rate(self.model):
            self.arguments |= slow
            self.batch_size = 8

    def _train_or_test_folder(self, folder: Path, part: str) -> Path:
        """Return the subfolder `part`, "train" or "test"; or `folder`, if it has no such
        subfolders.

        Raises:
            DataError: the folder has other parts only.
        """
        parts = data_set_folders(folder) if folder.is_dir() else {}
        if parts and part not in parts:
            raise DataError(
                f"{str(folder)!r} has no folder {part}/: name one of "
                f"{', '.join(repr(str(each)) for each in parts.values())}"
            )
        return parts.get(part, folder)

    def _scale_and_normalization(self, path: Path, kept: Mapping[str, Any]) -> tuple[float, Any]:
        """Return the (scale, normalization) of pixels, set by the task or `kept` from a training.

        Raises:
            DataError: the model was trained on images whose values nothing tells.
        """
        if self.normalize is None and self.scale is None and {"arrays", "function"} & {*kept}:
            name = kept.get("function")
            how = "as arrays" if name is None else f"through the function {name!r}"
            raise DataError(
                f"{str(path)!r} holds images, which the training of the model got {how}: say how "
                f"values are scaled with {argument('scale')} and {argument('normalize')}, or "
                f"{argument('normalize', 'none')} for values from 0 to 1"
            )
        white = float(kept.get("scale", 1.0) if self.scale is None else checked_scale(self.scale))
        if self.normalize is not None:
            return white, as_normalization(self.normalize, white)
        return white, None if self.scale is not None else normalization_from_metadata(kept)

    def _open_rows(self, data: Any) -> Path:
        return Path(data)

    def _image_reader(
        self, path: Path, name: str, shape: Any, dtype: np.dtype, labels: bool = True
    ) -> ImageFolder:
        """Return the reader of images that fit a model's input of this shape and dtype.

        It warns if the file says that its model was trained on values of another range.
        """
        kept: dict[str, Any] = (read_metadata(self.model, IMAGES) or [{}])[0]
        white, normalize = self._scale_and_normalization(path, kept)
        noted = tuple(kept.get("size", ()))
        lengths = tuple(d for d in (shape or ())[1:] if isinstance(d, int) and d > 4)
        size = self._size or noted or lengths
        if len(size) != 2:
            raise DataError(
                f"{str(path)!r} holds images, and the input of the model declares no height and "
                f"width, but {shape}: pass {argument('image_size')}"
            )
        steps = transforms_from_metadata(kept) if self._size in (None, noted) else []
        reader = image_folder(
            str(path),
            (size[0], size[1]),
            [*self._transforms, *steps, *([] if normalize is None else [normalize])],
            classes=self._known_classes() if labels else None,
            labels=labels,
            scale=white,
        )
        reader = reader.for_inputs({name: shape}).for_dtypes({name: dtype})
        text = f"from 0 to {white:g}"
        if normalize is not None:
            own = normalize.mean, normalize.std
            mean, std = (", ".join(f"{x:g}" for x in each) for each in own)
            text += f", minus {mean}, divided by {std}"
        if reason := "" if reader.raw else range_warning(self.model, name, dtype, reader):
            warnings.warn(
                f"{reason}: here they are {text}. If it was trained on others, say so with "
                f"{argument('scale')} and {argument('normalize')}",
                stacklevel=4,
            )
        text = "as they are, from 0 to 255" if reader.raw else text
        self.notes.append(f"{reader.rows} image{'s' * (reader.rows != 1)}, values {text}")
        return reader

    def _decide_loss(self, source: Path) -> None:
        """Choose cross entropy if each folder is a class, and a last layer for new classes."""
        names = [folder.name for folder in class_folders(source)]
        if not source.is_dir() or not names or isinstance(self.loss, Mapping):
            return
        shapes = [shape for shape in output_shapes(self.model).values() if len(shape) == 2]
        scores = shapes[0][1] if len(shapes) == 1 else None
        if self.named_classes is None and not all(map(str.isdecimal, names)):
            self._replace_unfit_last_layer(names, scores)
        one = scores == 1 and len(names) == 2
        reason = "each folder is a class"
        self._set_default_loss(ONE_SCORE if one else CROSS_ENTROPY, reason)

    def _rows_for_model(self, source: Path) -> tuple[Dataset, Names]:
        """Return a reader of images with class labels, and the class names to store in the
        model.
        """
        classes = self._known_classes()
        objective = self._training_objective(classes=classes or [])
        with name_data_in_errors(str(source)):
            feature = feature_inputs(str(source), objective)[0]
            assert feature.dtype is not None
            dtype = feature.dtype.numpy()
            reader = self._image_reader(source, str(feature.name), dims(feature), dtype)
            assert reader.labels is not None
            [info] = objective.labels.values()
            if isinstance(info.classes, int):
                check_class_count(reader.class_names, reader.labels, info.classes)
        counts = np.bincount(reader.labels, minlength=len(reader.classes)).tolist()
        named = [f"{k} ({count})" for k, count in enumerate(counts)]
        if reader.class_names:
            pairs = enumerate(zip(reader.classes, counts, strict=True))
            named = [f"{k}: {name} ({count})" for k, (name, count) in pairs]
        self.notes.append(f"classes by number, and their images: {first_class_names(named)}")
        return Dataset(reader), Names(classes=classes or reader.class_names)

    def read(self, path: str | os.PathLike) -> Any:
        """Return a reader of further images of the same classes, as `Trainer.fit` takes it.

        Args:
            path: as `data`; of a folder with train/ and test/, the images in test/.

        Raises:
            ValueError: a folder without images, or with other classes.
        """
        return super().read(self._train_or_test_folder(Path(path), "test"))

    def evaluate(
        self, data: Any, *, batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics of the model for the images of a folder."""
        part = self._train_or_test_folder(Path(data), "test")
        if part != Path(data):
            self.notes.append(f"the images are in {part}")
        return super().evaluate(part, batch_size=batch_size, device=device)

    def _input_batches(
        self, source: Path, fields: Sequence[Field], size: int
    ) -> Iterator[tuple[Columns, int, Columns]]:
        if len(fields) != 1:
            raise DataError(
                f"images are for a model with one input, and this model has {len(fields)}: pass "
                "arrays by input to a Trainer"
            )
        field = fields[0]
        reader = self._image_reader(source, field.name, field.shape, field.dtype, labels=False)
        start = 0
        for images in reader.batches(size, None, 0):
            files = [str(f) for f in reader.files[start : start + len(images)]]
            start += len(images)
            yield {field.name: images}, len(images), {"file": np.array(files)}

    def _class_indices_to_stratify(self) -> np.ndarray | None:
        """Return the class index of each image."""
        return getattr(self.data, "labels", None)


def holds_images(path: Path) -> bool:
    """Return whether a path is an image, or a folder that holds images and not tables.

    Raises:
        DataError: a folder with neither.
    """
    if not path.is_dir():
        return is_image(path)
    files = (name for _, _, names in os.walk(path) for name in sorted(names))
    for name in islice(files, _SEEN):
        suffix = Path(name).suffix.lower()
        if suffix in SUFFIXES:
            return True
        if suffix in (*STREAMED, *PARQUET):
            return False
    raise DataError(f"{str(path)!r} must hold Parquet files, or a folder of images for each class")
