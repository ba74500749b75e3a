"""
Search in the words of a domain
===============================

A published encoder of sentences, paraphrase-MiniLM-L3-v2, does not know the words of one company:
there, "heron is red" if the payment service does not respond. Pairs of such texts train it, and the
other rows of a batch are wrong answers (Henderson et al. 2017, arXiv:1705.00652).
"""

import csv
import tempfile
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from published import fetched, fetched_tokenizer  # published.py: on the page Recipes

import onnxgrad as og

systems = "heron=payment service|maple=search index|cobalt=mail server|juniper=customer database|\
otter=web shop|saffron=stock of the warehouse|pebble=login page|tundra=backup storage"
states = "is red=does not respond|went cold=returns old data|is chewing=needs much memory|\
has hiccups=restarts again and again|fell asleep=answers slowly|lost its keys=rejects passwords"
places = "in the barn=in Oslo|upstairs=in Lisbon|at the lake=in Geneva"

# %%
# Every system is in every state at every place. A third of these is held out: all their words are
# in the training, but never together.

parts = ([p.split("=") for p in words.split("|")] for words in (systems, states, places))
pairs = [(f"{a} {b} {c}", f"The {x} {y} {z}.") for (a, x), (b, y), (c, z) in product(*parts)]
pairs, folder = np.random.default_rng(0).permutation(pairs).tolist(), Path(tempfile.mkdtemp())
for file, rows in {"train.csv": pairs[48:], "held_out.csv": pairs[:48]}.items():
    with (folder / file).open("w", newline="") as opened:
        csv.writer(opened).writerows([("anchor", "positive"), *rows])

# %%
# Recall of queries at 1: how often the held-out answer with the largest cosine is the right one.

encoder, tokenizer = fetched("minilm"), fetched_tokenizer()
task = og.tasks.embeddings.Embeddings(encoder, folder / "train.csv", tokenizer=tokenizer)
trainer = task.trainer(
    optimizer="adamw", learning_rate=og.schedules.cosine(3e-4, 18, warmup=4), seed=1
)
held_out = task.read(folder / "held_out.csv")
before = trainer.evaluate(held_out)["query_recall_at_1"]
trainer.fit(task.data, epochs=3, batch_size=16).save(folder / "search.onnx")
after = trainer.evaluate(held_out)["query_recall_at_1"]
assert after > before + 0.3, (before, after)

# %%
# Cosines of each question, a row, with each answer. `write` stores embeddings, for a search by any
# library.

for place, model in enumerate((encoder, folder / "search.onnx"), 1):
    z = task.predict(model, [text for column in zip(*pairs[:48], strict=True) for text in column])
    plt.subplot(1, 2, place, title=["before", "after"][place - 1]).imshow(z[:48] @ z[48:].T)
print(before, after, task.write([answer for _, answer in pairs[:48]], z[48:], folder / "index"))
