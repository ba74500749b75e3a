"""Many models at once
===================

A small network spends a step on its nodes, not on its numbers: a dozen copies in one graph take
little longer than one. `TrainerStack` trains copies of a model, its members, that differ in their
learning rates, optimizers or initial weights: for a search, or for an ensemble. Every weight has a
leading axis of members, and one run of onnxruntime trains all.

The page is one Python file, which the tests run: `python docs/tutorials/ensembles.py`.
"""

import numpy as np
import onnx
from sklearn.datasets import load_digits

import onnxgrad as og

# %%
# The data are handwritten digits, and the model is a multilayer perceptron.

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
X, X_test, y, y_test = X[:480], X[480:800], y[:480], y[480:800]
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    mlp (float[N,64] x) => (float[N,10] y) {
        a = MatMul(x, w1)
        b = Add(a, b1)
        c = Relu(b)
        d = MatMul(c, w2)
        y = Add(d, b2)
    }
""")
rng = np.random.default_rng(0)
for name, shape in {"w1": (64, 32), "b1": 32, "w2": (32, 10), "b2": 10}.items():
    weight = rng.normal(0, 0.1, shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))

# %%
# A search
# --------
#
# An argument that is a list has an element for each member. Here, four learning rates times two
# weight decays are eight members. They begin with the weights of the file, and see the same
# batches.

rates = [rate for rate in (1e-4, 1e-3, 1e-2, 1e-1) for _ in range(2)]
decays = [og.optimizers.adamw(weight_decay=decay) for _ in range(4) for decay in (0.0, 0.1)]
search = og.TrainerStack(
    model, "cross_entropy", learning_rate=rates, optimizer=decays, metrics=["accuracy"]
)
search.fit(X, y, validation=0.2, epochs=20)
for rate, entry in zip(rates, search.history[-1]["validation_accuracy"], strict=True):
    print(rate, entry)

# %%
# The history has arrays with a number for each member, and so do the results of `evaluate`.
# `predict` returns (members, rows, ...). `best` is the member with the lowest validation loss, and
# `model` returns a member as a `ModelProto`.
#
# The accuracy of the test rows is lower than that of the validation rows. These are drawn from the
# same rows as those that train, and so from the same hands; the test rows are those that follow in
# the file, written by other people. (The nearest neighbor, of scikit-learn, gets 99 % and 92 %.)

best = search.best()
print(search.evaluate(X_test, y_test)["accuracy"][best])
onnx.save(search.model(best), "best.onnx")

# %%
# An ensemble
# -----------
#
# Members that are to differ by chance need other initial weights: `init="redrawn"` draws matrices
# and kernels from the normal distribution with the mean and the standard deviation that they have
# in the file, and `init="glorot"` by Glorot's rule. `weights` takes a dict for each member instead.
# The mean of their probabilities is usually better than the prediction of a single member.

ensemble = og.TrainerStack(model, "cross_entropy", members=8, init="redrawn", learning_rate=0.01)
ensemble.fit(X, y, epochs=20)
scores = ensemble.predict(X_test)  # (8, 320, 10)
p = np.exp(scores - scores.max(axis=2, keepdims=True))
p /= p.sum(axis=2, keepdims=True)
single = (scores.argmax(axis=2) == y_test).mean(axis=1)
together = (p.mean(axis=0).argmax(axis=1) == y_test).mean()
print(single, together)

# %%
# What a member is
# ----------------
#
# A member is what a `Trainer` with its weights, learning rate and optimizer would be, up to
# rounding: clipping by `clip_norm`, norms of LAMB and matrices of Muon are those of the member.
# Schedules by epoch or by a monitored loss go by the member's own losses. Masks of dropout are the
# same for all, those of a `Trainer` with that seed. Callbacks see all members at once: losses and
# metrics are arrays `(members,)` in the history, and weights `(members, ...)` in the state.
# `EarlyStopping` stops each member when its own value no longer improves, and gives it its best
# weights back; a callback of your own stops member `k` by `control.freeze.add(k)`.
#
# A member whose loss or weights become NaN or infinite keeps its last finite state, and the others
# go on as if it were not there. `fit` warns, and `state.frozen` has its number and its last step.

with_one_too_many = og.TrainerStack(
    model, "cross_entropy", optimizer="sgd", learning_rate=[0.1, 1e38]
)
try:
    with_one_too_many.fit(X, y, epochs=2)
finally:
    print(with_one_too_many.state.frozen)

# %%
# When it is faster, and when not
# -------------------------------
#
# The nodes of most operators become one node for all members. Convolutions whose weights train,
# recurrent layers, and operators that are rare in networks become a node for each; then a stack
# saves what the others cost, and building takes longer with every member. With large layers the
# products take the time, and a stack is as fast as trainers one after the other: see
# :doc:`Benchmarks </benchmarks>`. It needs the memory of all members at once, and updates
# no weights in place.
#
# A stack refuses sequences that depend on trained weights, and subgraphs that run for some members
# only: an `If` whose condition depends on weights, or a `Loop` whose number of iterations does. It
# does not share batches with other processes, and `Recorder` describes one model. Train such models
# by a `Trainer` each.
