"""A training step of many networks, ours against PyTorch, torch.compile and JAX: time, memory, and
the rate of the step's products. Writes docs/benchmarks.md with `--write`.

Times are of one process, in which each tool trains for twelve seconds, and then all take turns on
the same data from the same weights; a step is the slope between a short and a long run, so that
what is done once does not count. Losses of 20 steps must agree. Memory is the peak of a process of
its own minus what it held before the training, with the data, at two sizes of the batch.

    python benchmarks/networks.py [NAME ...] [--threads 1 2] [--rounds 7] [--peers ...] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import geometric_mean, linear_regression, median
from tempfile import TemporaryDirectory
from typing import Any

BLOCK = 0.3  # seconds of a long run, at least
WARM = 12.0  # seconds of training before all that is measured
SHORT, LONG = 1, 4  # steps of the runs, times a factor
OLD_STEPS = 30
PEERS = ("PyTorch", "torch.compile", "JAX")  # the fastest of them is what counts
OTHERS = ("scikit-learn", "onnxruntime-training")
AGREED = 1e-4  # largest relative difference of the losses of 20 steps
SAVED = 6e8  # bytes that PyTorch saves for the backward pass of the largest batch
TOOLS = ("onnxgrad", "PyTorch")
RESULTS = Path(__file__).with_name("networks.json")
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables -->", "<!-- end of the tables -->"
HEAD = [
    "| Network | threads | ms | PyTorch | torch.compile | JAX | x best | scikit-learn "
    "| onnxruntime-training | GFLOP/s | products |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]
MEMORY_HEAD = [
    "| Network | kB a row | PyTorch | ratio | rows | peak in MB | PyTorch |",
    "|---|---|---|---|---|---|---|",
]


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
        for part in passes(steps * network.batch, rows):
            trainer.partial_fit(
                network.fed(X[part]), y[part], batch_size=network.batch, shuffle=False
            )
        return [trainer.history[-1]["loss"]]

    return run


def passes(wanted: int, rows: int) -> Iterator[slice]:
    """Yield parts of `rows` rows that have as many rows together as are `wanted`."""
    for done in range(0, wanted, rows):
        yield slice(0, min(rows, wanted - done))


def perceptron(network: Any, module: Any, rows: int) -> Callable[[int], None]:
    """Return scikit-learn's training of as large a network, as `stepper`."""
    from sklearn.neural_network import MLPClassifier

    X, y = network.data(rows)
    hidden = [p.shape[0] for p in module.parameters() if p.dim() == 2][:-1]
    model = MLPClassifier(hidden, solver="sgd", batch_size=network.batch, alpha=0, shuffle=False)

    def run(steps: int) -> None:
        for part in passes(steps * network.batch, rows):
            model.partial_fit(X[part], y[part], classes=range(network.labels))

    return run


