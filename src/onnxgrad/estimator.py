"""The base class of estimators, which imports scikit-learn only when scikit-learn needs it."""

from __future__ import annotations

import sys
from functools import cache
from inspect import signature
from reprlib import Repr
from typing import Any, Self


class NotFittedError(ValueError, AttributeError):
    """A trained weight, loss or state was requested before `fit`.

    Where scikit-learn is imported, it is also a `sklearn.exceptions.NotFittedError`. Like that, it
    is both a `ValueError` and an `AttributeError`.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1] x) => (float[N,1] y) <float[1] w = {2.0}> { y = Mul(x, w) }''')
        >>> try:
        ...     og.compat.OrtGradientForwardBackwardOptimizer(model, ["w"]).get_trained_onnx()
        ... except og.NotFittedError as error:
        ...     print(error)
        nothing was trained yet: call fit first
    """

    def __new__(cls, *args: Any) -> Self:  # noqa: D102
        # only who has imported scikit-learn's error can catch it
        if cls is NotFittedError and "sklearn.exceptions" in sys.modules:
            return super().__new__(_not_fitted_error_class(), *args)
        return super().__new__(cls, *args)

    def __reduce__(self) -> Any:
        return NotFittedError, self.args


@cache
def _not_fitted_error_class() -> Any:
    """Return a class derived from this `NotFittedError` and scikit-learn's `NotFittedError`."""
    from sklearn.exceptions import NotFittedError as Theirs

    return type("NotFittedError", (NotFittedError, Theirs), {"__module__": __name__})


@cache
def _init_arguments(cls: type) -> tuple[str, ...]:
    """Return the names of the arguments of `cls.__init__`."""
    return tuple(signature(cls).parameters)


class BaseEstimator:
    """An estimator with scikit-learn's interface, whose parameters are arguments of `__init__`.

    It does not derive from scikit-learn's base class, whose import takes longer than to begin a
    training. Its `repr` shows all arguments in order; models by their size.
    """

    def _argument_names(self) -> tuple[str, ...]:
        return _init_arguments(type(self))  # type: ignore[arg-type]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of `__init__`; `deep` adds the arguments of nested estimators."""
        params: dict[str, Any] = {}
        for name in self._argument_names():
            params[name] = value = getattr(self, name)
            if deep and hasattr(value, "get_params") and not isinstance(value, type):
                params |= {f"{name}__{k}": v for k, v in value.get_params().items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set arguments of `__init__`; `name__argument` sets an argument of a nested estimator."""
        valid, nested = self._argument_names(), dict[str, dict[str, Any]]()
        for name, value in params.items():
            head, _, tail = name.partition("__")
            if head not in valid:
                raise ValueError(f"invalid parameter {head!r}; valid parameters: {list(valid)}")
            if tail:
                nested.setdefault(head, {})[tail] = value
            else:
                setattr(self, head, value)
        for head, own in nested.items():
            getattr(self, head).set_params(**own)
        return self

    def __repr__(self) -> str:
        shown = (f"{k}={_SHORT.repr(getattr(self, k))}" for k in self._argument_names())
        return f"{type(self).__name__}({', '.join(shown)})"

    # -- methods that scikit-learn calls ----------------------------------------------------------

    def _as_sklearn_estimator(self) -> Any:
        """Return a view of `self`, sharing attributes, that derives from scikit-learn's base."""
        theirs: Any = object.__new__(_class_with_sklearn_base(type(self)))  # type: ignore[arg-type]
        theirs.__dict__ = self.__dict__
        return theirs

    def __sklearn_tags__(self) -> Any:
        return super(BaseEstimator, self._as_sklearn_estimator()).__sklearn_tags__()  # type: ignore[misc]

    def get_metadata_routing(self) -> Any:
        """Return the metadata, such as sample weights, that methods request of scikit-learn."""
        return super(BaseEstimator, self._as_sklearn_estimator()).get_metadata_routing()  # type: ignore[misc]

    def set_fit_request(self, **requests: Any) -> Self:
        """Say which metadata scikit-learn shall pass to `fit`, such as `sample_weight=True`."""
        return self._set_metadata_request("fit", requests)

    def set_score_request(self, **requests: Any) -> Self:
        """Say which metadata scikit-learn shall pass to `score`, such as `sample_weight=True`."""
        return self._set_metadata_request("score", requests)

    def _set_metadata_request(self, method: str, requests: dict[str, Any]) -> Self:
        """Store which metadata scikit-learn shall pass to `method`."""
        from sklearn import get_config

        if not get_config()["enable_metadata_routing"]:
            raise RuntimeError("first call sklearn.set_config(enable_metadata_routing=True)")
        routing = self.get_metadata_routing()
        of_method = getattr(routing, method)
        for name, alias in requests.items():
            if name not in of_method.requests:
                raise TypeError(
                    f"{method} has no metadata {name!r}: it has {sorted(of_method.requests)}"
                )
            of_method.add_request(param=name, alias=alias)
        self._metadata_request = routing
        return self

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        if "sklearn.base" not in sys.modules:
            return {"text/plain": repr(self)}
        return super(BaseEstimator, self._as_sklearn_estimator())._repr_mimebundle_(**options)  # type: ignore[misc]


@cache
def _class_with_sklearn_base(cls: Any) -> type:
    """Return a class derived from `cls` and scikit-learn's `BaseEstimator`."""
    from sklearn.base import BaseEstimator as Theirs

    return cls if issubclass(cls, Theirs) else type(cls.__name__, (cls, Theirs), {})


class _ShortRepr(Repr):
    """A `Repr` that shortens the texts of models, bytes and long containers."""

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


_SHORT = _ShortRepr()


__all__ = ["BaseEstimator", "NotFittedError"]
