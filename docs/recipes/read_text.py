"""
Read text: your font, and a new character
=========================================

A published recognizer (PP-OCRv4: 6,623 characters, 11 MB) reads most print, but does not know the
£: on prepayment meters it leaves it out, and takes some digits for others. It is trained on such
displays, with a unit for the £ in its last layer. What comes out is the same kind of file, which
RapidOCR reads by the dictionary in its metadata.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from published import fetched  # published.py: on the page Recipes

import onnxgrad as og

# the ends of the segments of a digit, and the segments that are lit
ENDS = dict(a="0010", b="1011", c="1112", d="0212", e="0102", f="0001", g="0111")  # noqa: C408
LIT = "abcdef bc abged abgcd fgbc afgcd afgedc abc abcdefg abcdfg".split()
FONT = ImageFont.truetype(findfont("DejaVu Sans"), 36)


def display(rng):
    """Return an image of a credit, as £12.75, and its text."""
    text = f"£{rng.integers(1, 200)}.{rng.integers(100):02d}"
    image = Image.new("L", (24 * len(text) + 20, 56), paper := int(rng.integers(150, 256)))
    pen, ink = ImageDraw.Draw(image), int(rng.integers(90))
    for c, left in zip(text, range(10, 500, 24), strict=False):
        for segment in LIT[int(c)] if c.isdigit() else ():
            x, y, u, v = (14 * int(e) + (left, 12)[i % 2] for i, e in enumerate(ENDS[segment]))
            pen.line((x, y, u, v), ink, 3)
        pen.text((left, 3), "" if c.isdigit() else c, ink, FONT)
    slanted = image.transform(image.size, 0, (1, rng.uniform(0, 0.2), -5, 0, 1, 0), fillcolor=paper)
    return np.uint8(np.clip(slanted + rng.normal(0, 12, image.size[::-1]), 0, 255)), text


# %%
# The rows are pairs of images and texts here; a label file of PaddleOCR is passed as its path. All
# characters that the model knows keep their weights, and the last layer alone is trained.

rng = np.random.default_rng(0)
train, others = ([display(rng) for _ in range(n)] for n in (64, 32))
task = og.tasks.ctc.TextRecognition(fetched("paddleocr-rec"), train, extend=True)
images = [image for image, _ in others]
before = task.predict(task.model, images)
trainer = task.trainer(train="head.*", learning_rate=1e-2)
rates = [trainer.evaluate(task.read(others))["cer"]]
trainer.fit(task.data, epochs=4, batch_size=16)
rates.append(trainer.evaluate(task.read(others))["cer"])
print("character error rate before and after:", np.round(rates, 3))
assert rates[1] < 0.05 < rates[0]
axes, after = plt.subplots(4, 2, figsize=(8, 5))[1].flat, task.predict(trainer, images)
for ax, image, (old, _), (new, _) in zip(axes, images, before, after, strict=False):
    ax.imshow(image, cmap="gray", vmin=0, vmax=255)
    ax.set_title(f"{old!r}, after training {new!r}")
    ax.axis("off")
plt.show()
