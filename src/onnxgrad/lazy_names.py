"""Lazy imports: a package's names, listed in its stub `__init__.pyi`, load at first use."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any


def read_stub(file: str) -> dict[str, str]:
    """Return `{name: module}` of a stub file, whose lines are `from module import name`.

    A name that a package imports from itself is a submodule.
    """
    with open(file, encoding="utf-8") as stub:
        statements = ast.parse(stub.read()).body
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def offer_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's lazy `__getattr__`, `__dir__` and `__all__`, from its stub.

    The error of an unknown name says which submodule of the package offers it, if one does.
    """
    folder = os.path.dirname(file)
    modules = read_stub(os.path.join(folder, "__init__.pyi"))

    def load_name(name: str) -> Any:
        if modules.get(name) == package:
            return import_module(f"{package}.{name}")
        if name in modules:
            return getattr(import_module(modules[name]), name)
        places = [] if name.startswith("_") else find_offering_submodules(name)
        found = f": it is {' or '.join(places)}" if places else ""
        raise AttributeError(f"{package} has no {name!r}{found}")

    def find_offering_submodules(name: str) -> list[str]:
        submodules = sorted(sub for sub, module in modules.items() if module == package)
        stubs = {sub: os.path.join(folder, sub, "__init__.pyi") for sub in submodules}
        offering = [sub for sub, stub in stubs.items() if os.path.exists(stub)]
        return [f"{package}.{sub}.{name}" for sub in offering if name in read_stub(stubs[sub])]

    names = sorted(modules)
    return load_name, lambda: list(names), list(names)
