"""The loss of `OrtGradientForwardBackwardOptimizer`: losses of rows and a penalty of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.compat.learning_losses import BaseLearningLoss
from onnxgrad.compat.learning_penalties import BaseLearningPenalty
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.losses.formula_nodes import wide
from onnxgrad.losses.in_graph import choose_output
from onnxgrad.losses.objectives import Written
from onnxgrad.losses.vocabulary import OwnGradients, scaled
from onnxgrad.operators.shapes import dims
from onnxgrad.training.batches import BatchSource
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import Fields
from onnxgrad.training.model_loss import count_rows
from onnxgrad.training.objective import Objective

ROWS = 1024  # of one call of the runtime in evaluations and predictions


def rows_of(data: Dataset, fields: Fields) -> BatchSource:
    """Return the source of data that are gone through once."""
    return data.source(fields, fields.fixed_rows or ROWS)


@dataclass
class RowsAndPenalty:
    """(sum over rows of w l + penalty) / rows, which sample weights w do not change."""

    loss: BaseLearningLoss  # writes the losses of the rows and their gradient
    penalty: BaseLearningPenalty
    weights: Sequence[str]  # names of those to which the penalty applies
    name: str  # of the loss in the graph
    weight_name: str | None  # of the input of sample weights; None for none
    losses: ir.Value | None = field(default=None, init=False)  # (rows,), once it is written

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the name of the prediction; raise `ValueError` if there are none or several."""
        remedy = "keep one with onnxgrad.graph.select_model_inputs_outputs(model, outputs=[name])"
        return [choose_output(proto, None, remedy)]

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> Written:
        """Write the loss, whose gradient starts at the prediction and at the penalty."""
        ((name, prediction),) = predictions.items()
        prediction = wide(op, prediction)
        label, weight = self.loss.label(op, prediction, "label"), None
        if self.weight_name is not None:  # (N,) or (N, 1)
            weight = ir.Value(name=op.name(self.weight_name), type=prediction.type)
        self._require_rows(op, prediction, label)
        rows, gradient = self.loss.rows_and_gradient(op, prediction, label, weight)
        sums, self.losses = [op.ReduceSum(rows, keepdims=0)], op.Reshape(rows, [-1])
        sums[0].name = op.name(self.name)
        count = op.Cast(count_rows(op, op.graph.inputs, label), to=rows.dtype)
        used = {str(w.name): w for w in op.graph.inputs if w.uses()}
        penalties = [
            op.Cast(op.Reshape(term, []), to=rows.dtype)
            for name in self.weights
            if name in used and (term := self.penalty.penalty(op, name, used[name])) is not None
        ]
        own: list[OwnGradients | None] = [scaled([(prediction, gradient)])]
        if penalties:
            sums, own = [*sums, op.total(penalties)], [*own, None]
        info = replace(self.loss.info(prediction), label=label.name, prediction=name)
        counts, factors, infos = [count] * len(sums), [1.0] * len(sums), {str(label.name): info}
        return Written(sums, counts, factors, [label], infos, weight, own)

    def _require_rows(self, op: Emit, prediction: ir.Value, label: ir.Value) -> None:
        """Raise if the loss is one number, which sample weights cannot weigh by row."""
        losses = self.loss.loss(op, prediction, label)
        if losses.shape is None:
            infer(ir.Model(op.graph, ir_version=8))
        have, want = ((dims(v) or (None,))[0] for v in (losses, prediction))
        if isinstance(have, int) and have != want:
            raise ValueError(
                f"{self.loss} writes {have} losses for the {want} rows of {prediction.name!r}: it "
                "must write one for every element or row"
            )


class RowLosses(Evaluator):
    """An `Evaluator` that predicts the losses of the rows, (rows,), of `RowsAndPenalty`."""

    def objective(self) -> Objective:
        """Return the objective, whose prediction is the losses of the rows."""
        one = super().objective()
        assert isinstance(self.recipe.loss, RowsAndPenalty)
        assert self.recipe.loss.losses is not None
        return replace(one, predictions={"losses": self.recipe.loss.losses})
