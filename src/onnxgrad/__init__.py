"""Train and differentiate ONNX models with the ordinary onnxruntime wheel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxgrad.autodiff.check import check_gradient
    from onnxgrad.autodiff.derivative import DerivativeOptions, onnx_derivative
    from onnxgrad.autodiff.higher import hessian, hvp, jacobian, jvp, vjp
    from onnxgrad.autodiff.partition import Partition, partition
    from onnxgrad.autodiff.report import GradientReport
    from onnxgrad.autodiff.rules import Refused, rule
    from onnxgrad.errors import (
        ConvergenceError,
        ConvergenceWarning,
        EvaluationError,
        ModelError,
        NoGradientRule,
        ProviderError,
    )
    from onnxgrad.feeds import random_feed
    from onnxgrad.functions import function_onnx_graph, get_supported_functions
    from onnxgrad.graph.rename import onnx_rename_names, onnx_rename_weights
    from onnxgrad.graph.surgery import (
        add_initializer,
        get_onnx_opset,
        get_train_initializer,
        replace_initializers_into_onnx,
        select_model_inputs_outputs,
    )
    from onnxgrad.graph.write import save
    from onnxgrad.learning_losses import (
        AbsoluteLearningLoss,
        BaseLearningLoss,
        ElasticLearningLoss,
        NegLogLearningLoss,
        SquareLearningLoss,
    )
    from onnxgrad.limits import set_limits
    from onnxgrad.losses import add_loss_output
    from onnxgrad.optimizers import adam, adamw, momentum, nesterov, sgd
    from onnxgrad.penalties import (
        BaseLearningPenalty,
        ElasticLearningPenalty,
        NoLearningPenalty,
        penalty_loss_onnx,
    )
    from onnxgrad.plot.dot import to_dot
    from onnxgrad.plot.figure import plot_onnxs
    from onnxgrad.plot.text import onnx_simple_text_plot, onnx_text_plot_io
    from onnxgrad.schedules import BaseLearningRate, LearningRateSGD, LearningRateSGDNesterov
    from onnxgrad.training.forward_backward import OrtGradientForwardBackward
    from onnxgrad.training.full import OrtGradientOptimizer
    from onnxgrad.training.loader import OrtDataLoader
    from onnxgrad.training.parameters import trainable
    from onnxgrad.training.partial import OrtGradientForwardBackwardOptimizer
    from onnxgrad.unreduced import unreduced_onnx_loss

_MODULES = {
    "autodiff.check": ("check_gradient",),
    "autodiff.derivative": ("DerivativeOptions", "onnx_derivative"),
    "autodiff.higher": ("hessian", "hvp", "jacobian", "jvp", "vjp"),
    "autodiff.partition": ("Partition", "partition"),
    "autodiff.report": ("GradientReport",),
    "autodiff.rules": ("Refused", "rule"),
    "errors": (
        "ConvergenceError",
        "ConvergenceWarning",
        "EvaluationError",
        "ModelError",
        "NoGradientRule",
        "ProviderError",
    ),
    "feeds": ("random_feed",),
    "functions": ("function_onnx_graph", "get_supported_functions"),
    "graph.rename": ("onnx_rename_names", "onnx_rename_weights"),
    "graph.surgery": (
        "add_initializer",
        "get_onnx_opset",
        "get_train_initializer",
        "replace_initializers_into_onnx",
        "select_model_inputs_outputs",
    ),
    "graph.write": ("save",),
    "learning_losses": (
        "AbsoluteLearningLoss",
        "BaseLearningLoss",
        "ElasticLearningLoss",
        "NegLogLearningLoss",
        "SquareLearningLoss",
    ),
    "limits": ("set_limits",),
    "losses": ("add_loss_output",),
    "optimizers": ("adam", "adamw", "momentum", "nesterov", "sgd"),
    "penalties": (
        "BaseLearningPenalty",
        "ElasticLearningPenalty",
        "NoLearningPenalty",
        "penalty_loss_onnx",
    ),
    "plot.dot": ("to_dot",),
    "plot.figure": ("plot_onnxs",),
    "plot.text": ("onnx_simple_text_plot", "onnx_text_plot_io"),
    "schedules": ("BaseLearningRate", "LearningRateSGD", "LearningRateSGDNesterov"),
    "training.forward_backward": ("OrtGradientForwardBackward",),
    "training.full": ("OrtGradientOptimizer",),
    "training.loader": ("OrtDataLoader",),
    "training.parameters": ("trainable",),
    "training.partial": ("OrtGradientForwardBackwardOptimizer",),
    "unreduced": ("unreduced_onnx_loss",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "AbsoluteLearningLoss",
    "BaseLearningLoss",
    "BaseLearningPenalty",
    "BaseLearningRate",
    "ConvergenceError",
    "ConvergenceWarning",
    "DerivativeOptions",
    "ElasticLearningLoss",
    "ElasticLearningPenalty",
    "EvaluationError",
    "GradientReport",
    "LearningRateSGD",
    "LearningRateSGDNesterov",
    "ModelError",
    "NegLogLearningLoss",
    "NoGradientRule",
    "NoLearningPenalty",
    "OrtDataLoader",
    "OrtGradientForwardBackward",
    "OrtGradientForwardBackwardOptimizer",
    "OrtGradientOptimizer",
    "Partition",
    "ProviderError",
    "Refused",
    "SquareLearningLoss",
    "adam",
    "adamw",
    "add_initializer",
    "add_loss_output",
    "check_gradient",
    "function_onnx_graph",
    "get_onnx_opset",
    "get_supported_functions",
    "get_train_initializer",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "momentum",
    "nesterov",
    "onnx_derivative",
    "onnx_rename_names",
    "onnx_rename_weights",
    "onnx_simple_text_plot",
    "onnx_text_plot_io",
    "partition",
    "penalty_loss_onnx",
    "plot_onnxs",
    "random_feed",
    "replace_initializers_into_onnx",
    "rule",
    "save",
    "select_model_inputs_outputs",
    "set_limits",
    "sgd",
    "to_dot",
    "trainable",
    "unreduced_onnx_loss",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'onnxgrad' has no attribute {name!r}")
    return getattr(import_module(f"onnxgrad.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
