"""The pages of the site, as files. Building it runs their code and fails at broken links."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(
    p for p in DOCS.rglob("*.md") if not p.relative_to(DOCS).parts[0].startswith("auto_")
)
SCRIPTS = sorted(path for name in ("tutorials", "recipes") for path in (DOCS / name).glob("*.py"))
FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
NOT_PYTHON = {"bash", "toml", "js", "ts", "csharp", "text", "json"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_code_is_run_or_no_python(path):
    """Code is a `{code-cell}`, which the build runs, or says which other language it is in."""
    text = path.read_text()
    kinds = [kind.strip() for _, kind, _ in FENCE.findall(text)]
    assert [kind for kind in kinds if kind not in NOT_PYTHON and kind[:1] != "{"] == []
    if cells := [code for _, kind, code in FENCE.findall(text) if kind.startswith("{code-cell}")]:
        assert text.startswith("---\nfile_format: mystnb\n"), "without it, no cell is run"
    for code in cells:
        ast.parse(re.sub(r"^:.*\n", "", code, flags=re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_words_of_the_field_are_explained_where_first_used(path):
    """On each page, the first is a link to the glossary, or to the page of kinks."""
    text = re.sub(r"\{term\}`(?:[^`<]*<)?(\w+)>?`", r"TERM-\1", FENCE.sub("", path.read_text()))
    text = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*kinks\.md\)|\]\([^)]*\)", "", text)
    explained = {"concepts.md": ["cotangent", "kink", "slot"], "kinks.md": ["kink"]}
    explained["operators.md"] = ["kink"]
    for word in {"cotangent", "kink", "slot"}.difference(explained.get(path.name, ())):
        first = re.search(rf"(TERM-)?\b{word}s?\b", text, re.IGNORECASE)
        assert first is None or first[1], word


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_has_a_title_and_text(path):
    title, line, *_ = ast.get_docstring(ast.parse(path.read_text())).splitlines()
    assert set(line) == {"="}
    assert len(line) >= len(title)
    assert re.search(r"^# %%\n# \w", path.read_text(), re.MULTILINE)


READ_FROM_PACKAGES = SCRIPTS + sorted(DOCS.with_name("examples").rglob("*.py"))
LATER = ("first_training.py", "finetune.py")


@pytest.mark.parametrize("path", READ_FROM_PACKAGES, ids=lambda path: path.stem)
def test_scripts_run_without_the_repository(path):
    """They are downloaded alone, also as notebooks: what they read, they make or import."""
    if path.name not in LATER:
        assert re.findall("__file__|digits_cnn|digits.parquet", path.read_text()) == []


def test_picture_of_the_idea_is_that_of_today(monkeypatch):
    """If this fails, run `python docs/idea.py`."""
    monkeypatch.syspath_prepend(str(DOCS))
    idea = importlib.import_module("idea")
    models = idea.stages()
    for name, down in {"idea.svg": False, "idea-narrow.svg": True}.items():
        assert (DOCS / "images" / name).read_text() == idea.picture(models, down)
    alt = re.findall(r":alt: .*", (DOCS / "index.md").read_text())
    assert all(f"of {sum(models[0][2].values())} nodes" in text for text in alt)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the mean of |f - y|, as *that*", r"the mean of \|f - y\|, as \*that\*"),
        ("a function `(op, **options)`", "a function `(op, **options)`"),
        (
            "all `OrtValue`s that begin with validation_",
            r"all `OrtValue`\ s that begin with validation\_",
        ),
        ("    **options: others of |w|", r"    **options: others of \|w\|"),
        ("Examples:\n    >>> f(*x) | 1\n    2", "Examples:\n    >>> f(*x) | 1\n    2"),
        ("|a|\n\n>>> 2 * 2\n4\n\n|b|", "\\|a\\|\n\n>>> 2 * 2\n4\n\n\\|b\\|"),
    ],
)
def test_docstrings_are_shown_as_they_are(text, expected, monkeypatch):
    """What is plain text in a docstring is no markup on the page of the API."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    lines = text.split("\n")
    importlib.import_module("api_pages").as_rest(None, "class", "", None, None, lines)
    assert lines == expected.split("\n")


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("<matplotlib.legend.Legend object at 0x7f4eb5c124d0>", True),
        ("[Text(0.5, 18.5, 'epoch'), Text(419.2, 0.5, 'accuracy')]", True),
        ("<function f at 0x7f4eb5c124d0>", True),
        ("Text(x) of an object, at 0.5", False),
    ],
    ids=["object", "labels", "function", "text"],
)
def test_outputs_that_only_python_reads_are_found(output, found, monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    assert bool(importlib.import_module("page_checks").REPR.search(output)) == found


def test_pictures_of_a_gallery_have_the_titles_of_their_scripts(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    source = [
        "  .. image:: /images/thumb/a.png\n    :alt:\n\n  :doc:`/a`\n\n.. raw:: html\n\n"
        '      <div class="sphx-glr-thumbnail-title">A title</div>\n'
    ]
    importlib.import_module("page_checks").name_thumbnails(None, "", source)
    assert "    :alt: A title\n\n  :doc:`/a`" in source[0]
