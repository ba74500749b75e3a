"""What names of `onnxgrad` stand for, and the arguments of functions."""

from __future__ import annotations

import inspect
from typing import Any

import onnxgrad


def resolve_name(name: str) -> Any:
    """Return what `onnxgrad.<name>` is, a submodule's name included."""
    found = onnxgrad
    for part in name.split("."):
        if inspect.ismodule(found) and not hasattr(found, part):
            found = __import__(f"{found.__name__}.{part}", fromlist=["_"])
        else:
            found = getattr(found, part)
    return found


def arguments_of(function: Any) -> list[inspect.Parameter]:
    """Return the arguments of a function or class, without `self`."""
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
