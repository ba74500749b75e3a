"""
Fine-tune an ONNX model
=======================

You have a model as an ``.onnx`` file, without the code that trained it, and a task that differs
from the one it was trained for. This tutorial goes the whole way: what in the file can train, a new
last layer, training that layer alone, then more of the model, LoRA adapters, and a clean ``.onnx``
file for the ordinary onnxruntime. Neither PyTorch nor a conversion back to it is needed.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from pyarrow import parquet

import onnxgrad as og

# %%
# A published model
# -----------------
#
# So that this page runs offline, it makes the "published" model itself: a convolutional network
# that is trained on the ten digits, as a scanner of a thousand forms gives them, with noise and up
# to one pixel off. You can skip these lines: from the next section on, all that is known is the
# file.

DATA = Path(__file__).parents[2] / "data"
table = parquet.read_table(DATA / "digits.parquet")
clean = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1).reshape(-1, 1, 8, 8)
digits = table["label"].to_numpy()


def scanned(images, seed):
    """Return images that are moved by up to one pixel, with noise."""
    rng = np.random.default_rng(seed)
    moves = rng.integers(-1, 2, (len(images), 2))
    moved = [np.roll(image, move, (1, 2)) for image, move in zip(images, moves, strict=True)]
    return (np.array(moved) + 0.1 * rng.normal(size=images.shape)).astype(np.float32)


network = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    digits (float[N,1,8,8] image) => (float[N,10] scores) {
        a = Conv <pads = [1, 1, 1, 1]> (image, conv1_weight, conv1_bias)  b = Relu(a)
        c = Conv <pads = [1, 1, 1, 1]> (b, conv2_weight, conv2_bias)  d = Relu(c)
        e = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)  f = Flatten(e)
        g = Gemm <transB = 1> (f, hidden_weight, hidden_bias)  h = Relu(g)
        scores = Gemm <transB = 1> (h, last_weight, last_bias)
    }
""")
sizes = {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "hidden": (64, 512), "last": (10, 64)}
rng = np.random.default_rng(0)
for name, shape in sizes.items():
    weight = rng.normal(scale=np.sqrt(2 / np.prod(shape[1:])), size=shape)
    for suffix, array in (("weight", weight), ("bias", np.zeros(shape[0]))):
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), f"{name}_{suffix}")
        network.graph.initializer.append(tensor)

forms = np.tile(np.arange(1000), 20)
publisher = og.Trainer(network, "cross_entropy", optimizer="adam", learning_rate=0.002)
publisher.fit(scanned(clean[forms], seed=0), digits[forms], epochs=4)
publisher.save("published.onnx")

# %%
# For a model of the `ONNX Model Zoo <https://github.com/onnx/models>`_ or of `Hugging Face
# <https://huggingface.co/models?library=onnx>`_, download the file and write its path instead: the
# rest of this page reads the same. Inputs must be prepared as the page of the model says (size,
# normalization, tokens); :doc:`preprocess </preprocess>` can put that into the file.
#
# The task
# --------
#
# Your forms have an eleventh class: empty fields. There are five labeled images of each class; 842
# others are for the evaluation.

images = np.concatenate([scanned(clean[1000:], 1), scanned(np.zeros((100, 1, 8, 8)), 2)])
labels = np.concatenate([digits[1000:], np.full(100, 10)])
few = np.concatenate([np.flatnonzero(labels == label)[:5] for label in range(11)])
rest = np.setdiff1d(np.arange(len(labels)), few)
X, y, X_test, y_test = images[few], labels[few], images[rest], labels[rest]
print(len(X), "images to train,", len(X_test), "to test")

figure, axes = plt.subplots(1, 11, figsize=(9, 1.2), layout="constrained")
for ax, image in zip(axes, X[::5, 0], strict=True):
    ax.imshow(image, cmap="gray_r")
    ax.axis("off")

# %%
# What trains
# -----------
#
# Which tensors of the file are weights? `trainable` lists all float constants, and why each of them
# trains or does not.

print(og.trainable("published.onnx"))

# %%
# A new head
# ----------
#
# ``replace_head`` finds the last layer, and gives it fresh weights for another number of classes,
# or for classes with names, which are kept in the file's metadata. Whatever follows, such as a
# Softmax or labels, is adapted. The new tensors are ``head.weight`` and ``head.bias``.

classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "empty"]
model = og.replace_head("published.onnx", units=classes)
head = og.Trainer(
    model,
    "cross_entropy",
    train="head.*",
    optimizer="adam",
    learning_rate=0.01,
    metrics=["accuracy"],
)
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
    trainer.fit(X, y, epochs=epochs, batch_size=10)
    count = sum(weight.size for weight in trainer.state.weights.values())
    results[name] = count, trainer.evaluate(X_test, y_test)["accuracy"]
    print(f"{name}: {count} weights, accuracy {results[name][1]:.3f}")


