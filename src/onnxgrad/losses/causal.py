"""The loss of causal language models: logits at a position are compared with the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.classification import cross_entropy, cross_entropy_terms
from onnxgrad.losses.spec import Terms, class_indices, register
from onnxgrad.operators.shapes import dims, rank

CAUSAL = "causal_lm"
TOKENS, MASK = "input_ids", "attention_mask"
INT64 = ir.DataType.INT64
_END = np.iinfo(np.int64).max


def is_causal(loss: Any) -> bool:
    """Return whether every loss, given by name or as `{output: name}`, is `causal_lm`."""
    names = [*loss.values()] if isinstance(loss, Mapping) else [loss]
    return bool(names) and all(isinstance(name, str) and name == CAUSAL for name in names)


def causal_terms(op: Any, prediction: ir.Value, label: ir.Value, ignore_index: int = -100) -> Terms:
    """Write the loss terms of `causal_lm`, one for each label except the first label of a row."""
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

    Labels are token ids that are not shifted. If there are no labels, trainers take `input_ids`
    where `attention_mask` is 1.

    Options:
        ignore_index: the label whose loss is zero, for padding and prompts.
    """
    return cross_entropy(op, prediction, label, axis=2, shift=True, ignore_index=ignore_index)


def labels_of_tokens(op: Emit, ignore_index: int) -> ir.Value:
    """Write labels from the input of tokens, with `ignore_index` where the attention mask is 0.

    Raises:
        ValueError: the graph has no input of tokens.
    """
    inputs = {str(x.name): x for x in op.graph.inputs}
    if TOKENS not in inputs:
        raise ValueError(
            f"the loss {CAUSAL!r} without labels takes the input {TOKENS!r} as labels, and the "
            f"model has no such input: pass y. Its inputs are {printable(list(inputs))}"
        )
    tokens, mask = inputs[TOKENS], inputs.get(MASK)
    label = op.Cast(tokens, to=INT64)
    if mask is None or rank(mask) != 2:
        return label
    if dims(mask) != dims(tokens):  # the mask covers past tokens, too
        before = op.const(op.vector(op.dim(mask, 1))) - op.const(op.vector(op.dim(tokens, 1)))
        mask = op.Slice(mask, before, [_END], [1])
    kept = op.Not(op.Equal(mask, op.const(0, mask.dtype)))
    return op.set_type_like(op.Where(kept, label, np.int64(ignore_index)), label)


def refuse_last_position(op: Emit, logits: ir.Value) -> None:
    """Raise `ValueError` if the graph computes the logits of the last position only."""
    tokens = next((x for x in op.graph.inputs if x.name == TOKENS), None)
    if (dims(logits) or ())[1:2] == (1,) and (dims(tokens) or ())[1:2] != (1,):
        raise ValueError(
            f"the model computes {logits.name!r} of the last position only, and the loss "
            f"{CAUSAL!r} needs the logits of all positions: build the model without prune_lm_head, "
            "or export it without a Gather of the last position"
        )