def slopes(jobs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Return the seconds of a step: the slope between the medians of short and of long runs, which
    take turns.
    """
    factors = {}
    for name, job in jobs.items():
        job(LONG)
        begin = time.perf_counter()
        job(LONG)
        each = (time.perf_counter() - begin) / LONG
        factors[name] = max(1, int(BLOCK / LONG / each))
        job(max(LONG * factors[name], int(WARM / each)))
    runs = [(name, length) for name in jobs for length in (SHORT, LONG)]
    seconds: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    for _ in range(rounds):
        for name, length in runs:
            if length == SHORT:
                jobs[name](SHORT)  # threads of the tool before may still wait for work
            begin = time.perf_counter()
            jobs[name](length * factors[name])
            seconds[name, length].append(time.perf_counter() - begin)
    middle = {run: median(times) / factors[run[0]] for run, times in seconds.items()}
    slope = {name: (middle[name, LONG] - middle[name, SHORT]) / (LONG - SHORT) for name in jobs}
    if min(slope.values()) <= 0:
        raise RuntimeError(
            f"the machine is too busy: a step takes {slope} s; repeat with --rounds 9"
        )
    return slope


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


def timed(name: str, rounds: int, peers: str) -> dict[str, Any]:
    """Return the seconds of a step of each tool and of the step's products, and what the step
    computes.
    """
    import torch
    from products import products_of_step
    from zoo import NETWORKS

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = NETWORKS[name]
    error = agreement(network)
    if error > AGREED:
        raise AssertionError(f"{name}: losses differ by {error:.1e} from PyTorch's")
    module = network.module()
    proto = network.exported(module)
    begin = time.perf_counter()
    trainer, rows = network.trainer(proto), 64 * network.batch
    ours = trained(network, trainer, rows)
    ours(1)
    start = time.perf_counter() - begin
    jobs: dict[str, Callable[[int], object]] = {"onnxgrad": ours}
    if "PyTorch" in peers:
        jobs["PyTorch"] = stepper(network, module, rows)
    if "torch.compile" in peers:
        jobs["torch.compile"] = stepper(network, torch.compile(network.module()), rows)
    if "JAX" in peers:
        from jax_peer import jax_stepper

        jobs["JAX"] = jax_stepper(network, network.module(), rows)
    if name.startswith("mlp"):
        jobs["scikit-learn"] = perceptron(network, module, rows)
    seconds, work = products_of_step(network, network.module())
    return {
        "seconds": slopes(jobs, rounds),
        "error": error,
        "start": start,
        "products": seconds,
        "operations": 2 * work,
    }


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


def memory(name: str, tool: str, rows: int, recompute: str) -> float:
    """Return the peak memory of this process, in MB, during a training of 3 steps of `rows` rows.

    What was larger before, such as the export of the network, does not count.
    """
    import dataclasses

    import torch
    from zoo import NETWORKS

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = dataclasses.replace(NETWORKS[name], batch=rows)
    module = network.module()
    if tool == "PyTorch":
        run = stepper(network, module, rows)
    else:
        run = trained(network, network.trainer(network.exported(module), recompute=recompute), rows)
        del module
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in memory now
    run(3)
    return status("VmHWM")


def rows_of(name: str) -> int:
    """Return the rows of the largest batch of the memory measurement."""
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


ONE: dict[str, Callable[..., Any]] = {"time": timed, "memory": memory, "rows": rows_of}


def one(kind: str, *texts: str) -> Any:
    """Return what a child measures; its arguments are JSON, except for names."""
    values = (json.loads(t) if t.isdigit() or t in ("true", "false") else t for t in texts)
    return ONE[kind](*values)


def time_of(name: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the median milliseconds of each tool, and what is compared with them."""
    result = child(threads, "time", name, options.rounds, ",".join(options.peers))
    ours = result["seconds"]["onnxgrad"]
    ms = {tool: 1000 * seconds for tool, seconds in result["seconds"].items()}
    kept = {key: result[key] for key in ("start", "error")}
    rate, share = result["operations"] / ours / 1e9, result["products"] / ours
    return {"ms": ms, "gflops": rate, "products": share, **kept}


def memory_of(name: str, recompute: str = "none") -> dict[str, Any]:
    """Return the kB that a row adds, and the peaks in MB of the largest batch, of both tools."""
    rows, kb, peaks = child(1, "rows", name), {}, {}
    sizes = [rows * quarter // 4 for quarter in (1, 2, 3, 4)]
    for tool in TOOLS:
        measured = [child(1, "memory", name, tool, n, recompute) for n in sizes]
        kb[tool] = 1000 * linear_regression(sizes, measured).slope
        peaks[tool] = measured[-1]
    return {"rows": rows, "kb": kb, "peaks": peaks}


def ahead(times: dict[str, Any], peer: str = "PyTorch") -> float | None:
    """Return how many times as long as ours a step of a peer takes."""
    return times["ms"][peer] / times["ms"]["onnxgrad"] if peer in times["ms"] else None


def ahead_of_best(times: dict[str, Any]) -> float | None:
    """Return how many times as long as ours a step of the fastest peer takes."""
    ratios = [r for peer in PEERS if (r := ahead(times, peer)) is not None]
    return min(ratios, default=None)


def line(name: str, threads: int, times: dict[str, Any]) -> str:
    """Return what the terminal shows of a measurement."""
    shown = ", ".join(f"{tool} {ms:.3f}" for tool, ms in times["ms"].items())
    best = ahead_of_best(times)
    return (
        f"{name:24} {threads}: {'' if best is None else f'{best:.2f} '}({shown} ms, "
        f"{times['gflops']:.1f} GFLOP/s, products {times['products']:.0%} of the step, "
        f"start {times['start']:.2f} s, losses {times['error']:.0e})"
    )


# -- docs/benchmarks.md --------------------------------------------------------------------------


def cells_of(times: dict[str, Any]) -> list[str]:
    """Return the cells of a measurement: ours, the ratios of the peers, the rate of the step, and
    the share of its products.
    """
    peers, others = ([ahead(times, peer) for peer in group] for group in (PEERS, OTHERS))
    ratios = ["" if r is None else f"{r:.2f}" for r in (*peers, ahead_of_best(times), *others)]
    rate = f"{times['gflops']:.1f}" if "gflops" in times else ""
    share = f"{times['products']:.0%}" if "products" in times else ""
    return [f"{times['ms']['onnxgrad']:.3f}", *ratios, rate, share]


def tables(machines: dict[str, Any]) -> list[str]:
    """Return the tables of the page: the times on each machine, the memory on the last one."""
    lines: list[str] = []
    for results in machines.values():
        lines += [results["run"], "", *HEAD]
        means = []
        for threads in ("1", "2"):
            timed = {n: r[threads] for n, r in results["networks"].items() if threads in r}
            if not timed:
                continue
            lines += [
                f"| {n} | {threads} | {' | '.join(cells_of(times))} |" for n, times in timed.items()
            ]
            mean = geometric_mean(ahead_of_best(times) or 1 for times in timed.values())
            means.append(f"{mean:.2f} with {threads} thread{'s' * (threads != '1')}")
        lines += [
            "",
            f"The geometric mean of the ratios to the fastest of them is {' and '.join(means)}.",
            "",
        ]
    lines += MEMORY_HEAD
    for name, result in list(machines.values())[-1]["networks"].items():
        if (used := result.get("memory")) is not None:
            ours, theirs = (used["kb"][tool] for tool in TOOLS)
            peaks = " | ".join(f"{used['peaks'][tool]:.0f}" for tool in TOOLS)
            lines.append(
                f"| {name} | {ours:.1f} | {theirs:.1f} | **{ours / theirs:.2f}** "
                f"| {used['rows']} | {peaks} |"
            )
    return lines


def old_gradient(name: str, threads: int, folder: Path) -> float | None:
    """Return the milliseconds of forward and backward by onnxruntime-training, without an update.

    None: it has no gradient for an operator of the network.
    """
    import numpy as np
    import old_package
    import onnx
    from zoo import NETWORKS

    network = NETWORKS[name]
    proto, (X, y) = network.with_loss(), network.data(network.batch)
    fed = network.fed(X)
    arrays = fed if isinstance(fed, dict) else {"x": fed}
    with TemporaryDirectory() as files:
        paths = [f"{files}/model.onnx", f"{files}/data.npz"]
        onnx.save(proto, paths[0])
        np.savez(paths[1], **arrays, label=y)
        command = [old_package.environment(folder), Path(__file__).with_name("old_gradient.py")]
        sizes = [str(threads), str(OLD_STEPS)]
        done = subprocess.run([*command, *paths, *sizes], capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: onnxruntime-training: {done.stderr.strip().splitlines()[-1][:300]}")
        return None
    return 1000 * json.loads(done.stdout.splitlines()[-1])["seconds"]


def processor() -> str:
    """Return the name of the processor, and how wide its vectors are: products depend on that."""
    info = dict(
        (part.strip() for part in row.split(":", 1))
        for row in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in row
    )
    flags = info["flags"].split()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "SSE"
    return f"{info['model name']}, {vectors}"


def machine() -> str:
    """Return what the measurements depend on, as a sentence."""
    import onnxruntime
    import torch
    from common import commit

    versions = f"onnxruntime {onnxruntime.__version__}, PyTorch {torch.__version__}"
    cores = len(os.sched_getaffinity(0))
    return f"{date.today()}, commit {commit()}, {processor()}, {cores} cores, {versions}."


def write_page(machines: dict[str, Any]) -> None:
    """Replace the tables of the page."""
    before, mark, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    PAGE.write_text("\n".join([before + mark, *tables(machines), end + after]))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="only the memory")
    parser.add_argument("--time", action="store_true", help="only the time")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="onnxruntime-training, too")
    parser.add_argument("--write", action="store_true", help="keep the results, and write the page")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    from zoo import NETWORKS

    measured: dict[str, dict[str, Any]] = {}
    failed = []
    for name in options.names or NETWORKS:
        result = measured.setdefault(name, {})
        try:
            measure(name, options, result)
        except RuntimeError as e:  # the others are measured, too
            failed.append(name)
            print(f"{name}: {e}", file=sys.stderr, flush=True)
        if options.write and result:
            keep(name, result, list(NETWORKS))
    for threads in map(str, options.threads):
        if ratios := [ahead_of_best(r[threads]) or 1 for r in measured.values() if threads in r]:
            print(f"geometric mean of x best, {threads} threads: {geometric_mean(ratios):.2f}")
    if failed:
        sys.exit(f"not measured: {failed}")


def measure(name: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure a network, print the results and add them to `result`."""
    for threads in [] if options.memory else options.threads:
        result[str(threads)] = times = time_of(name, threads, options)
        if options.old and (ms := old_gradient(name, threads, options.old)):
            times["ms"]["onnxruntime-training"] = ms
        print(line(name, threads, times), flush=True)
    if not options.time:
        result["memory"] = used = memory_of(name)
        ours, theirs = (used["kb"][tool] for tool in TOOLS)
        print(
            f"{name:24} MB a row: {ours / theirs:.2f} ({ours:.1f}, {theirs:.1f} kB), peaks at "
            f"{used['rows']} rows {[round(used['peaks'][tool]) for tool in TOOLS]}",
            flush=True,
        )


def keep(name: str, result: dict[str, Any], order: list[str]) -> None:
    """Keep the results of a network on this machine, and write the page."""
    machines = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    own = machines.setdefault(processor(), {"networks": {}})
    own["run"] = machine()
    networks = own["networks"] | {name: own["networks"].get(name, {}) | result}
    own["networks"] = {n: networks[n] for n in order if n in networks}
    RESULTS.write_text(json.dumps(machines, indent=1) + "\n")
    write_page(machines)


if __name__ == "__main__":
    main()
