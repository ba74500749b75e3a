"""Loss curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def plot_history(trainer: Any, ax: Any = None) -> Any:
    """Draw the losses of a training over its epochs with matplotlib, and return the axes.

    These are the curves that `onnxgrad train` writes: the training loss of each epoch, and the
    validation loss if there is one. With evaluations within epochs, the x axis counts steps. Of a
    stack, there is a line for each member.

    Args:
        trainer: a `Trainer` or a `TrainerStack`; or a history, as a checkpoint and `History` have.
        ax: axes to draw on; None creates a figure.

    Raises:
        ValueError: no epoch has ended yet.

    Examples:
        >>> import onnxgrad as og
        >>> history = [{"step": 4, "epoch": 1, "loss": 2.0}, {"step": 8, "epoch": 2, "loss": 1.0}]
        >>> axes = og.plot.plot_history(history)
        >>> axes.get_lines()[0].get_ydata().tolist()
        [2.0, 1.0]
    """
    history: Sequence[Mapping[str, Any]] = getattr(trainer, "history", trainer)
    if not any("loss" in entry for entry in history):
        raise ValueError("no epoch has ended yet: call fit first")
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(layout="constrained")[1]
    from matplotlib.ticker import MaxNLocator

    axis = "epoch" if all("loss" in entry for entry in history) else "step"
    for label, name in (("training", "loss"), ("validation", "validation_loss")):
        entries = [entry for entry in history if name in entry]
        if not entries:
            continue
        losses = np.array([entry[name] for entry in entries])
        first, *members = ax.plot([entry[axis] for entry in entries], losses, marker=".")
        first.set_label(label)
        for line in members:  # in one color
            line.set_color(first.get_color())
    ax.set(xlabel=axis, ylabel="mean loss of a row")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend()
    return ax
