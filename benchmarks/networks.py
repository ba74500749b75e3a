"""A training step of many networks, ours against PyTorch's: time, memory, and the distance to the
limit of the machine. Writes docs/benchmarks.md with `--write`.

Times are of one process, in which both tools take turns on the same data from the same weights; a
step is the slope between a short and a long run, so that what is done once does not count. Losses
of 20 steps must agree. Memory is the peak of a process of its own minus what it held before the
training, with the data, at two sizes of the batch.

    python benchmarks/networks.py [NAME ...] [--threads 1 2] [--rounds 7] [--compile] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

BLOCK = 0.4  # seconds of a long run, at least
SHORT, LONG = 1, 4  # steps of the runs, times a factor
SAVED = 3e8  # bytes that PyTorch saves for the backward pass of the larger batch
RESULTS = Path(__file__).with_name("networks.json")


# -- what one process measures -------------------------------------------------------------------


def stepper(network: Any, module: Any, rows: int) -> Callable[[int], list[float]]:
    """Return PyTorch's training: `run(n)` does n steps and returns their losses."""
    import torch

    optimizer = network.optimizer(module)
    X, y = (torch.from_numpy(a) for a in network.data(rows))

    def run(steps: int) -> list[float]:
        losses = []
        for i in range(steps):
            part = slice(i * network.batch % rows, i * network.batch % rows + network.batch)
            optimizer.zero_grad()
            loss = network.loss(module(X[part]), y[part])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return run


