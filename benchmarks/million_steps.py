"""Whether memory and sessions stay the same in a training of a million small steps.

`python benchmarks/million_steps.py` trains a tiny network by `Trainer` with callbacks that are
called after every tenth step, evaluations and checkpoints now and then. It samples the resident
memory, fits a line to the samples after the warm-up, and prints its slope with the standard error,
the range, and the number of sessions of onnxruntime at the end of the first tenth and at the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxgrad as og

ROWS, BATCH = 1 << 16, 16  # 4096 steps an epoch
EVERY = 10  # steps of a call of the runtime


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traced() -> int:
    """Return the bytes of living objects that Python and numpy allocated since the first call."""
    if not tracemalloc.is_tracing():  # not before, as it slows down building
        tracemalloc.start()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class Sampler(og.callbacks.Callback):
    """Samples the memory, asks for evaluations, and ends training after `steps`."""

    def __init__(self, steps: int, every: int, measure: Callable[[], int]) -> None:
        self.every_steps, self.steps, self.measure = EVERY, steps, measure
        self.every, self.samples = every, np.ones((steps // every, 2))  # steps, bytes
        self.sessions: list[int] = []

    def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
        assert np.isfinite(trainer.progress.loss)
        if state.step % self.every == 0:
            self.samples[state.step // self.every - 1] = state.step, self.measure()
        if state.step % (self.steps // 10) == 0:
            control.evaluate = True
            self.sessions.append(Sessions.count)
        control.stop |= state.step >= self.steps


class Sessions:
    """Counts the sessions of onnxruntime that are created."""

    count = 0

    @classmethod
    def counted(cls) -> None:
        """Count from now on."""
        create = ort.InferenceSession.__init__

        def counting(self: Any, *arguments: Any, **options: Any) -> None:
            cls.count += 1
            create(self, *arguments, **options)

        ort.InferenceSession.__init__ = counting  # type: ignore[method-assign]


def train(steps: int, every: int, measure: Callable[[], int], folder: Path) -> Sampler:
    """Train for a number of steps; return the samples of the memory every so many steps."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        line (float[N, 4] x) => (float[N, 1] y) <float[4, 8] w = {
            0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4, 0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4,
            0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4, 0.1, -0.1, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4
        }, float[8, 1] v = {0.1, 0.2, 0.3, 0.4, -0.1, -0.2, -0.3, -0.4}> {
            a = MatMul(x, w)  h = Tanh(a)  y = MatMul(h, v)
        }""")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 4)).astype(np.float32)
    y = np.sin(X.sum(axis=1, keepdims=True))
    sampler = Sampler(steps, every, measure)
    trainer = og.Trainer(
        model,
        "squared_error",
        learning_rate=og.schedules.cosine(1e-3, warmup=100),
        dropout={"h": 0.1},
        metrics=["mae"],
        callbacks=[
            sampler,
            og.EarlyStopping(patience=1 << 30),
            og.callbacks.History(folder / "history.csv"),
            og.Checkpoint(folder / "checkpoints", every_steps=steps // 20),
        ],
    )
    epochs = -(-steps * BATCH // ROWS)
    trainer.fit(X, y, epochs=epochs, batch_size=BATCH, validation=(X[:256], y[:256]))
    assert trainer.state.step == steps
    print(f"history: {len(trainer.history)} entries in {epochs} epochs and 10 more evaluations")
    return sampler


def slope(samples: np.ndarray) -> tuple[float, float]:
    """Return the slope of a line through [steps, bytes], and its standard error.

    The error is that of means of ten parts, as neighboring samples depend on each other.
    """
    parts = np.array([part.mean(axis=0) for part in np.array_split(samples, 10)])
    x, y = parts.T - parts.mean(axis=0)[:, None]
    line = (x @ y) / (x @ x)
    rest = y - line * x
    return line, np.sqrt(rest @ rest / (len(x) - 2) / (x @ x))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    given = parser.parse_args()
    Sessions.counted()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sampler = train(given.steps, max(EVERY, given.steps // 1000), resident, Path(folder))
    samples = sampler.samples[len(sampler.samples) // 10 :]
    line, error = slope(samples)
    memory = samples[:, 1] / 1e6
    print(f"steps: {given.steps} in {time.monotonic() - start:.0f} s")
    print(
        f"resident MB: {memory[0]:.2f} to {memory[-1]:.2f}, {memory.min():.2f} {memory.max():.2f}"
    )
    print(f"slope: {line:.4f} bytes a step, standard error {error:.4f}")
    print(f"sessions after each tenth: {sampler.sessions}, at the end {Sessions.count}")


if __name__ == "__main__":
    main()
