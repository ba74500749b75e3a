"""`partition`: a forward model, and a backward model that reads the tensors saved by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.control.copies import is_tensor
from onnxgrad.autodiff.cuts import cheapest_values
from onnxgrad.autodiff.derivative import DerivativeOptions, DerivativeRequest, derivative
from onnxgrad.autodiff.recompute import LENGTH, RECOMPUTE, ByteSizes, is_repeatable
from onnxgrad.errors import NoGradientRule, unknown
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import nodes_after, nodes_behind, reads
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import name_unnamed_values, replace_by_input
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.reporting import html_table


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward model returns for the backward model.

    Attributes:
        name: of the output of the forward model and the input of the backward model.
        dtype: such as "float32".
        shape: a length or a symbolic dimension for each axis; None if the rank is unknown.
        bytes_per_row: bytes for a batch of one row, with 32 for every other symbolic dimension.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { a = Exp(x)  y = Tanh(a) }''')
        >>> [(s.dtype, s.shape, s.bytes_per_row) for s in og.partition(model).saved]
        [('float32', ('N', 2), 8), ('float32', ('N', 2), 8)]
    """

    name: str
    dtype: str
    shape: Dims | None
    bytes_per_row: int


@dataclass(frozen=True)
class Partition:
    """A forward and a backward model, which together compute the outputs and the gradients.

    Attributes:
        forward: inputs: the inputs of the model, then the weights. Outputs: its outputs, then the
            saved tensors that are not among them.
        backward: inputs: the inputs of `forward` that it needs, the saved tensors, then the
            cotangent `Y_grad` of every float output Y. Outputs: `X_grad` of the inputs, then
            `W_grad` of the weights, if they have a gradient.
        cotangents: `{Y: name of Y_grad}` for the float outputs.
        gradients: `{X or W: name of its gradient}` where there is one.
        saved: the tensors that `forward` computes and `backward` reads.
        joint: both passes in one graph, with a `YieldOp` between outputs and cotangents.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,4] x) => (float[N,4] y) { h = Tanh(x) y = Mul(h, h) }''')
        >>> parts = og.partition(model)
        >>> parts.cotangents, parts.gradients
        ({'y': 'y_grad'}, {'x': 'x_grad'})
        >>> [(tensor.name, tensor.bytes_per_row) for tensor in parts.saved]
        [('h', 16)]
    """

    forward: ModelProto
    backward: ModelProto
    cotangents: dict[str, str]
    gradients: dict[str, str]
    saved: tuple[SavedTensor, ...]
    joint: ModelProto

    @property
    def bytes_per_row(self) -> int:
        """Bytes saved per row of the batch; other symbolic dimensions count as one."""
        return sum(tensor.bytes_per_row for tensor in self.saved)

    def _repr_html_(self) -> str:
        shapes = ["?" if t.shape is None else str(list(t.shape)) for t in self.saved]
        columns = zip(self.saved, shapes, strict=True)
        rows = [(t.name, t.dtype, shape, f"{t.bytes_per_row:,}") for t, shape in columns]
        sizes = [len(model.graph.node) for model in (self.forward, self.backward)]
        passes = f"forward pass: {sizes[0]:,} nodes; backward pass: {sizes[1]:,} nodes"
        total = f"{len(rows)} tensors saved: {self.bytes_per_row:,} bytes per row"
        return html_table(("saved", "dtype", "shape", "bytes per row"), rows, [total, passes])


def partition(
    model: ModelLike,
    weights: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    recompute: str = "cheap",
) -> Partition:
    """Split the computation of the gradient into a forward and a backward model.

    Both consist of standard operators. The forward model returns the outputs, and saves the tensors
    that the backward model reads. Tensors that `recompute` allows to compute again are not saved if
    that makes the saved bytes fewer. Random results are always saved.

    Args:
        model: model, serialized model or path, never modified; or the joint graph of
            `onnx_derivative` with `DerivativeOptions.KeepYieldOp`.
        weights: names of the weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`.
        inputs: names of the inputs to differentiate with respect to; see `onnx_derivative`.
        recompute: which nodes the backward model may compute again. "none": only shapes and views.
            "cheap": also operators that only move elements, and elementwise ones without
            transcendental functions. "all": the whole forward pass.

    Raises:
        ValueError: an unknown name or `recompute`, a joint graph with `weights` or `inputs`, or no
            input or weight has a gradient. Named ones without a gradient are skipped if others have
            one.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> from onnxruntime import InferenceSession
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N] x) => (float[N] y) { h = Exp(x) y = Mul(h, h) }''')
        >>> parts = og.partition(model)
        >>> forward = InferenceSession(parts.forward.SerializeToString())
        >>> backward = InferenceSession(parts.backward.SerializeToString())
        >>> y, h = forward.run(["y", "h"], {"x": np.float32([0, 0])})
        >>> backward.run(["x_grad"], {"h": h, "y_grad": np.float32([1, 2])})[0].tolist()
        [2.0, 4.0]
    """
    if recompute not in RECOMPUTE:
        raise unknown("recompute", recompute, RECOMPUTE)
    proto = read(model)
    with pause_garbage_collection():
        return _split_joint_graph(*_joint_graph(proto, weights, inputs), recompute)


