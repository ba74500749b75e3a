"""Train a model
=============

You have a model as an `.onnx` file, and data. This page shows what you type to train the model, in
ten short sections. `fit`, `predict` and `sample_weight` have the meaning that they have in
scikit-learn. The trainer, callbacks and `resume` are similar to Hugging Face's. Losses, optimizers
and schedules have the names and defaults of PyTorch, and compute the same numbers as in PyTorch.
Nothing on this page needs PyTorch. scikit-learn is needed for the data only.

This page is one Python file: `python docs/tutorials/training.py` runs it. The script writes files
into the current folder.
"""

import numpy as np
import onnx
import onnxruntime
import pyarrow
from pyarrow import parquet
from sklearn.datasets import load_digits

import onnxgrad as og

# %%
# The data are handwritten digits. The model is a small CNN with random weights, which computes ten
# logits from each image; its input has the shape (N, 1, 8, 8).

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
# `Trainer` takes a model, a loss and an optimizer, and `fit` takes the data. The model is a path, a
# `ModelProto` or bytes; the trainer does not modify it. If the learning rate is a number, it stays
# constant during the training.

trainer = og.Trainer(MODEL, "cross_entropy", optimizer="adam", learning_rate=0.005)
trainer.fit(X, y, epochs=3, batch_size=16)
print([entry["loss"] for entry in trainer.history])  # the mean loss of each epoch
trainer.evaluate(X_test, y_test)  # {"loss": ...}
trainer.predict(X_test)  # logits, (320, 10)

# %%
# `save` writes a file with the trained weights; the property `model` is its content as a
# `ModelProto`. The file has the names, nodes and metadata of your model, and no nodes of the
# training.

trainer.save("digits.onnx")
session = onnxruntime.InferenceSession("digits.onnx")
np.testing.assert_allclose(
    session.run(None, {"image": X_test})[0], trainer.predict(X_test), atol=1e-4
)

# %%
# `state` has the values that the training carries from step to step: the weights, the optimizer's
# :term:`slots <slot>` (such as the two means of Adam for each weight), buffers (such as running
# means), the counts of steps and epochs, and the history. You can read and assign these values.

state = trainer.state
print(state.step, state.epoch, list(state.weights), list(state.slots["head_bias"]))
state.weights = {"head_bias": np.zeros(10, np.float32)}

# %%
# By default, the tensors train that have the role of a weight in the graph. `trainable` lists every
# float tensor, and the reason why the tensor trains or does not. To choose other tensors, give
# names or patterns as `train` or `freeze`. (A second call of `fit` goes on with the current
# weights, and begins with new slots of the optimizer.)

print([tensor.name for tensor in og.trainable(MODEL) if tensor.trains])
head = og.Trainer(MODEL, "cross_entropy", train="head*").fit(X, y)
assert list(head.state.weights) == ["head_weight", "head_bias"]

# %%
# If one of the outputs of the model is the loss, pass no argument `loss`.

with_loss = og.add_loss_output(MODEL, "cross_entropy", reduction="mean")
inside = og.Trainer(with_loss).fit(X, y, shuffle=False)
outside = og.Trainer(MODEL, "cross_entropy").fit(X, y, shuffle=False)
np.testing.assert_allclose(inside.history[0]["loss"], outside.history[0]["loss"], rtol=1e-4)

# %%
# 2. Large batches, and loops of your own
# ---------------------------------------
#
# `accumulate=4` saves memory: the gradient of a batch is computed in four parts, one after the
# other. The result is the gradient of the whole batch, even if the parts have different counts of
# labels. `clip_norm` limits the 2-norm of all gradients together.

parts = og.Trainer(MODEL, "cross_entropy", accumulate=4, clip_norm=1.0).fit(X, y, batch_size=64)
whole = og.Trainer(MODEL, "cross_entropy", clip_norm=1.0).fit(X, y, batch_size=64)
np.testing.assert_allclose(parts.history[0]["loss"], whole.history[0]["loss"], rtol=1e-4)

# %%
# On several cores of a CPU, each thread computes the gradient of some rows of a batch, if this
# division is faster, and if onnxgrad can prove that the loss is a sum over rows, without dropout or
# statistics of the batch. Otherwise, the threads share the work of each node. Dividing the rows and
# sharing the work of each node give the same numbers up to rounding.

