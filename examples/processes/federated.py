"""Federated averaging
===================

Three clients train a model on data that never leave them: each gets the weights, trains, and
returns new weights, which are averaged (McMahan et al., 2017). A client is a ``NumPyClient`` of
Flower (``flwr``), with weights in and out as arrays; without ``flwr`` installed, it is a class with
the same methods.
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
    """Trains on rows of its own."""

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


def averaged(clients, parameters, steps):
    results = [client.fit(parameters, {"steps": steps}) for client in clients]
    return [np.mean(same, axis=0) for same in zip(*(r[0] for r in results), strict=True)]


# %%
# The rows are sorted by digit, so that no client sees all digits. One step of each client,
# averaged, is one step on all rows.

order = np.argsort(y, kind="stable")[:1500]
clients = [Client(X[rows], y[rows]) for rows in np.array_split(order, 3)]
first = clients[0].get_parameters({})
whole, _, _ = Client(X[order], y[order]).fit(first, {"steps": 1})
for ours, theirs in zip(averaged(clients, first, 1), whole, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-6)

# %%
# A hundred rounds of ten steps each, against a client that trains alone. It never learns the
# digits that it has not seen.

judge = Client(X, y)


def accuracy(parameters):
    judge.fit(parameters, {"steps": 0})
    return np.mean(judge.trainer.predict(X).argmax(1) == y)


together, alone, scores = first, first, []
for _ in range(100):
    together = averaged(clients, together, 10)
    alone, _, _ = clients[0].fit(alone, {"steps": 10})
    scores.append((accuracy(together), accuracy(alone)))
plt.plot(scores, label=["three clients", "one client"])
plt.xlabel("round")
plt.ylabel("accuracy for all digits")
plt.legend()
plt.show()
print(f"accuracy: {scores[-1][1]:.3f} by one client, {scores[-1][0]:.3f} by all")
assert scores[-1][0] > 0.85 > scores[-1][1]
