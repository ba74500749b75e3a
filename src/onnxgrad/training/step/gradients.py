"""The first half of a step: the graph that computes the gradients of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.attention_blocks import attention_by_blocks
from onnxgrad.autodiff.derivative import as_constants
from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.primal.local_functions import replace_calls
from onnxgrad.autodiff.recompute import Recomputation
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.straight_through import StraightThrough, refuse_quantized
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import to_proto
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.inputs import feed_inputs
from onnxgrad.training.step.weight_groups import numpy_dtype


@dataclass
class Gradients:
    """The first half of a step: the graph that computes the gradients of one batch.

    - `model`: its graph has the weights of `gradients`, the `data` and feeds among its inputs.
    - `gradients`: by weight.
    - `data`: the inputs of a batch, by name.
    - `buffers`: states with their new values after the batch.
    - `reported`: the sums of the losses, then as many counts.
    - `factors`: the factor of each sum.
    - `unreached`: the names of weights without a gradient.
    - `rounding`: operators whose rounding gradients pass straight through, one for each node.
    """

    model: ir.Model
    gradients: dict[ir.Value, ir.Value]
    data: dict[str, ir.Value]
    buffers: dict[ir.Value, ir.Value]
    reported: list[ir.Value]
    factors: tuple[float, ...]
    unreached: list[str]
    rounding: list[str]


def write_gradients(
    op: Emit,
    objective: Objective,
    seeds: Mapping[ir.Value, ir.Value],
    recompute: str = "none",
) -> Gradients:
    """Write the gradients of one batch.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    graph, trained = objective.model.graph, objective.weights
    if recompute == "all":
        attention_by_blocks(op, {*seeds, *objective.referred})
    recomputation = Recomputation(op, seeds.values(), recompute)
    wrt = trained if objective.job.straight_through else []
    quantized = StraightThrough(op, wrt, seeds, objective.stop_gradient)
    stopped = {*objective.stop_gradient, *quantized.stopped}
    gradients = sweep(op, seeds, trained, stopped, quantized.origins)
    if not gradients:
        refuse_quantized(list(graph), objective.data, seeds)
        names, loss = [str(w.name) for w in trained], objective.written.sums[0]
        raise ValueError(f"no differentiable path from any of {names} to the loss {loss.name!r}")
    for w in gradients:
        if (stored := objective.stored.get(str(w.name))) is not None:  # sparse: others stay zero
            with op:
                gradients[w] = op.set_type_like(gradients[w] * stored.astype(numpy_dtype(w)), w)
    recomputation.write([*gradients.values(), *objective.buffers.values(), *objective.reported])
    replace_calls(op, objective.model)
    unreached = [w for w in trained if w not in gradients]
    as_constants(graph, unreached)
    return Gradients(
        objective.model,
        gradients,
        {str(x.name): x for x in objective.data},
        objective.buffers,
        objective.reported,
        tuple(objective.written.factors),
        [str(w.name) for w in unreached],
        [node.op_type for node in quantized.rounding],
    )


def build_gradients(objective: Objective) -> ModelProto:
    """Return the first half of a step as a model; `build_update` returns the second half.

    Inputs: the weights, the buffers, the data, then the feeds: `draw` if there is dropout, and if
    rows are mixed `partners` and `mix_numbers` (see `mixing.mix_rows`).
    Outputs: the gradient of each weight, `<weight>_grad`, `<buffer>.new` for the buffers, and what
    the objective reports: for a `Trainer` `loss_sum` and `loss_count`, whose ratio is the loss.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    op, graph = Emit(objective.model.graph), objective.model.graph
    parts = write_gradients(op, objective, objective.cotangents(op))
    feeds = feed_inputs(graph).values()
    graph.inputs[:] = [*parts.gradients, *parts.buffers, *parts.data.values(), *feeds]
    reported = copy_repeated(op, parts.reported)
    for i, value in enumerate(reported):  # sums, then as many counts
        value.name = op.name("loss_sum" if 2 * i < len(reported) else "loss_count")
    protected = {*graph.inputs, *reported}
    graph.outputs[:] = [
        *(op.name_output(g, f"{w.name}_grad", w, protected) for w, g in parts.gradients.items()),
        *(op.name_output(y, f"{b.name}.new", b, protected) for b, y in parts.buffers.items()),
        *reported,
    ]
    finish(objective.model)
    return to_proto(objective.model)


def copy_repeated(op: Emit, values: list[ir.Value]) -> list[ir.Value]:
    """Return values that a Scan can return: with copies of inputs, and of repeated values."""
    separate: list[ir.Value] = []
    for v in values:
        separate.append(op.copy_of(v) if v.producer() is None or v in separate else v)
    return separate
