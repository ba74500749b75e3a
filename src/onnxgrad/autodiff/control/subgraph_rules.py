"""The gradients of If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, SubgraphCopy, add_output, is_tensor
from onnxgrad.autodiff.control.iterations import (
    LoopIterations,
    defer_lookups,
    defer_products,
    move_constant_work,
    results_worth_saving,
)
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import detach_graphs
from onnxgrad.graph.traversal import captured
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.records import subgraph_rule
from onnxgrad.operators.shapes import dims, equal, is_stated, rank

_BRANCHES = ("then_branch", "else_branch")
_COUNTER = ir.TensorType(ir.DataType.INT64)
_CONDITION = ir.TensorType(ir.DataType.BOOL)


@subgraph_rule("If")
def conditional(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """y = If(c, f, h):  dx = If(c, f'ᵀ g, h'ᵀ g), for all x that the branches capture."""
    wrt = [v for v in captured(node) if v in active]
    copies = [SubgraphCopy(op, node, name) for name in _BRANCHES]
    branch_gradients = []
    for copy in copies:
        pairs = [(y, g) for y, g in zip(copy.outputs, gs, strict=True) if g is not None]
        seeds = [  # the branch may state the shape of y more precisely than the If
            (y, g if y.shape is None else copy.op.set_type_like(copy.op.copy_of(g), y))
            for y, g in pairs
        ]
        branch_gradients.append(copy.sweep(seeds, wrt))
    reached = [v for v in wrt if any(v in gradients for gradients in branch_gradients)]
    if not reached:
        detach_graphs(copy.graph for copy in copies)
        return []
    for copy, gradients, name in zip(copies, branch_gradients, _BRANCHES, strict=True):
        with copy.op as inner:
            copy.set_outputs(
                gradients[v] if v in gradients else inner.zeros_like(v) for v in reached
            )
        for placeholder, original in copy.random_placeholders():
            saved = _add_random_output(op, node, name, original)
            ir.convenience.replace_all_uses_with(placeholder, saved)
    branches = {name: copy.graph for name, copy in zip(_BRANCHES, copies, strict=True)}
    outputs = op.emit_many("If", node.inputs, branches, outputs=len(reached), fresh=True)
    return [(v, op.set_type_like(dv, v)) for v, dv in zip(reached, outputs, strict=True)]


def _add_random_output(op: Emit, node: ir.Node, branch: str, random: ir.Value) -> ir.Value:
    """Add an output to the If `node`: the random numbers of one branch, no elements in the other
    branch.
    """
    assert random.dtype is not None
    [other] = [node.attributes[name].as_graph() for name in _BRANCHES if name != branch]
    empty = op.const(np.zeros((0,) * (rank(random) or 1), random.dtype.numpy()))
    other.outputs.append(Emit(other, outer=op).copy_of(empty))
    return op.set_type_like(add_output(op, node, branch, random), random)


# -- Loop ------------------------------------------------------------------------------------------


@subgraph_rule("Loop")
def loop(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, v):  da_t = f_a'ᵀ (da_t+1, dz_t),  dv = Σ f_v'ᵀ (da_t+1, dz_t)."""
    states = max(len(node.inputs) - 2, 0)
    back = LoopIterations(op, node, gs, active, states, (2, 1))
    if not back.differentiate([*defer_lookups(back), *defer_products(back)]):
        return []
    copy, carried, late = back.copy, back.carried, back.deferred
    counter = ir.Value(name=op.name("i"), type=_COUNTER, shape=ir.Shape(()))
    condition = ir.Value(name=op.name("condition"), type=_CONDITION, shape=ir.Shape(()))
    stacked = list(dict.fromkeys(v for d in late for v in (back.gradients[d.y], d.a)))
    copy.set_outputs([condition, *(c.after for c in carried), *stacked])
    iterations = op.Squeeze(op.Shape(add_output(op, node, "body", copy.original.inputs[0])), [0])
    _write_forward_values(back, counter, iterations - 1)
    move_constant_work(copy.graph, op, may_not_run=True)
    start_condition = None if carried else np.bool_(True)  # the last operand cannot be omitted
    before = {counter: iterations, condition: start_condition}
    results = back.write_backward("Loop", before, {}, {}, len(stacked))
    stacks = dict(zip(stacked, results[len(carried) :], strict=True))
    deferred = [(d, stacks[d.a], stacks[back.gradients[d.y]]) for d in late]
    return back.outer_gradients(results, deferred)


