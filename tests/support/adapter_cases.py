"""Small models for the tests of adapters: one weight in many forms, and a network of PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from onnxgrad.model.notes import fine_tuned_tensors
from onnxgrad.model.weights import constant_refs, replace_constants
from tests.support.exports import export_module
from tests.support.models import parse_model


def random_model(text: str, *, opset: int = 20, seed: int = 0, **tensors: Any) -> onnx.ModelProto:
    """Return the model of `text` with initializers: arrays, or random ones of a shape."""
    return with_tensors(parse_model(text, opset=opset), seed, **tensors)


def with_tensors(model: onnx.ModelProto, seed: int = 0, **tensors: Any) -> onnx.ModelProto:
    """Return `model` with initializers: arrays, or random ones of a shape."""
    rng = np.random.default_rng(seed)
    for name, value in tensors.items():
        array = rng.normal(size=value).astype(np.float32) if isinstance(value, tuple) else value
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def rename_constants(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """Return `model` with other names of initializers, such as those with dots."""
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return model


def constant_arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return initializers and values of Constant nodes by name, of subgraphs and functions too."""
    return {ref.name: ref.array() for ref in constant_refs(model)}


def adapter_tensors(model: onnx.ModelProto) -> list[np.ndarray]:
    """Return the tensors that fine-tuning trains, such as the two factors of an adapter."""
    values = constant_arrays(model)
    return [values[name] for name in fine_tuned_tensors(model)]


def shaken(model: onnx.ModelProto, seed: int = 1) -> onnx.ModelProto:
    """Return `model` with random values in all tensors that are fine-tuned."""
    rng, values = np.random.default_rng(seed), constant_arrays(model)
    new = {name: rng.normal(size=values[name].shape) * 0.5 for name in fine_tuned_tensors(model)}
    return replace_constants(model, {n: a.astype(values[n].dtype) for n, a in new.items()})


_LINEAR = "f (float[2,5,4] x) => (float[2,5,3] y)"
_MATRIX = "f (float[2,4] x) => (float[2,3] y)"
_HALF = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)

# by name: a model that reads the weight "w" in another form, and the shapes or values of tensors
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "matmul": (f"{_LINEAR} {{ y = MatMul(x, w) }}", {"w": (4, 3)}),
    "vector": ("f (float[4] x) => (float[3] y) { y = MatMul(x, w) }", {"w": (4, 3)}),
    "batched": (f"{_LINEAR} {{ y = MatMul(x, w) }}", {"w": (2, 4, 3)}),
    "left": ("f (float[2,4,5] x) => (float[2,3,5] y) { y = MatMul(w, x) }", {"w": (3, 4)}),
    "gemm": (
        f"{_MATRIX} {{ y = Gemm<transB = 1, alpha = 0.5, beta = 2.0>(x, w, b) }}",
        {"w": (3, 4), "b": (3,)},
    ),
    "gemm of transposed data": (
        "f (float[4,2] x) => (float[2,3] y) { y = Gemm<transA = 1>(x, w) }", {"w": (4, 3)},
    ),
    "gemm on the left": (
        "f (float[2,4] x) => (float[3,2] y) { y = Gemm<transA = 1, transB = 1>(w, x) }",
        {"w": (4, 3)},
    ),
    "fused matmul": (
        f"{_LINEAR} {{ y = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, w) }}",
        {"w": (3, 4)},
    ),
    "behind transpose, cast and identity": (
        f"""{_LINEAR} {{ t = Transpose<perm = [1, 0]>(w) c = Cast<to = 1>(t) i = Identity(c)
            y = MatMul(x, i) }}""",
        {"w": _HALF.T.copy()},
    ),
    "half precision": (
        "f (float16[2,5,4] x) => (float16[2,5,3] y) { y = MatMul(x, w) }", {"w": _HALF},
    ),
    "constant node": (
        f"""{_MATRIX} {{
            w = Constant<value = float[4,3] {{1, 0, -1, 2, 0, 1, 1, -2, 1, 0, 1, 2}}>()
            y = MatMul(x, w) }}""",
        {},
    ),
    "conv 1": (
        """f (float[2,4,9] x) => (float[2,6,M] y) {
            y = Conv<dilations = [2], pads = [1, 2]>(x, w, b) }""",
        {"w": (6, 4, 3), "b": (6,)},
    ),
    "conv 2": (
        """f (float[2,4,9,8] x) => (float[2,6,M,N] y) {
            y = Conv<strides = [2, 1], auto_pad = "SAME_UPPER">(x, w) }""",
        {"w": (6, 4, 3, 2)},
    ),
    "conv 3 in groups": (
        "f (float[2,4,5,5,5] x) => (float[2,6,3,4,5] y) { y = Conv<group = 2>(x, w) }",
        {"w": (6, 2, 3, 2, 1)},
    ),
    "embedding": ("f (int64[2,5] x) => (float[2,5,3] y) { y = Gather(w, x) }", {"w": (4, 3)}),
    "tied": (
        """f (int64[2,5] x) => (float[2,5,4] y) {
            e = Gather(w, x) h = Tanh(e) t = Transpose<perm = [1, 0]>(w) y = MatMul(h, t) }""",
        {"w": (4, 3)},
    ),
    "twice": (
        "f (float[2,3] x) => (float[2,3] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, w) }",
        {"w": (3, 3)},
    ),
    "in a branch": (
        """f (float[2,3] x) => (float[2,3] y) {
            s = ReduceSum<keepdims = 0>(x) z = Constant<value = float {0.0}>() c = Greater(s, z)
            y = If(c) <then_branch = t () => (float[2,3] a) { a = MatMul(x, w) },
                       else_branch = e () => (float[2,3] b) { n = Neg(x) b = MatMul(n, w) }> }""",
        {"w": (3, 3)},
    ),
    "in a function": (
        f"""{_MATRIX} {{ y = local.linear(x, w) }}
            <domain: "local", opset_import: ["": 20]> linear (a, b) => (c) {{ c = MatMul(a, b) }}""",
        {"w": (4, 3)},
    ),
    "old": (
        "f (float[2,4] x, float[4,3] w) => (float[2,3] y) { y = MatMul(x, w) }", {"w": (4, 3)},
    ),
}  # fmt: skip


