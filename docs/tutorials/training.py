"""Train a model
=============

You have a model as an `.onnx` file, and data. This page shows what you type, in ten short parts.
From scikit-learn you know `fit`, `predict` and `sample_weight`; from Hugging Face the trainer, its
callbacks and `resume`; from PyTorch the names and defaults of losses, optimizers and schedules,
which compute the same numbers here. Nothing on this page needs PyTorch, and only its data are from
scikit-learn.

The page is one Python file, which the tests run: `python docs/tutorials/training.py`. It writes its
files into the current folder.
"""

import numpy as np
import onnx
import onnxruntime
import pyarrow
from pyarrow import parquet
from sklearn.datasets import load_digits

import onnxgrad as og

# %%
# The model is a small CNN, not yet trained, from images (N, 1, 8, 8) to ten logits. The data are
# handwritten digits.

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32).reshape(-1, 1, 8, 8)
X, X_test, y, y_test = X[:480], X[480:800], y[:480], y[480:800]
MODEL = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    cnn (float[N,1,8,8] image) => (float[N,10] logits) {
        a = Conv <pads = [1,1,1,1]> (image, conv1_weight, conv1_bias)
        b = Relu(a)
        c = Conv <pads = [1,1,1,1]> (b, conv2_weight, conv2_bias)
        d = Relu(c)
        e = MaxPool <kernel_shape = [2,2], strides = [2,2]> (d)
        f = Flatten(e)
        logits = Gemm <transB = 1> (f, head_weight, head_bias)
    }
