"""Scripts of `docs/tutorials` as modules, and the code of pages."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import DOCS

TUTORIALS = DOCS / "tutorials"
OPTIONAL = (
    "PIL jax matplotlib optax pandas scipy skl2onnx sklearn torch torchmetrics transformers".split()
)
CELL = re.compile(r"^```\{code-cell\} python\n((?::[^\n]*\n)*)(.*?)^```$", re.MULTILINE | re.DOTALL)


def load_script(path: Path) -> ModuleType:
    """Return a script as a module, which runs it."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(page: str) -> list[str]:
    """Return the cells of a page that its readers see."""
    cells = CELL.findall((DOCS / page).read_text())
    return [code for options, code in cells if "remove-cell" not in options]


def require_imports(code: str) -> None:
    """Skip a test if the code imports an optional package that is not installed."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    for name in {name.partition(".")[0] for name in names}.intersection(OPTIONAL):
        pytest.importorskip(name)
