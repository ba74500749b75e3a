"""Many models at once
===================

In a small network, starting a node takes longer than the arithmetic of the node: so a step of a
dozen copies in one graph takes little longer than a step of one copy. `TrainerStack` trains copies
of a model, which are called its *members*. Members differ in their learning rates, optimizers or
initial weights: for a search of the best arguments, or for an ensemble. Every weight of the graph
has a leading axis of members, and one run of onnxruntime trains all members.

This page is one Python file: `python docs/tutorials/ensembles.py` runs it.
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
# If an argument of `TrainerStack` is a list, each element belongs to one member. In this search,
# four learning rates times two weight decays are eight members. All members begin with the weights
# of the file, and train on the same batches.

rates = [rate for rate in (1e-4, 1e-3, 1e-2, 1e-1) for _ in range(2)]
decays = [og.optimizers.adamw(weight_decay=decay) for _ in range(4) for decay in (0.0, 0.1)]
search = og.TrainerStack(
    model, "cross_entropy", learning_rate=rates, optimizer=decays, metrics=["accuracy"]
)
search.fit(X, y, validation=0.2, epochs=20)
for rate, entry in zip(rates, search.history[-1]["validation_accuracy"], strict=True):
    print(rate, entry)

# %%
# In the history, and in the results of `evaluate`, each value is an array with one number for each
# member. `predict` returns an array of shape (members, rows, ...). `best` returns the index of the
# member with the lowest validation loss, and `model` returns one member as a `ModelProto`.
#
# The accuracy on the test rows is lower than the accuracy on the validation rows. The people who
# wrote the digits of the validation rows also wrote digits of the training rows; other people wrote
# the digits of the test rows. (The nearest neighbor classifier of scikit-learn is right for 99 % of
# the validation rows and for 92 % of the test rows.)

best = search.best()
print(search.evaluate(X_test, y_test)["accuracy"][best])
onnx.save(search.model(best), "best.onnx")

# %%
# An ensemble
# -----------
#
# The members of an ensemble have the same arguments and different initial weights. `init="redrawn"`
# draws the elements of each matrix and kernel from the normal distribution, with the mean and the
# standard deviation of the matrix or kernel in the file. `init="glorot"` draws by Glorot's rule.
# The argument `weights` takes a dict of initial weights for each member instead. The mean of the
# probabilities of all members is usually better than the prediction of a single member.

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
# A member trains like a `Trainer` with the weights, the learning rate and the optimizer of the
# member, up to rounding. `clip_norm` clips by the norm of the gradients of one member, and LAMB and
# Muon compute the norms and the matrices of one member. Schedules that depend on a monitored loss
# read the loss of the member. The masks of dropout are the same for all members: the masks of a
# `Trainer` with the same seed. Callbacks see all members at once: losses and metrics are arrays
# `(members,)` in the history, and weights are arrays `(members, ...)` in the state. `EarlyStopping`
# stops a member when the monitored value of this member no longer improves, and gives the member
# its best weights back. A callback of your own stops member `k` by `control.freeze.add(k)`.
#
# If the loss or the weights of a member become NaN or infinite, this member keeps its last finite
# state, and the other members train on. `fit` warns, and `state.frozen` is a dict from the index of
# the stopped member to its last step.

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
# For most operators, one node computes all members. Convolutions whose weights train, recurrent
# layers, and operators that are rare in networks need one node for each member; then a stack is
# faster only for the remaining nodes, and building the graph takes longer with every member. In
# large layers, matrix products take most of the time, and a stack is as fast as several trainers
# one after the other: see :doc:`Benchmarks </benchmarks>`. A stack needs the memory of all members
# at once, and it does not update weights in place.
#
# A stack refuses sequences that depend on trained weights. A stack also refuses subgraphs that run
# for some members only: an `If` whose condition depends on weights, and a `Loop` whose number of
# iterations depends on weights. Train copies of a model that a stack refuses by one `Trainer` for
# each copy. A stack does not share batches with other processes, and does not take the callback
# `Recorder`, which describes one model.
