"""Which nodes of a model a device computes, which nodes the CPU, and what is copied in between."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import ProviderError
from onnxgrad.runtime.checked import CheckedSession
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.node_runs import node_title
from onnxgrad.runtime.session import load_session, open_session, quiet_options

_RECORD = "session.record_ep_graph_assignment_info"  # onnxruntime then tells where nodes run
_LISTED = 50  # nodes of one kind that the text names


@dataclass(frozen=True)
class DeviceReport:
    """Where the nodes of a model run, in one call.

    Attributes:
        device: the device.
        nodes: the count of nodes of the model.
        without_kernel: titles of the nodes that onnxruntime gives to the CPU, as the device has no
            kernel for them or they are small.
        failing: titles of the nodes that fail on the device or differ from the CPU, with what is
            wrong. The CPU computes them, too.
        fault: what is wrong with the results, though no node alone is at fault; None: nothing.
        fed_bytes: bytes of the inputs and results of the call.
        copied_bytes: bytes that are copied between nodes on the device and on the CPU.
    """

    device: str
    nodes: int
    without_kernel: list[str]
    failing: dict[str, str]
    fault: str | None
    fed_bytes: int
    copied_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the results are as on the CPU."""
        return self.fault is None

    def __str__(self) -> str:
        failing = [f"{title}: {reason}" for title, reason in self.failing.items()]
        lines = [
            f"device {self.device}: {self.nodes} nodes",
            *_report_section("the CPU computes, as the device has no kernel", self.without_kernel),
            *_report_section("the CPU computes, as the device fails", failing),
            f"copied in a call: {self.fed_bytes:,} bytes of inputs and results, "
            f"{self.copied_bytes:,} between nodes",
            "results: as on the CPU" if self.ok else f"results: {self.fault}",
        ]
        return "\n".join(lines)


def _report_section(title: str, entries: list[str]) -> list[str]:
    """Return the lines of the text on the nodes `entries`; none without nodes."""
    if not entries:
        return []
    rest = len(entries) - _LISTED
    more = [f"    and {rest} more"] if rest > 0 else []
    return [f"{title}: {len(entries)}", *(f"    {e}" for e in entries[:_LISTED]), *more]


def report_device(
    model: ModelProto, feed: Mapping[str, np.ndarray], device: Device
) -> DeviceReport:
    """Return where the nodes of a model run on a device, and what is copied.

    Args:
        model: model.
        feed: its inputs.
        device: the device.

    Raises:
        ProviderError: onnxruntime cannot start the device.
    """
    named = ModelProto()
    named.CopyFrom(model)
    for i, node in enumerate(named.graph.node):
        node.name = str(i)
    running, fault = load_session(named, providers=device.providers), None
    results = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the nodes that are listed below
        try:
            results = sum(_array_nbytes(y) for y in running.run(None, dict(feed)))
        except ProviderError as e:
            fault = str(e)
    checked = isinstance(running, CheckedSession)
    failing = {n.index: n.fault or "" for n in running.moved} if checked else {}
    options, copied, placed = quiet_options(), 0, dict[int, str]()
    options.add_session_config_entry(_RECORD, "1")
    for key, value in (running.configuration if checked else {}).items():
        options.add_session_config_entry(key, value)
    if fault is None:
        placed, copied = _run_with_profile(
            running.model if checked else named, feed, device, options
        )
    titles = [node_title(node) for node in model.graph.node]
    return DeviceReport(
        device=str(device),
        nodes=len(titles),
        without_kernel=[
            titles[i]
            for i, name in sorted(placed.items())
            if name == CPU.providers[0][0] and i not in failing
        ],
        failing={titles[i]: reason for i, reason in failing.items()},
        fault=fault,
        fed_bytes=results + sum(_array_nbytes(array) for array in feed.values()),
        copied_bytes=copied,
    )


def _run_with_profile(
    model: ModelProto,
    feed: Mapping[str, np.ndarray],
    device: Device,
    options: ort.SessionOptions,
) -> tuple[dict[int, str], int]:
    """Return the execution provider of each node by its number, and the bytes that are copied.

    The nodes of the model have their numbers as names.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options.enable_profiling = True
        options.profile_file_prefix = os.path.join(folder, "profile")
        running = open_session(model, options, device.providers)
        running.run(None, dict(feed))
        events = json.loads(Path(running.end_profiling()).read_text(errors="replace"))
    placed = {}
    for part in running.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            if node.name.isdecimal():  # not a node that onnxruntime has written
                placed[int(node.name)] = part.ep_name
    copies = (e["args"] for e in events if e.get("cat") == "Node" and "Memcpy" in e["name"])
    return placed, sum(int(about.get("output_size") or 0) for about in copies)


def _array_nbytes(value: object) -> int:
    """Return the bytes of an array; 0 for any other value."""
    return value.nbytes if isinstance(value, np.ndarray) else 0
