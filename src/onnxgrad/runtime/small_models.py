"""Estimators that build small models and run them, such as those that update a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import EvaluationError, escaping
from onnxgrad.estimator import BaseEstimator
from onnxgrad.model.feeds import session_dtype
from onnxgrad.runtime.binding import Binding
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import FLOATS, shape_of, to_numpy, to_ortvalue

_NAMES = {"X1": "the gradient", "X2": "the weight", "G": "the velocity"}


class SmallFunctions(BaseEstimator):
    """An estimator that keeps small models as attributes and runs them.

    Sessions are created when a model first runs, and are not pickled. Two instances are equal if
    their parameters are.
    """

    def _keep(self, device: Any, **models: ModelProto) -> None:
        """Set the attributes `models`, which run on `device`."""
        self._device = CPU if device is None else Device.of(device).check()
        self._sessions = dict[str, ort.InferenceSession]()
        for name, model in models.items():
            setattr(self, name, model)

    def _session(self, name: str) -> ort.InferenceSession:
        model = getattr(self, name, None)
        if model is None:
            raise EvaluationError(
                f"{type(self).__name__} has no {name}: call build_onnx_function first"
            )
        sessions = self.__dict__.setdefault("_sessions", {})
        if name not in sessions:
            sessions[name] = session(model, self._device, work=0.0)
        return sessions[name]

    @escaping()
    def _run(self, name: str, feed: Mapping[str, Any], as_ortvalues: bool) -> list[Any]:
        """Return the outputs of the model `name`; the inputs are arrays or OrtValues."""
        ort_session = self._session(name)
        if not as_ortvalues:
            return ort_session.run(None, {k: to_numpy(v) for k, v in feed.items()})
        ortvalues = {key: to_ortvalue(value, self._device) for key, value in feed.items()}
        names = [y.name for y in ort_session.get_outputs()]
        return Binding(ort_session, self._device).run(ortvalues, names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_sessions"}

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, SmallFunctions)
        return self.get_params(deep=False) == other.get_params(deep=False)

    def __hash__(self) -> int:
        return hash(type(self))


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
