"""Train and differentiate ONNX models with the ordinary onnxruntime wheel."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxgrad.autodiff.check.gradients import check_gradient
    from onnxgrad.autodiff.check.report import GradientReport
    from onnxgrad.autodiff.derivative import DerivativeOptions, onnx_derivative
    from onnxgrad.autodiff.higher import hessian, hvp, jacobian, jvp, vjp
    from onnxgrad.autodiff.partition import Partition, partition
    from onnxgrad.autodiff.rules import Unsupported, rule
    from onnxgrad.errors import (
        ConvergenceError,
        ConvergenceWarning,
        EvaluationError,
        ModelError,
        NoGradientRule,
        ProviderError,
    )
    from onnxgrad.limits import set_limits
    from onnxgrad.losses.functions import function_onnx_graph, get_supported_functions
    from onnxgrad.losses.in_graph import add_loss_output
    from onnxgrad.losses.objects import (
        AbsoluteLearningLoss,
        BaseLearningLoss,
        ElasticLearningLoss,
        NegLogLearningLoss,
        SquareLearningLoss,
    )
    from onnxgrad.losses.penalties import (
        BaseLearningPenalty,
        ElasticLearningPenalty,
        NoLearningPenalty,
        penalty_loss_onnx,
    )
    from onnxgrad.losses.unreduced import unreduced_onnx_loss
    from onnxgrad.model.feeds import random_feed
    from onnxgrad.model.rename import onnx_rename_names, onnx_rename_weights
    from onnxgrad.model.surgery import (
        add_initializer,
        get_onnx_opset,
        get_train_initializer,
        replace_initializers_into_onnx,
        select_model_inputs_outputs,
    )
    from onnxgrad.model.write import save
    from onnxgrad.optimizers import adam, adamw, momentum, nesterov, sgd
    from onnxgrad.plot.dot import to_dot
    from onnxgrad.plot.figure import plot_onnxs
    from onnxgrad.plot.text import onnx_simple_text_plot, onnx_text_plot_io
    from onnxgrad.schedules import BaseLearningRate, LearningRateSGD, LearningRateSGDNesterov
    from onnxgrad.training.forward_backward import OrtGradientForwardBackward
    from onnxgrad.training.loader import OrtDataLoader
    from onnxgrad.training.loss_inside import OrtGradientOptimizer
    from onnxgrad.training.loss_outside import OrtGradientForwardBackwardOptimizer
    from onnxgrad.training.parameters.defaults import trainable

_MODULES = {
    "autodiff.check.gradients": ("check_gradient",),
    "autodiff.derivative": ("DerivativeOptions", "onnx_derivative"),
    "autodiff.higher": ("hessian", "hvp", "jacobian", "jvp", "vjp"),
    "autodiff.partition": ("Partition", "partition"),
    "autodiff.check.report": ("GradientReport",),
    "autodiff.rules": ("Unsupported", "rule"),
    "errors": (
        "ConvergenceError",
        "ConvergenceWarning",
        "EvaluationError",
        "ModelError",
        "NoGradientRule",
        "ProviderError",
    ),
    "model.feeds": ("random_feed",),
    "losses.functions": ("function_onnx_graph", "get_supported_functions"),
    "model.rename": ("onnx_rename_names", "onnx_rename_weights"),
    "model.surgery": (
        "add_initializer",
        "get_onnx_opset",
        "get_train_initializer",
        "replace_initializers_into_onnx",
        "select_model_inputs_outputs",
    ),
    "model.write": ("save",),
    "losses.objects": (
        "AbsoluteLearningLoss",
        "BaseLearningLoss",
        "ElasticLearningLoss",
        "NegLogLearningLoss",
        "SquareLearningLoss",
    ),
    "limits": ("set_limits",),
    "losses.in_graph": ("add_loss_output",),
    "optimizers": ("adam", "adamw", "momentum", "nesterov", "sgd"),
    "losses.penalties": (
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
    "training.loss_inside": ("OrtGradientOptimizer",),
    "training.loader": ("OrtDataLoader",),
    "training.parameters.defaults": ("trainable",),
    "training.loss_outside": ("OrtGradientForwardBackwardOptimizer",),
    "losses.unreduced": ("unreduced_onnx_loss",),
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
    "SquareLearningLoss",
    "Unsupported",
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
