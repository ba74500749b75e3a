"""Which words a text classifier reads
===================================

The label of a text is the sum of the values of its words, of which "good" has 1 and "bad" -1.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
from onnx import numpy_helper

import onnxgrad as og

WORDS = "[pad] good great bad awful the a film plot was and".split()
VALUES = np.float32([0, 1, 2, -1, -2, 0, 0, 0, 0, 0, 0])
rng = np.random.default_rng(0)
model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    reader (int64[N,T] ids) => (float[N,1] y) <int64[1] axes = {1}>
    { e = Gather(table, ids)  h = MatMul(e, w)  t = Tanh(h)  s = MatMul(t, v)
      y = ReduceSum<keepdims=0>(s, axes) }""")
weights = {"table": (11, 8), "w": (8, 8), "v": (8, 1)}
for name, shape in weights.items():
    value = rng.normal(0, 0.4, shape).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(value, name))

ids = rng.integers(0, 11, (500, 8))
label = VALUES[ids].sum(axis=1, keepdims=True)
trainer = og.Trainer(model, "squared_error", learning_rate=0.02)
trained = trainer.fit(ids, label, epochs=40).model

# %%
# Words have no gradient, and their embedding does. Occlusion replaces one word after the other by
# padding; as words do not interact in this model, both methods give the same numbers.

text = "the plot was awful and the film good".split()
x = np.array([[WORDS.index(word) for word in text]])
scores = og.explain.ScoreFunction(trained, wrt="e")
padding = {"ids": np.zeros_like(x)}
found = og.explain.integrated_gradients(scores, x, baselines=padding)
print("gap:", og.explain.completeness_gap(scores, found, x, baselines=padding).round(4))
words = found.sum(axis=-1)[0]  # over the axis of the embedding
hidden = og.explain.occlusion(trained, x, 1, baselines=padding, wrt="ids")[0]
for word, by_gradient, by_hiding in zip(text, words, hidden):
    print(f"{word:6} {by_gradient:6.2f} {by_hiding:6.2f}")
np.testing.assert_allclose(words, hidden, atol=0.01)  # words do not interact here
np.testing.assert_allclose(words, VALUES[x[0]], atol=0.3)

# %%
# The text in colors, and the same numbers as bars.

figure, axes = plt.subplots(2, 1, figsize=(8, 4), height_ratios=[1, 3], layout="constrained")
og.explain.show_text(text, found[0], axes[0])
og.explain.show_table([f"{i} {word}" for i, word in enumerate(text)], words, axes[1])
plt.show()
