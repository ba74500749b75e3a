"""The public names: `__init__.py` imports the module of each when it is first used."""

from .autodiff.check.gradients import (
    check_gradient as check_gradient,
)
from .autodiff.check.report import (
    GradientReport as GradientReport,
    GradientRow as GradientRow,
)
from .autodiff.derivative import (
    DerivativeOptions as DerivativeOptions,
    onnx_derivative as onnx_derivative,
)
from .autodiff.higher import (
    hessian as hessian,
    hvp as hvp,
    jacobian as jacobian,
    jvp as jvp,
    vjp as vjp,
)
from .autodiff.partition import (
    Partition as Partition,
    Saved as Saved,
    partition as partition,
)
from .autodiff.primal.lowerings import (
    lowering as lowering,
)
from .autodiff.rules import (
    Unsupported as Unsupported,
    rule as rule,
)
from .errors import (
    ConvergenceError as ConvergenceError,
    ConvergenceWarning as ConvergenceWarning,
    EvaluationError as EvaluationError,
    ModelError as ModelError,
    NoGradientRule as NoGradientRule,
    ProviderError as ProviderError,
)
from .estimator import (
    NotFittedError as NotFittedError,
)
from .graph.emit import (
    Emit as Emit,
)
from .limits import (
    set_limits as set_limits,
)
from .losses.formulas import (
    LOSSES as LOSSES,
)
from .losses.functions import (
    function_onnx_graph as function_onnx_graph,
    get_supported_functions as get_supported_functions,
)
from .losses.in_graph import (
    add_loss_output as add_loss_output,
)
from .losses.info import (
    LossInfo as LossInfo,
)
from .losses.objects import (
    AbsoluteLearningLoss as AbsoluteLearningLoss,
    BaseLearningLoss as BaseLearningLoss,
    ElasticLearningLoss as ElasticLearningLoss,
    FunctionLearningLoss as FunctionLearningLoss,
    NegLogLearningLoss as NegLogLearningLoss,
    SquareLearningLoss as SquareLearningLoss,
)
from .losses.penalties import (
    BaseLearningPenalty as BaseLearningPenalty,
    ElasticLearningPenalty as ElasticLearningPenalty,
    NoLearningPenalty as NoLearningPenalty,
    PerWeightLearningPenalty as PerWeightLearningPenalty,
    penalty_loss_onnx as penalty_loss_onnx,
)
from .losses.spec import (
    LossSpec as LossSpec,
)
from .losses.unreduced import (
    unreduced_onnx_loss as unreduced_onnx_loss,
)
from .model.feeds import (
    random_feed as random_feed,
)
from .model.rename import (
    onnx_rename_names as onnx_rename_names,
    onnx_rename_weights as onnx_rename_weights,
)
from .model.surgery import (
    add_initializer as add_initializer,
    get_onnx_opset as get_onnx_opset,
    get_train_initializer as get_train_initializer,
    replace_initializers_into_onnx as replace_initializers_into_onnx,
    select_model_inputs_outputs as select_model_inputs_outputs,
)
from .model.write import (
    save as save,
)
from .optimizers import (
    AddDecayedWeights as AddDecayedWeights,
    Chain as Chain,
    Inputs as Inputs,
    Optimizer as Optimizer,
    ScaleByAdam as ScaleByAdam,
    ScaleByLearningRate as ScaleByLearningRate,
    Trace as Trace,
    adam as adam,
    adamw as adamw,
    momentum as momentum,
    nesterov as nesterov,
    sgd as sgd,
)
from .plot.dot import (
    to_dot as to_dot,
)
from .plot.figure import (
    plot_onnxs as plot_onnxs,
)
from .plot.text import (
    onnx_simple_text_plot as onnx_simple_text_plot,
    onnx_text_plot_io as onnx_text_plot_io,
)
from .schedules import (
    BaseLearningRate as BaseLearningRate,
    LearningRateSGD as LearningRateSGD,
    LearningRateSGDNesterov as LearningRateSGDNesterov,
)
from .training.forward_backward import (
    OrtGradientForwardBackward as OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction as OrtGradientForwardBackwardFunction,
)
from .training.loader import (
    OrtDataLoader as OrtDataLoader,
)
from .training.loop import (
    Progress as Progress,
)
from .training.loss_inside import (
    OrtGradientOptimizer as OrtGradientOptimizer,
)
from .training.loss_outside import (
    OrtGradientForwardBackwardOptimizer as OrtGradientForwardBackwardOptimizer,
)
from .training.parameters.defaults import (
    trainable as trainable,
)

__version__: str
__all__: list[str]
