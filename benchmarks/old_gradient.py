"""Forward and backward of a loss by onnxruntime-training 1.19.2, in an environment of its own.

networks.py starts it as a script in the environment of `old_package.environment`:

    FOLDER/bin/python old_gradient.py MODEL.onnx DATA.npz THREADS STEPS

MODEL has one output, the loss, and weights as initializers; DATA has an array for each input.
Prints JSON: seconds, the median of a step, and the loss.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import numpy as np


def main(model: str, data: str, threads: str, steps: str) -> None:
    import onnx
    import onnxruntime as ort
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    proto = onnx.load(model)
    loss = proto.graph.output[0].name
    floats = (t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    weights = [t.name for t in floats if t.dims]
    builder = GradientGraphBuilder(proto.SerializeToString(), {loss}, set(weights), loss, None)
    builder.build()
    gradient = onnx.load_from_string(builder.get_model())
    computed = {y for node in gradient.graph.node for y in node.output}
    names = [f"{w}_grad" for w in weights if f"{w}_grad" in computed]
    outputs = {y.name for y in gradient.graph.output}
    gradient.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in outputs)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = int(threads), 4
    session = ort.InferenceSession(gradient.SerializeToString(), options)
    arrays = dict(np.load(data))
    for x in session.get_inputs():  # the seed of the sweep
        if x.name not in arrays:
            arrays[x.name] = np.ones((), np.float32)
    seconds = []
    for _ in range(int(steps)):
        begin = time.perf_counter()
        results = session.run([loss, *names], arrays)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": median(seconds), "loss": float(np.sum(results[0]))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
