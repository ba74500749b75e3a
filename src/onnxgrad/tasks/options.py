"""The options of a task in the metadata of its trained model."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrad as og

_FUNCTION, _MAKER = "function", "onnxgrad"  # keys of values that are no JSON
# {public function that returns a value of an option: its submodule}
_MAKERS = {name: submodule for submodule in (og.data, og.losses) for name in submodule.__all__}


def write_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for JSON; of functions, which it cannot hold, their names."""
    kept = {name: _as_json(value) for name, value in options.items()}
    if isinstance(path := options.get("tokenizer"), str):
        kept["tokenizer"] = {"path": os.path.abspath(path)}
    return {name: value for name, value in kept.items() if value is not None}


def named_loss(loss: Any) -> dict[str, str]:
    """Return a loss for JSON as a name by which users are asked for it."""
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    return {_FUNCTION: str(name or getattr(loss, "__qualname__", type(loss).__name__))}


def lost_loss(kept: Mapping[str, Any]) -> str | None:
    """Return the name of a loss that JSON cannot hold, None if it holds the loss or has none."""
    loss = kept.get("loss")
    return loss[_FUNCTION] if isinstance(loss, dict) and _FUNCTION in loss else None


def read_options(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that `write_options` wrote.

    Raises:
        ValueError: one of them is a function, which must be given.
    """
    made = {name: _read_option(name, value) for name, value in kept.items()}
    return {name: value for name, value in made.items() if value is not None}


def _as_json(value: Any) -> Any:
    """Return a value for JSON; None for what nobody can be asked for."""
    maker = re.sub(r"(?<!^)(?=[A-Z])", "_", type(value).__name__).lower()
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, os.PathLike):
        return {"path": os.path.abspath(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    if dataclasses.is_dataclass(value) and maker in _MAKERS:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {_MAKER: maker, "arguments": _as_json(fields)}
    if isinstance(value, og.losses.LossSpec):
        return named_loss(value)
    if callable(value):
        return {_FUNCTION: getattr(value, "__qualname__", type(value).__name__)}
    return None


def _read_option(name: str, value: Any) -> Any:
    """Return the value of an option that `_as_json` wrote; None for a file that is not there."""
    if isinstance(value, list):
        return tuple(_read_option(name, each) for each in value)
    if not isinstance(value, dict):
        return value
    if _FUNCTION in value:
        raise ValueError(
            f"{name}=: the model was trained with the function {value[_FUNCTION]!r}, which its "
            "file cannot hold: pass it"
        )
    if "path" in value:
        return value["path"] if Path(value["path"]).exists() else None
    if _MAKER in value:
        maker = value[_MAKER]
        return getattr(_MAKERS[maker], maker)(**_read_option(name, value["arguments"]))
    return {key: _read_option(name, each) for key, each in value.items()}
