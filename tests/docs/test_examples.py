"""The examples run as they stand and check themselves.

Building the site runs them, too: so here, they run in the sweep, but for one.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.support.pages import require_imports
from tests.support.paths import ROOT
from tests.support.running import in_sweep

QUICK = "linear_model"
SCRIPTS = sorted((ROOT / "examples").glob("*/*.py"))


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize(
    "path",
    [path if path.stem == QUICK else in_sweep(path) for path in SCRIPTS],
    ids=[path.stem for path in SCRIPTS],
)
def test_example(path: Path, tmp_path, monkeypatch, capsys):
    """They run in this process, which has imported most of what they import."""
    import matplotlib.pyplot as plt

    require_imports(path.read_text())
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
