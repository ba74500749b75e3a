"""Time and memory of a training step of one layer of attention over a long sequence.

python benchmarks/attention.py --tokens 2048 --batch 2 [--window 128]

Each form runs in a process of its own, on one thread. The memory is how far the peak of the process
rises above what it had before the first step.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np
import onnx

import onnxgrad as og
from onnxgrad.autodiff import attention_blocks

HEADS, SIZE, WIDTH = 8, 64, 512
FORMS = ("none", "all, plain", "all", "pytorch")


def network(tokens: int, window: int) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f"""<ir_version: 10,
        opset_import: ["": 21, "com.microsoft": 1]>
        f (float[N, {tokens}, {WIDTH}] x) => (float[N, {tokens}, {WIDTH}] y) {{
            q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
            a, e, f = com.microsoft.GroupQueryAttention<num_heads={HEADS}, kv_num_heads={HEADS},
                local_window_size={window or -1}>(q, k, v, , , last, total)
            o = MatMul(a, wo) y = Add(x, o) }}""")
    rng = np.random.default_rng(0)
    weights = {f"w{n}": rng.normal(0, 0.05, (WIDTH, WIDTH)).astype(np.float32) for n in "qkvo"}
    sizes = {"last": np.int32([tokens - 1] * 8), "total": np.int32([tokens])}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, n) for n, a in (weights | sizes).items()
    )
    return proto


def ours(form: str, options: argparse.Namespace, x: np.ndarray):
    if "plain" in form:
        attention_blocks.LEAST = 1 << 40
    proto = network(options.tokens, options.window)
    trainer = og.Trainer(
        proto, "mse", recompute=form[:4].strip(","), optimizer="sgd", learning_rate=1e-3
    )
    return lambda: trainer.partial_fit(x, np.zeros_like(x))


def pytorch(options: argparse.Namespace, x: np.ndarray):
    import torch

    torch.set_num_threads(1)
    f, batch = torch.nn.functional, torch.tensor(x)
    weights = [torch.nn.Parameter(0.05 * torch.randn(WIDTH, WIDTH)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    mask = None
    if options.window:
        seen = torch.ones(options.tokens, options.tokens, dtype=torch.bool)
        mask = seen.tril() & ~seen.tril(-options.window)

    def step():
        optimizer.zero_grad()
        *qkv, o = weights
        apart = ((batch @ w).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for w in qkv)
        a = f.scaled_dot_product_attention(*apart, attn_mask=mask, is_causal=mask is None)
        y = batch + a.transpose(1, 2).flatten(2) @ o
        f.mse_loss(y, torch.zeros_like(y)).backward()
        optimizer.step()

    return step


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in {"tokens": 2048, "batch": 2, "window": 0, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--form", choices=FORMS)
    options = parser.parse_args()
    if options.form is None:
        for form in FORMS:
            subprocess.run([sys.executable, *sys.argv, "--form", form], check=True)
        return
    shape = options.batch, options.tokens, WIDTH
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    torch = options.form == "pytorch"
    step = pytorch(options, x) if torch else ours(options.form, options, x)
    before, times = peak(), []
    for _ in range(1 + options.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    print(f"{options.form:10}  {np.median(times[1:]):.2f} s  {peak() - before:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
