"""Time and memory of large models, each measurement in a process of its own.

python benchmarks/large_model.py [steps] [trainings] [--layers 12] [--folder FOLDER]

`steps` are single steps with a model of 3 GB. Their memory is that of the process at its peak
beyond what the imports take: all of it, and the part that is no file mapped into memory, which the
system cannot take back.

`trainings` compares with PyTorch. Their memory is all that the process takes at its peak, over the
size of the weights; files that are mapped into memory count where they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

WIDTH, ROWS, BATCH = 8192, 64, 32
FEW = ["bias", "head"]
STEPS, SMALL_BATCH = 5, 8  # of a training
LAYERS = {"inline": 4, "1 GB": 4, "2.4 GB": 9, "4.3 GB": 16}  # matrices of 268 MB
TRAININGS = [
    *((tool, size, kind) for size in ("inline", "1 GB", "2.4 GB") for kind in ("sgd", "adam")
      for tool in ("onnxgrad", "PyTorch") if (tool, size) != ("PyTorch", "inline")),
    ("onnxgrad", "4.3 GB", "lora"),
]  # fmt: skip


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
        trainer = onnxgrad.compat.OrtGradientForwardBackwardOptimizer(path, FEW, **train).fit(
            *rows()
        )
        onnxgrad.save(trainer.get_trained_onnx(), path.with_name("trained.onnx"))
    elif name == "two steps of a layer in the middle":
        onnxgrad.compat.OrtGradientForwardBackwardOptimizer(path, ["w1"], **train).fit(*rows())
    elif name == "saved into another folder":
        onnxgrad.save(path.with_name("trained.onnx"), other / "trained.onnx")
    elif name == "two steps of all weights":
        onnxgrad.compat.OrtGradientForwardBackwardOptimizer(path, **train).fit(*rows())


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
    import onnxgrad.compat.gradient_optimizers  # noqa: F401  # and with it what a step imports

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


# -- trainings ------------------------------------------------------------------------------------


def status(key: str) -> float:
    """Return an entry of this process's status in bytes: "VmHWM" is the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def trained(path: Path, kind: str) -> dict[str, float]:
    """Train a model; return the seconds of a step and the bytes at the peak."""
    import onnxgrad

    seconds = []

    class Clock(onnxgrad.callbacks.Callback):
        def on_step_end(self, trainer, state, control):
            seconds.append(time.perf_counter())

    model = onnxgrad.add_lora(path, "w*") if kind == "lora" else path
    optimizer = "sgd" if kind == "sgd" else "adam"
    trainer = onnxgrad.Trainer(
        model, "mse", optimizer=optimizer, learning_rate=1e-4, callbacks=[Clock()]
    )
    del model
    X, y = (a[:SMALL_BATCH] for a in rows())
    trainer.fit(X, y, epochs=STEPS, batch_size=SMALL_BATCH, shuffle=False)
    losses = [entry["loss"] for entry in trainer.history]
    return {"seconds": float(np.median(np.diff(seconds))), "peak": status("VmHWM")} | {
        "losses": losses
    }


def trained_by_torch(path: Path, kind: str) -> dict[str, float]:
    """Train the same model by PyTorch."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    arrays = {
        t.name: external_array(t, path)
        for t in onnx.load(path, load_external_data=False).graph.initializer
    }
    parameters = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in arrays.items()}
    del arrays
    optimizer = (torch.optim.SGD if kind == "sgd" else torch.optim.Adam)(
        parameters.values(), lr=1e-4
    )
    X, y = (torch.tensor(a[:SMALL_BATCH]) for a in rows())
    seconds, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        h = X
        for i in range(len(parameters) - len(FEW)):
            h = torch.tanh(h @ parameters[f"w{i}"])
        found = (h + parameters["bias"]) @ parameters["head"]
        loss = (found - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter())
    return {"seconds": float(np.median(np.diff(seconds))), "peak": status("VmHWM")} | {
        "losses": losses
    }


def external_array(tensor: onnx.TensorProto, path: Path) -> np.ndarray:
    """Return the elements of a tensor, those of a file as a view of it."""
    if not tensor.external_data:
        return onnx.numpy_helper.to_array(tensor)
    entries = {e.key: e.value for e in tensor.external_data}
    file, offset = path.with_name(entries["location"]), int(entries["offset"])
    return np.memmap(file, np.float32, "c", offset, tuple(tensor.dims))


def child(*arguments: str) -> dict[str, Any] | str:
    """Return what a process of its own measures, or its error."""
    command = [sys.executable, "-W", "ignore", __file__, "--job", *arguments]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        return (made.stderr.strip().splitlines() or [str(made.returncode)])[-1]
    return json.loads(made.stdout.splitlines()[-1])


def trainings(parent: Path | None, only: Sequence[str]) -> Table:
    """Return the table of the trainings of some sizes."""
    table = Table("weights", "optimizer", "tool", "ms a step", "peak / weights", "last loss")
    for size in (s for s in LAYERS if s in only):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            path = Path(folder, "m.onnx")
            nbytes = write_model(path, LAYERS[size])
            if size == "inline":
                onnx.save(onnx.load(path), path)
                path.with_name("data").unlink()
            for tool, _, kind in (t for t in TRAININGS if t[1] == size):
                found = child(tool, str(path), kind)
                if isinstance(found, str):
                    table.add_row(size, kind, tool, found)
                    continue
                numbers = found["seconds"] * 1000, found["peak"] / nbytes, found["losses"][-1]
                table.add_row(
                    size,
                    kind,
                    tool,
                    *(f"{n:.{d}f}" for n, d in zip(numbers, (0, 2, 6), strict=True)),
                )
    return table


MEASURED = {"onnxgrad": trained, "PyTorch": trained_by_torch}


# -- all of them ----------------------------------------------------------------------------------


def steps(parent: Path | None, layers: int, skip: Sequence[str]) -> Table:
    """Return the table of the single steps."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        path, other = Path(folder, "model", "m.onnx"), Path(folder, "other")
        path.parent.mkdir()
        other.mkdir()
        size = write_model(path, layers)
        table = Table(f"{size / 1e9:.2f} GB", "seconds", "memory, GB", "without files, GB")
        for name in (n for n in JOBS if n not in skip):
            found = child(name, str(path), str(other))
            if isinstance(found, str):
                table.add_row(name, found)
                continue
            memory = (f"{max(0.0, found[kind]) / 1e9:.2f}" for kind in ("all", "own"))
            table.add_row(name, f"{found['seconds']:.2f}", *memory)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=["steps", "trainings"])
    parser.add_argument("--layers", type=int, default=12, help="of the model of single steps")
    parser.add_argument("--sizes", nargs="*", default=list(LAYERS), help="of the trainings")
    parser.add_argument("--folder", type=Path, help="where the models are written, then removed")
    parser.add_argument("--skip", nargs="*", default=(), help="names of steps")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        name, path, last = given.job
        if name in MEASURED:
            print(json.dumps(MEASURED[name](Path(path), last)))
        else:
            print(json.dumps(measured(name, Path(path), Path(last))))
        return
    if "steps" in given.tables:
        Console().print(steps(given.folder, given.layers, given.skip))
    if "trainings" in given.tables:
        Console().print(trainings(given.folder, given.sizes))


if __name__ == "__main__":
    main()
