"""Epochs of published models with new heads and adapters, with and without `fit(cache=True)`.

    python benchmarks/frozen_cache.py [NAME ...]

For each model: seconds of an epoch without a cache, of the pass that computes the frozen layers, of
the second and later epochs with it, and of an epoch in PyTorch whose frozen layers were computed
before, by `OnnxModule` with the rest of the same file; bytes of the cache; and the largest
difference of a weight after three epochs with and without it. The rows are random.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from published import CACHE, fetch, models

import onnxgrad as og
from onnxgrad.callbacks import Callback
from onnxgrad.graph import select_model_inputs_outputs
from onnxgrad.torch import OnnxModule

CLASSES, BATCH, EPOCHS = 5, 16, 3
rng = np.random.default_rng(0)


@dataclass
class Case:
    """A model to train: its rows, its weights and how many rows there are."""

    model: onnx.ModelProto
    data: dict[str, np.ndarray]
    train: str | list[str]
    rows: int


def published(name: str) -> onnx.ModelProto:
    return onnx.load(fetch(next(m for m in models() if m.name == name), CACHE))


def images(rows: int) -> np.ndarray:
    return rng.uniform(0, 255, (rows, 224, 224, 3)).astype(np.float32)


def nsfw_head() -> Case:
    model = og.replace_head(published("opennsfw"), CLASSES)
    return Case(model, {"input:0": images(64)}, "head.*", 64)


def nsfw_adapters() -> Case:
    """Return a residual network with adapters in its last convolutions, and a new head."""
    model = og.replace_head(published("opennsfw"), CLASSES)
    last = [t.name for t in og.trainable(model) if t.trains and len(t.shape) == 4][-3:]
    return Case(og.add_lora(model, last, rank=4), {"input:0": images(64)}, ["*lora*", "head.*"], 64)


def texts(rows: int, length: int = 64) -> dict[str, np.ndarray]:
    mask = np.arange(length) < rng.integers(8, length, (rows, 1))
    ids = rng.integers(1000, 20000, (rows, length)) * mask
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


def minilm_head() -> Case:
    model = published("minilm")
    encoder = select_model_inputs_outputs(model, ["onnx::Shape_422"])
    model = og.add_head(encoder, CLASSES, at="onnx::Shape_422", pool="mean", mask="attention_mask")
    return Case(model, texts(256), "head.*", 256)


def minilm_adapters() -> Case:
    """Return an encoder of three layers with adapters in its last layer, and a new head."""
    case = minilm_head()
    last = [t.name for t in og.trainable(case.model) if t.trains and len(t.shape) == 2][-7:-1]
    adapted = og.add_lora(case.model, last, rank=4)
    return Case(adapted, case.data, ["*lora*", "head.*"], 256)


def magika_head() -> Case:
    model = og.replace_head(published("magika"), CLASSES)
    return Case(model, {"bytes": rng.integers(0, 257, (256, 2048)).astype(np.int32)}, "head.*", 256)


def dnsmos_head() -> Case:
    """Return the last layers of a model of speech quality, for five classes."""
    model = og.replace_head(published("dnsmos"), CLASSES)
    return Case(model, {"input_1": rng.normal(0, 0.1, (32, 144160)).astype(np.float32)},
                "head.*", 32)  # fmt: skip


def vgg_head() -> Case:
    """Return VGG-16 with random weights, which no wheel has."""
    layers: list[Any] = []
    channels = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if not width:
            layers.append(torch.nn.MaxPool2d(2))
            continue
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.ReLU()]
        channels = width
    layers += [torch.nn.Flatten(), torch.nn.Linear(512 * 49, 4096), torch.nn.ReLU()]
    layers += [torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, CLASSES)]
    module = torch.nn.Sequential(*layers).eval()
    path = CACHE / "vgg16.onnx"
    torch.onnx.export(
        module, (torch.zeros(1, 3, 224, 224),), str(path), dynamo=False, input_names=["x"],
        output_names=["y"], dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
    )  # fmt: skip
    model = og.replace_head(path, CLASSES)
    x = rng.normal(size=(32, 3, 224, 224)).astype(np.float32)
    return Case(model, {"x": x}, "head.*", 32)


CASES: dict[str, Callable[[], Case]] = {
    "OpenNSFW (ResNet-50), head": nsfw_head,
    "OpenNSFW (ResNet-50), head and LoRA": nsfw_adapters,
    "MiniLM-L3, head": minilm_head,
    "MiniLM-L3, head and LoRA": minilm_adapters,
    "Magika, head": magika_head,
    "DNSMOS, head": dnsmos_head,
    "VGG-16, head": vgg_head,
}


class EpochTimes(Callback):
    """Records when each epoch begins and ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = self.first = 0.0

    def on_epoch_begin(self, trainer: Any, state: Any, control: Any) -> None:
        self.began = time.perf_counter()
        self.first = self.first or self.began

    def on_epoch_end(self, trainer: Any, state: Any, control: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


class CacheMessages(logging.Handler):
    """Keeps the message that says what a cache takes."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("cache: "):
            self.text = record.getMessage()


def train(case: Case, labels: np.ndarray, cache: bool) -> tuple[og.Trainer, EpochTimes, float]:
    """Return the trainer after three epochs, the times of epochs, and the time before the first."""
    times = EpochTimes()
    trainer = og.Trainer(
        case.model, "cross_entropy", train=case.train, learning_rate=1e-3, callbacks=[times]
    )
    start = time.perf_counter()
    trainer.fit(case.data, labels, epochs=EPOCHS, batch_size=BATCH, cache=cache)
    return trainer, times, times.first - start


def seconds_of_pytorch(
    case: Case, cuts: list[str], labels: np.ndarray, trained: list[str]
) -> float:
    """Return the time of an epoch of PyTorch on frozen results that were computed before."""
    frozen = select_model_inputs_outputs(case.model, cuts)
    running = ort.InferenceSession(frozen.SerializeToString())
    fed = {x.name: case.data[x.name] for x in running.get_inputs()}
    parts = [
        running.run(cuts, {n: a[i : i + BATCH] for n, a in fed.items()})
        for i in range(0, case.rows, BATCH)
    ]
    kept = [torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True)]
    values = dict(zip(cuts, kept, strict=True))
    values |= {name: torch.from_numpy(array) for name, array in case.data.items()}
    output = case.model.graph.output[0].name
    rest = select_model_inputs_outputs(case.model, [output], [*cuts, *case.data])
    module = OnnxModule(rest, trainable=trained)
    ordered = [values[name] for name in module.input_names]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    targets, seconds = torch.from_numpy(labels), []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        for batch in torch.randperm(case.rows).split(BATCH):
            optimizer.zero_grad()
            scores = module(*(v[batch] for v in ordered))
            torch.nn.functional.cross_entropy(scores, targets[batch]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def main() -> None:
    messages = CacheMessages()
    logging.getLogger("onnxgrad").addHandler(messages)
    print("| model | rows | epoch without | first pass | epoch with | PyTorch | cache | weights |")
    for name, make in CASES.items():
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        case = make()
        labels = rng.integers(0, CLASSES, case.rows)
        plain, without, _ = train(case, labels, False)
        kept, with_cache, before = train(case, labels, True)
        before_weights, after = plain.state.weights, kept.state.weights
        difference = max(float(np.abs(after[n] - a).max()) for n, a in before_weights.items())
        cuts = list(kept._call.recipe.cut.axes)
        peer = seconds_of_pytorch(case, cuts, labels, list(after))
        nbytes = messages.text.partition(" take ")[2].partition(" bytes")[0]
        times = median(without.seconds), before, median(with_cache.seconds[1:]), peer
        shown = " | ".join(f"{seconds:.3g} s" for seconds in times)
        print(f"| {name} | {case.rows} | {shown} | {nbytes} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
