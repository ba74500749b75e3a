"""What a base with adapters as inputs costs, in each of its forms, beside the file without.

A random Llama by the builder of onnxruntime-genai; adapters beside all linear layers but the last.
A prompt, and one token behind a past, as in generation. Each form takes its turn in each round; the
columns are medians: milliseconds, and ratios to the file without adapters in the same round.

    python benchmarks/adapter_base.py [--hidden 512] [--layers 4] [--rounds 30] [--threads 1]

pip install torch transformers onnxruntime-genai
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort

import onnxgrad as og

PATTERNS = ["*qkv_proj*", "*o_proj*", "*gate_proj*", "*up_proj*", "*down_proj*"]


def written(folder: Path, hidden: int, layers: int) -> None:
    """Write a float32 and an int4 file of a random Llama."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "hf")
    tokens = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="b").save_pretrained(folder / "hf")
    for precision in ("fp32", "int4"):
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu"]
        command += ["-i", folder / "hf", "-o", folder / precision, "-p", precision]
        command += ["-c", folder / "cache"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)


def with_rank(base: onnx.ModelProto, rank: int) -> onnx.ModelProto:
    """Return a base whose defaults are zeros of another rank."""
    changed = onnx.ModelProto()
    changed.CopyFrom(base)
    for tensor in changed.graph.initializer:
        if ".lora_" in tensor.name:
            shape = [n or rank for n in tensor.dims]
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), tensor.name))
    return changed


def forms(
    path: Path, folder: Path
) -> dict[str, tuple[ort.InferenceSession, ort.RunOptions | None]]:
    """Return a session of each form, and the options of its runs."""
    plain = onnx.load(path)
    adapted = og.add_lora(plain, PATTERNS, rank=16)
    base = og.graph.adapter_inputs(adapted)
    og.save_adapter(adapted, folder / "a.onnx_adapter")
    adapter, active = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(folder / "a.onnx_adapter"))
    active.add_active_adapter(adapter)
    KEPT.append(adapter)
    models = {
        "without adapters": (plain, None),
        "base, defaults of rank 0": (base, None),
        "base, defaults of rank 1": (with_rank(base, 1), None),
        "base, adapter of rank 16": (base, active),
        "adapter of rank 16 in the file": (adapted, None),
    }
    return {name: (session(model), options) for name, (model, options) in models.items()}


KEPT: list[ort.LoraAdapter] = []  # options do not keep them
THREADS = 1


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = THREADS
    return ort.InferenceSession(model.SerializeToString(), options)


def feeds(
    served: ort.InferenceSession, heads: int, tokens: int, past: int
) -> dict[str, np.ndarray]:
    """Return a batch of one row: `tokens` behind `past` others."""
    rng, data = np.random.default_rng(0), {}
    for x in served.get_inputs():
        if x.name.startswith("past"):
            data[x.name] = np.zeros((1, heads, past, 64), np.float32)
    ids = rng.integers(0, 4096, (1, tokens))
    return data | {"input_ids": ids, "attention_mask": np.ones((1, tokens + past), np.int64)}


def main() -> None:
    global THREADS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    THREADS = arguments.threads
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, arguments.hidden, arguments.layers)
        for precision in ("fp32", "int4"):
            sessions = forms(folder / precision / "model.onnx", folder)
            for tokens, past in ((128, 0), (1, 128)):
                times: dict[str, list[float]] = {form: [] for form in sessions}
                for _ in range(arguments.rounds):
                    for form, (served, options) in sessions.items():
                        data = feeds(served, arguments.hidden // 128, tokens, past)
                        start = time.perf_counter()
                        served.run(None, data, options)
                        times[form].append(1000 * (time.perf_counter() - start))
                first = times["without adapters"]
                print(f"{precision}, {tokens} tokens behind {past}")
                for form, measured in times.items():
                    ratio = median(a / b for a, b in zip(measured, first, strict=True))
                    print(f"  {form:32} {median(measured):8.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
