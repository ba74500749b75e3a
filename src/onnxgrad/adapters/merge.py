"""`merge_lora`: add adapters to the weights of their layers, and remove their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto

from onnxgrad.adapters.graph import column_lengths, remove_adapters
from onnxgrad.adapters.insertion import adopt_adapters
from onnxgrad.adapters.requantize import (
    ConstantOperands,
    RoundingErrors,
    requantize as quantize_anew,
    warn_of_rounding,
)
from onnxgrad.adapters.uses import CONV, LEFT
from onnxgrad.errors import ModelError, argument, escaping, named
from onnxgrad.model.notes import ADAPTERS, HEAD, read_adapters, write_metadata
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs


@escaping()
def merge_lora(model: ModelLike, *, requantize: bool = False) -> ModelProto:
    """Return `model` without adapter nodes: each adapter is added to its weight.

    Each adapter is added to its weight, in float64 and then rounded to the dtype of the weight. The
    result has the nodes of the model before its adapters, and no metadata about fine-tuning.

    Args:
        model: model with adapters, serialized model or path; never modified.
        requantize: whether a quantized weight gets new integers and scales that hold the sum, in
            the form of the file. A warning says how much they differ from the sum: evaluate the
            result. Possible for weights that DequantizeLinear, MatMulNBits, QLinearMatMul or
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
    merged, _ = adopt_adapters(model)
    notes = read_adapters(merged)
    if not notes:
        raise ValueError(f"the model has no adapters to merge: add some by {named('add_lora')}")
    quantized = [note["weight"] for note in notes if note["quantized"]]
    if quantized and not requantize:
        raise ValueError(
            f"the adapters of {quantized} cannot be merged: these weights are quantized, and "
            "cannot hold the sum. Use the model with its adapters; or load them into the float "
            "model (load_adapter), merge there, and quantize the result; or quantize these weights "
            f"anew ({argument('requantize', True)})"
        )
    errors = _add_adapters(merged, notes)
    bases = [use["base"] for note in notes for use in note["uses"]]
    remove_adapters(merged, bases, [n for note in notes for n in note["tensors"]])
    write_metadata(merged, ADAPTERS, [])
    write_metadata(merged, HEAD, [])
    if errors:
        warn_of_rounding(errors)
    return merged


def _add_adapters(merged: ModelProto, notes: Sequence[dict[str, Any]]) -> list[RoundingErrors]:
    """Add adapters to their weights, in place; return the rounding errors of the quantized
    weights.
    """
    refs = {ref.name: ref for ref in constant_refs(merged)}
    operands = None
    errors: list[RoundingErrors] = []
    for note in notes:
        if note["weight"] not in refs:
            raise ModelError(
                f"the adapted weight {note['weight']!r} is not in the model: a tool renamed or "
                "removed it. Merge adapters before other tools modify the file"
            )
        ref = refs[note["weight"]]
        tensors = [refs[name].array().astype(np.float64) for name in note["tensors"]]
        update = partial(_sum_of_weight_and_adapter, note, tensors)
        if note["quantized"]:
            operands = operands or ConstantOperands(merged, refs.values())
            errors.append(quantize_anew(operands, note, ref, update))
            continue
        old = ref.array()
        used = update(old.astype(np.float64).transpose(note["perm"]))
        new = used.transpose(np.argsort(note["perm"])).astype(old.dtype)
        if not np.array_equal(new, old):
            ref.write(new)
    return errors


def _sum_of_weight_and_adapter(
    note: dict[str, Any], tensors: Sequence[np.ndarray], weight: np.ndarray
) -> np.ndarray:
    """Return the sum of a weight and its adapter, whose factors are `tensors`, in the axis order
    that the layer reads.

    W + s A B, or s B A where the weight is on the left; for Conv, the product of the two kernels,
    group by group; with DoRA, each column gets its trained length.
    """
    a, b = tensors[:2]
    if note["form"] == LEFT:
        change = b @ a
    elif note["form"] != CONV:
        change = a @ b
    else:
        parts = zip(np.split(a, note["group"]), np.split(b, note["group"]), strict=True)
        kernels = [q.reshape(q.shape[:2]) @ p.reshape(len(p), -1) for p, q in parts]
        change = np.concatenate(kernels).reshape(len(b), *a.shape[1:])
    total = weight + note["scaling"] * change
    return total * (tensors[2] / column_lengths(total)) if note["use_dora"] else total
