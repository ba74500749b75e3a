"""
Find the pixels of barcodes: segmentation
=========================================

The text detector of PaddleOCR (DBNet, Liao et al. 2020, arXiv:1911.08947) says for every pixel
whether it belongs to text. Here it learns to find barcodes instead, and to leave text alone, from
48 drawn pages and masks of the same names. The file that comes out has the nodes of the first one.
"""

from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw
from published import fetched  # published.py: on the page Recipes

import onnxgrad as og

rng, root = np.random.default_rng(0), Path(mkdtemp())
WORDS = "the quick brown fox jumps over a lazy dog near River Seine No 17".split()
for number in range(64):
    page, mask = Image.new("RGB", (200, 200), "white"), Image.new("L", (200, 200))
    pen = ImageDraw.Draw(page)
    for top in range(6, 190, 16):
        pen.text((int(rng.integers(4, 40)), top), " ".join(rng.choice(WORDS, 5)), fill="black")
    for top in (int(rng.integers(5, 60)), int(rng.integers(100, 150))):
        left, width, height = (int(n) for n in rng.integers([5, 60, 25], [90, 100, 40]))
        box = (left, top, left + width, top + height)
        pen.rectangle(box, fill="white", outline="white", width=3)
        for x in range(left, left + width - 2, 4):
            pen.rectangle((x, top, x + int(rng.integers(3)), top + height), fill="black")
        ImageDraw.Draw(mask).rectangle(box, fill=1)
    for part, image in (("images", page), ("masks", mask)):
        folder = root / ("train" if number < 48 else "val") / part
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")

# %%
# Pictures are normalized as those of ImageNet. One score a pixel tells two classes apart.

task = og.tasks.segmentation.Segmentation(
    fetched("paddleocr"), root, image_size=(160, 160), augment=[og.data.random_flip()],
    normalize=og.data.normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    loss="cross_entropy+dice",
)  # fmt: skip
trainer = task.trainer(optimizer="adamw", learning_rate=2e-3)
before = trainer.evaluate(task.validation)["iou_per_class"]
after = trainer.fit(task.data, epochs=5, batch_size=8).evaluate(task.validation)["iou_per_class"]
print("IoU of the rest and of barcodes, before and after:", before.round(3), after.round(3))
assert after[1] > max(0.7, before[1])
pages = sorted((root / "val" / "images").iterdir())[:3]
files = task.write(pages, task.predict(trainer, pages), root / "found")
overlays = [path for path in files if path.parent.name == "overlays"]
for ax, path in zip(plt.subplots(1, 3, figsize=(9, 3))[1], overlays, strict=True):
    ax.imshow(Image.open(path))
plt.show()
