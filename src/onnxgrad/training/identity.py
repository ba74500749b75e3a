"""What identifies a training, so that a checkpoint of another one is refused."""

from __future__ import annotations

import gc
import json
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from onnx import ModelProto

from onnxgrad.errors import named
from onnxgrad.model.without_elements import emptied
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.equality import describe
from onnxgrad.training.settings import Settings

_SHOWN = 200  # characters of a value in a message


def without_weights(proto: ModelProto, names: Collection[str]) -> tuple[ModelProto, str | None]:
    """Return a model as `emptied` does, and then what `describe` returns for the whole one."""
    new = emptied(proto, names)
    if new is proto:
        return proto, None
    gc.collect()  # graphs, which are cyclic, refer to the whole model
    return new, describe(proto)


class Identity(Mapping[str, Any]):
    """The description of some values and of a model, whose digest is computed when it is read.

    Most trainings write no checkpoint, and the digest takes longer than to load the model. A model
    whose digest is known is that digest.
    """

    def __init__(self, model: ModelProto | str, values: Mapping[str, Any]) -> None:
        self.model, self.values_but_model = model, describe(values)

    @cached_property
    def _all(self) -> dict[str, Any]:
        return {"model": describe(self.model), **self.values_but_model}

    def __getitem__(self, key: str) -> Any:
        return self._all[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __deepcopy__(self, memo: Any) -> Identity:
        return self  # never modified

    def __reduce__(self) -> Any:
        return dict, (self._all,)


def identity_of(trainer: Settings, source: BatchSource, shuffle: bool) -> Identity:
    """Return what two trainings must have in common for one to go on with the other."""
    arguments = (
        "optimizer learning_rate clip_norm accumulate batch_norm dropout mix carry recompute "
        "precision seed"
    )
    return Identity(
        trainer.digest or trainer.proto,
        {
            "trained": trainer.trained,
            "loss": [trainer.loss, trainer.loss_options, trainer.loss_weights],
            "class_weight": trainer.class_weight,
            "batch_size": source.batch_size,
            "shuffle": shuffle,
            "data": source.description,
            **{name: getattr(trainer, name) for name in arguments.split()},
            **_of_members(trainer),
        },
    )


def _of_members(trainer: Settings) -> dict[str, Any]:
    names = () if trainer.members is None else ("members", "optimizers", "learning_rates")
    return {name: getattr(trainer, name) for name in names}


def require_equal(saved: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Raise `ValueError` for a checkpoint of another training, with what differs."""
    differing = _differences(saved, json.loads(json.dumps(dict(now))))  # as a checkpoint holds it
    if differing:
        lines = [
            f"{key}: {_abbreviate(old)} in the checkpoint, {_abbreviate(new)} now"
            for key, (old, new) in differing.items()
        ]
        raise ValueError(
            f"the checkpoint {path} is of another training. {'; '.join(lines)}. Pass the same "
            f"arguments, or {named('start anew without resume')}"
        )


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _differences(saved: Any, now: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Return what differs, by the path of its keys."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        different: dict[str, tuple[Any, Any]] = {}
        for name in dict.fromkeys([*saved, *now]):
            path = f"{key}.{name}" if key else name
            different |= _differences(saved.get(name), now.get(name), path)
        return different
    return {} if saved == now else {key: (saved, now)}
