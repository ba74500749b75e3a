"""Training by artifacts of onnxruntime-training 1.19.2, in an environment of its own.

artifacts.py starts it as a script in the environment of `old_package.environment`:

    FOLDER/bin/python old_artifacts.py MODEL.onnx DATA.npz WEIGHTS RATE FOLDER

MODEL returns scores of classes; DATA has x and labels, [steps, ...]; WEIGHTS is a JSON list of the
names of tensors that train. Prints JSON: the loss of every step, and the median seconds of one.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from types import ModuleType

import numpy as np


def main(model: str, data: str, weights: str, rate: str, folder: str) -> None:
    for unused in ("amp", "optim"):  # they need torch
        sys.modules[f"onnxruntime.training.{unused}"] = ModuleType(unused)
    import onnx
    import onnxruntime as ort
    from onnxruntime.training import api, artifacts

    artifacts.generate_artifacts(
        onnx.load(model),
        requires_grad=json.loads(weights),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    state = api.CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    # the evaluation of a BatchNormalization in training mode, which it writes, does not load
    module = api.Module(f"{folder}/training_model.onnx", state, session_options=options)
    optimizer = api.Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(float(rate))
    module.train()
    arrays, losses, seconds = np.load(data), [], []
    for x, y in zip(arrays["x"], arrays["y"], strict=True):
        begin = time.perf_counter()
        losses.append(float(module(x, y)))
        optimizer.step()
        module.lazy_reset_grad()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"losses": losses, "seconds": median(seconds)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
