"""Linear and convolutional layers: where their weights are, and how they become standard ones."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import named, node_text
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import all_nodes, dependents
from onnxgrad.model.constants import standard
from onnxgrad.operators import operator_of
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.shapes import dims, rank, static

MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"

# (domain, operator) -> index of the weights, of the bias (None: it has none)
_OPERANDS: dict[tuple[str, str], tuple[int, int | None]] = {
    ("", "MatMul"): (1, None),
    ("", "Gemm"): (1, 2),
    ("", "Conv"): (1, 2),
    ("", "ConvTranspose"): (1, 2),
    (MICROSOFT, "FusedMatMul"): (1, None),
    (MICROSOFT, "FusedGemm"): (1, 2),
    (MICROSOFT, "FusedConv"): (1, 2),
    (MICROSOFT, "MatMulNBits"): (1, 5),
}
_OF_ML = frozenset("LinearClassifier LinearRegressor SVMClassifier SVMRegressor".split())
_CONVOLUTIONS = frozenset("Conv FusedConv ConvTranspose".split())
_PRODUCTS = frozenset("Gemm MatMul FusedMatMul FusedGemm".split())
_OF_INTEGERS = (
    "QLinearConv QLinearMatMul ConvInteger MatMulInteger MatMulIntegerToFloat "
    "DynamicQuantizeMatMul QGemm"
).split()
_REFUSED = {
    "Einsum": "the weights of an Einsum have no fixed layout",
    **dict.fromkeys(_OF_INTEGERS, "it computes in integers"),
    "MatMulBnb4": "its weights are quantized",
    "GemmFastGelu": "its activation is a part of it",
}
BIAS_ADDS = ("Add", "Sum")
_SPLIT = frozenset("FusedConv FusedGemm MatMulNBits".split())


@dataclass
class Layer:
    """A layer that can be replaced.

    Attributes:
        node: its node.
        x: the value that it reads.
        y: its result, with the bias.
        kind: "linear", "convolution" or "classifier" (or regressor, of ai.onnx.ml).
        shape: of the weights, (units, features, ...); units first for every kind.
        axis: of the units in `y`, counted from the end.
        dtype: of the weights.
        bias: whether it has one.
        add: the Add of the bias, if that is a node of its own; perhaps behind a Cast or Dropout.
        addend: which of its operands is the bias.
        probable: whether it returns probabilities.
    """

    node: ir.Node
    x: ir.Value
    y: ir.Value
    kind: str
    shape: tuple[int, ...]
    axis: int
    dtype: ir.DataType
    bias: bool = False
    add: ir.Node | None = None
    addend: int = 1
    probable: bool = False

    @property
    def units(self) -> int:
        """The number of units of the layer in the file."""
        return self.shape[0]

    @property
    def weights(self) -> list[ir.Value]:
        """The values that hold its weights and bias in the file."""
        weight, bias = _OPERANDS.get((standard(self.node.domain), self.node.op_type), (None, None))
        own = [self.node.inputs[i] for i in (weight, bias) if i is not None and _has(self.node, i)]
        if self.add is not None:
            own.append(self.add.inputs[self.addend])
        return [v for v in own if v is not None]


def note_constants(graph: ir.Graph) -> None:
    """Let the results of Constant nodes tell their values, as initializers do, in place."""
    for node in all_nodes(graph):
        if node.op_type == "Constant" and not node.domain:
            [y], attribute = node.outputs, node.attributes.get("value")
            tensor = None if attribute is None else attribute.as_tensor()
            y.const_value = tensor or ir.convenience.get_const_tensor(y)


def data_values(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on an input of the graph which is not a weight."""
    return dependents(graph, (x for x in graph.inputs if x.const_value is None))


def layer_of(node: ir.Node, data: Set[ir.Value]) -> Layer | str | None:
    """Return the layer that `node` computes, why it cannot be replaced, or None if it is none.

    Args:
        node: a node of a graph whose shapes are inferred.
        data: `data_values` of the graph.
    """
    key = (standard(node.domain), node.op_type)
    if key == ("com.microsoft.nchwc", "Conv"):
        return "its layout is of one machine: take the model before onnxruntime optimized it"
    if key[0] == ML and key[1] in _OF_ML:
        return _of_ml(node)
    if key[0] in ("", MICROSOFT) and key[1] in _REFUSED:
        return _REFUSED[key[1]]
    if key not in _OPERANDS or data.isdisjoint(node.outputs):
        return None
    weight, bias = _OPERANDS[key]
    x, w = node.inputs[0], node.inputs[weight]
    if x is None or w is None or w in data:
        return None if x in data and w in data else "its weights are not its second operand"
    if bias is not None and _has(node, bias) and node.inputs[bias] in data:
        return "its bias is computed from data"
    if key[1] == "MatMulNBits":
        n, k = (int_attribute(node, name) for name in "NK")
        quantized = Layer(node, x, node.outputs[0], "linear", (n, k), -1, x.dtype or FLOAT)
        return _include_add(quantized, data)
    shape = static(dims(w))
    if shape is None or w.dtype is None:
        return f"the shape of its weights {w.name!r} is unknown"
    layer = _of_shape(node, x, shape, w.dtype)
    return layer if isinstance(layer, str) else _include_add(layer, data)


