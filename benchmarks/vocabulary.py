"""The loss of a language model over a large vocabulary: peak memory and time of a step of SGD.

Each side trains in a process of its own, from the same weights on the same rows: onnxgrad, PyTorch
with all logits in memory, and PyTorch with the logits of some tokens at a time, whose gradient is
computed in the forward pass (as the fused kernels of Hsu et al. 2024, arXiv:2410.10989). The peak
is that of the process during the steps, without what is there before them.

    python benchmarks/vocabulary.py [--words 150000] [--tokens 512] [--width 896] [--tied]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

RATE = 0.1
SIDES = ("onnxgrad", "PyTorch", "PyTorch in chunks")


def status(key: str) -> float:
    """Return an entry of this process's status in MB: "VmHWM" is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def weights(given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return the hidden layer, and the matrix of the vocabulary, (words, width) if it is tied."""
    rng, d = np.random.default_rng(0), given.width
    shape = (given.words, d) if given.tied else (d, given.words)
    head = rng.standard_normal(shape, np.float32)
    head *= d**-0.5
    return {"hidden": rng.standard_normal((d, d), np.float32) * d**-0.5, "head": head}


def data(given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return the input, tokens or their vectors, and the labels."""
    rng, shape = np.random.default_rng(1), (given.rows, given.tokens)
    labels = rng.integers(0, given.words, shape)
    return labels if given.tied else rng.standard_normal((*shape, given.width), np.float32), labels


def write(given: argparse.Namespace, path: Path) -> None:
    """Write the model, its weights in a file beside it."""
    import onnx

    words, d = given.words, given.width
    if given.tied:
        source, head = "int64[N, T] x", "back = Transpose<perm = [1, 0]>(head) y = MatMul(h, back)"
        begin = "rows = Gather(head, x) z = MatMul(rows, hidden)"
    else:
        source, head = f"float[N, T, {d}] x", "y = MatMul(h, head)"
        begin = "z = MatMul(x, hidden)"
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        lm ({source}) => (float[N, T, {words}] y) {{ {begin} h = Tanh(z) {head} }}""")
    for name, array in weights(given).items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin")


def onnxgrad_side(given: argparse.Namespace, path: Path) -> dict:
    """Train the file."""
    import onnxgrad as og

    seconds, (x, labels) = [], data(given)

    class Clock(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control) -> None:
            seconds.append(time.perf_counter())

    options = {"optimizer": "sgd", "learning_rate": RATE, "callbacks": [Clock()], "train": "*"}
    if given.loss == "causal_lm":
        trainer = og.Trainer(path, "causal_lm", **options)
    else:
        shift = {"axis": 2, "shift": True}
        trainer = og.Trainer(path, "cross_entropy", loss_options=shift, **options)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in memory now
    trainer.fit(x, labels, epochs=given.steps + 1, batch_size=given.rows, shuffle=False)
    return report(seconds, before, [entry["loss"] for entry in trainer.history])


def torch_side(given: argparse.Namespace) -> dict:
    """Train the same in PyTorch."""
    import torch

    if given.threads:
        torch.set_num_threads(given.threads)
    x, labels = (torch.from_numpy(array) for array in data(given))
    own = {name: torch.nn.Parameter(torch.from_numpy(a)) for name, a in weights(given).items()}
    optimizer = torch.optim.SGD(own.values(), lr=RATE)
    function = chunked() if given.side == SIDES[2] else None
    before, seconds, losses = status("VmRSS"), [], []
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(given.steps + 1):
        optimizer.zero_grad()
        rows = torch.nn.functional.embedding(x, own["head"]) if given.tied else x
        h = torch.tanh(rows @ own["hidden"])
        h, target = h[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        head = own["head"] if given.tied else own["head"].T
        if function is None:
            loss = torch.nn.functional.cross_entropy(h @ head.T, target)
        else:
            loss = function.apply(h, head, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss
        seconds.append(time.perf_counter())
    return report(seconds, before, losses)


def chunked(chunk: int = 128):
    """Return the loss as a function of PyTorch that never has the logits of all tokens."""
    import torch

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, w, target):
            dh, dw, total = torch.empty_like(h), torch.zeros_like(w), 0.0
            for i in range(0, len(h), chunk):
                part, index = h[i : i + chunk], target[i : i + chunk, None]
                z = part @ w.T
                lse = z.logsumexp(1, keepdim=True)
                total += (lse - z.gather(1, index)).sum()
                p = z.sub_(lse).exp_()
                p.scatter_add_(1, index, p.new_full(index.shape, -1.0))
                p /= len(h)
                dh[i : i + chunk] = p @ w
                dw.addmm_(p.T, part)
            ctx.save_for_backward(dh, dw)
            return total / len(h)

        @staticmethod
        def backward(ctx, g):
            return *(v.mul_(g) for v in ctx.saved_tensors), None

    return Chunked


def report(seconds: list[float], before: float, losses: list[float]) -> dict:
    step = float(np.median(np.diff(seconds)))
    peak = status("VmHWM")
    return {"seconds": step, "peak": peak, "grown": peak - before, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--loss", choices=["causal_lm", "cross_entropy"], default="causal_lm")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--side", choices=SIDES, nargs="*", default=SIDES)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        [given.side] = given.side
        own = given.side == SIDES[0]
        found = onnxgrad_side(given, Path(given.here)) if own else torch_side(given)
        print(json.dumps(found))
        return
    table = Table("tool", "s a step", "peak in MB", "grown by", "loss")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write(given, path)
        for side in given.side:
            arguments = [a for a in sys.argv[1:] if a not in ("--side", *SIDES)]
            command = [sys.executable, __file__, *arguments, "--here", path, "--side", side]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            one = json.loads(done.stdout.splitlines()[-1])
            shown = ("seconds", 2), ("peak", 0), ("grown", 0)
            numbers = (f"{one[key]:.{n}f}" for key, n in shown)
            table.add_row(side, *numbers, f"{one['losses'][-1]:.5f}")
    Console().print(table)


if __name__ == "__main__":
    main()
