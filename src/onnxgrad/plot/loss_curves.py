"""Loss curves as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence


def plot_losses(
    train: Sequence[float], validation: Sequence[float], path: str | os.PathLike
) -> None:
    """Save the losses of every epoch as a PNG; `validation` may be empty."""
    # not pyplot, which would keep the figure and start a window system
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="epoch", ylabel="mean loss of a row")
    for losses, label in ((train, "training"), (validation, "validation")):
        if len(losses):
            axes.plot(range(1, len(losses) + 1), losses, marker=".", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=120, format="png")