def _joint_graph(
    proto: ModelProto, weights: Sequence[str] | None, inputs: Sequence[str] | None
) -> tuple[ModelProto, dict[str, str]]:
    """Return the graph of both passes with a YieldOp, and `{input or weight: name of its
    gradient}`.
    """
    if not any(node.op_type == "YieldOp" for node in proto.graph.node):
        flags = DerivativeOptions.KeepYieldOp
        return derivative(proto, DerivativeRequest(weights, inputs, flags, all_reached=False))
    if weights is not None or inputs is not None:
        raise ValueError(
            "leave out `weights` and `inputs`: `model` is a joint graph, built for some already"
        )
    outputs = {y.name for y in proto.graph.output}
    pairs = {x.name: f"{x.name}_grad" for x in proto.graph.input}
    return proto, {x: g for x, g in pairs.items() if g in outputs}


def _split_joint_graph(joint: ModelProto, gradients: dict[str, str], recompute: str) -> Partition:
    """Split the graph of both passes into a forward and a backward model."""
    model = to_ir(joint)
    cotangents = _cotangent_names(_yield_node(model.graph))
    sizes, least = ByteSizes(joint, LENGTH), ByteSizes(joint, 1)
    saved = _choose_saved_values(model.graph, recompute, sizes)
    for v in saved:
        if v.shape is None and (rank := least.rank(v)) is not None and rank == sizes.rank(v):
            v.shape = ir.Shape([None] * rank)  # an input needs a shape
    report = _saved_tensor_records(joint, saved, least)
    forward, backward = _forward_model(model, saved), _backward_model(model, saved)
    return Partition(forward, backward, cotangents, gradients, report, joint)


def _yield_node(graph: ir.Graph) -> ir.Node:
    for node in graph:
        if node.op_type == "YieldOp":
            return node
    raise ValueError("no gradient depends on a float output: choose other `weights` or `inputs`")


def _cotangent_names(yielding: ir.Node) -> dict[str, str]:
    """Return `{output: name of its cotangent}`."""
    without = yielding.attributes.get_ints("non_differentiable_outputs", ())
    outputs = [y for i, y in enumerate(yielding.inputs) if i not in without]
    pairs = zip(outputs, yielding.outputs, strict=True)
    return {str(y.name): str(g.name) for y, g in pairs if y is not None}


def _choose_saved_values(graph: ir.Graph, recompute: str, sizes: ByteSizes) -> list[ir.Value]:
    """Return the values to save, of the fewest bytes, in the order of the graph."""
    yielding = _yield_node(graph)
    outputs = set(yielding.inputs)  # the forward model returns them anyway: saving is free
    after = nodes_after(graph, yielding.outputs)
    others, forward = {yielding, *after}, nodes_behind(reads(yielding))
    # of nodes before the cotangents
    read = {node: reads(node) for node in graph if node not in others}
    read_after = dict.fromkeys([*graph.outputs, *(x for node in after for x in reads(node))])

    def made_of(value: ir.Value) -> list[ir.Value] | None:
        node = value.producer()
        assert node is not None
        may_repeat = node not in forward or RECOMPUTE[recompute](node) or not is_tensor(value)
        if not may_repeat or not is_repeatable(node):
            return None
        return [x for x in read[node] if x.producer() in read]

    def price(value: ir.Value) -> float:
        if not is_tensor(value):  # a sequence cannot be saved
            return inf
        return 0 if value in outputs else sizes[value]

    chosen = cheapest_values((v for v in read_after if v.producer() in read), price, made_of)
    saved = [y for node in read for y in node.outputs if y in chosen]
    for v in saved:
        if not is_tensor(v):
            raise NoGradientRule(
                f"{v.name!r} is a sequence of random numbers, which cannot pass from the forward "
                "to the backward model: draw them outside of the Loop that collects them"
            )
    return saved


def _saved_tensor_records(
    joint: ModelProto, saved: list[ir.Value], sizes: ByteSizes
) -> tuple[SavedTensor, ...]:
    """Return the name, dtype, shape and bytes per row of each saved value."""
    rows = 1
    if joint.graph.input:
        batch = joint.graph.input[0].type.tensor_type.shape.dim[:1]
        rows = max([1, *(d.dim_value for d in batch)])
    return tuple(
        SavedTensor(str(v.name), str(v.dtype and v.dtype.numpy()), dims(v), ceil(sizes[v] / rows))
        for v in saved
    )


def _forward_model(joint: ir.Model, saved: list[ir.Value]) -> ModelProto:
    kept = dict.fromkeys(
        v.name for v in (*_yield_node(joint.graph).inputs, *saved) if v is not None
    )
    model = joint.clone()
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    model.graph.outputs[:] = [values[str(name)] for name in kept]
    return _tidied_proto(model)


def _backward_model(model: ir.Model, saved: list[ir.Value]) -> ModelProto:
    graph = model.graph
    declared = list(graph.inputs)
    graph.inputs.extend([replace_by_input(graph, v) for v in (*saved, *_yield_node(graph).outputs)])
    tidy(model)
    name_unnamed_values(graph)
    for x in declared:
        if not x.uses():
            graph.inputs.remove(x)
    return _tidied_proto(model)


def _tidied_proto(model: ir.Model) -> ModelProto:
    tidy(model)
    model.opset_imports.pop("com.microsoft", None)
    return to_proto(model)