FLOAT = ir.DataType.FLOAT


def _of_shape(
    node: ir.Node, x: ir.Value, shape: tuple[int, ...], dtype: ir.DataType
) -> Layer | str:
    """Return the layer of a product or convolution with weights of `shape`, without an Add."""
    y = node.outputs[0]
    if node.op_type in _CONVOLUTIONS:
        if int_attribute(node, "group") != 1:
            return "it is a convolution in groups"
        if _has(node, 3):
            return "another tensor is added in it"
        if node.op_type == "ConvTranspose":
            shape = (shape[1], shape[0], *shape[2:])
        return Layer(node, x, y, "convolution", shape, 1 - len(shape), dtype, _has(node, 2))
    if len(shape) != 2:
        return f"its weights have the shape {list(shape)}"
    if node.attributes.get_int("transBatchB", 0):
        return "its weights are transposed over batches"
    if not node.attributes.get_int("transB", 0):
        shape = (shape[1], shape[0])
    return Layer(node, x, y, "linear", shape, -1, dtype, "Gemm" in node.op_type and _has(node, 2))


def _of_ml(node: ir.Node) -> Layer | str:
    """Return the layer of a linear model of ai.onnx.ml."""
    attributes, x = node.attributes, node.inputs[0]
    regressor = node.op_type.endswith("Regressor")
    if node.op_type.startswith("SVM"):
        if string_attribute(node, "kernel_type") != "LINEAR":
            return (
                "its support vectors are rows of the old training data: fit it again, or use "
                f"{named('add_head')}"
            )
        if attributes.get_int("one_class", 0):
            return "it detects outliers"
    width = (dims(x) or (None,))[-1]
    if regressor:
        units = int_attribute(node, "targets") if node.op_type == "LinearRegressor" else 1
    else:
        labels = attributes.get_strings("classlabels_strings", ())
        units = len(labels or attributes.get_ints("classlabels_ints", ()))
        intercepts = attributes.get_floats("intercepts", ())
        units = units or len(intercepts)
    if not isinstance(width, int):
        support = attributes.get_floats("support_vectors", ())
        rows = attributes.get_int("n_supports", 0) or len(attributes.get_floats("intercepts", ()))
        numbers = support or attributes.get_floats("coefficients", ())
        width = len(numbers) // max(1, rows or units)
    if x is None or len(dims(x) or (1, 1)) != 2:
        return "it does not read a matrix"
    y = node.outputs[0 if regressor else 1]
    kind = "regressor" if regressor else "classifier"
    probable = string_attribute(node, "post_transform") != "NONE"
    probable |= bool(attributes.get_floats("prob_a", ()))
    return Layer(node, x, y, kind, (units, width), -1, FLOAT, True, probable=probable)


