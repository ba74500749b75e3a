"""The job of seed_mlp.py by onnxcustom 0.4.293, in a process and an environment of its own.

seed_mlp.py imports this file for `environment` and `run`; `run` starts it as a script:

    FOLDER/bin/python old_package.py SETTINGS MODEL.onnx X.npy y.npy

SETTINGS are JSON: batch_size, max_iter, rate, momentum. Prints JSON: seconds, and the weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

# All that its forward and backward trainer imports; what else these packages ask for is left out.
PACKAGES = (
    "onnxcustom==0.4.293 onnxruntime-training-cpu==1.19.2 onnx==1.16.2 protobuf==7.36.2 "
    "numpy==1.26.4 skl2onnx==1.19.1 scikit-learn==1.5.2 scipy==1.17.1 joblib==1.4.2 "
    "threadpoolctl==3.8.0 packaging==24.2 flatbuffers==25.12.19"
).split()
# The last wheel for Linux is for Python 3.9. What is used of it has no compiled part.
FOR_PYTHON_39 = (
    "mlprodict==0.9.1883 --python-version=39 --platform=manylinux2014_x86_64 --only-binary=:all:"
).split()


def environment(folder: Path) -> Path:
    """Return the Python of the environment in `folder`, which is built if it is missing."""
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        subprocess.run(["python3.11", "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *PACKAGES], check=True)
        site = folder / "lib" / "python3.11" / "site-packages"
        subprocess.run([*pip, *FOR_PYTHON_39, "--upgrade", "--target", site], check=True)
        complete.touch()
    return python


def run(
    python: Path, model: bytes, settings: dict[str, float], X: np.ndarray, y: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """Train in a process of `python`. Returns the seconds of a second run, and its weights."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("model.onnx", "X.npy", "y.npy")]
        paths[0].write_bytes(model)
        np.save(paths[1], X)
        np.save(paths[2], y)
        command = [python, __file__, json.dumps(settings), *paths]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    made = json.loads(done.stdout)
    return made["seconds"], [np.array(w, np.float32) for w in made["weights"]]


def adapt() -> None:
    """Bridge what onnxruntime-training changed since onnxcustom was written; take one thread."""
    import onnxruntime
    from onnxruntime.capi import _pybind_state as ort

    class Session(onnxruntime.InferenceSession):
        def __init__(self, model, sess_options=None, **kwargs) -> None:
            sess_options = sess_options or onnxruntime.SessionOptions()
            sess_options.intra_op_num_threads = 1
            super().__init__(model, sess_options, **kwargs)

    onnxruntime.InferenceSession = Session
    from onnxcustom.training import ortgradient

    class Builder(ort.OrtModuleGraphBuilder):
        get_model = ort.OrtModuleGraphBuilder.get_gradient_model
        get_inference_optimized_model = ort.OrtModuleGraphBuilder.get_forward_model

        def build(self) -> None:
            super().build(ort.TrainingGraphTransformerConfiguration())

    class Configuration(ort.OrtModuleGraphBuilderConfiguration):
        """Has a dictionary, into which onnxcustom writes what is now an argument of `build`."""

    ortgradient.OrtModuleGraphBuilder = Builder
    ortgradient.OrtModuleGraphBuilderConfiguration = Configuration
    ortgradient.TrainingAgent = lambda *arguments: ort.TrainingAgent(*arguments, 0)  # of device 0


def main(settings: str, model: str, X: str, y: str) -> None:
    import onnx

    adapt()
    from onnxcustom.training.optimizers_partial import OrtGradientForwardBackwardOptimizer
    from onnxcustom.training.sgd_learning_rate import LearningRateSGDNesterov

    given = json.loads(settings)
    rate, momentum, onx = given.pop("rate"), given.pop("momentum"), onnx.load(model)
    features, labels = np.load(X), np.load(y)
    for _ in range(2):  # the first warms up
        begin = time.perf_counter()
        trainer = OrtGradientForwardBackwardOptimizer(
            onx,
            learning_rate=LearningRateSGDNesterov(
                rate, learning_rate="constant", momentum=momentum, nesterov=True
            ),
            warm_start=True,  # from the weights of the model; otherwise they begin at random
            **given,
        )
        trainer.fit(features, labels)
        seconds = time.perf_counter() - begin
    weights = [value.numpy().tolist() for value in trainer.get_state()]
    print(json.dumps({"seconds": seconds, "weights": weights}))


if __name__ == "__main__":
    main(*sys.argv[1:])
