"""What a training consists of: where its time goes, its graphs as files, and pictures of two."""

import cProfile
import pstats
import warnings
from pprint import pprint

import matplotlib.pyplot as plt
import numpy as np
import onnx
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor

from onnxgrad import (
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

profile = cProfile.Profile()
profile.runcall(trainer.fit, X, y)
pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(6)

paths = trainer.save_onnx_graph("sgd_mlp_graphs")
pprint(paths)

# Forward, loss, backward and update are one model, whose Scan runs one batch after another.
epoch = onnx.load(paths["epoch_onnx_"])
print("\nAn epoch\n" + onnx_simple_text_plot(epoch))

update, loss = trainer.learning_rate.axpyw_onnx_, paths["learning_loss"]["loss_grad_onnx_"]
plot_onnxs(update, loss, title=["update of a weight", "loss and its gradient"])
plt.savefig("sgd_mlp_graphs.png")

assert np.mean((trainer.predict(X).ravel() - y) ** 2) < 0.1 * np.mean((mlp.predict(X) - y) ** 2)
assert "Scan" in {node.op_type for node in epoch.graph.node}
