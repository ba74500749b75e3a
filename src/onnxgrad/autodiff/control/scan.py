"""The gradient of Scan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrad.autodiff.control.copies import Pairs, add_output, new
from onnxgrad.autodiff.control.iterations import Carried, Iterations
from onnxgrad.autodiff.control.motion import Product, move_out, put_off, show, transcendental
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


_Output = tuple[ir.Value, int, int]  # of the backward body: value, and axis and direction to stack


@subgraph_rule("Scan")
def scan(op: Emit, node: ir.Node, gs: Sequence, active: Collection[ir.Value]) -> Pairs:
    """a_t+1, z_t = f(a_t, x_t, v): as Loop, and dx_t = f_x'ᵀ (da_t+1, dz_t)."""
    count = node.attributes.get_int("num_scan_inputs", 0)
    back = Iterations(op, node, gs, active, len(node.inputs) - count)
    cotangents = {y: new(op, y) for y in back.stack_cotangents}
    products, costly = put_off(back), transcendental(back)
    carried, gradients = back.differentiate(cotangents, [p.y for p in products])
    show(products)
    if not carried and not gradients:
        release([back.copy.graph])
        return []
    products = [p for p in products if p.y in gradients]
    return _Backward(back, carried, gradients, products, costly).write(cotangents)


