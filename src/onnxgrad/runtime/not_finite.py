"""Which node of a model first computes NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto, NodeProto

from onnxgrad.errors import escaping, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.traversal import reads as ir_reads, subgraphs as ir_subgraphs
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.external import array
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.read import read
from onnxgrad.model.rewrites import dense_inside
from onnxgrad.model.traversal import reads, subgraphs
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

PIECE_NODES, _BYTES = 256, 1 << 28  # limits of one piece of the model: its nodes, their outputs
_THREADED = 1e8  # multiply-adds: as many threads as there are cores
_CONSTANT = ("Constant", "ConstantOfShape")  # operators: infinity in a mask is no fault of theirs
FINITE, INFINITE, NAN = "finite", "infinity", "NaN"


@escaping()
def first_not_finite(
    model: ModelProto, feed: Mapping[str, np.ndarray], rows: Sequence[int] = (), of: str = ""
) -> str | None:
    """Return which node first computes NaN or infinity, though its inputs are finite.

    Only nodes on which an output that is not finite depends are considered, through values that are
    not finite either: the infinities of a mask in front of a Softmax are no fault. Inside an If,
    Loop or Scan, the node of the subgraph is named, and the iteration.

    The model runs once, in pieces, on the CPU. Only those values are kept that later pieces read.

    Args:
        model: model; never modified.
        feed: its inputs.
        rows: the numbers of the rows of the batch that `feed` is, so that those at fault are named.
        of: what has rows of these numbers, such as " of batch 3".

    Returns:
        The end of a sentence, None if all outputs are finite, such as "Exp (node 'grow', output
        'h') gives infinity; its input 'x' is between 1 and 100". It names an input or a constant
        instead of a node if that is not finite already.
    """
    search = _Search(dense_inside(read(model)), feed, rows, of)
    search.run()
    return search.result()


class _Search:
    """A run of a model in pieces, and what it says of each value."""

    def __init__(
        self, model: ModelProto, feed: Mapping[str, np.ndarray], rows: Sequence[int], of: str
    ) -> None:
        self.model, self.feed, self.numbers, self.of = model, feed, np.asarray(rows), of
        self.nodes = list(model.graph.node)
        self.initializers = {t.name: t for t in model.graph.initializer}
        self.reads = [[x for x in dict.fromkeys(reads(node)) if x] for node in self.nodes]
        self.producers = {y: i for i, node in enumerate(self.nodes) for y in node.output if y}
        self.last = {x: i for i, read in enumerate(self.reads) for x in read}  # reader by name
        # each begins a piece: a Scan needs the shapes of its inputs
        self.with_subgraphs = {i for i, node in enumerate(self.nodes) if any(subgraphs(node))}
        self.ranges: dict[str, tuple[float, float]] = {}  # of the values that are floats
        self.rows: dict[str, np.ndarray] = {}  # at fault, of values that are not finite
        self.inside: dict[int, str] = {}  # messages on nodes with subgraphs, by index

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the model, and note the range of every value."""
        inputs = {x.name for x in self.model.graph.input}
        if missing := sorted(inputs - self.feed.keys() - self.initializers.keys()):
            raise ValueError(f"feed lacks {missing}: pass all inputs of the model")
        self.values = dict[str, ort.OrtValue]()
        for name in self.feed.keys() & inputs:
            fed = np.asarray(self.feed[name], order="C")
            self.values[name] = CPU.ortvalue(fed)
            self._note(name, fed)
        start, count = 0, 8
        while start < len(self.nodes):
            stop = min(start + count, len(self.nodes))
            stop = next((i for i in range(start + 1, stop) if i in self.with_subgraphs), stop)
            size = self._run_piece(range(start, stop))
            for name in [n for n in self.values if self.last.get(n, -1) < stop]:
                del self.values[name]
            count = max(1, min(2 * count, PIECE_NODES, int((stop - start) * _BYTES / max(size, 1))))
            start = stop

    def _run_piece(self, piece: range) -> int:
        """Run some nodes, and return the bytes of their outputs."""
        outputs = [y for i in piece for y in self.nodes[i].output if y]
        model, size = self._piece(piece, outputs), 0
        feed = {x.name: self.values[x.name] for x in model.graph.input}
        results = session(model, CPU, _THREADED).run_with_ort_values(outputs, feed)
        for name, value in zip(outputs, results, strict=True):
            self.values[name] = value
            if value.is_tensor() and value.data_type() != "tensor(bfloat16)":  # numpy lacks it
                tensor = value.numpy()
                size += tensor.nbytes
                self._note(name, tensor)
        for i in self.with_subgraphs.intersection(piece):
            if self._any_bad(self.nodes[i].output) and not self._any_bad(self.reads[i]):
                self.inside[i] = self._inside(i)
        return size

    def _piece(self, piece: range, outputs: Sequence[str]) -> ModelProto:
        model = ModelProto(ir_version=self.model.ir_version)
        model.opset_import.extend(self.model.opset_import)
        model.functions.extend(self.model.functions)
        model.graph.name = "piece"
        model.graph.node.extend(self.nodes[i] for i in piece)
        for name in outputs:
            model.graph.output.add(name=name)
        own = {y for i in piece for y in self.nodes[i].output}
        for name in dict.fromkeys(x for i in piece for x in self.reads[i] if x not in own):
            if name in self.values:
                _declare(model, name, self.values[name])
            elif name in self.initializers:
                model.graph.initializer.append(self.initializers[name])
        return model

    def _note(self, name: str, value: np.ndarray) -> None:
        """Note the least and the greatest element of floats; one of them is NaN if any is."""
        if value.dtype.kind in "biuSUO":
            return
        x = value.astype(np.float64, copy=False) if value.dtype.kind != "f" else value
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        self.ranges[name] = low, high
        if not np.isfinite([low, high]).all() and len(self.numbers):
            axes = [i for i, length in enumerate(x.shape) if length == len(self.numbers)]
            if axes:  # the first one, if several are as long
                bad = np.moveaxis(~np.isfinite(x), axes[0], 0).reshape(len(self.numbers), -1)
                self.rows[name] = self.numbers[bad.any(axis=1)]

    def _state(self, name: str) -> str | None:
        """Return the state of a value; None if it is unknown, as that of a sequence."""
        if name not in self.ranges and name in self.initializers:
            self._note(name, array(self.initializers[name]))
        ends = self.ranges.get(name)
        if ends is None:
            return None
        return NAN if np.isnan(ends).any() else INFINITE if np.isinf(ends).any() else FINITE

    def _any_bad(self, names: Iterable[str]) -> bool:
        return any(self._state(name) in (INFINITE, NAN) for name in names)

    # -- the way back ---------------------------------------------------------------------------

    def result(self) -> str | None:
        outputs = [y.name for y in self.model.graph.output]
        bad = [y for y in outputs if self._state(y) in (INFINITE, NAN)]
        bad = [y for y in bad if self._state(y) == NAN] or bad
        if not bad:
            return None
        sources, created = self._trace(bad)
        constants = sorted(
            (v for v in sources if self._is_constant(v)),
            key=lambda v: (self._state(v) != NAN, v not in self.feed),
        )
        if constants and self._state(constants[0]) == NAN:
            return self._of_constant(constants[0], None)
        computed = [v for v in sources if not self._is_constant(v)]
        if computed:
            return self._of_node(min(computed, key=lambda v: self.producers[v]), bad)
        return self._of_constant(constants[0], min(created, default=None))

    def _is_constant(self, name: str) -> bool:
        """Return whether a value is an input, an initializer or the output of a Constant."""
        i = self.producers.get(name)
        return i is None or (self.nodes[i].op_type in _CONSTANT and not self.nodes[i].domain)

    def _trace(self, bad: Sequence[str]) -> tuple[set[str], set[int]]:
        """Return the values behind `bad` that are not finite, and come from finite ones alone.

        NaN is followed to NaN, and only where it comes from other numbers to infinity. The second
        set are the nodes that compute NaN from other numbers, by index.
        """
        sources, created = set[str](), set[int]()
        seen, stack = set(bad), list(bad)
        while stack:
            v = stack.pop()
            i = self.producers.get(v)
            read = [] if i is None else self._read(i)
            causes = [x for x in read if self._state(x) == NAN]
            if not causes:
                if i is not None and self._state(v) == NAN:
                    created.add(i)
                causes = [x for x in read if self._state(x) == INFINITE]
            if not causes:
                sources.add(v)
            stack += [x for x in causes if x not in seen]
            seen.update(causes)
        return sources, created

    def _read(self, node: int) -> list[str]:
        """Return the values that a node reads; instead of a sequence, those it is made from."""
        values: dict[str, None] = {}
        stack, seen = [node], {node}
        while stack:
            for name in self.reads[stack.pop()]:
                producer = self.producers.get(name)
                if producer is None or self._state(name) is not None:
                    values[name] = None
                elif producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
        return list(values)

    # -- messages -------------------------------------------------------------------------------

    def _of_node(self, name: str, outputs: Sequence[str]) -> str:
        i = self.producers[name]
        text = f"{_describe(self.nodes[i], name)} gives {self._state(name)}"
        if rows := next((self.rows[v].tolist() for v in (name, *outputs) if v in self.rows), None):
            listed = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
            text += f" in row{'s' * (len(rows) > 1)} {listed}{self.of}"
        if self.inside.get(i):
            return f"{text}; {self.inside[i]}"
        for x in self.reads[i]:
            if self._state(x) is not None:
                low, high = self.ranges[x]
                text += f"; its input {printable(x)!r} is between {low:g} and {high:g}"
        return text

    def _of_constant(self, name: str, node: int | None) -> str:
        kind = "input" if name in self.feed else "constant"
        text = f"the {kind} {printable(name)!r} holds {self._state(name)}"
        if name in self.feed and np.ndim(self.feed[name]):
            finite = np.isfinite(np.asarray(self.feed[name]).astype(np.float64))
            text += f", first at {np.argwhere(~finite)[0].tolist()}"
        if node is None:
            return text
        return f"{text}, from which {_describe(self.nodes[node])} computes NaN"

    # -- inside of subgraphs --------------------------------------------------------------------

    def _inside(self, i: int) -> str:
        """Return which node of a subgraph is at fault, and in which iteration; "" if unknown."""
        try:
            model = to_ir(self._piece(range(i, i + 1), [y for y in self.nodes[i].output if y]))
            infer(model)
            [node] = model.graph
            graph = self._branch(node) if node.op_type == "If" else next(ir_subgraphs(node))
            values = _float_values(graph)
            model.graph.outputs[:] = _add_flags(Emit(model.graph), node, graph, values)
            feed = {str(x.name): self.values[str(x.name)] for x in model.graph.inputs}
            flags = session(to_proto(model), CPU, _THREADED).run_with_ort_values(None, feed)
        except Exception:  # the message names the node with the subgraph then
            return ""
        iterations = np.stack([np.atleast_1d(flag.numpy()) for flag in flags], axis=1)
        for number, row in enumerate(iterations, 1):
            bad = {v for v, flag in zip(values, row, strict=True) if not np.isfinite(flag)}
            for inner in graph:
                at_fault = bad.intersection(inner.outputs) and not bad.intersection(ir_reads(inner))
                if at_fault and inner.op_type not in _CONSTANT:
                    name = f"node {printable(inner.name)!r}, " if inner.name else ""
                    where = f"{name}output {printable(inner.outputs[0].name)!r}"
                    when = "" if node.op_type == "If" else f", in iteration {number}"
                    return f"inside of it, {inner.op_type} ({where}) is the first{when}"
        return ""

    def _branch(self, node: ir.Node) -> ir.Graph:
        name = str(node.inputs[0].name) if node.inputs[0] else ""
        taken = self.values[name].numpy() if name in self.values else array(self.initializers[name])
        return node.attributes["then_branch" if taken.item() else "else_branch"].as_graph()


