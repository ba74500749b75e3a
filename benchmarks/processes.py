"""Two cores: one training with two threads, or two trainings with a thread each?

For each network, how many steps a second one process does with 1 and with 2 threads, and two
processes of one thread together, each on a core of its own. Our steps only.

    python benchmarks/processes.py [NAME ...] [--seconds 4]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from networks import trained
from rich.console import Console
from rich.table import Table
from zoo import NETWORKS


def speed(name: str, seconds: float) -> float:
    """Return the steps a second in this process, after a first run."""
    network = NETWORKS[name]
    run = trained(network, network.trainer(network.exported(network.module())), 64 * network.batch)
    begin = time.perf_counter()
    run(4)
    steps = max(1, int(0.2 * 4 / (time.perf_counter() - begin)))
    run(steps)
    begin = time.perf_counter()
    for calls in count(1):
        run(steps)
        if (passed := time.perf_counter() - begin) > seconds:
            return calls * steps / passed
    raise AssertionError


def together(name: str, seconds: float, cores: list[list[int]]) -> float:
    """Return the steps a second of one process on each set of cores, all at once."""
    command = [sys.executable, "-W", "ignore", __file__, name, "--seconds", str(seconds), "--one"]
    running = [
        subprocess.Popen(
            [*command, ",".join(map(str, own))],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for own in cores
    ]
    return sum(json.loads(process.communicate()[0]) for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        os.sched_setaffinity(0, map(int, options.one.split(",")))
        print(json.dumps(speed(options.names[0], options.seconds)))
        return
    a, b = sorted(os.sched_getaffinity(0))[:2]
    table = Table("network", "1 thread", "2 threads", "2 processes", "processes : threads")
    for name in options.names or NETWORKS:
        one, two, both = (
            together(name, options.seconds, cores) for cores in ([[a]], [[a, b]], [[a], [b]])
        )
        table.add_row(name, *(f"{x:.4g}" for x in (one, two, both)), f"{both / two:.2f}")
    Console().print(table)
    print(f"steps a second; {Path(__file__).name}")


if __name__ == "__main__":
    main()
