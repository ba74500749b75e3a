"""The whole table of rules: the rows of `cases.py` and of every file `*_rows.py`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.support.cases import ROWS

for file in sorted(Path(__file__).parent.glob("*_rows.py")):
    import_module(f"tests.support.{file.stem}")

__all__ = ["ROWS"]
