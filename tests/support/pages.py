"""Scripts of `docs/tutorials` as modules, and the code of pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from tests.support.paths import DOCS

TUTORIALS = DOCS / "tutorials"
CELL = re.compile(r"^```\{code-cell\} python\n((?::[^\n]*\n)*)(.*?)^```$", re.MULTILINE | re.DOTALL)


def load(path: Path) -> ModuleType:
    """Return a script as a module, which runs it."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(page: str) -> list[str]:
    """Return the cells of a page that its readers see."""
    cells = CELL.findall((DOCS / page).read_text())
    return [code for options, code in cells if "remove-cell" not in options]
