"""New weights of layers: drawn, and put in the place of old ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt

import numpy as np

from onnxgrad.finetune.layers import Layer, columns_are_units, initializer, operands
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.shapes import dims, static

Fill = Callable[[np.ndarray], np.ndarray]


def fresh(shape: tuple[int, ...], kind: str, seed: int) -> np.ndarray:
    """Return new weights (units, features, ...) in float64.

    Linear layers: uniform between ±sqrt(6 / (features + units)), equation 16 of Glorot and Bengio,
    2010. Convolutions: normal, of variance 2 / (features * size of the kernel), as equation 10 of
    He et al., 2015 requires.
    """
    rng = np.random.default_rng(seed)
    if kind == "convolution":
        return rng.normal(0, sqrt(2 / prod(shape[1:])), shape)
    limit = sqrt(6 / (shape[0] + shape[1]))
    return rng.uniform(-limit, limit, shape)


def replace_all(
    op: Emit,
    layers: Sequence[Layer],
    units: int,
    name: str,
    seed: int,
    kept: Sequence[Fill | None],
) -> list[str]:
    """Give `layers` new weights for `units` units, in place; return their names.

    Those of several are numbered. Layers that share their weights share the new ones. `kept` puts
    old units among the new weights and biases of each layer.
    """
    tied: dict[tuple, tuple[list[Layer], Fill | None]] = {}
    for layer, fill in zip(layers, kept, strict=True):
        read = [(node.op_type, node.inputs[i], i) for node, i in operands(layer)]
        turned = layer.node.attributes.get_int("transB", 0)
        key = (*read, turned)
        tied.setdefault(key, ([], fill))[0].append(layer)
    names = []
    for i, ((first, *twins), fill) in enumerate(tied.values()):
        own = f"{name}.{i}" if len(tied) > 1 else name
        names += replace_weights(op, first, units, own, seed + i, twins, fill)
    return names


def replace_weights(
    op: Emit,
    layer: Layer,
    units: int,
    name: str,
    seed: int,
    twins: Sequence[Layer] = (),
    kept: Fill | None = None,
) -> list[str]:
    """Give `layer`, and `twins` with the same weights, new ones for `units` units, in place.

    Standard operators must compute it: see `standardize`. Factors of a Gemm become 1; with `kept`,
    which puts old units among the new weights and biases, they stay.

    Returns:
        The names of the new tensors.
    """
    node, old = layer.node, layer.weights
    weights, biases = fresh((units, *layer.shape[1:]), layer.kind, seed), np.zeros(units)
    if kept is not None:
        weights, biases = kept(weights), kept(biases)
    if columns_are_units(node, layer.operand):
        weights = np.ascontiguousarray(np.swapaxes(weights, 0, 1))
    new = [initializer(op, weights, layer.dtype, f"{name}.weight")]
    if layer.bias:
        shape: tuple[int, ...] = (units,)
        dtype = layer.dtype
        if layer.add is not None and (bias := layer.add.inputs[layer.addend]) is not None:
            before, dtype = static(dims(bias)) or (1,), bias.dtype or dtype
            shape = tuple(units if i == layer.bias_axis else 1 for i in range(-len(before), 0))
        new.append(initializer(op, biases.reshape(shape), dtype, f"{name}.bias"))
    for each in (layer, *twins):
        for (reader, i), value in zip(operands(each), new, strict=True):
            reader.replace_input_with(i, value)
        for attribute in ("alpha", "beta") if kept is None else ():
            each.node.attributes.pop(attribute, None)
    for value in old:  # before IR version 4, the names of initializers were inputs
        if value.is_graph_input() and value.const_value is not None and not value.uses():
            op.graph.inputs.remove(value)
            op.graph.initializers.pop(str(value.name), None)
    for value, role in zip(new, ("weight", "bias"), strict=False):
        former = op.graph.initializers.get(f"{name}.{role}")
        if former in old and former is not None and not former.uses():  # of an earlier new head
            former.name = op.name("unused")
            value.name = f"{name}.{role}"
    return [str(v.name) for v in new]
