"""The base class of estimators: scikit-learn's if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from reprlib import Repr
from typing import Any

try:
    from sklearn.base import BaseEstimator as Parameters
    from sklearn.exceptions import NotFittedError
except ImportError:

    class NotFittedError(ValueError, AttributeError):  # type: ignore[no-redef]
        """A trained weight, loss or state was requested before `fit`.

        If scikit-learn is installed, its `sklearn.exceptions.NotFittedError` is used instead. Like
        that, it is both a `ValueError` and an `AttributeError`.

        Examples:
            >>> import onnx, onnxgrad as og
            >>> model = onnx.parser.parse_model('''
            ...     <ir_version: 9, opset_import: ["": 20]>
            ...     f (float[N,1] x) => (float[N,1] y) <float[1] w = {2.0}> { y = Mul(x, w) }''')
            >>> try:
            ...     og.OrtGradientForwardBackwardOptimizer(model, ["w"]).get_trained_onnx()
            ... except og.NotFittedError as error:
            ...     print(error)
            nothing was trained yet: call fit first
        """

    class Parameters:  # type: ignore[no-redef]
        """Reads and sets the arguments of `__init__`, as scikit-learn's `BaseEstimator` does."""

        def get_params(self, deep: bool = True) -> dict[str, Any]:
            """Return the arguments of `__init__`; `deep` adds those of nested estimators."""
            params: dict[str, Any] = {}
            for name in signature(type(self)).parameters:
                params[name] = value = getattr(self, name)
                if deep and isinstance(value, Parameters):
                    params |= {f"{name}__{k}": v for k, v in value.get_params().items()}
            return params

        def set_params(self, **params: Any) -> Any:
            """Set arguments of `__init__`; `name__argument` sets that of a nested estimator."""
            valid = self.get_params(deep=False)
            for name, value in params.items():
                head, _, tail = name.partition("__")
                if head not in valid:
                    raise ValueError(f"invalid parameter {head!r}; valid: {list(valid)}")
                if tail:
                    getattr(self, head).set_params(**{tail: value})
                else:
                    setattr(self, head, value)
            return self


class BaseEstimator(Parameters):
    """An estimator whose `repr` shows all of its arguments in order; models by their size."""

    def __repr__(self) -> str:
        shown = (f"{k}={_SHORT.repr(getattr(self, k))}" for k in signature(type(self)).parameters)
        return f"{type(self).__name__}({', '.join(shown)})"


class _Short(Repr):
    """`repr` that shortens models, bytes and long containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 20
        self.maxstring = self.maxother = 400

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, bytes):
            return f"<{len(x)} bytes>"
        if type(x).__name__ == "ModelProto":
            return f"<ModelProto {x.graph.name!r}, {len(x.graph.node)} nodes>"
        return super().repr1(x, level)


_SHORT = _Short()


class Selected:
    """A descriptor: an argument of `__init__`, stored as the object that `select` returns for it.

    `select` turns a name or a number into an object. A value that it rejects with TypeError or
    ValueError is stored unchanged, and `fit` raises the error.
    """

    def __init__(self, select: Callable[[Any], Any]) -> None:
        self.select = select

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        with suppress(TypeError, ValueError):
            value = self.select(value)
        instance.__dict__[self.name] = value


__all__ = ["BaseEstimator", "NotFittedError", "Selected"]
