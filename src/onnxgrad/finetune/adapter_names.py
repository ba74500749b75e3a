"""The names of adapters: of their tensors in a model, and in a file of adapters."""

from __future__ import annotations

import ast

from onnx import NodeProto

from onnxgrad.finetune.adapter_uses import Target

_OF_DYNAMO = "pkg.torch.onnx.name_scopes"


def module_of(name: str, node: NodeProto | None = None) -> str:
    """Return the path of the module that has the weight `name`, such as "encoder.layer.0.query".

    This is the name without ".weight"; for a name that the exporters of PyTorch chose, the module
    that they recorded for the node that uses it; otherwise the name itself.
    """
    if name.endswith(".weight"):
        return name.removesuffix(".weight")
    path = "" if node is None else _recorded(name, node)
    return path or name


def module_names(targets: dict[str, Target]) -> dict[str, str]:
    """Return the module of each weight; weights of the same module keep their own names."""
    modules = {
        name: module_of(name, target.uses[0].node if target.uses else None)
        for name, target in targets.items()
    }
    values = list(modules.values())
    return {
        name: module if values.count(module) == 1 else name.removesuffix(".weight")
        for name, module in modules.items()
    }


def _recorded(name: str, node: NodeProto) -> str:
    if name.startswith("onnx::") and node.name.startswith("/"):  # /layers.0/MatMul
        return ".".join(node.name[1:].split("/")[:-1])
    if name.startswith("val_"):
        for entry in node.metadata_props:
            if entry.key == _OF_DYNAMO:  # "['', 'layers.0', 'linear']"
                try:
                    scopes = ast.literal_eval(entry.value)
                except (SyntaxError, ValueError):
                    return ""
                return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    return ""
