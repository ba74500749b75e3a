"""The form of a prepared graph that trains: statistics of the batch, and dropout."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxgrad.checks import check_choice
from onnxgrad.graph.emit import Emit
from onnxgrad.parallel import Part
from onnxgrad.training.modes import dropouts, statistics

BATCH_NORM = ("frozen", "train")


def training_form(
    op: Emit,
    *,
    batch_norm: str,
    dropout: Mapping[str, float],
    draw: ir.Value | None,
    seed: int,
    across: Part | None = None,
) -> dict[ir.Value, ir.Value]:
    """Rewrite a prepared graph, in place, into the form that trains.

    Masks of dropout are a function of `seed`, `draw`, the index of the dropout and the position in
    the tensor: a resumed run draws the same ones.

    Args:
        op: writes into the graph, before anything else is added to it.
        batch_norm: "frozen": every BatchNormalization normalizes by its stored statistics, also one
            exported in training mode; one whose statistics are computed is left as it is. "train":
            by the statistics of the batch, as `torch.nn.BatchNorm2d` in training mode. The running
            ones become `momentum * old + (1 - momentum) * batch`, the variance of the batch with
            the divisor n - 1 instead of n; they are float32 if the file has them in half precision.
            A batch with one value per channel fails when the model runs (the node is named
            "BatchNormalization ... needs more than one value per channel"), as it does in PyTorch.
        dropout: `{pattern: probability}`. A pattern is the name of a node or of its output, or a
            wildcard of `fnmatch` for several. Where it matches Dropout nodes, it sets their
            probability, 0 to switch them off; else dropout is inserted after the matching float
            outputs. Later patterns override earlier ones. Dropout nodes in inference mode are there
            to be matched only if the graph was prepared with `keep_dropout`.
        draw: number of the draw, such as that of the micro-batch: one integer, or one float that
            holds an integer. May be None if no dropout is active.
        seed: any integer.
        across: the part of this process, if the statistics are those of the rows of all processes.

    Returns:
        `{statistic: its new value}`: the running means and variances, which became inputs of the
        graph, named as the tensors in the file.

    Raises:
        ValueError: a pattern without a match, a probability outside of [0, 1), a Dropout node whose
            settings are computed, dropout in the body of a Loop or Scan, or no `draw`. For "train":
            no BatchNormalization, one in a subgraph, or statistics that are computed, or merged
            with another tensor (see `separate_statistics`).
    """
    check_choice("batch_norm", batch_norm, BATCH_NORM)
    dropouts.write(op, dropouts.sites(op.graph, dropout), draw, seed)
    return statistics.train(op, across) if batch_norm == "train" else statistics.freeze(op)
