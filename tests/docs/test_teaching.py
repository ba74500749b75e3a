"""The tutorials, recipes and guides run as they stand, and check themselves.

Building the site runs them, too: so here, they run in the sweep only.
"""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from published import UnavailableError, unpack_here

from onnxgrad.graph.operators import OPERATORS
from tests.support.pages import DOCS, TUTORIALS, code_of

RECIPES = sorted((DOCS / "recipes").glob("*.py"))
SCRIPTS = [*RECIPES, TUTORIALS / "first_training.py", TUTORIALS / "finetune.py"]
PAGES = [*sorted(f"guides/{path.name}" for path in (DOCS / "guides").glob("*.md")), "concepts.md"]
OPTIONAL = (
    "PIL",
    "jax",
    "optax",
    "pandas",
    "scipy",
    "skl2onnx",
    "sklearn",
    "torch",
    "transformers",
)


def require(code: str) -> None:
    """Skip the test if the code imports what is not installed."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    for name in {name.partition(".")[0] for name in names}.intersection(OPTIONAL):
        pytest.importorskip(name)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Files are written to a temporary folder, and rules are forgotten."""
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    before = dict(OPERATORS)
    yield
    OPERATORS.clear()
    OPERATORS.update(before)
    plt.close("all")


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:the loss does not depend on")  # own_rule.py shows it
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, capsys):
    require(path.read_text())
    try:
        if '"published/' in path.read_text():  # else, the script downloads it
            unpack_here("paddle-lines")
        runpy.run_path(str(path))
    except UnavailableError as e:  # a published model, which it downloads
        pytest.skip(str(e))
    assert capsys.readouterr().out.strip()
    assert plt.get_fignums(), "no picture"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_short(path: Path):
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("page", PAGES)
def test_page_compares(page: str):
    assert any("assert" in code for code in code_of(page))


@pytest.mark.sweep
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str):
    code = "\n".join(code_of(page))
    require(code)
    exec(compile(code, page, "exec"), {})
