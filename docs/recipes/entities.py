"""
Find names in sentences
=======================

Which words are the name of a person, a place or a company? A published encoder of sentences,
`paraphrase-MiniLM-L3-v2`, gets a linear layer on each token. Both train on sentences of templates,
and are tested with other names: what they learn is where names stand, and what they are like.
"""

import matplotlib.pyplot as plt
import numpy as np
from published import fetched, fetched_tokenizer  # published.py: on the page Recipes

import onnxgrad as og

names = {
    "PER": "Anna Berg,Tom Fields,Maria,Peter Novak,Julia Stone,Ahmed,Laura Rossi,Paul,Chen Wei,"
    "Nina,Samuel Okoro,Viktor Hahn,Rafael Costa,Ingrid Dahl,Olga,Grace,Hiroshi Tanaka,Elif Kaya",
    "LOC": "Paris,New Delhi,Oslo,Buenos Aires,Kyoto,Lagos,San Diego,Warsaw,Lima,Cape Town,Vienna,"
    "Hong Kong,Dublin,Nairobi,Turin,Rio de Janeiro,Boston,Seoul,Porto,Tel Aviv",
    "ORG": "Siemens,General Motors,Nokia,Deutsche Bank,Toyota,Acme Tools,Oracle,Blue River Foods,"
    "Samsung,Northern Rail,Philips,Bosch,Sunset Media,Kodak,Shell,Nestle,Red Arrow Games,Intel",
}
templates = """PER flew from LOC to LOC on Monday .|Last year PER left ORG and moved to LOC .
    ORG opened an office in LOC .|The lawyer of PER did not answer .|It rains in LOC , said PER .
    PER and PER have worked for ORG since May .|Shares of ORG fell after PER resigned .
    Nobody knows why ORG sold its plant near LOC to ORG .|We met in LOC to talk about money ."""
templates = templates.replace("\n", "|").split("|")


def sentences(count, part, seed):
    """Return words and their tags: B of the first word of a name, I of others, O of no name."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        row = {"tokens": [], "tags": []}
        for word in rng.choice(templates).split():
            name = rng.choice(names[word].split(",")[part]) if word in names else word
            words = str(name).split()
            row["tokens"] += words
            row["tags"] += [f"{'I' if i else 'B'}-{word}" for i in range(len(words))]
        row["tags"] = [tag if tag[2:] in names else "O" for tag in row["tags"]]
        rows.append(row)
    return rows


# %%
# The metric is the F1 of whole names: the first word, the last one and the kind must be right.

task = og.tasks.tokens.Tokens(fetched("minilm"), sentences(160, slice(15), 0), fetched_tokenizer())
trainer = task.trainer(optimizer="adamw", learning_rate=3e-4, freeze=["*embeddings*"], seed=0)
test = task.read(sentences(80, slice(15, None), 1))
before = trainer.evaluate(test)["entity_f1"]
trainer.fit(task.data, validation=test, epochs=6, batch_size=16)
f1 = [before, *(entry["validation_entity_f1"] for entry in trainer.history)]
print(f1, *task.predict(trainer, ["Grace Hopper left Intel, and flew to Seoul."])[0], sep="\n")
plt.plot(f1, "o-")
plt.gca().set(xlabel="epochs", ylabel="F1 of names that were not trained on", ylim=(0, 1))
plt.show()
assert f1[-1] > before + 0.3
