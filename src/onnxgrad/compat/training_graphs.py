"""The graphs of a training with the loss outside of the model."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

from onnx import ModelProto

from onnxgrad.compat.forward_backward import OrtGradientForwardBackward
from onnxgrad.compat.function_graphs import function_onnx_graph
from onnxgrad.compat.learning_losses import BaseLearningLoss
from onnxgrad.compat.learning_penalties import BaseLearningPenalty
from onnxgrad.graph.shapes import dims
from onnxgrad.model.opsets import NEWEST_OPSET, WORKING_OPSET
from onnxgrad.optimizers import Optimizer
from onnxgrad.schedules.epochwise import BaseLearningRate
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.build import build_step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.weight_groups import numpy_dtype

Graphs: TypeAlias = dict[str, Any]  # nested; the leaves are models


def training_graphs(
    proto: ModelProto,
    objective: Objective,
    optimizer: Optimizer,
    rate: BaseLearningRate,
    loss: BaseLearningLoss,
    penalty: BaseLearningPenalty,
) -> Graphs:
    """Return the graphs by name; this modifies the objective, built from `proto`, and the rate."""
    ((output, prediction),), row_weight = objective.predictions.items(), objective.row_weight
    shape = dims(prediction)
    shape = ("N", "k") if shape is None else ("N", *shape[1:])
    dtype = numpy_dtype(prediction)
    opset = max(WORKING_OPSET, min(objective.model.opset_imports[""], NEWEST_OPSET))
    step = build_step(objective, optimizer)
    passes = OrtGradientForwardBackward(proto, step.weights, output_names=[output])
    rate.build_onnx_function(opset, dtype=dtype)
    loss = copy.deepcopy(loss).build_onnx_function(
        opset, weight_name=row_weight, dtype=dtype, shape=shape
    )
    penalty = copy.deepcopy(penalty).build_onnx_function(opset, dtype=dtype, names=step.weights)
    return {
        "model_onnx": proto,
        "learning_rate": _models_of(rate),
        "learning_loss": _models_of(loss),
        "learning_penalty": _models_of(penalty),
        "zero_onnx_": function_onnx_graph("zero", opset, dtype),
        "train_function_": passes.graphs(),
        "epoch_onnx_": build_epoch(step),
    }


def _models_of(piece: Any) -> dict[str, ModelProto]:
    """Return the models among the attributes of `piece`."""
    return {name: value for name, value in vars(piece).items() if isinstance(value, ModelProto)}
