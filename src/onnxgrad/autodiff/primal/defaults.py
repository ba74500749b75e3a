"""Inputs with a default: initializers that are among the inputs, so that others can be fed.

`open_defaults` makes them plain inputs, of which no pass and no rule reads the elements, and
`restore_defaults` gives them back their elements and their shapes.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.model.weights import feeds_settings_only
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import dims, is_real, static


def open_defaults(model: ir.Model, origin: ModelProto, own: bool) -> None:
    """Make inputs with a default plain inputs, in place.

    Before IR version 4, all initializers were among the inputs, and could not be fed. Where a file
    still lists all of them, weights too, integers and settings remain constants, as rules read
    them, unless it is a prepared one.
    """
    if origin.ir_version < 4:
        return
    optional = [x for x in model.graph.inputs if x.is_initializer()]
    stored = len(origin.graph.initializer) + len(origin.graph.sparse_initializer)
    sized = [x for x in optional if static(dims(x)) is not None]
    constants = {x for x in sized if not is_real(x) or feeds_settings_only(x)}
    if own or len(optional) < stored or len(constants) == len(sized):
        constants = set()
    for x in optional:
        if x in constants:
            continue
        assert x.const_value is not None
        x.meta[marks.INPUT_DEFAULT] = x.const_value, x.shape
        pairs = zip(dims(x) or (), x.const_value.shape, strict=False)
        x.shape = ir.Shape([d if d == length else None for d, length in pairs])
        del model.graph.initializers[str(x.name)]
        x.const_value = None


def close_defaults(model: ir.Model) -> None:
    """Remove initializers from the inputs, in place: they are constants of the default's shape."""
    for graph in model.graphs():
        for x in [x for x in graph.inputs if x.is_initializer()]:
            graph.inputs.remove(x)
            if x.const_value is not None:
                x.shape = ir.Shape(x.const_value.shape.numpy())


def has_default(x: ir.Value) -> bool:
    """Return whether `x` is an input with a default, in whose place anything can be fed."""
    return marks.INPUT_DEFAULT in x.meta


def is_weight(x: ir.Value) -> bool:
    """Return whether `x` is an input with a default whose stated shape is static."""
    if not has_default(x):
        return False
    _, stated = x.meta[marks.INPUT_DEFAULT]
    return static(dims(ir.Value(shape=stated))) is not None


def restore_defaults(graph: ir.Graph) -> None:
    """Make the inputs with a default initializers again, in place."""
    for x in filter(has_default, graph.inputs):
        x.const_value, x.shape = x.meta.pop(marks.INPUT_DEFAULT)
        graph.initializers.add(x)
