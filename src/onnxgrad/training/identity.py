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
from onnxgrad.training.arguments import attributes_where
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.equality import describe, options_of
from onnxgrad.training.settings import Settings
from onnxgrad.training.sharing import Sharing

_SHOWN = 200  # characters of a value in a message
_OF_MEMBERS = ("members", "optimizers", "learning_rates")


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


def identity_of(
    trainer: Settings,
    source: BatchSource,
    held_out: BatchSource | None,
    shuffle: bool,
    sharing: Sharing | None = None,
) -> Identity:
    """Return what two trainings must have in common for one to go on with the other.

    These are the arguments that `ARGUMENTS` does not declare free, the data, the arguments on which
    the entries of callbacks in a checkpoint depend, and the metrics that decide something.
    """
    values = {name: getattr(trainer, name) for name in attributes_where(free=False)}
    if trainer.members is None:
        values = {name: v for name, v in values.items() if name not in _OF_MEMBERS}
    return Identity(
        trainer.digest or trainer.proto,
        values
        | {
            "batch_size": source.batch_size,
            "shuffle": shuffle,
            "data": source.description,
            "validation": None if held_out is None else held_out.description,
            "parallel": {} if sharing is None else sharing.identity(trainer.batch_norm),
            "callbacks": {
                c.key: {name: getattr(c, name) for name in c.compared_arguments}
                for c in trainer.callbacks.all
                if c.compared_arguments
            },
            "monitored metrics": _monitored_metrics(trainer),
        },
    )


def _monitored_metrics(trainer: Settings) -> dict[str, Any]:
    """Return the arguments of the metrics that a callback or a schedule monitors, by name."""
    rates = trainer.learning_rates or [trainer.learning_rate]
    monitored = [name for rate in rates for name in rate.monitors]
    monitored += [getattr(callback, "monitor", None) or "" for callback in trainer.callbacks.all]
    listed = [m for metrics in trainer.metrics_by_output.values() for m in metrics]
    return {
        m.name: options_of(m) for m in listed if any(name.endswith(m.name) for name in monitored)
    }


def require_equal(saved: Mapping[str, Any], now: Mapping[str, Any], path: Any) -> None:
    """Raise `ValueError` for a checkpoint of another training, with what differs.

    A callback that only one of both has is not compared: it has kept nothing, or goes on by itself.
    """
    now = json.loads(json.dumps(dict(now)))  # as a checkpoint holds it
    both = saved.get("callbacks", {}).keys() & now["callbacks"].keys()
    differing = {
        path: values
        for path, values in _differences(saved, now).items()
        if not path.startswith("callbacks.") or path.split(".")[1] in both
    }
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
