"""A quantized model learns something new
======================================

onnxruntime quantizes a classifier of digits to 8 bits. Then a new scanner has faded images, of
which the file reads few. Low-rank adapters beside its integers train; the integers stay as they
are.
"""

import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.table import Table
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

import onnxgrad as og

warnings.simplefilter("ignore", ConvergenceWarning)
X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
train, test = slice(0, 1200), slice(1200, None)
folder = Path(tempfile.mkdtemp())
network = MLPClassifier((64,), max_iter=300, random_state=0).fit(X[train], y[train])
model = to_onnx(network, X[:1], options={"zipmap": False}, target_opset=18)
model = og.graph.select_model_inputs_outputs(model, ["probabilities"])
og.save(model, folder / "float.onnx")

# %%
# After quantization, weights are integers, and products are those of integers.

quantize_dynamic(folder / "float.onnx", folder / "int8.onnx")
sizes = [(folder / name).stat().st_size for name in ("float.onnx", "int8.onnx")]
print("{} bytes as floats, {} bytes as integers".format(*sizes))
assert sizes[1] < sizes[0] / 2


def accuracy(path, images):
    session = onnxruntime.InferenceSession(path)
    guesses = session.run(["probabilities"], {"X": images})[0].argmax(axis=1)
    return np.mean(guesses == y[test])


# %%
# ``add_lora`` puts a product of two thin matrices beside each integer matrix. Gradients pass
# straight through the rounding of the activations, and the trainer says so.

faded = 0.4 * X + 0.5
adapted = og.add_lora(folder / "int8.onnx", "coefficient*", rank=8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = og.Trainer(adapted, "cross_entropy", learning_rate=og.schedules.cosine(0.01))
    trainer.fit(faded[train], y[train], epochs=30, batch_size=50)
    trainer.save(folder / "adapted.onnx")
print(*{str(warning.message) for warning in caught}, sep="\n")
plt.plot([entry["loss"] for entry in trainer.history])
plt.xlabel("epoch")
plt.ylabel("cross entropy")
plt.show()

# %%
# The integers are those of the quantized file, bit for bit.

before, after = (onnx.load(folder / name).graph for name in ("int8.onnx", "adapted.onnx"))
integers = {t.name: numpy_helper.to_array(t) for t in before.initializer if "quantized" in t.name}
kept = {t.name: numpy_helper.to_array(t) for t in after.initializer if t.name in integers}
for name, array in integers.items():
    np.testing.assert_array_equal(kept[name], array)

# %%
# The witness is scikit-learn: the same network trained on faded ones from the start.

peer = MLPClassifier((64,), max_iter=300, random_state=0).fit(faded[train], y[train])
table = Table("test images", "accuracy")
scores = {
    "quantized, as they were": accuracy(folder / "int8.onnx", X[test]),
    "quantized, faded": accuracy(folder / "int8.onnx", faded[test]),
    "adapted, faded": accuracy(folder / "adapted.onnx", faded[test]),
    "scikit-learn, trained on faded ones": peer.score(faded[test], y[test]),
}
for name, score in scores.items():
    table.add_row(name, f"{score:.3f}")
Console().print(table)
*_, unadapted, ours, theirs = scores.values()
assert unadapted < 0.6
assert ours > theirs - 0.06
