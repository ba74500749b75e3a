"""A CNN trained by `Trainer`: as PyTorch trains it, then to the end, with a break in between.

The first epoch equals PyTorch's. Then training ends when the loss of held-out images stops falling.
It is run once more in two parts, resumed from a checkpoint, with the same result bit for bit.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from pyarrow import parquet

import onnxgrad as og

DATA = Path(__file__).parent.parent / "data"
table = parquet.read_table(DATA / "digits.parquet")
X = np.stack([table[f"pixel_{i}"] for i in range(64)], axis=1).reshape(-1, 1, 8, 8)
y = table["label"].to_numpy()
X, X_test, y, y_test = X[:600], X[600:], y[:600], y[600:]

# One epoch of SGD in PyTorch, from the weights of the file and in the trainer's order of rows.
model = onnx.load(DATA / "digits_cnn.onnx")
first, second = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 32, 3, padding=1)
layers = [first, torch.nn.ReLU(), second, torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(512, 10))
arrays = {i.name: torch.tensor(onnx.numpy_helper.to_array(i)) for i in model.graph.initializer}
net.load_state_dict({name: arrays[name] for name in net.state_dict()})
sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for rows in np.random.default_rng([0, 0]).permutation(len(X)).reshape(-1, 40):
    sgd.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.tensor(X[rows])), torch.tensor(y[rows])).backward()
    sgd.step()
one = og.Trainer(model, "cross_entropy", optimizer=og.momentum(0.9), learning_rate=0.1, seed=0)
one.fit(X, y, batch_size=40)
for name, weight in net.state_dict().items():
    np.testing.assert_allclose(one.state.weights[name], weight.numpy(), atol=2e-3)


def trained(folder, epochs=20):
    stop = og.EarlyStopping(patience=2, min_delta=0.03)
    each, rate = [stop, og.Checkpoint(folder, every_steps=20)], og.cosine(0.005, steps=300)
    trainer = og.Trainer(model, "cross_entropy", learning_rate=rate, callbacks=each)
    return trainer.fit(X, y, validation=0.2, epochs=epochs, resume=folder)


whole = trained("runs/whole")
print([round(entry["validation_loss"], 4) for entry in whole.history])
trained("runs/broken", epochs=2)
resumed = trained("runs/broken")
for name, weight in whole.state.weights.items():
    np.testing.assert_array_equal(resumed.state.weights[name], weight)
whole.save("digits_trained.onnx")
session = onnxruntime.InferenceSession("digits_trained.onnx")
accuracy = np.mean(session.run(None, {"image": X_test})[0].argmax(axis=1) == y_test)
print("accuracy for the test images:", accuracy, "after", len(whole.history), "epochs")
assert accuracy > 0.88
assert len(whole.history) < 20
