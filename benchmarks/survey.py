"""What a training step consists of: nodes, bytes and time of each operator, by onnxruntime.

The numbers are those of the session that trains, after onnxruntime's own fusions. The bytes are
those of all inputs and outputs of its kernels, read or written at least once; views count too.

    python benchmarks/survey.py NAME ... [--shapes 12] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import onnxruntime as ort

from onnxgrad.runtime import session

_STEPS = 4
_AROUND = ("Scan", "Loop", "If")  # the time of their bodies is counted node by node
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size")


@dataclass
class Survey:
    """The nodes of one step by operator: how many run, their bytes, and their milliseconds."""

    nodes: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    ms: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)  # milliseconds by operator and shapes


@contextmanager
def _profiled(folder: str) -> Iterator[list[ort.InferenceSession]]:
    """Let sessions of the library write profiles into `folder`; yield these sessions."""
    sessions: list[ort.InferenceSession] = []
    plain = ort.InferenceSession

    def profiling(model: bytes, options: ort.SessionOptions, **more: Any) -> ort.InferenceSession:
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/step"
        sessions.append(plain(model, options, **more))
        return sessions[-1]

    with mock.patch.object(session.ort, "InferenceSession", profiling):
        yield sessions


def survey(network: Any) -> Survey:
    """Return what a step of a network of `zoo` consists of."""
    trainer = network.trainer(network.exported(network.module()))
    X, y = network.data(_STEPS * network.batch)
    with TemporaryDirectory() as folder, _profiled(folder) as sessions:
        trainer.partial_fit(network.fed(X), y, batch_size=network.batch, shuffle=False)
        for running in sessions[:-1]:
            running.end_profiling()
        events = json.loads(Path(sessions[-1].end_profiling()).read_text())
    counted = Survey()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            _count(counted, event["args"], event["dur"] / 1000)
    return counted


def _count(counted: Survey, node: dict[str, Any], ms: float) -> None:
    name = node["op_name"]
    if name in _AROUND:
        return
    counted.nodes[name] += 1 / _STEPS
    counted.ms[name] += ms / _STEPS
    if name not in _VIEWS:
        sizes = (int(node[key]) for key in ("activation_size", "parameter_size", "output_size"))
        counted.nbytes[name] += sum(sizes) / _STEPS
    shapes = [next(iter(kind.values())) for kind in node.get("input_type_shape", ())]
    counted.shapes[f"{name} {str(shapes)[:100]}"] += ms / _STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--shapes", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    from zoo import NETWORKS

    for name in options.names:
        counted = survey(NETWORKS[name])
        total = sum(counted.ms.values())
        print(
            f"{name}: {sum(counted.nodes.values()):.0f} nodes, "
            f"{sum(counted.nbytes.values()) / 1e6:.1f} MB, {total:.2f} ms in kernels"
        )
        for operator, ms in counted.ms.most_common(14):
            print(
                f"  {operator:22} {counted.nodes[operator]:6.1f} nodes {ms:8.3f} ms "
                f"{100 * ms / total:4.1f} % {counted.nbytes[operator] / 1e6:8.2f} MB"
            )
        for shapes, ms in counted.shapes.most_common(options.shapes):
            print(f"    {ms:8.3f} ms {shapes}")


if __name__ == "__main__":
    main()
