"""Attributes of an estimator that exist after `fit`."""

from __future__ import annotations

from collections.abc import Callable
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
        trainer._fitted()
        return self.read(trainer)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"{self.name!r} is computed from the state: call set_state or fit")