class _Backward:
    """The Scan over the iterations in reverse.

    `gradients` are those that each iteration returns: of elements, and of the results of
    `products`. `costly` are results of the forward body that are saved.
    """

    def __init__(
        self,
        back: Iterations,
        carried: list[Carried],
        gradients: dict[ir.Value, ir.Value],
        products: list[Product],
        costly: list[ir.Value],
    ) -> None:
        self.back, self.op, self.copy, self.node = back, back.op, back.copy, back.node
        self.carried, self.gradients, self.products = carried, gradients, products
        self.costly = costly
        self.input_stacking = _reversed_stacking(self.node, "input", len(back.elements))

    def write(self, cotangents: dict[ir.Value, ir.Value]) -> Pairs:
        """Write the Scan, and return pairs of a value outside and its gradient.

        `cotangents` maps slices to their cotangents, which are inputs of the backward body.
        """
        back, op, copy, n = self.back, self.op, self.copy, len(self.carried)
        stacks = self._stacks(cotangents)
        available = {*back.states, *(v for v, stack in stacks.items() if stack.axis == 0)}
        factors = [p.a for p in self.products if p.a not in available]
        single = dict.fromkeys([*self.gradients.values(), *factors])
        copy.set_outputs([*(c.after for c in self.carried), *single])
        saved = [*copy.random_placeholders(), *copy.placeholders(self.costly)]
        saved += copy.placeholders(p.y for p in self.products)
        used = [a for a in back.states if a.uses() or any(p.a is a for p in self.products)]
        for v, original in [*saved, *((a, back.original(a)) for a in used)]:
            stacks[v] = Stack(self._save(original), 0, 1)
        move_out(copy.graph, op)
        inner = dict(zip(single, copy.graph.outputs[n:], strict=True))

        of_elements = [
            (x, (inner[self.gradients[a]], *stacking))
            for a, x, stacking in zip(
                back.elements, back.sequences, self.input_stacking, strict=True
            )
            if a in self.gradients
        ]
        of_products = self._product_outputs(stacks, inner)
        returned = [g for _, g in of_elements] + [g for _, g, _ in of_products]
        returned += [a for *_, a in of_products if not isinstance(a, Stack)]
        outputs = list(dict.fromkeys(returned))
        copy.set_outputs([*copy.graph.outputs[:n], *(v for v, *_ in outputs)])
        results = self._emit(stacks, outputs)

        stacked = dict(zip(outputs, results[n:], strict=True))
        pairs = [
            (c.of, op.set_type_like(d, c.of))
            for c, d in zip(self.carried, results, strict=False)
            if c.of
        ]
        pairs += [(x, op.set_type_like(stacked[g], x)) for x, g in of_elements if x is not None]
        for p, g, a in of_products:
            left = a.value if isinstance(a, Stack) else stacked[a]
            pairs.append((p.w, p.gradient(op, left, stacked[g])))
        return pairs

    def _product_outputs(
        self, stacks: dict[ir.Value, Stack], inner: dict[ir.Value, ir.Value]
    ) -> list[tuple[Product, _Output, Stack | _Output]]:
        """Return for each product y = a w what is to be stacked: the cotangent of y, and a.

        If a is in `stacks`, it is already stacked. `inner` maps values to outputs of the body.
        """
        first_axis = {v: stack for v, stack in stacks.items() if stack.axis == 0}
        outputs: list[tuple[Product, _Output, Stack | _Output]] = []
        for p in self.products:
            factor = inner.get(p.a, p.a)
            a = first_axis.get(factor, (factor, 0, 1))
            direction = a.direction if isinstance(a, Stack) else 1
            outputs.append((p, (inner[self.gradients[p.y]], 0, direction), a))
        return outputs

    def _stacks(self, cotangents: dict[ir.Value, ir.Value]) -> dict[ir.Value, Stack]:
        """Return the stacked tensors of which the backward body reads slices."""
        back = self.back
        output_stacking = _reversed_stacking(self.node, "output", len(back.slices))
        stacks = {
            a: Stack(x, *stacking)
            for a, x, stacking in zip(
                back.elements, back.sequences, self.input_stacking, strict=True
            )
            if x is not None
        }
        for y, stacking in zip(back.slices, output_stacking, strict=True):
            if y in cotangents:
                stacks[cotangents[y]] = Stack(back.stack_cotangents[y], *stacking)
        return stacks

    def _save(self, value: ir.Value) -> ir.Value:
        """Make the forward node stack `value` of its body along axis 0; return the stack."""
        node = self.node
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                numbers = node.attributes.get_ints(name, ())
                node.attributes[name] = ir.AttrInt64s(name, [*numbers, 0])
        stack = add_output(self.op, node, "body", value)
        lengths, inner = dims(self.back.sequences[0]), dims(value)
        if lengths is not None and inner is not None:
            stack.shape = ir.Shape([lengths[self.input_stacking[0][0]], *inner])
        return stack

    def _emit(self, stacks: dict[ir.Value, Stack], outputs: list[_Output]) -> list[ir.Value]:
        """Append the backward Scan; return its outputs: the carried values, then `outputs`."""
        graph = self.copy.graph
        if unranked := [y.name for y in graph.outputs if y.shape is None]:
            raise NoGradientRule(
                f"{self.copy.where}: onnxruntime runs a Scan only over values of known rank, and "
                f"the rank of {unranked[0]!r} is unknown: state the shapes of the model's inputs"
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
            attributes["scan_output_axes"] = [axis for _, axis, _ in outputs]
            attributes["scan_output_directions"] = [direction for *_, direction in outputs]
        operands = [*(c.start for c in self.carried), *(s.value for s in read.values())]
        width = len(self.carried) + len(outputs)
        results = self.op.emit_many("Scan", operands, attributes, width, fresh=True)
        length = next(
            (shape[s.axis] for s in read.values() if (shape := dims(s.value)) is not None), None
        )
        for (v, axis, _), stack in zip(outputs, results[len(self.carried) :], strict=True):
            if axis == 0 and (shape := dims(v)) is not None:
                stack.shape = ir.Shape([length, *shape])
        return results


def _reversed_stacking(node: ir.Node, kind: str, count: int) -> list[tuple[int, int]]:
    """Return the axis of each stacked input or output, and the direction in the backward pass."""
    get = node.attributes.get_ints
    axes, directions = (get(f"scan_{kind}_{k}", (0,) * count) for k in ("axes", "directions"))
    return [(a, 1 - d) for a, d in zip(axes, directions, strict=True)]
