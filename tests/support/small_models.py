"""Models of a few nodes, and both trainers on them."""

import numpy as np
import onnx
import pytest

from onnxgrad import add_loss_output
from onnxgrad.compat import OrtGradientForwardBackwardOptimizer, OrtGradientOptimizer
from tests.support.models import parse_model


def float32_model(text: str, **weights) -> onnx.ModelProto:
    """Return the model of a text, whose initializers of floats are cast to float32."""
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    return parse_model(
        text,
        **{n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in arrays.items()},
    )


def inner_loss_trainer(model: onnx.ModelProto, **options) -> OrtGradientOptimizer:
    """Return the trainer of a model to which squared errors were added as an output."""
    return OrtGradientOptimizer(add_loss_output(model), max_iter=1, random_state=0, **options)


def outer_loss_trainer(model: onnx.ModelProto, **options) -> OrtGradientForwardBackwardOptimizer:
    """Return the trainer that computes squared errors outside of the model."""
    return OrtGradientForwardBackwardOptimizer(model, max_iter=1, random_state=0, **options)


BOTH_TRAINERS = pytest.mark.parametrize("trainer", [inner_loss_trainer, outer_loss_trainer])


def two_column_model() -> onnx.ModelProto:
    """Return y = x w + b for two columns."""
    text = "g (float[N,2] x) => (float[N,1] y) { h = MatMul(x, w)  y = Add(h, b) }"
    return parse_model(text, w=np.float32([[0.1], [0.2]]), b=np.float32([0.3]))
