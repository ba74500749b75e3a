"""The gradient of Loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, hand_out, is_tensor
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.autodiff.control.lookups import put_off, show
from onnxgrad.autodiff.control.motion import move_out
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, equal, is_stated
from onnxgrad.graph.tidy import release

_COUNTER = ir.TensorType(ir.DataType.INT64)
_CONDITION = ir.TensorType(ir.DataType.BOOL)


def loop(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, v):  da_t = f_a'ᵀ (da_t+1, dz_t),  dv = Σ f_v'ᵀ (da_t+1, dz_t)."""
    states = max(len(node.inputs) - 2, 0)
    back = Iterations(op, node, gs, active, states, (2, 1))
    copy = back.copy
    arriving = {y: op.set_type_like(ir.Value(name=op.name("slice")), y) for y in back.arriving}
    lookups = put_off(back)
    carried, found = back.differentiate(arriving, [row.y for row in lookups])
    show(lookups)
    lookups = [row for row in lookups if row.y in found]
    if not carried and not lookups:
        release([copy.graph])
        return []
    counter = ir.Value(name=op.name("i"), type=_COUNTER, shape=ir.Shape(()))
    going = ir.Value(name=op.name("going"), type=_CONDITION, shape=ir.Shape(()))
    copy.graph.inputs[:] = [counter, going, *(c.before for c in carried)]
    rows = [v for row in lookups for v in (found[row.y], row.i)]
    copy.give([going, *(c.after for c in carried), *rows])
    trips = op.Squeeze(op.Shape(hand_out(op, node, "body", copy.original.inputs[0])), [0])
    _bind(back, counter, trips - 1, {arriving[y]: g for y, g in back.arriving.items()})
    move_out(copy.graph, op, may_not_run=True)
    going_on = None if carried else np.bool_(True)  # an operand left out at the end is none
    operands = [trips, going_on, *(c.start for c in carried)]
    width = len(carried) + len(rows)
    made = op.emit_many("Loop", operands, {"body": copy.graph}, width, fresh=True)
    pairs = [(c.of, op.set_type_like(d, c.of)) for c, d in zip(carried, made, strict=False) if c.of]
    stacks = iter(made[len(carried) :])
    pairs += [(row.x, row.gradient(op, next(stacks), next(stacks))) for row in lookups]
    return pairs


def _bind(
    back: Iterations, counter: ir.Value, last: ir.Value, stacks: Mapping[ir.Value, ir.Value]
) -> None:
    """Write, at the head of the backward body, what an iteration reads; the last one is first.

    `stacks` maps values of the body to the stacks of what they are in each iteration.
    """
    op, copy = back.op, back.copy
    drawn, elements = copy.draws(), copy.read_from(back.states)
    used = {a: back.original(a) for a in back.states if a.uses()} | dict(elements)
    steady = {v: o for v, o in used.items() if _is_steady(back, v)}
    others = {v: o for v, o in used.items() if v not in steady}
    if others and drawn:
        raise NoGradientRule(
            f"{copy.where}: the backward pass needs what {[o.name for o in others.values()]} were "
            "in each iteration, sequences, or tensors of changing shape, beside random numbers: "
            "draw these outside, or stack tensors of one shape"
        )
    kept = [*drawn, *steady.items()]
    stacks = {**stacks, **{v: hand_out(op, back.node, "body", o) for v, o in kept}}
    sequences = _recorded(back, {v: o for v, o in others.items() if is_tensor(v)})
    replace = ir.convenience.replace_all_uses_with
    with copy.op.at(next(iter(copy.graph), None)) as inner:
        t = inner.set_type_like(last - counter, counter)
        replace(copy.inputs[0], t)
        replace(copy.inputs[1], inner.const(np.bool_(True)))  # it was, or it would not have run
        for value, stack in stacks.items():
            if value.uses():
                replace(value, inner.set_type_like(inner.Gather(stack, t, axis=0), value))
        for value, sequence in sequences.items():
            replace(value, inner.set_type_like(inner.SequenceAt(sequence, t), value))
        for a, start in _run_again(back, t, [a for a in others if not is_tensor(a)]).items():
            replace(a, inner.set_type_like(start, a))


def _is_steady(back: Iterations, value: ir.Value) -> bool:
    """Tell whether a state, or what is read in the body, is a tensor proven to keep its shape."""
    if not is_tensor(value):
        return False
    if value in back.states:
        return equal(dims(value), dims(back.ends[back.states.index(value)]))
    return all(map(is_stated, dims(value) or (None,)))


def _recorded(back: Iterations, wanted: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Run the loop once more, for the sequences of what `wanted` were in each iteration."""
    op, node = back.op, back.node
    if not wanted:
        return {}
    copy, n = Copy(op, node, "body"), len(back.states)
    now = [copy.counterpart(original) for original in wanted.values()]
    empty = [op.emit("SequenceEmpty", [], {"dtype": v.dtype}, fresh=True) for v in now]
    before = [ir.Value(name=op.name("recorded"), type=nothing.type) for nothing in empty]
    copy.graph.inputs[:] = [*copy.inputs, *before]
    after = [copy.op.SequenceInsert(s, v) for s, v in zip(before, now, strict=True)]
    copy.give([*copy.outputs[: 1 + n], *after])
    operands = [*node.inputs, *empty]
    made = op.emit_many("Loop", operands, {"body": copy.graph}, n + len(empty), fresh=True)
    return dict(zip(wanted, made[n:], strict=True))


def _run_again(
    back: Iterations, t: ir.Value, states: Sequence[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Run the loop up to iteration `t`, in the backward body, for what `states` were at its start.

    That is for sequences of which more is needed than single elements: there are no sequences of
    sequences to record them in.
    """
    if not states:
        return {}
    copy, n = Copy(back.op, back.node, "body"), len(back.states)
    copy.graph.inputs[:] = copy.inputs
    copy.give(copy.outputs[: 1 + n])
    operands = [t, np.bool_(True), *back.initial]
    made = back.copy.op.emit_many("Loop", operands, {"body": copy.graph}, n, fresh=True)
    return {a: made[back.states.index(a)] for a in states}
