"""Recomputation: which nodes of a forward pass may run again, and copies of them in one graph.

The backward pass writes the copies. A runtime would run them as early as their operands allow,
while the originals still exist, or merge them with the originals. So the operands of a copy are
gated: they pass through a Reshape to their own shape, which depends on a cotangent; onnxruntime
does not copy the tensor for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from math import ceil, inf, prod

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.cuts import Lifetime, cheapest_values, segment_cuts
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.traversal import (
    all_nodes,
    captured,
    nodes_after,
    nodes_behind,
    reads,
    subgraphs,
)
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.operators import CHEAP, RANDOM, SAME_ELEMENTS, VIEWS, made_by, operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.rule_nodes import delay_until
from onnxgrad.operators.shapes import Dims, dims, is_stated

LENGTH = 32  # assumed length of symbolic dimensions, to compare sizes

# {value of `recompute`: whether the backward pass may compute a forward node again}
RECOMPUTE: dict[str, Callable[[ir.Node], bool]] = {
    "none": lambda node: node.op_type in VIEWS,
    "cheap": lambda node: node.op_type in CHEAP,
    "all": lambda node: True,
}


def is_repeatable(node: ir.Node) -> bool:
    """Return whether `node` computes the same when it runs again, as it draws no random numbers.

    The operators of onnxruntime that have a rule here are known to draw none.
    """
    inner = (n for g in subgraphs(node) for n in all_nodes(g))
    return all(map(_draws_no_random_numbers, (node, *inner)))


def _draws_no_random_numbers(node: ir.Node) -> bool:
    if not node.domain:
        return node.op_type not in RANDOM
    operator = operator_of(node)
    return node.domain == "com.microsoft" and operator.rule is not None and not operator.of_user


class ByteSizes:
    """The bytes of the values of a graph, with all symbolic dimensions of inputs set to
    `length`.
    """

    def __init__(self, joint: ModelProto, length: int) -> None:
        self.joint, self.length = joint, length

    def __getitem__(self, value: ir.Value) -> int:
        """Return the bytes of `value`, a value of the graph of both passes."""
        source = value if _has_known_symbols(dims(value)) else self._values_by_name[str(value.name)]
        return (
            ceil(_element_count(source, self.length) * source.dtype.itemsize) if source.dtype else 0
        )

    def rank(self, value: ir.Value) -> int | None:
        """Return the rank of `value`, which may depend on lengths, as after a Squeeze; None if
        unknown.
        """
        shape = dims(self._values_by_name[str(value.name)])
        return None if shape is None else len(shape)

    @cached_property
    def _values_by_name(self) -> dict[str, ir.Value]:
        """All values of a copy of the graph, by name, with shapes inferred from static inputs."""
        model = to_ir(self.joint)
        for x in model.graph.inputs:
            if (shape := dims(x)) is not None:
                x.shape = ir.Shape([d if isinstance(d, int) else self.length for d in shape])
        for node in model.graph:
            for y in node.outputs:
                y.shape = None
        infer(model)
        return {str(y.name): y for node in model.graph for y in node.outputs}


def _has_known_symbols(shape: Dims | None) -> bool:
    """Return whether every dimension of a shape is static, or a symbol of an input."""
    return shape is not None and all(
        isinstance(d, int) or (is_stated(d) and str(d).isidentifier()) for d in shape
    )


def _element_count(value: ir.Value, length: int) -> int:
    node, shape = value.producer(), dims(value)
    if not _has_known_symbols(shape) and node is not None and node.op_type in SAME_ELEMENTS:
        assert node.inputs[0] is not None
        return _element_count(node.inputs[0], length)
    lengths = (length,) * 3 if shape is None else shape
    return prod(d if isinstance(d, int) else length for d in lengths)


class Recomputation:
    """Lets the backward pass of a graph compute values of the forward pass again, to save memory.

    Create it between the two passes, then call `write`.

    Args:
        op: emitter of the graph that contains the forward pass.
        seeds: the cotangents that the backward pass starts with.
        recompute: "none"; "cheap": nodes that `partition` calls cheap, and normalizations; "all":
            every node up to the last cut of `segment_cuts`, from the values at the cuts.
    """

    def __init__(self, op: Emit, seeds: Iterable[ir.Value], recompute: str) -> None:
        self.op, self.recompute, self.seeds = op, recompute, set(seeds)
        self.forward = {node: i for i, node in enumerate(op.graph)}
        self.nbytes = {} if recompute == "none" else _bytes_of_results(op.graph)

    def write(self, needed: Iterable[ir.Value]) -> None:
        """Write copies of forward nodes into the backward pass that computes the values
        `needed`.
        """
        if self.recompute == "none":
            return
        self._divide_at_first_cotangents(needed)
        crossing, last = self._values_kept_at_cuts()
        kept = crossing | (self._cheapest_values(crossing) if self.recompute == "cheap" else last)
        kept.update(x for node in self.after for x in captured(node))
        copies = _RecomputedCopies(self.op, self.before, self.depth, kept)
        for node in self.after:
            copies.redirect_reads(node)

    def _divide_at_first_cotangents(self, needed: Iterable[ir.Value]) -> None:
        """Divide the nodes that compute `needed` into nodes `before` and `after` the first
        cotangents.

        Nodes that the backward pass wrote, but that depend on no cotangent, are among `before`.
        `demands` are the results of `before` that `after` reads, and `depth` is the length of the
        longest path to each node.
        """
        needed_nodes = nodes_behind(needed)
        live = [node for node in self.op.graph if node in needed_nodes]
        self.after = nodes_after((node for node in live if node not in self.forward), self.seeds)
        own = dict.fromkeys(live)
        for node in self.after:
            del own[node]
        self.before = list(own)
        self.depth: dict[ir.Node | None, int] = {}
        for node in live:
            depths = (self.depth.get(x.producer(), 0) for x in reads(node))
            self.depth[node] = 1 + max(depths, default=0)
        read = (x for node in self.after for x in reads(node))
        self.demands = dict.fromkeys(x for x in read if x.producer() in own)

    def _cheapest_values(self, kept: set[ir.Value]) -> set[ir.Value]:
        """Return the values of the fewest bytes from which all other values are cheap to compute.

        Values `kept` anyway end chains, such as the residual stream of a network: the first use of
        its end would compute all of it again.
        """

        def is_cheap(node: ir.Node) -> bool:
            # normalizations cost little beside the product or convolution that reads the result
            cheap = RECOMPUTE["cheap"](node) or "normalizes" in operator_of(node).traits
            return cheap or node not in self.forward

        def made_of(value: ir.Value) -> list[ir.Value] | None:
            node = value.producer()
            if node is None or value in kept or not may_copy_node(node) or not is_cheap(node):
                return None
            return [x for x in reads(node) if x.producer() in self.depth]

        def price(value: ir.Value) -> float:
            if (nbytes := self.nbytes.get(value)) is not None and value not in kept:
                return nbytes
            return 0 if made_of(value) is None else inf

        return {v for v in cheapest_values(self.demands, price, made_of) if isinstance(v, ir.Value)}

    def _values_kept_at_cuts(self) -> tuple[set[ir.Value], set[ir.Value]]:
        """Return the values to keep at cuts of the forward pass, and the values after the last
        cut.
        """
        nodes = [node for node in self.before if node in self.forward]
        first = {y: i for i, node in enumerate(nodes) for y in node.outputs}
        last = dict(first)
        for i, node in enumerate(nodes):
            last.update((x, i) for x in reads(node) if x in first)
        behind = (node for node in self.before if node not in self.forward)
        read = {*self.demands, *(x for node in behind for x in reads(node))}
        fixed = {y for node in self.before if not may_copy_node(node) for y in node.outputs}
        lifetimes = [
            Lifetime(i, last[v], self.nbytes.get(v, 0), v in read)
            for v, i in first.items()
            if v not in fixed
        ]
        positions = segment_cuts(lifetimes, len(nodes)) if nodes else []
        end = positions[-1] if positions else -1
        crossing = {v for v, i in first.items() if any(i <= p < last[v] for p in positions)}
        return fixed | crossing, {v for v, i in first.items() if i > end}


def may_copy_node(node: ir.Node) -> bool:
    """Return whether the backward pass may run a copy of `node`: no random numbers, no subgraph.

    Shapes are too small to be computed again.
    """
    is_shape = node.op_type in ("Shape", "Size")
    tensors = all(_is_tensor(y) for y in node.outputs)
    return tensors and not is_shape and is_repeatable(node) and not any(subgraphs(node))


class _RecomputedCopies:
    """Copies of nodes, each written before the first node of the backward pass that reads it."""

    def __init__(
        self, op: Emit, before: Iterable[ir.Node], depth: Mapping, kept: Collection[ir.Value]
    ) -> None:
        self.op, self.kept, self.depth = op, kept, depth
        self.position = {node: i for i, node in enumerate(before)}
        self.copies: dict[ir.Value, ir.Value] = {}
        self.latest: ir.Value | None = None  # the cotangent at the end of the longest path so far

    def redirect_reads(self, node: ir.Node) -> None:
        """Let a node of the backward pass read copies of forward values; call it in topological
        order.
        """
        with self.op.at(node):
            for i, x in enumerate(node.inputs):
                if x is not None and self._is_recomputed(x):
                    self._write_copies(x)
                    node.replace_input_with(i, self.copies[x])
        if self.latest is None or self.depth[node] >= self._node_depth(self.latest):
            self.latest = next(filter(_is_tensor, node.outputs), self.latest)

    def _node_depth(self, value: ir.Value) -> int:
        return self.depth.get(value.producer(), 0)

    def _is_recomputed(self, value: ir.Value) -> bool:
        """Return whether the backward pass should read a copy of `value` rather than `value`."""
        if value in self.copies:
            return True
        if value in self.kept or value.producer() not in self.position:
            return False
        return self.latest is not None and self._node_depth(self.latest) > self._node_depth(value)

    def _write_copies(self, value: ir.Value) -> None:
        """Write copies of the node of `value`, and of the nodes that it needs and that are not
        kept.
        """
        nodes: set[ir.Node] = set()
        stack = [value]
        while stack:
            x = stack.pop()
            node = x.producer()
            if x in self.copies or node is None or node in nodes or node not in self.position:
                continue
            if x not in self.kept:
                nodes.add(node)
                stack += reads(node)
        for node in sorted(nodes, key=self.position.__getitem__):
            self._copy_node(node)

    def _copy_node(self, node: ir.Node) -> None:
        operands = [x if x is None else self.copies.get(x, x) for x in node.inputs]
        if made_by(node.outputs[0], "BatchNormalization") and int_attribute(node, "training_mode"):
            for i in (3, 4):  # onnxruntime overwrites these operands
                operands[i] = self._separate_copy(node.inputs[i])
        computed = [x is not None and x.producer() is not None for x in operands]
        for i, x in enumerate(operands):
            if x is not None and x is node.inputs[i] and (computed[i] or not any(computed)):
                operands[i] = self._delay_until_cotangent(x)
        self.copies.update(zip(node.outputs, self.op.copy_node(node, operands), strict=True))

    def _separate_copy(self, value: ir.Value | None) -> ir.Value | None:
        """Return a copy of `value` that no other node reads, as onnxruntime overwrites it."""
        node = None if value is None else value.producer()
        if value is None or node is None:
            return value
        inputs = [x if x is None else self._delay_until_cotangent(x) for x in node.inputs]
        return self.op.copy_node(node, inputs)[value.index() or 0]

    def _delay_until_cotangent(self, x: ir.Value) -> ir.Value:
        """Return `x` behind a Reshape that waits for the latest cotangent of the backward pass."""
        if self.latest is None or not _is_tensor(x) or x.is_initializer():
            return x
        return delay_until(self.op, x, self.latest)


def _bytes_of_results(graph: ir.Graph) -> dict[ir.Value, int]:
    """Return the bytes of all tensors that the nodes of `graph` compute."""
    read = {x: None for node in graph for x in reads(node) if x.producer() is None}
    free = [x for x in read if not x.is_graph_input() and not x.is_initializer()]
    graph.inputs.extend(free)
    sizes = ByteSizes(to_proto(ir.Model(graph, ir_version=10)), LENGTH)
    del graph.inputs[len(graph.inputs) - len(free) :]
    return {y: sizes[y] for node in graph for y in node.outputs if _is_tensor(y)}


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType) or value.type is None
