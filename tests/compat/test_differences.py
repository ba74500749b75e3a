"""The tables of `docs/differences.md` are complete, and what they name exists."""

from __future__ import annotations

import inspect
import re

import pytest

from onnxgrad import compat
from tests.support.paths import DOCS
from tests.support.public_names import arguments_of, resolve_name

DOCUMENT = (DOCS / "differences.md").read_text()
CHANGED = {  # (name, argument) -> the default here, which docs/differences.md says
    ("select_model_inputs_outputs", "infer_shapes"): True,  # False
    ("plot_onnxs", "dpi"): 96,  # 300
}


def documented_rows(head: str) -> list[list[str]]:
    """Return the rows of the table of these columns."""
    [rows] = re.findall(rf"^\| {re.escape(head)} \|\n\|[-|]+\n((?:\|.*\n)+)", DOCUMENT, re.M)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]


ROWS_OF_THE_TABLE = documented_rows("The old packages | onnxgrad")
LOST_ARGUMENTS = documented_rows("Of | Arguments")
PROMISED = """
onnx_derivative DerivativeOptions DerivativeOptions.Zero DerivativeOptions.KeepYieldOp
DerivativeOptions.KeepOutputs DerivativeOptions.FillGrad DerivativeOptions.Loss random_feed
NoGradientRule partition add_loss_output penalty_loss_onnx get_train_initializer
losses.formulas.binary_cross_entropy losses.formulas.cross_entropy losses.formulas.huber
losses.formulas.poisson losses.formulas.hinge
OrtGradientOptimizer OrtGradientOptimizer.get_params OrtGradientOptimizer.set_params
OrtGradientOptimizer.fit train_losses_ validation_losses_ OrtGradientOptimizer.trained_coef_
OrtGradientOptimizer.get_state OrtGradientOptimizer.set_state OrtGradientOptimizer.get_trained_onnx
ConvergenceError OrtGradientForwardBackward OrtGradientForwardBackward.new_instance
OrtGradientForwardBackward.save_onnx_graph
OrtGradientForwardBackwardFunction.forward
OrtGradientForwardBackwardFunction.backward
OrtGradientForwardBackwardFunction.save_onnx_graph
OrtGradientForwardBackwardOptimizer OrtGradientForwardBackwardOptimizer.losses
OrtGradientForwardBackwardOptimizer.score OrtGradientForwardBackwardOptimizer.get_full_state
OrtGradientForwardBackwardOptimizer.get_state OrtGradientForwardBackwardOptimizer.set_state
OrtGradientForwardBackwardOptimizer.trained_coef_
OrtGradientForwardBackwardOptimizer.save_onnx_graph
OrtGradientForwardBackwardOptimizer.learning_loss
OrtGradientForwardBackwardOptimizer.learning_rate
OrtGradientForwardBackwardOptimizer.learning_penalty
ConvergenceWarning LearningRateSGD LearningRateSGDNesterov BaseLearningRate
BaseLearningRate.init_learning_rate BaseLearningRate.update_learning_rate BaseLearningRate.value
BaseLearningRate.loop BaseLearningRate.needs_grad BaseLearningRate.select
BaseLearningRate.build_onnx_function BaseLearningRate.update_weights LearningRateSGD.axpy_onnx_
LearningRateSGDNesterov.axpyw_onnx_ LearningRateSGDNesterov.update_weights
SquareLearningLoss AbsoluteLearningLoss ElasticLearningLoss NegLogLearningLoss
BaseLearningLoss BaseLearningLoss.select BaseLearningLoss.build_onnx_function
BaseLearningLoss.loss_gradient BaseLearningLoss.loss_scores loss_grad_onnx_ loss_score_onnx_
BaseLearningPenalty NoLearningPenalty ElasticLearningPenalty BaseLearningPenalty.select
BaseLearningPenalty.build_onnx_function BaseLearningPenalty.penalty_loss penalty_onnx_
penalty_grad_onnx_ zero_onnx_ train_session_ train_function_ input_names_ output_names_ cls_type_
OrtDataLoader OrtDataLoader.iter_numpy OrtDataLoader.iter_ortvalue OrtDataLoader.iter_bind
onnx_rename_weights onnx_rename_names select_model_inputs_outputs replace_initializers_into_onnx
add_initializer get_onnx_opset unreduced_onnx_loss function_onnx_graph get_supported_functions
onnx_simple_text_plot onnx_text_plot_io to_dot plot_onnxs EvaluationError ProviderError
""".split()
SEEN = """
DerivativeOptions onnx_derivative random_feed add_loss_output get_train_initializer
penalty_loss_onnx _loss_elastic _loss_l1 _loss_l2 _loss_log _rewrite_op_no_grad _unique_name
OrtGradientOptimizer OrtGradientForwardBackwardOptimizer LearningRateSGD LearningRateSGDNesterov
BaseLearningRate BaseLearningLoss SquareLearningLoss ElasticLearningLoss BaseLearningPenalty
NoLearningPenalty ElasticLearningPenalty BaseLearningOnnx _bind_input_ortvalue
_bind_output_ortvalue clear_binding_inputs _call_iobinding OrtDataLoader get_ort_device
numpy_to_ort_value device_to_providers OrtGradientForwardBackward get_initializer
OrtGradientForwardBackwardFunction input_to_ort save_for_backward saved_tensors needs_grad
proto_type_to_dtype onnx_rename_weights train_losses_ trained_coef_ zero_onnx_ train_function_
loss_grad_onnx_ loss_score_onnx_ axpyw_onnx_ onnx_simple_text_plot onnx_text_plot_io
onnx_rename_names select_model_inputs_outputs OnnxInference onnxnumpy_default NDArray onnxview
TrainingSession TrainingAgent OrtModuleGraphBuilderConfiguration split_onnx onnx_rewrite_operator
""".split()


