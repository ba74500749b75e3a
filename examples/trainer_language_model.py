"""A language model with a token loss: sentences of different length, padded and batched by length.

The model is a table with the scores of the next letter after each letter. What it can learn at best
is known: the frequencies of pairs of letters, which numpy counts.
"""

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
onnx.checker.check_model(model, full_check=True)

data = og.by_length(words, words, value=0, y_value=PADDING)
trainer = og.Trainer(
    model,
    "cross_entropy",
    loss_options={"shift": True, "ignore_index": PADDING},  # each letter predicts the next one
    optimizer="adam",
    learning_rate=og.cosine(0.5),
    metrics=["perplexity"],
)
before = trainer.evaluate(data)["loss"]
trainer.fit(data, epochs=200, batch_size=16)
after = trainer.evaluate(data)
print(f"loss before {before:.4f} = log 27, after {after['loss']:.4f}")
np.testing.assert_allclose(before, np.log(27), rtol=1e-5)
np.testing.assert_allclose(after["perplexity"], np.exp(after["loss"]), rtol=1e-5)

counts = np.zeros((27, 27))
for word in words:
    np.add.at(counts, (word[:-1], word[1:]), 1)
p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
best = -(counts[counts > 0] * np.log(p[counts > 0])).sum() / counts.sum()
print(f"entropy of pairs of letters: {best:.4f}")
assert best < after["loss"] < best + 0.01
