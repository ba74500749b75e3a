"""The graphs that make up the training of a model whose loss is outside, and their files."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from onnx import ModelProto

from onnxgrad.autodiff.derivative import DerivativeOptions, as_inputs, onnx_derivative
from onnxgrad.functions import function_onnx_graph
from onnxgrad.graph.prepare import prepare, to_proto
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.surgery import select_model_inputs_outputs
from onnxgrad.graph.versions import NEWEST_OPSET, WORKING_OPSET
from onnxgrad.learning_losses import BaseLearningLoss
from onnxgrad.optimizers import Optimizer
from onnxgrad.penalties import BaseLearningPenalty
from onnxgrad.schedules import BaseLearningRate
from onnxgrad.training.epoch import build_epoch
from onnxgrad.training.objective import LossOutside
from onnxgrad.training.step import build_step, numpy_dtype

Graphs: TypeAlias = dict[str, Any]  # nested; the leaves are models


def training_graphs(
    proto: ModelProto,
    objective: LossOutside,
    optimizer: Optimizer,
    rate: BaseLearningRate,
    loss: BaseLearningLoss,
    penalty: BaseLearningPenalty,
) -> Graphs:
    """Return the graphs by name; the objective, which is that of `proto`, and the rate are used."""
    prediction, row_weight = objective.prediction, objective.row_weight
    output, shape = str(prediction.name), dims(prediction)
    shape = ("N", "k") if shape is None else ("N", *shape[1:])
    dtype = numpy_dtype(prediction)
    opset = max(WORKING_OPSET, min(objective.model.opset_imports[""], NEWEST_OPSET))
    step = build_step(objective, optimizer)
    rate.build_onnx_function(opset, dtype=dtype)
    loss = copy.deepcopy(loss).build_onnx_function(
        opset, weight_name=row_weight, dtype=dtype, shape=shape
    )
    penalty = copy.deepcopy(penalty).build_onnx_function(opset, dtype=dtype, names=step.weights)
    return {
        "model_onnx": proto,
        "learning_rate": _made_by(rate),
        "learning_loss": _made_by(loss),
        "learning_penalty": _made_by(penalty),
        "zero_onnx_": function_onnx_graph("zero", opset, dtype),
        "train_function_": _forward_and_joint(proto, output, step.weights),
        "epoch_onnx_": build_epoch(step),
    }


def _made_by(piece: Any) -> dict[str, ModelProto]:
    """Return the models among the attributes of `piece`."""
    return {name: value for name, value in vars(piece).items() if isinstance(value, ModelProto)}


def _forward_and_joint(proto: ModelProto, output: str, names: Sequence[str]) -> Graphs:
    model = prepare(proto, output=output)
    as_inputs(proto, model.graph, names)
    chosen = select_model_inputs_outputs(proto, [output])
    joint = onnx_derivative(chosen, names, options=DerivativeOptions.KeepYieldOp)
    return {"_trained_onnx": to_proto(model), "_optimized_pre_grad_model": joint}


def write(graphs: Graphs, folder: str | os.PathLike | None, prefix: str = "") -> dict[str, Any]:
    """Return `graphs` as the paths that they were written to, or serialized if there is no folder.

    Raises:
        OSError: the folder cannot be written.
    """
    made: dict[str, Any] = {}
    for name, graph in graphs.items():
        full = f"{prefix}{name}"
        if isinstance(graph, dict):
            made[name] = write(graph, folder, f"{full}.")
        elif folder is None:
            made[name] = graph.SerializeToString()
        else:
            path = Path(folder) / f"{full}.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(graph.SerializeToString())
            made[name] = str(path)
    return made
