"""Memory that steps fill is copied into huge pages, and keeps its contents."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.runtime.huge_pages import HugePages
from onnxgrad.training.run import runner
from tests.support.models import parse_model

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LENGTH = 1 << 23
if not SETTING.exists() or "[madvise]" not in SETTING.read_text():
    pytest.skip("this system gives no huge pages on request", allow_module_level=True)


def filled_memory(advice: int = mmap.MADV_DONTDUMP) -> tuple[mmap.mmap, np.ndarray]:
    """Return memory for which NumPy does not ask for huge pages, and an array in it.

    `advice`: advice that no memory beside it has, with which Linux would join it.
    """
    memory = mmap.mmap(-1, LENGTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    array = np.frombuffer(memory, np.int64)
    array[:] = np.arange(len(array))
    return memory, array


def bytes_in_huge_pages(array: np.ndarray) -> int:
    """Return the bytes of huge pages in the range of addresses in which an array lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            inside = begin <= array.ctypes.data < end
        elif inside and first == "AnonHugePages:":
            return int(rest[0]) * 1024
    raise AssertionError("the array lies in no range")


@pytest.fixture
def copies() -> None:
    """Skip a test where nothing can be copied, as by Linux before 6.1."""
    pages, (_memory, _array) = HugePages(share=1.0), filled_memory()
    pages.after_run(60.0)
    if not pages.copied_bytes:
        pytest.skip("Linux has copied nothing into huge pages")


@pytest.mark.usefixtures("copies")
def test_memory_filled_after_it_was_made_is_copied():
    pages, (_memory, array) = HugePages(share=1.0), filled_memory()
    assert not bytes_in_huge_pages(array)
    pages.after_run(60.0)
    assert pages.copied_bytes >= LENGTH // 2  # the ends fit no huge page
    assert bytes_in_huge_pages(array) >= LENGTH // 2
    np.testing.assert_array_equal(array, np.arange(len(array)))


@pytest.mark.usefixtures("copies")
def test_memory_filled_before_stays_in_its_pages():
    (_before, array), pages = filled_memory(mmap.MADV_DONTFORK), HugePages(share=1.0)
    _after, other = filled_memory()
    pages.after_run(60.0)
    assert bytes_in_huge_pages(other)
    assert not bytes_in_huge_pages(array)


def test_short_runs_copy_nothing():
    pages = HugePages()
    _memory, array = filled_memory()
    for _ in range(30):
        pages.after_run(0.1)
    assert not pages.copied_bytes
    assert not bytes_in_huge_pages(array)


def test_copies_take_their_share_of_the_time():
    pages = HugePages(share=1e-9)
    _memory, _array = filled_memory()
    pages.after_run(3600.0)
    assert not pages.copied_bytes


@pytest.mark.usefixtures("copies")
def test_training_gives_the_same_weights(monkeypatch):
    """An MLP whose activations fill huge pages trains to equal bits, copied and not."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("steps on one thread copy nothing")
    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.05, (64, 2048)).astype(np.float32)
    v = rng.normal(0, 0.05, (2048, 3)).astype(np.float32)
    model = parse_model(
        "f (float[N,64] x) => (float[N,3] y) { a = MatMul(x, w)  b = Tanh(a)  y = MatMul(b, v) }",
        w=w, v=v,
    )  # fmt: skip
    X, y = rng.normal(size=(2048, 64)).astype(np.float32), rng.integers(0, 3, 2048)
    made: list[HugePages] = []

    def greedy() -> HugePages:
        made.append(HugePages(share=100.0))
        return made[-1]

    def trained() -> dict[str, np.ndarray]:
        trainer = og.Trainer(model, "cross_entropy", optimizer="adam", learning_rate=0.01)
        return trainer.fit(X, y, epochs=6, batch_size=2048).state.weights

    plain = trained()
    monkeypatch.setattr(runner, "HugePages", greedy)
    copied = trained()
    assert made
    assert sum(pages.copied_bytes for pages in made)
    for name, array in plain.items():
        np.testing.assert_array_equal(copied[name], array)


def test_an_interrupt_of_copies_drops_the_step(monkeypatch):
    """Weights and the count of steps are as before the step whose copies were interrupted."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("steps on one thread copy nothing")

    class Interrupted(HugePages):
        runs = 0

        def after_run(self, seconds: float) -> None:
            Interrupted.runs += 1
            if Interrupted.runs == 3:
                raise KeyboardInterrupt

    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.05, (64, 1024)).astype(np.float32)
    v = rng.normal(0, 0.05, (1024, 3)).astype(np.float32)
    model = parse_model(
        "f (float[N,64] x) => (float[N,3] y) { a = MatMul(x, w)  b = Tanh(a)  y = MatMul(b, v) }",
        w=w, v=v,
    )  # fmt: skip
    X, y = rng.normal(size=(256, 64)).astype(np.float32), rng.integers(0, 3, 256)

    def new_trainer() -> og.Trainer:
        return og.Trainer(model, "cross_entropy", optimizer="adam", learning_rate=0.01)

    plain = new_trainer()
    for _ in range(2):
        plain.partial_fit(X, y, batch_size=256, shuffle=False)
    monkeypatch.setattr(runner, "HugePages", Interrupted)
    trainer = new_trainer()
    for _ in range(2):
        trainer.partial_fit(X, y, batch_size=256, shuffle=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.partial_fit(X, y, batch_size=256, shuffle=False)
    assert trainer.state.step == plain.state.step == 2
    for name, array in plain.state.weights.items():
        np.testing.assert_array_equal(trainer.state.weights[name], array)
