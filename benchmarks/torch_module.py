"""A training step in PyTorch: `OnnxModule` of an MLP 100-50-10-1, and the same by `torch.nn`.

Microseconds of zero_grad, forward, loss, backward and a step of SGD with Nesterov momentum, and of
a forward pass without gradient: medians of blocks of calls, which take turns.

    python benchmarks/torch_module.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import torch
from common import MOMENTUM, RATE, SIZES, model, network, ratio, turns
from rich.console import Console
from rich.table import Table

from onnxgrad.torch import OnnxModule

BARS = {15: 1.2, 256: 1.0, 1024: 1.0}


def training(net: torch.nn.Module, X: torch.Tensor, y: torch.Tensor) -> Callable[[], float]:
    criterion = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM, nesterov=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(net(X), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def inference(net: torch.nn.Module, X: torch.Tensor) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return net(X)

    return forward


def measure(threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    table = Table("", "batch", "torch.nn", "OnnxModule", "ratio (quartiles)", "asked")
    table.title = f"microseconds, {threads} thread{'s'[: threads - 1]}"
    for batch in (15, 64, 256, 1024):
        torch.manual_seed(0)
        X, y = torch.randn(batch, SIZES[0]), torch.randn(batch, 1)
        nets = {"torch.nn": network(), "OnnxModule": OnnxModule(model("N", 18))}
        steps = {name: training(net, X, y) for name, net in nets.items()}
        for _ in range(20):
            theirs, ours = (step() for step in steps.values())
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        rows = {"training step": steps, "forward": {n: inference(t, X) for n, t in nets.items()}}
        for name, jobs in rows.items():
            theirs, ours = turns(jobs, rounds).values()
            bar = f"{BARS[batch]} x" if name == "training step" and batch in BARS else ""
            micros = (f"{median(times) * 1e6:.1f}" for times in (theirs, ours))
            table.add_row(name, str(batch), *micros, ratio(ours, theirs), bar)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each; the median counts")
    parser.add_argument("--threads", type=int, help="in this process; otherwise 1, then 2")
    options = parser.parse_args()
    if options.threads:
        measure(options.threads, options.rounds)
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for threads in (1, 2):  # in processes of their own, as libraries look at the cores only once
        if threads > (len(cores) or os.cpu_count() or 1):
            continue
        if cores:
            os.sched_setaffinity(0, cores[:threads])
        again = (sys.executable, __file__, "--rounds", options.rounds, "--threads", threads)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([str(a) for a in again], env=environment, check=True)


if __name__ == "__main__":
    main()
