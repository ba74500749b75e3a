"""The loss of language models: the logits at a position are compared with the token at the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.classification import cross_entropy, cross_entropy_terms
from onnxgrad.losses.formula_nodes import wide
from onnxgrad.losses.positions import Labels
from onnxgrad.losses.spec import Terms, class_indices, register
from onnxgrad.losses.sums import sum_and_count
from onnxgrad.losses.vocabulary import OwnGradients, in_chunks
from onnxgrad.operators.shapes import dims, rank

CAUSAL = "causal_lm"
TOKENS, MASK = "input_ids", "attention_mask"
INT64 = ir.DataType.INT64
_END = np.iinfo(np.int64).max


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
) -> tuple[ir.Value, ir.Value, OwnGradients | None]:
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
        Both sums, and what writes the gradients of the first with respect to some values, if any.

    Raises:
        ValueError: the graph computes the logits of the last position only.
    """
    _refuse_last_only(op, logits)
    terms = causal_terms(op, wide(op, logits), label, ignore_index)
    if weight is None or rank(weight) == 1:
        every = weight
    else:
        every = op.Slice(op.Expand(weight, op.Shape(label)), [1], [_END], [1])
    plain = sum_and_count(op, terms, label, every)
    if wrt is None:
        return *plain, None
    return in_chunks(op, logits, Labels(label, weight, ignore_index, shift=True), wrt, plain)


def _refuse_last_only(op: Emit, logits: ir.Value) -> None:
    tokens = next((x for x in op.graph.inputs if x.name == TOKENS), None)
    if (dims(logits) or ())[1:2] == (1,) and (dims(tokens) or ())[1:2] != (1,):
        raise ValueError(
            f"the model computes {logits.name!r} of the last position only, and the loss "
            f"{CAUSAL!r} needs all: build it without prune_lm_head, or export it without a Gather"
        )
