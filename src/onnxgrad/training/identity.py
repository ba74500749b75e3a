"""What identifies a training, so that a checkpoint of another one is refused."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.model.emptied import emptied, is_empty
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.settings import Settings

_SHOWN = 200  # characters of a value in a message


def without_weights(proto: ModelProto, names: Collection[str]) -> tuple[ModelProto, str | None]:
    """Return a model as `emptied` does, and then what `described` returns for the whole one."""
    new = emptied(proto, names)
    if new is proto:
        return proto, None
    gc.collect()  # graphs, which are cyclic, refer to the whole model
    return new, described(proto)


class Identity(Mapping[str, Any]):
    """The description of some values and of a model, whose digest is computed when it is read.

    Most trainings write no checkpoint, and the digest takes longer than to load the model. A model
    whose digest is known is that digest.
    """

    def __init__(self, model: ModelProto | str, values: Mapping[str, Any]) -> None:
        self.model, self.values_but_model = model, described(values)

    @cached_property
    def _all(self) -> dict[str, Any]:
        return {"model": described(self.model), **self.values_but_model}

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
        "optimizer learning_rate clip_norm accumulate batch_norm dropout carry recompute seed"
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
        },
    )


def described(value: Any) -> Any:
    """Return a value for JSON that is equal in another process for an equal argument.

    Models and arrays are described by a digest, functions by their name and code, and other objects
    by their class and attributes.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, ModelProto):
        return _digest_of_model(value)
    if isinstance(value, bytes):
        return _digest(value)
    if isinstance(value, Path):
        return _digest(value.read_bytes()) if value.is_file() else str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {_digest(np.ascontiguousarray(value).tobytes())}"
    return _object(value)


def _object(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, partial):
        return described([value.func, list(value.args), value.keywords])
    code = getattr(value, "__code__", None)
    if code is not None:
        constants = [c for c in code.co_consts if not hasattr(c, "co_code")]
        own = f"{code.co_names} {constants}".encode()
        return f"{value.__qualname__} {_digest(code.co_code + own)}"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    attributes = getattr(value, "__dict__", None)
    if text.startswith("<") and attributes:
        return {type(value).__qualname__: described(attributes)}
    return text


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_of_model(model: ModelProto) -> str:
    """Return the digest of a model; large weights are read one by one."""
    small = emptied(model)
    if small is model:
        return _digest(model.SerializeToString(deterministic=True))
    own = {t.name: t for t in model.graph.initializer}
    weights = (own[t.name] for t in small.graph.initializer if is_empty(t))
    digests = "".join(_digest(t.SerializeToString(deterministic=True)) for t in weights)
    return _digest(small.SerializeToString(deterministic=True) + digests.encode())


def require_equal(saved: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Raise `ValueError` for a checkpoint of another training, with what differs."""
    differing = _differences(saved, json.loads(json.dumps(dict(now))))  # as a checkpoint holds it
    if differing:
        lines = [
            f"{key}: {_shown(old)} in the checkpoint, {_shown(new)} now"
            for key, (old, new) in differing.items()
        ]
        raise ValueError(
            f"the checkpoint {path} is of another training. {'; '.join(lines)}. Pass the same "
            "arguments, or start anew without resume"
        )


def _shown(value: Any) -> str:
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
