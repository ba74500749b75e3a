"""Models of a few nodes, and both trainers on them."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import OrtGradientForwardBackwardOptimizer, OrtGradientOptimizer, add_loss_output


def parse(text, **weights):
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "local": 1, "com.microsoft": 1]> {text}'
    )
    for name, array in weights.items():
        array = np.asarray(array)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def inside(model, **options):
    return OrtGradientOptimizer(add_loss_output(model), max_iter=1, random_state=0, **options)


def outside(model, **options):
    return OrtGradientForwardBackwardOptimizer(model, max_iter=1, random_state=0, **options)


BOTH = pytest.mark.parametrize("trainer", [inside, outside])


def linear() -> onnx.ModelProto:
    """Return y = x w + b for two columns."""
    text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    return parse(text, w=np.float32([[0.1], [0.2]]), b=np.float32([0.3]))
