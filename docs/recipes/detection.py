"""
Train a detector on things of your own
======================================

A detector finds the boxes around things, and says what they are. The published file here is a YOLOX
that finds the characters of puzzles, without telling them apart. It learns two kinds of signs: the
data have two classes, so that the file gets new layers for these. They train with the last layers
of boxes and objectness, and the one in front of the classes; the others stay as they are.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw
from published import fetched

import onnxgrad as og
from onnxgrad.tasks.detection import Detection

# %%
# The pictures are drawn, and annotated as COCO does: lists of images, boxes and classes.

rng = np.random.default_rng(0)


def draw(folder: Path, count: int) -> None:
    """Draw pictures of one to three signs, each a ring or a cross."""
    folder.mkdir(exist_ok=True)
    images, boxes = [], []
    for number in range(count):
        noise = rng.integers(90, 200, (15, 20, 3)).astype(np.uint8)
        picture = Image.fromarray(noise).resize((320, 240), Image.Resampling.BILINEAR)
        pen = ImageDraw.Draw(picture)
        for _ in range(rng.integers(1, 4)):
            kind, side = int(rng.integers(2)), int(rng.integers(30, 70))
            x, y = int(rng.integers(320 - side)), int(rng.integers(240 - side))
            color = tuple(rng.integers(0, 80, 3).tolist())
            if kind == 0:
                pen.ellipse((x, y, x + side, y + side), outline=color, width=6)
            else:
                pen.line((x, y, x + side, y + side), fill=color, width=6)
                pen.line((x + side, y, x, y + side), fill=color, width=6)
            box = {"bbox": [x, y, side, side], "category_id": kind + 1, "image_id": number}
            boxes.append({"id": len(boxes), **box})
        picture.save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 320, "height": 240})
    names = [{"id": 1, "name": "ring"}, {"id": 2, "name": "cross"}]
    coco = {"images": images, "annotations": boxes, "categories": names}
    (folder / "instances.json").write_text(json.dumps(coco))


draw(Path("signs"), 40)
draw(Path("other_signs"), 10)

# %%
# The mean average precision is on pictures that were not trained on.

task = Detection(fetched("ddddocr"), "signs", augment=[og.random_flip()])
print(task.head)
layers = [f"Conv_{number}.*" for number in (251, 261, 262, 272, 282, 283, 293, 303, 304)]
layers += task.class_layers
trainer = task.trainer(train=layers, optimizer="adamw", learning_rate=0.003)
other = task.read("other_signs")
before = trainer.evaluate(other, batch_size=5)
trainer.fit(task.data, epochs=3, batch_size=4)
after = trainer.evaluate(other, batch_size=5)
for name in ("map", "map50"):
    print(name, before[name], "->", after[name])
assert after["map50"] > before["map50"] + 0.15

# %%
# What is found in a picture, in its pixels; `write` also writes `detections.json`.

trainer.save("signs.onnx")
found = task.predict("signs.onnx", "other_signs")
print(found[0])
files = task.write("other_signs", found, "found")
plt.imshow(Image.open(files[0]))
plt.show()
