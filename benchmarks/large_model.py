"""Time and memory of a model of 3 GB, each step in a process of its own.

python benchmarks/large_model.py [--layers 12] [--folder FOLDER]

Memory is that of the process at its peak beyond what the imports take: all of it, and the part that
is no file mapped into memory, which the system cannot take back.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

WIDTH, ROWS, BATCH = 8192, 64, 32
FEW = ["bias", "head"]


def write_model(path: Path, layers: int) -> int:
    """Write a network of square matrices with its data beside it; return the bytes of these."""
    nodes = " ".join(f"m{i} = MatMul(h{i}, w{i})  h{i + 1} = Tanh(m{i})" for i in range(layers))
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        deep (float[N,{WIDTH}] h0) => (float[N,1] y) {{
            {nodes}  z = Add(h{layers}, bias)  y = MatMul(z, head) }}""")
    rng = np.random.default_rng(0)
    block = rng.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5)
    with (path.parent / "data").open("wb") as file:
        for i in range(layers):
            tensor = model.graph.initializer.add(name=f"w{i}", data_type=1, dims=block.shape)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            places = {"location": "data", "offset": file.tell(), "length": block.nbytes}
            for key, value in places.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(block.data)
    for name, shape in (("bias", (WIDTH,)), ("head", (WIDTH, 1))):
        array = rng.standard_normal(shape, np.float32) / np.float32(WIDTH)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path.write_bytes(model.SerializeToString())
    return layers * block.nbytes


def rows() -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32)
    return X, X[:, :1]


def job(name: str, path: Path, other: Path) -> None:
    """Do one step."""
    import onnxruntime as ort

    import onnxgrad

    train = {"max_iter": 1, "batch_size": BATCH, "random_state": 0}
    if name == "gradient by a few weights":
        onnxgrad.onnx_derivative(path, FEW, [], path_name=path.with_name("few.onnx"))
    elif name == "gradient by all weights":
        onnxgrad.onnx_derivative(path, path_name=path.with_name("all.onnx"))
    elif name == "forward pass":
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        session.run(None, {"h0": rows()[0][:BATCH]})
    elif name == "two steps of a few weights, saved":
        trainer = onnxgrad.OrtGradientForwardBackwardOptimizer(path, FEW, **train).fit(*rows())
        onnxgrad.save(trainer.get_trained_onnx(), path.with_name("trained.onnx"))
    elif name == "two steps of a layer in the middle":
        onnxgrad.OrtGradientForwardBackwardOptimizer(path, ["w1"], **train).fit(*rows())
    elif name == "saved into another folder":
        onnxgrad.save(path.with_name("trained.onnx"), other / "trained.onnx")
    elif name == "two steps of all weights":
        onnxgrad.OrtGradientForwardBackwardOptimizer(path, **train).fit(*rows())


JOBS = [
    "forward pass",
    "gradient by a few weights",
    "gradient by all weights",
    "two steps of a few weights, saved",
    "two steps of a layer in the middle",
    "saved into another folder",
    "two steps of all weights",
]


def measured(name: str, path: Path, other: Path) -> dict[str, float]:
    """Do one step; return its seconds and gigabytes."""
    import onnxgrad.training.loss_outside  # noqa: F401  # and with it what a step imports

    status = Path("/proc/self/status")

    def anonymous() -> float:
        fields = dict(line.split(":") for line in status.read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024

    peaks, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peaks.append(anonymous())

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    job(name, path, other)
    seconds = time.perf_counter() - start
    done.set()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "all": after - before, "own": max(peaks) - peaks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where the model is written, then removed")
    parser.add_argument("--skip", nargs="*", default=(), help="names of steps")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(measured(given.job[0], Path(given.job[1]), Path(given.job[2]))))
        return
    table = Table("", "seconds", "memory, GB", "without files, GB")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path, other = Path(folder, "model", "m.onnx"), Path(folder, "other")
        path.parent.mkdir()
        other.mkdir()
        size = write_model(path, given.layers)
        for name in (n for n in JOBS if n not in given.skip):
            command = [sys.executable, __file__, "--job", name, path, other]
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                table.add_row(name, made.stderr.strip().splitlines()[-1] or str(made.returncode))
                continue
            found = json.loads(made.stdout)
            memory = (f"{max(0.0, found[kind]) / 1e9:.2f}" for kind in ("all", "own"))
            table.add_row(name, f"{found['seconds']:.2f}", *memory)
    console = Console()
    console.print(f"{given.layers} matrices of {WIDTH} x {WIDTH}: {size / 1e9:.2f} GB")
    console.print(table)


if __name__ == "__main__":
    main()
