"""The graphs of a training with the loss outside of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

from onnx import ModelProto

from onnxgrad.compat.forward_backward import OrtGradientForwardBackward
from onnxgrad.compat.function_graphs import function_onnx_graph
from onnxgrad.compat.learning_rates import BaseLearningRate
from onnxgrad.compat.rows_and_penalty import RowsAndPenalty
from onnxgrad.graph.shapes import dims
from onnxgrad.model.opsets import NEWEST_OPSET, WORKING_OPSET
from onnxgrad.optimizers import Optimizer
from onnxgrad.training.objective import Plan, build_objective
from onnxgrad.training.step.build import build_step
from onnxgrad.training.step.epoch import build_epoch
from onnxgrad.training.step.weight_groups import numpy_dtype

Graphs: TypeAlias = dict[str, Any]  # nested; the leaves are models


def training_graphs(
    proto: ModelProto,
    names: Sequence[str],
    losses: RowsAndPenalty,
    rate: BaseLearningRate,
    optimizer: Optimizer,
) -> Graphs:
    """Return the graphs by name of a training of the named weights; this modifies the rate."""
    objective = build_objective(proto, names, Plan(losses), False)
    ((output, prediction),) = objective.predictions.items()
    shape = dims(prediction)
    shape = ("N", "k") if shape is None else ("N", *shape[1:])
    dtype = numpy_dtype(prediction)
    opset = max(WORKING_OPSET, min(objective.model.opset_imports[""], NEWEST_OPSET))
    step = build_step(objective, optimizer)
    passes = OrtGradientForwardBackward(proto, step.weights, output_names=[output])
    rate.build_onnx_function(opset, dtype=dtype)
    loss = copy.deepcopy(losses.loss).build_onnx_function(
        opset, weight_name=objective.row_weight, dtype=dtype, shape=shape
    )
    penalty = copy.deepcopy(losses.penalty)
    penalty.build_onnx_function(opset, dtype=dtype, names=step.weights)
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
