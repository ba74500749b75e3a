"""Scripts of `docs/tutorials` as modules, and the code and the shell lines of pages."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.support.paths import DOCS

TUTORIALS = DOCS / "tutorials"
OPTIONAL = (
    "PIL jax matplotlib optax pandas scipy skl2onnx sklearn torch torchmetrics transformers".split()
)
BLOCK = re.compile(
    r"(?:^% not run: ([^\n]+)\n)?^```(\{code-cell\} python|bash)\n((?::[^\n]*\n)*)(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class PageBlock(NamedTuple):
    """A cell of Python, or a block of shell lines, of a page."""

    kind: str  # "python" or "bash"
    code: str
    hidden: bool  # the reader does not see it
    not_run: str  # why the lines cannot run in a test, or ""


def load_script(path: Path) -> ModuleType:
    """Return a script as a module, which runs it."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks_of(page: str) -> list[PageBlock]:
    """Return the cells of Python and the blocks of shell lines of a page, in their order.

    A comment above a block, `% not run: WHY`, says that its lines cannot run in a test.
    """
    return [
        PageBlock(kind.rpartition(" ")[2], code, "remove-cell" in options, not_run)
        for not_run, kind, options, code in BLOCK.findall((DOCS / page).read_text())
    ]


def code_of(page: str) -> list[str]:
    """Return the cells of a page that its readers see."""
    return [b.code for b in blocks_of(page) if b.kind == "python" and not b.hidden]


def require_imports(code: str) -> None:
    """Skip a test if the code imports an optional package that is not installed."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    for name in {name.partition(".")[0] for name in names}.intersection(OPTIONAL):
        pytest.importorskip(name)
