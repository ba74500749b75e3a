"""A training step of two processes, ours against PyTorch's DistributedDataParallel.

Both processes, with one thread each and gloo between them, train the same network from the same
weights on the same batches, by turns: DDP's process takes its half of the rows, as ours does. A
step is the median of the times between the ends of two steps. Losses of 20 steps must agree.

    python benchmarks/data_parallel.py [NAME ...] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

BLOCK = 0.4  # seconds of a run, about
STEPS = 8, 64  # of a run, at least and at most
AGREED = 1e-3  # largest relative difference of the losses of 20 steps
PROCESSES = 2


def networks() -> dict[str, Any]:
    """Return the networks by their names; batches are those of both processes together."""
    from torch import nn
    from zoo import NETWORKS, Network, conv_norm, mlp

    def small() -> nn.Module:
        layers = [conv_norm(1, 16, 3), nn.ReLU(), conv_norm(16, 32, 3, 2), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 14 * 14, 10))

    return {
        "mlp 0.01 M": Network(lambda: mlp(100, 64, 64, 10), 64, (100,)),
        "mlp 0.2 M": Network(lambda: mlp(256, 384, 256, 10), 64, (256,)),
        "mlp 1 M": Network(lambda: mlp(512, 768, 768, 10), 128, (512,)),
        "mlp 4.8 M": Network(lambda: mlp(1024, 1536, 1536, 512), 128, (1024,), labels=512),
        "cnn": Network(small, 32, (1, 28, 28), train_norm=True),
        "encoder 2x128": NETWORKS["encoder 2x128"],
    }


def distributed_stepper(
    network: Any, rows: int, ends: list[float] | None = None
) -> Callable[[int], list[float]]:
    """Return DDP's training: `run(n)` does n steps and returns their losses.

    `ends` gets the times when steps end.
    """
    import torch
    import torch.distributed as distributed
    from torch.nn.parallel import DistributedDataParallel

    module = DistributedDataParallel(network.module())
    optimizer = network.optimizer(module)
    X, y = (torch.from_numpy(a) for a in network.data(rows))
    own = network.batch // PROCESSES

    def run(steps: int) -> list[float]:
        losses = []
        for i in range(steps):
            start = i * network.batch % rows + own * distributed.get_rank()
            part = slice(start, start + own)
            optimizer.zero_grad()
            loss = network.loss(module(X[part]), y[part])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if ends is not None:
                ends.append(time.perf_counter())
        return losses

    return run


def agreement(network: Any) -> float:
    """Return the largest relative difference of the losses of 20 steps."""
    import numpy as np
    import torch
    import torch.distributed as distributed

    trainer = network.trainer(network.exported(network.module()))
    X, y = network.data(20 * network.batch)
    theirs = torch.tensor(distributed_stepper(network, len(y))(20))
    distributed.all_reduce(theirs)
    ours = []
    for i in range(20):
        part = slice(i * network.batch, (i + 1) * network.batch)
        trainer.partial_fit(network.fed(X[part]), y[part], batch_size=network.batch, shuffle=False)
        ours.append(trainer.history[-1]["loss"])
    return float(np.abs(np.array(ours) / (theirs.numpy() / PROCESSES) - 1).max())


def one(name: str, rounds: int) -> None:
    """Measure in this process of a group; the first one prints."""
    import torch
    import torch.distributed as distributed
    from networks import trained

    import onnxgrad as og

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    first, network = distributed.get_rank() == 0, networks()[name]
    if (error := agreement(network)) > AGREED:
        raise AssertionError(f"{name}: losses differ by {error:.1e} from DDP's")
    rows = STEPS[1] * network.batch
    ends: list[float] = []  # of steps

    class Clock(og.callbacks.Callback):
        def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
            ends.append(time.perf_counter())

    trainer = network.trainer(network.exported(network.module()), callbacks=[Clock()])
    jobs = {
        "onnxgrad": trained(network, trainer, rows),
        "DDP": distributed_stepper(network, rows, ends),
    }

    def seconds_of(job: Callable[[int], object], steps: int) -> list[float]:
        distributed.barrier()
        ends.clear()
        job(steps)
        return [b - a for a, b in pairwise(ends)]

    counts = {}
    for key, job in jobs.items():
        each = torch.tensor(median(seconds_of(job, STEPS[0])[1:]))
        distributed.broadcast(each, 0)
        counts[key] = min(max(STEPS[0], int(BLOCK / each.item())), STEPS[1])
    ours: dict[str, list[float]] = {key: [] for key in jobs}
    for _ in range(rounds):
        for key, job in jobs.items():
            ours[key] += seconds_of(job, counts[key])
    if first:
        print(json.dumps(ours), flush=True)
    distributed.destroy_process_group()


def measured(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps of each tool."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    own = [*launch, __file__]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *own, name, "--one", "--rounds", str(rounds)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(next(row for row in done.stdout.splitlines() if row.startswith("{")))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.names[0], options.rounds)
        return
    print("| Network | onnxgrad, ms | DDP, ms | onnxgrad : DDP |", "|---|---|---|---|", sep="\n")
    for name in options.names or networks():
        seconds = measured(name, options.rounds)
        ours, theirs = (1000 * median(seconds[key]) for key in ("onnxgrad", "DDP"))
        print(f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main()
