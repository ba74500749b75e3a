"""Find linear and convolutional layers and their weights, in operators of all domains."""

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
from onnxgrad.model.constants import normalize_domain
from onnxgrad.operators import operator_of
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import output_axes
from onnxgrad.operators.shapes import dims, rank, static

FLOAT = ir.DataType.FLOAT


@dataclass
class Layer:
    """A linear or convolutional layer whose weights can be replaced.

    Attributes:
        node: the node that multiplies by the weights.
        x: the data.
        y: the result, with the bias.
        kind: "linear" or "convolution"; of ai.onnx.ml, "classifier" or "regressor".
        shape: shape of the weights, (units, features, ...); units first for every kind.
        axis: axis of the units in `y`, counted from the end.
        dtype: dtype of the weights.
        bias: whether the layer has a bias.
        probable: whether the node returns probabilities.
        operand: index of the weights among the operands of `node`.
        add: the Add of the bias, if another node adds it, perhaps behind nodes that cast, move or
            average the results.
        addend: index of the bias among the operands of `add`.
        bias_axis: axis of the units in the result of `add`, counted from the end.
    """

    node: ir.Node
    x: ir.Value
    y: ir.Value
    kind: str
    shape: tuple[int, ...]
    axis: int
    dtype: ir.DataType
    bias: bool = False
    probable: bool = False
    operand: int = 1
    add: ir.Node | None = None
    addend: int = 1
    bias_axis: int = -1

    @property
    def units(self) -> int:
        """The count of units of the layer in the file."""
        return self.shape[0]

    @property
    def weights(self) -> list[ir.Value]:
        """The values that hold the weights and the bias of the layer in the file."""
        if not is_product(self.node):  # the weights are attributes of the node
            return []
        values = [self.node.inputs[self.operand], _operand_with_role(self.node, "b")]
        if self.add is not None:
            values.append(self.add.inputs[self.addend])
        return [v for v in values if v is not None]


def set_constant_values(graph: ir.Graph) -> None:
    """Set the attribute `const_value` of the results of Constant nodes to their tensors, in
    place.
    """
    for node in all_nodes(graph):
        if node.op_type == "Constant" and not node.domain:
            [y], attribute = node.outputs, node.attributes.get("value")
            tensor = None if attribute is None else attribute.as_tensor()
            y.const_value = tensor or ir.convenience.get_const_tensor(y)


