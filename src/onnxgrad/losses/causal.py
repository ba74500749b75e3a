"""The loss of language models: the logits at a position are compared with the token at the next.

The logits of all positions are never in memory. What comes before the product with the vocabulary
is gathered where a label counts, and a `Scan` computes product, loss and gradient of some positions
at a time (as the fused kernels of Hsu et al. 2024, arXiv:2410.10989), so that the forward pass
leaves the gradient, and the backward pass begins before the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.reverse import dependent, sweep
from onnxgrad.autodiff.rules.quantization import UNPACKED, unpacked_weight
from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.operators import ELEMENTWISE, VIEWS
from onnxgrad.graph.shapes import Dims, dims, is_real, rank
from onnxgrad.graph.traversal import dependents
from onnxgrad.losses.classification import cross_entropy, cross_entropy_terms
from onnxgrad.losses.formula_nodes import wide
from onnxgrad.losses.spec import Terms, class_indices, register
from onnxgrad.losses.sums import sum_and_count

CAUSAL = "causal_lm"
TOKENS, MASK = "input_ids", "attention_mask"
PLAIN = "onnxgrad.plain"  # metadata key of a sum: the same by the plain formula, for proofs
INT64 = ir.DataType.INT64
_ELEMENTS = 1 << 24  # logits that are in memory together
_END = np.iinfo(np.int64).max

Pairs = list[tuple[ir.Value, ir.Value]]


def is_causal(loss: Any) -> bool:
    """Return whether a loss, given by name or by output, is that of language models alone."""
    names = [*loss.values()] if isinstance(loss, Mapping) else [loss]
    return bool(names) and all(isinstance(name, str) and name == CAUSAL for name in names)


def causal_terms(op: Any, prediction: ir.Value, label: ir.Value, ignore_index: int = -100) -> Terms:
    """The terms of `causal_lm`, one for every label but the first of a row."""
    return cross_entropy_terms(op, prediction, label, axis=2, shift=True, ignore_index=ignore_index)


@register(
    CAUSAL,
    labels=lambda options: class_indices(2, rank=3, needs="logits (rows, tokens, vocabulary)"),
    has_ignore_index=True,
    write_terms=causal_terms,
    mixes=False,
)
def causal_lm(op, prediction, label, ignore_index=-100):
    """-log p of the label at the next position, p = softmax(logits).

    Labels are token ids as they are, not shifted. Trainers take `input_ids` where `attention_mask`
    is 1, if there are no labels.

    Options:
        ignore_index: the label whose loss is zero, as of padding and of a prompt.
    """
    return cross_entropy(op, prediction, label, axis=2, shift=True, ignore_index=ignore_index)


def labels_of_tokens(op: Emit, ignore_index: int) -> ir.Value:
    """Return the tokens of the graph as labels, without those that the mask leaves out.

    Raises:
        ValueError: the graph has no input of tokens.
    """
    inputs = {str(x.name): x for x in op.graph.inputs}
    if TOKENS not in inputs:
        raise ValueError(
            f"the loss {CAUSAL!r} without labels compares with {TOKENS!r}, which is no input of "
            f"the model: pass y. Its inputs are {printable(list(inputs))}"
        )
    tokens, mask = inputs[TOKENS], inputs.get(MASK)
    label = op.Cast(tokens, to=INT64)
    if mask is None or rank(mask) != 2:
        return label
    if dims(mask) != dims(tokens):  # it covers a past, too
        before = op.const(op.vector(op.dim(mask, 1))) - op.const(op.vector(op.dim(tokens, 1)))
        mask = op.Slice(mask, before, [_END], [1])
    kept = op.Not(op.Equal(mask, op.const(0, mask.dtype)))
    return op.set_type_like(op.Where(kept, label, np.int64(ignore_index)), label)


def write_causal(
    op: Emit,
    logits: ir.Value,
    label: ir.Value,
    weight: ir.Value | None,
    ignore_index: int,
    wrt: Sequence[ir.Value] | None = (),
) -> tuple[ir.Value, ir.Value, Pairs | None]:
    """Write the sum of the weighted losses and the sum of the weights, as scalars.

    Args:
        op: emitter of the graph.
        logits: (rows, tokens, vocabulary).
        label: (rows, tokens), int64.
        weight: of rows (rows,), or of labels; None: 1.
        ignore_index: the label that has no loss.
        wrt: the values with respect to which the sum will be differentiated. None: write no Scan,
            but the logits of all positions, as what gives a graph members cannot repeat one.

    Returns:
        Both sums, and values with the gradients of the first with respect to them, if any are
        written.

    Raises:
        ValueError: the graph computes the logits of the last position only.
    """
    _refuse_last_only(op, logits)
    double = logits.dtype == ir.DataType.DOUBLE
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    if wrt is None:
        return *_without_scan(op, logits, label, weight, ignore_index), None
    positions = _Positions(op, label, weight, ignore_index, (dims(logits) or (None,))[-1], dtype)
    head = _Head(op, logits)
    active, _ = dependent(list(op.graph), wrt)
    leaves = {x: positions.gathered(x) for x in head.leaves}
    shared = [x for x in head.shared if x in active and is_real(x)]
    stacks = [*leaves.values(), positions.target, positions.weights]
    sums = [op.const(0.0, dtype), *map(op.zeros_like, shared)]
    inner = Emit(ir.Graph([], [], nodes=[], name="positions"), outer=op)
    inner.graph.inputs[:] = [
        *(ir.Value(name=inner.name("sum"), type=v.type, shape=v.shape) for v in sums),
        *_scanned(inner, stacks),
    ]
    wanted = [x for x in head.leaves if x in active]
    inner.give(_write_some(inner, head, shared, wanted, next(iter(leaves.values()))))
    attributes = {"body": inner.graph, "num_scan_inputs": len(stacks)}
    outputs = op.emit_many("Scan", [*sums, *stacks], attributes, len(sums) + len(wanted))
    like = [*sums, *(leaves[x] for x in wanted)]
    total, *gradients = (op.set_type_like(y, v) for y, v in zip(outputs, like, strict=True))
    plain = _without_scan(op, logits, label, weight, ignore_index)  # dropped, as no output needs it
    total.meta[PLAIN], positions.total.meta[PLAIN] = plain
    of = [*shared, *(leaves[x] for x in wanted)]
    return total, positions.total, list(zip(of, gradients, strict=True))


def _scanned(inner: Emit, stacks: Sequence[ir.Value]) -> list[ir.Value]:
    """Return an input of the body for each of the stacks (count, size, ...)."""
    size = inner.name("size")
    shapes = (ir.Shape([size, *(dims(stack) or ())[2:]]) for stack in stacks)
    return [
        ir.Value(name=inner.name(f"{stack.name}_of_some"), type=stack.type, shape=shape)
        for stack, shape in zip(stacks, shapes, strict=True)
    ]


def _write_some(
    inner: Emit,
    head: _Head,
    shared: Sequence[ir.Value],
    wanted: Sequence[ir.Value],
    gate: ir.Value,
) -> list[ir.Value]:
    """Write the loss and the gradients of some positions; return what the body of the Scan does.

    The gradients of `shared` are added up as the loss is; those of the leaves `wanted` are not.
    """
    before = inner.graph.inputs[: 1 + len(shared)]
    *given, target, weights = inner.graph.inputs[len(before) :]
    rows, dtype = dict(zip(head.leaves, given, strict=True)), before[0].dtype
    with inner:
        z = head.again(inner, rows, gate)
        index = inner.Unsqueeze(target, [1])
        log_p = inner.LogSoftmax(wide(inner, z), axis=-1)
        chosen = inner.Squeeze(inner.GatherElements(log_p, index, axis=1), [1])
        loss = before[0] - inner.ReduceSum(chosen * weights, keepdims=0)
        if not wanted and not shared:
            return [loss]
        ones = inner.Expand(inner.const(-1.0, dtype), inner.Shape(index))  # dz = w (p - 1 of label)
        dz = inner.ScatterElements(inner.Exp(log_p), index, ones, axis=1, reduction="add")
        dz = inner.Cast(dz * inner.Unsqueeze(weights, [1]), to=z.dtype)
        seeds, of = {z: inner.set_type_like(dz, z)}, [*shared, *(rows[x] for x in wanted)]
        found = sweep(inner, seeds, of, nodes=head.written) | seeds
        gradients = [found[x] if x in found else inner.zeros_like(x) for x in of]
        sums = [b + g for b, g in zip(before[1:], gradients, strict=False)]
        return [loss, *sums, *gradients[len(shared) :]]


def _without_scan(
    op: Emit, logits: ir.Value, label: ir.Value, weight: ir.Value | None, ignore_index: int
) -> tuple[ir.Value, ir.Value]:
    terms = causal_terms(op, wide(op, logits), label, ignore_index)
    if weight is not None and rank(weight) == 2:
        weight = op.Slice(op.Expand(weight, op.Shape(label)), [1], [_END], [1])
    return sum_and_count(op, terms, label, weight)


def _refuse_last_only(op: Emit, logits: ir.Value) -> None:
    tokens = next((x for x in op.graph.inputs if x.name == TOKENS), None)
    if (dims(logits) or ())[1:2] == (1,) and (dims(tokens) or ())[1:2] != (1,):
        raise ValueError(
            f"the model computes {logits.name!r} of the last position only, and the loss "
            f"{CAUSAL!r} needs all: build it without prune_lm_head, or export it without a Gather"
        )


class _Positions:
    """The positions whose logits a label reads, in chunks; what lacks has the weight 0.

    Attributes:
        total: the sum of the weights, computed from labels and weights only.
        target, weights: the label at the next position, and its weight, (count, size).
    """

    def __init__(
        self,
        op: Emit,
        label: ir.Value,
        weight: ir.Value | None,
        ignore_index: int,
        vocabulary: int | str | None,
        dtype: ir.DataType,
    ) -> None:
        self.op, last = op, op.vector(op.dim(label, 0), 1)
        none = op.Expand(np.int64(ignore_index), last)
        target = op.Concat(op.Slice(label, [1], [_END], [1]), none, axis=1)
        target = op.Reshape(target, [-1])
        kept = op.Not(op.Equal(target, np.int64(ignore_index)))
        weights = op.Cast(kept, to=dtype)
        if weight is not None:
            weight = op.Cast(weight, to=dtype)
            every = op.Expand(
                op.Unsqueeze(weight, [1]) if rank(weight) == 1 else weight, op.Shape(label)
            )
            zero = op.Expand(op.const(0.0, dtype), last)
            every = op.Concat(op.Slice(every, [1], [_END], [1]), zero, axis=1)
            weights = weights * op.Reshape(every, [-1])
        self.total = op.ReduceSum(weights, keepdims=0)
        self.total.shape = ir.Shape([])
        at = op.Squeeze(op.NonZero(kept), [0])
        most = 128
        if isinstance(vocabulary, int):
            most = min(max(2 ** round(log2(_ELEMENTS / vocabulary)), 16), 4096)
        number, one = op.Size(at), np.int64(1)
        count = op.Max((number + np.int64(most - 1)) / np.int64(most), one)
        size = op.Max((number + count - one) / count, one)
        self.lengths = [op.Reshape(v, [1]) for v in (count, size)]
        pads = op.Concat([0], op.Reshape(count * size - number, [1]), axis=0)
        self.at = op.Pad(at, pads)
        self.target, self.weights = (
            self._chunks(op.Pad(op.Gather(v, at), pads)) for v in (target, weights)
        )

    def _chunks(self, x: ir.Value, *width: int) -> ir.Value:
        y = self.op.Reshape(x, self.op.vector(*self.lengths, *width))
        y.type, y.shape = x.type, ir.Shape([None, None, *width])
        return y

    def gathered(self, x: ir.Value) -> ir.Value:
        """Return (count, size, width) of `x`, (rows, tokens, width) or with all rows as one."""
        width = (dims(x) or (None,))[-1]
        assert isinstance(width, int)
        flat = x if rank(x) == 2 else self.op.Reshape(x, [-1, width])
        rows = self.op.Gather(flat, self.at, axis=0)
        rows.type = x.type
        return self._chunks(rows, width)


class _Head:
    """The nodes that are as wide as the vocabulary, and compute each position alone.

    Attributes:
        leaves: what they read of positions, (rows, tokens, width), or the logits if no node is so.
        shared: what they read beside, such as weights.
        written: the nodes of `again`.
    """

    def __init__(self, op: Emit, logits: ir.Value) -> None:
        self.op, self.logits, self.width = op, logits, (dims(logits) or (None,))[-1]
        inputs = [x for x in op.graph.inputs if x.const_value is None]
        self._data = dependents(list(op.graph), inputs)
        self.leaves: list[ir.Value] = []
        self.nodes: dict[ir.Value, ir.Node] = {}  # by their results, in topological order
        self.written: list[ir.Node] = []
        self._visit(logits)
        read = (x for node in self.nodes.values() for x in node.inputs if x is not None)
        self.shared = [x for x in dict.fromkeys(read) if x not in self._data]

    def _visit(self, y: ir.Value) -> None:
        if y in self.nodes or y in self.leaves:
            return
        operands = self._positional(y)
        for x in operands:
            if (dims(x) or (None,))[-1] == self.width:
                self._visit(x)
            elif x not in self.leaves:
                self.leaves.append(x)
        node = y.producer()
        if operands and node is not None:
            self.nodes[y] = node
        else:
            self.leaves.append(y)

    def _positional(self, y: ir.Value) -> list[ir.Value]:
        """Return the operands of positions of a node that computes each alone; [] of another."""
        node, shape = y.producer(), dims(y)
        if node is None or node.graph is not self.op.graph or not shape or len(node.outputs) > 1:
            return []
        data = [x for x in node.inputs if x in self._data]
        rest = [x for x in node.inputs if x is not None and x not in self._data]
        kind = "" if node.domain else node.op_type
        if kind in VIEWS and kind not in ("Shape", "Size", "Identity"):
            kept = [x for x in data[:1] if (dims(x) or (None,))[-1] == shape[-1]]
            return [x for x in kept if len(data) == 1 and rank(x) in (2, 3)]
        if kind in ELEMENTWISE:
            fits = all(_is_row(dims(x)) for x in rest)
        elif kind == "MatMul":
            fits = data == [node.inputs[0]] and rank(node.inputs[1]) == 2
        elif kind == "Gemm":
            fits = data == [node.inputs[0]] and not node.attributes.get_int("transA", 0)
        else:
            fits = node.op_type == "MatMulNBits" and data == [node.inputs[0]]
        alike = all(_leads(dims(x), shape) and is_real(x) for x in data)
        return data if fits and alike else []

    def again(self, inner: Emit, rows: Mapping[ir.Value, ir.Value], gate: ir.Value) -> ir.Value:
        """Write the nodes for some positions (size, width); return the logits.

        A weight of few bits is unpacked once, outside, when `gate` is there.
        """
        new = dict(rows)
        for y, node in self.nodes.items():
            first = node.inputs[0]
            if not node.domain and node.op_type in VIEWS:
                new[y] = new[first]  # type: ignore[index]
                continue
            inputs = [x if x is None else new.get(x, x) for x in node.inputs]
            attributes = {a.name: a.value for a in node.attributes.values()}
            [z] = inner.emit_many(node.op_type, inputs, attributes, 1, node.domain, fresh=True)
            some = next(new[x] for x in node.inputs if x in new)
            z.type, z.shape = y.type, ir.Shape([*dims(some)[:1], *dims(y)[-1:]])  # type: ignore[index]
            new[y] = z
            made = z.producer()
            assert made is not None
            self.written.append(made)
            if node.op_type == "MatMulNBits":
                with self.op:
                    made.meta[UNPACKED] = unpacked_weight(self.op, node, gate)
        return new[self.logits]


def _is_row(shape: Dims | None) -> bool:
    """Return whether a shape is broadcast along positions."""
    return shape is not None and all(d == 1 for d in shape[:-1])


def _leads(shape: Dims | None, other: Dims) -> bool:
    """Return whether shapes are proven to have the same positions, and the last axis is known."""
    if shape is None or not isinstance(shape[-1], int) or len(shape) not in (2, 3):
        return False
    return shape[:-1] == other[:-1] and None not in shape
