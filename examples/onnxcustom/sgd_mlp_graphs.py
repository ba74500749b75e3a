"""What a training consists of
===========================

Where the time of a training goes, its graphs as files, and pictures of two of them.
"""

import cProfile
import pstats
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from onnxgrad.compat import (
    LearningRateSGDNesterov,
    OrtGradientForwardBackwardOptimizer,
    onnx_rename_weights,
    onnx_simple_text_plot,
    plot_onnxs,
)

warnings.simplefilter("ignore", ConvergenceWarning)
X, y = (a.astype(np.float32) for a in make_regression(1000, 100, bias=2, random_state=0))
mlp = MLPRegressor(hidden_layer_sizes=(50, 10), max_iter=1, random_state=0).fit(X, y)
onx = onnx_rename_weights(to_onnx(mlp, X[:1], target_opset=15))
trainer = OrtGradientForwardBackwardOptimizer(
    onx, learning_rate=LearningRateSGDNesterov(1e-5), batch_size=15, random_state=0
)

# %%
# The profile of a training: most of the time is that of onnxruntime.

profile = cProfile.Profile()
profile.runcall(trainer.fit, X, y)
stats = pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(6)

# %%
# ``save_onnx_graph`` writes the graphs of the training.

paths = trainer.save_onnx_graph(tempfile.mkdtemp())
table = Table("graph", "file", "nodes")
for name, path in paths.items():
    for inner, file in path.items() if isinstance(path, dict) else [("", path)]:
        nodes = len(onnx.load(file).graph.node)
        table.add_row(" ".join([name, inner]).strip(), Path(file).name, str(nodes))
Console().print(table)

# %%
# Forward pass, loss, backward pass and update are one model. Its ``Scan`` runs one batch after the
# other, so that an epoch is one call.

epoch = onnx.load(paths["epoch_onnx_"])
print(onnx_simple_text_plot(epoch))
assert "Scan" in {node.op_type for node in epoch.graph.node}

# %%
# The update of a weight, and the loss with its gradient.

update, loss = trainer.learning_rate.axpyw_onnx_, paths["learning_loss"]["loss_grad_onnx_"]
plot_onnxs(update, loss, title=["update of a weight", "loss and its gradient"])
plt.show()

# %%
# And the training has an effect.

before, after = (np.mean((m.predict(X).ravel() - y) ** 2) for m in (mlp, trainer))
print(f"mean squared error before {before:.1f}, after {after:.1f}")
assert after < 0.1 * before
