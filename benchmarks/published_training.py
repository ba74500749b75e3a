"""Trains published models by `Trainer`, as their files are: 20 steps on random data each.

    python benchmarks/published_training.py [NAME ...]

The loss is that of `Trainer.evaluate` before and after. A structure is unchanged if the trained
model is the file but for the values of trained tensors, each of which moved.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from published import CACHE, Feed, Published, UnavailableError, fetch, models, run, session

import onnxgrad as og
from onnxgrad.model import weights as constants

STEPS = 20


@dataclass
class Recipe:
    """The loss, the data and the options that a model needs.

    - `X`, `y`: as `fit` takes them.
    - `options`: arguments of `Trainer` beside the loss.
    """

    loss: Any
    X: Any
    y: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        return len(self.X) if isinstance(self.X, list) else 1


RECIPES: dict[str, Callable[[Feed, Feed, np.random.Generator], Recipe]] = {}
Outputs = Feed


def recipe(name: str) -> Callable:
    def note(write: Callable) -> Callable:
        RECIPES[name] = write
        return write

    return note


def rows(feed: Feed, count: int) -> Feed:
    """Return `count` rows that are like the only one, but each with other noise."""
    rng = np.random.default_rng(5)
    copies = {n: np.concatenate([x] * count) for n, x in feed.items()}
    return {
        n: x * rng.uniform(0.5, 1, x.shape).astype(x.dtype) if x.dtype.kind == "f" else x
        for n, x in copies.items()
    }


def moved(y: np.ndarray) -> np.ndarray:
    """Return targets near the outputs of the model."""
    return 0.9 * y + 0.1 * y.std()


def drawn(rng: np.random.Generator, *shape: int, share: float = 0.5) -> np.ndarray:
    """Return labels 0 and 1."""
    return (rng.random(shape) < share).astype(np.float32)


@recipe("basic-pitch")
def _(feed, outputs, rng):
    """Three outputs, each a probability of notes."""
    labels = {name: drawn(rng, *y.shape, share=0.1) for name, y in outputs.items()}
    return Recipe(dict.fromkeys(outputs, "bce"), feed, labels)


@recipe("spindle")
def _(feed, outputs, rng):
    """Boxes, and scores of a segmentation."""
    y = {name: drawn(rng, *y.shape, share=0.1) for name, y in outputs.items()}
    return Recipe({"detection": "mse", "segmentation": "bce"}, feed, y)


@recipe("ddddocr")
def _(feed, outputs, rng):
    """A fixed batch of one row."""
    return Recipe("mse", feed, moved(outputs["output"]), {"learning_rate": 1e-4})


@recipe("nudenet")
def _(feed, outputs, rng):
    x = rows(feed, 2)
    target = np.concatenate([moved(outputs["output0"])] * 2)
    return Recipe("mse", x, target, {"learning_rate": 1e-4})


def _states(rng, feed, carry, loss, label):
    """A stream: the states of a batch are those of the batch before."""
    shape = label.shape
    batches = []
    for _ in range(4):
        x = 0.1 * rng.standard_normal(feed["input"].shape)
        zeros = {name: np.zeros_like(feed[name]) for name in carry}
        batches.append({**feed, **zeros, "input": x, "label": drawn(rng, *shape)})
    return Recipe(loss, batches, None, {"carry": carry})


@recipe("silero-vad-v6")
def _(feed, outputs, rng):
    label = outputs["speech_probs"]
    return _states(rng, feed, {"h": "hn", "c": "cn"}, {"speech_probs": "bce"}, label)


@recipe("silero-vad")
def _(feed, outputs, rng):
    """The sampling rate is a single number, and the state has its rows on axis 1."""
    return _states(rng, feed, {"state": "stateN"}, {"output": "bce"}, outputs["output"])


@recipe("rivagan")
def _(feed, outputs, rng):
    return Recipe("mse", feed, moved(outputs["output"]))


@recipe("magika")
def _(feed, outputs, rng):
    """Softmax of 214 classes."""
    return Recipe("cross_entropy", rng.integers(0, 257, (4, 2048)), rng.integers(0, 214, 4))


@recipe("opennsfw")
def _(feed, outputs, rng):
    return Recipe("cross_entropy", rows(feed, 2), np.array([0, 1]))


@recipe("paddleocr")
def _(feed, outputs, rng):
    """Text or not, for every pixel."""
    y = outputs["sigmoid_0.tmp_0"]
    return Recipe("bce", feed, drawn(rng, *y.shape, share=0.3))


@recipe("paddleocr-rec")
def _(feed, outputs, rng):
    """Lines of five characters, by CTC."""
    return Recipe("ctc", rows(feed, 2), rng.integers(1, 6625, (2, 5)))


@recipe("aecmos")
def _(feed, outputs, rng):
    """The file states the output as the rows, and has two scores: so the label has no rows."""
    options = {"batch_axes": {"h0": None, "label": None}, "learning_rate": 1e-5}
    return Recipe("mse", feed, outputs["output"] + 0.5, options)


@recipe("dnsmos")
def _(feed, outputs, rng):
    return Recipe("mse", rows(feed, 2), rng.uniform(1, 5, (2, 3)))


@recipe("minilm")
def _(feed, outputs, rng):
    """One of two float outputs: the embedding of the sentence."""
    return Recipe({"461": "mse"}, feed, moved(outputs["461"]), {"learning_rate": 1e-4})


@dataclass
class Result:
    """What `train` found out."""

    recipe: Recipe
    before: float
    after: float
    trained: int
    seconds: float  # a step
    unchanged: bool
    warned: list[str]


def train(model: Published, cache: Path) -> Result:
    """Train a model for 20 steps."""
    path = fetch(model, cache)
    proto, feed = onnx.load(path), model.feed()
    one = RECIPES[model.name](feed, run(session(proto), feed), np.random.default_rng(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = og.Trainer(path, one.loss, **one.options)
        before = trainer.evaluate(one.X, one.y)["loss"]
        start = time.perf_counter()
        trainer.fit(one.X, one.y, epochs=STEPS // one.batches)
        seconds = (time.perf_counter() - start) / STEPS
        assert trainer.state.step == STEPS
        after = trainer.evaluate(one.X, one.y)["loss"]
    unchanged = same_structure(proto, trainer.model, trainer.trained)
    warned = [str(w.message) for w in caught]
    return Result(one, before, after, len(trainer.trained), seconds, unchanged, warned)


def same_structure(before: onnx.ModelProto, after: onnx.ModelProto, trained: list[str]) -> bool:
    """Return whether the models are equal but for the trained tensors, each of which moved."""
    old, new = ({r.name: r for r in constants.constant_refs(p)} for p in (before, after))
    if not all(name in new for name in trained):
        return False
    if any(np.array_equal(old[n].array(), new[n].array()) for n in trained):
        return False
    zeros = {n: np.zeros_like(old[n].array()) for n in trained}
    one, two = (constants.replace_constants(p, zeros) for p in (before, after))
    return one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)


def main(names: list[str]) -> None:
    print("model          loss before   after  tensors  s/step  unchanged  needed")
    for model in models():
        if names and model.name not in names:
            continue
        try:
            r = train(model, CACHE)
        except UnavailableError as e:
            print(f"{model.name:<14} {e}")
            continue
        needed = ", ".join(
            f"{k}={v}" for k, v in {"loss": r.recipe.loss, **r.recipe.options}.items()
        )
        print(
            f"{model.name:<14} {r.before:11.4f} {r.after:7.4f} {r.trained:8} {r.seconds:7.2f}  "
            f"{'yes' if r.unchanged else 'NO':<9}  {needed}",
            *r.warned,
            sep="\n    ",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
