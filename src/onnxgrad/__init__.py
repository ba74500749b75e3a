"""Train and differentiate ONNX models with the ordinary onnxruntime wheel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxgrad.autodiff.derivative import DerivativeOptions, onnx_derivative
    from onnxgrad.errors import ModelError, NoGradientRule

_HOME = {
    "DerivativeOptions": "autodiff.derivative",
    "onnx_derivative": "autodiff.derivative",
    "ModelError": "errors",
    "NoGradientRule": "errors",
}

__version__ = "0.1.0"
__all__ = ["DerivativeOptions", "ModelError", "NoGradientRule", "onnx_derivative"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'onnxgrad' has no attribute {name!r}")
    return getattr(import_module(f"onnxgrad.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