# %%
# For a loop of your own, or for several machines, `step_models` returns a step as two models: the
# first model computes the gradients of a batch, and the second model updates the weights. Between
# the two models, your program can change the gradients, for example add up the gradients of several
# machines.

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
# An optimizer is a name, with the defaults of PyTorch or optax, or a function that takes options.
# `param_groups` gives other options to the weights whose names match a pattern. `ema`, `swa`,
# `lookahead` and `schedule_free` average the weights during the training; then `evaluate` and
# `save` use the averages.

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
# A schedule is a function from the step to the learning rate, which you can call and plot. With
# `steps=None`, the default, the schedule ends with the last step of `fit`. A warm-up is given as a
# count of steps or as a share of all steps.

schedule = og.schedules.cosine(0.01, warmup=0.1)
ax = schedule.plot(steps=200)
ax.figure.savefig("schedule.png")
scheduled = og.Trainer(MODEL, "cross_entropy", learning_rate=schedule).fit(X, y)
assert schedule.over(100)(10) == 0.01  # the peak, when the warm-up is over

# %%
# `join` puts schedules one after the other. `plateau` lowers the learning rate when a value of the
# history has stopped falling. For a schedule of your own, derive a class from `Schedule`.

og.schedules.join(
    [og.schedules.constant(0.01), og.schedules.exponential(0.01, 0.9, every=10)], boundaries=[0.5]
)
og.schedules.plateau(0.01, factor=0.5, patience=2, monitor="validation_loss")

# %%
# 5. Losses
# ---------
#
# As in PyTorch, the loss of a batch is the mean over the labels of the batch.
# `onnxgrad.losses.LOSSES` lists the names of the losses, and `loss_options` takes the options of a
# loss. If the prediction is the output of a Softmax or Sigmoid, the losses of classifiers take it
# as a probability, and not as a logit. With `class_weight` or `sample_weight`, the loss is a
# weighted mean.

print(sorted(og.losses.LOSSES))
og.Trainer(MODEL, "cross_entropy", loss_options={"label_smoothing": 0.1})
balanced = og.Trainer(MODEL, "cross_entropy", class_weight="balanced")  # or {3: 2.0}, or an array
balanced.fit(X, y, sample_weight=np.linspace(0.5, 1.5, len(X)))

# %%
# A language model has logits of shape (N, T, V) and labels of shape (N, T), which are token ids.
# With `shift`, the loss compares the logits at each position with the token at the next position.
# Labels that equal `ignore_index`, such as padding, do not count.

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
# For a model with several outputs, the loss is a dict from the name of an output to its loss, and
# `loss_weights` is a dict from the name of an output to the weight of its loss in the sum. The
# labels of the output `price` are called `label_price`.

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
# Losses for special jobs are `focal` and `softmax_focal` for rare classes; `dice` and
# `softmax_dice` for masks; `triplet` and `contrastive` for embeddings of rows with classes, in
# batches that `p_by_k` draws; `arcface` and `cosface` for heads whose scores are cosines, which
# `add_head(..., cosine=True)` adds; `multiple_negatives` for pairs of texts that belong together;
# and `ctc` for sequences without an alignment. `OutputLoss` compares outputs with each other and
# needs no labels, such as for pairs of an image and its text:

pairs = og.losses.OutputLoss("info_nce", ["image_embedding", "text_embedding"], temperature=0.07)

# %%
# A loss can also compare the model with a teacher, be a second ONNX model, or be a function that
# writes the loss as nodes:

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
# Most files are exported for inference. With `batch_norm="train"`, a BatchNormalization normalizes
# by the statistics of the batch, and updates its running statistics; with `"frozen"`, the default,
# it uses the running statistics of the file. The argument `dropout` sets random elements of values
# to zero: the keys of this dict are names or patterns of nodes or of their outputs, and its values
# are rates. `evaluate`, `predict` and `save` use the model without dropout, and with running
# statistics.

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
# `Progress` shows a progress bar. `EarlyStopping` ends the training and restores the best weights.
# `History` writes the history to a CSV file. `Norms` adds the norms of gradients and updates to the
# history, and `Timing` adds the seconds of waiting for data and of computing. `NanWatch` names the
# node that first computed NaN. `TensorBoard`, `MLflow` and `WeightsAndBiases` log to the tools of
# these names. `OptunaPruning` ends a trial that a study of Optuna prunes. The argument `validation`
# of `fit` is a share of the rows, or rows and labels, `(X, y)`.

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
# A callback of your own is a class with a method for each event that it handles. Each method can
# read and assign the values of `state`, and can ask by `control` to stop the training, to save a
# checkpoint or to evaluate.


