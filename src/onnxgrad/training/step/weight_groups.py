"""Groups of weights that a step updates together, and the inputs that hold their elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import printable
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import move_out_of_body
from onnxgrad.operators import shapes
from onnxgrad.optimizers.base import Optimizer, UpdateInputs

_ALIGNED = 16  # bytes; numpy allocates arrays at multiples of it
# elements of a small weight, which is copied into a vector: the nodes of its update cost more
PACKED = 1 << 14
# measured with momentum and AdamW in float32 on CPUs with 1 MB of L2 per core
LARGE = 1 << 16  # elements
# from here on, onnxruntime divides elementwise operators among two threads
BLOCK_BYTES = 1 << 19
# With several threads, they pay from larger blocks. On two threads of an Intel Xeon with 2 MB of L2
# per core, a step of a ViT of 12 layers of 192 takes 0.87 of the time, one of a decoder 0.95.
PARALLEL_BLOCK_BYTES = 1 << 21
SMALLEST_BLOCK = 1 << 12  # elements: in smaller blocks, nodes cost more than the memory

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]


@dataclass
class WeightGroup:
    """Weights that are updated together: one large weight, or small weights in one flat vector.

    Attributes:
        shapes: the shapes of the weights, by name.
        state: the input that holds the weights. It has the shape of a single weight, the axes
            (blocks, elements of a block) if `in_blocks`, or one axis for several weights.
        slots: the input of each slot, by the name of the slot.
        optimizer: the optimizer that `for_weight` returns for each weight of the group.
        in_blocks: whether the state consists of blocks, which are updated one after the other.
    """

    shapes: dict[str, Shape]
    state: ir.Value
    slots: dict[str, ir.Value]
    optimizer: Optimizer
    in_blocks: bool

    @property
    def inputs(self) -> list[ir.Value]:
        """The input that holds the weights, then the inputs of the slots."""
        return [self.state, *self.slots.values()]

    def initial(
        self,
        weights: Mapping[str, np.ndarray],
        slots: Mapping[str, Mapping[str, np.ndarray]],
        copies: bool = True,
    ) -> list[np.ndarray]:
        """Return the arrays with which the inputs of the group begin, in the order of `inputs`.

        Args:
            weights: the weights by name, also of other groups.
            slots: `{weight: {slot: array}}`; a slot that is missing begins with its initial value.
            copies: whether the arrays share no memory with `weights` and `slots`.

        Raises:
            ValueError: a slot of another shape, or a slot that the weights of the group share and
                that differs between them.
        """
        arrays = [self.pack(weights, copies=copies)]
        for slot, like in self.slots.items():
            known = {n: slots[n][slot] for n in self.shapes if slot in slots.get(n, {})}
            values = {
                n: self.optimizer.slot_initial(slot, np.asarray(weights[n]))
                for n in self.shapes
                if n not in known
            }
            number = next(iter(values.values()), None)
            if not known and not any(np.ndim(v) or v != number for v in values.values()):
                shape, dtype = stated_shape(like), numpy_dtype(like)
                # zeros take memory only when they are written
                arrays.append(np.full(shape, number, dtype) if number else np.zeros(shape, dtype))
                continue
            lengths = self._shapes_by_weight(slot)
            begun = {n: np.broadcast_to(v, lengths[n]) for n, v in values.items()}
            arrays.append(self.pack(begun | known, slot, copies))
        return arrays

    def split(
        self, arrays: Iterable[np.ndarray], copies: bool = True
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """Return the weights by name, and the slots by weight, from the arrays of the inputs."""
        state, *rest = arrays
        slots: dict[str, Arrays] = {name: {} for name in self.shapes}
        for slot, array in zip(self.slots, rest, strict=True):
            for name, value in self.unpack(array, slot, copies).items():
                slots[name][slot] = value
        return self.unpack(state, None, copies), slots

    def pack(
        self, arrays: Mapping[str, np.ndarray], slot: str | None = None, copies: bool = True
    ) -> np.ndarray:
        """Return the array of one input: all weights of the group, or all slots of a name.

        Without `copies`, the array of a single weight shares its memory, if that is aligned.
        """
        like = self.state if slot is None else self.slots[slot]
        parts = []
        for name, shape in self._shapes_by_weight(slot).items():
            part = np.asarray(arrays[name], numpy_dtype(like), order="C")
            if copies or part.ctypes.data % _ALIGNED:
                part = np.array(part)
            if part.shape != shape:
                what = "" if slot is None else f"the slot {slot!r} of "
                raise ValueError(
                    f"{what}{printable(name)} has the shape {part.shape}, and the step needs "
                    f"{shape}: set an array of that shape"
                )
            parts.append(part)
        if slot is not None and self._is_shared_slot(slot):
            if any(part != parts[0] for part in parts):
                raise ValueError(
                    f"the slot {slot!r} is shared by {', '.join(map(printable, self.shapes))}, "
                    "and differs between them: set the slot of all these weights, or of none"
                )
            parts = parts[:1]
        joined = np.concatenate([p.ravel() for p in parts]) if len(parts) > 1 else parts[0]
        return joined.reshape(stated_shape(like))

    def unpack(self, array: np.ndarray, slot: str | None = None, copies: bool = True) -> Arrays:
        """Return one array for each weight from the array of an input, as copies or views."""
        wanted = self._shapes_by_weight(slot)
        if slot is not None and self._is_shared_slot(slot):
            return {name: array.copy() for name in wanted}
        parts = np.split(array.ravel(), np.cumsum([prod(s) for s in wanted.values()])[:-1])
        return {
            name: part.reshape(shape).copy() if copies else part.reshape(shape)
            for (name, shape), part in zip(wanted.items(), parts, strict=True)
        }

    def _shapes_by_weight(self, slot: str | None) -> dict[str, Shape]:
        """Return the shape of each weight, or of its slot `slot`, by the name of the weight."""
        if slot is None:
            return self.shapes
        return {name: self.optimizer.slot_shape(slot, s) for name, s in self.shapes.items()}

    def _is_shared_slot(self, slot: str) -> bool:
        """Return whether all weights of the group share a slot, which is one number."""
        return len(self.shapes) > 1 and not shapes.dims(self.slots[slot])


def write_groups(
    op: Emit,
    gradients: dict[ir.Value, ir.Value],
    optimizer: Optimizer,
    packed: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> tuple[list[WeightGroup], list[ir.Value]]:
    """Group the weights; return the groups, and the gradient w.r.t. the weights of each group.

    Args:
        op: writes into the graph of the gradients.
        gradients: `{weight: gradient}`. Small weights become parts of one flat input, and a large
            weight an input of two axes; the graph computes the weights from these inputs.
        optimizer: the optimizer of the step; `for_weight` returns the optimizer of each weight.
        packed: the count of elements up to which a weight is small; None is `PACKED`.
        block_bytes: the most bytes of a block of a large weight, whose blocks are updated one after
            the other; 0: no blocks.

    Raises:
        ValueError: a pattern of the optimizer matches no weight, or no pattern matches a weight.
    """
    optimizer.check_names([str(w.name) for w in gradients])
    pieces: dict[ir.Value, ir.Value] = {}
    groups, of_states = list[WeightGroup](), list[ir.Value]()
    for own, weights in _partition_weights(gradients, optimizer, packed):
        group, g = _write_group(op, weights, gradients, own, block_bytes, pieces)
        groups.append(group)
        of_states.append(g)
    return groups, [pieces.get(g, g) for g in of_states]


def numpy_dtype(value: ir.Value) -> np.dtype:
    """Return the numpy dtype of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()


