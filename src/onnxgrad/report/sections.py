"""The sections of a report: records of a training as values that the page shows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onnxgrad.report import figures
from onnxgrad.report.predictions import class_name

DRAWN = 48  # weights with a small chart of norms
CLASSES = 20  # most classes for which the confusion matrix is shown
CONFUSIONS = 20  # pairs of classes that are listed instead of a larger matrix
_VALIDATION = "validation_"
_VALIDATION_LOSS = f"{_VALIDATION}loss"
_PICTURE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+=*")
_KNOWN = ("step", "epoch", "loss", "learning_rate", _VALIDATION_LOSS)

Run = Mapping[str, Any]


def summary_tiles(run: Run) -> list[tuple[str, Any, str]]:
    """Return (title, value, remark) for the most important numbers of a training.

    Losses and metrics belong to the kept weights, if the record says which weights were kept.
    """
    history, step = run.get("history") or [], (run.get("kept") or {}).get("step")
    kept: Mapping[str, Any] = next((r for r in history if r["step"] == step), {})
    shown: list[tuple[str, Any, str]] = []
    losses = {"loss": "loss", _VALIDATION_LOSS: "validation loss"}
    for name in [*losses, *_metric_names(history)]:
        records = [r for r in history if _is_number(r.get(name))]
        if not records:
            continue
        record = kept if kept in records else records[-1]
        remark = f"at step {record['step']:g}"
        if name in losses:
            best = min(records, key=lambda r: r[name])
            remark = f"lowest {best[name]:.4g} at step {best['step']:g}"
        shown.append((losses.get(name, _entry_title(name)), record[name], remark))
    for title, key, column in (("epochs", "epochs", "epoch"), ("steps", "step", "step")):
        count: Any = run.get(key) or (history[-1].get(column) if history else None)
        shown.append((title, int(count) if _is_number(count) else None, ""))
    return shown


def history_charts(run: Run) -> list[figures.Chart]:
    """Return the charts of a training: the curves of the history, and the loss by step."""
    history, steps = run.get("history") or [], run.get("steps") or []

    def history_series(name: str, label: str = "") -> figures.Series:
        records = [r for r in history if _is_number(r.get(name))]
        return label or name, [r["step"] for r in records], [r[name] for r in records]

    names = _numeric_entry_names(history)
    others = [n for n in names if not n.startswith(_VALIDATION) and n not in _KNOWN]
    losses = [history_series("loss", "training"), history_series(_VALIDATION_LOSS, "validation")]
    rated = [s for s in steps if s[3] is not None]
    rates = ("learning rate", [s[0] for s in rated], [s[3] for s in rated])
    curves: list[tuple[str, list[figures.Series]]] = [
        ("loss", losses),
        ("loss by step", [("loss", [s[0] for s in steps], [s[2] for s in steps])]),
        *((_entry_title(name), [history_series(name)]) for name in _metric_names(history)),
        ("learning rate", [rates if rated else history_series("learning_rate", "learning rate")]),
        *((_entry_title(name), [history_series(name)]) for name in others),
    ]
    recorded = [(title, [one for one in series if len(one[1])]) for title, series in curves]
    return [figures.line_chart(t, series, t != "learning rate") for t, series in recorded if series]


def norm_charts_and_weights(run: Run) -> tuple[list[figures.Chart], list[dict[str, Any]]]:
    """Return the charts of norms over all weights, and for each of the largest weights a dict of
    its curves.
    """
    records = run.get("norms") or []
    steps = [r["step"] for r in records]
    drawn = []
    for kind, title in (("gradient", "norm of all gradients"), ("update", "norm of the updates")):
        values = [math.hypot(*r[kind].values()) if r.get(kind) else math.nan for r in records]
        if any(map(math.isfinite, values)):
            drawn.append(figures.line_chart(title, [(title, steps, values)]))
    weights = run.get("weights") or {}
    before, after = run.get("before") or {}, run.get("after") or {}
    largest = sorted(weights, key=lambda name: -weights[name]["size"])[:DRAWN]
    cards = []
    for name in [n for n in weights if n in set(largest)]:
        curves = {k: [r[k].get(name) for r in records] for k in ("gradient", "update", "weight")}
        cards.append(
            {
                "name": name,
                **weights[name],
                "curves": {
                    kind: {
                        "svg": figures.sparkline(values),
                        "first": next(filter(_is_number, values)),
                        "last": values[-1],
                    }
                    for kind, values in curves.items()
                    if any(map(_is_number, values))
                },
                "histogram": figures.histogram_pair(before.get(name), after.get(name)),
                "ranges": [(h["low"], h["high"]) for h in (before.get(name), after.get(name)) if h],
            }
        )
    return drawn, cards


def output_sections(run: Run) -> list[dict[str, Any]]:
    """Return the confusions or the residuals of each output of the model."""
    shown = []
    for output in (run.get("examined") or {}).get("outputs", ()):
        if output["kind"] == "classes":
            output = _confusion_table(output, run.get("classes"))
        elif output["kind"] == "numbers":
            drawn = []
            for i, column in enumerate(output["columns"]):
                number = f" {i}" if len(output["columns"]) > 1 else ""
                drawn.append(figures.scatter_chart(f"predictions{number}", column["points"]))
                residuals = f"residuals{number}", column["residuals"]
                drawn.append(figures.histogram_chart(*residuals, "prediction − label"))
            output = {**output, "charts": drawn}
        shown.append(output)
    return shown


def rows_of_largest_loss(run: Run) -> list[dict[str, Any]]:
    """Return the rows of data with the largest loss, with names of classes and of files."""
    classes, rows, keys = run.get("classes"), [], ("label", "prediction", "score")
    for row in (run.get("examined") or {}).get("worst", ()):
        values = []
        for value in row["values"]:
            names = classes if value.get("classes") else None
            texts = (_values_text(value.get(k), None if k == "score" else names) for k in keys)
            values.append(dict(zip(keys, texts, strict=True)))
        columns = [keys if "score" in value else keys[:2] for value in row["values"]]
        picture = row.get("picture")
        shown = picture if isinstance(picture, str) and _PICTURE.fullmatch(picture) else None
        more = {"file": row.get("file"), "picture": shown, "columns": columns}
        rows.append({**row, **more, "values": values})
    return rows


def operator_shares(run: Run) -> list[dict[str, Any]]:
    """Return the operators of a step, each with its share of the step's time."""
    rows = (run.get("operators") or {}).get("rows", ())
    total = sum(row[2] for row in rows) or 1.0
    keys = ("operator", "nodes", "seconds", "nbytes")
    return [{**dict(zip(keys, row, strict=True)), "share": row[2] / total} for row in rows]