def _write_forward_values(back: LoopIterations, counter: ir.Value, last: ir.Value) -> None:
    """Write nodes at the start of the backward body that compute the forward values which it reads.

    Backward iteration `counter` is forward iteration `last - counter`.
    """
    op, copy = back.op, back.copy
    random, elements = copy.random_placeholders(), copy.element_placeholders(back.states)
    used = {a: back.original_state(a) for a in back.states if a.uses()} | dict(elements)
    steady = {v: o for v, o in used.items() if _has_loop_invariant_shape(back, v)}
    others = {v: o for v, o in used.items() if v not in steady}
    if others and random:
        raise NoGradientRule(
            f"{copy.description}: the backward pass needs, besides random numbers, the values of "
            f"{[o.name for o in others.values()]} in each iteration, which are sequences or "
            "tensors of changing shape: draw the random numbers outside of the Loop, or stack "
            "tensors of one shape"
        )
    # {value of the body: its values in all iterations, as a tensor or a sequence}
    stacks = {back.cotangents[y]: g for y, g in back.stack_cotangents.items()}
    saved = [*random, *steady.items()]
    stacks |= {v: add_output(op, back.node, "body", o) for v, o in saved}
    recorded = {v: o for v, o in others.items() if is_tensor(v)}
    again = _write_loop_again(back, op, back.node.inputs[:2], recorded.values()) if recorded else []
    sequences = dict(zip(recorded, again[len(back.states) :], strict=True))
    replace = partial(ir.convenience.replace_all_uses_with, replace_graph_outputs=True)
    with copy.op.at(next(iter(copy.graph), None)) as inner:
        t = inner.set_type_like(last - counter, counter)
        replace(copy.inputs[0], t)
        # the condition held in every iteration that ran
        replace(copy.inputs[1], inner.const(np.bool_(True)))
        for value, stack in stacks.items():
            if value.uses() or value.is_graph_output():
                replace(value, inner.set_type_like(inner.Gather(stack, t, axis=0), value))
        for value, sequence in sequences.items():
            replace(value, inner.set_type_like(inner.SequenceAt(sequence, t), value))
        if len(recorded) < len(others):  # ONNX has no sequences of sequences: run the Loop up to t
            starts = _write_loop_again(back, inner, [t, np.bool_(True)])
            for a, start in zip(back.states, starts, strict=True):
                if a in others and not is_tensor(a):
                    replace(a, inner.set_type_like(start, a))


def _has_loop_invariant_shape(back: LoopIterations, value: ir.Value) -> bool:
    """Return whether `value` is a tensor proven to have the same shape in every iteration."""
    if not is_tensor(value):
        return False
    if value in back.states:
        return equal(dims(value), dims(back.ends[back.states.index(value)]))
    return all(map(is_stated, dims(value) or (None,)))


def _write_loop_again(
    back: LoopIterations, op: Emit, limits: Sequence[Any], recorded: Collection[ir.Value] = ()
) -> list[ir.Value]:
    """Write the forward Loop once more by `op`, with `limits`: the number of iterations and a
    condition.

    Return the final states, then for each value of the forward body in `recorded`, the sequence of
    its values in all iterations.
    """
    copy, n = SubgraphCopy(back.op, back.node, "body"), len(back.states)
    values = [copy.copy_of_value(v) for v in recorded]
    empty = [op.emit("SequenceEmpty", [], {"dtype": v.dtype}, fresh=True) for v in values]
    before = [ir.Value(name=op.name("recorded"), type=sequence.type) for sequence in empty]
    copy.graph.inputs[:] = [*copy.inputs, *before]
    after = [copy.op.SequenceInsert(s, v) for s, v in zip(before, values, strict=True)]
    copy.set_outputs([*copy.outputs[: 1 + n], *after])
    operands = [*limits, *back.initial, *empty]
    return op.emit_many("Loop", operands, {"body": copy.graph}, n + len(empty), fresh=True)


# -- Scan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScanStack:
    """A tensor of slices stacked along `axis`; with direction 1, the last slice is the first
    iteration's.
    """

    value: ir.Value
    axis: int
    direction: int


@subgraph_rule("Scan")
def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    count = int_attribute(node, "num_scan_inputs")
    back = LoopIterations(op, node, gs, active, len(node.inputs) - count)
    deferred = defer_products(back)
    costly = [] if marks.KEEPS_NOTHING in node.meta else results_worth_saving(back)
    return _write_backward_scan(back, costly) if back.differentiate(deferred) else []