def _declare(model: ModelProto, name: str, value: ort.OrtValue) -> None:
    """Add an input of the type of `value` to a model."""
    kind, declared = value.data_type(), model.graph.input.add(name=name).type
    if kind.startswith("seq("):
        kind, declared = kind[4:-1], declared.sequence_type.elem_type
    dtype = session_dtype(kind)
    if dtype is None:
        raise ValueError(f"value {name!r} is a {kind}, which is no tensor")
    declared.tensor_type.elem_type = int(dtype)
    if value.is_tensor():
        declared.tensor_type.shape.SetInParent()
        for length in value.shape():
            declared.tensor_type.shape.dim.add(dim_value=length)


def _float_values(graph: ir.Graph) -> list[ir.Value]:
    values = [*graph.inputs, *(y for node in graph for y in node.outputs)]
    tensors = [v for v in values if v.name and isinstance(v.type, ir.TensorType)]
    return [v for v in tensors if v.dtype is not None and v.dtype.is_floating_point()]


def _add_flags(
    outer: Emit, node: ir.Node, graph: ir.Graph, values: Sequence[ir.Value]
) -> Sequence[ir.Value]:
    """Return the flags of the values of a subgraph, as new outputs of its node.

    A flag is a number that is not finite if an element of the value is not.
    """
    for other in ir_subgraphs(node):  # the branch that is not taken needs as many outputs
        op = Emit(other, outer=outer)
        zeros = [op.copy_of(op.const(0.0)) for _ in values]
        other.outputs.extend([_flag(op, v) for v in values] if other is graph else zeros)
    first = len(node.outputs)
    node.resize_outputs(first + len(values))
    for y in node.outputs[first:]:
        y.name, y.type = outer.name("flag"), ir.TensorType(ir.DataType.FLOAT)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            numbers = [*node.attributes[name].as_ints(), *[0] * len(values)]
            node.attributes[name] = ir.AttrInt64s(name, numbers)
    return node.outputs[first:]


def _flag(op: Emit, v: ir.Value) -> ir.Value:
    """Return the sum of x - x: 0 for finite numbers, otherwise NaN."""
    x = v if v.dtype == ir.DataType.DOUBLE else op.Cast(v, to=ir.DataType.FLOAT)
    return op.Cast(op.ReduceSum(op.Sub(x, x), keepdims=0), to=ir.DataType.FLOAT)


def _describe(node: NodeProto, output: str | None = None) -> str:
    name = f"node {printable(node.name)!r}, " if node.name else ""
    return f"{node.op_type} ({name}output {printable(output or node.output[0])!r})"
