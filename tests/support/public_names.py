"""What names of `onnxgrad` stand for, and the arguments of functions."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import onnxgrad
from onnxgrad import compat
from onnxgrad.lazy_names import read_stub
from tests.support.paths import PACKAGE


@cache
def submodules() -> dict[str, ModuleType]:
    """Return the public submodules by name, which are what the root's stub takes from the root."""
    stub = read_stub(str(PACKAGE / "__init__.pyi"))
    names = [name for name, module in stub.items() if module == "onnxgrad"]
    return {name: import_module(f"onnxgrad.{name}") for name in names}


def names_of_stub(*submodule: str) -> list[str]:
    """Return the names that the root, or a submodule, offers, whatever is installed."""
    return sorted(read_stub(str(PACKAGE.joinpath(*submodule, "__init__.pyi"))))


@cache
def public_places() -> list[str]:
    """Return each public name, such as "Trainer" and "optimizers.adamw"."""
    root = [name for name in names_of_stub() if name not in submodules()]
    return root + [f"{sub}.{name}" for sub in submodules() for name in names_of_stub(sub)]


def public_objects() -> dict[str, Any]:
    """Return each public object once, by its shortest place, without what is not installed."""
    found: dict[int, tuple[str, Any]] = {}
    for place in sorted(public_places(), key=lambda place: (place.count("."), place)):
        if "." in place or place in onnxgrad.__all__:
            thing = resolve_name(place)
            found.setdefault(id(thing), (place, thing))
    return dict(found.values())


def resolve_name(name: str) -> Any:
    """Return what `onnxgrad.<name>` or `onnxgrad.compat.<name>` is, a module's name included."""
    first = name.partition(".")[0]
    found = compat if first in names_of_stub("compat") else onnxgrad
    for part in name.split("."):
        if inspect.ismodule(found) and not hasattr(found, part):
            found = __import__(f"{found.__name__}.{part}", fromlist=["_"])
        else:
            found = getattr(found, part)
    return found


def arguments_of(function: Any) -> list[inspect.Parameter]:
    """Return the arguments of a function or class, without `self`."""
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
