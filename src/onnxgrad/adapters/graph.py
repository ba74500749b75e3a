"""Write the nodes of adapters beside the layers of a model, and remove these nodes again.

All other nodes of the file stay. The output of the node with the weight gets a new
name, and a sum takes over the old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto

from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, LINEAR, Target, Use, attribute_values
from onnxgrad.errors import ModelError
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.model import external
from onnxgrad.model.constants import standard
from onnxgrad.model.convert import to_ir
from onnxgrad.model.traversal import (
    all_nodes,
    graphs_of,
    keep_only,
    names_in,
    names_read_by,
    value_names,
)
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators.shapes import rank

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def adapter_dtype(use: Use) -> ir.DataType:
    """Return the dtype of an adapter: the dtype of its layer's output, or float32 for 16 bits."""
    return ir.DataType.FLOAT if use.dtype in _HALVES else use.dtype


def factor_shapes(use: Use, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the two factors P and Q of an adapter, matrices or Conv kernels."""
    shape = use.shape
    if use.form == CONV:
        return (rank, *shape[1:]), (shape[0], rank // use.group, *(1 for _ in shape[2:]))
    return (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])


def tensor_names(form: str, use_dora: bool) -> tuple[str, ...]:
    """Return PEFT's names of an adapter's tensors: A (which reads data), B, and lengths."""
    pair = ("lora_A.weight", "lora_B.weight")
    if form == EMBEDDING:
        pair = ("lora_embedding_A", "lora_embedding_B")
    return (*pair, "lora_magnitude_vector") if use_dora else pair


class AdapterWriter:
    """Writes the nodes and tensors of adapters into a model, in place."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        constants = ((ref.graph_name, ref.read().dims) for ref in constant_refs(model))
        self.vectors = {name: dims[0] for name, dims in constants if len(dims) == 1}
        self.taken = {*value_names(model.graph), *(t.name for t in model.graph.initializer)}
        opset = max((o.version for o in model.opset_import if not standard(o.domain)), default=18)
        self.op = Emit(ir.Graph([], [], nodes=[], opset_imports={"": opset}), self.taken)

    @cached_property
    def ranks(self) -> dict[str, int | None]:
        """The tensor rank (axis count) of each value of the main graph, before adapters."""
        model = to_ir(external.without_data(self.model))
        infer(model)
        values = [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]
        return {str(value.name): rank(value) for value in values}

    def free_name(self, wanted: str) -> str:
        """Return and reserve a new name: `wanted`, with a numeric suffix if it is taken."""
        name = self.op.name(wanted)
        self.taken.add(name)
        return name

    def add_tensor(self, name: str, array: np.ndarray) -> ir.Value:
        """Add an initializer to the model; return it as an operand of new nodes."""
        proto = ir.to_proto(ir.tensor(array, name=name))
        self.model.graph.initializer.append(proto)
        self.model.ir_version = max(self.model.ir_version, 4)  # before, they had to be inputs too
        return ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape)

    def write_beside(self, use: Use, write: Callable[[ir.Value], ir.Value]) -> str:
        """Write nodes behind the layer `use.node`; return the new name of the layer's own output.

        `write` writes the nodes: it gets that output, and returns the value that takes its name.
        """
        output = use.node.output[0]
        base = self.free_name(f"{output}.base")
        before = len(self.op.written)
        with self.op:
            result = write(ir.val(base, use.dtype))
        use.node.output[0] = base
        result.name = output
        position = next(i for i, n in enumerate(use.graph.node, 1) if base in n.output)
        for node in reversed(self.op.written[before:]):
            proto = ir.to_proto(node)
            proto.ClearField("name")  # by onnx_ir; a node of the model may have the same name
            use.graph.node.insert(position, proto)
        return base

    def use_behind_bias(self, use: Use) -> Use:
        """Return `use` moved to the Add of a bias behind its product, if the product is a matrix.

        An adapter behind the bias lets a session make one Gemm of MatMul and Add, as in the model
        without adapter, so that both compute the same bits. If the product has another rank, `use`
        is returned: sessions fuse the bias with the nodes behind it, such as Gelu.
        """
        output, graph = use.node.output[0], use.graph
        if use.form != LINEAR or output in names_in(graph.output):
            return use
        readers = [n for n in all_nodes(graph.node) if output in names_read_by(n)]
        if len(readers) != 1 or readers[0].op_type != "Add" or len({*readers[0].input}) < 2:
            return use
        [bias] = [name for name in readers[0].input if name != output]
        own = any(node is readers[0] for node in graph.node)
        if not own or self.vectors.get(bias) != use.shape[-1] or self.ranks.get(use.x) != 2:
            return use
        return replace(use, node=readers[0])

    def emit(self, op_type: str, *inputs: ir.Value, **options: object) -> ir.Value:
        """Write a new node, even if an equal node exists; return its output."""
        return self.op.emit(op_type, inputs, dict(options), fresh=True)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return `x` in the dtype `dtype`, with a Cast if `x` has another dtype."""
        return x if x.dtype == dtype else self.emit("Cast", x, to=dtype)

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """Write a scalar as a Constant node, as an initializer would be taken for a weight."""
        y = self.emit("Constant", value=ir.tensor(np.asarray(value, dtype.numpy())))
        y.type, y.shape = ir.TensorType(dtype), ir.Shape([])
        return y

    def adapter_data(self, use: Use, dropout: bool) -> tuple[ir.Value, str]:
        """Return the data that an adapter multiplies, and the name of its Dropout's output."""
        dtype = adapter_dtype(use)
        if use.form == EMBEDDING:
            return ir.val(use.x, ir.DataType.INT64), ""
        x = ir.val(use.x, use.dtype)
        if use.flips:
            x = self.emit("Transpose", x, perm=[1, 0])
        x = self.cast(x, dtype)
        if not dropout:
            return x, ""
        y = self.emit("Dropout", x)
        y.name = self.free_name(f"{use.x}.lora_dropout")
        return self.op.set_type_like(y, x), str(y.name)


