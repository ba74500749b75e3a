"""The attention of a small transformer
====================================

A sequence has four pairs of a key and a value, and a question: one of the four keys. The label is
the value of this key. The attention weights show that the trained model looks at the pair of this
key.
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

import onnxgrad as og

KEYS, PAIRS, WIDTH = 8, 4, 32
rng = np.random.default_rng(0)


def draw_sequences(count):
    """Return sequences, their labels, and the index of the pair that each question asks for."""
    keys = np.argsort(rng.random((count, KEYS)), axis=1)[:, :PAIRS]
    values, asked = rng.integers(0, KEYS, (count, PAIRS)), rng.integers(0, PAIRS, (count, 1))
    question = np.take_along_axis(keys, asked, 1)
    answer = np.take_along_axis(values, asked, 1)[:, 0]
    return {"pairs": np.stack([keys, values], axis=2), "question": question}, answer, asked[:, 0]


# %%
# The query of the attention is computed from the embedding of the question, the keys of the
# attention from the embeddings of the four keys, and the values of the attention from the
# embeddings of the four values. The model returns the logits of the label, and the attention
# weights as a second output.

model = onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["": 20]> recall (int64[N,{PAIRS},2] pairs, int64[N,1] question)
    => (float[N,{KEYS}] logits, float[N,1,{PAIRS}] attention)
    <int64[2] halves = {{1, 1}}, int64[1] last = {{2}}, int64[1] middle = {{1}},
     float scale = {{{WIDTH**-0.5}}}>
    {{ a, b = Split <axis = 2> (pairs, halves)  keys = Squeeze(a, last)  values = Squeeze(b, last)
       ke = Gather(embedding, keys)  ve = Gather(embedding, values)
       qe = Gather(embedding, question)
       K = MatMul(ke, Wk)  V = MatMul(ve, Wv)  Q = MatMul(qe, Wq)
       Kt = Transpose <perm = [0, 2, 1]> (K)  dots = MatMul(Q, Kt)  scores = Mul(dots, scale)
       attention = Softmax(scores)  mixed = MatMul(attention, V)  flat = Squeeze(mixed, middle)
       logits = MatMul(flat, Wo) }}
""")
shapes = {"embedding": (KEYS, WIDTH), "Wo": (WIDTH, KEYS)}
shapes |= dict.fromkeys(("Wk", "Wv", "Wq"), (WIDTH, WIDTH))
arrays = {name: rng.normal(0, 0.3, shape).astype("f4") for name, shape in shapes.items()}
model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())

trainer = og.Trainer(model, {"logits": "cross_entropy"}, learning_rate=og.schedules.cosine(0.01))
X, y, _ = draw_sequences(2000)
trainer.fit(X, y, epochs=15, batch_size=50)
plt.plot([entry["loss"] for entry in trainer.history])
plt.xlabel("epoch")
plt.ylabel("cross entropy")
plt.show()

# %%
# On 500 new sequences, the logits of the trained model equal the logits that the attention of
# PyTorch computes with the same weights.

X_test, y_test, asked = draw_sequences(500)
session = onnxruntime.InferenceSession(trainer.model.SerializeToString())
logits, attention = session.run(["logits", "attention"], X_test)
w = {name: torch.tensor(array) for name, array in trainer.state.weights.items()}
e = {n: w["embedding"][torch.tensor(X_test["pairs"][:, :, i])] for i, n in enumerate("kv")}
Q, K, V = w["embedding"][X_test["question"]] @ w["Wq"], e["k"] @ w["Wk"], e["v"] @ w["Wv"]
mixed = torch.nn.functional.scaled_dot_product_attention(Q, K, V)
np.testing.assert_allclose(logits, (mixed[:, 0] @ w["Wo"]).numpy(), atol=1e-3)
table = Table("500 new sequences", "share")
accuracy, found = np.mean(logits.argmax(1) == y_test), np.mean(attention[:, 0].argmax(1) == asked)
table.add_row("the largest logit is at the label", f"{accuracy:.3f}")
table.add_row("the largest attention is at the key of the question", f"{found:.3f}")
Console().print(table)
assert min(accuracy, found) > 0.95

# %%
# Each row of the picture is a sequence, and each column one of its pairs. A cross marks the pair of
# the key that the question asks for.

plt.figure(figsize=(4, 6), layout="constrained")
plt.imshow(attention[:16, 0], cmap="viridis", vmin=0, vmax=1)
plt.plot(asked[:16], range(16), "rx")
for (i, j), key in np.ndenumerate(X_test["pairs"][:16, :, 0]):
    plt.text(j - 0.4, i + 0.3, f"{key}→{X_test['pairs'][i, j, 1]}", color="white", fontsize=7)
plt.xticks(range(PAIRS))
plt.yticks(range(16), [f"{q[0]}?" for q in X_test["question"][:16]])
plt.colorbar(label="attention")
plt.show()
# sphinx_gallery_thumbnail_number = 2
