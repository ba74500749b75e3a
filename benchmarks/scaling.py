"""How training scales over processes: measured here for 1, 2 and 4, and predicted for more.

    python benchmarks/scaling.py [--rounds 5] [--write]

It measures a step of MiniLM and of ResNet-18 on one core, whole and cut into pieces; on two, by two
threads, and by 2 and 4 processes that share the batch; and all-reduces of several sizes. From these
follow the latency of a message, and the efficiency that n machines reach over networks of 10 and
100 Gbit/s, each with the batch measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

MODELS = ("minilm", "resnet-18 frozen")
SIZES = (1, 1 << 14, 1 << 18, 1 << 22, 1 << 24)  # float32 elements of an all-reduce
PROCESSES = (2, 4, 16, 64, 256, 1024)
NETWORKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}  # bytes a second
MESSAGES = 1  # the gradients, with counts of terms, losses and the requests of callbacks
LARGE = ("a transformer of 1e9 weights", 1e9, 6 * 1e9 * 512)  # weights, operations of a sequence
CASES: dict[str, tuple[int, str, int | None]] = {  # processes, how, cores
    "1 core, whole": (1, "alone", 1),
    "1 core, cut": (1, "shared", 1),
    "2 threads": (1, "alone", None),
    "2 threads, cut": (1, "shared", None),
    "2 processes": (2, "shared", None),
    "4 processes": (4, "shared", None),
}
PAGE = Path(__file__).parent.parent / "docs" / "parallel.md"
BEGIN, END = "<!-- tables -->", "<!-- end of the tables -->"


# -- in the processes ----------------------------------------------------------------------------


def step_seconds(name: str, how: str, rounds: int) -> Iterator[float]:
    """Yield the seconds of a step, in blocks of 5; `how`: "alone", or "shared" by all processes."""
    from zoo import NETWORKS as ZOO

    import onnxgrad as og

    network = ZOO[name]
    proto = network.exported(network.module())
    parallel: Any = og.parallel.DataParallel() if how == "shared" else False
    trainer = network.trainer(proto, parallel=parallel)
    X, y = network.data(5 * network.batch)
    fed = network.fed(X)
    for i in range(rounds + 1):
        begin = time.perf_counter()
        trainer.partial_fit(fed, y, batch_size=network.batch, shuffle=False)
        if i:
            yield (time.perf_counter() - begin) / 5


def all_reduce_seconds() -> Iterator[float]:
    """Yield the seconds of an all-reduce of each size."""
    from onnxgrad.parallel.process_groups import find_process_group

    group = find_process_group(True)
    assert group is not None
    for size in SIZES:
        array, seconds = np.zeros(size, np.float32), []
        for _ in range(30 if size < 1 << 20 else 8):
            begin = time.perf_counter()
            group.sum(array)()
            seconds.append(time.perf_counter() - begin)
        yield median(seconds)


def one(kind: str, rounds: int) -> None:
    """Measure in this process of a group; the first one prints."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    if kind == "all-reduce":
        result = list(all_reduce_seconds())
    else:
        name, how = kind.split(":")
        result = list(step_seconds(name, how, rounds))
    if distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    distributed.destroy_process_group()


# -- all of them ---------------------------------------------------------------------------------


def measured(kind: str, processes: int, rounds: int, cores: int | None = None) -> list[float]:
    """Return what the first of some processes measures, on so many cores; None: on all."""
    own_cores = sorted(os.sched_getaffinity(0))[:cores]
    own = ["--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *own, __file__]
    done = subprocess.run(
        [*command, "--one", kind, "--rounds", str(rounds)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, own_cores),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(next(row for row in done.stdout.splitlines() if row.startswith("[")))


def steps(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step by model, and by how it runs."""
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in MODELS:
            for case, (processes, how, cores) in CASES.items():
                seconds = measured(f"{name}:{how}", processes, 3, cores)
                results.setdefault(name, {}).setdefault(case, []).append(median(seconds))
    return {name: {c: median(s) for c, s in cases.items()} for name, cases in results.items()}


def weights_of(name: str) -> float:
    """Return the number of weights of a network."""
    from zoo import NETWORKS as ZOO

    return sum(p.numel() for p in ZOO[name].module().parameters())


def rate() -> float:
    """Return the operations a second of a large product, on all cores."""
    import torch

    a, seconds = torch.randn(1024, 1024), inf
    for _ in range(10):
        begin = time.perf_counter()
        torch.mm(a, a)
        seconds = min(seconds, time.perf_counter() - begin)
    return 2 * 1024**3 / seconds


def efficiency(
    compute: float, weights: float, processes: int, bandwidth: float, latency: float
) -> tuple[float, str]:
    """Return the share of time in which a process computes, and what most of the rest is.

    A ring all-reduce of B bytes over n processes takes 2 (n - 1) messages one after the other, of
    B / n bytes each (Thakur et al., Optimization of Collective Communication Operations in MPICH,
    2005). Nothing of it is hidden behind computing.
    """
    hops = 2 * (processes - 1)
    moving = hops / processes * 4 * weights / bandwidth
    waiting = MESSAGES * hops * latency
    ended = "bandwidth" if moving > waiting else "latency"
    return compute / (compute + moving + waiting), ended


def tables(rounds: int) -> list[str]:
    """Measure, and return the tables of the page."""
    from common import commit

    taken = steps(rounds)
    reduced = {n: measured("all-reduce", n, rounds) for n in (2, 4)}
    latency = reduced[2][0] / 2  # two messages, of one number
    cores = len(os.sched_getaffinity(0))
    run = f"{date.today()}, commit {commit()}, {cores} cores, gloo over the loopback device."
    lines = [run, ""]
    heads = " | ".join(CASES)
    lines += [f"| Step of the same batch, ms | {heads} |", "|---" * (1 + len(CASES)) + "|"]
    for name, seconds in taken.items():
        lines.append(f"| {name} | {' | '.join(f'{1000 * s:.0f}' for s in seconds.values())} |")
    sizes = " | ".join(f"{4 * size / 1e6:.3g} MB" for size in SIZES)
    lines += ["", f"| All-reduce, ms | {sizes} |", "|---" * (1 + len(SIZES)) + "|"]
    for n, each in reduced.items():
        lines.append(f"| {n} processes | {' | '.join(f'{1000 * s:.2f}' for s in each)} |")
    large, weights, operations = LARGE
    computing = {name: (seconds["2 threads"], weights_of(name)) for name, seconds in taken.items()}
    computing[large] = operations / rate(), weights
    heads = " | ".join(map(str, PROCESSES))
    lines += [
        "",
        f"Predicted efficiency, with {1e6 * latency:.0f} µs for each message, as measured:",
        "",
        f"| Model, ms a step | network | {heads} | ended by |",
        "|---" * (3 + len(PROCESSES)) + "|",
    ]
    for name, (compute, count) in computing.items():
        for network, bandwidth in NETWORKS.items():
            all_of = [efficiency(compute, count, n, bandwidth, latency) for n in PROCESSES]
            shares = " | ".join(f"{share:.2f}" for share, _ in all_of)
            title = f"{name}, {1000 * compute:.0f}"
            lines.append(f"| {title} | {network} | {shares} | {all_of[-1][1]} |")
    return lines


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the tables of docs/parallel.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options.rounds)
        return
    lines = tables(options.rounds)
    print("\n".join(lines))
    if options.write:
        before, mark, rest = PAGE.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        PAGE.write_text("\n".join([before + mark, *lines, end + after]))


if __name__ == "__main__":
    main()
