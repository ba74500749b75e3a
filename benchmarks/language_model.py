"""LoRA on a language model of half a billion weights in 4 bits, beside PEFT on its float32 weights.

Each side trains in a process of its own, on the same rows, and reports seconds of a step, on the
clock and of processors, and the most memory that its process had.

    python benchmarks/language_model.py FOLDER [--layers 24] [--steps 3] [--recompute none]

FOLDER keeps the model between calls: `hf` as transformers saves it, `int4` as the builder of
onnxruntime-genai writes it. It needs transformers, peft and onnxruntime-genai.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROWS, TOKENS, WORDS, RANK = 4, 256, 151936, 8


def build(folder: Path, layers: int) -> None:
    """Write a random model with the sizes of Qwen2 0.5B, as both sides read it."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    sizes = Qwen2Config(
        vocab_size=WORDS, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(sizes).save_pretrained(folder / "hf")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    names = {"bos_token": "a", "eos_token": "b", "pad_token": "c"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "hf")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    places = ["-i", folder / "hf", "-o", folder / "int4", "-c", folder / "cache"]
    subprocess.run([*command, *map(os.fspath, places)], check=True, stdout=subprocess.DEVNULL)


def tokens() -> np.ndarray:
    """Return the rows that both sides train on."""
    return np.random.default_rng(0).integers(3, WORDS, (ROWS, TOKENS))


class Clock:
    """Times steps, on the clock and of processors."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []
        self.before = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """Note the end of a step."""
        now = time.perf_counter(), time.process_time()
        self.laps.append((now[0] - self.before[0], now[1] - self.before[1]))
        self.before = now

    def report(self, losses: list[float]) -> None:
        """Print the fastest step but the first, which also builds what is needed, as JSON."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        step, busy = (min(times) for times in zip(*self.laps[1:], strict=True))
        times = {"step": step, "processor": busy, "first": self.laps[0][0]}
        print(json.dumps(times | {"peak_gb": most, "losses": losses}))


def onnxgrad_side(folder: Path, steps: int, recompute: str) -> None:
    """Train the file in 4 bits."""
    import onnxgrad as og

    clock = Clock()

    class Laps(og.callbacks.Callback):
        def on_epoch_end(self, trainer, state, control) -> None:
            clock.lap()

    model = og.add_lora(folder / "int4" / "model.onnx", "*qkv*", rank=RANK)
    options = {"learning_rate": 1e-3, "recompute": recompute, "callbacks": [Laps()]}
    trainer = og.Trainer(model, "causal_lm", **options)
    trainer.fit({"input_ids": tokens()}, epochs=steps + 1)
    clock.report([entry["loss"] for entry in trainer.history])


def peft_side(folder: Path, steps: int, _recompute: str) -> None:
    """Train the float32 weights by PyTorch."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM

    names, ids = ["q_proj", "k_proj", "v_proj"], torch.tensor(tokens())
    model = Qwen2ForCausalLM.from_pretrained(folder / "hf").float()
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=16, target_modules=names))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    clock, losses = Clock(), []
    for _ in range(steps + 1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.lap()
    clock.report(losses)


def main() -> None:
    """Run both sides, each in its own process, and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--recompute", default="all", choices=["none", "cheap", "all"])
    parser.add_argument("--side", choices=["onnxgrad", "peft"])
    given = parser.parse_args()
    if given.side:
        run = onnxgrad_side if given.side == "onnxgrad" else peft_side
        return run(given.folder, given.steps, given.recompute)
    if not (given.folder / "int4" / "model.onnx").exists():
        build(given.folder, given.layers)
    results = {}
    for side in ("peft", "onnxgrad"):
        arguments = ["--steps", str(given.steps), "--recompute", given.recompute, "--side", side]
        command = [sys.executable, __file__, os.fspath(given.folder), *arguments]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[side] = json.loads(text.splitlines()[-1])
        print(side, results[side])
    own, other = results["onnxgrad"], results["peft"]
    for name in ("step", "processor", "peak_gb"):
        print(f"{name}: {own[name] / other[name]:.2f} x that of PEFT on float32")
    return None


if __name__ == "__main__":
    main()
