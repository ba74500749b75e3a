"""The names of `onnxcustom.training` and `experimental_experiment.gradient`."""

from onnxgrad.autodiff.derivative import (
    DerivativeOptions as DerivativeOptions,
    onnx_derivative as onnx_derivative,
)
from onnxgrad.compat.forward_backward import (
    OrtGradientForwardBackward as OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction as OrtGradientForwardBackwardFunction,
)
from onnxgrad.compat.function_graphs import (
    function_onnx_graph as function_onnx_graph,
    get_supported_functions as get_supported_functions,
)
from onnxgrad.compat.gradient_optimizers import (
    OrtGradientForwardBackwardOptimizer as OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer as OrtGradientOptimizer,
)
from onnxgrad.compat.learning_losses import (
    AbsoluteLearningLoss as AbsoluteLearningLoss,
    BaseLearningLoss as BaseLearningLoss,
    ElasticLearningLoss as ElasticLearningLoss,
    FunctionLearningLoss as FunctionLearningLoss,
    NegLogLearningLoss as NegLogLearningLoss,
    SquareLearningLoss as SquareLearningLoss,
)
from onnxgrad.compat.learning_penalties import (
    BaseLearningPenalty as BaseLearningPenalty,
    ElasticLearningPenalty as ElasticLearningPenalty,
    NoLearningPenalty as NoLearningPenalty,
    PerWeightLearningPenalty as PerWeightLearningPenalty,
    penalty_loss_onnx as penalty_loss_onnx,
)
from onnxgrad.compat.learning_rates import (
    BaseLearningRate as BaseLearningRate,
    LearningRateSGD as LearningRateSGD,
    LearningRateSGDNesterov as LearningRateSGDNesterov,
)
from onnxgrad.compat.loader import (
    OrtDataLoader as OrtDataLoader,
)
from onnxgrad.errors import (
    ConvergenceError as ConvergenceError,
    ConvergenceWarning as ConvergenceWarning,
    EvaluationError as EvaluationError,
    ProviderError as ProviderError,
)
from onnxgrad.losses.in_graph import (
    add_loss_output as add_loss_output,
)
from onnxgrad.losses.row_losses import (
    unreduced_onnx_loss as unreduced_onnx_loss,
)
from onnxgrad.model.feeds import (
    random_feed as random_feed,
)
from onnxgrad.model.rename import (
    onnx_rename_names as onnx_rename_names,
    onnx_rename_weights as onnx_rename_weights,
)
from onnxgrad.model.surgery import (
    add_initializer as add_initializer,
    get_onnx_opset as get_onnx_opset,
    get_train_initializer as get_train_initializer,
    replace_initializers_into_onnx as replace_initializers_into_onnx,
    select_model_inputs_outputs as select_model_inputs_outputs,
)
from onnxgrad.plot.figure import (
    plot_onnxs as plot_onnxs,
)
from onnxgrad.plot.text import (
    onnx_simple_text_plot as onnx_simple_text_plot,
    onnx_text_plot_io as onnx_text_plot_io,
    to_dot as to_dot,
)
