"""New random weights of layers, with the weights of kept units, in place of the old weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt

import numpy as np

from onnxgrad.errors import argument, node_text
from onnxgrad.finetune.layers import Layer, add_initializer, columns_are_units, weight_operands
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims, static

KeptUnitFiller = Callable[[np.ndarray], np.ndarray]


def fresh_weights(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """Return new random weights of shape (units, features, ...), in float64.

    Linear layers: uniform between ±sqrt(6 / (features + units)), equation 16 of Glorot and Bengio,
    2010. Convolutions: normal, of variance 2 / (features * size of the kernel), as equation 10 of
    He et al., 2015 requires.
    """
    rng = np.random.default_rng(seed)
    if kind == "convolution":
        return rng.normal(0, sqrt(2 / prod(shape[1:])), shape)
    limit = sqrt(6 / (shape[0] + shape[1]))
    return rng.uniform(-limit, limit, shape)


def kept_unit_filler(layer: Layer, keep: Sequence[int | None]) -> KeptUnitFiller:
    """Return a function that copies the weights or biases of kept units into a new array of shape
    (units, ...).

    The mean of the kept units is added to the new ones: zero, the score of a fresh unit, would
    often be the largest where the scores of absent classes are far below zero (Hewitt 2021,
    "Initializing new word embeddings for pretrained language models").

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
                f"{argument('keep')} names the old unit {i!r}, and the units of {node_text(node)} "
                f"are 0 to {layer.units - 1}: pass one of these indices"
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
        raise ValueError(
            f"{argument('keep')}: the bias of {node_text(node)} differs by row: leave out keep"
        )
    bias = np.broadcast_to(bias, layer.units)
    factor = node.attributes.get_float("alpha", 1.0)  # the factor of a Gemm, which stays
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


def replace_weights(
    op: Emit,
    layers: Sequence[Layer],
    units: int,
    name: str,
    seed: int,
    kept: Sequence[KeptUnitFiller | None],
) -> list[str]:
    """Give `layers` new weights for `units` units, in place; return the names of the new tensors.

    The names of several layers are numbered. Layers that share their weights share the new ones.

    Args:
        op: emitter of the graph.
        layers: the layers, which standard operators compute: see `standardize`.
        units: the new number of units.
        name: the new tensors are `<name>.weight` and `<name>.bias`.
        seed: of the new weights.
        kept: for each layer, what `kept_unit_filler` returned, or None.
    """
    tied: dict[tuple, tuple[list[Layer], KeptUnitFiller | None]] = {}
    for layer, fill in zip(layers, kept, strict=True):
        read = [(node.op_type, node.inputs[i], i) for node, i in weight_operands(layer)]
        turned = layer.node.attributes.get_int("transB", 0)
        key = (*read, turned)
        tied.setdefault(key, ([], fill))[0].append(layer)
    names = []
    for i, (group, fill) in enumerate(tied.values()):
        own = f"{name}.{i}" if len(tied) > 1 else name
        names += _replace_shared_weights(op, group, units, own, seed + i, fill)
    return names


def _replace_shared_weights(
    op: Emit, layers: Sequence[Layer], units: int, name: str, seed: int, kept: KeptUnitFiller | None
) -> list[str]:
    """Give `layers`, which share one weight, one new weight for `units` units, in place; return the
    names of the new tensors.

    Factors of a Gemm become 1; with `kept` they stay.
    """
    layer = layers[0]
    node, old = layer.node, layer.weights
    weights, biases = fresh_weights((units, *layer.shape[1:]), layer.kind, seed), np.zeros(units)
    if kept is not None:
        weights, biases = kept(weights), kept(biases)
    if columns_are_units(node, layer.operand):
        weights = np.ascontiguousarray(np.swapaxes(weights, 0, 1))
    new = [add_initializer(op, weights, layer.dtype, f"{name}.weight")]
    if layer.bias:
        shape: tuple[int, ...] = (units,)
        dtype = layer.dtype
        if layer.add is not None and (bias := layer.add.inputs[layer.addend]) is not None:
            before, dtype = static(dims(bias)) or (1,), bias.dtype or dtype
            shape = tuple(units if i == layer.bias_axis else 1 for i in range(-len(before), 0))
        new.append(add_initializer(op, biases.reshape(shape), dtype, f"{name}.bias"))
    for each in layers:
        for (reader, i), value in zip(weight_operands(each), new, strict=True):
            reader.replace_input_with(i, value)
        for attribute in ("alpha", "beta") if kept is None else ():
            each.node.attributes.pop(attribute, None)
    for value in old:  # before IR version 4, initializers had to be inputs
        if value.is_graph_input() and value.const_value is not None and not value.uses():
            op.graph.inputs.remove(value)
            op.graph.initializers.pop(str(value.name), None)
    for value, role in zip(new, ("weight", "bias"), strict=False):
        former = op.graph.initializers.get(f"{name}.{role}")
        # it belonged to an earlier new head
        if former in old and former is not None and not former.uses():
            former.name = op.name("unused")
            value.name = f"{name}.{role}"
    return [str(v.name) for v in new]
