"""`SmallFunctions`: losses, penalties and learning rates that build and run small ONNX models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.errors import EvaluationError, check_options, escaping
from onnxgrad.estimator import BaseEstimator
from onnxgrad.model.draft import Draft
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.session import session
from onnxgrad.runtime.values import Binding, to_numpy, to_ortvalue

T = TypeVar("T")


def build_small_model(
    write: Callable[..., Mapping[str, ir.Value]],
    opset: int | None = None,
    dtype: Any = np.float32,
    **options: Any,
) -> ModelProto:
    """Return the ONNX model whose outputs the function `write` writes, named like `write`."""
    draft = Draft(write.__name__, opset, dtype)
    with draft.op:
        return draft.model(write(draft, **options), finish)


class SmallFunctions(BaseEstimator):
    """An estimator that keeps small ONNX models as attributes and runs them.

    Sessions are created when a model first runs, and are not pickled. Two instances are equal if
    their parameters are equal.
    """

    _device = CPU

    def _store_models(self, device: Any, **models: ModelProto | None) -> None:
        """Store `models` as attributes, to run on `device`; None deletes the attribute."""
        self._device = CPU if device is None else Device.of(device).check()
        self._sessions = dict[str, ort.InferenceSession]()
        for name, model in models.items():
            self.__dict__.pop(name, None)
            if model is not None:
                setattr(self, name, model)

    def _model_session(self, name: str) -> ort.InferenceSession:
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
    def _run_model(self, name: str, feed: Mapping[str, Any], as_ortvalues: bool) -> list[Any]:
        """Run the model in the attribute `name` on arrays or OrtValues; return its outputs."""
        ort_session = self._model_session(name)
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


def select_object(
    base: type[T],
    what: str,
    choice: Any,
    classes: Mapping[Any, type[T]],
    options: Mapping[str, Any],
) -> T | None:
    """Return `choice` if it is an instance of `base`, or a new instance if it is a subclass or a
    name; else None.

    Raises:
        ValueError: an option that the class lacks, or options together with an instance.
    """
    if isinstance(choice, base):
        if options:
            raise ValueError(
                f"{choice} is an instance: leave out {list(options)}, which are options for a name "
                "or a class"
            )
        return choice
    named = isinstance(choice, (str, type(None)))
    chosen = classes.get(choice) if named else choice
    if not (isinstance(chosen, type) and issubclass(chosen, base)):
        return None
    check_options(f"option of {what} {choice!r}", options, chosen)
    return chosen(**options)
