"""Cutting a model and its gradient in two: forward, and backward from what forward saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import (
    DerivativeOptions,
    DerivativeRequest,
    derivative,
    garbage_kept,
)
from onnxgrad.autodiff.min_cut import cheapest
from onnxgrad.errors import NoGradientRule, unknown
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.operators import CHEAP, RANDOM, VIEWS
from onnxgrad.graph.shapes import Dims, dims
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import as_input, name_rest

_SAME_SIZE = (VIEWS - {"Shape", "Size"}) | {"Cast", "Transpose"}
_LENGTH = 32  # where costs are compared, stands for lengths that are known when it runs

# recompute -> which nodes of the forward pass are repeated in the backward pass
RECOMPUTE: dict[str, Callable[[ir.Node], bool]] = {
    "none": lambda node: node.op_type in VIEWS,
    "cheap": lambda node: node.op_type in CHEAP,
    "all": lambda node: True,
}


@dataclass(frozen=True)
class Saved:
    """A tensor that the forward model hands to the backward model."""

    name: str
    dtype: str
    shape: Dims | None
    bytes_per_row: int


@dataclass(frozen=True)
class Partition:
    """A model and its gradient as two models, of which the first runs without the second.

    Attributes:
        forward: inputs are those of the model, then the weights; outputs those of the model, then
            the tensors saved that are no outputs.
        backward: inputs are what it reads of the forward model's inputs, the saved tensors, then
            `Y_grad` for every float output Y; outputs are `X_grad` of the inputs, then `W_grad` of
            the weights, for those that have a gradient.
        cotangents: `{Y: name of Y_grad}` for the float outputs.
        gradients: `{X or W: name of its gradient}` for those that have one.
        saved: what the forward pass computes and the backward pass reads.
        joint: both in one graph, with a `YieldOp` from the outputs to their gradients.
    """

    forward: ModelProto
    backward: ModelProto
    cotangents: dict[str, str]
    gradients: dict[str, str]
    saved: tuple[Saved, ...]
    joint: ModelProto

    @property
    def bytes_per_row(self) -> int:
        """Bytes saved for one row, any other length that is not fixed counted as one."""
        return sum(tensor.bytes_per_row for tensor in self.saved)


def partition(
    model: ModelLike,
    weights: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    recompute: str = "cheap",
) -> Partition:
    """Return a forward and a backward model, both of standard operators.

    What the backward pass reads is saved by the forward pass, or computed again, whichever takes
    fewer bytes among what `recompute` allows. Random results are always saved.

    Args:
        model: model, serialized model or path, never modified; or the joint graph that
            `onnx_derivative` makes of it with `DerivativeOptions.KeepYieldOp`.
        weights: names of the weights, which become inputs; see `onnx_derivative`.
        inputs: names of the inputs to differentiate by; see `onnx_derivative`.
        recompute: "none" computes nothing twice but shapes and views. "cheap" repeats what is one
            cheap pass over memory. "all" repeats the whole forward pass.

    Raises:
        ValueError: an unknown name or `recompute`, a joint graph with `weights` or `inputs`, or
            nothing that has a gradient. Of several, those without one are passed over.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on the way has no rule.
    """
    if recompute not in RECOMPUTE:
        raise unknown("recompute", recompute, RECOMPUTE)
    proto = read(model)
    with garbage_kept():
        if not any(node.op_type == "YieldOp" for node in proto.graph.node):
            asked = DerivativeRequest(
                weights, inputs, DerivativeOptions.KeepYieldOp, all_reached=False
            )
            joint, gradients = derivative(proto, asked)
        elif weights is None and inputs is None:
            joint, made = proto, {y.name for y in proto.graph.output}
            pairs = {x.name: f"{x.name}_grad" for x in proto.graph.input}
            gradients = {x: g for x, g in pairs.items() if g in made}
        else:
            raise ValueError("a joint graph has its weights and inputs: leave them out")
        return _cut(joint, gradients, recompute)


def _cut(joint: ModelProto, gradients: dict[str, str], recompute: str) -> Partition:
    model = to_ir(joint)
    sides = _Sides(model.graph)
    sizes, least = _Sizes(joint, _LENGTH), _Sizes(joint, 1)
    saved = _choose(sides, recompute, sizes)
    for v in saved:
        if v.shape is None and (rank := least.rank(v)) is not None and rank == sizes.rank(v):
            v.shape = ir.Shape([None] * rank)  # without one, it could be no input
    report = _report(joint, saved, least)
    return Partition(
        _forward(joint, report),
        _backward(model, saved),
        sides.cotangents,
        gradients,
        report,
        joint,
    )


class _Sides:
    """The nodes of a joint graph that do not depend on the gradients fed, and what others read."""

    def __init__(self, graph: ir.Graph) -> None:
        self.reads: dict[ir.Node, list[ir.Value]] = {}
        self.before: list[ir.Node] = []
        after: set[ir.Value] = set()
        read_after: dict[ir.Value, None] = dict.fromkeys(graph.outputs)
        self.yielding = _yielding(graph)
        without = self.yielding.attributes.get_ints("non_differentiable_outputs", ())
        outputs = [y for i, y in enumerate(self.yielding.inputs) if i not in without]
        pairs = zip(outputs, self.yielding.outputs, strict=True)
        self.cotangents = {str(y.name): str(g.name) for y, g in pairs if y is not None}
        for node in graph:
            read = reads(node)
            if node is self.yielding:
                after.update(node.outputs)
            elif after.isdisjoint(read):
                self.reads[node] = read
                self.before.append(node)
            else:
                after.update(node.outputs)
                read_after |= dict.fromkeys(read)
        self.wanted = [v for v in read_after if v.producer() in self.reads]
        self.forward = self._needed_by(self.yielding.inputs)

    def repeated(self, node: ir.Node, recompute: str) -> bool:
        """Tell whether the backward pass may compute `node` again."""
        return _repeats(node) and (node not in self.forward or RECOMPUTE[recompute](node))

    def _needed_by(self, outputs: Iterable[ir.Value | None]) -> set[ir.Node]:
        needed = set(outputs)
        found = set()
        for node in reversed(self.before):
            if not needed.isdisjoint(node.outputs):
                found.add(node)
                needed.update(self.reads[node])
        return found


def _yielding(graph: ir.Graph) -> ir.Node:
    for node in graph:
        if node.op_type == "YieldOp":
            return node
    raise ValueError("no gradient depends on what arrives at the outputs: there is nothing to cut")


def _choose(sides: _Sides, recompute: str, sizes: _Sizes) -> list[ir.Value]:
    """Return what is saved, in the order of the graph: the fewest bytes that are enough."""
    outputs = set(sides.yielding.inputs)  # they are handed out anyway

    def made_of(value: ir.Value) -> list[ir.Value] | None:
        node = value.producer()
        assert node is not None
        again = sides.repeated(node, recompute) or (not _is_tensor(value) and _repeats(node))
        if not again:
            return None
        return [x for x in sides.reads[node] if x.producer() in sides.reads]

    def price(value: ir.Value) -> float:
        if not _is_tensor(value):
            return inf
        return 0 if value in outputs else sizes[value]

    saved = cheapest(sides.wanted, price, made_of)
    found = [y for node in sides.before for y in node.outputs if y in saved]
    for v in found:
        if not _is_tensor(v):
            raise NoGradientRule(
                f"{v.name!r} is a sequence of random numbers, which cannot pass from the forward "
                "to the backward model: draw them outside of the Loop that makes it"
            )
    return found


def _is_tensor(value: ir.Value) -> bool:
    """Tell whether `value` can pass between models, as only a tensor can."""
    return isinstance(value.type, ir.TensorType)


def _repeats(node: ir.Node) -> bool:
    """Tell whether `node` computes the same again."""
    inner = (n for g in subgraphs(node) for n in g.all_nodes())
    return all(not n.domain and n.op_type not in RANDOM for n in (node, *inner))


class _Sizes:
    """The bytes of values, where every length that an input leaves open is one number."""

    def __init__(self, joint: ModelProto, length: int) -> None:
        self.joint, self.length = joint, length

    def __getitem__(self, value: ir.Value) -> int:
        """Return the bytes of a value of the joint graph."""
        known = _named(dims(value))
        return _size(value if known else self._inferred[str(value.name)], self.length)

    def rank(self, value: ir.Value) -> int | None:
        """Return how many axes `value` has with these lengths; a Squeeze may leave more or less."""
        shape = dims(self._inferred[str(value.name)])
        return None if shape is None else len(shape)

    @cached_property
    def _inferred(self) -> dict[str, ir.Value]:
        """The values once more, with the shapes that follow from inputs of known shape."""
        model = to_ir(self.joint)
        for x in model.graph.inputs:
            if (shape := dims(x)) is not None:
                x.shape = ir.Shape([d if isinstance(d, int) else self.length for d in shape])
        for node in model.graph:
            for y in node.outputs:
                y.shape = None
        infer(model)
        return {str(y.name): y for node in model.graph for y in node.outputs}


def _named(shape: Dims | None) -> bool:
    """Tell whether every length is known, or a symbol of an input."""
    return shape is not None and all(
        isinstance(d, int) or (d is not None and d.isidentifier() and not d.startswith("unk__"))
        for d in shape
    )


def _size(value: ir.Value, length: int) -> int:
    elements = _elements(value, length)
    return ceil(elements * value.dtype.itemsize) if value.dtype else 0


def _elements(value: ir.Value, length: int) -> int:
    node, shape = value.producer(), dims(value)
    if not _named(shape) and node is not None and node.op_type in _SAME_SIZE:
        assert node.inputs[0] is not None
        return _elements(node.inputs[0], length)
    lengths = (length,) * 3 if shape is None else shape
    return prod(d if isinstance(d, int) else length for d in lengths)


def _report(joint: ModelProto, saved: list[ir.Value], sizes: _Sizes) -> tuple[Saved, ...]:
    rows = 1
    if joint.graph.input:
        batch = joint.graph.input[0].type.tensor_type.shape.dim[:1]
        rows = max([1, *(d.dim_value for d in batch)])
    return tuple(
        Saved(str(v.name), str(v.dtype and v.dtype.numpy()), dims(v), ceil(sizes[v] / rows))
        for v in saved
    )


def _forward(joint: ModelProto, saved: tuple[Saved, ...]) -> ModelProto:
    model = to_ir(joint)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for tensor in saved:
        if tensor.shape is not None:
            values[tensor.name].shape = ir.Shape(tensor.shape)
    kept = dict.fromkeys([*_yielding(graph).inputs, *(values[tensor.name] for tensor in saved)])
    graph.outputs[:] = [v for v in kept if v is not None]
    return _finished(model)


def _backward(model: ir.Model, saved: list[ir.Value]) -> ModelProto:
    graph = model.graph
    declared = list(graph.inputs)
    made = [as_input(graph, v) for v in (*saved, *_yielding(graph).outputs)]
    graph.inputs.extend(made)
    tidy(model)
    name_rest(graph)
    for x in declared:
        if not x.uses():
            graph.inputs.remove(x)
    return _finished(model)


def _finished(model: ir.Model) -> ModelProto:
    tidy(model)
    model.opset_imports.pop("com.microsoft", None)
    return to_proto(model)
