"""The activations of RNN, GRU and LSTM, most of which fused operators of onnxruntime have too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import NoGradientRule
from onnxgrad.operators.attributes import int_attribute, string_attribute
from onnxgrad.operators.axes import OutputAxes
from onnxgrad.operators.records import declare_operators, lowering
from onnxgrad.operators.rule_nodes import Operand, optional_inputs
from onnxgrad.operators.shapes import Dim, Dims, constant, dims, known_shape


def _axis_after_recurrence(node: Any, operand: int, axis: int) -> OutputAxes:
    rows = 0 if node.attributes.get_int("layout", 0) else 1
    # only the axis of rows, of the input, of the lengths and of the initial states
    if {0: rows, 4: 0, 5: rows, 6: rows}.get(operand) != axis:
        return None
    return (2 * rows, rows, rows)[: len(node.outputs)]


def _recurrent_macs(node: ir.Node, lengths_of: Callable) -> int:
    x = lengths_of(node.inputs[0])  # the first two lengths are steps and rows, in either order
    return x[0] * x[1] * sum(prod(lengths_of(v)) for v in node.inputs[1:4] if v is not None)


declare_operators(
    "GRU LSTM RNN", "recurrent", axes=_axis_after_recurrence, features=(1, -1), work=_recurrent_macs
)
declare_operators("RNN", roles="xffbch", kept_results=2)
declare_operators("GRU", roles="xffbch", kept_results=5)
declare_operators("LSTM", roles="xffbchhf", kept_results=7)

Activation = Callable[[Any, ir.Value], ir.Value]

# by the values of the attribute `activations`: the function, and a default for each of the numbers
# alpha and beta that it takes, None if the number must be stated
ACTIVATIONS: dict[str, tuple[Callable[..., Any], *tuple[float | None, ...]]] = {
    "relu": (lambda op, x: op.Relu(x),),
    "tanh": (lambda op, x: op.Tanh(x),),
    "sigmoid": (lambda op, x: op.Sigmoid(x),),
    "affine": (lambda op, x, a, b: a * x + b, None, 0.0),
    "leakyrelu": (lambda op, x, a: op.LeakyRelu(x, alpha=a), 0.01),
    "thresholdedrelu": (lambda op, x, a: op.ThresholdedRelu(x, alpha=a), 0.0),
    "scaledtanh": (lambda op, x, a, b: a * op.Tanh(b * x), None, None),
    "hardsigmoid": (lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b), 0.2, 0.5),
    "elu": (lambda op, x, a: op.Elu(x, alpha=a), 1.0),
    "softsign": (lambda op, x: op.Softsign(x),),
    "softplus": (lambda op, x: op.Softplus(x),),
}


def activation_functions(node: ir.Node, default: Sequence[str], n: int) -> Iterator[Activation]:
    """Yield the activations of `n` directions, with their `activation_alpha` and `activation_beta`.

    A number that is not stated has the default of onnxruntime.
    """
    names, count = list(node.attributes.get_strings("activations", ())), len(default) * n
    if len(names) not in (0, count):
        raise _node_error(node, f"activations must list {count} names, not {len(names)}")
    stated = [iter(node.attributes.get_floats(f"activation_{k}", ())) for k in ("alpha", "beta")]
    for name in map(str.lower, names or [*default] * n):
        if name not in ACTIVATIONS:
            raise _node_error(node, f"no activation {name!r}; use {', '.join(ACTIVATIONS)}")
        function, *defaults = ACTIVATIONS[name]
        numbers = [next(given, n) for given, n in zip(stated, defaults, strict=False)]
        if None in numbers:
            raise _node_error(
                node, f"{name} without activation_alpha or activation_beta: write them"
            )
        yield partial(_apply_activation, function, numbers)


def _apply_activation(function: Callable, numbers: list, op: Any, x: ir.Value) -> ir.Value:
    return op.set_type_like(function(op, x, *numbers), x)


def _node_error(node: ir.Node, reason: str) -> NoGradientRule:
    """Return the error that names a recurrent node and says why it cannot be lowered."""
    where = f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r})"
    return NoGradientRule(f"{where}: {reason}")


# -- cells -----------------------------------------------------------------------------------------

# from the states and the inputs of a time step to the new states, of which the first is the output
Step = Callable[[Any, list[ir.Value], list[ir.Value]], list[ir.Value]]


@dataclass
class _CellWeights:
    """The weights, biases and initial states of one direction of a recurrent node."""

    w: ir.Value  # (gates hidden, input)
    r: ir.Value  # (gates hidden, hidden)
    wb: Operand  # (gates hidden,), like rb
    rb: Operand
    p: Operand  # (3 hidden,)
    states: list[ir.Value]  # (batch, hidden)
    functions: list[Activation]
    clip: float | None

    def clipped(self, op: Any, v: ir.Value) -> ir.Value:
        """Return `v`, the input of a gate, clipped to +-`clip`."""
        return v if self.clip is None else op.Clip(v, -self.clip, self.clip)


Cell = Callable[[Any, ir.Node, _CellWeights, ir.Value], tuple[list[ir.Value], Step]]


def _lower_to_scan(op_type: str, states: int, activations: Sequence[str]) -> Callable[[Cell], Cell]:
    """Register a cell as the lowering of its operator: a Scan over time for each direction."""

    def register(cell: Cell) -> Cell:
        lowered = wraps(cell)(lambda op, node: _write_scans(op, node, cell, states, activations))
        lowering(op_type, on_demand=True)(lowered)
        return cell

    return register


# -- cells: the inputs of all time steps, computed outside of the Scan, and the step ---------------


@_lower_to_scan("RNN", states=1, activations=("Tanh",))
def rnn(op: Any, node: ir.Node, weights: _CellWeights, x: ir.Value) -> tuple[list[ir.Value], Step]:
    """H = f(X WT + H RT + b)."""
    r, [f] = op.Transpose(weights.r, perm=[1, 0]), weights.functions

    def step(op: Any, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        [h], [xw] = states, elements
        return [f(op, weights.clipped(op, op.MatMul(h, r) + xw))]

    return [_gate_preactivations(op, x, weights.w, _sum_of_biases(weights.wb, weights.rb))], step


@_lower_to_scan("GRU", states=1, activations=("Sigmoid", "Tanh"))
def gru(op: Any, node: ir.Node, weights: _CellWeights, x: ir.Value) -> tuple[list[ir.Value], Step]:
    """z, r = f(X WT + H RT + b),  h = g(X WT + (r H) RT + b),  H = (1 - z) h + z H.

    With linear_before_reset, h = g(X WT + r (H RT + b') + b). Cho et al. 2014, arXiv:1406.1078.
    """
    (f, g), sizes = weights.functions, op.vector(op.dim(weights.r, 1) * 2, op.dim(weights.r, 1))
    linear = int_attribute(node, "linear_before_reset")
    (w_zr, w_h), (r_zr, r_h) = (op.split(v, sizes, 0) for v in (weights.w, weights.r))
    (wb_zr, wb_h), (rb_zr, rb_h) = (
        (None, None) if b is None else op.split(b, sizes, 0) for b in (weights.wb, weights.rb)
    )
    bias_h = wb_h if linear else _sum_of_biases(wb_h, rb_h)
    gates = _gate_preactivations(op, x, w_zr, _sum_of_biases(wb_zr, rb_zr))
    r_zr, r_h = (op.Transpose(r, perm=[1, 0]) for r in (r_zr, r_h))

    def step(op: Any, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        [h], (x_zr, x_h) = states, elements
        z, r = op.split(f(op, weights.clipped(op, op.MatMul(h, r_zr) + x_zr)), 2, 1)
        if linear:
            product = op.MatMul(h, r_h)
            candidate = r * (product if rb_h is None else product + rb_h)
        else:
            candidate = op.MatMul(r * h, r_h)
        new = g(op, weights.clipped(op, candidate + x_h))
        return [new + z * (h - new)]

    return [gates, _gate_preactivations(op, x, w_h, bias_h)], step


@_lower_to_scan("LSTM", states=2, activations=("Sigmoid", "Tanh", "Tanh"))
def lstm(op: Any, node: ir.Node, weights: _CellWeights, x: ir.Value) -> tuple[list[ir.Value], Step]:
    """i, o, f, c = f, f, f, g(X WT + H RT + P C + b),  C = f C + i c,  H = o h(C).

    With peepholes, o sees the new C. Hochreiter & Schmidhuber 1997; Gers & Schmidhuber 2000.
    """
    f, g, activate = weights.functions
    r, coupled = op.Transpose(weights.r, perm=[1, 0]), int_attribute(node, "input_forget")
    p_i, p_o, p_f = (None,) * 3 if weights.p is None else op.split(weights.p, 3, 0)
    sizes = op.vector(op.dim(weights.r, 1) * 3, op.dim(weights.r, 1))

    def gate_value(op: Any, v: ir.Value, p: Operand, c: ir.Value) -> ir.Value:
        return f(op, weights.clipped(op, v if p is None else v + p * c))

    def step(op: Any, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        (h, c), [xw] = states, elements
        summed = op.MatMul(h, r) + xw
        if weights.p is None:
            gates, new = op.split(weights.clipped(op, summed), sizes, 1)
            i, o, forget = op.split(f(op, gates), 3, 1)
        else:
            i, o, forget, new = op.split(summed, 4, 1)
            i, forget = gate_value(op, i, p_i, c), gate_value(op, forget, p_f, c)
            new = weights.clipped(op, new)
        c = (1.0 - i if coupled else forget) * c + i * g(op, new)
        if weights.p is not None:
            o = gate_value(op, o, p_o, c)
        return [o * activate(op, c), c]

    return [_gate_preactivations(op, x, weights.w, _sum_of_biases(weights.wb, weights.rb))], step


def _gate_preactivations(op: Any, x: ir.Value, w: ir.Value, b: Operand) -> ir.Value:
    """Return X WT + b for all time steps: (time, batch, input) -> (time, batch, gates hidden)."""
    (time, batch, _), (wide, _) = known_shape(x), known_shape(w)
    flat = op.Reshape(x, op.vector(-1, op.dim(w, 1)))
    product = op.emit("Gemm", [flat, w] if b is None else [flat, w, b], {"transB": 1})
    whole = op.Reshape(product, op.vector(op.dim(x, 0), op.dim(x, 1), op.dim(w, 0)))
    return _fill_dims(whole, time, batch, wide)


def _sum_of_biases(a: Operand, b: Operand) -> Operand:
    return None if a is None or b is None else a + b


# -- inputs and outputs ---------------------------------------------------------------------------


def _write_scans(
    op: Any, node: ir.Node, cell: Cell, states: int, activations: Sequence[str]
) -> list[ir.Value]:
    """Return the outputs of the node, by one Scan for each direction."""
    direction, by_rows = string_attribute(node, "direction"), int_attribute(node, "layout")
    x = node.inputs[0]
    assert x is not None
    if x.shape is None:
        x = _fill_dims(op.copy_of(x), None, None, None)
    if by_rows:
        x = op.Transpose(x, perm=[1, 0, 2])
    ends = sequence_lengths(node)
    mask = None if ends is None else _valid_step_mask(op, x, ends)
    results = []
    for i, weights in enumerate(_weights_by_direction(op, node, x, states, activations)):
        elements, step = cell(op, node, weights, x)
        if mask is not None:
            elements, step = [*elements, mask], _freeze_ended_sequences(step)
        reverse = direction == "reverse" or i == 1
        results.append(write_scan(op, node.op_type, weights.states, elements, step, reverse))
    if ends is not None:
        results = [_zero_after_sequence_end(op, values, mask, ends) for values in results]
    joined = []
    for i, parts in enumerate(zip(*results, strict=True)):
        added = [op.Unsqueeze(v, [int(i == 0)]) for v in parts]
        y = op.Concat(*added, axis=int(i == 0)) if len(added) > 1 else added[0]
        order = [2, 0, 1, 3] if i == 0 else [1, 0, 2]
        joined.append(op.Transpose(y, perm=order) if by_rows else y)
    return joined[: len(node.outputs)]


def _weights_by_direction(
    op: Any, node: ir.Node, x: ir.Value, states: int, activations: Sequence[str]
) -> Iterator[_CellWeights]:
    """Yield the weights, biases and initial states of each direction of a recurrent node."""
    get, (_, batch, size) = node.attributes, known_shape(x)
    n, k = 1 + (string_attribute(node, "direction") == "bidirectional"), len(activations)
    w, r, b, _, *initial, p = optional_inputs(node.inputs[1:], 7)
    hidden = get.get_int("hidden_size") if "hidden_size" in get else (dims(r) or (None,))[-1]
    if int_attribute(node, "layout"):
        initial = [None if v is None else op.Transpose(v, perm=[1, 0, 2]) for v in initial]
    parts = zip(
        _split_by_direction(op, w, n, None, size),
        _split_by_direction(op, r, n, None, hidden),
        _split_by_direction(op, b, n, None),
        _split_by_direction(op, p, n, None),
        *(_split_by_direction(op, v, n, batch, hidden) for v in initial[:states]),
        strict=True,
    )
    functions = list(activation_functions(node, activations, n))
    clip = get.get_float("clip") if "clip" in get else None
    for i, (w_i, r_i, b_i, p_i, *initial_i) in enumerate(parts):
        wb, rb = (None, None) if b_i is None else op.split(b_i, 2, 0)
        starts = [_zero_state(op, x, r_i) if v is None else v for v in initial_i]
        yield _CellWeights(w_i, r_i, wb, rb, p_i, starts, functions[k * i :][:k], clip)


def _split_by_direction(op: Any, v: Operand, n: int, *shape: Dim) -> list[Any]:
    """Return the slices of `v` (directions, ...), one for each direction, without the
    first axis.
    """
    if v is None:
        return [None] * n
    parts = op.split(v, n, 0) if n > 1 else [v]
    return [_fill_dims(op.Squeeze(part, [0]), *shape) for part in parts]


def _zero_state(op: Any, x: ir.Value, r: ir.Value) -> ir.Value:
    """Return zeros, the default of an initial state (batch, hidden)."""
    assert x.dtype is not None
    state = op.Expand(np.zeros((), x.dtype.numpy()), op.vector(op.dim(x, 1), op.dim(r, 1)))
    return _fill_dims(state, known_shape(x)[1], known_shape(r)[1])


# -- sequences of different lengths ---------------------------------------------------------------


def sequence_lengths(node: ir.Node) -> Operand:
    """Return the lengths of the sequences, or None if all are proven to be as long as X."""
    v, shape = node.inputs[4] if len(node.inputs) > 4 else None, dims(node.inputs[0])
    array, steps = constant(v), shape and shape[int_attribute(node, "layout")]
    full = array is not None and isinstance(steps, int) and bool((array >= steps).all())
    return None if full else v


def _valid_step_mask(op: Any, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """Return which time steps are within the sequences: booleans (time, batch, 1)."""
    steps, n = op.dim(x, 0), op.Cast(lengths, to=ir.DataType.INT64)
    if isinstance(steps, int):
        t = op.const(np.arange(steps).reshape(-1, 1))
    else:
        t = op.Unsqueeze(op.arange(steps), [1])
    time, batch, _ = known_shape(x)
    return _fill_dims(op.Unsqueeze(op.Less(t, n), [2]), time, batch, 1)


def _zero_after_sequence_end(
    op: Any, results: list[ir.Value], mask: Operand, lengths: ir.Value
) -> list[ir.Value]:
    """Return the results, with zeros beyond the end of sequences and for sequences of length 0."""
    any_step = _fill_dims(op.Greater(op.Unsqueeze(lengths, [1]), op.const(np.int32(0))), None, 1)
    return [
        op.set_type_like(op.Where(any_step if i else mask, v, op.const(0.0, v.dtype)), v)
        for i, v in enumerate(results)
    ]


# -- the Scan -------------------------------------------------------------------------------------


def _freeze_ended_sequences(step: Step) -> Step:
    """Return the time step function that takes a mask as its last element, and keeps the states of
    sequences that have ended.

    In reverse, a row keeps its initial state until its sequence begins.
    """

    def masked_step(op: Any, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        *others, mask = elements
        pairs = zip(step(op, states, others), states, strict=True)
        return [op.Where(mask, after, before) for after, before in pairs]

    return masked_step


def write_scan(
    op: Any, op_type: str, starts: list, stacks: list, step: Step, reverse: bool
) -> list[ir.Value]:
    """Write a Scan, and return the first state after every time step (time, ...), then the final
    states.

    Args:
        op_type: the operator that is lowered, after which the body of the Scan is named.
        starts: the initial states.
        stacks: the elements of all time steps, each (time, ...).
        step: computes the new states from the states and the elements of one time step.
        reverse: whether the last time step is the first one that runs.
    """
    body = ir.Graph([], [], nodes=[], name=op.name(f"{op_type.lower()}_step"))
    inner = op.inside(body)

    def inner_value(name: str, shape: Dims, v: ir.Value) -> ir.Value:
        return ir.Value(name=inner.name(name), type=v.type, shape=ir.Shape(shape))

    states = [inner_value("state", known_shape(v), v) for v in starts]
    slices = [inner_value("element", known_shape(v)[1:], v) for v in stacks]
    body.inputs.extend([*states, *slices])
    with inner:
        pairs = zip(step(inner, states, slices), states, strict=True)
        new = [inner.set_type_like(after, before) for after, before in pairs]
        inner.give([*new, new[0]])
    body.outputs[-1].shape = states[0].shape
    attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(stacks)}
    if reverse:
        attributes["scan_input_directions"] = [1] * len(stacks)
        attributes["scan_output_directions"] = [1]
    inputs = [*starts, *stacks]
    *finals, y = op.emit_many("Scan", inputs, attributes, outputs=len(states) + 1, fresh=True)
    for final, state in zip(finals, states, strict=True):
        final.shape = state.shape
    return [_fill_dims(y, known_shape(stacks[0])[0], *known_shape(states[0])), *finals]


def _fill_dims(v: ir.Value, *shape: Dim) -> ir.Value:
    """Set the dimensions of `v` that are unknown, and return it."""
    before = dims(v) or (None,) * len(shape)
    v.shape = ir.Shape([b if a is None else a for a, b in zip(before, shape, strict=True)])
    return v
