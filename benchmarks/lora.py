"""LoRA on MiniLM: time and memory of a step, against full fine-tuning and against PEFT.

The network is the sentence encoder of `published.csv`; the witness is transformers' BertModel with
the weights of the file, by PyTorch and PEFT. All train with AdamW on one batch toward random
embeddings; the adapters, of rank 8, are beside the queries and values, or beside all products. Each
number is the median of processes that take turns. The memory is the peak of a process, and in
brackets what it takes beyond that of the same process before training.

    pip install peft transformers
    python benchmarks/lora.py [--rows 16] [--tokens 64] [--threads 1 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper
from published import CACHE, fetch, models
from rich.console import Console
from rich.table import Table

OUTPUT, LAYERS, WIDTH, HEADS = "461", 3, 384, 12
PARTS = ("attention.self.query", "attention.self.key", "attention.self.value")
PARTS += ("attention.output.dense", "intermediate.dense", "output.dense")
TARGETS = {"query, value": ("query", "value"), "all": ("query", "key", "value", "dense")}
KINDS = ("full", *TARGETS)
RATE = 1e-4


def encoder() -> onnx.ModelProto:
    """Return the model from tokens to embeddings."""
    from onnxgrad.graph import select_model_inputs_outputs

    path = fetch(next(m for m in models() if m.name == "minilm"), CACHE)
    return select_model_inputs_outputs(onnx.load(path), outputs=[OUTPUT])


def batch(rows: int, tokens: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tokens and the target."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30000, (rows, tokens))
    mask = (np.arange(tokens) < rng.integers(tokens // 2, tokens + 1, (rows, 1))).astype(np.int64)
    target = rng.normal(0, 0.3, (rows, WIDTH)).astype(np.float32)
    return {"input_ids": ids, "attention_mask": mask}, target


def adapted(proto: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """Return the model with adapters."""
    from onnxgrad import add_lora

    return add_lora(proto, [f"*.{module}.weight" for module in TARGETS[kind]], rank=8, alpha=16)


# -- what one process measures ------------------------------------------------------------------


def memory(key: str) -> float:
    """Return an entry of this process's status in MB: "VmHWM" is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def ours(kind: str, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the measurements of a `Trainer`."""
    import onnxgrad as og

    X, y = batch(rows, tokens)
    proto = encoder()
    if kind != "full":
        proto = adapted(proto, kind)
    before, seconds = memory("VmRSS"), []

    class Clock(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            seconds.append(time.perf_counter())

    trainer = og.Trainer(proto, "squared_error", learning_rate=RATE, callbacks=[Clock()])
    trainer.fit(X, y, epochs=steps, batch_size=rows, shuffle=False)
    result = {"peak": memory("VmHWM"), "before": before}
    result |= {"seconds": median(np.diff(seconds)), "losses": losses(trainer.history)}
    return result | ({} if kind == "full" else {"merged": merged_error(trainer.model, X)})


def losses(history: list[dict[str, Any]]) -> list[float]:
    """Return the first and the last loss, of an element."""
    return [history[i]["loss"] for i in (0, -1)]


def merged_error(model: onnx.ModelProto, X: dict[str, np.ndarray]) -> float:
    """Return the difference of merged and adapted model, relative to the largest output."""
    from onnxgrad import merge_lora

    a, b = (
        ort.InferenceSession(m.SerializeToString()).run(None, X)[0]
        for m in (model, merge_lora(model))
    )
    return float(np.abs(a - b).max() / np.abs(a).max())


def theirs(kind: str, rows: int, tokens: int, steps: int) -> dict[str, Any]:
    """Return the measurements of PyTorch, and with adapters of PEFT."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    X, y = batch(rows, tokens)
    network = bert()
    if kind != "full":
        import peft

        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS[kind]))
        network = peft.get_peft_model(network, config)
    before, seconds, values = memory("VmRSS"), [], []
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    tensors, target = {n: torch.tensor(v) for n, v in X.items()}, torch.tensor(y)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (pooled(network, tensors) - target).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
        seconds.append(time.perf_counter())
    result = {"peak": memory("VmHWM"), "before": before, "losses": [values[0], values[-1]]}
    return result | {"seconds": median(np.diff(seconds))}


def pooled(network: Any, tensors: dict[str, Any]) -> Any:
    """Return the mean of the tokens' states."""
    mask = tensors["attention_mask"][..., None].float()
    states = network(**tensors).last_hidden_state
    return (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def bert() -> Any:
    """Return transformers' BertModel with the weights of the file, without dropout."""
    import torch
    from transformers import BertConfig, BertModel

    proto = encoder()
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    products = [a for n, a in arrays.items() if n.startswith("onnx::MatMul")]
    names = [f"encoder.layer.{i}.{part}.weight" for i in range(LAYERS) for part in PARTS]
    state = {n: torch.tensor(a.T.copy()) for n, a in zip(names, products, strict=True)}
    head = "model.0.auto_model."
    named = {n.removeprefix(head): a for n, a in arrays.items() if n.startswith(head)}
    state |= {n: torch.tensor(a) for n, a in named.items()}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        **off,
    )
    network = BertModel(config, add_pooling_layer=False)
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("position_ids" in n or "token_type_ids" in n for n in missing), missing
    return network


# -- all of them, by turns ----------------------------------------------------------------------


def measure(tool: str, kind: str, threads: int, arguments: Any) -> dict[str, Any]:
    """Return the measurements of a process of its own on `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    sizes = [str(n) for n in (arguments.rows, arguments.tokens, arguments.steps)]
    done = subprocess.run(
        [sys.executable, __file__, "--one", tool, kind, *sizes],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def row(results: list[dict[str, Any]]) -> tuple[float, str, str]:
    """Return the seconds of a step, as text, and the memory as text."""
    seconds = median(r["seconds"] for r in results)
    peak, added = (median(r["peak"] - less * r["before"] for r in results) for less in (0, 1))
    return seconds, f"{1000 * seconds:.0f}", f"{peak:.0f} ({added:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        tool, kind, *sizes = arguments.one
        function = {"onnxgrad": ours, "PyTorch": theirs}[tool]
        print(json.dumps(function(kind, *map(int, sizes))))
        return
    columns = ["ms a step", "of full", "ratio to PyTorch", "MB at the peak (added)"]
    table = Table("threads", "trains", "tool", *columns)
    for threads in arguments.threads:
        cases = [(tool, kind) for kind in KINDS for tool in ("onnxgrad", "PyTorch")]
        results: dict[tuple, list] = {case: [] for case in cases}
        for _ in range(arguments.rounds):
            for case in cases:
                results[case].append(measure(*case, threads, arguments))
        for tool, kind in cases:
            seconds, shown, megabytes = row(results[tool, kind])
            full, other = (row(results[case])[0] for case in ((tool, "full"), ("PyTorch", kind)))
            ratios = f"{seconds / full:.2f}", f"{seconds / other:.2f}"
            table.add_row(str(threads), kind, tool, shown, *ratios, megabytes)
        for kind in KINDS:
            a, b = (results[tool, kind][0]["losses"] for tool in ("onnxgrad", "PyTorch"))
            print(f"{kind}: losses of onnxgrad {a}, of PyTorch {b}")
    Console().print(table)
    errors = [r["merged"] for case in results for r in results[case] if "merged" in r]
    print(f"merged and adapted models differ by at most {max(errors):.1e} of the largest output")
    assert max(errors) < 1e-5


if __name__ == "__main__":
    main()
