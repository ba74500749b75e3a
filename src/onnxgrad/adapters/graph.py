"""The nodes of adapters beside the nodes of a model: written, and removed again.

All other nodes stay as they are in the file. The output of the node with the weight gets a new
name, and a sum takes over the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto

from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, LINEAR, Use, attributes
from onnxgrad.errors import ModelError
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.model import external
from onnxgrad.model.constants import standard
from onnxgrad.model.convert import to_ir
from onnxgrad.model.traversal import all_nodes, graphs_of, keep_only, names, names_in, reads
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators.shapes import rank

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def adapter_dtype(use: Use) -> ir.DataType:
    """Return the dtype of an adapter: that of the product, float32 for half precision."""
    return ir.DataType.FLOAT if use.dtype in _HALVES else use.dtype


def factor_shapes(use: Use, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the factors of an adapter: `p @ q`, or the two convolutions."""
    shape = use.shape
    if use.form == CONV:
        return (rank, *shape[1:]), (shape[0], rank // use.group, *(1 for _ in shape[2:]))
    return (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])


class Additions:
    """Writes adapters into a model, in place."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        constants = ((ref.graph_name, ref.read().dims) for ref in constant_refs(model))
        self.vectors = {name: dims[0] for name, dims in constants if len(dims) == 1}
        self.taken = {*names(model.graph), *(t.name for t in model.graph.initializer)}
        opset = max((o.version for o in model.opset_import if not standard(o.domain)), default=18)
        self.op = Emit(ir.Graph([], [], nodes=[], opset_imports={"": opset}), self.taken)

    @cached_property
    def ranks(self) -> dict[str, int | None]:
        """The ranks of the values of the main graph, as it was."""
        model = to_ir(external.without_data(self.model))
        infer(model)
        values = [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]
        return {str(value.name): rank(value) for value in values}

    def name(self, wanted: str) -> str:
        """Return `wanted`, with a numeric suffix if the model has that name, and reserve it."""
        name = self.op.name(wanted)
        self.taken.add(name)
        return name

    def tensor(self, name: str, array: np.ndarray) -> ir.Value:
        """Add an initializer; return it as an operand."""
        proto = ir.to_proto(ir.tensor(array, name=name))
        self.model.graph.initializer.append(proto)
        self.model.ir_version = max(self.model.ir_version, 4)  # before, they had to be inputs too
        return self.value(name, ir.DataType.from_numpy(array.dtype), array.shape)

    def value(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...] | None = None
    ) -> ir.Value:
        """Return a value of the model as an operand."""
        typed = ir.TensorType(dtype)
        return ir.Value(name=name, type=typed, shape=None if shape is None else ir.Shape(shape))

    def beside(self, use: Use, write: Callable[[ir.Value], ir.Value]) -> str:
        """Put nodes behind `use.node`; return the new name of its output.

        `write` gets that output and returns what replaces it.
        """
        output = use.node.output[0]
        base = self.name(f"{output}.base")
        before = len(self.op.written)
        with self.op:
            result = write(self.value(base, use.dtype))
        use.node.output[0] = base
        result.name = output
        position = next(i for i, n in enumerate(use.graph.node, 1) if base in n.output)
        for node in reversed(self.op.written[before:]):
            proto = ir.to_proto(node)
            proto.ClearField("name")  # onnx_ir's own, which the model may have, too
            use.graph.node.insert(position, proto)
        return base

    def behind_bias(self, use: Use) -> Use:
        """Return a use with its node behind the bias, which is added to a matrix alone.

        So a session still makes a Gemm of these two, and a base without adapter computes the same
        bits. Of other ranks it fuses the bias with what follows, such as Gelu.
        """
        output, graph = use.node.output[0], use.graph
        if use.form != LINEAR or output in names_in(graph.output):
            return use
        readers = [n for n in all_nodes(graph.node) if output in reads(n)]
        if len(readers) != 1 or readers[0].op_type != "Add" or len({*readers[0].input}) < 2:
            return use
        [bias] = [name for name in readers[0].input if name != output]
        own = any(node is readers[0] for node in graph.node)
        if not own or self.vectors.get(bias) != use.shape[-1] or self.ranks.get(use.x) != 2:
            return use
        return replace(use, node=readers[0])

    def emit(self, op_type: str, *inputs: ir.Value, **options: object) -> ir.Value:
        """Return the output of a new node, which is never shared."""
        return self.op.emit(op_type, inputs, dict(options), fresh=True)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return `x` as `dtype`, by a node if it is of another one."""
        return x if x.dtype == dtype else self.emit("Cast", x, to=dtype)

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Return a scalar: a Constant node, as initializers are taken for weights."""
        y = self.emit("Constant", value=ir.tensor(np.asarray(value, dtype.numpy())))
        y.type, y.shape = ir.TensorType(dtype), ir.Shape([])
        return y

    def data(self, use: Use, dropout: bool) -> tuple[ir.Value, str]:
        """Return the data that an adapter reads, and the name of the output of its dropout."""
        dtype = adapter_dtype(use)
        if use.form == EMBEDDING:
            return self.value(use.x, ir.DataType.INT64), ""
        x = self.value(use.x, use.dtype)
        if use.flips:
            x = self.emit("Transpose", x, perm=[1, 0])
        x = self.cast(x, dtype)
        if not dropout:
            return x, ""
        y = self.emit("Dropout", x)
        y.name = self.name(f"{use.x}.lora_dropout")
        return self.op.set_type_like(y, x), str(y.name)


def scaled(
    add: Additions, form: str, pair: tuple[ir.Value, ir.Value], scaling: float
) -> tuple[ir.Value, ir.Value]:
    """Return the factors of an adapter with B, that does not read the data, times `scaling`.

    So sessions multiply once, when they fold constants; and a session whose adapter is an input
    computes the same bits, as its file of adapters holds this product.
    """
    if scaling == 1:
        return pair
    p, q = pair
    b = p if form == LEFT else q
    assert b.dtype is not None
    b = add.emit("Mul", b, add.number(scaling, b.dtype))
    return (b, q) if form == LEFT else (p, b)


def product(add: Additions, use: Use, x: ir.Value, pair: tuple[ir.Value, ir.Value]) -> ir.Value:
    """Write the product of the data and the two factors of an adapter.

    The factors are those of the weight as it is used: `p @ q`, or the two convolutions.
    """
    p, q = pair
    if use.form == CONV:
        narrow = add.emit("Conv", x, p, **attributes(use.node))
    elif use.form == EMBEDDING:
        narrow = add.emit("Gather", p, x, axis=0)
    else:
        narrow = add.emit("MatMul", *((q, x) if use.form == LEFT else (x, p)))
    if use.factor != 1:
        narrow = add.emit("Mul", narrow, add.number(use.factor, adapter_dtype(use)))
    if use.form == CONV:
        return add.emit("Conv", narrow, q, group=use.group)
    return add.emit("MatMul", *((p, narrow) if use.form == LEFT else (narrow, q)))


# -- removal -------------------------------------------------------------------------------------


def remove(model: ModelProto, bases: Iterable[str], tensors: Iterable[str]) -> None:
    """Remove the nodes and the tensors of adapters from `model`, in place.

    Args:
        model: the model.
        bases: the new names of the outputs beside which the adapters are.
        tensors: the initializers of the adapters.

    Raises:
        ModelError: the nodes are not those that `Additions` wrote.
    """
    graphs, reads = graphs_of(model), Counter[str]()
    producers: dict[str, tuple[GraphProto, NodeProto]] = {}
    last: dict[str, tuple[GraphProto, NodeProto]] = {}  # of the nodes that read a value
    for graph in graphs:
        reads.update(names_in(graph.output))
        for node in graph.node:
            producers.update((y, (graph, node)) for y in node.output if y)
            last.update((x, (graph, node)) for x in node.input)
            reads.update(node.input)
    gone: set[str] = set()  # values
    for base in bases:
        dead = [last[base]] if base in producers and base in last else []
        output = dead[0][1].output[0] if dead else ""
        if dead and dead[0][1].op_type != "Add":  # the last node of an adapter
            dead = []
        for holder, node in dead:  # the loop appends to it
            inputs = [name for name in node.input if name]
            gone.update(node.output)
            del holder.node[next(i for i, n in enumerate(holder.node) if n.output == node.output)]
            reads.subtract(inputs)
            free = (n for n in dict.fromkeys(inputs) if n != base and not reads[n])
            dead += [producers[name] for name in free if name in producers]
        if not dead or reads[base]:
            raise ModelError(
                f"the adapter beside {base!r} is not as it was written: a tool modified the "
                "file. Merge adapters before other tools modify it"
            )
        holder, node = producers[output] = producers[base]
        node.output[list(node.output).index(base)] = output
        gone = gone - {output} | {base}
    unread = {name for name in tensors if not reads[name]}
    for entries in (model.graph.initializer, model.graph.input):
        keep_only(entries, lambda entry: entry.name not in unread)
    for graph in graphs:
        keep_only(graph.value_info, lambda entry: entry.name not in gone | unread)
