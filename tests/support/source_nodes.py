"""The source of the package as syntax: its modules, and what they import and call."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.paths import PACKAGE

Node = ast.Import | ast.ImportFrom | ast.Call


@cache
def module_files() -> dict[str, Path]:
    """Return the file of each module by its dotted name; that of a package ends in `__init__`."""
    return {
        ".".join(("onnxgrad", *file.relative_to(PACKAGE).with_suffix("").parts)): file
        for file in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def imports_and_calls() -> dict[str, list[Node]]:
    """Return the nodes of each module that import or call, also in functions and for types."""
    return {
        name: [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, Node)]
        for name, file in module_files().items()
    }
