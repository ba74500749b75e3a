"""A language model of letters
===========================

The model is a table with the scores of the next letter after each letter. Sentences of different
length are padded, and batched with others of similar length. What the model can learn at best is
known: the frequencies of pairs of letters, which numpy counts.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

WORDS = """gradient model train weight loss layer batch epoch step rate schedule metric label
optimizer callback checkpoint resume sample class token sequence image audio tensor shape type graph
node input output value name file folder data row column table index array number""".split()
LETTERS = " abcdefghijklmnopqrstuvwxyz"  # the blank, 0, begins and ends a word
PADDING = -100  # ignored by the loss
words = [[LETTERS.index(c) for c in f" {word} "] for word in WORDS]

model = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]> bigram (int64[N,T] ids) => (float[N,T,27] logits)
    { logits = Gather(table, ids) }
""")
table = np.zeros((27, 27), np.float32)
model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))

# %%
# ``shift`` compares each position with the next letter. A table of zeros knows nothing: its loss is
# log 27.

trainer = og.Trainer(
    model,
    "cross_entropy",
    loss_options={"shift": True, "ignore_index": PADDING},
    optimizer="adam",
    learning_rate=og.schedules.cosine(0.5),
    metrics=["perplexity"],
)
data = og.data.by_length(words, words, value=0, y_value=PADDING)
before = trainer.evaluate(data)["loss"]
np.testing.assert_allclose(before, np.log(27), rtol=1e-5)
trainer.fit(data, epochs=200, batch_size=16)
after = trainer.evaluate(data)
np.testing.assert_allclose(after["perplexity"], np.exp(after["loss"]), rtol=1e-5)

# %%
# The entropy of the next letter given the last one, from counted pairs, is the lowest loss that is
# possible.

counts = np.zeros((27, 27))
for word in words:
    np.add.at(counts, (word[:-1], word[1:]), 1)
p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
best = -(counts[counts > 0] * np.log(p[counts > 0])).sum() / counts.sum()
print(f"loss before {before:.4f}, after {after['loss']:.4f}, at best {best:.4f}")
assert best < after["loss"] < best + 0.01

plt.plot([entry["loss"] for entry in trainer.history], label="loss")
plt.axhline(best, color="gray", label="entropy of the pairs")
plt.xlabel("epoch")
plt.legend()
plt.show()

# %%
# The probabilities of the model are the frequencies of the pairs.

logits = trainer.state.weights["table"]
learned = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), layout="constrained")
seen = counts.sum(axis=1) > 0
for ax, title, matrix in zip(axes, ("counted", "learned"), (p, learned * seen[:, None])):
    ax.imshow(matrix, cmap="viridis")
    ax.set(title=title, xlabel="next letter", ylabel="letter")
    ax.set_xticks(range(27), LETTERS)
    ax.set_yticks(range(27), LETTERS)
plt.show()
np.testing.assert_allclose(learned[seen], p[seen], atol=0.06)
# sphinx_gallery_thumbnail_number = 2
