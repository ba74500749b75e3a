"""Runs the models by which learning rates update a weight, for custom training loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.model.feeds import session_dtype
from onnxgrad.runtime.small_models import SmallFunctions
from onnxgrad.runtime.values import FLOATS, shape_of, to_numpy


class Update(SmallFunctions):
    """A model of `function_onnx_graph`, such as `axpy`, with its session on a device."""

    def __init__(self, model: ModelProto, device: Any = None) -> None:
        self.model = model
        self._keep(device, update_onnx_=model)

    def run(self, numbers: dict[str, float], **tensors: Any) -> list[Any]:
        """Return the outputs: arrays, or OrtValues if the weight `X2` is one.

        Args:
            numbers: the inputs of shape (1,).
            **tensors: the other inputs, all of the shape of the weight `X2`.

        Raises:
            ValueError: a tensor that differs from the weight in shape, or from the model in dtype.
        """
        weight = tensors["X2"]
        dtype = FLOATS[self._session("update_onnx_").get_inputs()[0].type].numpy()
        for name, value in tensors.items():
            if shape_of(value) != shape_of(weight):
                raise ValueError(
                    f"{_NAMES[name]} has the shape {shape_of(value)}, "
                    f"and the weight {shape_of(weight)}"
                )
            if (actual := _dtype(value)) != dtype:
                raise ValueError(
                    f"{_NAMES[name]} has the dtype {actual}, and the update was built for "
                    f"{dtype}: call build_onnx_function(dtype=np.{actual})"
                )
        feed = tensors | {name: np.full(1, number, dtype) for name, number in numbers.items()}
        return self._run("update_onnx_", feed, isinstance(weight, ort.OrtValue))


def _dtype(value: Any) -> Any:
    if isinstance(value, ort.OrtValue):
        kind = session_dtype(value.data_type())
        return kind and kind.numpy()
    return to_numpy(value).dtype


_NAMES = {"X1": "the gradient", "X2": "the weight", "G": "the velocity"}
