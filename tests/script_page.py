"""Scripts of `docs/tutorials`, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"


def load(path: Path) -> ModuleType:
    """Return a script as a module, which runs it."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
