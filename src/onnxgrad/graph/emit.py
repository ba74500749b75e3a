"""Emit: the only class that creates ONNX nodes; the same call again returns the same node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.traversal import all_names, attribute_key
from onnxgrad.operators import RANDOM, marks, sequences
from onnxgrad.operators.outputs import output_shape, output_types
from onnxgrad.operators.rule_nodes import attributes_of
from onnxgrad.operators.shapes import (
    broadcast,
    constant,
    dims,
    equal,
    optional_content,
    rank,
    static,
)

_SMALL = 64  # elements: constants below this size are compared, or written instead of an Expand
_DETACHED_SCALE = 2.0**100
_LAST = math.inf  # sorts behind all nodes that are inserted before a node
_current: ContextVar[Emit] = ContextVar("emit")


class _ArithmeticForwarder:
    """Forwards `a * b` to the emitter of the enclosing `with` block; outside of such a block, to
    the handler that onnx_ir had before.

    onnx_ir has one handler for the whole process; the ContextVar separates threads.
    """

    previous: Any = None

    def __getattr__(self, op_type: str) -> Any:
        return getattr(_current.get(self.previous), op_type)


_ARITHMETIC = _ArithmeticForwarder()


class Emit:
    """Writes nodes into a graph: the argument `op` of rules, lowerings, losses and optimizers.

    `op.Gather(x, [0, 1], axis=1)` writes one node and returns its first output, an `ir.Value`. An
    operand is a value, an array, a list of int (int64), a number (of the dtype of the first operand
    that is a value), or None if it is omitted. Keywords are attributes. Inside `with op:`, `a * b`
    writes a node, too. Nodes go to the end of `graph`, or inside of `with op.at(node):` before that
    node. The other methods write constants, names, lengths and sums over broadcast axes.

    Args:
        graph: the graph to write to.
        names: names that no new value may have, beside the names in `graph`.
        outer: if `graph` is a subgraph, the emitter of the graph around it, which stores the
            constants and the names of both.

    Attributes:
        written: the nodes that were written, in the order of the calls.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnxgrad.graph import Emit
        >>> x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", 3]))
        >>> graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20})
        >>> with Emit(graph) as op:
        ...     y = op.sum_to(2.0 * x, op.ReduceSum(x, [0], keepdims=1))
        >>> [node.op_type for node in graph], tuple(y.shape)
        (['Mul', 'ReduceSum', 'ReduceSum'], (1, 3))
    """

    def __init__(
        self, graph: ir.Graph, names: Iterable[str] = (), outer: Emit | None = None
    ) -> None:
        self.graph = graph
        self.outer = outer
        self.primal: ir.Node | None = None  # the node whose gradient is being written
        self.target: Any = outer.target if outer else None  # the runtime and device of the graph
        self.place: ir.Node | None = None  # insert nodes before it; None: at the end
        self.written: list[ir.Node] = []
        self._token = object()
        self._shared: dict[Any, ir.Node] = {}  # nodes by operator, operands and attributes
        self._places: dict[ir.Node, tuple[float, ...]] = {}  # sorted as the nodes; see `precedes`
        self._constants: dict[Any, ir.Value] = {}
        self._names: set[str] = outer._names if outer else all_names(graph) | set(names)
        self._numbers: Counter[str] = Counter()  # the last suffix of each name
        self._tokens: list[Any] = []  # of _current, one for every active `with`

    def __enter__(self) -> Self:
        previous = ir.set_value_magic_handler(_ARITHMETIC)  # never None, which other threads see
        if previous is not _ARITHMETIC:
            _ARITHMETIC.previous = previous
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())

    def __getattr__(self, op_type: str) -> Any:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.emit(op_type, inputs, attributes)

    def inside(self, body: ir.Graph) -> Self:
        """Return an emitter that writes into `body`, a subgraph of a node of this graph."""
        return type(self)(body, outer=self)

    @contextmanager
    def at(self, node: ir.Node | None) -> Iterator[Self]:
        """Write nodes before `node` inside of the `with` block; None stands for the end of the
        graph.
        """
        previous, self.place = self.place, node
        try:
            with self:
                yield self
        finally:
            self.place = previous

    def give(self, values: Iterable[ir.Value]) -> None:
        """Set the outputs of the graph to `values`; a value is copied if it is an input, of an
        outer graph, or given twice.

        onnxruntime returns garbage if the body of a Scan returns an input, or one value twice.
        """
        outputs: dict[ir.Value, None] = {}
        for v in values:
            node = v.producer()
            if node is None or node.graph is not self.graph or v in outputs:
                v = self.copy_of(v)
            outputs[v] = None
        self.graph.outputs[:] = outputs

    @property
    def opset(self) -> int:
        """The version of the standard opset, from the outermost graph; 0 if it has none."""
        return self.root.graph.opset_imports.get("", 0)

    @property
    def root(self) -> Emit:
        """The emitter of the outermost graph."""
        return self if self.outer is None else self.outer.root

    @staticmethod
    def is_own(node: ir.Node) -> bool:
        """Return whether an emitter of this package wrote `node`, unlike a node from a file."""
        return marks.EMITTER in node.meta

    # -- writing nodes ------------------------------------------------------------------------

    def emit(
        self,
        op_type: str,
        inputs: Any,
        attributes: dict[str, Any],
        domain: str = "",
        fresh: bool = False,
    ) -> ir.Value:
        """Return the output of a new node, or a value that is proven to equal it.

        Args:
            op_type, domain: of the operator.
            inputs: operands, in each form that the class describes.
            attributes: Python values by name, subgraphs as `ir.Graph`.
            fresh: always write a new node, so that its output may be renamed.
        """
        return self.emit_many(op_type, inputs, attributes, 1, domain, fresh)[0]

    def emit_many(
        self,
        op_type: str,
        inputs: Any,
        attributes: dict[str, Any],
        outputs: int,
        domain: str = "",
        fresh: bool = False,
    ) -> list[ir.Value]:
        """Return the `outputs` outputs of a node as `emit` does; only the first has a shape."""
        typed = inputs[1:] if op_type == "Where" else inputs  # numbers get the dtype of the others
        dtype = next((v.dtype for v in typed if isinstance(v, ir.Value) and v.dtype), None)
        values = [self.const(v, dtype) for v in inputs]
        if outputs == 1 and not domain and not fresh:
            same = self._operand_as_result(op_type, values, attributes)
            if same is not None:
                return [same]
        attrs = ir.convenience.convert_attributes(attributes)
        key = None
        if not fresh and op_type not in RANDOM:
            key = (domain, op_type, outputs, tuple(values), tuple(map(attribute_key, attrs)))
            shared = self._shared.get(key)
            if shared is not None and self.precedes(shared):
                return list(shared.outputs)
        new = ir.Node(domain, op_type, values, attrs, num_outputs=outputs)
        self._write_node(new, attributes)
        if key is not None:
            self._shared[key] = new
        return list(new.outputs)

    def precedes(self, node: ir.Node) -> bool:
        """Return whether `node` is in the graph, before the place of the next new node."""
        if node.graph is not self.graph or self.place is None:
            return node.graph is self.graph
        if node not in self._places or self.place not in self._places:
            self._places = {n: (i, _LAST) for i, n in enumerate(self.graph)}
        return self._places[node] < self._places[self.place]

    def _operand_as_result(self, op_type: str, values: list, attributes: dict) -> ir.Value | None:
        """Return the operand that the output is proven to equal, or None."""
        if op_type == "Mul":
            for x, other in (values, values[::-1]):
                if self.is_all(x, 1) and equal(broadcast(dims(x), dims(other)), dims(other)):
                    return other
        if op_type == "Cast" and values[0].dtype == attributes["to"]:
            return values[0]
        if op_type == "Reshape" and (target := self.known_value(values[1])) is not None:
            return values[0] if static(dims(values[0])) == tuple(target) else None
        return None

    def _write_node(self, node: ir.Node, attributes: dict[str, Any]) -> None:
        """Insert a node; set the names and types of its outputs, and the shape of the first."""
        types = output_types(node.op_type, node.inputs, attributes, len(node.outputs))
        for value, value_type in zip(node.outputs, types, strict=True):
            value.name, value.type = self.name(node.op_type.lower()), value_type
        shape = output_shape(node.op_type, node.inputs, attributes)
        node.outputs[0].shape = None if shape is None else ir.Shape(shape)
        number = len(self.written)  # grows with every node
        if self.place is None:
            self.graph.append(node)
            self._places[node] = (_LAST, number, _LAST)
        else:
            self.graph.insert_before(self.place, node)
            if (at := self._places.get(self.place)) is not None:
                self._places[node] = (*at[:-1], number, _LAST)
        self.written.append(node)
        node.meta[marks.EMITTER] = self._token
        if self.primal is not None:
            node.meta[marks.PRIMAL] = self.primal

    def copy_node(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value]:
        """Return the outputs of a new node like `node`, without subgraphs, that reads `inputs`."""
        count, attributes = len(node.outputs), attributes_of(node)
        new = self.emit_many(node.op_type, inputs, attributes, count, node.domain, fresh=True)
        return [self.set_type_like(y, old) for y, old in zip(new, node.outputs, strict=True)]

    def insert(self, node: ir.Node, nodes: list[ir.Node]) -> None:
        """Insert existing `nodes` before `node`, and list them among the nodes written."""
        self.graph.insert_before(node, nodes)
        self.written += nodes

    def copy_of(self, x: ir.Value) -> ir.Value:
        """Return the output of a new Identity of `x`, which may be renamed."""
        return self.emit("Identity", [x], {}, fresh=True)

    def name(self, prefix: str) -> str:
        """Return `prefix`, with a numeric suffix if a value has that name, and reserve it."""
        name = prefix
        while name in self._names:
            self._numbers[prefix] += 1
            name = f"{prefix}_{self._numbers[prefix]}"
        self._names.add(name)
        return name

    def name_output(
        self, value: ir.Value, name: str, like: ir.Value, protected: set[ir.Value]
    ) -> ir.Value:
        """Return `value`, or a copy, renamed to `name`, with the shape and dtype of `like`, to
        become an output of the graph.

        A value that is protected, or that this emitter did not write, is copied. An existing value
        named `name` is renamed; if it is protected, `value` gets a numeric suffix. The returned
        value is added to `protected`.
        """
        node = value.producer()
        if node is None or node.meta.get(marks.EMITTER) is not self._token or value in protected:
            value = self.copy_of(value)
        existing = None
        if name in self._names:
            existing = ir.convenience.create_value_mapping(self.graph).get(name)
        if existing in protected:
            name = self.name(name)
        elif existing is not None and existing is not value:
            existing.name = self.name(name)
        self._names.add(name)
        value.name = name
        protected.add(value)
        return self.set_type_like(value, like)

    # -- constants ----------------------------------------------------------------------------

    def const(self, v: Any, dtype: ir.DataType | None = None) -> Any:
        """Return `v` as a value: an initializer of the outermost graph, shared by equal constants.

        Args:
            v: a number, of shape []; a list or tuple, of dtype int64; an array, whose shape and
                dtype stay, where objects become texts. A value or None is returned unchanged.
            dtype: the dtype of a number; float32 by default.
        """
        if v is None or isinstance(v, ir.Value):
            return v
        if self.outer is not None:
            return self.outer.const(v, dtype)
        if isinstance(v, (list, tuple)):
            v = np.asarray(v, dtype=np.int64)
        if not isinstance(v, (np.ndarray, np.generic)):
            v = np.asarray(v, dtype=(dtype or ir.DataType.FLOAT).numpy())
        v = np.asarray(v)
        text = v.dtype.kind in "OSU"
        key = (v.dtype, v.shape, tuple(v.ravel()) if text else v.tobytes())
        if key not in self._constants:
            if text and v.dtype.kind != "S":
                v = np.char.encode(v.astype(str), "utf-8")
            tensor: Any = ir.StringTensor(v) if text else ir.Tensor(v)
            tensor.name = self.name("const")
            value = ir.Value(name=tensor.name, shape=ir.Shape(v.shape), const_value=tensor)
            value.type = ir.TensorType(tensor.dtype)
            value.meta[marks.EMITTER] = self._token
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    known_value = staticmethod(constant)

    def is_all(self, v: ir.Value, number: float) -> bool:
        """Return whether `v` is a small constant that this package wrote, all of whose elements are
        `number`.

        Constants of the model are not read: they may be weights, whose values do not decide what
        their gradients are.
        """
        if marks.EMITTER not in v.meta or v.const_value is None or v.const_value.size >= _SMALL:
            return False
        return bool(np.all(self.known_value(v) == number))

    def ones_like(self, x: ir.Value) -> ir.Value:
        """Return ones of the shape and dtype of `x`, a tensor or a sequence."""
        return self._filled_tensor_like(1, x)

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Return zeros of the shape and dtype of `x`, a tensor or a sequence."""
        return self._filled_tensor_like(0, x)

    def _filled_tensor_like(self, number: int, x: ir.Value) -> ir.Value:
        if not isinstance(x.type, ir.TensorType):
            return sequences.fill_sequence(self, number, x)
        assert x.dtype is not None
        shape = static(dims(x))
        if shape is not None and math.prod(shape) < _SMALL:
            return self.const(np.full(shape, number, x.dtype.numpy()))
        scalar = np.full((), number, x.dtype.numpy())
        return self.set_type_like(self.Expand(scalar, self.shape_of(x)), x)

    # -- shapes -------------------------------------------------------------------------------

    def shape_of(self, x: ir.Value) -> ir.Value:
        """Return the shape of `x`, int64 of shape [rank]: a constant if static, else a Shape."""
        shape = static(dims(x))
        return self.const(list(shape)) if shape is not None else self.Shape(x)

    def dim(self, x: ir.Value, axis: int) -> int | ir.Value:
        """Return the length of `axis`: an int if static, else an int64 tensor of shape [1]."""
        length = (dims(x) or {axis: None})[axis]
        if isinstance(length, int):
            return length
        return self.Shape(x, start=axis) if axis == -1 else self.Shape(x, start=axis, end=axis + 1)

    def numel(self, x: ir.Value, start: int, end: int | None = None) -> int | ir.Value:
        """Return the product of `shape[start:end]` of `x`: an int if static, else int64 [1]."""
        shape = dims(x)
        lengths = None if shape is None else static(shape[start:end])
        if lengths is not None:
            return math.prod(lengths)
        bounds = {"start": start} | ({} if end is None else {"end": end})
        return self.ReduceProd(self.Shape(x, **bounds), keepdims=1)

    def vector(self, *numbers: int | ir.Value) -> list[int] | ir.Value:
        """Join ints and int64 tensors of shape [1]: a list if all are ints, else int64 [n]."""
        ints = [n for n in numbers if isinstance(n, int)]
        if len(ints) == len(numbers):
            return ints
        joined = self.Concat(*([n] if isinstance(n, int) else n for n in numbers), axis=0)
        joined.shape = ir.Shape([len(numbers)])
        return joined

    def reshape_like(self, g: ir.Value, like: ir.Value) -> ir.Value:
        """Return `g` reshaped to the shape of `like`, of the same dtype and element count."""
        have, want = dims(g), dims(like)
        if equal(have, want):
            return g
        have, target = have or (), list[int]()
        for i, d in enumerate(want or ()):  # 0 copies the length from g, a single -1 is inferred
            same = d is not None and i < len(have) and have[i] == d
            target.append(d if isinstance(d, int) else 0 if same else -1)
        if want is None or target.count(-1) > 1 or 0 in want:
            return self.set_type_like(self.Reshape(g, self.shape_of(like), allowzero=1), like)
        return self.set_type_like(self.Reshape(g, target), like)

    def set_type_like(self, y: ir.Value, x: ir.Value) -> ir.Value:
        """Give `y` the shape and type of `x`; if `x` is an Optional, the type of its content.

        Returns `y` itself; no node is written.
        """
        y.shape, y.type = x.shape, optional_content(x.type)
        return y

    def arange(self, n: int | ir.Value) -> ir.Value:
        """Return 0, 1, ..., n - 1 as int64; `n` may be an int64 tensor of one element."""
        if isinstance(n, int):
            return self.const(np.arange(n))
        if rank(n) != 0:
            n = self.Reshape(n, []) if rank(n) is None else self.Squeeze(n, [0])
        return self.Range(np.int64(0), n, np.int64(1))

    # -- values ------------------------------------------------------------------------------

    def detached(self, x: ir.Value) -> ir.Value:
        """Return a copy of `x`, float32 of values below 2^28, through which no gradient flows.

        Floor has none, and scaled so, it changes no number above 2^-76.
        """
        return self.Mul(self.Floor(self.Mul(x, _DETACHED_SCALE)), 1 / _DETACHED_SCALE)

    def split(self, x: ir.Value, parts: Any, axis: int) -> list[ir.Value]:
        """Return the parts of `x` along `axis`: `parts` equal parts if it is an int, else parts of
        these lengths.
        """
        shape, attributes, operands = dims(x), {"axis": axis}, [x]
        if isinstance(parts, int):
            whole, attributes["num_outputs"] = (shape or {axis: None})[axis], parts
            lengths = [whole // parts if isinstance(whole, int) else None] * parts
        else:
            operands.append(self.const(parts))
            [count] = static(dims(operands[1])) or ()
            lengths = [None] * count if isinstance(parts, ir.Value) else list(parts)
        outputs = self.emit_many("Split", operands, attributes, len(lengths))
        if shape is not None:
            for y, length in zip(outputs, lengths, strict=True):
                y.shape = ir.Shape(shape)
                y.shape[axis] = length
        return outputs

    def mT(self, x: ir.Value) -> ir.Value:  # noqa: N802 - its name in NumPy and PyTorch
        """Return `x` with its last two axes swapped; it must have at least two."""
        n = rank(x)
        if n is None:
            y = self.Cast(x, to=ir.DataType.FLOAT) if x.dtype == ir.DataType.BFLOAT16 else x
            return self.Cast(self.Einsum(y, equation="...ij->...ji"), to=x.dtype)
        return self.Transpose(x, perm=[*range(n - 2), n - 1, n - 2])

    def expand_to(self, g: ir.Value, like: ir.Value) -> ir.Value:
        """Return `g` broadcast to the shape of `like`; both have the same dtype."""
        have, want = dims(g), dims(like)
        if equal(have, want):
            return g
        if want is not None and 0 in want:  # onnxruntime drops an Expand to length 0
            return self.zeros_like(like)
        if have is not None and want is not None and len(have) == len(want):
            target = [1 if h == w is not None else w for h, w in zip(have, want, strict=True)]
            if static(tuple(target)) is not None:  # where the target is 1, g keeps its length
                return self.set_type_like(self.Expand(g, target), like)
        return self.set_type_like(self.Expand(g, self.shape_of(like)), like)

    def sum_to(self, g: ir.Value, x: ir.Value) -> ir.Value:
        """Return `g` summed to the shape of `x`, over the axes along which `x` was broadcast.

        Args:
            g: the gradient with respect to `x` after broadcasting, of the dtype of `x`.
            x: the operand before broadcasting.
        """
        have, want = dims(g), dims(x)
        if equal(have, want):
            return g
        if have is not None and want is not None and len(have) >= len(want):
            lead = len(have) - len(want)
            pairs = list(enumerate(zip(have[lead:], want, strict=True), lead))
            if all(h == w is not None or isinstance(w, int) for _, (h, w) in pairs):
                axes = [i for i, (h, w) in pairs if w == 1 and h != 1]
                if axes:
                    g = self.ReduceSum(g, axes, keepdims=1)
                if lead:
                    g = self.ReduceSum(g, list(range(lead)), keepdims=0)
                return self.set_type_like(g, x)
        return self._sum_to_dynamic_shape(g, x)

    def _sum_to_dynamic_shape(self, g: ir.Value, x: ir.Value) -> ir.Value:
        g_rank, x_rank, shape = rank(g), rank(x), self.Shape(x)
        if g_rank is not None and x_rank is not None:
            ones = self.const([1] * (g_rank - x_rank))
        else:
            missing = self.Shape(self.Shape(g)) - self.Shape(shape)
            ones = self.ConstantOfShape(missing, value=ir.tensor(np.ones(1, np.int64)))
            ones.dtype = ir.DataType.INT64
        padded = self.Concat(ones, shape, axis=0)
        axes = self.Squeeze(self.NonZero(self.Equal(padded, [1])), [0])
        summed = self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
        return self.set_type_like(self.Reshape(summed, shape, allowzero=1), x)

    def total(self, terms: list[ir.Value]) -> ir.Value:
        """Return the sum of `terms`: tensors of one shape and dtype, or sequences of one length.

        The elements at one position of the sequences have the same shape and dtype.
        """
        if len(terms) == 1:
            return terms[0]
        if sequences.is_sequence(terms[0]):
            return sequences.add_sequences(self, terms)
        y = self.Add(*terms) if len(terms) == 2 else self.Sum(*terms)
        return self.set_type_like(y, terms[0]) if y.shape is None else y
