"""The time of each operator in a run of a model, from the profile of onnxruntime."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.operators import WITH_SUBGRAPHS
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session

_KERNEL = "_kernel_time"  # the end of the name of an event that is a run of a node


@dataclass(frozen=True)
class OperatorTime:
    """All nodes of one operator in a run: their count, seconds, and bytes of outputs."""

    operator: str
    nodes: float
    seconds: float
    nbytes: float


@escaping()
def operator_times(
    model: ModelProto,
    feeds: Mapping[str, np.ndarray],
    device: Device,
    work: float,
    in_order: bool = False,
    runs: int = 3,
) -> list[OperatorTime]:
    """Return the time of each operator in a run of a model, the slowest operator first.

    The times are means over `runs` runs, after a first run that does not count. The nodes are
    counted after onnxruntime's optimizations. `session` documents the other arguments.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        prefix = os.path.join(folder, "profile")
        running = session(model, device, work, in_order, profile=prefix)
        for _ in range(runs + 1):
            running.run(None, dict(feeds))
        events = json.loads(Path(running.end_profiling()).read_text(errors="replace"))
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)]
    starts = [e["ts"] for e in events if e["name"] == "model_run"]
    counted = [e for e in nodes if e["ts"] >= sorted(starts)[1]]
    totals: dict[str, list[float]] = {}
    for event in counted:
        about = event["args"]
        if about["op_name"] in WITH_SUBGRAPHS:  # the nodes of its subgraphs are counted instead
            continue
        entry = totals.setdefault(about["op_name"], [0.0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += event["dur"] * 1e-6
        entry[2] += float(about.get("output_size") or 0)
    found = [OperatorTime(name, *(v / runs for v in entry)) for name, entry in totals.items()]
    return sorted(found, key=lambda each: -each.seconds)
