"""The step: one model from a batch, weights and slots to the loss, new weights and new slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.derivative import as_constants
from onnxgrad.autodiff.quantized import refuse_quantized
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph import shapes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.optimizers import Optimizer
from onnxgrad.runtime.session import work
from onnxgrad.training.objective import Objective
from onnxgrad.training.update import Group, graph_input, numpy_dtype, write_update


@dataclass
class Step:
    """The step's graph: states, data, minus_learning_rate, step in; new states, loss out.

    The step number is an input only if the optimizer reads it. `inverse_rows`, by which the
    gradient is multiplied, is a captured value, as it is the same for all steps of a call. It is
    None if the optimizer begins with the learning rate, which is divided instead.
    """

    model: ir.Model
    groups: list[Group]
    data: list[ir.Value]
    minus_learning_rate: ir.Value
    step: ir.Value
    inverse_rows: ir.Value | None
    unreached: list[str]  # weights that the loss does not depend on: they stay constants
    work: float  # multiply-adds of the forward pass, per row

    @property
    def weights(self) -> list[str]:
        """The names of the weights that are trained."""
        return [name for group in self.groups for name in group.shapes]

    @property
    def rate_dtype(self) -> np.dtype:
        """The dtype of the learning rate, and of the step number."""
        return numpy_dtype(self.minus_learning_rate)

    @property
    def counts(self) -> bool:
        """Return whether the step number is an input."""
        return self.step in self.model.graph.inputs

    def like_loss(self, number: float) -> np.ndarray:
        """Return `number` in the shape and dtype of `inverse_rows`."""
        assert self.inverse_rows is not None
        shape = shapes.static(shapes.dims(self.inverse_rows)) or ()
        return np.full(shape, number, numpy_dtype(self.inverse_rows))


def build_step(objective: Objective, optimizer: Optimizer) -> Step:
    """Return the training step, written into the graph of the objective.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    graph, loss, trained = objective.model.graph, objective.loss, objective.weights
    multiply_adds, op = work(graph), Emit(graph)
    inverse_rows = None if optimizer.rate_first else graph_input(op, "inverse_rows", loss)
    gradients = sweep(op, _seeds(op, objective, inverse_rows), trained)
    if not gradients:
        refuse_quantized(list(graph), objective.data, objective.seeds)
        names = [str(w.name) for w in trained]
        raise ValueError(f"no differentiable path from any of {names} to the loss {loss.name!r}")
    for w in gradients:
        if (stored := objective.stored.get(str(w.name))) is not None:  # sparse: others stay zero
            with op:
                gradients[w] = op.set_type_like(gradients[w] * stored.astype(numpy_dtype(w)), w)
    unreached = [w for w in trained if w not in gradients]
    as_constants(graph, unreached)

    update = write_update(op, gradients, optimizer)
    counts = [update.step] if update.step.uses() else []
    graph.inputs[:] = [*update.states, *objective.data, update.minus_learning_rate, *counts]
    protected = {*graph.inputs, loss}
    graph.outputs[:] = [
        op.name_output(new, f"{old.name}.new", old, protected)
        for old, new in zip(update.states, update.new, strict=True)
    ] + [loss]
    tidy(objective.model)
    return Step(
        model=objective.model,
        groups=update.groups,
        data=objective.data,
        minus_learning_rate=update.minus_learning_rate,
        step=update.step,
        inverse_rows=inverse_rows,
        unreached=[str(w.name) for w in unreached],
        work=multiply_adds,
    )


def _seeds(
    op: Emit, objective: Objective, inverse_rows: ir.Value | None
) -> dict[ir.Value, ir.Value]:
    """Return the cotangents that the sweep starts with, times `inverse_rows` if there is one."""
    cotangents = {}
    with op:
        for value, g in objective.seeds.items():
            if g is None:
                cotangents[value] = inverse_rows or op.ones_like(value)
            elif inverse_rows is None:
                cotangents[value] = g
            else:
                broadcasts = (shapes.rank(g) or 0) >= (shapes.rank(inverse_rows) or 0)
                factor = inverse_rows if broadcasts else op.Reshape(inverse_rows, [])
                cotangents[value] = g * factor
    return cotangents
