"""The examples run as they stand, check themselves, and have the form of the gallery.

Building the site runs them, too: so here, they run in the sweep only.
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests.support.paths import ROOT
from tests.support.running import in_sweep

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.py"))
OPTIONAL = ("PIL", "pandas", "scipy", "skl2onnx", "sklearn", "torch", "torchmetrics")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def lines_of_code(text: str) -> int:
    """Return the number of lines with code: without text cells, comments, imports and blanks."""
    tree = ast.parse(text)
    skipped = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    left_out = {i for n in (tree.body[0], *skipped) for i in range(n.lineno, n.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [t for t in tokens if t.type not in LAYOUT and t.string]
    return len({i for t in code for i in range(t.start[0], t.end[0] + 1)} - left_out)


def title(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize(
    "path",
    map(in_sweep, SCRIPTS),
    ids=[p.stem for p in SCRIPTS],
)
def test_example(path, tmp_path, monkeypatch, capsys):
    """They run in this process, which has imported most of what they import."""
    for name in imports(path).intersection(OPTIONAL):
        pytest.importorskip(name)
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ConnectionError as e:  # a published model, which it downloads
        pytest.skip(str(e))
    finally:
        plt.close("all")
    assert capsys.readouterr().out.strip()
    assert not list(tmp_path.iterdir())  # the gallery runs them in their own folder


@pytest.mark.parametrize("path", SCRIPTS, ids=[p.stem for p in SCRIPTS])
def test_form(path):
    """A title, an introduction, cells of text, and little code."""
    text = path.read_text()
    first, underline, blank, *introduction = ast.get_docstring(ast.parse(text)).splitlines()
    assert underline == "=" * len(first)
    assert not blank
    assert introduction
    assert text.count("\n# %%\n") >= 2
    assert lines_of_code(text) < 60
    assert "__file__" not in text  # the gallery has none


def test_sections_have_a_title():
    for folder in {path.parent for path in SCRIPTS} | {EXAMPLES}:
        first, underline, *_ = (folder / "README.rst").read_text().splitlines()
        assert underline in ("-" * len(first), "=" * len(first))


def test_every_example_is_listed():
    """The list has each script once, with the section and the title that the gallery shows."""
    text = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"(?m)^\| \[(.*)\]\((.*)\) \|", text)
    expected = [(title(path), str(path.relative_to(EXAMPLES))) for path in SCRIPTS]
    assert sorted(listed) == sorted(expected)
    for folder in {path.parent for path in SCRIPTS}:
        section, *_ = (folder / "README.rst").read_text().splitlines()
        assert f"\n## {section}\n" in text
