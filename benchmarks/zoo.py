"""The networks of networks.py, written in PyTorch and exported with their weights."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import torch
from minilm_torch import sentence_vectors
from onnx import numpy_helper
from published import fetched
from torch import Tensor, nn
from torch.nn import functional

import onnxgrad as og


@dataclass(frozen=True)
class Network:
    """A training job: `build` makes the module, `shape` is that of a row of its input.

    `tokens` are the different integers of the input, 0 for floats. `labels` are the classes of a
    label, 0 for a regression, and `label_shape` is the shape of the label of a row. `adam` trains
    with AdamW instead of SGD with momentum; `train_norm` normalizes by the statistics of the batch.
    """

    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    labels: int = 10
    label_shape: tuple[int, ...] = ()
    tokens: int = 0
    adam: bool = False
    rate: float = 1e-3
    train_norm: bool = False

    def data(self, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return random inputs and labels."""
        rng = np.random.default_rng(seed)
        if self.tokens:
            X: np.ndarray = rng.integers(0, self.tokens, (rows, *self.shape))
        else:
            X = rng.standard_normal((rows, *self.shape), np.float32)
        if self.labels:
            return X, rng.integers(0, self.labels, (rows, *self.label_shape))
        return X, rng.standard_normal((rows, *self.label_shape), np.float32)

    def with_loss(self) -> onnx.ModelProto:
        """Return the exported network with its loss as its only output."""
        proto = self.exported(self.module())
        (y,) = proto.graph.output
        if self.labels:
            lines = [f"loss, logs = SoftmaxCrossEntropyLoss({y.name}, label)"]
            if len(self.label_shape):
                kept = numpy_helper.from_array(np.array([-1, self.labels]), "rows_and_classes")
                lines = [f"flat = Reshape({y.name}, rows_and_classes)", "all = Reshape(label, one)"]
                lines += ["loss, logs = SoftmaxCrossEntropyLoss(flat, all)"]
                one = numpy_helper.from_array(np.array([-1]), "one")
                proto.graph.initializer.extend([kept, one])
        else:
            lines = [f'd = Sub("{y.name}", label)', "s = Mul(d, d)"]
            lines += ["loss = ReduceMean<keepdims=0>(s)"]
        proto.graph.node.extend(map(onnx.parser.parse_node, lines))
        kind = onnx.TensorProto.INT64 if self.labels else onnx.TensorProto.FLOAT
        shape = ("N", *self.label_shape)
        proto.graph.input.append(onnx.helper.make_tensor_value_info("label", kind, shape))
        proto.graph.output[0].CopyFrom(
            onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, [])
        )
        for node in proto.graph.node:
            # its gradients read outputs that an inference does not have
            more = {"LayerNormalization": ("mean", "inverse"), "MaxPool": ("indices",)}
            node.output.extend(f"{node.output[0]}/{n}" for n in more.get(node.op_type, ()))
        proto.ir_version = 8
        return proto

    def fed(self, X: np.ndarray) -> Any:
        """Return the inputs as the file takes them."""
        return X

    def trainer(self, proto: onnx.ModelProto, **options: Any) -> og.Trainer:
        """Return our trainer for the job."""
        loss = "cross_entropy" if self.labels else "squared_error"
        options |= {
            "optimizer": og.optimizers.adamw(weight_decay=0.01)
            if self.adam
            else og.optimizers.momentum(0.9)
        }
        options |= {"learning_rate": self.rate}
        norm = "train" if self.train_norm else "frozen"
        return og.Trainer(proto, loss, batch_norm=norm, **options)

    def loss(self, prediction: Tensor, label: Tensor) -> Tensor:
        """Return the mean loss; classes are on the last axis of the prediction."""
        if self.labels:
            return functional.cross_entropy(prediction.flatten(0, -2), label.flatten())
        return functional.mse_loss(prediction, label)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return PyTorch's optimizer for the job."""
        if self.adam:
            return torch.optim.AdamW(module.parameters(), lr=self.rate)
        return torch.optim.SGD(module.parameters(), lr=self.rate, momentum=0.9)

    def module(self) -> nn.Module:
        """Return the module, with the same weights each time, in the mode it trains in."""
        torch.manual_seed(0)
        module = self.build().train(self.train_norm)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.dim():  # the exporter writes equal tensors once
                    tensor += 0.001 * torch.rand(tensor.shape)
        return module

    def exported(self, module: nn.Module) -> onnx.ModelProto:
        """Return the module as PyTorch's exporter writes it, with a batch of any size."""
        example = torch.from_numpy(self.data(2)[0])
        file = io.BytesIO()
        # attention has a kernel of its own for inference, which the exporter does not know
        torch.backends.mha.set_fastpath_enabled(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (example,),
                file,
                dynamo=False,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                opset_version=18,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
            )
        return onnx.load_from_string(file.getvalue())


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        mlp(400, 120, 84, 10),
    )


