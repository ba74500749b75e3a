"""Entries in the metadata of a trained file: the loss, and how the training read images.

Later commands and trainings read these notes. Users are asked for options that a note cannot hold.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from onnxgrad.data.field import Field
from onnxgrad.data.image_transforms import IMAGES
from onnxgrad.data.readers import Reader
from onnxgrad.model.notes import read_metadata
from onnxgrad.model.read import is_model_path
from onnxgrad.operators.shapes import Dims
from onnxgrad.training.job import Job

LOSS = "onnxgrad.training_loss"  # metadata: a list of one dict, arguments of a `Trainer`

_CHANNELS = frozenset((1, 3, 4))  # lengths of the axis of channels of images


def training_notes(
    job: Job, kept: Mapping[str, list[Any]], reader: Reader | None, features: Iterable[Field]
) -> dict[str, list[Any]]:
    """Return the notes of a training: the entries of the metadata of the file, by their keys.

    Args:
        job: the arguments of the training.
        kept: the notes before the training.
        reader: the reader of the rows; None for arrays.
        features: the data inputs other than labels.
    """
    notes = {LOSS: _loss_note(job), **({} if reader is None else reader.remembered)}
    known = read_metadata(job.proto, IMAGES) or kept.get(IMAGES)
    shapes: list[Dims] = [x.shape or () for x in features if x.dtype.kind == "f"]
    may_take_images = any(len(s) == 4 and not _CHANNELS.isdisjoint(s[1::2]) for s in shapes)
    if IMAGES not in notes and not known and may_take_images:
        notes[IMAGES] = [{"arrays": True}]  # arrays do not tell how images became numbers
    return dict(kept) | notes


def _loss_note(job: Job) -> list[dict[str, Any]]:
    """Return a list of the arguments of a `Trainer` for the loss; empty if JSON cannot hold it."""
    by_output = job.loss if isinstance(job.loss, Mapping) else {None: job.loss}
    if not all(isinstance(name, str) and not is_model_path(name) for name in by_output.values()):
        return []
    stated = {"loss": job.loss, "loss_options": job.loss_options, "loss_weights": job.loss_weights}
    try:
        # arrays and numbers of numpy have `tolist`; other objects raise `AttributeError`
        text = json.dumps(
            {name: v for name, v in stated.items() if v}, default=operator.methodcaller("tolist")
        )
    except (TypeError, AttributeError):
        return []
    return [json.loads(text)]
