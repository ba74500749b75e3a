"""Units of a layer that keep their weights when the layer is replaced."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrad.errors import argument, node_text
from onnxgrad.finetune.layers import Layer, columns_are_units
from onnxgrad.finetune.new_weights import Fill


def check_keep(keep: Sequence[int | None] | None, units: int) -> None:
    """Raise `ValueError` unless `keep` has an entry for each of the new units."""
    if keep is not None and len(keep) != units:
        raise ValueError(
            f"{argument('keep')} has {len(keep)} entries, and the new layer has {units} units: "
            "pass for each the index of an old one, or None"
        )


def kept_units(layer: Layer, keep: Sequence[int | None]) -> Fill:
    """Return what puts the weights or biases of old units among new ones, (units, ...).

    The new ones begin around the mean of the old ones: zero, the score of a fresh one, would often
    be the largest where scores of classes that are absent are far below (Hewitt 2021, "Initializing
    new word embeddings for pretrained language models").

    Args:
        layer: the layer, before it is changed.
        keep: for each new unit the index of the old one, or None.

    Raises:
        ValueError: an index that the layer does not have, or weights that are not constants of the
            file, in floats.
    """
    node = layer.node
    for i in keep:
        if i is not None and not 0 <= i < layer.units:
            raise ValueError(
                f"{argument('keep')} has {i!r}, and the units of {node_text(node)} are 0 to "
                f"{layer.units - 1}"
            )
    constants = [None if v.const_value is None else v.const_value.numpy() for v in layer.weights]
    arrays = [np.asarray(a, np.float64) for a in constants if a is not None]
    if not arrays or len(arrays) < len(constants) or node.op_type == "MatMulNBits":
        raise ValueError(
            f"{argument('keep')}: the weights of {node_text(node)} are quantized, computed, or "
            "attributes of ai.onnx.ml: pass a model that stores them as floats"
        )
    weights = np.swapaxes(arrays[0], 0, 1) if columns_are_units(node, layer.operand) else arrays[0]
    bias = arrays[1].ravel() if len(arrays) > 1 else np.zeros(1)
    if bias.size not in (1, layer.units):
        raise ValueError(f"{argument('keep')}: the bias of {node_text(node)} differs by row")
    bias = np.broadcast_to(bias, layer.units)
    factor = node.attributes.get_float("alpha", 1.0)  # of a Gemm, which stays

    kept = [unit for unit in keep if unit is not None]

    def fill(new: np.ndarray) -> np.ndarray:
        old, new = (weights, new / factor) if new.ndim > 1 else (bias, new.copy())
        if kept:
            new += old[kept].mean(axis=0)
        for i, unit in enumerate(keep):
            if unit is not None:
                new[i] = old[unit]
        return new

    return fill
