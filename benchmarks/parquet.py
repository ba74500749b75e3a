"""Training on Parquet files that do not fit into memory: peak memory, and how busy the session is.

    python benchmarks/parquet.py --gigabytes 5 --layout list

writes a folder of Parquet files, trains an MLP 784-512-512-10 on it for one epoch in a fresh
process, and reports the peak of that process's memory, the share of the time that the session
computes, rows per second, and what the session reaches on batches in memory. The layouts are:

    list     one column of lists of 784 float32
    columns  784 columns of float32
    pixels   one column of lists of 784 uint8
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

FEATURES, SIZES, BATCH = 784, (784, 512, 512, 10), 128
LAYOUTS = ("list", "columns", "pixels")


def model() -> onnx.ModelProto:
    proto = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        mlp (float[N, 784] x) => (float[N, 10] y) {
            a = MatMul(x, w0)  b = Add(a, b0)  c = Relu(b)
            d = MatMul(c, w1)  e = Add(d, b1)  f = Relu(e)
            g = MatMul(f, w2)  y = Add(g, b2)
        }""")
    rng = np.random.default_rng(0)
    for i, (inputs, outputs) in enumerate(pairwise(SIZES)):
        weight = rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)
        for name, array in {f"w{i}": weight, f"b{i}": np.zeros(outputs, np.float32)}.items():
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def rows(rng: np.random.Generator, count: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    if layout == "pixels":
        x = rng.integers(0, 256, (count, FEATURES), np.uint8)
    else:
        x = rng.standard_normal((count, FEATURES), np.float32)
    return x, x[:, :10].argmax(axis=1)  # which ten features decide


def write(folder: Path, gigabytes: float, layout: str, group: int, files: int) -> int:
    """Write the files, and return the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, total = np.random.default_rng(0), 0
    kind = pa.uint8() if layout == "pixels" else pa.float32()
    names = [f"p{i}" for i in range(FEATURES)] if layout == "columns" else ["x"]
    each = kind if layout == "columns" else pa.list_(kind, FEATURES)
    schema = pa.schema([*((name, each) for name in names), ("label", pa.int64())])
    for i in range(files):
        path = folder / f"{i:03}.parquet"
        with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
            while path.stat().st_size < gigabytes * 1e9 / files:
                x, y = rows(rng, group, layout)
                if layout == "columns":
                    columns = [pa.array(column) for column in np.ascontiguousarray(x.T)]
                else:
                    columns = [pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), FEATURES)]
                writer.write_table(pa.table([*columns, pa.array(y)], schema=schema))
                total += len(y)
    return total


def memory(entry: str) -> float:
    """Return an entry of the memory of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(entry))) / 1024


def train(folder: str) -> dict[str, float]:
    """Train an epoch on the folder, and return the measurements."""
    import onnxgrad as og
    from onnxgrad.training.callbacks.diagnostics import Timing

    trainer = og.Trainer(model(), "cross_entropy", callbacks=[Timing()])
    start, cpu = time.perf_counter(), time.process_time()
    trainer.fit(folder, y="label", batch_size=BATCH)
    seconds = time.perf_counter() - start
    progress = trainer.progress
    busy, waited = progress.seconds_computing, progress.seconds_waiting
    return {
        "rows": progress.rows,
        "loss": progress.loss,
        "seconds": seconds,
        "cores used": (time.process_time() - cpu) / seconds,
        "busy, %": 100 * busy / (busy + waited),
        "busy of the wall clock, %": 100 * busy / seconds,
        "rows/s": progress.rows / seconds,
        "peak memory, MB": memory("VmHWM"),
    }


def in_memory(layout: str, seconds: float = 10.0) -> float:
    """Return the rows per second of the session on an array in memory."""
    import onnxgrad as og

    x, y = rows(np.random.default_rng(0), BATCH * 64, layout)
    x = np.float32(x)
    trainer = og.Trainer(model(), "cross_entropy")
    trainer.fit(x, y, batch_size=BATCH)
    count, start, computed = 0, time.perf_counter(), 0.0
    while time.perf_counter() - start < seconds:
        trainer.fit(x, y, batch_size=BATCH, epochs=4)
        loop = trainer.progress
        count, computed = count + loop.rows, computed + loop.seconds_computing
    return count / computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--layout", choices=LAYOUTS, default="list")
    parser.add_argument("--group", type=int, default=8192, help="rows of a row group")
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", help="keep the files there, and use those that are there")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train)))
        return
    folder = Path(options.folder or tempfile.mkdtemp(prefix="onnxgrad-parquet-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not any(folder.glob("*.parquet")):
            write(folder, options.gigabytes, options.layout, options.group, options.files)
        size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        print(f"{size / 1e9:.2f} GB, layout {options.layout}, load {os.getloadavg()[0]:.1f}")
        for _ in range(options.repeat):
            run = subprocess.run(
                [sys.executable, __file__, "--train", str(folder)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(", ".join(f"{k} {v:.4g}" for k, v in json.loads(run.stdout).items()))
        print(f"session alone, in memory: {in_memory(options.layout):.4g} rows/s")
    finally:
        if not options.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
