"""Draw the picture of the landing page: `python docs/before_after.py` trains for some ten minutes.

A published reader of printed text reads handwritten numbers, before and after it is trained on
others. Writes `docs/images/before-after.png`. The numbers are put together from the digits of
scikit-learn; those that are read in the end are of digits that it was not trained on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

from published import fetched

import onnxgrad as og

RIGHT, WRONG = "#1a7f37", "#cf222e"
Numbers = list[tuple[np.ndarray, str]]


def numbers(count: int, first: int, last: int) -> Numbers:
    """Return images of numbers and their texts, of some of the digits of scikit-learn."""
    digits, rng = load_digits(), np.random.default_rng(first)
    rows = []
    for chosen in rng.integers(first, last, (count, 6)):
        strip = np.hstack([digits.images[i][:, 1:7] for i in chosen]).repeat(5, 0).repeat(5, 1)
        ink = np.pad(np.uint8(255 - 15 * strip), 4, constant_values=255)
        rows.append((ink, "".join(map(str, digits.target[chosen]))))
    return rows


def train(others: Numbers) -> tuple[list[str], list[str], float]:
    """Return what the published and the trained reader read, and how many minutes it took."""
    task = og.tasks.ctc.TextRecognition(fetched("paddleocr-rec"), numbers(480, 0, 1400))
    images = [image for image, _ in others]
    before = [text for text, _ in task.predict(task.model, images)]
    began = time.monotonic()
    trainer = task.trainer(learning_rate=og.schedules.cosine(1e-4, warmup=0.1), clip_norm=1.0)
    trainer.fit(task.data, epochs=4, batch_size=16)
    minutes = (time.monotonic() - began) / 60
    return before, [text for text, _ in task.predict(trainer, images)], minutes


def draw(others: Numbers, before: list[str], after: list[str], path: Path) -> None:
    """Draw the first eight numbers, with what was read before and after."""
    figure, axes = plt.subplots(4, 2, figsize=(5.4, 4.6), layout="constrained")
    for ax, (image, text), *read in zip(axes.flat, others, before, after, strict=False):
        ax.imshow(image, cmap="gray", aspect="equal")
        ax.axis("off")
        for y, name, found in zip((-0.14, -0.38), ("before", "after"), read, strict=True):
            mark, color = ("✓", RIGHT) if found == text else ("✗", WRONG)
            line = f"{name:>6}: {found} {mark}"
            ax.text(
                0.5, y, line, color=color, transform=ax.transAxes, ha="center", family="monospace"
            )
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train, print how many numbers were read rightly, and draw."""
    others = numbers(100, 1400, 1797)
    before, after, minutes = train(others)
    for name, found in (("before", before), ("after", after)):
        right = sum(text == read for (_, text), read in zip(others, found, strict=True))
        print(f"{name}: {right} of {len(others)} numbers are right")
    print(f"{minutes:.1f} minutes of training")
    draw(others, before, after, DOCS / "images" / "before-after.png")


if __name__ == "__main__":
    main()
