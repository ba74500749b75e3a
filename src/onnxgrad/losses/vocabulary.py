"""Cross entropy over a large vocabulary, without the logits of all positions in memory at once.

The features before the product with the vocabulary are gathered where a label counts. Then a `Scan`
computes product, loss and gradient of some positions at a time (as the fused kernels of Hsu et al.
2024, arXiv:2410.10989), so that the forward pass leaves the gradient, and the backward pass begins
before the product.

Such a Scan carries the gradient of the matrix of the vocabulary from chunk to chunk, and
onnxruntime keeps four copies of every value that a Scan carries. A matrix of very many words is
therefore scanned itself: see `word_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import log2

import onnx_ir as ir

from onnxgrad.autodiff.reverse import dependent_values
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.classification import CAUSAL
from onnxgrad.losses.head import Head
from onnxgrad.losses.positions import LabelPositions, WeightedLabels, logit_gradient, weighted_sum
from onnxgrad.losses.spec import LossSpec, widen_to_float32
from onnxgrad.losses.word_blocks import BlockwiseLoss, block_sizes
from onnxgrad.operators import marks
from onnxgrad.operators.shapes import dims, is_real, rank

# From this number of words on, the loss is computed by blocks of words: computing each block twice
# takes as long as carrying the gradient of the matrix through chunks of so few positions.
MANY_WORDS = 100_000
MANY_CLASSES = 16_384  # number of classes from which `cross_entropy`, too, is computed in chunks
MOST_LOGITS = 1 << 24  # number of logits that are in memory together

Pairs = list[tuple[ir.Value, ir.Value]]
OwnGradients = Callable[[Emit, ir.Value], Pairs]  # writes gradients times a scalar, by value


def labels_for_chunks(spec: LossSpec, logits: ir.Value, label: ir.Value) -> WeightedLabels | None:
    """Return the labels of a cross-entropy whose logits are to be computed in chunks; None for
    other losses.

    None: it is another loss, or has too few classes.
    """
    shape, options = dims(logits), spec.all_options
    if spec.name == CAUSAL:
        return WeightedLabels(label, None, int(options["ignore_index"]), shift=True)
    if spec.name != "cross_entropy" or options["soft_labels"] or not options["from_logits"]:
        return None
    if shape is None or len(shape) not in (2, 3) or options["axis"] != len(shape) - 1:
        return None
    smoothing, weight = float(options["label_smoothing"]), options["class_weight"]
    fits = dims(label) is not None and rank(label) == len(shape) - 1
    if not isinstance(shape[-1], int) or shape[-1] < MANY_CLASSES or not fits:
        return None
    if smoothing and weight is not None:
        return None
    return WeightedLabels(
        label, None, int(options["ignore_index"]), bool(options["shift"]), smoothing, weight
    )


def cross_entropy_in_chunks(
    op: Emit,
    logits: ir.Value,
    labels: WeightedLabels,
    wrt: Sequence[ir.Value],
    plain: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, ir.Value, OwnGradients]:
    """Write the weighted sum of the cross-entropies and the sum of the weights, with the logits of
    one chunk in memory at a time.

    Args:
        op: emitter of the graph.
        logits: (rows, vocabulary) or (rows, tokens, vocabulary).
        labels: the labels, and the weights of rows or labels.
        wrt: the values w.r.t. which the sum will be differentiated.
        plain: both sums by the plain formula, for proofs; tidying drops their nodes.

    Returns:
        Both sums, and a function that writes the gradients of the first, times a scalar.
    """
    double = logits.dtype == ir.DataType.DOUBLE
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    head, words = Head(op, logits), (dims(logits) or (None,))[-1]
    active, _ = dependent_values(list(op.graph), wrt)
    shared = [x for x in head.shared if x in active and is_real(x)]
    wanted = [x for x in head.leaves if x in active]
    sizes = block_sizes(words) if shared else None
    many = sizes is not None and sizes[0] >= MANY_WORDS
    axes, most = head.vocabulary_axes() if many else None, 128
    if isinstance(words, int):
        most = min(max(2 ** round(log2(MOST_LOGITS / words)), 16), 4096)
    positions = LabelPositions(op, labels, words, dtype, most if axes is None else None)
    own: OwnGradients
    if axes is not None and sizes is not None:
        by_words = BlockwiseLoss(op, head, positions, axes, sizes, labels.smoothing)
        total, own = by_words.total, partial(by_words.write_gradients, shared, wanted)
    else:
        total, pairs = _write_loss_scan(op, head, positions, shared, wanted, labels.smoothing)
        own = gradient_scaler(pairs)
    total.meta[marks.PLAIN_SUM], positions.total.meta[marks.PLAIN_SUM] = plain
    return total, positions.total, own


def gradient_scaler(pairs: Pairs) -> OwnGradients:
    """Return a function `(op, scale)` that writes the given gradients multiplied by the scalar
    `scale`.
    """

    def write_scaled_gradients(op: Emit, scale: ir.Value) -> Pairs:
        found = []
        for value, g in pairs:
            product = op.Mul(g, op.Cast(scale, to=g.dtype))
            found.append((value, op.set_type_like(product, value)))
        return found

    return write_scaled_gradients


# -- chunks of positions ---------------------------------------------------------------------------


def _write_loss_scan(
    op: Emit,
    head: Head,
    positions: LabelPositions,
    shared: Sequence[ir.Value],
    wanted: Sequence[ir.Value],
    smoothing: float,
) -> tuple[ir.Value, Pairs]:
    """Write a Scan over chunks of positions that computes the loss, and the gradients w.r.t.
    weights and features.

    The loss and the gradients w.r.t. `shared` are added up over chunks; the gradients w.r.t. the
    leaves `wanted` are one for each chunk.

    Returns:
        The sum of the losses, and pairs of a value and the gradient w.r.t. it.
    """
    dtype = positions.weights.dtype
    leaves = {x: positions.gather_chunks(x) for x in head.leaves}
    stacks = [*leaves.values(), positions.target, positions.weights]
    sums = [op.const(0.0, dtype), *map(op.zeros_like, shared)]
    inner = Emit(ir.Graph([], [], nodes=[], name="positions"), outer=op)
    inner.graph.inputs[:] = [
        ir.Value(name=inner.name("sum"), type=v.type, shape=v.shape) for v in sums
    ]
    size = inner.name("size")
    inner.graph.inputs.extend(
        ir.Value(
            name=inner.name(f"{stack.name}_of_some"),
            type=stack.type,
            shape=ir.Shape([size, *(dims(stack) or ())[2:]]),
        )
        for stack in stacks
    )
    before = inner.graph.inputs[: len(sums)]
    *given, target, weights = inner.graph.inputs[len(sums) :]
    rows, gate = dict(zip(head.leaves, given, strict=True)), next(iter(leaves.values()))
    with inner:
        z = head.write_logits(inner, rows, gate=gate)
        index = inner.Unsqueeze(target, [1])
        log_p = inner.LogSoftmax(widen_to_float32(inner, z), axis=-1)
        chosen = inner.Squeeze(inner.GatherElements(log_p, index, axis=1), [1])
        if smoothing:
            mean = inner.ReduceMean(log_p, [1], keepdims=0)
            chosen = (1.0 - smoothing) * chosen + smoothing * mean
        results = [before[0] - weighted_sum(inner, chosen, weights)]
        if wanted or shared:
            hit = inner.Expand(inner.const(smoothing - 1.0, dtype), inner.Shape(index))
            column = inner.Unsqueeze(weights, [1])
            share = smoothing / head.width if isinstance(head.width, int) else 0.0
            dz = logit_gradient(inner, inner.Exp(log_p), (index, hit), column, share)
            found = head.write_gradients(inner, z, dz, [*shared, *(rows[x] for x in wanted)])
            results += [b + g for b, g in zip(before[1:], found, strict=False)]
            results += found[len(shared) :]
        inner.give(results)
    attributes = {"body": inner.graph, "num_scan_inputs": len(stacks)}
    outputs = op.emit_many("Scan", [*sums, *stacks], attributes, len(sums) + len(wanted))
    like = [*sums, *(leaves[x] for x in wanted)]
    total, *gradients = (op.set_type_like(y, v) for y, v in zip(outputs, like, strict=True))
    of = [*shared, *(leaves[x] for x in wanted)]
    return total, list(zip(of, gradients, strict=True))