""")
rng = np.random.default_rng(0)
for name, shape in {"conv1": (16, 1, 3, 3), "conv2": (32, 16, 3, 3), "head": (10, 512)}.items():
    weight = rng.normal(0, np.prod(shape[1:]) ** -0.5, shape).astype(np.float32)
    for part, array in {"weight": weight, "bias": np.zeros(shape[0], np.float32)}.items():
        MODEL.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}_{part}"))

# %%
# 1. The trainer
# --------------
#
# A trainer has a model, a loss and an optimizer; `fit` has the data. A model is a path, a
# `ModelProto` or bytes, and is never modified. A number as learning rate is a constant rate.

trainer = og.Trainer(MODEL, "cross_entropy", optimizer="adam", learning_rate=0.005)
trainer.fit(X, y, epochs=3, batch_size=16)
print([entry["loss"] for entry in trainer.history])  # the mean loss of each epoch
trainer.evaluate(X_test, y_test)  # {"loss": ...}
trainer.predict(X_test)  # logits, (320, 10)

# %%
# `save` writes your file with new weights, and `model` is the same as a `ModelProto`. Names, nodes
# and metadata stay as they are, and nothing of the training is left in it.

trainer.save("digits.onnx")
session = onnxruntime.InferenceSession("digits.onnx")
np.testing.assert_allclose(
    session.run(None, {"image": X_test})[0], trainer.predict(X_test), atol=1e-4
)

# %%
# `state` is all that training carries from step to step: weights, :term:`slots <slot>` of the
# optimizer, buffers, counts and history. You can read and assign it.

state = trainer.state
print(state.step, state.epoch, list(state.weights), list(state.slots["head_bias"]))
state.weights = {"head_bias": np.zeros(10, np.float32)}

# %%
# What trains by default are the tensors that have the role of a weight: `trainable` lists every
# tensor with the reason. `train` and `freeze` take names and patterns instead. (A second `fit` goes
# on with the current weights, and begins with a new optimizer.)

print([tensor.name for tensor in og.trainable(MODEL) if tensor.trains])
head = og.Trainer(MODEL, "cross_entropy", train="head*").fit(X, y)
assert list(head.state.weights) == ["head_weight", "head_bias"]

# %%
# The loss may also be in the model already, as one of its outputs. Then pass no argument `loss`.

with_loss = og.add_loss_output(MODEL, "cross_entropy", reduction="mean")
inside = og.Trainer(with_loss).fit(X, y, shuffle=False)
outside = og.Trainer(MODEL, "cross_entropy").fit(X, y, shuffle=False)
np.testing.assert_allclose(inside.history[0]["loss"], outside.history[0]["loss"], rtol=1e-4)

# %%
# 2. Large batches, and loops of your own
# ---------------------------------------
#
# `accumulate=4` computes the gradient of a batch in four parts, to save memory: the result is that
# of the whole batch, also where the parts have different numbers of labels. `clip_norm` limits the
# 2-norm of all gradients together.

parts = og.Trainer(MODEL, "cross_entropy", accumulate=4, clip_norm=1.0).fit(X, y, batch_size=64)
whole = og.Trainer(MODEL, "cross_entropy", clip_norm=1.0).fit(X, y, batch_size=64)
np.testing.assert_allclose(parts.history[0]["loss"], whole.history[0]["loss"], rtol=1e-4)

# %%
# On several cores of a CPU, each thread computes the gradient of some rows of a batch, where that
# pays: the loss must be proven to be a sum over rows, without dropout or statistics of the batch.
# Otherwise, threads share the work of each node. The numbers differ by rounding only.

# %%
# For a loop of your own, or for several machines, a step is two models: one computes the gradients
# of a batch, the other updates the weights. Between them, add up or average gradients as you like.

gradients, update = og.Trainer(MODEL, "cross_entropy", optimizer="sgd").step_models(X, y)
weights = outside.state.weights
grad = onnxruntime.InferenceSession(gradients.SerializeToString())
names = [output.name for output in grad.get_outputs()]
batch = dict(zip(names, grad.run(None, weights | {"image": X, "label": y}), strict=True))
print("loss", batch.pop("loss_sum") / batch.pop("loss_count"))
step = onnxruntime.InferenceSession(update.SerializeToString())
scalars = {"minus_learning_rate": np.array(-0.1, "f4"), "step": np.array(1)}
new = step.run(["head_bias.new"], weights | batch | scalars)[0]
np.testing.assert_allclose(new, weights["head_bias"] - 0.1 * batch["head_bias_grad"], rtol=1e-5)

# %%
# 3. Optimizers
# -------------
#
# By name with the defaults of PyTorch or optax, or as a function with options. Weights may be in
# groups, by patterns of their names. `ema`, `swa`, `lookahead` and `schedule_free` average the
# weights; the averages are what is evaluated and saved.

og.Trainer(MODEL, "cross_entropy", optimizer="lion", learning_rate=1e-4)
fine = og.optimizers.param_groups(
    {
        "head*": og.optimizers.ParamGroup(rate=10),
        "*bias": og.optimizers.ParamGroup(weight_decay=0.0),
    },
    default=og.optimizers.adamw(weight_decay=0.05),
)
averaged = og.Trainer(MODEL, "cross_entropy", optimizer=og.optimizers.ema(fine, decay=0.9)).fit(
    X, y
)
assert "average" in averaged.state.slots["head_weight"]
np.testing.assert_array_equal(
    averaged.evaluated()["head_weight"], averaged.state.slots["head_weight"]["average"]
)

# %%
# 4. Learning rates
# -----------------
#
# A schedule is a function of the step, which you can call and plot. `steps=None`, the default, is
# the whole run, and a warm-up is a number of steps or a share of the run.

schedule = og.schedules.cosine(0.01, warmup=0.1)
ax = schedule.plot(steps=200)
ax.figure.savefig("schedule.png")
scheduled = og.Trainer(MODEL, "cross_entropy", learning_rate=schedule).fit(X, y)
assert schedule.over(100)(10) == 0.01  # the peak, when the warm-up is over

# %%
# `join` puts schedules one after the other; `plateau` lowers the rate when a value of the history
# has stopped falling; a function of the step of your own derives from `Schedule`.

og.schedules.join(
    [og.schedules.constant(0.01), og.schedules.exponential(0.01, 0.9, every=10)], boundaries=[0.5]
)
og.schedules.plateau(0.01, factor=0.5, patience=2, monitor="validation_loss")

# %%
# 5. Losses
# ---------
#
# A loss is the mean over what a batch has labels for, as PyTorch's. `loss_options` has its options,
# and `onnxgrad.losses.LOSSES` lists the names. Behind a Softmax or Sigmoid, losses know that the
# prediction is a probability. Class weights and sample weights make a weighted mean.

print(sorted(og.losses.LOSSES))
og.Trainer(MODEL, "cross_entropy", loss_options={"label_smoothing": 0.1})
balanced = og.Trainer(MODEL, "cross_entropy", class_weight="balanced")  # or {3: 2.0}, or an array
balanced.fit(X, y, sample_weight=np.linspace(0.5, 1.5, len(X)))

# %%
# For language models: logits (N, T, V) and token ids (N, T). `shift` compares each position with
# the next token, and `ignore_index` marks the padding.

language = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> bigram (int64[N,T] ids) => (float[N,T,5] logits)
    { logits = Gather(table, ids) }
""")
language.graph.initializer.append(
    onnx.numpy_helper.from_array(np.zeros((5, 5), np.float32), "table")
)
ids = np.random.default_rng(0).integers(0, 5, size=(64, 12))
tokens = og.Trainer(language, "cross_entropy", loss_options={"shift": True, "ignore_index": 0})
np.testing.assert_allclose(tokens.evaluate(ids, ids)["loss"], np.log(5), rtol=1e-6)

# %%
# Several outputs have a loss and a weight each. A list of labels is a dict by output.

two = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    two (float[N,3] x) => (float[N,1] price, float[N,1] sold)
    <float[3,1] a = {0.1, 0.2, 0.3}, float[3,1] b = {0.3, 0.2, 0.1}>
    { price = MatMul(x, a)  sold = MatMul(x, b) }
""")
rows = np.random.default_rng(1).normal(size=(200, 3)).astype(np.float32)
labels = {"label_price": rows @ np.float32([[1], [2], [3]]), "label_sold": rows[:, :1] > 0}
several = og.Trainer(
    two,
    {"price": "huber", "sold": "binary_cross_entropy"},
    loss_weights={"sold": 0.1},
)
several.fit(rows, labels)

# %%
# Other losses: `focal` and `softmax_focal` for rare classes, `dice` and `softmax_dice` for masks,
# `triplet` and `contrastive` for embeddings with classes, in batches of `p_by_k`; `arcface` and
# `cosface` for cosines to centers of classes, `add_head(..., cosine=True)`; `multiple_negatives`
# for texts that belong together; `ctc` for sequences without an alignment.
# `OutputLoss` needs no labels, as with pairs of images and texts:

pairs = og.losses.OutputLoss("info_nce", ["image_embedding", "text_embedding"], temperature=0.07)

# %%
# A teacher, a second ONNX model as the loss, or a function that writes the loss as nodes:

student = og.Trainer(MODEL, og.losses.distillation("digits.onnx", temperature=4.0, alpha=0.9))
student.fit(X, y)
second = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    l1 (float[N,1] price, float[N,1] target) => (float[N,1] loss)
    { difference = Sub(price, target)  loss = Abs(difference) }
""")
og.Trainer(two, og.losses.LossModel(second), train="a").fit(rows, {"target": labels["label_price"]})


def relative(op, prediction, label):
    """Write |f - y| / (|y| + 1) of every element."""
    return op.Abs(prediction - label) / (op.Abs(label) + 1.0)


og.Trainer(two, {"price": relative}, train="a").fit(rows, labels["label_price"])

# %%
# 6. Training and inference
# -------------------------
#
# Files are exported for inference. `batch_norm="train"` normalizes by the batch and updates the
# running statistics; the default, "frozen", uses the statistics of the file. `dropout` zeroes
# elements behind the nodes whose name or output matches. What is evaluated and saved has neither.

normalized = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,1] y)
    <float[3] scale = {1.0, 1.0, 1.0}, float[3] shift = {0.0, 0.0, 0.0},
     float[3] mean = {0.0, 0.0, 0.0}, float[3] variance = {1.0, 1.0, 1.0},
     float[3,1] w = {0.1, 0.2, 0.3}>
    { h = BatchNormalization(x, scale, shift, mean, variance)  y = MatMul(h, w) }
