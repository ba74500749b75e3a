"""A published sentence encoder becomes a classifier: a new head, and LoRA in its attention.

MiniLM is at hand as an ONNX file only. It learns from 60 sentences which opinions are good, and is
tested on words that were in none of them. The merged file has the encoder's nodes and its speed.
PyTorch computes the same scores from its weights.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from published import CACHE, fetch, models

encoder = fetch(next(m for m in models() if m.name == "minilm"), CACHE)
IDS = {"movie": 3185, "book": 2338, "food": 2833, "story": 2466, "song": 2299}  # as BERT has them
IDS |= {"good": 2204, "great": 2307, "nice": 3835, "bad": 2919, "awful": 9643, "ugly": 9200}
IDS |= {"excellent": 6581, "wonderful": 6919, "terrible": 6659, "horrible": 9202}


def sentences(good, bad):
    """Return sentences such as "the book was very nice" as the encoder takes them, and labels."""
    things, verys, words = list(IDS)[:5], [2200, 2428], [*good, *bad]
    ids = [[101, 1996, IDS[t], 2001, v, IDS[w], 102] for t, v, w in product(things, verys, words)]
    labels = [int(word in good) for _, _, word in product(things, verys, words)]
    return {"input_ids": np.array(ids), "attention_mask": np.ones((len(ids), 7), int)}, labels


X, y = sentences(["good", "great", "nice"], ["bad", "awful", "ugly"])
X_test, y_test = sentences(["excellent", "wonderful"], ["terrible", "horrible"])
model = og.add_head(encoder, units=["bad", "good"], at="461")  # "461": one vector a sentence
model = og.add_lora(model, ["*.query.weight", "*.value.weight"], rank=4)
print(og.trainable(model).trained)
trainer = og.Trainer(model, "cross_entropy", learning_rate=1e-3, metrics=["accuracy"])
trainer.fit(X, y, epochs=5, batch_size=10)
print(accuracy := trainer.evaluate(X_test, y_test))
assert accuracy["accuracy"] > 0.9
merged = og.merge_lora(trainer.model)
og.save(merged, "opinions.onnx")

arrays = og.get_train_initializer(merged)
w = {
    name: torch.tensor(arrays[t.name][0]) for t in og.trainable(merged).trained for name in t.names
}
w = {name.removeprefix("model.0.auto_model."): tensor for name, tensor in w.items()}
ids = torch.tensor(X_test["input_ids"])
e = [w[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")]
h = e[0][ids] + e[1][:7] + e[2][0]
h = torch.layer_norm(h, [384], *(w[f"embeddings.LayerNorm.{n}"] for n in ("weight", "bias")), 1e-12)
for i in range(3):
    layer = torch.nn.TransformerEncoderLayer(384, 12, 1536, 0, "gelu", 1e-12, batch_first=True)
    for kind in ("weight", "bias"):
        m = {n.split(".", 3)[-1]: t.T for n, t in w.items() if n.startswith(f"encoder.layer.{i}.")}
        parts = [m[f"attention.self.{n}.{kind}"] for n in ("query", "key", "value")]
        linear = [m[f"{n}.dense.{kind}"] for n in ("attention.output", "intermediate", "output")]
        norms = [m[f"{n}.LayerNorm.{kind}"] for n in ("attention.output", "output")]
        own = [p for n, p in layer.named_parameters() if n.endswith(kind)]
        for parameter, tensor in zip(own, [torch.cat(parts), *linear, *norms]):
            parameter.data = tensor
    h = layer.eval()(h)
expected = h.mean(dim=1) @ w["head.weight"] + w["head.bias"]
session = ort.InferenceSession("opinions.onnx")
np.testing.assert_allclose(session.run(["logits"], X_test)[0], expected.detach(), atol=1e-4)
