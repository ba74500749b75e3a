"""Two processes train one model
=============================

``torchrun`` starts two processes, each computes the gradients of its rows of every batch, and the
gradients are added up between them. The weights equal those of one process, up to rounding.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import onnxgrad as og

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
start = MLPClassifier((32,), random_state=0).partial_fit(X[:99], y[:99], classes=range(10))
model = to_onnx(start, X[:1], options={"zipmap": False})
folder = Path(tempfile.mkdtemp())
og.save(model, folder / "start.onnx")
np.savez(folder / "digits.npz", X=X, y=y)

# %%
# What each process runs. A ``Trainer`` joins the group of ``torch.distributed`` that is there. The
# first process saves the model.

SCRIPT = """
import json
import numpy as np, torch.distributed
import onnxgrad as og

torch.distributed.init_process_group("gloo")
data = np.load("digits.npz")
trainer = og.Trainer("start.onnx", "cross_entropy", learning_rate=0.01)
trainer.fit(data["X"], data["y"], epochs=5, batch_size=100)
if torch.distributed.get_rank() == 0:
    trainer.save("trained.onnx")
    losses = [entry["loss"] for entry in trainer.history]
    open("losses.json", "w").write(json.dumps(losses))
torch.distributed.destroy_process_group()
"""
(folder / "train.py").write_text(SCRIPT)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
done = subprocess.run([*torchrun, "train.py"], cwd=folder, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
losses = json.loads((folder / "losses.json").read_text())

# %%
# One process, with the same batches.

alone = og.Trainer(model, "cross_entropy", learning_rate=0.01)
alone.fit(X, y, epochs=5, batch_size=100)
together = og.graph.get_train_initializer(folder / "trained.onnx")
table = Table("weight", "shape", "largest difference")
for name, weight in alone.state.weights.items():
    difference = np.abs(together[name][0] - weight).max()
    table.add_row(name, str(weight.shape), f"{difference:.1e}")
    np.testing.assert_allclose(together[name][0], weight, atol=1e-4)
Console().print(table)

plt.plot(losses, linewidth=4, label="two processes")
plt.plot([entry["loss"] for entry in alone.history], label="one process")
plt.xlabel("epoch")
plt.ylabel("cross entropy")
plt.legend()
plt.show()
np.testing.assert_allclose(losses, [entry["loss"] for entry in alone.history], rtol=1e-4)
