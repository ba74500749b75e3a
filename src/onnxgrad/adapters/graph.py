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

from onnxgrad.adapters.uses import (
    CONV,
    EMBEDDING,
    LEFT,
    LINEAR,
    AdapterTarget,
    WeightUse,
    attribute_values,
)
from onnxgrad.errors import ModelError
from onnxgrad.graph.infer import infer
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.node_inserter import NodeInserter
from onnxgrad.model.traversal import (
    all_nodes,
    declared_names,
    keep_only,
    model_graphs,
    names_read_by,
)
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators.shapes import rank

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def adapter_dtype(use: WeightUse) -> ir.DataType:
    """Return the dtype of an adapter: the dtype of the layer's output, or float32 if the layer
    computes in 16 bits.
    """
    return ir.DataType.FLOAT if use.dtype in _HALVES else use.dtype


def factor_shapes(use: WeightUse, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the factors P and Q of an adapter, two matrices or two Conv kernels, of
    the given rank.
    """
    shape = use.shape
    if use.form == CONV:
        return (rank, *shape[1:]), (shape[0], rank // use.group, *(1 for _ in shape[2:]))
    return (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])


def peft_names(form: str, use_dora: bool) -> tuple[str, ...]:
    """Return the names in PEFT of an adapter's tensors: factor A, which multiplies the data; factor
    B; and for DoRA the column lengths.
    """
    pair = ("lora_A.weight", "lora_B.weight")
    if form == EMBEDDING:
        pair = ("lora_embedding_A", "lora_embedding_B")
    return (*pair, "lora_magnitude_vector") if use_dora else pair


class AdapterWriter(NodeInserter):
    """A writer of the nodes and tensors of adapters into a model, which is changed in place."""

    def __init__(self, model: ModelProto) -> None:
        super().__init__(model)
        constants = ((ref.graph_name, ref.read().dims) for ref in constant_refs(model))
        self.vectors = {name: dims[0] for name, dims in constants if len(dims) == 1}

    @cached_property
    def ranks(self) -> dict[str, int | None]:
        """The tensor rank (axis count) of each value of the main graph before adapters were
        written, `{name: rank}`.
        """
        model = to_ir(external.copy_without_data(self.model))
        infer(model)
        values = [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]
        return {str(value.name): rank(value) for value in values}

    def insert_after(self, use: WeightUse, write: Callable[[ir.Value], ir.Value]) -> str:
        """Insert nodes behind the layer `use.node` that replace the layer's output; return the new
        name of the output without adapter.

        `write` writes the nodes: it gets that output, and returns the value that takes its name.
        """
        base = self.free_name(f"{use.node.output[0]}.base")
        self.replace_result(use.graph, use.node, ir.val(base, use.dtype), write)
        return base

    def use_at_bias_add(self, use: WeightUse) -> WeightUse:
        """Return `use` with the Add of the bias as its node, if an Add of a bias follows the layer
        and the layer returns a matrix; else `use`.

        An adapter behind the bias lets a session make one Gemm of MatMul and Add, as in the model
        without adapter, so that both compute the same bits. If the product has another rank, `use`
        is returned: sessions fuse the bias with the nodes behind it, such as Gelu.
        """
        output, graph = use.node.output[0], use.graph
        if use.form != LINEAR or output in declared_names(graph.output):
            return use
        readers = [n for n in all_nodes(graph.node) if output in names_read_by(n)]
        if len(readers) != 1 or readers[0].op_type != "Add" or len({*readers[0].input}) < 2:
            return use
        [bias] = [name for name in readers[0].input if name != output]
        own = any(node is readers[0] for node in graph.node)
        if not own or self.vectors.get(bias) != use.shape[-1] or self.ranks.get(use.x) != 2:
            return use
        return replace(use, node=readers[0])

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Return the value `x` cast to `dtype`, or `x` itself if it has this dtype."""
        return x if x.dtype == dtype else self.emit("Cast", x, to=dtype)

    def adapter_data(self, use: WeightUse, dropout: bool) -> tuple[ir.Value, str]:
        """Return the data that an adapter multiplies, and the name of the output of the adapter's
        Dropout, "" without Dropout.
        """
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
    b = writer.emit("Mul", b, writer.write_scalar(scaling, b.dtype))
    return (b, q) if form == LEFT else (p, b)


def write_product(
    writer: AdapterWriter, use: WeightUse, x: ir.Value, pair: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """Write x P Q, the product of the data x and the factors P and Q of an adapter; return its
    output.

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
        narrow = writer.emit("Mul", narrow, writer.write_scalar(use.factor, adapter_dtype(use)))
    if use.form == CONV:
        return writer.emit("Conv", narrow, q, group=use.group)
    return writer.emit("MatMul", *((p, narrow) if use.form == LEFT else (narrow, q)))


# -- DoRA: adapters that also train the lengths (2-norms) of the columns of a weight ---------------


def reason_without_dora(target: AdapterTarget) -> str:
    """Return the reason why a weight cannot have a DoRA adapter; "" if it can have a DoRA
    adapter.
    """
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
    use: WeightUse,
    base: ir.Value,
    data: tuple[ir.Value, bool],
    factors: tuple[ir.Value, ir.Value, ir.Value],
) -> tuple[ir.Value, str]:
    """Write a layer with DoRA, y = x (W + P Q) m / n + b; return y, and the name of n, the column
    lengths of W + P Q.

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
            plain = writer.emit("Mul", plain, writer.write_scalar(use.factor, dtype))
    more = writer.emit("Mul", plain, writer.emit("Sub", ratio, writer.write_scalar(1.0, dtype)))
    low = writer.emit("Mul", write_product(writer, use, x, (p, q)), ratio)
    added = writer.cast(writer.emit("Add", more, low), use.dtype)
    return writer.emit("Add", base, added), str(norm.name)


def _subtract_bias(
    writer: AdapterWriter, use: WeightUse, y: ir.Value, options: dict[str, Any]
) -> ir.Value:
    """Return the output `y` of a Gemm minus its bias; return `y` itself if the layer is no Gemm or
    has no bias.
    """
    if use.node.op_type != "Gemm" or len(use.node.input) < 3 or not use.node.input[2]:
        return y
    assert y.dtype is not None
    bias = writer.cast(ir.val(use.node.input[2], use.dtype), y.dtype)
    beta = float(options.get("beta", 1.0))
    if beta != 1:
        bias = writer.emit("Mul", bias, writer.write_scalar(beta, y.dtype))
    return writer.emit("Sub", y, bias)


# -- removal -------------------------------------------------------------------------------------


def remove_adapters(model: ModelProto, bases: Iterable[str], tensors: Iterable[str]) -> None:
    """Remove the nodes and the tensors of adapters from `model`, in place.

    Args:
        model: the model.
        bases: names of the outputs to which adapters are added, from `insert_after`.
        tensors: the initializers of the adapters.

    Raises:
        ModelError: another tool modified the nodes that `AdapterWriter` wrote.
    """
    graphs, reads = model_graphs(model), Counter[str]()
    producers: dict[str, tuple[GraphProto, NodeProto]] = {}
    last: dict[str, tuple[GraphProto, NodeProto]] = {}  # the last node that reads a value
    for graph in graphs:
        reads.update(declared_names(graph.output))
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
        for holder, node in dead:  # the loop appends to `dead`
            inputs = [name for name in node.input if name]
            gone.update(node.output)
            del holder.node[next(i for i, n in enumerate(holder.node) if n.output == node.output)]
            reads.subtract(inputs)
            free = (n for n in dict.fromkeys(inputs) if n != base and not reads[n])
            dead += [producers[name] for name in free if name in producers]
        if not dead or reads[base]:
            raise ModelError(
                f"the nodes of the adapter beside {base!r} are not as they were written: a tool "
                "modified the file. Merge adapters (merge_lora) before other tools modify the file"
            )
        holder, node = producers[output] = producers[base]
        node.output[list(node.output).index(base)] = output
        gone = gone - {output} | {base}
    unread = {name for name in tensors if not reads[name]}
    for entries in (model.graph.initializer, model.graph.input):
        keep_only(entries, lambda entry: entry.name not in unread)
    for graph in graphs:
        keep_only(graph.value_info, lambda entry: entry.name not in gone | unread)
