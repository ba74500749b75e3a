"""A step whose batch is split: each thread computes the gradient of some of the rows.

Kernels of onnxruntime use several threads one node at a time, and many of them only one. Where the
loss is a sum over rows, parts of a batch need nothing of each other: the gradients of the parts,
which all know the number of terms of the whole batch, add up to that of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.row_sums import NotASum, require_sums
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.optimizers import Optimizer
from onnxgrad.reporting import logger
from onnxgrad.runtime.session import work
from onnxgrad.training.groups import Group, graph_input, write_groups
from onnxgrad.training.minimized import Minimized, inverse
from onnxgrad.training.step import Step, StepOptions, write_gradients
from onnxgrad.training.update import update_groups


@dataclass
class SplitStep:
    """A step as three models.

    - `counts`: from labels and sample weights to the counts of terms, then to their inverses.
    - `gradients`: from the states of weights, the data of some rows and the inverses to the
      gradients of the states, then to the sums of terms.
    - `step`: from states and gradients to new states.
    """

    counts: ModelProto
    gradients: ModelProto
    optimizer: Optimizer
    step: Step

    def update(self, parts: int) -> ModelProto:
        """Return the model from states, the gradients of `parts` parts for each state, and scalars
        to new states.
        """
        return to_proto(_update(self.step.groups, self.optimizer, parts, self.step.model).model)


def splits(
    objective: Minimized,
    axes: Mapping[str, int | None],
    lengths: Mapping[str, tuple[int, ...]],
) -> bool:
    """Return whether the gradient of a batch is proven to be the sum of those of its parts.

    Args:
        objective: what is minimized.
        axes: the axis of the rows of each input of data, None for one without.
        lengths: the shapes of these inputs.
    """
    random = objective.draw is not None and objective.draw.uses()
    if objective.buffers or random:
        return False
    again = _with_outputs(objective, objective.reported)
    try:
        require_sums(again, axes, lengths, list(again.graph.outputs))
    except NotASum as e:
        logger.debug("batches are not split between threads: %s", e)
        return False
    return True


def _with_outputs(objective: Minimized, outputs: Sequence[ir.Value]) -> ir.Model:
    """Return a copy of the model of an objective that returns `outputs`."""
    graph = objective.model.graph
    before = list(graph.outputs)
    graph.outputs[:] = outputs
    copy = objective.model.clone()
    graph.outputs[:] = before
    return copy


def build_split_step(
    objective: Minimized, optimizer: Optimizer, options: StepOptions, target: Target
) -> SplitStep:
    """Return the step in parts, written into the graph of the objective.

    Raises:
        ValueError: the loss depends on none of the weights.
        NoGradientRule: an operator on the way has no rule.
    """
    model, graph = objective.model, objective.model.graph
    multiply_adds, counts = work(graph), _counts(objective)
    op = Emit(graph)
    inverses = [graph_input(op, "inverse_count", n, ir.Shape(())) for n in objective.written.counts]
    parts, unreached = write_gradients(
        op, objective, objective.scaled(op, inverses), options.recompute
    )
    written = write_groups(op, parts.of, optimizer, blocks=options.blocks)
    groups = [group for group, _ in written]
    graph.inputs[:] = [*(group.state for group in groups), *objective.data, *inverses]
    op.give([*(g for _, g in written), *objective.written.sums])
    tidy(model)
    to_native(graph, target)
    step = replace(
        _update(groups, optimizer, 1, model),
        data=objective.data,
        work=multiply_adds,
        unreached=unreached,
        rounding=parts.rounding,
        recomputes=options.recompute != "none",
    )
    return SplitStep(counts, to_proto(model), optimizer, step)


def _counts(objective: Minimized) -> ModelProto:
    """Return the model from the data that they depend on to the counts, and to their inverses."""
    model = _with_outputs(objective, objective.written.counts)
    graph, op = model.graph, Emit(model.graph)
    counts = list(graph.outputs)
    op.give([*counts, *(inverse(op, n) for n in counts)])
    tidy(model)
    graph.inputs[:] = [x for x in graph.inputs if x.uses()]
    return to_proto(model)


def _update(like: Sequence[Group], optimizer: Optimizer, parts: int, model: ir.Model) -> Step:
    """Return the step from states, gradients of parts and scalars to new states.

    Args:
        like: the groups of weights, whose values are of another graph.
        optimizer: of the step.
        parts: how many gradients of each group there are.
        model: of the gradients.
    """
    imports = {"": model.opset_imports[""]}
    op = Emit(graph := ir.Graph([], [], nodes=[], opset_imports=imports, name="update"))
    groups = [_again(op, group) for group in like]
    gradients = [
        [graph_input(op, f"{group.state.name}_grad", group.state) for _ in range(parts)]
        for group in groups
    ]
    with op:
        totals = [op.total(terms) for terms in gradients]
    update = update_groups(op, groups, totals, optimizer)
    scalars = [update.minus_learning_rate, *([update.step] if update.step.uses() else [])]
    graph.inputs[:] = [*update.states, *(g for terms in gradients for g in terms), *scalars]
    op.give(update.new)
    written = ir.Model(graph, ir_version=model.ir_version)
    tidy(written)
    return Step(
        model=written,
        groups=groups,
        data=[],
        minus_learning_rate=update.minus_learning_rate,
        step=update.step,
        inverse_rows=None,
        unreached=[],
        work=0.0,
    )


def _again(op: Emit, group: Group) -> Group:
    """Return a group with values of another graph."""
    slots = {slot: graph_input(op, str(v.name), v) for slot, v in group.slots.items()}
    return replace(group, state=graph_input(op, str(group.state.name), group.state), slots=slots)
