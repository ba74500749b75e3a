"""Adapters become part of the weights beside which they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.adapters import dora
from onnxgrad.adapters.constant_operands import ConstantOperands
from onnxgrad.adapters.graph import remove
from onnxgrad.adapters.insertion import adopted
from onnxgrad.adapters.requantize import Loss, report, requantize as quantize_anew
from onnxgrad.adapters.uses import CONV, LEFT
from onnxgrad.errors import ModelError, argument, escaping, named
from onnxgrad.model.notes import ADAPTERS, HEAD, read_adapters, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs


@escaping()
def merge_lora(model: ModelLike, *, requantize: bool = False) -> ModelProto:
    """Return the plain model that computes what `model` with its adapters does.

    Each adapter is added to its weight, in float64 and then rounded to the dtype of the weight. The
    nodes are those that the model had before the adapters; nothing tells any more that it was
    fine-tuned.

    Args:
        model: model with adapters, serialized model or path; never modified.
        requantize: whether a quantized weight gets new integers and scales that hold the sum, in
            the form of the file. A warning says how much they differ from the sum: evaluate the
            result. Weights that DequantizeLinear, MatMulNBits, QLinearMatMul or
            MatMulInteger reads.

    Raises:
        ValueError: `model` has no adapters, or has them beside quantized weights.
        ModelError: `model` cannot be read, or another tool modified the adapters.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> og.merge_lora(og.add_lora(model, "fc", rank=1)) == model
        True
    """
    merged, _ = adopted(model)
    notes = read_adapters(merged)
    if not notes:
        raise ValueError(f"the model has no adapters to merge: {named('add_lora')} adds them")
    quantized = [note["weight"] for note in notes if note["quantized"]]
    if quantized and not requantize:
        raise ValueError(
            f"the adapters of {quantized} cannot be merged: these weights are quantized, and "
            "cannot hold the sum. Use the model as it is; or load the adapter into the float model "
            "(load_adapter), merge there, and quantize the result; or quantize these weights anew "
            f"({argument('requantize', True)})"
        )
    losses = _merge(merged, notes)
    bases = [use["base"] for note in notes for use in note["uses"]]
    remove(merged, bases, [n for note in notes for n in note["tensors"]])
    write_note(merged, ADAPTERS, [])
    write_note(merged, HEAD, [])
    if losses:
        report(losses)
    return merged


def _merge(merged: ModelProto, notes: Sequence[dict[str, Any]]) -> list[Loss]:
    """Add adapters to their weights, in place; return what that costs quantized ones."""
    refs = {ref.name: ref for ref in constant_refs(merged)}
    operands = None
    losses: list[Loss] = []
    for note in notes:
        if note["weight"] not in refs:
            raise ModelError(
                f"the adapted weight {note['weight']!r} is not in the model: a tool renamed or "
                "removed it. Merge adapters before other tools modify the file"
            )
        ref = refs[note["weight"]]
        tensors = [refs[name].array().astype(np.float64) for name in note["tensors"]]
        update = partial(_summed, note, tensors)
        if note["quantized"]:
            operands = operands or ConstantOperands(merged, refs.values())
            losses.append(quantize_anew(operands, note, ref, update))
            continue
        old = ref.array()
        used = update(old.astype(np.float64).transpose(note["perm"]))
        new = used.transpose(np.argsort(note["perm"])).astype(old.dtype)
        if not np.array_equal(new, old):
            ref.write(new)
    return losses


def _summed(note: dict[str, Any], tensors: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Return a weight with its adapter, with the axes as in the node that reads it."""
    total = weight + _change(note, tensors)
    return total * (tensors[2] / dora.lengths(total)) if note["use_dora"] else total


def _change(note: dict[str, Any], pair: Sequence[np.ndarray]) -> np.ndarray:
    """Return what an adapter adds to its weight, with the axes as in the node that reads it."""
    a, b = pair[:2]
    if note["form"] == LEFT:
        return note["scaling"] * (b @ a)
    if note["form"] != CONV:
        return note["scaling"] * (a @ b)
    groups = range(note["group"])
    parts = zip(np.split(a, len(groups)), np.split(b, len(groups)), strict=True)
    change = [q.reshape(q.shape[:2]) @ p.reshape(len(p), -1) for p, q in parts]
    return note["scaling"] * np.concatenate(change).reshape(len(b), *a.shape[1:])