def _confusion_table(output: Mapping[str, Any], classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the confusion matrix; of more than `CLASSES` classes, the most frequent confusions."""
    count, pairs = output["classes"], output["confusion"]
    boxes = bool(output.get("boxes"))
    if boxes:  # whose last class is no box
        classes = [*(class_name(i, classes) for i in range(count - 1)), "no box"]
    total = sum(n for _, _, n in pairs)
    hits = sum(n for a, b, n in pairs if a == b)
    shown = {
        **output,
        "boxes": boxes,
        "total": total,
        "hits": hits,
        "accuracy": hits / total if total else None,
        "names": [class_name(i, classes) for i in range(min(count, CLASSES))],
        "matrix": None,
    }
    if count <= CLASSES:
        matrix = [[0] * count for _ in range(count)]
        for a, b, n in pairs:
            matrix[a][b] = n
        shown["matrix"] = [[(n, n / (sum(row) or 1)) for n in row] for row in matrix]
        return shown
    wrong = sorted((p for p in pairs if p[0] != p[1]), key=lambda p: -p[2])[:CONFUSIONS]
    shown["pairs"] = [(class_name(a, classes), class_name(b, classes), n) for a, b, n in wrong]
    return shown


def _values_text(values: Any, names: Sequence[str] | None) -> str:
    if values is None:
        return "–"
    return ", ".join(
        class_name(v, names) if names else f"{v:.5g}" if isinstance(v, float) else str(v)
        for v in values
    )


def _metric_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    names = _numeric_entry_names(history)
    return [n for n in names if n.startswith(_VALIDATION) and n != _VALIDATION_LOSS]


def _numeric_entry_names(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the numbers in the records of a history."""
    return list(dict.fromkeys(n for r in history for n, v in r.items() if _is_number(v)))


def _entry_title(name: str) -> str:
    return name.replace("_", " ")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
