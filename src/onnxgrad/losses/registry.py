"""The losses by name. `formulas` and the files of its kind fill it when the package is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from onnxgrad.losses.spec import LossSpec

AnyFormula = TypeVar("AnyFormula", bound=Callable[..., Any])

LOSSES: dict[str, LossSpec] = {}


def register(*names: str, **fields: Any) -> Callable[[AnyFormula], AnyFormula]:
    """Register a formula by `names`; `fields` are those of `LossSpec`."""

    def add(formula: AnyFormula) -> AnyFormula:
        LOSSES.update({name: LossSpec(formula, name, **fields) for name in names})
        return formula

    return add