""")
modes = og.Trainer(normalized, "squared_error", batch_norm="train", dropout={"h": 0.1})
modes.fit(rows + 5, labels["label_price"], epochs=5)
assert [node.op_type for node in modes.model.graph.node] == ["BatchNormalization", "MatMul"]
print(modes.state.buffers["mean"])  # near 5

# %%
# 7. Callbacks
# ------------
#
# `Progress` shows a bar, `EarlyStopping` ends training and restores the best weights, `History`
# writes a CSV file, `Norms` and `Timing` add to the history, `NanWatch` names the node that first
# computed NaN, and `TensorBoard`, `MLflow` and `WeightsAndBiases` log to those; `OptunaPruning`
# ends what a study of Optuna prunes. `validation` is a share of the rows, or `(X, y)`.

watched = og.Trainer(
    MODEL,
    "cross_entropy",
    learning_rate=0.005,
    metrics=["accuracy"],
    callbacks=[
        og.EarlyStopping("validation_accuracy", patience=2),
        og.callbacks.History("history.csv"),
        og.callbacks.Norms(),
        og.callbacks.Timing(),
        og.callbacks.NanWatch(),
    ],
)
watched.fit(X, y, validation=0.2, epochs=4)
print(watched.history[-1])

# %%
# A callback of your own overrides events. It reads and assigns `state`, and asks `control` to stop,
# to save a checkpoint or to evaluate.


class StopBelow(og.callbacks.Callback):
    """Ends training when the loss of an epoch is below a number."""

    def __init__(self, loss):
        self.loss = loss

    def on_epoch_end(self, trainer, state, control):
        """Handle the end of an epoch, whose entry is the last one of the history."""
        control.stop = state.history[-1]["loss"] < self.loss


stopped = og.Trainer(MODEL, "cross_entropy", callbacks=[StopBelow(1.0)], learning_rate=0.005)
stopped.fit(X, y, epochs=100)
assert stopped.history[-1]["loss"] < 1.0

# %%
# 8. Checkpoints
# --------------
#
# `Checkpoint` writes the whole state, or nothing: a crash leaves no half of it. `resume` continues
# from the newest checkpoint, also within an epoch, with the same result bit for bit on as many
# cores. If the folder has none yet, training begins anew, so that the same program starts and
# continues.


def trained(folder, epochs):
    """Train, from the newest checkpoint in the folder if there is one."""
    checkpoint = og.Checkpoint(folder, every_steps=50, keep=2)
    new = og.Trainer(MODEL, "cross_entropy", callbacks=[checkpoint])
    return new.fit(X, y, epochs=epochs, resume=folder)


trained("runs/a", epochs=1)  # ends here, or by Ctrl-C, a crash, a power failure
continued = trained("runs/a", epochs=2)
at_once = trained("runs/b", epochs=2)
for name, weight in at_once.state.weights.items():
    np.testing.assert_array_equal(continued.state.weights[name], weight)

# %%
# 9. Metrics
# ----------
#
# By name, as a function of all predictions and labels, as a metric of torchmetrics, or as a
# `Metric` of your own. They are computed batch by batch. (The test rows are by other hands than the
# rows that train, which follow each other in the file; those of `validation=0.2` are by the same.
# So the accuracy of these is higher.)


def confident(prediction, label):
    """Return the share of images whose highest and lowest logits are far apart."""
    return float(np.mean(prediction.max(axis=1) - prediction.min(axis=1) > 5))


judged = og.Trainer(
    "digits.onnx",
    "cross_entropy",
    metrics=["accuracy", "top_3_accuracy", "f1_macro", "confusion_matrix", confident],
)
results = judged.evaluate(X_test, y_test)
print({name: value for name, value in results.items() if name != "confusion_matrix"})
accuracy = np.mean(judged.predict(X_test).argmax(axis=1) == y_test)
np.testing.assert_allclose(results["accuracy"], accuracy)

# %%
# 10. Data
# --------
#
# Arrays; tables of pandas, polars or pyarrow, in which strings name the columns of labels and
# weights; a dict by input for several inputs; and batches of your own, as tuples or dicts: a list,
# a `DataLoader` of PyTorch, or anything else that can be iterated once for every epoch.

linear = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.0, 0.0, 0.0}> { y = MatMul(x, w) }
""")
price = labels["label_price"]
frame = og.Trainer(linear, "mse", learning_rate=0.1)


class Batches:
    """Reads one batch after the other, such as from a database."""

    def __iter__(self):
        for start in range(0, 200, 50):
            yield rows[start : start + 50], price[start : start + 50]


frame.fit({"x": rows}, price)
frame.fit(Batches(), epochs=30)
np.testing.assert_allclose(frame.state.weights["w"][:, 0], [1, 2, 3], atol=0.05)

# %%
# Data larger than memory: `arrow_dataset` reads Parquet files, `np.memmap` arrays, and
# `image_folder` a folder of images for each class. They are shuffled, and read by a thread while
# the model trains. `by_length` makes batches of sequences of similar length, and pads inputs; of
# one length, where no mask tells the model what is padded.

columns = {"x": rows.tolist(), "price": price[:, 0]}
parquet.write_table(pyarrow.table(columns), "rows.parquet")
frame.fit(og.data.arrow_dataset("rows.parquet", y="price"))
np.save("rows.npy", rows)
frame.fit(np.load("rows.npy", mmap_mode="r"), price)
texts = [ids[i, : 3 + i % 9] for i in range(64)]
tokens.fit(og.data.by_length(texts, texts, value=0, y_value=0), epochs=2)

# %%
# Rows are on the first axis, unless the declared shapes of the model say another one; `batch_axes`
# says it where they cannot, and None is for an input that every batch gets whole. `carry` hands an
# output to an input of the next batch, such as the state of a recurrent network.

cumulative = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,3] x, float[1,3] before) => (float[N,1] y, float[1,3] after)
    <float[3,1] w = {0.0, 0.0, 0.0}> {
        sum = ReduceMean <keepdims = 1> (x, axes)
        after = Add(before, sum)
        all = Add(x, after)
        y = MatMul(all, w)
    }
""")
cumulative.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axes"))
carried = og.Trainer(
    cumulative, {"y": "mse"}, carry={"before": "after"}, batch_axes={"before": None}
)
start = np.zeros((1, 3), np.float32)
carried.fit({"x": rows, "before": start}, price, shuffle=False, batch_size=50)

# %%
# Many small networks train at once, for a search or an ensemble: :doc:`Many models at once
# </auto_tutorials/ensembles>`. The examples of the gallery go further: a CNN with early stopping
# and a checkpoint, a language model, distillation, Parquet files, callbacks, batches of PyTorch.
