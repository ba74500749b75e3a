"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "onnxgrad"
DOCS = ROOT / "docs"
