"""Federated averaging: three clients train a model on data that never leave them.

A client is a `NumPyClient` of Flower (flwr), weights in and out as arrays; without flwr, a class of
the same methods. A step of plain SGD on all rows of each, averaged (McMahan et al., 2017), is a
step of one trainer that has all data. A client with a third of the digits does not learn the rest.
"""

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
    def __init__(self, X, y):
        self.X, self.y = X, y
        self.trainer = og.Trainer(model, "cross_entropy", optimizer=og.sgd(), learning_rate=0.1)

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


order = np.argsort(y, kind="stable")[:1500]
clients = [Client(X[rows], y[rows]) for rows in np.array_split(order, 3)]  # as many rows each
final = first = clients[0].get_parameters({})
whole, _, _ = Client(X[order], y[order]).fit(first, {"steps": 1})
for ours, theirs in zip(averaged(clients, first, 1), whole, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
for _ in range(100):
    final = averaged(clients, final, 10)
alone, judge, scores = clients[0].fit(first, {"steps": 1000})[0], Client(X, y), []
for parameters in (alone, final):
    judge.fit(parameters, {"steps": 0})
    scores.append(np.mean(judge.trainer.predict(X).argmax(1) == y))
print(f"accuracy on all digits: {scores[0]:.3f} by one client, {scores[1]:.3f} by all")
assert scores[1] > 0.85 > scores[0]