def trained(network: Any, trainer: Any, rows: int) -> Callable[[int], list[float]]:
    """Return our training, as `stepper`; the losses are means of a run."""
    X, y = network.data(rows)

    def run(steps: int) -> list[float]:
        part = slice(0, min(rows, steps * network.batch))
        for _ in range(-(-steps * network.batch // rows)):
            trainer.partial_fit(
                network.fed(X[part]), y[part], batch_size=network.batch, shuffle=False
            )
        return [trainer.history[-1]["loss"]]

    return run


def slopes(jobs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Return seconds a step, one number for each round, in which the jobs take turns."""
    factors = {}
    for name, job in jobs.items():
        job(LONG)
        begin = time.perf_counter()
        job(LONG)
        each = (time.perf_counter() - begin) / LONG
        factors[name] = max(1, int(BLOCK / LONG / each))
        job(LONG * factors[name])
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            ends = []
            for steps in (SHORT * factors[name], LONG * factors[name]):
                begin = time.perf_counter()
                job(steps)
                ends.append(time.perf_counter() - begin)
            seconds[name].append((ends[1] - ends[0]) / (factors[name] * (LONG - SHORT)))
    return seconds


def agreement(network: Any) -> float:
    """Return the largest relative difference of the losses of 20 steps."""
    module = network.module()
    trainer = network.trainer(network.exported(module))
    X, y = network.data(20 * network.batch)
    theirs = stepper(network, module, len(y))(20)
    ours = []
    for i in range(20):
        part = slice(i * network.batch, (i + 1) * network.batch)
        trainer.partial_fit(network.fed(X[part]), y[part], batch_size=network.batch, shuffle=False)
        ours.append(trainer.history[-1]["loss"])
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def timed(name: str, rounds: int, compiled: bool) -> dict[str, Any]:
    """Return the seconds of a step of each tool, and what they are compared with."""
    import torch
    from zoo import NETWORKS

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = NETWORKS[name]
    error = agreement(network)
    module = network.module()
    proto = network.exported(module)
    begin = time.perf_counter()
    trainer = network.trainer(proto)
    ours = trained(network, trainer, 64 * network.batch)
    ours(1)
    start = time.perf_counter() - begin
    jobs = {"onnxgrad": ours, "PyTorch": stepper(network, module, 64 * network.batch)}
    if compiled:
        other = torch.compile(network.module())
        jobs["torch.compile"] = stepper(network, other, 64 * network.batch)
    return {
        "seconds": slopes(jobs, rounds),
        "error": error,
        "start": start,
        "floor": floor(network, module),
    }


def floor(network: Any, module: Any) -> float:
    """Return the seconds below which no step can be: its operations at the rate of a large product,
    and the bytes it must move at the rate of a copy.

    The bytes are those of weights, gradients and slots, read and written once, and of what PyTorch
    saves for the backward pass, written once and read once.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    X, y = (torch.from_numpy(a) for a in network.data(network.batch))
    with FlopCounterMode(display=False) as counter:
        network.loss(module(X), y).backward()
    weights = sum(p.nbytes for p in module.parameters())
    moved = 2 * saved_bytes(network, module, network.batch)
    moved += weights * (4 + 2 * (2 if network.adam else 1))
    a = torch.randn(1024, 1024)
    big = torch.randn(1 << 24)
    product = fastest(lambda: torch.mm(a, a)) / (2 * 1024**3)
    copy = fastest(lambda: big.clone()) / (2 * big.nbytes)
    return counter.get_total_flops() * product + moved * copy


def fastest(job: Callable[[], object], times: int = 10) -> float:
    """Return the least seconds of a call."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def saved_bytes(network: Any, module: Any, rows: int) -> int:
    """Return how much PyTorch keeps of a forward pass for the backward pass, without weights."""
    import torch

    kept = {p.data_ptr(): 0 for p in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    X, y = (torch.from_numpy(a) for a in network.data(rows))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = network.loss(module(X), y)
    del loss
    return sum(sizes.values())


def status(key: str) -> float:
    """Return an entry of this process's status in MB: "VmHWM" is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def memory(name: str, tool: str, rows: int, recompute: str) -> dict[str, float]:
    """Return the MB that a training of 3 steps of `rows` rows adds at its peak."""
    import dataclasses

    import torch
    from zoo import NETWORKS

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = dataclasses.replace(NETWORKS[name], batch=rows)
    module = network.module()
    if tool == "PyTorch":
        before = status("VmRSS")
        stepper(network, module, rows)(3)
    else:
        proto = network.exported(module)
        before = status("VmRSS")
        trained(network, network.trainer(proto, recompute=recompute), rows)(3)
    return {"peak": status("VmHWM"), "before": before}


def rows_of(name: str) -> int:
    """Return the rows of the larger batch of the memory measurement."""
    from zoo import NETWORKS

    network = NETWORKS[name]
    each = saved_bytes(network, network.module(), network.batch) / network.batch
    return max(4, int(SAVED / each) // 4 * 4)


# -- all of them ---------------------------------------------------------------------------------


def child(threads: int, *arguments: Any) -> Any:
    """Return what a process of its own on `threads` cores measures."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, "-W", "ignore", __file__, "--one", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


ONE = {"time": timed, "memory": memory, "rows": rows_of}


def one(kind: str, *texts: str) -> Any:
    """Return what a child measures; its arguments are JSON, except for names."""
    return ONE[kind](
        *(json.loads(t) if t.isdigit() or t in ("true", "false") else t for t in texts)
    )


def per_row(name: str, tool: str, rows: int, recompute: str = "none") -> tuple[float, float]:
    """Return the MB of a row, and the peak in MB of the larger batch."""
    small, large = (child(1, "memory", name, tool, n, recompute) for n in (rows // 4, rows))
    added = [result["peak"] - result["before"] for result in (small, large)]
    return (added[1] - added[0]) / (rows - rows // 4), large["peak"]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="only the memory")
    parser.add_argument("--time", action="store_true", help="only the time")
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    from zoo import NETWORKS

    ratios: dict[int, list[float]] = {n: [] for n in options.threads}
    for name in options.names or NETWORKS:
        for threads in [] if options.memory else options.threads:
            made = child(threads, "time", name, options.rounds, str(options.compile).lower())
            times = {tool: median(seconds) for tool, seconds in made["seconds"].items()}
            shown = ", ".join(f"{tool} {1000 * t:.3f}" for tool, t in times.items())
            ratio = times["PyTorch"] / times["onnxgrad"]
            ratios[threads].append(ratio)
            line = f"{name:24} {threads}: {ratio:.2f} ({shown} ms, "
            line += f"{times['onnxgrad'] / made['floor']:.1f} x the floor, "
            print(line + f"start {made['start']:.2f} s, losses {made['error']:.0e})", flush=True)
        if not options.time:
            rows = child(1, "rows", name)
            ours, theirs = (per_row(name, tool, rows) for tool in ("onnxgrad", "PyTorch"))
            print(
                f"{name:24} MB a row: {ours[0] / theirs[0]:.2f} ({1000 * ours[0]:.1f}, "
                f"{1000 * theirs[0]:.1f} kB), peak at {rows} rows {ours[1]:.0f}, {theirs[1]:.0f}",
                flush=True,
            )
    for threads, found in ratios.items():
        if found:
            print(f"geometric mean, {threads} threads: {geometric_mean(found):.2f}")


if __name__ == "__main__":
    main()
