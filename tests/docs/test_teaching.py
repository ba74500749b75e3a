"""The tutorials and guides run as they stand, and check themselves.

Building the site runs them, too: so here, they run in the sweep, but for one page.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from published import UnavailableError, unpack_here

from tests.support.pages import DOCS, TUTORIALS, code_of, require_imports
from tests.support.running import in_sweep

QUICK = "concepts.md"
SCRIPTS = [TUTORIALS / "first_training.py", TUTORIALS / "finetune.py"]
PAGES = [f"guides/{path.name}" for path in sorted((DOCS / "guides").glob("from_*.md"))] + [QUICK]


@pytest.fixture(autouse=True)
def pictures_in_a_temporary_folder(tmp_path, monkeypatch):
    """Files are written to a temporary folder, and no window opens."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


@pytest.mark.parametrize(
    "path",
    [in_sweep(path) for path in SCRIPTS],
    ids=[path.stem for path in SCRIPTS],
)
def test_script(path: Path, capsys):
    import matplotlib.pyplot as plt

    require_imports(path.read_text())
    try:
        if '"published/' in path.read_text():  # else, the script downloads it
            unpack_here("paddle-lines")
        runpy.run_path(str(path))
    except UnavailableError as e:  # a published model, which it downloads
        pytest.skip(str(e))
    assert capsys.readouterr().out.strip()
    assert plt.get_fignums(), "no picture"


@pytest.mark.parametrize("page", [page if page == QUICK else in_sweep(page) for page in PAGES])
def test_page(page: str):
    code = "\n".join(code_of(page))
    require_imports(code)
    exec(compile(code, page, "exec"), {})