@pytest.mark.parametrize(("there", "here"), ROWS_OF_THE_TABLE)
def test_what_the_table_names_exists(there, here):
    assert re.search("`.+`", there)
    if here.startswith("not carried over: "):
        assert len(here.split()) > 4  # the reason
        return
    name, attribute = re.fullmatch(r"`([\w.]+)`(, attribute)?", here).groups()
    found = resolve_name(name)
    if attribute:
        assert inspect.isclass(found)
    old = re.findall(r"`([\w.%]+)`", there)[0].split(".")[-1]
    if old in compat.__all__:
        assert name == old


def test_what_was_promised_is_there_or_in_the_table():
    for name in PROMISED:
        if not any(f"`{name}`" in there or f".{name}`" in there for there, _ in ROWS_OF_THE_TABLE):
            resolve_name(name)
    assert len(PROMISED) > 90


def test_what_programs_used_is_in_the_table():
    missing = [
        name
        for name in SEEN
        if not any(re.search(rf"[`.%]{name}`", there) for there, _ in ROWS_OF_THE_TABLE)
    ]
    assert (missing, len(SEEN) > 50) == ([], True)


@pytest.mark.parametrize(("functions", "lost"), LOST_ARGUMENTS)
def test_arguments_that_are_gone(functions, lost):
    names = re.findall("`([^`]+)`", functions)
    for i, name in enumerate(names):
        if "." not in name and "." in names[0]:
            names[i] = names[0].rpartition(".")[0] + "." + name
    for name in names:
        here = [p.name for p in arguments_of(resolve_name(name))]
        assert set(here).isdisjoint(re.findall("`([^`]+)`", lost))


@pytest.mark.parametrize(("name", "argument"), CHANGED)
def test_defaults_that_are_others(name, argument):
    default = CHANGED[name, argument]
    assert inspect.signature(resolve_name(name)).parameters[argument].default == default
    assert re.search(rf"`{argument}={default}`", " ".join(DOCUMENT.split()))
