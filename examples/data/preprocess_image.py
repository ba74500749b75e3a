"""Raw images in, classes out
==========================

A CNN learns from a folder of images. The transforms of the training become nodes of its file, which
then takes raw images of any size. Its scores equal those of PyTorch for images that Pillow has
resized, up to the rounding of pixels.
"""

import io
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from PIL import Image

import onnxgrad as og

rng = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp())
CLASSES = ["diagonal", "horizontal", "vertical"]


def drawn(label):
    """Return an image of any size with stripes: diagonal, horizontal or vertical."""
    height, width = rng.integers(40, 80, 2)
    row, column = np.mgrid[:height, :width] / 4 + rng.uniform(0, 6)
    wave = np.sin([row + column, row, column][label])[..., None] * rng.uniform(20, 60, 3)
    return np.clip(wave + rng.normal(128, 20, (height, width, 3)), 0, 255).astype(np.uint8)


# %%
# A folder for each class, as ``image_folder`` reads them.

for label, name in enumerate(CLASSES):
    (folder / name).mkdir()
    for i in range(40):
        Image.fromarray(drawn(label)).save(folder / name / f"{i}.png")
transforms = [og.data.resize(36), og.data.random_crop(32), og.data.normalize([0.5] * 3, [0.25] * 3)]
images = og.data.image_folder(folder, 32, transforms)

# %%
# A small CNN, exported from PyTorch, trains on what the transforms return. Then they become a part
# of the file: the random crop is a centered one there.

convolution, linear = torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.Linear(8, 3)
pool = [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
net = torch.nn.Sequential(convolution, *pool, linear)
file = io.BytesIO()
warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*legacy.*")
named = {"input_names": ["pixels"], "dynamic_axes": {"pixels": {0: "N"}}, "dynamo": False}
torch.onnx.export(net, (torch.zeros(2, 3, 32, 32),), file, **named)
trainer = og.Trainer(file.getvalue(), "cross_entropy", learning_rate=0.03).fit(images, epochs=12)
og.save(og.graph.preprocess(trainer.model, images), folder / "stripes.onnx")

# %%
# New images, as raw pixels, against PyTorch behind the resizing of Pillow.

net.load_state_dict({name: torch.tensor(w) for name, w in trainer.state.weights.items()})
session, results = onnxruntime.InferenceSession(folder / "stripes.onnx"), []
for label in [0, 1, 2] * 20:
    raw = drawn(label)
    (scores,) = session.run(None, {"image": raw[None]})
    height, width = (round(n * 36 / min(raw.shape[:2])) for n in raw.shape[:2])
    image = Image.fromarray(raw).resize((width, height), Image.Resampling.BILINEAR)
    top, left = (height - 32) // 2, (width - 32) // 2
    pixels = np.asarray(image)[top : top + 32, left : left + 32] / np.float32(255)
    expected = net(torch.tensor((pixels - 0.5) / 0.25).permute(2, 0, 1)[None])
    np.testing.assert_allclose(scores, expected.detach(), atol=0.05)
    results.append((raw, scores.argmax(), label))
hits = sum(guess == label for _, guess, label in results)
print(f"{hits} of 60 new images are classified correctly from their raw pixels")
assert hits > 54

figure, axes = plt.subplots(1, 6, figsize=(10, 2.4), layout="constrained")
for ax, (raw, guess, _) in zip(axes, results):
    ax.imshow(raw)
    ax.set_title(CLASSES[guess])
plt.show()
