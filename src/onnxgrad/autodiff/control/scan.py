"""The gradient of Scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, add_output
from onnxgrad.autodiff.control.iterations import Iterations
from onnxgrad.autodiff.control.motion import move_out, products, transcendental
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.operators import marks
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.registry import subgraph_rule
from onnxgrad.operators.shapes import dims


@dataclass(frozen=True)
class Stack:
    """A tensor that is stacked along `axis`; direction 1 reads or writes the last slice first."""

    value: ir.Value
    axis: int
    direction: int


@subgraph_rule("Scan")
def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    count = int_attribute(node, "num_scan_inputs")
    back = Iterations(op, node, gs, active, len(node.inputs) - count)
    deferred = products(back)
    costly = [] if marks.KEEPS_NOTHING in node.meta else transcendental(back)
    return _write(back, costly) if back.differentiate(deferred) else []


def _write(back: Iterations, costly: list[ir.Value]) -> Pairs:
    """Write the Scan over the iterations in reverse.

    `costly` are results of the forward body that are saved. Return pairs of a value outside and its
    gradient.
    """
    op, copy, n = back.op, back.copy, len(back.carried)
    sequences = _stacks(back.node, "input", back.sequences)
    ends = _stacks(back.node, "output", [back.stack_cotangents.get(y) for y in back.slices])
    stacks = dict(zip(back.elements, sequences, strict=True))
    pairs = zip(back.slices, ends, strict=True)
    stacks |= {back.cotangents[y]: g for y, g in pairs if y in back.cotangents}
    available = {*back.states, *(v for v, stack in stacks.items() if stack.axis == 0)}
    factors = [p.a for p in back.deferred if p.a not in available]
    single = dict.fromkeys([*back.gradients.values(), *factors])
    copy.set_outputs([*(c.after for c in back.carried), *single])
    saved = [*copy.random_placeholders(), *copy.placeholders(costly)]
    saved += copy.placeholders(p.y for p in back.deferred)
    used = [a for a in back.states if a.uses() or any(p.a is a for p in back.deferred)]
    for v, original in [*saved, *((a, back.original(a)) for a in used)]:
        stacks[v] = Stack(_save(back, original, sequences[0]), 0, 1)
    move_out(copy.graph, op)
    inner = dict(zip(single, copy.graph.outputs[n:], strict=True))

    # what each iteration returns -> what is stacked outside of the body, or already is
    stacked = {Stack(v, 0, s.direction): s.value for v, s in stacks.items() if s.axis == 0}
    of_elements = [
        (sequence.value, Stack(inner[back.gradients[a]], sequence.axis, sequence.direction))
        for a, sequence in zip(back.elements, sequences, strict=True)
        if a in back.gradients
    ]
    of_products = []
    for p in back.deferred:
        a = inner.get(p.a, p.a)
        direction = next((s.direction for s in stacked if s.value is a), 1)
        g = Stack(inner[back.gradients[p.y]], 0, direction)
        of_products.append((p, Stack(a, 0, direction), g))
    returned = [g for _, g in of_elements] + [g for *_, g in of_products]
    returned += [a for _, a, _ in of_products]
    outputs = [stack for stack in dict.fromkeys(returned) if stack not in stacked]
    copy.set_outputs([*copy.graph.outputs[:n], *(stack.value for stack in outputs)])
    results = _emit(back, stacks, outputs)

    stacked |= zip(outputs, results[n:], strict=True)
    return [
        *back.final_gradients(results),
        *((x, op.set_type_like(stacked[g], x)) for x, g in of_elements),
        *((p.x, p.gradient(op, stacked[a], stacked[g])) for p, a, g in of_products),
    ]


def _save(back: Iterations, value: ir.Value, like: Stack) -> ir.Value:
    """Make the forward node stack `value` of its body, as long as `like`; return the stack."""
    node = back.node
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            numbers = node.attributes.get_ints(name, ())
            node.attributes[name] = ir.AttrInt64s(name, [*numbers, 0])
    stack = add_output(back.op, node, "body", value)
    lengths, inner = dims(like.value), dims(value)
    if lengths is not None and inner is not None:
        stack.shape = ir.Shape([lengths[like.axis], *inner])
    return stack


def _emit(back: Iterations, stacks: dict[ir.Value, Stack], outputs: list[Stack]) -> list[ir.Value]:
    """Append the backward Scan; return its outputs: the carried values, then `outputs`."""
    graph = back.copy.graph
    if unranked := [y.name for y in graph.outputs if y.shape is None]:
        raise NoGradientRule(
            f"{back.copy.where}: onnxruntime runs a Scan only over values of known rank, "
            f"and the rank of {unranked[0]!r} is unknown: state the shapes of the model's "
            "inputs"
        )
    read = {v: stack for v, stack in stacks.items() if v.uses()}
    if not read:  # a Scan needs an input that tells the number of iterations
        read = dict([next(iter(stacks.items()))])
    graph.inputs[:] = [*(c.before for c in back.carried), *read]
    attributes = {
        "body": graph,
        "num_scan_inputs": len(read),
        "scan_input_axes": [s.axis for s in read.values()],
        "scan_input_directions": [s.direction for s in read.values()],
    }
    if outputs:
        attributes["scan_output_axes"] = [s.axis for s in outputs]
        attributes["scan_output_directions"] = [s.direction for s in outputs]
    operands = [*(c.start for c in back.carried), *(s.value for s in read.values())]
    width = len(back.carried) + len(outputs)
    results = back.op.emit_many("Scan", operands, attributes, width, fresh=True)
    known = ((dims(s.value), s.axis) for s in read.values())
    length = next((shape[axis] for shape, axis in known if shape is not None), None)
    for s, stack in zip(outputs, results[len(back.carried) :], strict=True):
        if s.axis == 0 and (shape := dims(s.value)) is not None:
            stack.shape = ir.Shape([length, *shape])
    return results


def _stacks(node: ir.Node, kind: str, values: Sequence[Any]) -> list[Stack]:
    """Return `values`, stacked as the inputs or outputs of `node` but in the reverse direction."""
    get, zeros = node.attributes.get_ints, (0,) * len(values)
    axes, directions = (get(f"scan_{kind}_{k}", zeros) for k in ("axes", "directions"))
    return [Stack(v, a, 1 - d) for v, a, d in zip(values, axes, directions, strict=True)]
