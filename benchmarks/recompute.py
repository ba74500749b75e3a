"""What `Trainer(recompute=)` saves and costs: the peak memory of a process, and the time of a step.

Each number is of a process of its own, which trains a few steps of one batch with sgd. The memory
is that of the process at its peak; what a row of the batch adds is the difference of two batches.

    python benchmarks/recompute.py [--rows 8 32] [--steps 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import onnx
from onnx import numpy_helper
from partition import transformer
from rich.console import Console
from rich.table import Table

import onnxgrad as og
from onnxgrad.autodiff.recompute import RECOMPUTE


def encoder() -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """Return 4 layers of width 256, and the shape of a row: 64 tokens."""
    proto = transformer(layers=4, d=256)
    last = proto.graph.output[0].name
    for text in (f"m = ReduceMean<keepdims=0>({last}, second)", "y = MatMul(m, head)"):
        proto.graph.node.append(onnx.parser.parse_node(text))
    head = np.random.default_rng(1).normal(0, 256**-0.5, (256, 10)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(head, "head"))
    proto.graph.initializer.append(numpy_helper.from_array(np.int64([1]), "second"))
    return with_output(proto), (64, 256)


def resnet(stages: int = 3, blocks: int = 3, width: int = 16) -> tuple[onnx.ModelProto, tuple]:
    """Return the ResNet-20 of He et al. (2015) for images of 32 x 32."""
    rng, weights, lines = np.random.default_rng(0), {}, []

    def conv(x: str, y: str, a: int, b: int, size: int, stride: int) -> None:
        weights[f"{y}_w"] = rng.normal(0, (2 / (a * size * size)) ** 0.5, (b, a, size, size))
        weights.update({f"{y}_s": np.ones(b), f"{y}_b": np.zeros(b)})
        weights.update({f"{y}_m": np.zeros(b), f"{y}_v": np.ones(b)})
        pad = size // 2
        lines.append(f"{y}_c = Conv<pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]>")
        lines.append(f"({x}, {y}_w) {y} = BatchNormalization({y}_c, ")
        lines.append(", ".join(f"{y}_{part}" for part in "sbmv") + ")")

    conv("X", "stem", 3, width, 3, 1)
    lines.append("h = Relu(stem)")
    x, before = "h", width
    for stage in range(stages):
        channels = width * 2**stage
        for block in range(blocks):
            name, stride = f"s{stage}_{block}", 2 if stage and not block else 1
            conv(x, f"{name}_1", before, channels, 3, stride)
            lines.append(f"{name}_r = Relu({name}_1)")
            conv(f"{name}_r", f"{name}_2", channels, channels, 3, 1)
            if stride > 1:
                conv(x, f"{name}_p", before, channels, 1, stride)
                x = f"{name}_p"
            lines.append(f"{name}_a = Add({name}_2, {x}) {name}_h = Relu({name}_a)")
            x, before = f"{name}_h", channels
    weights["head"] = rng.normal(0, before**-0.5, (before, 10))
    proto = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 18]>
        resnet (float[N, 3, 32, 32] X) => (float[N, 10] y) {{ {" ".join(lines)}
        p = GlobalAveragePool({x}) f = Flatten(p) y = MatMul(f, head) }}""")
    for name, array in weights.items():
        proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return proto, (3, 32, 32)


def with_output(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the output `y`, (N, 10), only."""
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 10])
    del proto.graph.output[:]
    proto.graph.output.append(y)
    return proto


NETWORKS = {"encoder": (encoder, {}), "resnet": (resnet, {"batch_norm": "train"})}


def measure(network: str, recompute: str, rows: int, steps: int) -> dict[str, float]:
    """Return the peak in MB and the median seconds of a step, in this process."""
    build, options = NETWORKS[network]
    proto, shape = build()
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(rows, *shape)).astype(np.float32), rng.integers(0, 10, rows)
    seconds: list[float] = []

    class Clock(og.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            seconds.append(time.perf_counter())

    trainer = og.Trainer(
        proto,
        "cross_entropy",
        optimizer="sgd",
        recompute=recompute,
        callbacks=[Clock()],
        **options,
    )
    trainer.fit(X, y, epochs=steps + 1, batch_size=rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": peak, "seconds": float(np.median(np.diff(seconds)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=(8, 32))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        network, recompute, rows = arguments.one
        print(json.dumps(measure(network, recompute, int(rows), arguments.steps)))
        return
    few, many = arguments.rows
    columns = [f"MB, {few} rows", f"MB, {many} rows", "MB a row", f"ms a step, {many} rows"]
    table = Table("network", "recompute", *columns)
    for network in NETWORKS:
        for recompute in RECOMPUTE:
            results = []
            for rows in (few, many):
                command = [sys.executable, __file__, "--steps", str(arguments.steps)]
                command += ["--one", network, recompute, str(rows)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
            small, large = (result["peak"] for result in results)
            each, ms = (large - small) / (many - few), 1000 * results[1]["seconds"]
            numbers = f"{small:.0f}", f"{large:.0f}", f"{each:.1f}", f"{ms:.0f}"
            table.add_row(network, recompute, *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
