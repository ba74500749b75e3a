"""The gradient of Scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, hand_out, new
from onnxgrad.autodiff.control.iterations import Carried, Iterations
from onnxgrad.autodiff.control.motion import Product, move_out, put_off, show, transcendental
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.tidy import release


@dataclass(frozen=True)
class Stack:
    """The slices of `value` along `axis`: from the first on, or with `way` 1 from the last."""

    value: ir.Value
    axis: int
    way: int


_Output = tuple[ir.Value, int, int]  # what the backward body returns, the axis and the way to stack


def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    count = node.attributes.get_int("num_scan_inputs", 0)
    back = Iterations(op, node, gs, active, len(node.inputs) - count)
    arriving = {y: new(op, y) for y in back.arriving}
    products, costly = put_off(back), transcendental(back)
    carried, found = back.differentiate(arriving, [p.y for p in products])
    show(products)
    if not carried and not found:
        release([back.copy.graph])
        return []
    products = [p for p in products if p.y in found]
    return _Backward(back, carried, found, products, costly).written(arriving)


class _Backward:
    """The Scan over the iterations in reverse.

    `found` are the gradients that each iteration has for itself: of elements, and of `products`.
    """

    def __init__(
        self,
        back: Iterations,
        carried: list[Carried],
        found: dict[ir.Value, ir.Value],
        products: list[Product],
        costly: list[ir.Value],
    ) -> None:
        self.back, self.op, self.copy, self.node = back, back.op, back.copy, back.node
        self.carried, self.found, self.products = carried, found, products
        self.costly = costly
        self.ways = _ways(self.node, "input", len(back.elements))

    def written(self, arriving: dict[ir.Value, ir.Value]) -> Pairs:
        """Write it, and return the gradients; `arriving` maps slices that it gives to theirs."""
        back, op, copy, n = self.back, self.op, self.copy, len(self.carried)
        stacks = self._stacks(arriving)
        at_hand = {*back.states, *(v for v, stack in stacks.items() if stack.axis == 0)}
        factors = [p.a for p in self.products if p.a not in at_hand]
        single = dict.fromkeys([*self.found.values(), *factors])
        copy.give([*(c.after for c in self.carried), *single])
        kept = [*copy.draws(), *copy.take_out(self.costly)]
        kept += copy.take_out(p.y for p in self.products)
        used = [a for a in back.states if a.uses() or any(p.a is a for p in self.products)]
        for v, original in [*kept, *((a, back.original(a)) for a in used)]:
            stacks[v] = Stack(self._taped(original), 0, 1)
        move_out(copy.graph, op)
        known = {v: stack for v, stack in stacks.items() if stack.axis == 0}
        inner = dict(zip(single, copy.graph.outputs[n:], strict=True))

        of_elements = [
            (x, (inner[self.found[a]], *way))
            for a, x, way in zip(back.elements, back.sequences, self.ways, strict=True)
            if a in self.found
        ]
        of_products: list[tuple[Product, _Output, Stack | _Output]] = []
        for p in self.products:
            factor = inner.get(p.a, p.a)
            a = known.get(factor, (factor, 0, 1))
            way = a.way if isinstance(a, Stack) else 1
            of_products.append((p, (inner[self.found[p.y]], 0, way), a))
        wanted = [g for _, g in of_elements] + [g for _, g, _ in of_products]
        wanted += [a for *_, a in of_products if not isinstance(a, Stack)]
        outputs = list(dict.fromkeys(wanted))
        copy.give([*copy.graph.outputs[:n], *(v for v, *_ in outputs)])
        made = self._emit(stacks, outputs)

        stacked = dict(zip(outputs, made[n:], strict=True))
        pairs = [
            (c.of, op.set_type_like(d, c.of))
            for c, d in zip(self.carried, made, strict=False)
            if c.of
        ]
        pairs += [(x, op.set_type_like(stacked[g], x)) for x, g in of_elements if x is not None]
        for p, g, a in of_products:
            left = a.value if isinstance(a, Stack) else stacked[a]
            pairs.append((p.w, p.gradient(op, left, stacked[g])))
        return pairs

    def _stacks(self, arriving: dict[ir.Value, ir.Value]) -> dict[ir.Value, Stack]:
        back = self.back
        outs = _ways(self.node, "output", len(back.slices))
        found = {
            a: Stack(x, *way)
            for a, x, way in zip(back.elements, back.sequences, self.ways, strict=True)
            if x is not None
        }
        for y, way in zip(back.slices, outs, strict=True):
            if y in arriving:
                found[arriving[y]] = Stack(back.arriving[y], *way)
        return found

    def _taped(self, value: ir.Value) -> ir.Value:
        """Return the stack of a value of the forward body, which the node returns from now on."""
        node = self.node
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                given = node.attributes.get_ints(name, ())
                node.attributes[name] = ir.AttrInt64s(name, [*given, 0])
        stack = hand_out(self.op, node, "body", value)
        lengths, inner = dims(self.back.sequences[0]), dims(value)
        if lengths is not None and inner is not None:
            stack.shape = ir.Shape([lengths[self.ways[0][0]], *inner])
        return stack

    def _emit(self, stacks: dict[ir.Value, Stack], outputs: list[_Output]) -> list[ir.Value]:
        graph = self.copy.graph
        if lost := [y.name for y in graph.outputs if y.shape is None]:
            raise NoGradientRule(
                f"{self.copy.where}: onnxruntime runs a Scan over values of known rank only, and "
                f"that of {lost[0]!r} is not known: state the shapes of the model's inputs"
            )
        read = {v: stack for v, stack in stacks.items() if v.uses()}
        if not read:  # something has to tell how often it runs
            read = dict([next(iter(stacks.items()))])
        graph.inputs[:] = [*(c.before for c in self.carried), *read]
        attributes = {
            "body": graph,
            "num_scan_inputs": len(read),
            "scan_input_axes": [s.axis for s in read.values()],
            "scan_input_directions": [s.way for s in read.values()],
        }
        if outputs:
            attributes["scan_output_axes"] = [axis for _, axis, _ in outputs]
            attributes["scan_output_directions"] = [way for *_, way in outputs]
        operands = [*(c.start for c in self.carried), *(s.value for s in read.values())]
        width = len(self.carried) + len(outputs)
        made = self.op.emit_many("Scan", operands, attributes, width, fresh=True)
        length = next(
            (shape[s.axis] for s in read.values() if (shape := dims(s.value)) is not None), None
        )
        for (v, axis, _), stack in zip(outputs, made[len(self.carried) :], strict=True):
            if axis == 0 and (shape := dims(v)) is not None:
                stack.shape = ir.Shape([length, *shape])
        return made


def _ways(node: ir.Node, kind: str, count: int) -> list[tuple[int, int]]:
    """Return for each stack the axis and, as the backward pass goes through it, the direction."""
    get = node.attributes.get_ints
    axes, directions = (get(f"scan_{kind}_{k}", (0,) * count) for k in ("axes", "directions"))
    return [(a, 1 - d) for a, d in zip(axes, directions, strict=True)]
