"""Language models of onnxruntime-genai's builder learn sentences by heart, and say them again.

    python benchmarks/learn_by_heart.py llama fp32
    python benchmarks/learn_by_heart.py gemma int4 --lora '*'

A random model of transformers becomes a folder of genai, trains on prompts with completions that
cannot be guessed, and is written to another folder, from which genai decodes greedily.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from language_models import FAMILIES, build

import onnxgrad as og

ANIMALS = (
    "cat dog fox owl bear wolf deer hare crow seal mole newt toad swan goat lynx ibis moth ant fly"
)
PLACES = "Rome Oslo Lima Cairo Paris Delhi Kyoto Tunis Quito Accra"
WORDS = (
    "red blue old new small big bread river stone light song paper glass apple cloud house garden "
    "winter summer music letter copper silver window table engine forest island mirror needle ocean"
)


def sentences(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return prompts that differ, and completions of random words."""
    rng, words = random.Random(seed), WORDS.split()
    pairs = [(a, p) for a in ANIMALS.split() for p in PLACES.split()]
    return [
        {
            "prompt": f"The {animal} of {place}",
            "completion": " " + " ".join(rng.choices(words, k=6)),
        }
        for animal, place in rng.sample(pairs, count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("precision", choices=["fp32", "fp16", "int4", "int8"])
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lora", help="pattern of the weights that get adapters; int4: '*'")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--keep", help="where the folders go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        learn(options, Path(options.keep or folder))


def learn(options: argparse.Namespace, home: Path) -> None:
    rows = sentences(options.sentences)
    said = [row["prompt"] + row["completion"] for row in rows]
    sizes = {"hidden": options.hidden, "layers": options.layers}
    home.mkdir(parents=True, exist_ok=True)
    source = build(home, options.family, options.precision, texts=said, **sizes)
    folder = og.load_folder(source)
    pattern = options.lora or ("*" if options.precision.startswith("int") else None)
    model = og.add_lora(folder, pattern, rank=options.rank) if pattern else folder
    data = og.language.texts(rows, folder)
    trainer = og.Trainer(
        model,
        "causal_lm",
        optimizer="adamw",
        learning_rate=og.schedules.cosine(options.rate, warmup=20),
        clip_norm=1.0,
    )
    began = time.perf_counter()
    trainer.fit(data, epochs=options.epochs, batch_size=options.batch_size)
    seconds = time.perf_counter() - began
    new = og.save_folder(trainer, home / "learned", like=folder, overwrite=True)
    answers = og.language.generate(new, [row["prompt"] for row in rows], 32)
    right = sum(a == row["completion"] for a, row in zip(answers, rows, strict=True))
    wrong = next((p for p in zip(rows, answers, strict=True) if p[0]["completion"] != p[1]), None)
    result = {
        "family": options.family,
        "precision": options.precision,
        "lora": pattern,
        "right": f"{right} of {len(rows)}",
        "epochs": trainer.state.epoch,
        "loss": trainer.history[-1]["loss"],
        "milliseconds a step": 1000 * seconds / trainer.state.step,
        "tokens": data.tokens,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "first wrong": wrong,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
