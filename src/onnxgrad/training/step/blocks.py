"""The update of a large weight in blocks, whose intermediate results stay in the cache.

An elementwise update reads and writes memory at every node. A `Scan` over blocks writes only the
new weights and slots there: it slices its inputs and outputs without copies.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import move_out
from onnxgrad.operators import shapes
from onnxgrad.optimizers import Inputs, Optimizer

# measured with momentum and AdamW in float32 on CPUs with 1 MB of L2 per core
LARGE = 1 << 16  # elements
BLOCK_BYTES = 1 << 19  # from here on, onnxruntime divides elementwise operators among two threads
SMALLEST_BLOCK = 1 << 12  # elements: in smaller blocks, nodes cost more than the memory


def block_shape(w: ir.Value) -> tuple[int, int] | None:
    """Return (blocks, elements of a block) for a weight, or None if it is not to be divided.

    The number of elements must have a divisor that is neither too large nor too small.
    """
    size = prod(shapes.static(shapes.dims(w)) or ())
    if size < LARGE or w.dtype is None:
        return None
    most = BLOCK_BYTES * 8 // w.dtype.bitwidth
    block = next((d for d in range(most, SMALLEST_BLOCK - 1, -1) if size % d == 0), None)
    return None if block is None else (size // block, block)


def update_in_blocks(
    op: Emit, g: ir.Value, optimizer: Optimizer, slots: dict[str, ir.Value], inputs: Inputs
) -> list[ir.Value]:
    """Return the new weight and slots; the weight, `g` and slots have the axes of `block_shape`.

    What is computed from numbers alone moves out of the Scan.
    """
    body = ir.Graph([], [], nodes=[], name="blocks")
    inner = Emit(body, outer=op)
    sliced = [slot for slot in slots if shapes.dims(slots[slot])]
    outer = [inputs.weight, g, *(slots[slot] for slot in sliced)]
    body.inputs.extend(_block_input(inner, value) for value in outer)
    weight, gradient, *rows = body.inputs
    with inner:
        u, new = optimizer.update(
            inner,
            gradient,
            slots | dict(zip(sliced, rows, strict=True)),
            replace(inputs, weight=weight),
        )
        results = [inner.Add(weight, u), *(new[slot] for slot in sliced)]
    move_out(body, op)
    for slot in slots.keys() - set(sliced):
        if (node := new[slot].producer()) is not None and node.graph is body:
            raise ValueError(f"{optimizer} is elementwise, but its number {slot!r} depends on all")
    inner.give(results)
    for result in body.outputs:
        inner.set_type_like(result, weight)
    attributes = {"body": body, "num_scan_inputs": len(outer)}
    outputs = op.emit_many("Scan", outer, attributes, outputs=len(results))
    for value in outputs:
        op.set_type_like(value, inputs.weight)
    whole = dict(zip(sliced, outputs[1:], strict=True))
    return [outputs[0], *(whole.get(slot, new[slot]) for slot in slots)]


def _block_input(op: Emit, value: ir.Value) -> ir.Value:
    """Return an input of the body: one block of `value`."""
    return ir.Value(
        name=op.name("block"), type=value.type, shape=ir.Shape(shapes.known_shape(value)[1:])
    )
