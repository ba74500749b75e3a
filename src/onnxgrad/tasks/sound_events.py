"""What is heard in files: scores of windows, events, and the files that people look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import onnxgrad as og
from onnxgrad.tasks.base import write_csv


@dataclass(frozen=True, eq=False)
class Heard:
    """What a model hears in a file.

    Attributes:
        times: second at which each window begins, (windows,).
        scores: probability of each class in each window, (windows, classes).
        events: (start, end, class, score), in seconds; the score is the largest of its windows.
        label: of several classes, the one of the largest mean score; of one, its name if there is
            an event, and None without.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.tasks.sound import Heard
        >>> Heard(np.zeros(1), np.ones((1, 1)), [(0.0, 1.0, "alexa", 0.9)], "alexa").label
        'alexa'
    """

    times: np.ndarray
    scores: np.ndarray
    events: list[tuple[float, float, str, float]]
    label: str | None


def hear(
    scores: np.ndarray,
    times: tuple[np.ndarray, float, float],
    classes: Sequence[str],
    background: str,
    threshold: float,
    hold: float,
) -> Heard:
    """Return the events in the scores of windows: runs of those over the threshold.

    `times` are where the windows begin, from one to the next, and how long one is, in seconds.
    """
    starts, step, size = times
    best, events = scores.argmax(axis=1), []
    for k, name in enumerate(classes):
        over = np.flatnonzero((scores[:, k] >= threshold) & (best == k))
        if name == background or not len(over):
            continue
        gaps = np.flatnonzero(np.diff(over) > 1 + int(hold / step + 1e-9))
        for run in np.split(over, gaps + 1):
            score = float(scores[run, k].max())
            events.append((float(starts[run[0]]), float(starts[run[-1]] + size), name, score))
    most = classes[int(scores.mean(axis=0).argmax())]
    return Heard(starts, scores, sorted(events), most if events or len(classes) > 1 else None)


def write_events(inputs: Any, results: Iterable[Heard], folder: Path) -> list[Path]:
    """Write `events.csv`, and a label track of Audacity for each file; return the files."""
    heard = [
        (name, each) for (name, _), each in zip(og.data.list_sounds(inputs), results, strict=True)
    ]
    rows = ([name, *event] for name, each in heard for event in each.events)
    written = [write_csv(folder / "events.csv", ["file", "start", "end", "label", "score"], rows)]
    for name, each in heard:
        track = folder / f"{Path(name).stem}.txt"
        if track in written:
            track = folder / f"{Path(name).stem}-{len(written)}.txt"
        lines = (f"{start:.6f}\t{end:.6f}\t{label}\n" for start, end, label, _ in each.events)
        track.write_text("".join(lines), encoding="utf-8")
        written.append(track)
    return written
