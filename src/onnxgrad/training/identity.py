"""The identity of a training: the description with which a checkpoint must agree to be resumed."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import named
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.equality import class_and_arguments, describe
from onnxgrad.training.job import Job
from onnxgrad.training.sharing import Sharing

_SHOWN = 200  # characters of a value in a message


class Identity(UserDict[str, Any]):
    """The description of a training; the digest of its model is computed when it is first read.

    Most trainings write no checkpoint, and computing the digest takes longer than loading the
    model.

    Args:
        model: the model, or its digest if that is known.
        values: the other values to describe, by name.
    """

    def __init__(self, model: ModelProto | str, values: Mapping[str, Any]) -> None:
        self.model, self.values_but_model = model, describe(values)

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        """The description, with the digest of the model."""
        return {"model": describe(self.model), **self.values_but_model}

    def __deepcopy__(self, memo: Any) -> Identity:
        return self  # never modified

    def __reduce__(self) -> Any:
        return dict, (self.data,)


def identity_of(
    job: Job,
    source: BatchSource,
    held_out: BatchSource | None,
    shuffle: bool,
    sharing: Sharing | None = None,
) -> Identity:
    """Return the description of a training, with which a checkpoint must agree to be resumed.

    It holds the arguments that `ARGUMENTS` does not declare free, the data, the arguments on which
    the entries of callbacks in a checkpoint depend, and the metrics that are monitored.
    """
    monitored = [name for rate in job.learning_rates for name in rate.monitors]
    monitored += [getattr(callback, "monitor", None) or "" for callback in job.callbacks.all]
    return Identity(
        job.digest or job.proto,
        job.compared_fields
        | {
            "batch_size": source.batch_size,
            "shuffle": shuffle,
            "data": source.description,
            "validation": None if held_out is None else held_out.description,
            "parallel": {} if sharing is None else sharing.compared_options(job.batch_norm),
            "callbacks": {
                c.key: {name: getattr(c, name) for name in c.compared_arguments}
                for c in job.callbacks.all
                if c.compared_arguments
            },
            "monitored metrics": {
                m.name: class_and_arguments(m)
                for m in job.all_metrics
                if any(name.endswith(m.name) for name in monitored)
            },
        },
    )


def require_same_training(saved: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Raise `ValueError` if a checkpoint is of a different training; the error names what differs.

    A callback that only one of the two trainings has is not compared.

    Args:
        saved: the identity in the checkpoint.
        now: the identity of this training.
        path: the folder of the checkpoint.
    """
    now = json.loads(json.dumps(dict(now)))  # tuples become lists, as in a checkpoint
    both = saved.get("callbacks", {}).keys() & now["callbacks"].keys()
    lines = [
        f"{key}: {_short_repr(old)} in the checkpoint, {_short_repr(new)} now"
        for key, (old, new) in _find_differences(saved, now).items()
        if not key.startswith("callbacks.") or key.split(".")[1] in both
    ]
    if lines:
        raise ValueError(
            f"the checkpoint {path} is of another training. {'; '.join(lines)}. Pass the same "
            f"arguments, or {named('start anew without resume')}"
        )


def _short_repr(value: Any) -> str:
    """Return the `repr` of a value, cut to `_SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _find_differences(saved: Any, now: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Return pairs of the values that differ between two nested mappings, by path "key.key.key"."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        different: dict[str, tuple[Any, Any]] = {}
        for name in dict.fromkeys([*saved, *now]):
            path = f"{key}.{name}" if key else name
            different |= _find_differences(saved.get(name), now.get(name), path)
        return different
    return {} if saved == now else {key: (saved, now)}
