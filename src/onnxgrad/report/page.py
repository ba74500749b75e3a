"""`write_report`: a training as one page of HTML."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxgrad.errors import printable_lines
from onnxgrad.model.files import check_writable, replacement_file
from onnxgrad.report import sections
from onnxgrad.report.run import load_run

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "report.html"
_KEYS = """source begun seconds stop_reason reason kept peak_memory epochs step history steps norms
weights before after examined operators model about samples parameters environments classes"""
_RECORD = (
    "`onnxgrad train --record FOLDER`, or `onnxgrad.callbacks.Recorder(FOLDER)` among the callbacks"
)


def write_report(
    run: str | os.PathLike, output: str | os.PathLike | None = None, *, overwrite: bool = True
) -> Path:
    """Write the records of a training as one page of HTML, which needs no network and no script.

    The page shows curves of the loss, of metrics and of the learning rate; norms of gradients and
    updates, and histograms before and after for each weight; confusions or residuals, and the rows
    with the largest loss; the time and memory of each operator; the model, the versions and the
    machine. Where a part was not recorded, the page says so, and how to record it.

    Args:
        run: the folder of a `Recorder`; a history in CSV or JSON, as `History` writes it; the
            folder of a `Checkpoint`.
        output: where to write; None: `report.html` in the folder of the run.
        overwrite: whether a file of this name is replaced.

    Returns:
        The file that was written.

    Raises:
        FileNotFoundError: `run` has nothing that was recorded.
        FileExistsError: `output` exists, and `overwrite` is false.
        ValueError: the file is damaged, or of another kind.

    Examples:
        >>> import tempfile, onnxgrad as og
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = Path(folder, "history.csv")
        ...     _ = log.write_text("step,epoch,loss,learning_rate\\n4,1,0.5,0.1\\n8,2,0.25,0.1\\n")
        ...     page = og.plot.write_report(log, Path(folder, "page.html"))
        ...     "validation loss" in page.read_text()
        False
    """
    path = Path(run)
    if output is None:
        output = (path if path.is_dir() else path.parent) / PAGE
    loaded = load_run(path)
    check_writable(output, overwrite, [path] if path.is_file() else [])
    try:
        text = html_page(loaded, path.name if path.name else str(path.resolve().name))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as e:
        raise ValueError(f"{path} is damaged, record it again: {type(e).__name__}: {e}") from e
    with replacement_file(output) as file:
        file.write_text(text, encoding="utf-8")
    return Path(output)


def html_page(run: Mapping[str, Any], name: str) -> str:
    """Return the HTML page of the records of a training, which `load_run` has read."""
    run = {**dict.fromkeys(_KEYS.split()), **run}
    norms, cards = sections.norm_charts_and_weights(run)
    return _page_template().render(
        run=run,
        name=name,
        tiles=sections.summary_tiles(run),
        charts=sections.history_charts(run),
        norms=norms,
        cards=cards,
        hidden=len(run["weights"] or {}) - len(cards),
        outputs=sections.output_sections(run),
        worst=sections.rows_of_largest_loss(run),
        operators=sections.operator_shares(run),
        absent={"examined": "", "operators": "", "samples": "", **(run.get("absent") or {})},
        record=_RECORD,
    )


@cache
def _page_template() -> Template:
    """Return the HTML template of the page, which escapes every text, as texts come from files."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("onnxgrad.report", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "num": _format_number,
        "score": _format_score,
        "bytes": _format_bytes,
        "time": _format_time,
        "safe_text": printable_lines,
    }
    return environment.get_template("page.html")


def _format_number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _format_score(value: Any) -> str:
    """Return a number as text with 4 digits; a whole float has two decimals, as 1.00."""
    text = _format_number(value)
    return f"{value:.2f}" if isinstance(value, float) and text.strip("-").isdigit() else text


def _format_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def _format_time(seconds: float) -> str:
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.3g} {unit}"
