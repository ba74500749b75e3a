"""Seconds from the start of Python to the end of the first step of training, stage by stage.

Every number is the median of some processes, each of which trains one batch of a file. The stages
are in seconds of the CPU, which depend less on what else runs than those of the clock.

    taskset -c 0 python benchmarks/start_up.py --processes 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Times = dict[str, float]
FACES = {  # how a network is trained
    "mlp 784-128-10": ("Trainer", "OrtGradientOptimizer", "OrtGradientForwardBackwardOptimizer"),
    "minilm": ("Trainer",),
}


# -- in a process of its own, which imports what a training needs ---------------------------------


def child(network: str, face: str, file: str, began: float) -> Times:
    """Train one batch; return the seconds of every stage, and those of the clock since `began`."""
    times = {"": 0.0}

    def passed(stage: str) -> None:
        times.setdefault(stage, time.process_time())

    import numpy as np

    import onnxgrad as og

    rng = np.random.default_rng(0)
    if network == "minilm":
        ids = rng.integers(0, 30522, (8, 64))
        X: Any = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        y, loss = rng.standard_normal((8, 384), np.float32), "squared_error"
    else:
        X, y = rng.standard_normal((64, 784), np.float32), rng.integers(0, 10, 64)
        loss = "cross_entropy"
    if face == "Trainer":
        by_trainer(og, file, loss, X, y, passed)
    else:
        by_estimator(getattr(og, face), file, X, y, passed)
    ends = list(times.items())
    stages = {name: end - ends[i][1] for i, (name, end) in enumerate(ends[1:])}
    return stages | {"CPU": ends[-1][1], "clock": time.perf_counter() - began}


def by_trainer(
    og: Any, file: str, loss: str, X: Any, y: Any, passed: Callable[[str], None]
) -> None:
    class Stages(og.callbacks.Callback):
        def on_train_begin(self, trainer: Any, state: Any, control: Any) -> None:
            passed("build")

        def on_step_end(self, trainer: Any, state: Any, control: Any) -> None:
            passed("first step")

    trainer_class, stages = og.Trainer, Stages()
    passed("import")
    trainer = trainer_class(file, loss, callbacks=[stages])
    passed("trainer")
    trainer.fit(X, y, batch_size=len(y))


def by_estimator(estimator: Any, file: str, X: Any, y: Any, passed: Callable[[str], None]) -> None:
    inside = estimator.__name__ == "OrtGradientOptimizer"
    options = {} if inside else {"learning_loss": "cross_entropy"}
    passed("import")
    trainer = estimator(file, max_iter=1, batch_size=len(y), **options)
    passed("trainer")
    trainer.fit(X, y, callback=lambda progress: passed("build, first step"))


# -- the files, and the table ---------------------------------------------------------------------


def write(network: str, face: str, file: Path) -> None:
    """Write the file that is trained; where the estimator needs it, with its loss."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    import onnxgrad as og

    if network == "minilm":
        from published import fetched

        model = og.graph.select_model_inputs_outputs(onnx.load(fetched("minilm")), outputs=["461"])
    else:
        model = onnx.parser.parse_model("""
            <ir_version: 9, opset_import: ["": 20]>
            mlp (float[N, 784] x) => (float[N, 10] y) {
                h = Gemm(x, w0, b0)  r = Relu(h)  y = Gemm(r, w1, b1)
            }""")
        rng = np.random.default_rng(0)
        for name, shape in {"w0": (784, 128), "b0": 128, "w1": (128, 10), "b1": 10}.items():
            array = 0.05 * rng.standard_normal(shape, np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        if face == "OrtGradientOptimizer":
            model = og.add_loss_output(model, "cross_entropy")
    onnx.save(model, file)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--networks", nargs="*", default=list(FACES))
    arguments = parser.parse_args()
    table = Table("network", "by", "stages in seconds", "CPU", "clock")
    for network in arguments.networks:
        for face in FACES[network]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "model.onnx"
                write(network, face, file)
                count = 1 + arguments.processes  # the first one compiles modules, reads files
                runs = [in_process(network, face, str(file)) for _ in range(count)][1:]
            medians = {stage: median(run[stage] for run in runs) for stage in runs[0]}
            totals = [f"{medians.pop(name):.2f}" for name in ("CPU", "clock")]
            stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in medians.items())
            table.add_row(network, face, stages, *totals)
    Console(width=120).print(table)


def in_process(network: str, face: str, file: str) -> Times:
    arguments = ["--child", network, face, file, str(time.perf_counter())]  # one clock for all
    command = [sys.executable, __file__, *arguments]
    compiled = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=compiled)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(*sys.argv[2:5], float(sys.argv[5]))))
    else:
        main()
