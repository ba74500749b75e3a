"""A model and its loss, evaluated as the file is: nothing of it needs to be trainable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onnx import ModelProto

from onnxgrad.data.columns import read_names
from onnxgrad.errors import argument, named, printable
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.objectives import ALIASES
from onnxgrad.model.convert import non_tensor
from onnxgrad.model.notes import read_note
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.runtime.device import Device
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import evaluate
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import loss_output
from onnxgrad.training.objective import Objective
from onnxgrad.training.output_metrics import select_metrics
from onnxgrad.training.recipe import Recipe, build_objective
from onnxgrad.training.remembered import LOSS
from onnxgrad.training.state import TrainState


class ModelWithLoss:
    """A model and its loss, stated as for a `Trainer`; no weight is an input."""

    def __init__(
        self,
        proto: ModelProto,
        loss: Any,
        loss_options: Mapping[str, Any] | None = None,
        loss_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.job = Job(proto, loss=loss, loss_options=loss_options, loss_weights=loss_weights)
        self.names = read_names(proto)

    def describe(self, y: Any) -> Objective:
        """Return the inputs and the labels, for labels `y` whose shape may decide the loss."""
        recipe = Recipe.of(self.job, TrainState(), Dataset(None, y))
        return build_objective(recipe, training=False)

    def numeric_loss(self) -> str | None:
        """Return the name of the loss if its labels are numbers; None if they are classes."""
        infos = self.describe(None).labels.values()
        if not infos or any(i.classes is not None or i.threshold is not None for i in infos):
            return None
        return self.job.loss if isinstance(self.job.loss, str) else "of the model"

    def evaluate(
        self, data: Dataset, metrics: Any = (), batch_size: int | None = None, device: str = "cpu"
    ) -> dict[str, Any]:
        """Return the loss and the metrics."""
        own = select_metrics(metrics)
        job = replace(self.job, metrics=own, device=Device.of(device).check())
        recipe = Recipe.of(job, TrainState(), data)
        return evaluate(recipe, self.names, data, batch_size, "evaluating")


def noted_loss(proto: ModelProto) -> dict[str, Any]:
    """Return the loss of an earlier training as arguments of a `Trainer`; empty without a note."""
    note = read_note(proto, LOSS)
    return dict(note[0]) if note else {}


def noted_loss_name(proto: ModelProto) -> str | None:
    """Return the name of the only loss of an earlier training; None if it is not known."""
    loss = noted_loss(proto).get("loss")
    names: list[Any] = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    return ALIASES.get(names[0], names[0]) if len(names) == 1 else None


def with_loss(proto: ModelProto, loss: Any, output: str) -> ModelProto:
    """Return the model that is trained: without further outputs that might be the loss.

    `output` names the loss that the model computes where `loss` is None.
    """
    names = [o.name for o in proto.graph.output]
    if isinstance(loss, str) and not loss.endswith(".onnx"):
        floats = [o for o in proto.graph.output if not non_tensor(o)]
        if len(floats) > 1:
            choose_output(proto, None, f"say which one with {named('loss={output: loss}')}")
    if loss is not None:
        return proto
    if output not in names:
        raise ValueError(
            f"the model has no output {output!r} (it has {', '.join(map(printable, names))}): "
            f"name a loss with {argument('loss')}, or the output that is one with "
            f"{argument('loss_output')}"
        )
    try:
        chosen = loss_output(proto)
    except ValueError:
        chosen = ""
    if chosen == output:
        return proto
    scalars = (o for o in proto.graph.output if o.name != output and _is_single(o))
    dropped = {o.name for o in scalars}
    return select_model_inputs_outputs(proto, [n for n in names if n not in dropped])


def _is_single(output: Any) -> bool:
    shape = output.type.tensor_type.shape
    return output.name == "loss" or all(d.dim_value == 1 for d in shape.dim)
