"""An ONNX layer between two layers of PyTorch
===========================================

``OnnxModule`` makes a model a layer of PyTorch, which trains with an optimizer of PyTorch. The
losses have to be those of PyTorch alone, and the score about that of scikit-learn.
"""

import copy
import io
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.neural_network import MLPRegressor
from torch import nn

from onnxgrad.torch import OnnxModule

X, y = (a.astype(np.float32) for a in make_friedman1(600, noise=0.1, random_state=0))
y = (y - y.mean()) / y.std()
X_train, y_train = torch.tensor(X[:450]), torch.tensor(y[:450, None])

# %%
# The layer in the middle is exported, and takes the place of the original.

torch.manual_seed(0)
middle = nn.Sequential(nn.Linear(30, 10), nn.Tanh())
net = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), middle, nn.Linear(10, 1))
file = io.BytesIO()
warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*legacy.*")
torch.onnx.export(
    middle, (torch.zeros(2, 30),), file, input_names=["h"], output_names=["z"],
    dynamic_axes={"h": {0: "N"}, "z": {0: "N"}}, dynamo=False,
)  # fmt: skip
mixed = copy.deepcopy(net)
mixed[2] = OnnxModule(file.getvalue())  # or a path
print(mixed)


# %%
# One training loop for both.


def train(network):
    torch.manual_seed(0)  # the order of the rows
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        for rows in torch.randperm(450).split(50):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(network(X_train[rows]), y_train[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


alone, with_onnx = train(net), train(mixed)
np.testing.assert_allclose(with_onnx, alone, rtol=1e-3)
plt.semilogy(alone, linewidth=3, label="PyTorch")
plt.semilogy(with_onnx, linewidth=1, label="with an ONNX layer")
plt.xlabel("step")
plt.ylabel("mean squared error")
plt.legend()
plt.show()

# %%
# A network of scikit-learn of the same size, on rows that none has seen.

warnings.simplefilter("ignore", ConvergenceWarning)
mlp = MLPRegressor(
    hidden_layer_sizes=(30, 10), activation="tanh", alpha=0, batch_size=50,
    learning_rate_init=0.01, max_iter=60, n_iter_no_change=60, random_state=0,
).fit(X[:450], y[:450])  # fmt: skip
predicted = mixed(torch.tensor(X[450:])).detach().numpy()
theirs, ours = r2_score(y[450:], mlp.predict(X[450:])), r2_score(y[450:], predicted)
print(f"R²: scikit-learn {theirs:.3f}, with an ONNX layer {ours:.3f}")
assert ours > theirs - 0.1