def graph_input(op: Emit, name: str, like: ir.Value, shape: ir.Shape | None = None) -> ir.Value:
    """Return a new value with the type and shape of `like`, for an input of the graph of `op`.

    `shape`: another shape. The caller adds the value to the inputs.
    """
    return ir.Value(
        name=op.name(name), type=like.type, shape=like.shape if shape is None else shape
    )


def _partition_weights(
    weights: Iterable[ir.Value], optimizer: Optimizer, packed: int | None
) -> list[tuple[Optimizer, list[ir.Value]]]:
    """Return (optimizer, weights) for each group of weights that a step updates together.

    Small weights of one dtype and optimizer are a group; each large weight is a group.
    """
    limit = PACKED if packed is None else packed
    groups: list[tuple[Optimizer, list[ir.Value]]] = []
    open_groups: list[tuple[Optimizer, list[ir.Value]]] = []  # groups of small weights
    for w in weights:
        own = optimizer.for_weight(str(w.name), stated_shape(w))
        small = own.elementwise and 0 < prod(stated_shape(w)) <= limit
        same = (g for g in open_groups if small and g[1][0].dtype == w.dtype and g[0] == own)
        if (group := next(same, None)) is not None:
            group[1].append(w)
            continue
        groups.append((own, [w]))
        if small:
            open_groups.append(groups[-1])
    return groups


def stated_shape(value: ir.Value) -> Shape:
    """Return the static shape of a value; () if the shape is not static."""
    return shapes.static(shapes.dims(value)) or ()


