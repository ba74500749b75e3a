"""The gradient of Loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Copy, Pairs, add_output, is_tensor
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.autodiff.control.motion import lookups, move_out, products
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.operators.registry import subgraph_rule
from onnxgrad.operators.shapes import dims, equal, is_stated

_COUNTER = ir.TensorType(ir.DataType.INT64)
_CONDITION = ir.TensorType(ir.DataType.BOOL)


@subgraph_rule("Loop")
def loop(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, v):  da_t = f_a'ᵀ (da_t+1, dz_t),  dv = Σ f_v'ᵀ (da_t+1, dz_t)."""
    states = max(len(node.inputs) - 2, 0)
    back = Iterations(op, node, gs, active, states, (2, 1))
    if not back.differentiate([*lookups(back), *products(back)]):
        return []
    copy, carried, late = back.copy, back.carried, back.deferred
    counter = ir.Value(name=op.name("i"), type=_COUNTER, shape=ir.Shape(()))
    condition = ir.Value(name=op.name("condition"), type=_CONDITION, shape=ir.Shape(()))
    copy.graph.inputs[:] = [counter, condition, *(c.before for c in carried)]
    stacked = list(dict.fromkeys(v for d in late for v in (back.gradients[d.y], d.a)))
    copy.set_outputs([condition, *(c.after for c in carried), *stacked])
    iterations = op.Squeeze(op.Shape(add_output(op, node, "body", copy.original.inputs[0])), [0])
    _bind(back, counter, iterations - 1)
    move_out(copy.graph, op, may_not_run=True)
    start_condition = None if carried else np.bool_(True)  # the last operand cannot be omitted
    operands = [iterations, start_condition, *(c.start for c in carried)]
    width = len(carried) + len(stacked)
    outputs = op.emit_many("Loop", operands, {"body": copy.graph}, width, fresh=True)
    stacks = dict(zip(stacked, outputs[len(carried) :], strict=True))
    return back.final_gradients(outputs) + [
        (d.x, d.gradient(op, stacks[d.a], stacks[back.gradients[d.y]])) for d in late
    ]


def _bind(back: Iterations, counter: ir.Value, last: ir.Value) -> None:
    """Bind the free values of the backward body, by nodes at its start.

    Backward iteration `counter` is forward iteration `last - counter`.
    """
    op, copy = back.op, back.copy
    random, elements = copy.random_placeholders(), copy.element_placeholders(back.states)
    used = {a: back.original(a) for a in back.states if a.uses()} | dict(elements)
    steady = {v: o for v, o in used.items() if _has_steady_shape(back, v)}
    others = {v: o for v, o in used.items() if v not in steady}
    if others and random:
        raise NoGradientRule(
            f"{copy.where}: the backward pass needs, besides random numbers, the values of "
            f"{[o.name for o in others.values()]} in each iteration, which are sequences or "
            "tensors of changing shape: draw the random numbers outside of the Loop, or stack "
            "tensors of one shape"
        )
    # values of the body -> tensors, or sequences, of their values in all iterations
    stacks = {back.cotangents[y]: g for y, g in back.stack_cotangents.items()}
    saved = [*random, *steady.items()]
    stacks |= {v: add_output(op, back.node, "body", o) for v, o in saved}
    recorded = {v: o for v, o in others.items() if is_tensor(v)}
    again = _loop_again(back, op, back.node.inputs[:2], recorded.values()) if recorded else []
    sequences = dict(zip(recorded, again[len(back.states) :], strict=True))
    replace = partial(ir.convenience.replace_all_uses_with, replace_graph_outputs=True)
    with copy.op.at(next(iter(copy.graph), None)) as inner:
        t = inner.set_type_like(last - counter, counter)
        replace(copy.inputs[0], t)
        replace(copy.inputs[1], inner.const(np.bool_(True)))  # as in every iteration that ran
        for value, stack in stacks.items():
            if value.uses() or value.is_graph_output():
                replace(value, inner.set_type_like(inner.Gather(stack, t, axis=0), value))
        for value, sequence in sequences.items():
            replace(value, inner.set_type_like(inner.SequenceAt(sequence, t), value))
        if len(recorded) < len(others):  # ONNX has no sequences of sequences: run up to here
            starts = _loop_again(back, inner, [t, np.bool_(True)])
            for a, start in zip(back.states, starts, strict=True):
                if a in others and not is_tensor(a):
                    replace(a, inner.set_type_like(start, a))


def _has_steady_shape(back: Iterations, value: ir.Value) -> bool:
    """Return whether `value` is a tensor proven to have the same shape in every iteration."""
    if not is_tensor(value):
        return False
    if value in back.states:
        return equal(dims(value), dims(back.ends[back.states.index(value)]))
    return all(map(is_stated, dims(value) or (None,)))


def _loop_again(
    back: Iterations, op: Emit, limits: Sequence[Any], recorded: Collection[ir.Value] = ()
) -> list[ir.Value]:
    """Write the forward Loop once more by `op`, up to `limits`: how many iterations, a condition.

    Return the final states, then for each value of the forward body in `recorded`, the sequence of
    its values in all iterations.
    """
    copy, n = Copy(back.op, back.node, "body"), len(back.states)
    values = [copy.counterpart(v) for v in recorded]
    empty = [op.emit("SequenceEmpty", [], {"dtype": v.dtype}, fresh=True) for v in values]
    before = [ir.Value(name=op.name("recorded"), type=sequence.type) for sequence in empty]
    copy.graph.inputs[:] = [*copy.inputs, *before]
    after = [copy.op.SequenceInsert(s, v) for s, v in zip(before, values, strict=True)]
    copy.set_outputs([*copy.outputs[: 1 + n], *after])
    operands = [*limits, *back.initial, *empty]
    return op.emit_many("Loop", operands, {"body": copy.graph}, n + len(empty), fresh=True)