def _has(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


def _include_add(layer: Layer, data: Set[ir.Value]) -> Layer:
    """Return `layer` with the Add behind it, if that adds one number to each unit."""
    node, index = _only_reader(layer.node.outputs[0])
    while node is not None and node.op_type in ("Cast", "Dropout", "Identity"):
        node, index = _only_reader(node.outputs[0])
    adds = node is not None and node.op_type in BIAS_ADDS and len(node.inputs) == 2
    if layer.bias or node is None or not adds or node.domain:
        return layer
    other = node.inputs[1 - index]
    shape = static(dims(other))
    if other is None or shape is None or other in data:
        return layer
    numbers = [n for i, n in enumerate(shape, -len(shape)) if i != layer.axis]
    length = shape[layer.axis] if len(shape) >= -layer.axis else 1
    if length == layer.units and prod(numbers) == 1:
        layer.bias, layer.add, layer.addend, layer.y = True, node, 1 - index, node.outputs[0]
    return layer


def _only_reader(value: ir.Value) -> tuple[ir.Node | None, int]:
    """Return the only node that reads `value`, and as which operand; None if others do, too."""
    uses = list(value.uses())
    return uses[0] if len(uses) == 1 and not value.is_graph_output() else (None, 0)


def columns_are_units(node: ir.Node) -> bool:
    """Return whether the weights of a layer have the shape (features, units, ...) in the file."""
    bare = node.op_type in _PRODUCTS and not node.attributes.get_int("transB", 0)
    return bare or node.op_type == "ConvTranspose"


def operands(layer: Layer) -> list[tuple[ir.Node, int]]:
    """Return where the weights of a layer are read, and its bias if it has one: node and index."""
    node, add = layer.node, layer.add
    weight, bias = _OPERANDS[standard(node.domain), node.op_type]
    places = [(node, weight)]
    if add is not None:
        places.append((add, layer.addend))
    elif layer.bias and bias is not None:
        places.append((node, bias))
    return places


def initializer(op: Emit, array: np.ndarray, dtype: ir.DataType, name: str) -> ir.Value:
    """Return a new initializer; it gets a numeric suffix if a value has its name."""
    tensor = ir.tensor(array.astype(dtype.numpy()), name=op.name(name))
    kind, shape = ir.TensorType(dtype), ir.Shape(array.shape)
    value = ir.Value(name=tensor.name, shape=shape, type=kind, const_value=tensor)
    op.graph.register_initializer(value)
    return value


def standardize(op: Emit, layer: Layer) -> None:
    """Let standard operators compute `layer`, in place, with its old weights or none.

    Operators of ai.onnx.ml become a Gemm, quantized ones a MatMul; the activation of a fused
    operator becomes a node of its own.
    """
    node = layer.node
    if node.op_type in _SPLIT:
        _split_fused(op, layer)
    elif layer.kind in ("classifier", "regressor"):
        with op.at(node):
            y = op.emit("Gemm", [op.Cast(layer.x, to=FLOAT), None, None], {"transB": 1}, fresh=True)
        y.type = ir.TensorType(FLOAT)
        y.shape = ir.Shape([(dims(layer.x) or (None,))[0], layer.units])
        layer.y, new = y, substitute(op, layer.y, y)
        assert new is y or new.producer() is not None
        layer.node = y.producer()  # type: ignore[assignment]


def state_rank(model: ir.Model, layer: Layer) -> None:
    """State the rank of the result of `layer`, where inference stopped before it, in place."""
    convolves = layer.node.op_type in _CONVOLUTIONS
    if rank(layer.y) is None and (convolves or layer.node.op_type == "Gemm"):
        for y in {layer.y, layer.node.outputs[0]}:
            y.shape = ir.Shape([None, layer.units, *[None] * (len(layer.shape) - 2)])
            y.type = y.type or ir.TensorType(layer.dtype)
        infer(model)


def _split_fused(op: Emit, layer: Layer) -> None:
    """Replace a fused or quantized operator by a standard one and its activation.

    Raises:
        ValueError: the activation is not known.
    """
    node, start, lowering = layer.node, len(op.written), operator_of(layer.node).lowering
    with op.at(node):
        if node.op_type == "MatMulNBits":
            y = op.emit("MatMul", [layer.x, None], {}, fresh=True)
            if _has(node, 5):
                y = op.emit("Add", [y, node.inputs[5]], {}, fresh=True)
                layer.bias, layer.add = True, y.producer()
            linear = y
        else:
            results = None if lowering is None else lowering(op, node)
            if results is None:
                raise ValueError(f"the activation of {node_text(node)} is not known")
            [y] = results
            linear = op.written[start].outputs[0]
        op.set_type_like(y, node.outputs[0])
        op.set_type_like(linear, node.outputs[0])
    if layer.add is None or layer.y is node.outputs[0]:
        layer.y = linear
    substitute(op, node.outputs[0], y)
    layer.node = op.written[start]


def substitute(op: Emit, old: ir.Value, new: ir.Value) -> ir.Value:
    """Let `new` take the uses of `old`; an output of the graph keeps its name.

    Returns:
        `new`, or its copy that is the output of the graph if `new` is an output already.
    """
    result = new
    if old.is_graph_output():
        if new.producer() is None or new.is_graph_output():
            with op.at(None):
                result = op.set_type_like(op.copy_of(new), new)
        result.name, old.name = old.name, op.name("unused")
        outputs = op.graph.outputs
        outputs[:] = [result if y is old else y for y in outputs]
    ir.convenience.replace_all_uses_with(old, new)
    return result