def _write_group(
    op: Emit,
    weights: list[ir.Value],
    gradients: Mapping[ir.Value, ir.Value],
    optimizer: Optimizer,
    block_bytes: int,
    pieces: dict[ir.Value, ir.Value],
) -> tuple[WeightGroup, ir.Value]:
    """Return the group of `weights`, and the gradient w.r.t. the input that holds the weights.

    Several weights become one input, which the graph splits, so that their update is written once.
    A weight that is updated in blocks becomes an input whose first axis counts the blocks. `pieces`
    gets the value that the graph reads instead of each weight.
    """
    sizes = [prod(stated_shape(w)) for w in weights]
    w = weights[0]

    def gradient_of(w: ir.Value) -> ir.Value:
        return pieces.get(gradients[w], gradients[w])

    divided = len(weights) == 1 and optimizer.elementwise and block_bytes
    shape = block_shape(w, block_bytes) if divided else None
    if len(weights) == 1 and shape is None:
        state, g = w, gradient_of(w)
    elif shape is not None:
        state = graph_input(op, f"{w.name}.blocks", w, ir.Shape(shape))
        with op.at(next(iter(op.graph), None)):
            pieces[w] = op.reshape_like(state, w)
        ir.convenience.replace_all_uses_with(w, pieces[w])
        g = op.set_type_like(op.Reshape(gradient_of(w), list(shape)), state)
    else:
        state = ir.Value(name=op.name("packed"), type=weights[0].type, shape=ir.Shape([sum(sizes)]))
        with op.at(next(iter(op.graph), None)):
            parts = op.emit_many("Split", [state, sizes], {"axis": 0}, outputs=len(weights))
            for w, part, size in zip(weights, parts, sizes, strict=True):
                part.shape = ir.Shape([size])
                pieces[w] = part if _is_only_broadcast(w) else op.reshape_like(part, w)
                ir.convenience.replace_all_uses_with(w, pieces[w])
        flat = [op.Reshape(gradient_of(w), [size]) for w, size in zip(weights, sizes, strict=True)]
        g = op.set_type_like(op.Concat(*flat, axis=0), state)
    prefix = state.name if len(weights) > 1 else w.name
    slots = {}
    for slot in optimizer.slots:
        lengths = optimizer.slot_shape(slot, stated_shape(state))
        slots[slot] = graph_input(op, f"{prefix}.{slot}", state, ir.Shape(lengths))
    names = {str(w.name): stated_shape(w) for w in weights}
    return WeightGroup(names, state, slots, optimizer, shape is not None), g


def _is_only_broadcast(w: ir.Value) -> bool:
    """Return whether nodes only broadcast `w`, which may then lack leading axes of length 1."""
    shape = shapes.dims(w) or ()
    return all(d == 1 for d in shape[:-1]) and all(
        node.op_type in ("Add", "Sub", "Mul", "Div")
        and (shapes.rank(node.inputs[1 - i]) or 0) >= len(shape)
        and node.inputs[1 - i] is not w
        for node, i in w.uses()
    )


def most_block_bytes(threads: int) -> int:
    """Return the most bytes of a block of a large weight, in a step on a count of threads."""
    return BLOCK_BYTES if threads == 1 else PARALLEL_BLOCK_BYTES


def block_shape(w: ir.Value, most_bytes: int) -> tuple[int, int] | None:
    """Return (count of blocks, elements of a block) for a weight; None if it stays undivided.

    The count of elements must have a divisor that is neither too large nor too small.
    """
    size = prod(shapes.static(shapes.dims(w)) or ())
    if size < LARGE or w.dtype is None:
        return None
    most = most_bytes * 8 // w.dtype.bitwidth
    block = next((d for d in range(most, SMALLEST_BLOCK - 1, -1) if size % d == 0), None)
    return None if block is None else (size // block, block)


def update_in_blocks(
    op: Emit, g: ir.Value, optimizer: Optimizer, slots: dict[str, ir.Value], inputs: UpdateInputs
) -> list[ir.Value]:
    """Return the new weight and slots of a group that is updated in blocks.

    The weight, its gradient `g` and slots have the axes of `block_shape`. An elementwise update
    reads and writes memory at every node. The intermediate results of a `Scan` over blocks stay in
    the cache, and only new weights and slots go to memory: a Scan slices its inputs and outputs
    without copies. Nodes that read numbers only move out of the Scan.
    """
    body = ir.Graph([], [], nodes=[], name="blocks")
    inner = Emit(body, outer=op)
    sliced = [slot for slot in slots if shapes.dims(slots[slot])]
    outer = [inputs.weight, g, *(slots[slot] for slot in sliced)]
    body.inputs.extend(
        ir.Value(name=inner.name("block"), type=v.type, shape=ir.Shape(shapes.known_shape(v)[1:]))
        for v in outer
    )
    weight, gradient, *rows = body.inputs
    with inner:
        u, new = optimizer.update(
            inner,
            gradient,
            slots | dict(zip(sliced, rows, strict=True)),
            replace(inputs, weight=weight),
        )
        results = [inner.Add(weight, u), *(new[slot] for slot in sliced)]
    move_out_of_body(body, op)
    for slot in slots.keys() - set(sliced):
        if (node := new[slot].producer()) is not None and node.graph is body:
            raise ValueError(
                f"{optimizer} has elementwise=True, but its slot {slot!r}, which is one number, "
                "depends on several elements: set elementwise=False in the class of the optimizer"
            )
    inner.give(results)
    for result in body.outputs:
        inner.set_type_like(result, weight)
    attributes = {"body": body, "num_scan_inputs": len(outer)}
    outputs = op.emit_many("Scan", outer, attributes, outputs=len(results))
    for value in outputs:
        op.set_type_like(value, inputs.weight)
    whole = dict(zip(sliced, outputs[1:], strict=True))
    return [outputs[0], *(whole.get(slot, new[slot]) for slot in slots)]