def _write_backward_scan(back: LoopIterations, costly: list[ir.Value]) -> Pairs:
    """Write the Scan over the iterations in reverse; return pairs of an outer value and its
    gradient.

    `costly` are results of the forward body that are saved. Return pairs of a value outside and its
    gradient.
    """
    op, copy, n = back.op, back.copy, len(back.carried)
    sequences = _reversed_scan_stacks(back.node, "input", back.sequences)
    ends = _reversed_scan_stacks(
        back.node, "output", [back.stack_cotangents.get(y) for y in back.slices]
    )
    stacks = dict(zip(back.elements, sequences, strict=True))
    pairs = zip(back.slices, ends, strict=True)
    stacks |= {back.cotangents[y]: g for y, g in pairs if y in back.cotangents}
    available = {*back.states, *(v for v, stack in stacks.items() if stack.axis == 0)}
    factors = [p.a for p in back.deferred if p.a not in available]
    single = dict.fromkeys([*back.gradients.values(), *factors])
    copy.set_outputs([*(c.after for c in back.carried), *single])
    saved = [*copy.random_placeholders(), *copy.replace_by_placeholders(costly)]
    saved += copy.replace_by_placeholders(p.y for p in back.deferred)
    used = [a for a in back.states if a.uses() or any(p.a is a for p in back.deferred)]
    # all stacks have one direction, so that no value is stacked in both
    direction = int(all(s.direction for s in sequences))
    for v, original in [*saved, *((a, back.original_state(a)) for a in used)]:
        stack = _stack_forward_value(back, original, sequences[0], 1 - direction)
        stacks[v] = ScanStack(stack, 0, direction)
    move_constant_work(copy.graph, op)
    inner = dict(zip(single, copy.graph.outputs[n:], strict=True))

    # {the stack of a value that each iteration returns: the stacked tensor outside of the body}
    stacked = {ScanStack(v, 0, s.direction): s.value for v, s in stacks.items() if s.axis == 0}
    of_elements = [
        (sequence.value, ScanStack(inner[back.gradients[a]], sequence.axis, sequence.direction))
        for a, sequence in zip(back.elements, sequences, strict=True)
        if a in back.gradients
    ]
    of_products = []
    for p in back.deferred:
        a = inner.get(p.a, p.a)
        own = next((s.direction for s in stacked if s.value is a), direction)
        g = ScanStack(inner[back.gradients[p.y]], 0, own)
        of_products.append((p, ScanStack(a, 0, own), g))
    returned = [g for _, g in of_elements] + [g for *_, g in of_products]
    returned += [a for _, a, _ in of_products]
    outputs = [stack for stack in dict.fromkeys(returned) if stack not in stacked]
    copy.set_outputs([*copy.graph.outputs[:n], *(stack.value for stack in outputs)])
    results = _emit_backward_scan_node(back, stacks, outputs)

    stacked |= zip(outputs, results[n:], strict=True)
    deferred = [(p, stacked[a], stacked[g]) for p, a, g in of_products]
    elements = [(x, op.set_type_like(stacked[g], x)) for x, g in of_elements]
    return back.outer_gradients(results, deferred) + elements


def _stack_forward_value(
    back: LoopIterations, value: ir.Value, like: ScanStack, direction: int
) -> ir.Value:
    """Make the forward Scan return `value` of its body, stacked over all iterations in a direction;
    return the stack.
    """
    node = back.node
    zeros = (0,) * (len(node.outputs) - len(back.states))
    for name, number in (("scan_output_axes", 0), ("scan_output_directions", direction)):
        if name in node.attributes or number:
            numbers = node.attributes.get_ints(name, zeros)
            node.attributes[name] = ir.AttrInt64s(name, [*numbers, number])
    stack = add_output(back.op, node, "body", value)
    lengths, inner = dims(like.value), dims(value)
    if lengths is not None and inner is not None:
        stack.shape = ir.Shape([lengths[like.axis], *inner])
    return stack


def _emit_backward_scan_node(
    back: LoopIterations, stacks: dict[ir.Value, ScanStack], outputs: list[ScanStack]
) -> list[ir.Value]:
    """Append the backward Scan; return its outputs: the carried gradients, then the stacks
    `outputs`.
    """
    if unranked := [y.name for y in back.copy.graph.outputs if y.shape is None]:
        raise NoGradientRule(
            f"{back.copy.description}: onnxruntime runs a Scan only over values of known rank, "
            f"and the rank of {unranked[0]!r} is unknown: state the shapes of the model's "
            "inputs"
        )
    read = {v: stack for v, stack in stacks.items() if v.uses()}
    if not read:  # a Scan needs an input that tells the number of iterations
        read = dict([next(iter(stacks.items()))])
    attributes: dict[str, Any] = {"num_scan_inputs": len(read)}
    for kind, listed in (("input", [*read.values()]), ("output", outputs)):
        if listed:
            attributes[f"scan_{kind}_axes"] = [s.axis for s in listed]
            attributes[f"scan_{kind}_directions"] = [s.direction for s in listed]
    operands = {v: stack.value for v, stack in read.items()}
    results = back.write_backward("Scan", {}, operands, attributes, len(outputs))
    known = ((dims(s.value), s.axis) for s in read.values())
    length = next((shape[axis] for shape, axis in known if shape is not None), None)
    for s, stack in zip(outputs, results[len(back.carried) :], strict=True):
        if s.axis == 0 and (shape := dims(s.value)) is not None:
            stack.shape = ir.Shape([length, *shape])
    return results


def _reversed_scan_stacks(node: ir.Node, kind: str, values: Sequence[Any]) -> list[ScanStack]:
    """Return `values`, inputs or outputs that the Scan `node` slices or stacks, to be scanned in
    the other direction.
    """
    get, zeros = node.attributes.get_ints, (0,) * len(values)
    axes, directions = (get(f"scan_{kind}_{k}", zeros) for k in ("axes", "directions"))
    return [ScanStack(v, a, 1 - d) for v, a, d in zip(values, axes, directions, strict=True)]
