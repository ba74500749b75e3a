"""
Find names in sentences
=======================

Token classification: which words are the name of a person, a place or a company? The encoder is
a published file that embeds sentences, `paraphrase-MiniLM-L3-v2`. It gets a linear layer on each of
its tokens, and both train on sentences from templates. The names of the test are others: what the
model learns of them is where they stand, and what the encoder knows already.
"""

import matplotlib.pyplot as plt
import numpy as np
from published import fetched, fetched_tokenizer

import onnxgrad as og

people = [
    "Anna Berg", "Tom Fields", "Maria", "Peter Novak", "Julia Stone", "Ahmed", "Laura Rossi",
    "Paul", "Chen Wei", "Ingrid Dahl", "Samuel Okoro", "Nina", "Viktor Hahn", "Olga Petrova",
    "Rafael Costa", "Grace", "Hiroshi Tanaka", "Elif Kaya", "Marcus", "Leila Haddad",
]  # fmt: skip
places = [
    "Paris", "New Delhi", "Oslo", "Buenos Aires", "Kyoto", "Lagos", "San Diego", "Warsaw", "Lima",
    "Cape Town", "Vienna", "Hong Kong", "Dublin", "Nairobi", "Rio de Janeiro", "Boston", "Seoul",
    "Porto", "Tel Aviv", "Zagreb",
]  # fmt: skip
companies = [
    "Siemens", "General Motors", "Nokia", "Deutsche Bank", "Toyota", "Acme Tools", "Oracle",
    "Blue River Foods", "Samsung", "Northern Rail", "Philips", "Sunset Media", "Bosch", "Kodak",
    "Green Valley Energy", "Nestle", "Red Arrow Games", "Intel", "Star Alliance", "Shell",
]  # fmt: skip
templates = [
    "{PER} flew from {LOC} to {LOC} on Monday .", "Last year {PER} left {ORG} and moved to {LOC} .",
    "{ORG} opened an office in {LOC} .", "The lawyer of {PER} did not answer .",
    "{PER} and {PER} have worked for {ORG} since May .", "It rains in {LOC} , said {PER} .",
    "Shares of {ORG} fell after {PER} resigned .", "We met in {LOC} to talk about the budget .",
    "Nobody knows why {ORG} sold its plant near {LOC} to {ORG} .", "The meeting starts at noon .",
]  # fmt: skip

# %%
# A sentence is a list of words, each with a tag: `B-PER` begins the name of a person, `I-PER`
# continues it, and `O` is no name. Files of that kind, CoNLL or JSON lines, are read as well.


def sentences(count, names, seed):
    """Return sentences of templates with names that are drawn."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        tokens, tags = [], []
        for part in rng.choice(templates).split():
            name = str(rng.choice(names[part])).split() if part in names else [part]
            kind = part.strip("{}") if part in names else ""
            tokens += name
            tags += [f"{'I' if i else 'B'}-{kind}" if kind else "O" for i in range(len(name))]
        rows.append({"tokens": tokens, "tags": tags})
    return rows


both = {"{PER}": people, "{LOC}": places, "{ORG}": companies}
train = sentences(160, {kind: names[:15] for kind, names in both.items()}, 0)
test = sentences(80, {kind: names[15:] for kind, names in both.items()}, 1)
print(*zip(train[0]["tokens"], train[0]["tags"], strict=True))

# %%
# The task reads the classes from the tags and adds the layer. The metric is the F1 of whole names:
# the first word, the last one and the kind must be right.

task = og.tasks.tokens.Tokens(fetched("minilm"), train, fetched_tokenizer())
trainer = task.trainer(optimizer="adamw", learning_rate=3e-4, freeze=["*embeddings*"], seed=0)
rows = task.read(test)
before = trainer.evaluate(rows)["entity_f1"]
trainer.fit(task.data, validation=rows, epochs=6, batch_size=16)
after = trainer.history[-1]["validation_entity_f1"]
print(f"F1 on names that were not trained on: {before:.2f} before, {after:.2f} after")
assert after > before + 0.3

# %%
# Predictions are characters of the text. `write` puts them into JSON lines, CoNLL and HTML.

texts = ["Yesterday Grace Hopper left Intel , and flew to Rio de Janeiro ."]
results = task.predict(trainer, texts)
task.write(texts, results, "entities")
colors = {"PER": "tab:orange", "LOC": "tab:green", "ORG": "tab:blue"}
figure, axes = plt.subplots(figsize=(8, 1))
axes.text(0, 0, texts[0], family="monospace", size=11)
for entity in results[0]:
    x, width = entity["start"], entity["end"] - entity["start"]
    marked = " " * x + texts[0][x : x + width]
    axes.text(0, 0, marked, family="monospace", size=11, color=colors[entity["label"]])
    print(texts[0][x : x + width], entity["label"], round(entity["score"], 2))
for y, (label, color) in enumerate(colors.items()):
    axes.text(0.2 * y, -0.7, label, color=color)
axes.set_ylim(-1, 1)
axes.axis("off")
plt.show()
