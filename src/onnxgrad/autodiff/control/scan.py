"""The gradient of Scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, add_output, new
from onnxgrad.autodiff.control.iterations import Carried, Deferred, Iterations, final_gradients
from onnxgrad.autodiff.control.motion import move_out, products, transcendental
from onnxgrad.autodiff.registry import subgraph_rule
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.tidy import release


@dataclass(frozen=True)
class Stack:
    """A tensor that is stacked along `axis`; direction 1 reads or writes the last slice first."""

    value: ir.Value
    axis: int
    direction: int


@subgraph_rule("Scan")
def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    count = node.attributes.get_int("num_scan_inputs", 0)
    back = Iterations(op, node, gs, active, len(node.inputs) - count)
    cotangents = {y: new(op, y) for y in back.stack_cotangents}
    deferred, costly = products(back), transcendental(back)
    carried, gradients = back.differentiate(cotangents, deferred)
    if not carried and not gradients:
        release([back.copy.graph])
        return []
    late = [d for d in deferred if d.y in gradients]
    return _Backward(back, carried, gradients, late, costly).write(cotangents)


@dataclass
class _Backward:
    """The Scan over the iterations in reverse.

    `gradients` are those that each iteration returns: of elements, and of the results of
    `products`. `costly` are results of the forward body that are saved.
    """

    back: Iterations
    carried: list[Carried]
    gradients: dict[ir.Value, ir.Value]
    products: list[Deferred]
    costly: list[ir.Value]

    def write(self, cotangents: dict[ir.Value, ir.Value]) -> Pairs:
        """Write the Scan, and return pairs of a value outside and its gradient.

        `cotangents` maps slices to their cotangents, which are inputs of the backward body.
        """
        back, op, copy, n = self.back, self.back.op, self.back.copy, len(self.carried)
        sequences = _stacks(back.node, "input", back.sequences)
        ends = _stacks(back.node, "output", [back.stack_cotangents.get(y) for y in back.slices])
        stacks = dict(zip(back.elements, sequences, strict=True))
        stacks |= {
            cotangents[y]: g for y, g in zip(back.slices, ends, strict=True) if y in cotangents
        }
        available = {*back.states, *(v for v, stack in stacks.items() if stack.axis == 0)}
        factors = [p.a for p in self.products if p.a not in available]
        single = dict.fromkeys([*self.gradients.values(), *factors])
        copy.set_outputs([*(c.after for c in self.carried), *single])
        saved = [*copy.random_placeholders(), *copy.placeholders(self.costly)]
        saved += copy.placeholders(p.y for p in self.products)
        used = [a for a in back.states if a.uses() or any(p.a is a for p in self.products)]
        for v, original in [*saved, *((a, back.original(a)) for a in used)]:
            stacks[v] = Stack(self._save(original, sequences[0]), 0, 1)
        move_out(copy.graph, op)
        inner = dict(zip(single, copy.graph.outputs[n:], strict=True))

        # what each iteration returns -> what is stacked outside of the body, or already is
        stacked = {Stack(v, 0, s.direction): s.value for v, s in stacks.items() if s.axis == 0}
        of_elements = [
            (sequence.value, Stack(inner[self.gradients[a]], sequence.axis, sequence.direction))
            for a, sequence in zip(back.elements, sequences, strict=True)
            if a in self.gradients
        ]
        of_products = []
        for p in self.products:
            a = inner.get(p.a, p.a)
            direction = next((s.direction for s in stacked if s.value is a), 1)
            g = inner[self.gradients[p.y]]
            of_products.append((p, Stack(a, 0, direction), Stack(g, 0, direction)))
        returned = [g for _, g in of_elements] + [g for *_, g in of_products]
        returned += [a for _, a, _ in of_products]
        outputs = [stack for stack in dict.fromkeys(returned) if stack not in stacked]
        copy.set_outputs([*copy.graph.outputs[:n], *(stack.value for stack in outputs)])
        results = self._emit(stacks, outputs)

        stacked |= zip(outputs, results[n:], strict=True)
        pairs = final_gradients(op, self.carried, results)
        pairs += [(x, op.set_type_like(stacked[g], x)) for x, g in of_elements]
        return pairs + [(p.x, p.gradient(op, stacked[a], stacked[g])) for p, a, g in of_products]

    def _save(self, value: ir.Value, like: Stack) -> ir.Value:
        """Make the forward node stack `value` of its body along axis 0; return the stack.

        It has as many slices as `like`.
        """
        node = self.back.node
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                numbers = node.attributes.get_ints(name, ())
                node.attributes[name] = ir.AttrInt64s(name, [*numbers, 0])
        stack = add_output(self.back.op, node, "body", value)
        lengths, inner = dims(like.value), dims(value)
        if lengths is not None and inner is not None:
            stack.shape = ir.Shape([lengths[like.axis], *inner])
        return stack

    def _emit(self, stacks: dict[ir.Value, Stack], outputs: list[Stack]) -> list[ir.Value]:
        """Append the backward Scan; return its outputs: the carried values, then `outputs`."""
        graph = self.back.copy.graph
        if unranked := [y.name for y in graph.outputs if y.shape is None]:
            raise NoGradientRule(
                f"{self.back.copy.where}: onnxruntime runs a Scan only over values of known rank, "
                f"and the rank of {unranked[0]!r} is unknown: state the shapes of the model's "
                "inputs"
            )
        read = {v: stack for v, stack in stacks.items() if v.uses()}
        if not read:  # a Scan needs an input that tells the number of iterations
            read = dict([next(iter(stacks.items()))])
        graph.inputs[:] = [*(c.before for c in self.carried), *read]
        attributes = {
            "body": graph,
            "num_scan_inputs": len(read),
            "scan_input_axes": [s.axis for s in read.values()],
            "scan_input_directions": [s.direction for s in read.values()],
        }
        if outputs:
            attributes["scan_output_axes"] = [s.axis for s in outputs]
            attributes["scan_output_directions"] = [s.direction for s in outputs]
        operands = [*(c.start for c in self.carried), *(s.value for s in read.values())]
        width = len(self.carried) + len(outputs)
        results = self.back.op.emit_many("Scan", operands, attributes, width, fresh=True)
        length = next(
            (shape[s.axis] for s in read.values() if (shape := dims(s.value)) is not None), None
        )
        for s, stack in zip(outputs, results[len(self.carried) :], strict=True):
            if s.axis == 0 and (shape := dims(s.value)) is not None:
                stack.shape = ir.Shape([length, *shape])
        return results


def _stacks(node: ir.Node, kind: str, values: Sequence[Any]) -> list[Stack]:
    """Return `values`, stacked as the inputs or outputs of `node` but in the reverse direction."""
    get, zeros = node.attributes.get_ints, (0,) * len(values)
    axes, directions = (get(f"scan_{kind}_{k}", zeros) for k in ("axes", "directions"))
    return [Stack(v, a, 1 - d) for v, a, d in zip(values, axes, directions, strict=True)]