class StopBelow(og.callbacks.Callback):
    """Ends the training when the loss of an epoch is below a limit."""

    def __init__(self, loss):
        self.loss = loss

    def on_epoch_end(self, trainer, state, control):
        """Handle the end of an epoch; `state.history[-1]` has its losses and metrics."""
        control.stop = state.history[-1]["loss"] < self.loss


stopped = og.Trainer(MODEL, "cross_entropy", callbacks=[StopBelow(1.0)], learning_rate=0.005)
stopped.fit(X, y, epochs=100)
assert stopped.history[-1]["loss"] < 1.0

# %%
# 8. Checkpoints
# --------------
#
# `Checkpoint` writes the whole state into a folder; a crash leaves no incomplete checkpoint. The
# argument `resume` of `fit` continues the training from the newest checkpoint in a folder, also
# from the middle of an epoch. The trained weights are the same bit for bit as without an
# interruption, on the same count of cores. If the folder has no checkpoint yet, the training begins
# with the weights of the model: so the same program starts a training and continues it.


def trained(folder, epochs):
    """Train from the newest checkpoint of the folder; without a checkpoint, from the start."""
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
# A metric is a name, a function of all predictions and labels, a metric of torchmetrics, or a
# `Metric` of your own. Metrics are computed batch by batch. (The accuracy on the test rows is lower
# than the validation accuracy of section 7: other people wrote the digits of the test rows, and the
# same people wrote the digits of the validation rows and of the training rows.)


def confident(prediction, label):
    """Return the share of images whose highest and lowest logits are far apart."""
    return float(np.mean(prediction.max(axis=1) - prediction.min(axis=1) > 5))


evaluated = og.Trainer(
    "digits.onnx",
    "cross_entropy",
    metrics=["accuracy", "top_3_accuracy", "f1_macro", "confusion_matrix", confident],
)
results = evaluated.evaluate(X_test, y_test)
print({name: value for name, value in results.items() if name != "confusion_matrix"})
accuracy = np.mean(evaluated.predict(X_test).argmax(axis=1) == y_test)
np.testing.assert_allclose(results["accuracy"], accuracy)

# %%
# 10. Data
# --------
#
# Data are arrays, or tables of pandas, polars or pyarrow, where strings name the columns of the
# labels and of the row weights. A model with several inputs takes a dict from the name of an input
# to its data. Batches of your own are tuples or dicts, from a list, a `DataLoader` of PyTorch, or
# another object that can be iterated once for every epoch.

linear = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,1] y)
    <float[3,1] w = {0.0, 0.0, 0.0}> { y = MatMul(x, w) }
""")
price = labels["label_price"]
frame = og.Trainer(linear, "mse", learning_rate=0.1)


class Batches:
    """Yields one batch after the other, as a reader of a database would."""

    def __iter__(self):
        for start in range(0, 200, 50):
            yield rows[start : start + 50], price[start : start + 50]


frame.fit({"x": rows}, price)
frame.fit(Batches(), epochs=30)
np.testing.assert_allclose(frame.state.weights["w"][:, 0], [1, 2, 3], atol=0.05)

# %%
# For data larger than memory, `arrow_dataset` reads Parquet files, `np.memmap` reads arrays, and
# `image_folder` reads a folder of images for each class. The trainer shuffles the rows of the
# files, and reads them in a thread while the model trains. `by_length` makes batches of sequences
# of similar lengths, and pads the inputs. If neither a mask nor a value of the padding is passed to
# `by_length`, the sequences of a batch have equal lengths.

columns = {"x": rows.tolist(), "price": price[:, 0]}
parquet.write_table(pyarrow.table(columns), "rows.parquet")
frame.fit(og.data.arrow_dataset("rows.parquet", y="price"))
np.save("rows.npy", rows)
frame.fit(np.load("rows.npy", mmap_mode="r"), price)
texts = [ids[i, : 3 + i % 9] for i in range(64)]
tokens.fit(og.data.by_length(texts, texts, value=0, y_value=0), epochs=2)

# %%
# Rows are on the first axis of an input, unless the shapes that the model declares show that rows
# are on another axis. `batch_axes` is a dict from the name of an input to the axis of its rows, for
# inputs whose declared shapes do not show the axis. The axis is None for an input that every batch
# gets whole. `carry` passes an output of a batch to an input of the next batch, such as the state
# of a recurrent network.

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
# To train many small networks at once, for a search or an ensemble, see :doc:`Many models at once
# </auto_tutorials/ensembles>`. :doc:`The gallery </auto_examples/index>` has a script each on
# several inputs, distillation, callbacks, losses, optimizers, and data of PyTorch.
