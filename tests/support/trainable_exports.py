"""Networks of PyTorch with random parameters, as both exporters write them.

All names are here, so that tests are named without an import of PyTorch.
"""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from tests.support.exports import export_module

NETWORK_NAMES = (  # of `networks_more.NETWORKS`
    "cnn", "preactivation", "depthwise", "unet", "vit", "mae", "rotary decoder",
    "rotary computed", "gpt", "float mask", "encoder", "lstm", "gru", "gru, learned state", "rnn",
    "clip", "scaled logits", "detector", "point detector", "swin", "cosine attention", "detr",
    "convnext", "t5", "alibi", "alibi table", "scaled", "rezero", "weight norm", "blur pool",
    "recommender",
)  # fmt: skip
FIXED_LENGTH = {"alibi table", "lstm", "gru", "gru, learned state", "rnn"}  # of their second axis


def random_network(name: str) -> tuple[Any, tuple]:
    """Return a network whose parameters are all random, and its inputs."""
    import torch

    from tests.support.networks_more import NETWORKS

    assert tuple(NETWORKS) == NETWORK_NAMES
    torch.manual_seed(0)
    net, inputs = NETWORKS[name]()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.3 * torch.randn(p.shape) + (0.7 if p.numel() < 3 else 0.0))
    return net.eval(), inputs


def exported_network(name: str, dynamo: bool) -> onnx.ModelProto:
    """Return the model of a random network: any number of rows, and of tokens where it can be."""
    import torch

    net, inputs = random_network(name)
    names = [f"x{i}" for i in range(len(inputs))]
    moving = [
        {0: "N", 1: "T"} if x.dtype == torch.int64 and x.ndim > 1 and name not in FIXED_LENGTH
        else {0: "N"}
        for x in inputs
    ]  # fmt: skip
    if dynamo:
        sizes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in moving)
        return export_module(net, inputs, dynamo=True, input_names=names, dynamic_shapes=sizes)
    axes = dict(zip(names, moving, strict=True))
    return export_module(net, inputs, input_names=names, dynamic_axes=axes)


def network_exports() -> list:
    """Return every network with both exporters; most of them are of the sweep."""
    return [
        pytest.param(
            name, dynamo, id=f"{name}-{exporter}", marks=[pytest.mark.sweep] * (i % rare != 0)
        )
        for exporter, dynamo, rare in (("legacy", False, 2), ("dynamo", True, 4))
        for i, name in enumerate(NETWORK_NAMES)
    ]
