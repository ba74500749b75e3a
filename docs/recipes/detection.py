"""
Train a detector on things of your own
======================================

A detector finds the boxes around things, and says what they are. The published file here is a YOLOX
that finds the characters of puzzles, without telling them apart. It learns two kinds of signs: the
data have two classes, so that the file gets new layers for these. They train with the last layers
of boxes and objectness, and the one in front of the classes; the others stay as they are.
"""

from pathlib import Path
from tempfile import mkdtemp

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw
from published import fetched  # published.py: on the page Recipes

import onnxgrad as og
from onnxgrad.tasks.detection import Detection

# %%
# The pictures have one to three signs, in the folders of YOLO: a line of labels for each box.
rng, root = np.random.default_rng(0), Path(mkdtemp())
for part, count in {"train": 40, "val": 10}.items():
    for number in range(count):
        noise = rng.integers(90, 200, (15, 20, 3)).astype(np.uint8)
        picture = Image.fromarray(noise).resize((320, 240), Image.Resampling.BILINEAR)
        pen, lines = ImageDraw.Draw(picture), ""
        for _ in range(rng.integers(1, 4)):
            kind, side = int(rng.integers(2)), int(rng.integers(30, 70))
            x, y = int(rng.integers(320 - side)), int(rng.integers(240 - side))
            ink, box = tuple(rng.integers(0, 80, 3).tolist()), (x, y, x + side, y + side)
            if kind == 0:
                pen.ellipse(box, outline=ink, width=6)
            else:
                pen.line(box, fill=ink, width=6)
                pen.line((x + side, y, x, y + side), fill=ink, width=6)
            center = (x + side / 2) / 320, (y + side / 2) / 240
            lines += f"{kind} {center[0]} {center[1]} {side / 320} {side / 240}\n"
        for folder in ("images", "labels"):
            (root / folder / part).mkdir(parents=True, exist_ok=True)
        picture.save(root / "images" / part / f"{number}.png")
        (root / "labels" / part / f"{number}.txt").write_text(lines)
(root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [ring, cross]\n")

# %%
# The mean average precision is on pictures that were not trained on.
task = Detection(fetched("ddddocr"), root, augment=[og.data.random_flip()])
layers = [f"Conv_{number}.*" for number in (251, 261, 262, 272, 282, 283, 293, 303, 304)]
trainer = task.trainer(train=[*layers, *task.class_layers], optimizer="adamw", learning_rate=0.003)
before = trainer.evaluate(task.validation, batch_size=5)
after = trainer.fit(task.data, epochs=3, batch_size=4).evaluate(task.validation, batch_size=5)
print("mAP50", before["map50"], "->", after["map50"], "; mAP", before["map"], "->", after["map"])
assert after["map50"] > before["map50"] + 0.15
pictures = root / "images" / "val"
files = task.write(pictures, task.predict(trainer, pictures), root / "found")
plt.imshow(Image.open(files[1]))
plt.show()
