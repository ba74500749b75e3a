"""The base of estimators: scikit-learn's where it is installed."""

from __future__ import annotations

import inspect
import reprlib
from typing import Any

try:
    from sklearn.base import BaseEstimator
except ImportError:

    class BaseEstimator:  # type: ignore[no-redef]
        """Reads and sets the arguments of `__init__`, as scikit-learn's base does."""

        def get_params(self, deep: bool = True) -> dict[str, Any]:
            """Return the arguments of `__init__`, and with `deep` those of their values."""
            made: dict[str, Any] = {}
            for name in inspect.signature(type(self)).parameters:
                made[name] = value = getattr(self, name)
                if deep and isinstance(value, BaseEstimator):
                    made |= {f"{name}__{k}": v for k, v in value.get_params().items()}
            return made

        def set_params(self, **params: Any) -> Any:
            """Set arguments of `__init__`, or `name__argument` of their values."""
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

        def __repr__(self) -> str:
            params = self.get_params(deep=False).items()
            listed = ", ".join(f"{k}={reprlib.repr(v)}" for k, v in params)
            return f"{type(self).__name__}({listed})"


__all__ = ["BaseEstimator"]
