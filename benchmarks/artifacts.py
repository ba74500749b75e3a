"""Artifacts of two networks, by onnxgrad on the ordinary wheel and by onnxruntime-training 1.19.2.

Both train the same tensors by AdamW for 20 steps, from the same weights with the same batches, on
one thread: the losses of all steps must agree. `--runtime` also runs our files for opset 19 and IR
9 by another Python, whose onnxruntime may be as old as 1.16. docs/devices.md has the numbers.

    python benchmarks/artifacts.py --old /tmp/oldenv [--runtime /tmp/env116/bin/python]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

STEPS, RATE, AGREED = 20, 1e-4, 1e-4
NETWORKS = ("mobilenet-v2", "encoder 2x128")


def train(folder: str, data: str) -> dict[str, Any]:
    """Train with `step.onnx` and nothing but onnxruntime."""
    import onnxruntime as ort
    from safetensors.numpy import load_file

    manifest = json.loads(Path(folder, "training.json").read_text())
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    path = f"{folder}/{manifest['files']['step']}"
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    value = ort.OrtValue.ortvalue_from_numpy
    arrays, seconds, losses = np.load(data), [], []
    state = {n: value(a) for n, a in load_file(f"{folder}/checkpoint.safetensors").items()}
    outputs = [y.name for y in session.get_outputs()]
    for number, (x, y) in enumerate(zip(arrays["x"], arrays["y"], strict=True), 1):
        begin = time.perf_counter()
        scalars = {"minus_learning_rate": np.float32(-RATE), "step": np.int64(number)}
        fed = {name: value(np.array(number)) for name, number in scalars.items()}
        fed |= {"x": value(x), "label": value(y)}
        new = dict(zip(outputs, session.run_with_ort_values(outputs, state | fed), strict=True))
        losses.append(float(new["loss"].numpy()))
        state = {name: new[f"{name}.new"] for name in state}
        seconds.append(time.perf_counter() - begin)
    return {"losses": losses, "seconds": median(seconds), "runtime": ort.__version__}


def measure(name: str, old: Path, runtime: str | None) -> None:
    """Print one network's losses and times."""
    import old_package
    import onnx
    from zoo import NETWORKS as ZOO

    import onnxgrad as og

    network = replace(ZOO[name], train_norm=not ZOO[name].tokens)
    proto = network.exported(network.module())
    weights = og.trainable(proto).trained
    names = [t.name for t in weights]
    X, y = network.data(STEPS * network.batch)
    with TemporaryDirectory() as folder:
        model, data, theirs = (f"{folder}/{part}" for part in ("model.onnx", "data.npz", "old"))
        onnx.save(proto, model)
        for node in proto.graph.node:  # its gradient reads what an inference does not return
            if node.op_type == "LayerNormalization":
                node.output.extend(f"{node.output[0]}/{n}" for n in ("mean", "inverse"))
        onnx.save(proto, f"{folder}/for_old.onnx")
        batches = (a.reshape(STEPS, network.batch, *a.shape[1:]) for a in (X, y))
        np.savez(data, **dict(zip("xy", batches, strict=True)))
        Path(theirs).mkdir()
        more: dict[str, Any] = {"batch_norm": "train" if network.train_norm else "frozen"}
        begin = time.perf_counter()
        for kind, options in {"new": {}, "older": {"opset": 19, "ir_version": 9}}.items():
            og.artifacts.generate_artifacts(
                model,
                names,
                None,
                "CrossEntropyLoss",
                "AdamW",
                f"{folder}/{kind}",
                **options,
                **more,
            )
        built = (time.perf_counter() - begin) / 2
        script = Path(__file__)
        python = old_package.environment(old)
        former = _run(
            python,
            script.with_name("old_artifacts.py"),
            *(f"{folder}/for_old.onnx", data, json.dumps(names), RATE, theirs),
        )
        results = {"onnxgrad": _run(sys.executable, script, "--train", f"{folder}/new", data)}
        if runtime:
            results["opset 19"] = _run(runtime, script, "--train", f"{folder}/older", data)
        sizes = {
            p: Path(folder, p).stat().st_size for p in ("new/step.onnx", "old/training_model.onnx")
        }
    print(f"{name}: {len(names)} weights, built in {built:.1f} s, {sizes}")
    print(f"  onnxruntime-training: losses {_shown(former)}")
    for tool, result in results.items():
        differences = np.abs(np.subtract(result["losses"], former["losses"]))
        difference = (differences / np.abs(former["losses"])).max()
        agree = "agree" if difference < AGREED else "DIFFER"
        print(f"  {tool} on onnxruntime {result['runtime']}: losses {_shown(result)}")
        print(f"    {agree}: largest relative difference {difference:.1e}")


def _run(*command: Any) -> dict[str, Any]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def _shown(result: dict[str, Any]) -> str:
    losses = result["losses"]
    return f"{losses[0]:.6f} to {losses[-1]:.6f}, {1000 * result['seconds']:.1f} ms a step"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, default=Path("/tmp/oldenv"))
    parser.add_argument("--runtime")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train(*arguments.train)))
    else:
        for each in NETWORKS:
            measure(each, arguments.old, arguments.runtime)
