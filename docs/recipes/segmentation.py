"""
Find the pixels of barcodes: segmentation
=========================================

The text detector of PaddleOCR (DBNet, Liao et al. 2020, arXiv:1911.08947) says for every pixel
whether it belongs to text. Here it learns to find barcodes instead, and to leave text alone, from
48 drawn pages with masks. The file that comes out has the nodes of the published one, so what runs
that file finds barcodes as fast.
"""

from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw
from published import fetched

import onnxgrad as og

rng = np.random.default_rng(0)
root = Path(mkdtemp())
WORDS = "the quick brown fox jumps over a lazy dog near River Seine No 17".split()

# %%
# A page has lines of words and two barcodes. Its mask is a picture of the same name, with the
# number of the class of each pixel: 1 in barcodes, 0 elsewhere.


def draw(folder: Path, count: int) -> None:
    """Write so many pages with masks."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number in range(count):
        page, mask = Image.new("RGB", (200, 200), "white"), Image.new("L", (200, 200))
        pen = ImageDraw.Draw(page)
        for top in range(6, 190, 16):
            line = " ".join(rng.choice(WORDS, 5))
            pen.text((int(rng.integers(4, 40)), top), line, fill="black")
        for top in (int(rng.integers(5, 60)), int(rng.integers(100, 150))):
            left, width, height = (int(n) for n in rng.integers([5, 60, 25], [90, 100, 40]))
            box = (left, top, left + width, top + height)
            pen.rectangle(box, fill="white", outline="white", width=3)
            for x in range(left, left + width - 2, 4):
                pen.rectangle((x, top, x + int(rng.integers(3)), top + height), fill="black")
            ImageDraw.Draw(mask).rectangle(box, fill=1)
        page.save(folder / "images" / f"{number}.png")
        mask.save(folder / "masks" / f"{number}.png")


draw(root / "train", 48)
draw(root / "val", 16)

# %%
# The model takes pictures of any size that is a multiple of 32, normalized as those of ImageNet.
# Its output is one score a pixel, so that it tells two classes apart.

task = og.tasks.segmentation.Segmentation(
    fetched("paddleocr"),
    root,
    image_size=(160, 160),
    normalize=og.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    augment=[og.random_flip()],
    loss="cross_entropy+dice",
)
trainer = task.trainer(optimizer="adamw", learning_rate=2e-3)
before = trainer.evaluate(task.validation)
trainer.fit(task.data, epochs=5, batch_size=8)
after = trainer.evaluate(task.validation)
print("IoU of the rest and of barcodes before:", before["iou_per_class"].round(3))
print("and after:", after["iou_per_class"].round(3))
assert after["iou_per_class"][1] > max(0.7, before["iou_per_class"][1])

# %%
# Predicted masks have the size of the picture. `write` stores them with a palette, and overlays.

pages = sorted((root / "val" / "images").iterdir())[:3]
og.save(trainer.model, root / "barcodes.onnx")
overlays = []
for file in (fetched("paddleocr"), root / "barcodes.onnx"):
    written = task.write(pages, task.predict(file, pages), root / file.stem)
    overlays += [path for path in written if path.parent.name == "overlays"]
figure, axes = plt.subplots(2, 3, figsize=(9, 6), layout="constrained")
for ax, path in zip(axes.flat, overlays, strict=True):
    ax.imshow(Image.open(path))
    ax.set_axis_off()
figure.suptitle("what is found as published, and after training")
plt.show()
