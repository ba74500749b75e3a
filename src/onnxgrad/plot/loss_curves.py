"""Loss curves as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def plot_losses(
    train: Sequence[float], validation: Sequence[float], path: str | os.PathLike
) -> None:
    """Save the losses of every epoch as a PNG; `validation` may be empty."""
    # not pyplot, which would keep the figure and start a window system
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    curves = {"training": train, "validation": validation}
    epochs = {name: range(1, len(losses) + 1) for name, losses in curves.items()}
    _draw(figure.add_subplot(), {n: (epochs[n], losses) for n, losses in curves.items()}, "epoch")
    figure.savefig(path, dpi=120, format="png")


def plot_history(trainer: Any, ax: Any = None) -> Any:
    """Draw the losses of a training over its epochs with matplotlib, and return the axes.

    These are the curves that `onnxgrad train` writes: the training loss of each epoch, and the
    validation loss if there is one. With evaluations within epochs, they are drawn over the steps;
    those of a stack with a line for each member.

    Args:
        trainer: a `Trainer`, a `TrainerStack` or an estimator with a `history`; or entries of one,
            as those that a checkpoint has.
        ax: axes to draw on; None creates a figure.

    Raises:
        ValueError: no epoch has ended yet.

    Examples:
        >>> import onnxgrad as og
        >>> history = [{"step": 4, "epoch": 1, "loss": 2.0}, {"step": 8, "epoch": 2, "loss": 1.0}]
        >>> axes = og.plot_history(history)
        >>> axes.get_lines()[0].get_ydata().tolist()
        [2.0, 1.0]
    """
    history: Sequence[Mapping[str, Any]] = getattr(trainer, "history", trainer)
    if not any("loss" in entry for entry in history):
        raise ValueError("no epoch has ended yet: call fit first")
    axis = "epoch" if all("loss" in entry for entry in history) else "step"
    curves = {}
    for label, name in (("training", "loss"), ("validation", "validation_loss")):
        entries = [entry for entry in history if name in entry]
        curves[label] = [e[axis] for e in entries], np.array([e[name] for e in entries])
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(layout="constrained")[1]
    _draw(ax, curves, axis)
    return ax


def _draw(axes: Any, curves: Mapping[str, tuple[Sequence[float], Any]], over: str) -> None:
    """Draw curves by their labels; several columns are those of members, in one color."""
    from matplotlib.ticker import MaxNLocator

    for label, (x, losses) in curves.items():
        if len(losses):
            first, *others = axes.plot(x, losses, marker=".")
            first.set_label(label)
            for line in others:
                line.set_color(first.get_color())
    axes.set(xlabel=over, ylabel="mean loss of a row")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
