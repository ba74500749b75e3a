"""A published sentence encoder becomes a classifier: a new head, and LoRA in its attention.

MiniLM learns from 60 sentences which opinions are good, and is tested on words that were in none of
them. The merged file has the encoder's speed. PyTorch trains the same adapters and head.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

import onnxgrad as og

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from minilm_torch import sentence_vectors
from published import fetched, time_ratio

encoder = fetched("minilm")
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
trainer = og.Trainer(model, "cross_entropy", learning_rate=1e-3, metrics=["accuracy"])
trainer.fit(X, y, epochs=5, batch_size=10)
print(accuracy := trainer.evaluate(X_test, y_test))
assert accuracy["accuracy"] > 0.9
og.save(og.merge_lora(trainer.model), "opinions.onnx")
print(f"{time_ratio('opinions.onnx', encoder, X_test):.2f} x the time of the encoder")
arrays = og.get_train_initializer(model)  # weights have the names of PyTorch, or these as aliases
frozen = {t.names[-1]: torch.tensor(arrays[t.name][0]) for t in og.trainable(model) if t.is_weight}
own = {t.name: frozen[t.name].requires_grad_() for t in og.trainable(model).trained}
adamw = torch.optim.AdamW(own.values(), 1e-3)
for epoch in range(5):
    for rows in np.random.default_rng([0, epoch]).permutation(len(y)).reshape(-1, 10):
        weights = dict(frozen)
        for name in [n for n in own if "lora_A" in n]:
            merged = own[name] @ own[name.replace("lora_A", "lora_B")] * 16 / 4
            weights[name.replace("lora_A.", "")] = frozen[name.replace("lora_A.", "")] + merged
        vectors = sentence_vectors(weights, torch.tensor(X["input_ids"][rows]))
        logits = vectors @ own["head.weight"] + own["head.bias"]
        torch.nn.functional.cross_entropy(logits, torch.tensor(y)[rows]).backward()
        adamw.step(), adamw.zero_grad()
for name, tensor in own.items():
    np.testing.assert_allclose(trainer.state.weights[name], tensor.detach(), atol=1e-3)
