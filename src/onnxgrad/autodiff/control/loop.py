"""The gradient of Loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, hand_out, several
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.autodiff.control.motion import move_out
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, equal

_COUNTER = ir.TensorType(ir.DataType.INT64)
_CONDITION = ir.TensorType(ir.DataType.BOOL)


def loop(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, v):  da_t = f_a'ᵀ (da_t+1, dz_t),  dv = Σ f_v'ᵀ (da_t+1, dz_t)."""
    states = max(len(node.inputs) - 2, 0)
    back = Iterations(op, node, gs, active, states, (2, 1))
    copy = back.copy
    arriving = {y: op.like(ir.Value(name=op.name("slice")), y) for y in back.arriving}
    carried, _ = back.differentiate(arriving)
    if not carried:
        return []
    counter = ir.Value(name=op.name("i"), type=_COUNTER, shape=ir.Shape(()))
    going = ir.Value(name=op.name("going"), type=_CONDITION, shape=ir.Shape(()))
    copy.graph.inputs[:] = [counter, going, *(c.before for c in carried)]
    copy.give([going, *(c.after for c in carried)])
    trips = op.Squeeze(op.Shape(hand_out(op, node, "body", copy.original.inputs[0])), [0])
    _bind(back, counter, trips - 1, {arriving[y]: g for y, g in back.arriving.items()})
    move_out(copy.graph, op, may_not_run=True)
    operands = [trips, None, *(c.start for c in carried)]
    made = op.emit("Loop", operands, {"body": copy.graph}, len(carried), fresh=True)
    return [(c.of, op.like(d, c.of)) for c, d in zip(carried, several(made), strict=True) if c.of]


def _bind(
    back: Iterations, counter: ir.Value, last: ir.Value, stacks: Mapping[ir.Value, ir.Value]
) -> None:
    """Write, at the head of the backward body, what an iteration reads; the last one is first.

    `stacks` maps values of the body to the stacks of what they are in each iteration.
    """
    op, copy = back.op, back.copy
    drawn = copy.draws()
    used = [a for a in back.states if a.uses()]
    steady = [a for a in used if _is_steady(back, a)]
    kept = [*drawn, *((a, back.original(a)) for a in steady)]
    stacks = {**stacks, **{v: hand_out(op, back.node, "body", o) for v, o in kept}}
    sequences = _recorded(back, [a for a in used if a not in steady], bool(drawn))
    replace = ir.convenience.replace_all_uses_with
    copy.op.before = next(iter(copy.graph), None)
    with copy.op as inner:
        t = inner.like(last - counter, counter)
        replace(copy.inputs[0], t)
        replace(copy.inputs[1], inner.value(np.bool_(True)))  # it was, or it would not have run
        for value, stack in stacks.items():
            if value.uses():
                replace(value, inner.like(inner.Gather(stack, t, axis=0), value))
        for value, sequence in sequences.items():
            replace(value, inner.like(inner.SequenceAt(sequence, t), value))


def _is_steady(back: Iterations, state: ir.Value) -> bool:
    """Tell whether a state is a tensor that is proven to keep its shape."""
    end = back.ends[back.states.index(state)]
    return isinstance(state.type, ir.TensorType) and equal(dims(state), dims(end))


def _recorded(
    back: Iterations, states: Sequence[ir.Value], drawn: bool
) -> dict[ir.Value, ir.Value]:
    """Run the loop once more, for the sequences of what `states` were in each iteration."""
    op, node = back.op, back.node
    if not states:
        return {}
    copy, n = Copy(op, node, "body"), len(back.states)
    if drawn or not all(isinstance(a.type, ir.TensorType) for a in states):
        raise NoGradientRule(
            f"{copy.where}: the backward pass needs what {[a.name for a in states]} were in each "
            "iteration, sequences, or tensors of changing shape beside random numbers: draw these "
            "outside, or stack tensors of one shape"
        )
    types = [ir.SequenceType(ir.TensorType(a.dtype or ir.DataType.FLOAT)) for a in states]
    before = [ir.Value(name=op.name("recorded"), type=of) for of in types]
    copy.graph.inputs[:] = [*copy.inputs, *before]
    now = [copy.inputs[2 + back.states.index(a)] for a in states]
    after = [copy.op.SequenceInsert(s, a) for s, a in zip(before, now, strict=True)]
    empty = [op.emit("SequenceEmpty", [], {"dtype": a.dtype}, fresh=True) for a in states]
    for grown, nothing, of in zip(after, empty, types, strict=True):
        grown.type = nothing.type = of
    copy.give([*copy.outputs[: 1 + n], *after])
    operands = [*node.inputs, *empty]
    made = op.emit("Loop", operands, {"body": copy.graph}, n + len(states), fresh=True)
    return dict(zip(states, several(made)[n:], strict=True))
