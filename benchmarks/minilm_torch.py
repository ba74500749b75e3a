"""MiniLM, the sentence encoder of `published.csv`, in PyTorch: a witness for its ONNX file."""

from __future__ import annotations

import torch
from torch.nn import functional

LAYERS, HEADS, WIDTH = 3, 12, 384


def sentence_vectors(weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return one vector (rows, 384) for each row of token ids, which all count.

    `weights` have the names of PyTorch behind the prefix "model.0.auto_model.", and the layout of
    the file: matrices are (inputs, outputs).
    """
    w = {name.removeprefix("model.0.auto_model."): tensor for name, tensor in weights.items()}

    def linear(h: torch.Tensor, name: str) -> torch.Tensor:
        return h @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return functional.layer_norm(h, [WIDTH], scale, bias, 1e-12)

    kinds = ("word", "position", "token_type")
    word, position, kind = (w[f"embeddings.{n}_embeddings.weight"] for n in kinds)
    h = norm(word[ids] + position[: ids.shape[1]] + kind[0], "embeddings")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}"
        three = (linear(h, f"{at}.attention.self.{n}") for n in ("query", "key", "value"))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in three)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = norm(linear(attended, f"{at}.attention.output.dense") + h, f"{at}.attention.output")
        inner = functional.gelu(linear(h, f"{at}.intermediate.dense"))
        h = norm(linear(inner, f"{at}.output.dense") + h, f"{at}.output")
    return h.mean(dim=1)
