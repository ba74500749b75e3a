"""Federated averaging
===================

Three clients train one model, and none of them shows its rows to another. Each client gets the
weights, trains on its own rows, and returns new weights; the mean of the returned weights is the
start of the next round (`McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>`_). A client is a
``NumPyClient`` of the package Flower (``flwr``), which takes and returns weights as arrays. Without
``flwr`` installed, the client is a class with the same methods.
"""

import matplotlib.pyplot as plt
import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import onnxgrad as og

try:  # a node of Flower runs ClientApp(lambda context: Client(X, y).to_client())
    from flwr.client import NumPyClient
except ImportError:
    NumPyClient = object

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
start = MLPClassifier((32,), random_state=0).partial_fit(X[:99], y[:99], classes=range(10))
model = to_onnx(start, X[:1], options={"zipmap": False})


class Client(NumPyClient):
    """Trains on its own rows."""

    def __init__(self, X, y):
        self.X, self.y = X, y
        self.trainer = og.Trainer(
            model, "cross_entropy", optimizer=og.optimizers.sgd(), learning_rate=0.1
        )

    def get_parameters(self, config):
        return list(self.trainer.state.weights.values())

    def fit(self, parameters, config):
        self.trainer.state.weights = dict(zip(self.trainer.state.weights, parameters, strict=True))
        for _ in range(config["steps"]):
            self.trainer.partial_fit(self.X, self.y, batch_size=len(self.X))
        return self.get_parameters(config), len(self.X), {}


def train_one_round(clients, parameters, steps):
    """Return the mean of the weights that the clients return after training."""
    results = [client.fit(parameters, {"steps": steps}) for client in clients]
    return [np.mean(copies, axis=0) for copies in zip(*(r[0] for r in results), strict=True)]


# %%
# The rows are sorted by digit, so that each client has the images of a few digits only. If every
# client does one step of gradient descent on all of its rows, the mean of the new weights equals
# the weights after one step on all rows.

order = np.argsort(y, kind="stable")[:1500]
clients = [Client(X[rows], y[rows]) for rows in np.array_split(order, 3)]
first = clients[0].get_parameters({})
on_all_rows, _, _ = Client(X[order], y[order]).fit(first, {"steps": 1})
for mean, expected in zip(train_one_round(clients, first, 1), on_all_rows, strict=True):
    np.testing.assert_allclose(mean, expected, atol=1e-6)

# %%
# A hundred rounds of ten steps each. For comparison, the first client also trains alone; then the
# model never learns the digits that this client has no images of.

evaluator = Client(X, y)


def accuracy(parameters):
    """Return the share of all images whose digit the model with these weights says correctly."""
    evaluator.fit(parameters, {"steps": 0})
    return np.mean(evaluator.trainer.predict(X).argmax(1) == y)


together, alone, scores = first, first, []
for _ in range(100):
    together = train_one_round(clients, together, 10)
    alone, _, _ = clients[0].fit(alone, {"steps": 10})
    scores.append((accuracy(together), accuracy(alone)))
plt.plot(scores, label=["three clients", "one client"])
plt.xlabel("round")
plt.ylabel("accuracy on the images of all digits")
plt.legend()
plt.show()
print(f"accuracy: {scores[-1][1]:.3f} by one client, {scores[-1][0]:.3f} by three")
assert scores[-1][0] > 0.85 > scores[-1][1]
