"""The names of adapters: of their tensors in a model, and in a file of adapters."""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto

from onnxgrad.adapters.uses import EMBEDDING, Target
from onnxgrad.model.scopes import name_of_floats
from onnxgrad.training.parameters.aliases import aliases
from onnxgrad.training.parameters.choice import integer_rows

_MAGNITUDE = "lora_magnitude_vector"


def tensor_names(form: str, use_dora: bool) -> tuple[str, ...]:
    """Return what PEFT calls the tensors of an adapter: A, which reads the data, B, and lengths."""
    pair = ("lora_A.weight", "lora_B.weight")
    if form == EMBEDDING:
        pair = ("lora_embedding_A", "lora_embedding_B")
    return (*pair, _MAGNITUDE) if use_dora else pair


def module_names(proto: ModelProto, targets: dict[str, Target]) -> dict[str, str]:
    """Return the path of the module of each weight, such as "encoder.layer.0.query".

    This is the name of the weight, or its alias if an exporter numbered it, without ".weight";
    of integers the name of the floats that they were. Weights of the same module keep their own
    names.
    """
    aliased = aliases(proto)
    if any(target.quantized for target in targets.values()):
        aliased |= {row.name: row.alias for row in integer_rows(proto) if row.alias}
    modules = {
        name: aliased.get(name, name_of_floats(name)).removesuffix(".weight") for name in targets
    }
    counts = Counter(modules.values())
    return {
        name: module if counts[module] == 1 else name.removesuffix(".weight")
        for name, module in modules.items()
    }
