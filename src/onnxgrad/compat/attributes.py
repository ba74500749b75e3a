"""Attributes of an estimator: arguments that become objects, and what exists after `fit`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Fitted:
    """An attribute of a trainer that `read` computes from the state.

    Before there is a state, it raises `NotFittedError`, which is an `AttributeError`.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        trainer._fitted_state()
        return self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"{self.name!r} is computed from the state: call set_state or fit")


class Selected:
    """An argument of `__init__`, stored as the object that `select` returns for it.

    `select` turns a name or a number into an object. A value that it rejects with TypeError or
    ValueError is stored unchanged, and `fit` raises the error.
    """

    def __init__(self, select: Callable[[Any], Any], default: Any) -> None:
        self.select, self.default = select, default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.default if instance is None else instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        with suppress(TypeError, ValueError):
            value = self.select(value)
        instance.__dict__[self.name] = value
