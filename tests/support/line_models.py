"""Rows of a line in two columns, and the linear model that learns it."""

from __future__ import annotations

import numpy as np
import onnx

from tests.support.models import parse_model

LINE_START = {"w": [[0.1], [0.2]], "b": [0.3]}
DTYPES_OF_KINDS = {"float": np.float32, "double": np.float64, "float16": np.float16}


def line_rows(n: int = 47) -> tuple[np.ndarray, np.ndarray]:
    """Return n rows of y = 2 a - b + 3."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 2)).astype(np.float32)
    return x, (2 * x[:, :1] - x[:, 1:] + 3).astype(np.float32)


def line_model(kind: str = "float", opset: int = 18) -> onnx.ModelProto:
    """Return y = x w + b, which starts at `LINE_START`."""
    text = f"g ({kind}[N,2] x) => ({kind}[N,1] y) {{ h = MatMul(x, w)  y = Add(h, b) }}"
    return kind_model(text, kind, opset, **LINE_START)


def kind_model(text: str, kind: str = "float", opset: int = 18, **weights) -> onnx.ModelProto:
    """Return the model of a text, whose initializers have the dtype of a kind."""
    dtype = DTYPES_OF_KINDS[kind]
    arrays = {name: np.asarray(value, dtype) for name, value in weights.items()}
    return parse_model(text, opset=opset, **arrays)