def scale_factor_b(
    writer: AdapterWriter, form: str, pair: tuple[ir.Value, ir.Value], scaling: float
) -> tuple[ir.Value, ir.Value]:
    """Return the factors P and Q of an adapter, with B multiplied by `scaling`.

    B is the factor that does not read the data. Sessions multiply two constants once, when they
    load the model; and a session whose adapter is an input computes the same bits, as an
    ".onnx_adapter" file holds this product.
    """
    if scaling == 1:
        return pair
    p, q = pair
    b = p if form == LEFT else q
    assert b.dtype is not None
    b = writer.emit("Mul", b, writer.scalar(scaling, b.dtype))
    return (b, q) if form == LEFT else (p, b)


def write_product(
    writer: AdapterWriter, use: Use, x: ir.Value, pair: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """Write the product x P Q of the data and the factors of an adapter.

    P Q has the axes of the weight as `use` reads it; for Conv, P and Q are two kernels.
    """
    p, q = pair
    if use.form == CONV:
        narrow = writer.emit("Conv", x, p, **attribute_values(use.node))
    elif use.form == EMBEDDING:
        narrow = writer.emit("Gather", p, x, axis=0)
    else:
        narrow = writer.emit("MatMul", *((q, x) if use.form == LEFT else (x, p)))
    if use.factor != 1:
        narrow = writer.emit("Mul", narrow, writer.scalar(use.factor, adapter_dtype(use)))
    if use.form == CONV:
        return writer.emit("Conv", narrow, q, group=use.group)
    return writer.emit("MatMul", *((p, narrow) if use.form == LEFT else (narrow, q)))


# -- DoRA: adapters that also train the lengths (2-norms) of the columns of a weight ---------------


def reason_without_dora(target: Target) -> str:
    """Return the reason why a weight cannot have a DoRA adapter, or "" if it can."""
    uses = target.uses
    plain = all(use.form == LINEAR and len(use.shape) == 2 and not use.node.domain for use in uses)
    if target.quantized or not plain or any(use.perm != uses[0].perm for use in uses):
        return "use_dora needs a matrix of floats by which MatMul or Gemm multiplies from the right"
    return ""


def column_lengths(weight: np.ndarray) -> np.ndarray:
    """Return the 2-norm of each column of a weight of shape (inputs, outputs)."""
    return np.sqrt(np.square(weight.astype(np.float64)).sum(0))


def write_dora_layer(
    writer: AdapterWriter,
    use: Use,
    base: ir.Value,
    data: tuple[ir.Value, bool],
    factors: tuple[ir.Value, ir.Value, ir.Value],
) -> tuple[ir.Value, str]:
    """Write a layer with DoRA, y = x (W + P Q) m / n + b; return y and the name of the norms n.

    n are the 2-norms of the columns of W + P Q (Liu et al. 2024, "DoRA: Weight-Decomposed
    Low-Rank Adaptation", equation 5).

    Args:
        writer: writes the nodes.
        use: the use of the weight W.
        base: the output of the layer without adapter, x W + b.
        data: x, and whether it is behind a Dropout, which does not act on `base`, as in PEFT.
        factors: P, Q and m.
    """
    (x, dropped), (p, q, magnitude), dtype = data, factors, adapter_dtype(use)
    weight = writer.cast(ir.val(use.node.input[1], use.dtype), dtype)
    options = attribute_values(use.node)
    if options.get("transB"):
        weight = writer.emit("Transpose", weight, perm=[1, 0])
    total = writer.emit("Add", weight, writer.emit("MatMul", p, q))
    size = writer.emit("Constant", value=ir.tensor(np.array([use.shape[0]], np.int64)))
    ones = writer.emit("ConstantOfShape", size, value=ir.tensor(np.ones(1, dtype.numpy())))
    squares = writer.emit("MatMul", ones, writer.emit("Mul", total, total))
    norm = writer.emit("Sqrt", squares)
    norm.name = writer.free_name(f"{use.node.output[0]}.norm")
    ratio = writer.emit("Div", magnitude, norm)
    if not dropped:
        plain = _subtract_bias(writer, use, writer.cast(base, dtype), options)
    else:
        plain = writer.emit("MatMul", x, weight)
        if use.factor != 1:
            plain = writer.emit("Mul", plain, writer.scalar(use.factor, dtype))
    more = writer.emit("Mul", plain, writer.emit("Sub", ratio, writer.scalar(1.0, dtype)))
    low = writer.emit("Mul", write_product(writer, use, x, (p, q)), ratio)
    added = writer.cast(writer.emit("Add", more, low), use.dtype)
    return writer.emit("Add", base, added), str(norm.name)


def _subtract_bias(
    writer: AdapterWriter, use: Use, y: ir.Value, options: dict[str, Any]
) -> ir.Value:
    """Return the output `y` of a layer minus the bias, if the layer is a Gemm with a bias."""
    if use.node.op_type != "Gemm" or len(use.node.input) < 3 or not use.node.input[2]:
        return y
    assert y.dtype is not None
    bias = writer.cast(ir.val(use.node.input[2], use.dtype), y.dtype)
    beta = float(options.get("beta", 1.0))
    if beta != 1:
        bias = writer.emit("Mul", bias, writer.scalar(beta, y.dtype))
    return writer.emit("Sub", y, bias)


# -- removal -------------------------------------------------------------------------------------


def remove_adapters(model: ModelProto, bases: Iterable[str], tensors: Iterable[str]) -> None:
    """Remove the nodes and the tensors of adapters from `model`, in place.

    Args:
        model: the model.
        bases: the outputs to which adapters are added, by the names that `write_beside` returned.
        tensors: the initializers of the adapters.

    Raises:
        ModelError: another tool modified the nodes that `AdapterWriter` wrote.
    """
    graphs, reads = graphs_of(model), Counter[str]()
    producers: dict[str, tuple[GraphProto, NodeProto]] = {}
    last: dict[str, tuple[GraphProto, NodeProto]] = {}  # the last node that reads a value
    for graph in graphs:
        reads.update(names_in(graph.output))
        for node in graph.node:
            producers.update((y, (graph, node)) for y in node.output if y)
            last.update((x, (graph, node)) for x in node.input)
            reads.update(node.input)
    gone: set[str] = set()  # names of removed values
    for base in bases:
        dead = [last[base]] if base in producers and base in last else []
        output = dead[0][1].output[0] if dead else ""
        if dead and dead[0][1].op_type != "Add":  # an Add is the last node of each adapter
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
                f"the nodes of the adapter beside {base!r} are not as they were written: a tool "
                "modified the "
                "file. Merge adapters (merge_lora) before other tools modify the file"
            )
        holder, node = producers[output] = producers[base]
        node.output[list(node.output).index(base)] = output
        gone = gone - {output} | {base}
    unread = {name for name in tensors if not reads[name]}
    for entries in (model.graph.initializer, model.graph.input):
        keep_only(entries, lambda entry: entry.name not in unread)
    for graph in graphs:
        keep_only(graph.value_info, lambda entry: entry.name not in gone | unread)