def conv_norm(a: int, b: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(b))


class Residual(nn.Module):
    """Two convolutions of 3 x 3 and a way around them."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_norm(a, b, 3, stride), conv_norm(b, b, 3)
        same = a == b and stride == 1
        self.around = nn.Identity() if same else conv_norm(a, b, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.around(x))


class Head(nn.Sequential):
    """The mean of each channel, and a linear layer."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 16, 3), nn.ReLU()]
    before = 16
    for channels in (16, 32, 64):
        for _ in range(3):
            stride = 2 if channels != before else 1
            layers.append(Residual(before, channels, stride))
            before = channels
    return nn.Sequential(*layers, Head(64))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for channels in (64, 128, 256, 512):
        for _ in range(2):
            stride = 2 if channels != before else 1
            layers.append(Residual(before, channels, stride))
            before = channels
    return nn.Sequential(*layers, Head(512))


class Inverted(nn.Module):
    """The block of MobileNetV2: wider, one convolution a channel, narrower."""

    def __init__(self, a: int, b: int, stride: int, wider: int) -> None:
        super().__init__()
        self.adds, inner = stride == 1 and a == b, a * wider
        self.layers = nn.Sequential(
            *(conv_norm(a, inner, 1), nn.ReLU6()),
            *(conv_norm(inner, inner, 3, stride, inner), nn.ReLU6()),
            conv_norm(inner, b, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.adds else y


def mobilenet() -> nn.Module:
    blocks = [(16, 16, 1, 1), (16, 24, 2, 6), (24, 24, 1, 6), (24, 32, 2, 6), (32, 32, 1, 6)]
    blocks += [(32, 64, 2, 6), (64, 64, 1, 6)]
    layers = [Inverted(*block) for block in blocks]
    return nn.Sequential(conv_norm(3, 16, 3, 2), nn.ReLU6(), *layers, Head(64))


class UNet(nn.Module):
    """Down twice, up twice by transposed convolutions, and the ways across."""

    def __init__(self) -> None:
        super().__init__()

        def two(a: int, b: int) -> nn.Module:
            first, second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

        self.a, self.b, self.c = two(3, 16), two(16, 32), two(32, 64)
        self.up_b, self.up_a = (nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (32, 16))
        self.d, self.e, self.last = two(64, 32), two(32, 16), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(functional.max_pool2d(a, 2))
        c = self.c(functional.max_pool2d(b, 2))
        d = self.d(torch.cat([b, self.up_b(c)], 1))
        return self.last(self.e(torch.cat([a, self.up_a(d)], 1)))


def waves() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b, size, stride in ((1, 16, 16, 4), (16, 32, 5, 1), (32, 64, 5, 1)):
        layers += [nn.Conv1d(a, b, size, stride, size // 2), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))


class Recurrent(nn.Module):
    """One recurrent layer and a linear one on its last state."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.last = kind(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


class Encoder(nn.Module):
    """PyTorch's own encoder layers over embeddings of tokens, and a head on the mean."""

    def __init__(self, layers: int, width: int, words: int = 1000, length: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True)
        self.words, self.places = (
            nn.Embedding(words, width),
            nn.Parameter(0.02 * torch.randn(length, width)),
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.words(x) + self.places).mean(1))


class Block(nn.Module):
    """A layer of a transformer that normalizes first, written by hand."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        _, length, width = x.shape
        parts = self.inward(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.view(-1, length, self.heads, width // self.heads) for p in parts)
        q, k, v = (p.transpose(1, 2) for p in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.outward(mixed.transpose(1, 2).reshape(-1, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, layers: int, width: int, words: int = 1000, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32, True) for _ in range(layers)))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.last(self.norm(self.blocks(h)))


class ViT(nn.Module):
    """ViT-tiny on images of 64 x 64 in patches of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 192))
        self.places = nn.Parameter(0.02 * torch.randn(65, 192))
        self.blocks = nn.Sequential(*(Block(192, 3, False) for _ in range(12)))
        self.norm, self.last = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(h.shape[0], -1, -1), h], 1) + self.places
        return self.last(self.norm(self.blocks(h))[:, 0])


