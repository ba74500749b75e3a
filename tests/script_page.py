"""Scripts of `docs` that are pages: loading them, and comparing them with their pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parent.parent / "docs"


def load(path: Path) -> ModuleType:
    """Return a script of `docs` as a module, which runs it."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_page(path: Path, first: str) -> None:
    """Assert that the page of a script has all text and code behind the line `first`, in order."""
    pages = load(DOCS / "script_pages.py")
    lines = path.read_text().splitlines()
    code, text, inside = [], [], False
    for line in pages.as_markdown(path.read_text()).splitlines():
        if line.startswith("```"):
            inside = not inside
        else:
            (code if inside else text).append(line)
    behind = lines[lines.index(first) :]
    expected = [line for line in behind if line and not line.startswith("#")]
    assert [line for line in code if line] == expected
    comments = [line[2:] for line in behind if line.startswith("#") and line != "#"]
    assert [line for line in text if line][-len(comments) :] == comments
    page = path.with_suffix(".md")
    assert page.read_text().endswith(pages.PAGES[page.name])
