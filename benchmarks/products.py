"""The products and convolutions of a training step, each alone: the rate that its kernels have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from math import prod, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import onnxgrad as og
from onnxgrad.operators.records import standard_operator
from onnxgrad.runtime.session import load_session, thread_count
from onnxgrad.training.diagnose import runnable_step

RUNS = 7
DTYPES = {"float": TensorProto.FLOAT, "double": TensorProto.DOUBLE}
FUSED = ("FusedMatMul", "FusedGemm", "FusedConv")  # onnxruntime's, of several nodes


class KeptStep(og.callbacks.Callback):
    """Keeps the model of a step, and its inputs, at the end of a training."""

    def on_train_end(self, trainer: Any, state: Any, control: Any) -> None:
        self.step = runnable_step(trainer._call)


def products_of_step(network: Any, module: Any) -> tuple[float, float]:
    """Return the seconds of all products of a training step of a network, each run alone, and
    their multiply-adds.

    Each time is the least of some runs of a model of one node, without the call from Python.
    """
    kept, (X, y) = KeptStep(), network.data(network.batch)
    trainer = network.trainer(network.exported(module), callbacks=[kept])
    trainer.fit(network.fed(X), y, batch_size=network.batch)
    assert kept.step is not None
    model, inputs, work, _ = kept.step
    threads, least, total = thread_count(work), dict[str, float](), 0.0
    with TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
        events = profile(model, inputs, threads, 1, path)
        nodes = {n.name: n for n in nodes_of(onnx.load(path).graph)}
        counts = Counter[str]()
        for event in events:
            node = nodes.get(event["name"].removesuffix("_kernel_time"))
            if node is None or not is_product(node):
                continue
            shapes = event["args"]["input_type_shape"]
            key = node_key(node, shapes)
            counts[key] += 1
            total += multiply_adds(node, shapes, event["args"]["output_type_shape"])
            if key not in least:
                least[key] = seconds_alone(node, shapes, threads)
    return sum(count * least[key] for key, count in counts.items()), total


def multiply_adds(node: onnx.NodeProto, operands: list[Any], results: list[Any]) -> float:
    """Return the multiply-adds of a product or convolution, from the shapes of a profile."""
    a, b, y = (next(iter(each.values())) for each in (*operands[:2], *results[:1]))
    if "Conv" in node.op_type:  # each element of a result, or of the operand, reads a kernel
        return prod(a if node.op_type == "ConvTranspose" else y) * prod(b) / b[0]
    stack = prod(y[:-2]) if len(a) > 2 < len(b) else 1
    return sqrt(prod(a) * prod(b) * prod(y) / stack)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)


def is_product(node: onnx.NodeProto) -> bool:
    """Return whether a node multiplies matrices, or is a convolution or its gradient."""
    return node.op_type in FUSED or standard_operator(node.op_type).work is not None


def node_key(node: onnx.NodeProto, shapes: list[dict[str, list[int]]]) -> str:
    """Return a text that is equal for nodes which compute the same of operands of these shapes."""
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return f"{node.domain} {node.op_type} {attributes} {shapes}"


def seconds_alone(node: onnx.NodeProto, shapes: list[dict[str, list[int]]], threads: int) -> float:
    """Return the least seconds of the kernel of a node on random operands of some shapes."""
    given = [name for name in node.input if name]
    kinds = [(DTYPES[kind], shape) for each in shapes for kind, shape in each.items()]
    pairs = list(zip(given, kinds, strict=True))
    names = dict(pairs)
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info(name, *kind) for name, kind in names.items()],
        [onnx.ValueInfoProto(name=name) for name in node.output[:1]],
    )
    domains = ("", "com.microsoft", "com.microsoft.nchwc")
    opsets = [helper.make_opsetid(d, 20 if not d else 1) for d in domains]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind))
        for name, (kind, shape) in names.items()
    }
    events = profile(model, feeds, threads, RUNS)
    return min(e["dur"] for e in events if e["args"]["op_name"] == node.op_type) * 1e-6


def profile(
    model: onnx.ModelProto, feeds: dict[str, Any], threads: int, runs: int, path: Path | None = None
) -> list[dict[str, Any]]:
    """Return the events of the kernels in some runs of a model, after a run that does not count.

    Write the model that onnxruntime makes of it to `path`.
    """
    with TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/profile"
        if path is not None:
            options.optimized_model_filepath = str(path)
        running = load_session(model, options)
        for _ in range(runs + 1):
            running.run(None, feeds)
        events = json.loads(Path(running.end_profiling()).read_text())
    starts = sorted(e["ts"] for e in events if e["name"] == "model_run")
    return [
        e
        for e in events
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= starts[1]
    ]
