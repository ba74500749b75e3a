"""`fold_batch_norm`: BatchNormalization as part of the layers in front, as exporters fold it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.insertion import copy_inlined
from onnxgrad.adapters.uses import attribute_values
from onnxgrad.errors import escaping, printable
from onnxgrad.finetune.insert_layers import EPSILON, inferred_graph, require_opset
from onnxgrad.model.constants import FLOATS, normalize_domain
from onnxgrad.model.external import tensor_to_array
from onnxgrad.model.node_inserter import NodeInserter
from onnxgrad.model.read import ModelLike
from onnxgrad.model.traversal import (
    declared_names,
    keep_only,
    names_read_by,
    names_read_in_graph,
)
from onnxgrad.model.weights import replace_constants
from onnxgrad.operators.shapes import rank
from onnxgrad.reporting import logger
from onnxgrad.training.modes.inference_form import inference_form
from onnxgrad.training.parameters.equal_constants import initializer_aliases


@escaping()
def fold_batch_norm(model: ModelLike) -> ModelProto:
    """Return `model` in its inference form, with BatchNormalization as part of the layers in front.

    With f = scale / sqrt(variance + epsilon), the weights of a Conv, ConvTranspose, Gemm or MatMul
    become f w, and its bias becomes f (bias - mean) + shift, computed in float64: outputs stay the
    same, up to rounding. A MatMul without bias gets an Add. Nodes stay whose operands are no
    constants, or in front of which is no such layer that they alone read; the logger names them
    (level INFO). Weights keep their names; a weight that other nodes read stays for them, and the
    layer gets a copy. Local functions are inlined.

    Args:
        model: model, serialized model or path; never modified.

    Raises:
        ModelError: a model that is unreadable, or of an opset before 7.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2,T] x) => (float[N,2,T] y) <float[2,2,1] w = {1.0, 2.0, 3.0, 4.0}> {
        ...     h = Conv(x, w)  y = Relu(h) }''')
        >>> normalized = og.insert_batch_norm(model, after="Conv")
        >>> [node.op_type for node in og.graph.fold_batch_norm(normalized).graph.node]
        ['Conv', 'Relu']
    """
    proto = inference_form(copy_inlined(model))
    require_opset(proto)
    folding = _Folding(proto)
    for node in [n for n in proto.graph.node if _is_batch_norm(n)]:
        if not folding.fold(node):
            named = printable(node.name or node.output[0])
            logger.info("BatchNormalization %s is not folded: no layer in front takes it", named)
    folding.remove_unread_constants()
    return replace_constants(proto, folding.values)


def _is_batch_norm(node: NodeProto) -> bool:
    """Return whether `node` is a BatchNormalization of ONNX."""
    return not normalize_domain(node.domain) and node.op_type == "BatchNormalization"


@dataclass
class _Layer:
    """A layer in front of a BatchNormalization, whose weights are a constant.

    Attributes:
        node: the node that multiplies by the weights.
        operand: the index of the weights among its operands.
        behind: the count of axes of its result behind the axis of the channels.
        add: an Add of a constant behind the node, or None.
    """

    node: NodeProto
    operand: int
    behind: int
    add: NodeProto | None = None

    @property
    def transposed(self) -> bool:
        """Whether the weights of a Gemm have the shape (units, features)."""
        return bool(attribute_values(self.node).get("transB"))

    def scaled_weights(self, weights: np.ndarray, f: np.ndarray) -> np.ndarray:
        """Return the weights with which the layer computes f times its result."""
        kind, shape = self.node.op_type, weights.shape
        if kind == "ConvTranspose":  # (channels of x, channels of y in a group, ...)
            group = attribute_values(self.node).get("group", 1)
            parts = weights.reshape(group, shape[0] // group, *shape[1:])
            factors = f.reshape(group, 1, -1, *[1] * (len(shape) - 2))
            return (parts * factors).reshape(shape)
        units_first = kind == "Conv" or self.operand == 0 or self.transposed
        return weights * (f.reshape(-1, *[1] * (len(shape) - 1)) if units_first else f)


class _Folding:
    """Folds BatchNormalization nodes of the main graph of a model, which is changed in place.

    Args:
        proto: the model.

    Attributes:
        values: the new values of initializers that keep their names and shapes.
    """

    def __init__(self, proto: ModelProto) -> None:
        self.graph, self.inserter = proto.graph, NodeInserter(proto)
        self.values: dict[str, np.ndarray] = {}
        # inputs with a default: before IR version 4, all initializers were inputs
        fed = {*declared_names(proto.graph.input)} if proto.ir_version >= 4 else set()
        self.tensors = {t.name: t for t in proto.graph.initializer if t.name not in fed}
        self.initializers = set(self.tensors)
        aliases = initializer_aliases(proto).items()
        self.tensors |= {name: self.tensors[root] for name, root in aliases if root in self.tensors}
        for node in proto.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.tensors[node.output[0]] = node.attribute[0].t
        self.makers = {y: node for node in proto.graph.node for y in node.output}
        self.reads = Counter(declared_names(proto.graph.output))
        for node in proto.graph.node:
            self.reads.update(names_read_by(node))
        values = (y for node in inferred_graph(proto) for y in node.outputs)
        self.ranks = {str(y.name): rank(y) for y in values}
        self.unread: set[str] = set()  # names of constants that a node no longer reads

    def fold(self, norm: NodeProto) -> bool:
        """Make a BatchNormalization part of the layer in front; return whether it was possible."""
        layer, options = self._layer_in_front(norm.input[0]), attribute_values(norm)
        operands = [a for name in norm.input[1:5] if (a := self._constant_array(name)) is not None]
        if layer is None or len(operands) < 4 or not options.get("spatial", 1):
            return False
        scale, shift, mean, variance = operands
        f = scale / np.sqrt(variance + options.get("epsilon", EPSILON))
        self._scale_layer(layer, f)
        self._add_behind_layer(layer, f, shift - mean * f, norm)
        self.unread.update(norm.input[1:5])
        return True

    def remove_unread_constants(self) -> None:
        """Remove the constants that folded nodes read, if nothing else reads them."""
        graph, sources = self.graph, self.unread
        read = names_read_in_graph(graph)
        for node in graph.node:
            if node.op_type == "Identity" and node.output[0] in sources - read:
                sources = sources | {*node.input}
        gone = sources - read
        keep_only(graph.node, lambda n: gone.isdisjoint(n.output))
        gone = sources - names_read_in_graph(graph)
        for entries in (graph.initializer, graph.input, graph.value_info):
            keep_only(entries, lambda entry: entry.name not in gone)

    def _constant_array(self, name: str) -> np.ndarray | None:
        """Return the elements of a constant of floats in float64; None for other values."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.data_type not in FLOATS:
            return None
        stored = self.values.get(name)
        return np.asarray(tensor_to_array(tensor) if stored is None else stored, np.float64)

    def _layer_in_front(self, x: str) -> _Layer | None:
        """Return the layer that computes `x`, if only one node reads its result, and its weights
        and bias are constants; else None.
        """
        node, add = self._only_maker(x), None
        if node is not None and (index := self._constant_addend(node)) is not None:
            add, node = node, self._only_maker(node.input[1 - index])
        if node is None or normalize_domain(node.domain):
            return None
        known = {
            i: a.ndim
            for i, n in enumerate(node.input)
            if (a := self._constant_array(n)) is not None
        }
        has_other_bias = len(node.input) > 2 and node.input[2] and 2 not in known
        layer = None
        if node.op_type in ("Conv", "ConvTranspose") and 1 in known and not has_other_bias:
            layer = _Layer(node, 1, known[1] - 2, add)
        elif node.op_type == "Gemm" and 1 in known and not has_other_bias:
            layer = _Layer(node, 1, 0, add)
        elif node.op_type == "MatMul" and list(known.values()) == [2]:
            [operand] = known
            # units on the last axis of a matrix, or on the last but one of x (rows, features, ...)
            if self.ranks.get(node.output[0]) == 3 - operand:
                layer = _Layer(node, operand, 1 - operand, add)
        return layer if layer is None or add is None or self._fits_layer(layer, add) else None

    def _fits_layer(self, layer: _Layer, add: NodeProto) -> bool:
        """Return whether the constant of an Add has at most the axes of the result of a layer."""
        index = self._constant_addend(add)
        array = None if index is None else self._constant_array(add.input[index])
        return array is not None and array.ndim <= layer.behind + 2

    def _only_maker(self, name: str) -> NodeProto | None:
        """Return the node that computes a value, if the value is read once; else None."""
        return self.makers.get(name) if self.reads[name] == 1 else None

    def _constant_addend(self, node: NodeProto) -> int | None:
        """Return the index of the only constant among the operands of an Add; None without one."""
        if node.op_type != "Add" or normalize_domain(node.domain):
            return None
        constants = [
            i for i, name in enumerate(node.input) if self._constant_array(name) is not None
        ]
        return constants[0] if len(constants) == 1 else None

    def _scale_layer(self, layer: _Layer, f: np.ndarray) -> None:
        """Multiply the weights and the bias of a layer by f."""
        node, index = layer.node, layer.operand
        weights = self._constant_array(node.input[index])
        assert weights is not None
        self._set_operand(node, index, layer.scaled_weights(weights, f))
        if len(node.input) > 2 and (bias := self._constant_array(node.input[2])) is not None:
            self._set_operand(node, 2, bias * f)

    def _add_behind_layer(
        self, layer: _Layer, f: np.ndarray, c: np.ndarray, norm: NodeProto
    ) -> None:
        """Let a layer, whose weights and bias were multiplied by f, also add c, and compute the
        result of `norm`, which is removed.
        """
        node, (x, result) = layer.node, (norm.input[0], norm.output[0])
        last, reader = layer.add or node, self._only_reader(result)
        f, c = (v.reshape(-1, *[1] * layer.behind) for v in (f, c))
        index = next(i for i, n in enumerate(self.graph.node) if n.output == norm.output)
        del self.graph.node[index]
        last.output[0] = result
        self.makers[result] = last
        keep_only(self.graph.value_info, lambda entry: entry.name != x)
        if layer.add is not None:
            self._change_addend(layer.add, f, c)
        elif node.op_type != "MatMul":
            bias, factor = (
                self._constant_array((*node.input, "")[2]),
                attribute_values(node).get("beta", 1),
            )
            keep_only(node.attribute, lambda a: a.name != "beta")
            self._set_operand(node, 2, c.ravel() + (0 if bias is None else factor * bias))
        elif reader is not None and self._fits_layer(layer, reader):
            self._change_addend(reader, np.ones(()), c)
        else:
            self._write_add(layer, c, x)

    def _write_add(self, layer: _Layer, c: np.ndarray, x: str) -> None:
        """Write an Add of c behind a MatMul, whose result gets the name `x`."""
        weights = layer.node.input[layer.operand]
        array = c.astype(tensor_to_array(self.tensors[weights]).dtype)
        added = self._add_tensor(self._bias_name(weights), array)
        self.inserter.replace_result(
            self.graph,
            layer.node,
            ir.val(x, added.dtype),
            lambda y: self.inserter.emit("Add", y, added),
        )

    def _only_reader(self, name: str) -> NodeProto | None:
        """Return the node that reads a value, if no other node and no output does; else None."""
        readers = (node for node in self.graph.node if name in node.input)
        return next(readers, None) if self.reads[name] == 1 else None

    def _change_addend(self, add: NodeProto, factor: np.ndarray, more: np.ndarray) -> None:
        """Replace the constant b of an Add by factor b + more."""
        index = self._constant_addend(add)
        assert index is not None
        addend = self._constant_array(add.input[index])
        assert addend is not None
        self._set_operand(add, index, factor * addend + more)

    def _set_operand(self, node: NodeProto, index: int, array: np.ndarray) -> None:
        """Replace a constant operand of a node; a new one has the dtype of the weights.

        An initializer that only this node reads, and of this shape, keeps its name.
        """
        old = (*node.input, "", "")[index]
        tensor = self.tensors[old or node.input[1]]
        array = array.astype(tensor_to_array(tensor).dtype)
        if old in self.initializers and self.reads[old] == 1 and (*tensor.dims,) == array.shape:
            self.values[old] = array
            return
        if old:
            self.reads[old] -= 1
            self.unread.add(old)
        node.input.extend([""] * (index + 1 - len(node.input)))
        node.input[index] = str(self._add_tensor(old or self._bias_name(node.input[1]), array).name)

    def _add_tensor(self, wanted: str, array: np.ndarray) -> ir.Value:
        """Add an initializer that one node reads, and return it."""
        name = self.inserter.free_name(wanted)
        value = self.inserter.add_tensor(name, array)
        self.tensors[name], self.reads[name] = self.graph.initializer[-1], 1
        self.initializers.add(name)
        return value

    @staticmethod
    def _bias_name(weights: str) -> str:
        """Return the name of the bias of a layer with these weights, as PyTorch names it."""
        return f"{weights.removesuffix('.weight')}.bias"
