"""A CNN learns from a folder of images; its file then takes raw images of any size.

The transforms of the training go into the file as nodes. Its scores equal those of PyTorch for
images that Pillow has resized, up to the rounding of pixels.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image

import onnxgrad as og

rng = np.random.default_rng(0)


def drawn(label):
    """Return an image of any size with stripes: diagonal, horizontal or vertical."""
    height, width = rng.integers(40, 80, 2)
    row, column = np.mgrid[:height, :width] / 4 + rng.uniform(0, 6)
    wave = np.sin([row + column, row, column][label])[..., None] * rng.uniform(20, 60, 3)
    return np.clip(wave + rng.normal(128, 20, (height, width, 3)), 0, 255).astype(np.uint8)


for label, name in enumerate(["diagonal", "horizontal", "vertical"]):
    Path("stripes", name).mkdir(parents=True, exist_ok=True)
    for i in range(40):
        Image.fromarray(drawn(label)).save(f"stripes/{name}/{i}.png")
transforms = [og.resize(36), og.random_crop(32), og.normalize([0.5] * 3, [0.25] * 3)]
images = og.image_folder("stripes", 32, transforms)

convolution, linear = torch.nn.Conv2d(3, 8, 5, stride=2), torch.nn.Linear(8, 3)
pool = [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
net = torch.nn.Sequential(convolution, *pool, linear)
named = {"input_names": ["pixels"], "dynamic_axes": {"pixels": [0]}, "dynamo": False}
torch.onnx.export(net, (torch.zeros(2, 3, 32, 32),), "cnn.onnx", **named)
trainer = og.Trainer("cnn.onnx", "cross_entropy", learning_rate=0.03).fit(images, epochs=12)
og.save(og.preprocess(trainer.model, images), "stripes.onnx")

net.load_state_dict({name: torch.tensor(w) for name, w in trainer.state.weights.items()})
session, hits = onnxruntime.InferenceSession("stripes.onnx"), 0
for label in [0, 1, 2] * 20:
    raw = drawn(label)
    (scores,) = session.run(None, {"image": raw[None]})
    height, width = (round(n * 36 / min(raw.shape[:2])) for n in raw.shape[:2])
    image = Image.fromarray(raw).resize((width, height), Image.Resampling.BILINEAR)
    top, left = (height - 32) // 2, (width - 32) // 2
    pixels = np.asarray(image)[top : top + 32, left : left + 32] / np.float32(255)
    expected = net(torch.tensor((pixels - 0.5) / 0.25).permute(2, 0, 1)[None])
    np.testing.assert_allclose(scores, expected.detach(), atol=0.05)
    hits += scores.argmax() == label
print(f"{hits} of 60 new images are classified, from their raw pixels, by stripes.onnx")
assert hits > 54
