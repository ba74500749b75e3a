"""A convolutional network for digits
==================================

A small CNN is exported from PyTorch and trained by ``Trainer``. The first epoch equals that of
PyTorch. Then training goes on until the loss of held-out images stops falling, and once more in two
parts, resumed from a checkpoint, with the same result bit for bit.
"""

import io
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = X.reshape(-1, 1, 8, 8).astype(np.float32) / 16
X, X_test, y, y_test = X[:600], X[600:], y[:600], y[600:]

torch.manual_seed(0)
layers = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU()]
layers += [torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
net = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(512, 10))
file = io.BytesIO()
warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*legacy.*")
names = {"input_names": ["image"], "output_names": ["logits"], "dynamic_axes": {"image": {0: "N"}}}
torch.onnx.export(net, (torch.tensor(X[:2]),), file, **names, dynamo=False)
model = file.getvalue()

# %%
# One epoch of SGD with momentum, in PyTorch and here, with the same order of the rows.

sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for rows in np.random.default_rng([0, 0]).permutation(len(X)).reshape(-1, 40):
    sgd.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.tensor(X[rows])), torch.tensor(y[rows])).backward()
    sgd.step()
one = og.Trainer(
    model, "cross_entropy", optimizer=og.optimizers.momentum(0.9), learning_rate=0.1, seed=0
)
one.fit(X, y, batch_size=40)
for name, weight in net.state_dict().items():
    np.testing.assert_allclose(one.state.weights[name], weight.numpy(), atol=2e-3)
print("the weights after an epoch are those of PyTorch")


# %%
# Now to the end: a learning rate that falls along a cosine, early stopping, and a checkpoint every
# 20 steps. If the folder has a checkpoint, ``resume`` goes on from there.


def trained(folder, epochs=20):
    stop = og.EarlyStopping(patience=2, min_delta=0.03)
    callbacks = [stop, og.Checkpoint(folder, every_steps=20)]
    rate = og.schedules.cosine(0.005, steps=300)
    trainer = og.Trainer(model, "cross_entropy", learning_rate=rate, callbacks=callbacks)
    return trainer.fit(X, y, validation=0.2, epochs=epochs, resume=folder)


runs = Path(tempfile.mkdtemp())
whole = trained(runs / "whole")
trained(runs / "parts", epochs=2)  # ends here, as by a power failure
resumed = trained(runs / "parts")
for name, weight in whole.state.weights.items():
    np.testing.assert_array_equal(resumed.state.weights[name], weight)
assert len(whole.history) < 20

for key in ("loss", "validation_loss"):
    plt.semilogy(range(1, 1 + len(whole.history)), [entry[key] for entry in whole.history])
plt.legend(["training images", "held-out images"])
plt.xlabel("epoch")
plt.ylabel("cross entropy")
plt.show()

# %%
# The trained file runs wherever onnxruntime does.

whole.save(runs / "digits.onnx")
session = onnxruntime.InferenceSession(runs / "digits.onnx")
predicted = session.run(None, {"image": X_test})[0].argmax(axis=1)
accuracy = np.mean(predicted == y_test)
print(f"accuracy for {len(X_test)} other images: {accuracy:.3f}")
assert accuracy > 0.88
figure, axes = plt.subplots(2, 10, figsize=(10, 2.6))
for ax, image, label, guess in zip(axes.flat, X_test, y_test, predicted):
    ax.imshow(image[0], cmap="gray_r")
    ax.set_title(guess, color="black" if guess == label else "red")
    ax.axis("off")
plt.show()
# sphinx_gallery_thumbnail_number = 2