def data_values(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that depend on a graph input, not counting inputs that hold weights."""
    return dependents(graph, (x for x in graph.inputs if x.const_value is None))


def is_product(node: ir.Node) -> bool:
    """Return whether `node` multiplies matrices or convolves, so that its second operand may be
    weights.
    """
    return not operator_of(node).traits.isdisjoint(("product", "convolution"))


def _operand_with_role(node: ir.Node, role: str) -> ir.Value | None:
    """Return the operand of `node` whose role letter in `operators.records` is `role`, such as "b"
    for bias; None if there is none.
    """
    index = operator_of(node).roles.find(role)
    return node.inputs[index] if 0 <= index < len(node.inputs) else None


def layer_of(node: ir.Node, data: Set[ir.Value]) -> Layer | str | None:
    """Return the layer that `node` computes, or the reason (a string) why it cannot be replaced;
    None if `node` is no layer.

    Args:
        node: a node of a graph whose shapes are inferred.
        data: `data_values` of the graph.
    """
    operator, domain = operator_of(node), normalize_domain(node.domain)
    if domain == "com.microsoft.nchwc" and node.op_type == "Conv":
        return "its layout is of one machine: take the model before onnxruntime optimized it"
    if "coefficients" in dict(operator.coefficients):
        return _layer_of_ml_operator(node)
    if node.op_type == "Einsum" and not domain:
        return "the weights of an Einsum have no fixed layout"
    if not is_product(node):
        return None
    if "quantized" in operator.traits:
        return "it computes in integers"
    if not operator.is_covered:
        return "it has no gradient"
    if node.op_type == "GemmFastGelu":
        return "its activation is a part of it"
    if data.isdisjoint(node.outputs):
        return None
    x, w = node.inputs[:2]
    operand = 1
    if node.op_type == "MatMul" and w in data and x not in data and (rank(w) or 0) > 1:
        x, w, operand = w, x, 0
    if x is None or w is None or w in data:
        return None if x in data and w in data else "its weights are not its second operand"
    if _operand_with_role(node, "b") in data:
        return "its bias is computed from data"
    if node.op_type == "MatMulNBits":
        n, k = (int_attribute(node, name) for name in "NK")
        quantized = Layer(node, x, node.outputs[0], "linear", (n, k), -1, x.dtype or FLOAT)
        return _include_bias_add(quantized, data)
    shape = static(dims(w))
    if shape is None or w.dtype is None:
        return f"the shape of its weights {w.name!r} is unknown"
    layer = _layer_of_product(node, x, shape, w.dtype)
    if isinstance(layer, str):
        return layer
    if operand == 0:
        layer.operand, layer.axis, layer.shape = 0, -2, shape
    layer = _include_bias_add(layer, data)
    # without a bias of units, the first operand may be no weight, such as edges between rows
    return layer if operand or layer.bias else "its weights are not its second operand"


def _layer_of_product(
    node: ir.Node, x: ir.Value, shape: tuple[int, ...], dtype: ir.DataType
) -> Layer | str:
    """Return the layer that `node`, a matrix product or convolution, computes, or the reason why it
    cannot be replaced.
    """
    y = node.outputs[0]
    bias = _operand_with_role(node, "b") is not None
    if "convolution" in operator_of(node).traits:
        if int_attribute(node, "group") != 1:
            return "it is a convolution in groups"
        if _operand_with_role(node, "a") is not None:
            return "another tensor is added in it"
        if columns_are_units(node):
            shape = (shape[1], shape[0], *shape[2:])
        return Layer(node, x, y, "convolution", shape, 1 - len(shape), dtype, bias)
    if len(shape) != 2:
        return f"its weights have the shape {list(shape)}"
    if node.attributes.get_int("transBatchB", 0):
        return "its weights are transposed over batches"
    if columns_are_units(node):
        shape = (shape[1], shape[0])
    return Layer(node, x, y, "linear", shape, -1, dtype, bias)


def _layer_of_ml_operator(node: ir.Node) -> Layer | str:
    """Return the layer that `node`, a linear model of ai.onnx.ml, computes, or the reason why it
    cannot be replaced.
    """
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


def _include_bias_add(layer: Layer, data: Set[ir.Value]) -> Layer:
    """Return `layer` with a following Add as its bias, if there is an Add of a constant with one
    number for each unit.

    Nodes between them may cast, move or average the results. The Add computes the result of the
    layer unless one of them changes the shape, which must fit the new number of units.
    """
    node, index = _only_reading_node(layer.node.outputs[0])
    axis, reshapes = layer.axis, False
    while node is not None and index == 0 and _moves_or_averages(node):
        if node.op_type not in ("Cast", "Dropout", "Identity"):
            reshapes, n = True, rank(node.inputs[0])
            place = None if n is None else output_axes(node, 0, axis + n)[0]
            if not isinstance(place, int) or (n := rank(node.outputs[0])) is None:
                return layer
            axis = place - n
        node, index = _only_reading_node(node.outputs[0])
    adds = node is not None and node.op_type in ("Add", "Sum") and len(node.inputs) == 2
    if layer.bias or node is None or not adds or node.domain:
        return layer
    other = node.inputs[1 - index]
    shape = static(dims(other))
    if other is None or shape is None or other in data:
        return layer
    numbers = [n for i, n in enumerate(shape, -len(shape)) if i != axis]
    length = shape[axis] if len(shape) >= -axis else 1
    if length == layer.units and prod(numbers) == 1:
        layer.bias, layer.add, layer.addend, layer.bias_axis = True, node, 1 - index, axis
        layer.y = layer.y if reshapes else node.outputs[0]
    return layer


def _moves_or_averages(node: ir.Node) -> bool:
    """Return whether `node` reshapes, transposes, casts or averages its operand, as Reshape and
    AveragePool do.
    """
    traits = operator_of(node).traits
    averages = node.op_type in ("AveragePool", "GlobalAveragePool", "ReduceMean")
    return not node.domain and (averages or ("moves" in traits and "selects" not in traits))


def _only_reading_node(value: ir.Value) -> tuple[ir.Node | None, int]:
    """Return (node, operand index) of the only read of `value`; (None, 0) if `value` is read
    several times or is an output.
    """
    uses = list(value.uses())
    return uses[0] if len(uses) == 1 and not value.is_graph_output() else (None, 0)


def columns_are_units(node: ir.Node, operand: int = 1) -> bool:
    """Return whether operand `operand` of `node`, its weights, has the shape (features, units, ...)
    and not (units, features, ...).
    """
    if operand == 0:
        return False
    if "product" in operator_of(node).traits:
        return not node.attributes.get_int("transB", 0)
    return node.op_type.startswith("ConvTranspose")


def weight_operands(layer: Layer) -> list[tuple[ir.Node, int]]:
    """Return (node, operand index) of the weights of a layer, and of its bias if the layer has a
    bias.
    """
    found = [(layer.node, layer.operand)]
    if layer.add is not None:
        found.append((layer.add, layer.addend))
    elif layer.bias:
        found.append((layer.node, operator_of(layer.node).roles.index("b")))
    return found


def add_initializer(op: Emit, array: np.ndarray, dtype: ir.DataType, name: str) -> ir.Value:
    """Add and return a new initializer, whose name gets a numeric suffix if the graph has the name
    already.
    """
    tensor = ir.tensor(array.astype(dtype.numpy()), name=op.name(name))
    value = ir.val(tensor.name, dtype, array.shape, const_value=tensor)
    op.graph.register_initializer(value)
    return value


def standardize(op: Emit, layer: Layer) -> None:
    """Replace the operator of the layer by standard ONNX operators, in place.

    Operators of ai.onnx.ml become a Gemm without weights, quantized ones a MatMul without weights;
    the activation of a fused operator becomes a separate node.
    """
    node = layer.node
    if "activation" in node.attributes or node.op_type == "MatMulNBits":
        _split_fused_operator(op, layer)
    elif layer.kind in ("classifier", "regressor"):
        with op.at(node):
            y = op.emit("Gemm", [op.Cast(layer.x, to=FLOAT), None, None], {"transB": 1}, fresh=True)
        y.type = ir.TensorType(FLOAT)
        y.shape = ir.Shape([(dims(layer.x) or (None,))[0], layer.units])
        layer.y, new = y, replace_value(op, layer.y, y)
        assert new is y or new.producer() is not None
        layer.node = y.producer()  # type: ignore[assignment]


def declare_rank(model: ir.Model, layer: Layer) -> None:
    """Declare the rank of the result of the layer if shape inference does not find the rank, in
    place.
    """
    convolves = "convolution" in operator_of(layer.node).traits
    if rank(layer.y) is None and (convolves or layer.node.op_type == "Gemm"):
        for y in {layer.y, layer.node.outputs[0]}:
            y.shape = ir.Shape([None, layer.units, *[None] * (len(layer.shape) - 2)])
            y.type = y.type or ir.TensorType(layer.dtype)
        infer(model)


def _split_fused_operator(op: Emit, layer: Layer) -> None:
    """Replace a fused or quantized operator by a standard operator and its activation.

    Raises:
        ValueError: the activation is not known.
    """
    node, start, lowering = layer.node, len(op.written), operator_of(layer.node).lowering
    with op.at(node):
        if node.op_type == "MatMulNBits":
            y = op.emit("MatMul", [layer.x, None], {}, fresh=True)
            if (bias := _operand_with_role(node, "b")) is not None:
                y = op.emit("Add", [y, bias], {}, fresh=True)
                layer.bias, layer.add = True, y.producer()
            linear = y
        else:
            results = None if lowering is None else lowering(op, node)
            if results is None:
                raise ValueError(
                    f"the activation of {node_text(node)} is not known: export the model without "
                    "fused operators"
                )
            [y] = results
            linear = op.written[start].outputs[0]
        op.set_type_like(y, node.outputs[0])
        op.set_type_like(linear, node.outputs[0])
    if layer.add is None or layer.y is node.outputs[0]:
        layer.y = linear
    replace_value(op, node.outputs[0], y)
    layer.node = op.written[start]


def replace_value(op: Emit, old: ir.Value, new: ir.Value) -> ir.Value:
    """Let all nodes and outputs that read `old` read `new`; if `old` is a graph output, the output
    keeps its name.

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
