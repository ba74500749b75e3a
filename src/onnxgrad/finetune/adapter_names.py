"""The names of adapters: of their tensors in a model, and in a file of adapters."""

from __future__ import annotations

import ast
from collections import Counter

from onnx import NodeProto

from onnxgrad.finetune.adapter_uses import Target

_OF_DYNAMO = "pkg.torch.onnx.name_scopes"


def module_names(targets: dict[str, Target]) -> dict[str, str]:
    """Return the path of the module of each weight, such as "encoder.layer.0.query".

    This is the name of the weight without ".weight"; for a name that the exporters of PyTorch
    chose, the module that they recorded for the node that uses it; otherwise the name itself.
    Weights of the same module keep their own names.
    """
    modules = {}
    for name, target in targets.items():
        modules[name] = name.removesuffix(".weight")
        if target.uses and modules[name] == name:
            paths = _recorded(name, target.uses[0].node)
            biased = [path for path in paths if f"{path}.bias" in targets]
            modules[name] = (*biased, *paths, name)[0]
    counts = Counter(modules.values())
    return {
        name: module if counts[module] == 1 else name.removesuffix(".weight")
        for name, module in modules.items()
    }


def _recorded(name: str, node: NodeProto) -> list[str]:
    """Return the paths that the module of the weight of `node` may have, the likeliest first."""
    if name.startswith("onnx::") and node.name.startswith("/"):  # /net/net.0/fc/MatMul
        parts = node.name[1:].split("/")[:-1]
        # the child of a Sequential comes with the name of the Sequential, that of a list does not
        short = [
            a for a, b in zip(parts, [*parts[1:], ""], strict=True) if not b.startswith(f"{a}.")
        ]
        return [".".join(short), ".".join(parts)] if parts else []
    if name.startswith("val_"):
        for entry in node.metadata_props:
            if entry.key == _OF_DYNAMO:  # "['', 'layers.0', 'linear']"
                try:
                    scopes = ast.literal_eval(entry.value)
                except (SyntaxError, ValueError):
                    return []
                return [str(s) for s in scopes[-2:-1] if s] if isinstance(scopes, list) else []
    return []
