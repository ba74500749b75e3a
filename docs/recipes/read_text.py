"""
Read text: a recognizer for your font, and a new character
==========================================================

A published recognizer (PP-OCRv4: 6,623 characters, 11 MB) reads most print, but its dictionary has no
£: on a prepayment meter it leaves it out, and takes some digits for others. It is trained on such
displays, with a new unit in its last layer. What comes out is the same kind of file, which RapidOCR
reads by the dictionary in its metadata.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from published import fetched

# %%
# The displays are drawn: digits of seven segments, from the top, with another slant and contrast in
# each. Yours would be in files: a list of paths and texts, as PaddleOCR has it, or a folder.

SEGMENTS = {"0": "abcdef", "1": "bc", "2": "abged", "3": "abgcd", "4": "fgbc", "5": "afgcd"}
SEGMENTS |= {"6": "afgedc", "7": "abc", "8": "abcdefg", "9": "abcdfg"}
FONT = ImageFont.truetype(findfont("DejaVu Sans"), 36)
ENDS = {"a": (0, 0, 1, 0), "b": (1, 0, 1, 1), "c": (1, 1, 1, 2), "d": (0, 2, 1, 2)}
ENDS |= {"e": (0, 1, 0, 2), "f": (0, 0, 0, 1), "g": (0, 1, 1, 1)}


def display(rng):
    """Return an image of a credit, as £12.75, and its text."""
    text = f"£{rng.integers(1, 200)}.{rng.integers(100):02d}"
    ink, paper = (int(v) for v in (rng.integers(0, 90), rng.integers(150, 256)))
    image = Image.new("L", (24 * len(text) + 20, 56), paper)
    pen, left = ImageDraw.Draw(image), 10
    for c in text:
        if c == "£":
            pen.text((left, 3), c, ink, FONT)
        if c == ".":
            pen.rectangle((left, 42, left + 4, 46), ink)
        for s in SEGMENTS.get(c, ""):
            (x, u), (y, v) = (np.array(ENDS[s][i::2]) * (14, 17)[i] + (left, 10)[i] for i in (0, 1))
            gap = (3 * np.sign(u - x), 3 * np.sign(v - y))
            pen.line((x + gap[0], y + gap[1], u - gap[0], v - gap[1]), ink, 3)
        left += 12 if c == "." else 26
    slant = rng.uniform(0, 0.25)
    image = image.transform(image.size, Image.Transform.AFFINE, (1, slant, -28 * slant, 0, 1, 0),
                            Image.Resampling.BILINEAR, fillcolor=paper)  # fmt: skip
    noisy = np.clip(image + rng.normal(0, 12, image.size[::-1]), 0, 255)
    return noisy.astype(np.uint8), text


rng = np.random.default_rng(0)
train, others = ([display(rng) for _ in range(n)] for n in (64, 32))
images, texts = zip(*others, strict=True)

# %%
# `extend=True` gives characters that the dictionary lacks a unit; all old ones keep their weights.
# The last layer alone is trained, in seconds.

file = fetched("paddleocr-rec")
before = og.tasks.ctc.TextRecognition(file).predict(file, images)
task = og.tasks.ctc.TextRecognition(file, train, extend=True)
print(len(task.classes), "classes; new:", task.classes[-2])
trainer = task.trainer(train="head.*", learning_rate=3e-3)
untrained = trainer.evaluate(task.read(others))
trainer.fit(task.data, epochs=4, batch_size=16)
trained = trainer.evaluate(task.read(others))
print(f"character error rate: {untrained['cer']:.3f}, after training {trained['cer']:.3f}")
trainer.save("meter.onnx")
after = task.predict("meter.onnx", images)
assert trained["cer"] < 0.05 < untrained["cer"]

figure, axes = plt.subplots(4, 2, figsize=(8, 5))
for ax, image, text, old, new in zip(axes.flat, images, texts, before, after, strict=False):
    ax.imshow(image, cmap="gray", vmin=0, vmax=255)
    ax.set_title(f"{text}: read as {old[0]!r}, now {new[0]!r}", fontsize=9)
    ax.axis("off")
plt.tight_layout()
plt.show()
