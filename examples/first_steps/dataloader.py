"""DataLoaders and metrics of PyTorch
==================================

``Trainer.fit`` reads batches from a ``DataLoader`` of PyTorch, and ``metrics`` takes metrics of the
package torchmetrics. A training loop in PyTorch over the same batches ends with the same weights.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import torch
import torchmetrics
from rich.console import Console
from rich.table import Table

import onnxgrad as og

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4)).astype(np.float32)
y = (X @ rng.normal(size=(4, 3)) + rng.normal(size=(300, 3))).argmax(axis=1)
dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))


def loader():
    """Return a DataLoader that shuffles the rows in the same order in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(dataset, 32, shuffle=True, generator=generator)


# %%
# The network, as an ONNX model and as a module of PyTorch with the same weights.

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> mlp (float[N,4] x) => (float[N,3] logits)
    { a = Gemm <transB = 1> (x, w1, b1)  h = Relu(a)  logits = Gemm <transB = 1> (h, w2, b2) }
""")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
names = dict(zip(["w1", "b1", "w2", "b2"], net.parameters(), strict=True))
for name, parameter in names.items():
    tensor = onnx.numpy_helper.from_array(parameter.detach().numpy(), name)
    model.graph.initializer.append(tensor)

# %%
# The history of the training has the loss and the metrics of every epoch, for the training data and
# for the validation data, which are the same rows here.

trainer = og.Trainer(
    model,
    "cross_entropy",
    optimizer="adamw",
    learning_rate=0.01,
    metrics=[torchmetrics.Accuracy("multiclass", num_classes=3), "auc"],
)
trainer.fit(loader(), validation=loader(), epochs=5)
table = Table(*trainer.history[0])
for entry in trainer.history:
    table.add_row(*(f"{value:.3f}" for value in entry.values()))
Console(width=110).print(table)

# %%
# The training loop in PyTorch ends with the same weights and the same accuracy.

optimizer, batches, losses = torch.optim.AdamW(net.parameters(), 0.01), loader(), []
for _ in range(5):
    epoch = []
    for rows, labels in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(rows), labels)
        loss.backward()
        optimizer.step()
        epoch += [loss.item()] * len(rows)  # the last batch has fewer rows
    losses.append(np.mean(epoch))
for name, parameter in names.items():
    np.testing.assert_allclose(trainer.state.weights[name], parameter.detach(), atol=1e-5)
accuracy = (net(torch.tensor(X)).argmax(1) == torch.tensor(y)).float().mean()
np.testing.assert_allclose(trainer.evaluate(X, y)["MulticlassAccuracy"], accuracy, atol=1e-6)
plt.plot(losses, "o", label="PyTorch")
plt.plot([entry["loss"] for entry in trainer.history], label="onnxgrad")
plt.xlabel("epoch")
plt.ylabel("cross entropy")
plt.legend()
plt.show()
