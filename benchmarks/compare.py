"""A training step of the networks of networks.py, as another commit of this repository runs it.

Each commit trains in a process of its own for twelve seconds, and then the processes take turns on
the same cores. A step is the slope between a short and a long run. Printed are the median of the
ratios, turn by turn, with their quartiles (above 1, the working tree is faster), and the peaks of
both processes.

    python benchmarks/compare.py COMMIT [NAME ...] [--threads 1 2] [--rounds 9]
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory

import numpy as np
from networks import WARM

HERE = Path(__file__).parent
BLOCK = 0.2  # seconds of a long run, at least
LONG = 4  # how many times as long as a short run


def serve(name: str, path: str) -> None:
    """Train: for each number of steps on standard input, print the seconds and the loss."""
    import onnx
    from networks import status, trained
    from zoo import NETWORKS

    network = NETWORKS[name]
    run = trained(network, network.trainer(onnx.load(path)), 64 * network.batch)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        (loss,) = run(int(line))
        print(time.perf_counter() - begin, loss, status("VmHWM"), flush=True)


class Served:
    """A process that trains a network by the package in `source`."""

    def __init__(self, source: Path, name: str, model: Path, threads: int) -> None:
        self.source = source
        cores = sorted(os.sched_getaffinity(0))[:threads]
        paths = os.pathsep.join([str(source), str(HERE), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--serve", name, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._read()

    def _read(self) -> list[float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the package in {self.source} does not train it: see above")
        return [] if line == "ready\n" else [float(word) for word in line.split()]

    def run(self, steps: int) -> float:
        """Return the seconds of a run."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        seconds, self.loss, self.peak = self._read()
        return seconds

    def step(self, steps: int) -> float:
        """Return the seconds of a step: the slope between a short and a long run."""
        short, long = self.run(steps), self.run(LONG * steps)
        return (long - short) / ((LONG - 1) * steps)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()


@contextmanager
def sources(commit: str) -> Iterator[Path]:
    """Yield the folder of the package as it was at a commit."""
    command = ["git", "-C", str(HERE.parent), "archive", commit, "src"]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode().strip())
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder, "src")


def compared(name: str, other: Path, model: Path, threads: int, rounds: int) -> float:
    """Print how the working tree compares with the package in `other`, and return the ratio."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(Served(source, name, model, threads))
            for source in (HERE.parent / "src", other)
        ]
        for one in both:
            one.run(LONG)  # builds the step
        each = max(one.run(LONG) for one in both) / LONG
        for one in both:
            one.run(int(WARM / each))
        steps = max(1, round(BLOCK / LONG / each))
        times = np.array([[one.step(steps) for one in both] for _ in range(rounds + 1)])[1:]
        ratios = times[:, 1] / times[:, 0]
        low, high = np.percentile(ratios, (25, 75))
        ours, theirs = 1000 * np.median(times, axis=0)
        peaks = " and ".join(f"{one.peak:.0f}" for one in both)
        print(
            f"{name:24} {threads}: {median(ratios):.2f} ({low:.2f}-{high:.2f}), {ours:.3f} and "
            f"{theirs:.3f} ms, peaks {peaks} MB, losses differ by "
            f"{abs(both[0].loss / both[1].loss - 1):.0e}",
            flush=True,
        )
    return float(median(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
        return
    options = parser.parse_args()
    import onnx
    from zoo import NETWORKS

    if unknown := [name for name in options.names if name not in NETWORKS]:
        parser.error(f"no network {unknown}; there are {list(NETWORKS)}")
    with sources(options.commit) as other, TemporaryDirectory() as folder:
        model = Path(folder, "model.onnx")
        failed = []
        ratios: dict[int, list[float]] = {threads: [] for threads in options.threads}
        for name in options.names or NETWORKS:
            onnx.save(NETWORKS[name].exported(NETWORKS[name].module()), model)
            for threads, found in ratios.items():
                try:
                    found.append(compared(name, other, model, threads, options.rounds))
                except RuntimeError as e:  # the others are compared, too
                    failed.append(name)
                    print(f"{name}: {e}", file=sys.stderr, flush=True)
    for threads, found in ratios.items():
        if found:
            print(f"geometric mean, {threads} threads: {geometric_mean(found):.2f}")
    if failed:
        sys.exit(f"not compared: {failed}")


if __name__ == "__main__":
    main()