judge("head", head, epochs=60)

# %%
# Nothing else has changed in the file:

published, tuned = (og.get_train_initializer(m) for m in ("published.onnx", head.model))
for name in published.keys() & tuned.keys():
    np.testing.assert_array_equal(tuned[name][0], published[name][0])
print("the same as before:", sorted(published.keys() & tuned.keys()))

# %%
# More of the model
# -----------------
#
# ``train`` and ``freeze`` take names and patterns. This goes on from the trained head, so that
# older layers do not follow the gradients of a random one, and at a lower rate.

options = {"optimizer": "adam", "metrics": ["accuracy"]}
block = og.Trainer(
    head.model, "cross_entropy", train=["head.*", "hidden_*"], learning_rate=3e-4, **options
)
judge("then the last block", block, epochs=30)

# %%
# With ``param_groups``, groups of weights have rates of their own. Here, all weights but the first
# layer's train, and the head at ten times the rate of the others.

groups = og.param_groups({"head.*": og.ParamGroup(rate=10)}, default=og.adam())
whole = og.Trainer(
    head.model,
    "cross_entropy",
    freeze="conv1_*",
    optimizer=groups,
    learning_rate=1e-4,
    metrics=["accuracy"],
)
judge("then all but one layer", whole, epochs=30)

# %%
# LoRA
# ----
#
# Training all weights of a large model takes much memory, and a copy of the whole file for every
# task. `LoRA <https://arxiv.org/abs/2106.09685>`_ trains two small factors beside each weight
# instead. Adapters train by default; the weights beside them are frozen.

adapted = og.add_lora(head.model, ["conv2_weight", "hidden_weight"], rank=2)
lora = og.Trainer(adapted, "cross_entropy", learning_rate=1e-4, **options)
print(list(lora.state.weights))
judge("then LoRA", lora, epochs=30)

# %%
# Adapters can be stored on their own, in the format of PEFT, or merged into the weights.
# ``merge_lora`` returns a file with the nodes of the original, as fast as before.

og.save_adapter(lora.model, "adapter")
print(sum(path.stat().st_size for path in Path("adapter").iterdir()), "bytes of adapters")
merged = og.merge_lora(lora.model)
print([node.op_type for node in merged.graph.node])

# %%
# Was it worth it?
# ----------------
#
# The measure is the same network with random weights, trained on the same 55 images.

scratch = og.Trainer(
    og.replace_head(network, units=11), "cross_entropy", learning_rate=0.005, **options
)
judge("from scratch", scratch, epochs=60)

figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
bars = ax.barh(list(results), [accuracy for _, accuracy in results.values()])
ax.bar_label(bars, [f"{a:.1%}, {n:,} weights train" for n, a in results.values()], padding=4)
ax.set(xlabel="accuracy on new images", xlim=(0, 1.4))
ax.invert_yaxis()
plt.show()

# %%
# What the published model knows is worth far more here than what is trained of it: with so few
# images, the head alone is within two percentage points of the best. With more data, more layers
# pay.

# %%
# Deploy
# ------
#
# ``save`` writes a plain ``.onnx`` file: the operators of the published model, its names and opset,
# and no trace of the training. It needs nothing of this package.

block.save("mine.onnx")
session = onnxruntime.InferenceSession("mine.onnx")
[scores] = session.run(None, {"image": X_test})
accuracy = np.mean(scores.argmax(axis=1) == y_test)
print(f"onnxruntime: {accuracy:.3f}")
np.testing.assert_allclose(accuracy, results["then the last block"][1])

before, after = (onnx.load(path) for path in ("published.onnx", "mine.onnx"))
assert [n.op_type for n in before.graph.node] == [n.op_type for n in after.graph.node]
assert [n.op_type for n in before.graph.node] == [n.op_type for n in merged.graph.node]
assert results["untrained head"][1] < 0.3
assert results["head"][1] > results["from scratch"][1] + 0.2
assert abs(max(a for _, a in results.values()) - results["head"][1]) < 0.02

# %%
# For another model
# -----------------
#
# - A file that ends in features, such as a sentence encoder, gets a head by ``add_head``; one that
#   ends in something else is cut by ``features``, and joined to a head of yours by ``attach``:
#   :doc:`Fine-tune a model </finetune>`.
# - Weights of quantized models stay as they are; heads and adapters beside them train.
# - Numbered names such as ``onnx::MatMul_137`` have readable aliases, which patterns match:
#   :doc:`What trains by default </trainable>`.
# - Adapters in detail: :doc:`LoRA </lora>`. The trainer in detail:
#   :doc:`Train a model </auto_tutorials/training>`.
