"""Notes of a training in the metadata of the trained file: its loss, and how it read images.

Later commands and trainings read them. Users are asked for options that a note cannot hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnxgrad.data.field import Field
from onnxgrad.data.image_transforms import IMAGES
from onnxgrad.data.readers import Reader
from onnxgrad.model.notes import read_note
from onnxgrad.model.read import names_model
from onnxgrad.operators.shapes import Dims
from onnxgrad.training.job import Job

LOSS = "onnxgrad.training_loss"  # metadata: a list of one dict, arguments of a `Trainer`

_CHANNELS = (1, 3, 4)


def training_notes(
    job: Job, kept: Mapping[str, list[Any]], reader: Reader | None, features: Iterable[Field]
) -> dict[str, list[Any]]:
    """Return the notes of a training, by key of the metadata.

    Args:
        job: the arguments of the training.
        kept: the notes before the training.
        reader: the reader of the rows, None for arrays.
        features: the inputs other than labels.
    """
    notes = {LOSS: _loss_note(job), **({} if reader is None else reader.remembered)}
    known = read_note(job.proto, IMAGES) or kept.get(IMAGES)
    if IMAGES not in notes and not known and any(map(_takes_images, features)):
        notes[IMAGES] = [{"arrays": True}]  # which do not tell how images became numbers
    return dict(kept) | notes


def _loss_note(job: Job) -> list[dict[str, Any]]:
    """Return the loss as arguments of a `Trainer`; empty for a loss that JSON cannot state."""
    by_output = job.loss if isinstance(job.loss, Mapping) else {None: job.loss}
    if not all(isinstance(name, str) and not names_model(name) for name in by_output.values()):
        return []
    stated = {"loss": job.loss, "loss_options": job.loss_options, "loss_weights": job.loss_weights}
    try:
        text = json.dumps({name: v for name, v in stated.items() if v}, default=_as_list)
    except TypeError:
        return []
    return [json.loads(text)]


def _as_list(value: Any) -> Any:
    """Return an array as a list, and a number of numpy as a number of Python.

    Raises:
        TypeError: the value is neither.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"no value of JSON: {type(value).__name__}")


def _takes_images(field: Field) -> bool:
    """Return whether an input may take images: floats with four axes and 1, 3 or 4 channels."""
    shape: Dims = field.shape or ()
    return field.dtype.kind == "f" and len(shape) == 4 and bool({*shape[1::2]} & {*_CHANNELS})
