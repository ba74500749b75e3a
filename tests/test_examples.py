"""The examples run as they stand, and check themselves."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from published import UnavailableError

from running import in_sweep

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
OPTIONAL = ("PIL", "scipy", "sklearn", "skl2onnx", "torch", "torchmetrics")


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "path",
    [in_sweep(p) if p.stem.startswith("benchmark_") else p for p in SCRIPTS],
    ids=[p.stem for p in SCRIPTS],
)
def test_example(path, tmp_path, monkeypatch, capsys):
    """They run in this process, which has imported most of what they import."""
    assert len(path.read_text().splitlines()) < 60
    for name in imports(path).intersection(OPTIONAL):
        pytest.importorskip(name)
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except UnavailableError as e:  # a published model, which it downloads
        pytest.skip(str(e))
    plt.close("all")
    assert capsys.readouterr().out.strip()


def test_every_example_is_listed():
    names = [path.name for path in SCRIPTS]
    listed = re.findall(r"(?m)^\| \[.*\]\((.*)\)", (ROOT / "examples" / "README.md").read_text())
    shown = re.findall(r'(?m)^--8<-- "examples/(.*)"$', (ROOT / "docs" / "examples.md").read_text())
    assert sorted(listed) == sorted(shown) == names