class SentenceEncoder(nn.Module):
    """MiniLM with the weights of its published file, and one vector for each row of tokens."""

    def __init__(self) -> None:
        super().__init__()
        proto = sentence_encoder()
        arrays = og.graph.get_train_initializer(proto)
        self.named = {t.names[-1]: t.name for t in og.trainable(proto).trained}
        self.tensors = nn.ParameterList(torch.tensor(arrays[n][0]) for n in self.named.values())

    def forward(self, x: Tensor) -> Tensor:
        return sentence_vectors(dict(zip(self.named, self.tensors, strict=True)), x)


@dataclass(frozen=True)
class MiniLM(Network):
    """The job whose ONNX file is a published one."""

    def exported(self, module: nn.Module) -> onnx.ModelProto:
        tensors = zip(module.named.values(), module.tensors, strict=True)
        weights = {name: tensor.detach().numpy() for name, tensor in tensors}
        return og.graph.replace_initializers_into_onnx(sentence_encoder(), weights)

    def fed(self, X: np.ndarray) -> Any:
        return {"input_ids": X, "attention_mask": np.ones_like(X)}


def sentence_encoder() -> onnx.ModelProto:
    return og.graph.select_model_inputs_outputs(onnx.load(fetched("minilm")), outputs=["461"])


NETWORKS = {
    "linear": Network(lambda: mlp(100, 1), 15, (100,), 0, (1,)),
    "mlp 784-128-10": Network(lambda: mlp(784, 128, 10), 64, (784,)),
    "mlp 784-512-512-10": Network(lambda: mlp(784, 512, 512, 10), 128, (784,)),
    "mlp 1024-2048-2048-1000": Network(
        lambda: mlp(1024, 2048, 2048, 1000), 256, (1024,), labels=1000
    ),
    "lenet-5": Network(lenet, 32, (1, 28, 28)),
    "resnet-20": Network(resnet20, 32, (3, 32, 32), rate=1e-4, train_norm=True),
    "resnet-18 frozen": Network(resnet18, 8, (3, 64, 64)),
    "mobilenet-v2": Network(mobilenet, 16, (3, 64, 64)),
    "u-net": Network(UNet, 8, (3, 64, 64), 0, (1, 64, 64)),
    "conv 1-d": Network(waves, 16, (1, 5000)),
    "lstm": Network(lambda: Recurrent(nn.LSTM), 32, (50, 64)),
    "gru": Network(lambda: Recurrent(nn.GRU), 32, (50, 64)),
    "encoder 2x128": Network(lambda: Encoder(2, 128), 16, (64,), tokens=1000, adam=True, rate=1e-4),
    "encoder 4x256": Network(lambda: Encoder(4, 256), 8, (64,), tokens=1000, adam=True, rate=1e-4),
    "minilm": MiniLM(SentenceEncoder, 8, (64,), 0, (384,), 30522, adam=True, rate=1e-5),
    "decoder 4x256": Network(
        lambda: Decoder(4, 256), 8, (64,), 1000, (64,), tokens=1000, adam=True
    ),
    "vit-tiny": Network(ViT, 4, (3, 64, 64), adam=True, rate=1e-4),
}
