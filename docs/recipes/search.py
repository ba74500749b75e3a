"""
Search in the words of a domain
===============================

An encoder of sentences finds texts that mean the same, if it knows the words. Those of one company
it does not know: there, "heron is red" means that the payment service does not respond. Pairs of
such texts train it, with the other rows of a batch as wrong answers (Henderson et al. 2017,
arXiv:1705.00652).

The encoder is a published file of three layers, paraphrase-MiniLM-L3-v2. The pairs are made here:
code names and slang on one side, plain words on the other.
"""

import csv
import tempfile
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from published import fetched, fetched_tokenizer

import onnxgrad as og

SYSTEMS = {
    "heron": "the payment service",
    "maple": "the search index",
    "cobalt": "the mail server",
    "juniper": "the customer database",
    "otter": "the web shop",
    "saffron": "the stock of the warehouse",
    "pebble": "the login page",
    "tundra": "the backup storage",
}
STATES = {
    "is red": "does not respond",
    "went cold": "returns old data",
    "is chewing": "needs too much memory",
    "has hiccups": "restarts again and again",
    "fell asleep": "answers slowly",
    "lost its keys": "rejects valid passwords",
}
PLACES = {"in the barn": "in Oslo", "upstairs": "in Lisbon", "at the lake": "in Geneva"}

# %%
# A question and its answer are every system in every state at every place. A third of these
# combinations is held out: their words are all in the training, but never together.

rng = np.random.default_rng(0)
combined = list(product(SYSTEMS.items(), STATES.items(), PLACES.items()))
pairs = [
    (f"{name} {slang} {where}, what now?", f"What to do if {system} {state} {place}.")
    for (name, system), (slang, state), (where, place) in combined
]
pairs = [pairs[i] for i in rng.permutation(len(pairs))]
folder = Path(tempfile.mkdtemp())
for file, rows in {"train.csv": pairs[48:], "held_out.csv": pairs[:48]}.items():
    with (folder / file).open("w", newline="") as opened:
        csv.writer(opened).writerows([("anchor", "positive"), *rows])

# %%
# Recall of queries at 1: how often the answer with the largest cosine is the right one, among those
# of all rows that were held out.

task = og.tasks.embeddings.Embeddings(
    fetched("minilm"), folder / "train.csv", tokenizer=fetched_tokenizer()
)
trainer = task.trainer(optimizer="adamw", learning_rate=og.cosine(3e-4, 24, warmup=4), seed=1)
held_out = task.read(folder / "held_out.csv")
before = trainer.evaluate(held_out)
trainer.fit(task.data, epochs=4, batch_size=16)
after = trainer.evaluate(held_out)
print(before, after, sep="\n")
assert after["query_recall_at_1"] > before["query_recall_at_1"] + 0.3

# %%
# What comes out is the same file with other weights. Cosines of each question (a row) with each
# answer, in the order of both, before and after:

trainer.save(folder / "search.onnx")
questions, answers = zip(*pairs[:48], strict=True)
models = {"before": task.model, "after": folder / "search.onnx"}
figure, axes = plt.subplots(1, 2, figsize=(9, 4.5))
for place, (title, model) in zip(axes, models.items(), strict=True):
    embeddings = task.predict(model, [*questions, *answers])
    place.imshow(embeddings[:48] @ embeddings[48:].T, vmin=0, vmax=1)
    place.set(title=title, xlabel="answer", ylabel="question")
plt.show()

# %%
# `write` stores the embeddings of a collection, for a search by any library, and the nearest
# neighbors of each row as a table.

print(task.write(list(answers), task.predict(trainer, list(answers)), folder / "index"))