@cache
def adapter_network(name: str) -> onnx.ModelProto:
    """Return the model of `NETWORKS`, which tests share: copy it before you change it."""
    text, tensors = NETWORKS[name]
    return random_model(text, opset=8 if name == "old" else 20, **tensors)


def random_feed(model: onnx.ModelProto, seed: int = 2) -> dict[str, np.ndarray]:
    """Return random data for the input "x"."""
    rng, kind = np.random.default_rng(seed), model.graph.input[0].type.tensor_type
    shape = [d.dim_value for d in kind.shape.dim]
    if kind.elem_type == onnx.TensorProto.INT64:
        return {"x": rng.integers(0, 4, shape)}
    return {
        "x": rng.normal(size=shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    }


# -- PyTorch -------------------------------------------------------------------------------------

TORCH_MODULES = ["embed", "conv", "layers.0", "layers.1", "last"]


@cache
def _torch_classes() -> tuple[type, type]:
    import torch
    from torch import nn

    class LoRA(nn.Module):
        def __init__(self, base, rank, scaling):
            super().__init__()
            self.base, self.scaling = base.requires_grad_(False), scaling
            if isinstance(base, nn.Conv1d):
                self.A = nn.Parameter(torch.zeros(rank, base.in_channels, *base.kernel_size))
                self.B = nn.Parameter(torch.zeros(base.out_channels, rank, 1))
            else:
                embeds = isinstance(base, nn.Embedding)
                size = base.num_embeddings if embeds else base.in_features
                out = base.embedding_dim if embeds else base.out_features
                self.A = nn.Parameter(torch.zeros(size, rank))
                self.B = nn.Parameter(torch.zeros(rank, out))

        def forward(self, x):
            base = self.base
            if isinstance(base, nn.Conv1d):
                narrow = nn.functional.conv1d(x, self.A, stride=base.stride, padding=base.padding)
                return base(x) + self.scaling * nn.functional.conv1d(narrow, self.B)
            narrow = self.A[x] if isinstance(base, nn.Embedding) else x @ self.A
            return base(x) + self.scaling * (narrow @ self.B)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.conv = nn.Conv1d(6, 6, 3, padding=1)
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            h = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return self.last(h.mean(1))

    return Net, LoRA


def embedding_network() -> Any:
    """Return a network of PyTorch with the layers `TORCH_MODULES`."""
    import torch

    torch.manual_seed(0)
    return _torch_classes()[0]().eval()


def lora_by_hand(layer: Any, rank: int, scaling: float) -> Any:
    """Return a layer of PyTorch with LoRA beside it, whose factors are the parameters A and B."""
    return _torch_classes()[1](layer, rank, scaling)


def exported_embedding_network(exporter: str = "torchscript") -> onnx.ModelProto:
    """Return the model of `embedding_network`, of either exporter of PyTorch."""
    import torch

    x = torch.zeros(2, 5, dtype=torch.int64)
    if exporter == "dynamo":
        return export_module(embedding_network(), (x,), dynamo=True, dynamic_shapes=({0: "N"},))
    return export_module(embedding_network(), (x,), input_names=["x"], dynamic_axes={"x": {0: "N"}})
