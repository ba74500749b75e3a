"""Integers do not train: an error where a user names the tensor of a quantized weight."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.model.weights import FLOATS, constant_refs


def require_floats(proto: ModelProto, names: str | Iterable[str]) -> None:
    """Raise `ValueError` if one of `names` is that of a constant which holds no floats."""
    named = {names} if isinstance(names, str) else set(names)
    for ref in constant_refs(proto):
        if ref.name in named and (code := ref.read().data_type) not in FLOATS:
            dtype = ir.DataType(code).name.lower()
            raise ValueError(
                f"{ref.name!r} holds {dtype}: only floats train. A quantized weight stays as it "
                "is: train adapters beside it (add_lora), a new head (replace_head) or biases"
            )
