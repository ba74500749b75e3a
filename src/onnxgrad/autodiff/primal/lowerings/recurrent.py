"""RNN, GRU and LSTM as a Scan over time, so that they have its gradient.

https://onnx.ai/onnx/operators/onnx__LSTM.html, and the kernels of onnxruntime where that leaves
something open: `clip` bounds what the gates are made of, not the cell; activations that lack their
numbers in `activation_alpha` have those of `_ALPHA`; rows without a step end with zeros.

The products with X are one Gemm over all steps, outside of the Scan. Its body is one MatMul of the
state for all gates (GRU: two), and the gates, of which those that share a function stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings.registry import lowering
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import Dim, Dims, constant, dims

Function = Callable[[Emit, ir.Value], ir.Value]
# From the states and what is different in each step to the new states; the first is the output
Step = Callable[[Emit, list[ir.Value], list[ir.Value]], list[ir.Value]]

_ALPHA = {"leakyrelu": 0.01, "thresholdedrelu": 0.0, "hardsigmoid": 0.2, "elu": 1.0}
_BETA = {"affine": 0.0, "hardsigmoid": 0.5}
_TAKES_ALPHA = {*_ALPHA, "affine", "scaledtanh"}
_TAKES_BETA = {*_BETA, "scaledtanh"}
_ACTIVATIONS: dict[str, Callable[[Emit, Any, Any, Any], Any]] = {
    "relu": lambda op, x, a, b: op.Relu(x),
    "tanh": lambda op, x, a, b: op.Tanh(x),
    "sigmoid": lambda op, x, a, b: op.Sigmoid(x),
    "affine": lambda op, x, a, b: a * x + b,
    "leakyrelu": lambda op, x, a, b: op.LeakyRelu(x, alpha=a),
    "thresholdedrelu": lambda op, x, a, b: op.ThresholdedRelu(x, alpha=a),
    "scaledtanh": lambda op, x, a, b: a * op.Tanh(b * x),
    "hardsigmoid": lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b),
    "elu": lambda op, x, a, b: op.Elu(x, alpha=a),
    "softsign": lambda op, x, a, b: op.Softsign(x),
    "softplus": lambda op, x, a, b: op.Softplus(x),
}


@dataclass
class _Direction:
    """The operands of one direction of a node, without the axis of directions."""

    w: ir.Value  # (gates hidden, input)
    r: ir.Value  # (gates hidden, hidden)
    wb: ir.Value | None  # (gates hidden,), as rb
    rb: ir.Value | None
    p: ir.Value | None  # (3 hidden,)
    states: list[ir.Value]  # (batch, hidden)
    functions: list[Function]
    clip: float | None

    def bounded(self, op: Emit, v: ir.Value) -> ir.Value:
        """Return `v`, of which a gate is made, within the bounds of `clip`."""
        return v if self.clip is None else op.Clip(v, -self.clip, self.clip)


Cell = Callable[[Emit, ir.Node, _Direction, ir.Value], tuple[list[ir.Value], Step]]


@lowering("RNN", on_demand=True)
def rnn(op: Emit, node: ir.Node) -> list[ir.Value]:
    """H = f(X WT + H RT + b)."""
    return _recurrent(op, node, _rnn, gates=1, states=1, activations=("Tanh",))


@lowering("GRU", on_demand=True)
def gru(op: Emit, node: ir.Node) -> list[ir.Value]:
    """z, r = f(X WT + H RT + b),  h = g(X WT + (r H) RT + b),  H = (1 - z) h + z H.

    With linear_before_reset, h = g(X WT + r (H RT + b') + b). Cho et al. 2014, arXiv:1406.1078.
    """
    return _recurrent(op, node, _gru, gates=3, states=1, activations=("Sigmoid", "Tanh"))


@lowering("LSTM", on_demand=True)
def lstm(op: Emit, node: ir.Node) -> list[ir.Value]:
    """i, o, f, c = f, f, f, g(X WT + H RT + P C + b),  C = f C + i c,  H = o h(C).

    With peepholes, o sees the new C. Hochreiter & Schmidhuber 1997; Gers & Schmidhuber 2000.
    """
    return _recurrent(op, node, _lstm, gates=4, states=2, activations=("Sigmoid", "Tanh", "Tanh"))


# -- cells: what is computed outside for all steps, and the step ----------------------------------


def _rnn(op: Emit, node: ir.Node, of: _Direction, x: ir.Value) -> tuple[list[ir.Value], Step]:
    r, [f] = op.Transpose(of.r, perm=[1, 0]), of.functions

    def step(op: Emit, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        [h], [xw] = states, elements
        return [f(op, of.bounded(op, op.MatMul(h, r) + xw))]

    return [_of_input(op, x, of.w, _added(op, of.wb, of.rb))], step


def _gru(op: Emit, node: ir.Node, of: _Direction, x: ir.Value) -> tuple[list[ir.Value], Step]:
    (f, g), sizes = of.functions, _sizes(op, of.r, 2, 1)
    linear = node.attributes.get_int("linear_before_reset", 0)
    (w_zr, w_h), (r_zr, r_h) = (_split(op, v, sizes, 0) for v in (of.w, of.r))
    (wb_zr, wb_h), (rb_zr, rb_h) = (
        (None, None) if b is None else _split(op, b, sizes, 0) for b in (of.wb, of.rb)
    )
    bias_h = wb_h if linear else _added(op, wb_h, rb_h)
    gates = _of_input(op, x, w_zr, _added(op, wb_zr, rb_zr))
    r_zr, r_h = (op.Transpose(r, perm=[1, 0]) for r in (r_zr, r_h))

    def step(op: Emit, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        [h], (x_zr, x_h) = states, elements
        z, r = _split(op, f(op, of.bounded(op, op.MatMul(h, r_zr) + x_zr)), 2, 1)
        if linear:
            product = op.MatMul(h, r_h)
            candidate = r * (product if rb_h is None else product + rb_h)
        else:
            candidate = op.MatMul(r * h, r_h)
        new = g(op, of.bounded(op, candidate + x_h))
        return [new + z * (h - new)]

    return [gates, _of_input(op, x, w_h, bias_h)], step


def _lstm(op: Emit, node: ir.Node, of: _Direction, x: ir.Value) -> tuple[list[ir.Value], Step]:
    f, g, activate = of.functions
    r, coupled = op.Transpose(of.r, perm=[1, 0]), node.attributes.get_int("input_forget", 0)
    p_i, p_o, p_f = (None,) * 3 if of.p is None else _split(op, of.p, 3, 0)
    sizes = _sizes(op, of.r, 3, 1)

    def gate(op: Emit, v: ir.Value, p: ir.Value | None, c: ir.Value) -> ir.Value:
        return f(op, of.bounded(op, v if p is None else v + p * c))

    def step(op: Emit, states: list[ir.Value], elements: list[ir.Value]) -> list[ir.Value]:
        (h, c), [xw] = states, elements
        summed = op.MatMul(h, r) + xw
        if of.p is None:
            gates, new = _split(op, of.bounded(op, summed), sizes, 1)
            i, o, forget = _split(op, f(op, gates), 3, 1)
        else:
            i, o, forget, new = _split(op, summed, 4, 1)
            i, forget = gate(op, i, p_i, c), gate(op, forget, p_f, c)
            new = of.bounded(op, new)
        c = (1.0 - i if coupled else forget) * c + i * g(op, new)
        if of.p is not None:
            o = gate(op, o, p_o, c)
        return [o * activate(op, c), c]

    return [_of_input(op, x, of.w, _added(op, of.wb, of.rb))], step


def _of_input(op: Emit, x: ir.Value, w: ir.Value, b: ir.Value | None) -> ir.Value:
    """Return X WT + b for all steps: (time, batch, input) -> (time, batch, gates hidden)."""
    (time, batch, _), (wide, _) = _dims(x), _dims(w)
    flat = op.Reshape(x, op.vector(-1, op.dim(w, 1)))
    product = op.emit("Gemm", [flat, w] if b is None else [flat, w, b], {"transB": 1})
    whole = op.Reshape(product, op.vector(op.dim(x, 0), op.dim(x, 1), op.dim(w, 0)))
    return _shaped(whole, time, batch, wide)


def _added(op: Emit, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    return None if a is None or b is None else a + b


# -- operands and results -------------------------------------------------------------------------


def _recurrent(
    op: Emit, node: ir.Node, cell: Cell, gates: int, states: int, activations: Sequence[str]
) -> list[ir.Value]:
    get = node.attributes
    direction, by_rows = get.get_string("direction", "forward"), get.get_int("layout", 0)
    x = node.inputs[0]
    assert x is not None
    if x.shape is None:
        x = _shaped(op.copy_of(x), None, None, None)
    if by_rows:
        x = op.Transpose(x, perm=[1, 0, 2])
    operands = _directions(op, node, x, gates, states, activations)
    lengths = _lengths(node, x)
    seen = None if lengths is None else _seen(op, x, lengths)
    found = []
    for i, of in enumerate(operands):
        elements, step = cell(op, node, of, x)
        reverse = direction == "reverse" or i == 1
        found.append(_scan(op, node, of, elements, step, seen, reverse))
    if lengths is not None:
        found = [_without(op, results, seen, lengths) for results in found]
    joined = []
    for i, parts in enumerate(zip(*found, strict=True)):
        added = [op.Unsqueeze(v, [int(i == 0)]) for v in parts]
        y = op.Concat(*added, axis=int(i == 0)) if len(added) > 1 else added[0]
        order = [2, 0, 1, 3] if i == 0 else [1, 0, 2]
        joined.append(op.Transpose(y, perm=order) if by_rows else y)
    return joined[: len(node.outputs)]


def _directions(
    op: Emit, node: ir.Node, x: ir.Value, gates: int, states: int, activations: Sequence[str]
) -> list[_Direction]:
    """Return the operands of each direction."""
    get, (_, batch, size) = node.attributes, _dims(x)
    n, k = 1 + (get.get_string("direction", "forward") == "bidirectional"), len(activations)
    w, r, b, _, *initial, p = (*node.inputs[1:], *[None] * 6)[:7]
    hidden = _hidden(node, w, r, gates)
    wide = _times(gates, hidden)
    if get.get_int("layout", 0):
        initial = [None if v is None else op.Transpose(v, perm=[1, 0, 2]) for v in initial]
    operands = zip(
        _apart(op, w, n, wide, size),
        _apart(op, r, n, wide, hidden),
        _apart(op, b, n, _times(2, wide)),
        _apart(op, p, n, _times(3, hidden)),
        *(_apart(op, v, n, batch, hidden) for v in initial[:states]),
        strict=True,
    )
    functions = list(_functions(node, activations, n))
    clip = get.get_float("clip") if "clip" in get else None
    made = []
    for i, (w_i, r_i, b_i, p_i, *given) in enumerate(operands):
        wb, rb = (None, None) if b_i is None else _split(op, b_i, 2, 0)
        starts = [_zeros(op, x, r_i) if v is None else v for v in given]
        made.append(_Direction(w_i, r_i, wb, rb, p_i, starts, functions[k * i :][:k], clip))
    return made


def _hidden(node: ir.Node, w: ir.Value | None, r: ir.Value | None, gates: int) -> Dim:
    """Return the number of hidden units, as far as it is stated anywhere."""
    if "hidden_size" in node.attributes:
        return node.attributes.get_int("hidden_size")
    wide, known = (dims(w) or (None,) * 3)[1], (dims(r) or (None,) * 3)[2]
    return wide // gates if known is None and isinstance(wide, int) else known


def _times(k: int, n: Dim) -> Dim:
    return k * n if isinstance(n, int) else None


def _apart(op: Emit, v: ir.Value | None, n: int, *shape: Dim) -> list[Any]:
    """Return `v` (directions, ...) without its first axis, for each direction."""
    if v is None:
        return [None] * n
    each = [v]
    if n > 1:
        each = op.emit_many("Split", [v], {"axis": 0, "num_outputs": n}, outputs=n)
        each = [_shaped(part, 1, *shape) for part in each]
    return [_shaped(op.Squeeze(part, [0]), *shape) for part in each]


def _zeros(op: Emit, x: ir.Value, r: ir.Value) -> ir.Value:
    """Return what a state starts with where nothing is given."""
    assert x.dtype is not None
    shape = op.vector(op.dim(x, 1), op.dim(r, 1))
    return _shaped(op.Expand(np.zeros((), x.dtype.numpy()), shape), _dims(x)[1], _dims(r)[1])


def _functions(node: ir.Node, default: Sequence[str], n: int) -> Iterator[Function]:
    """Yield the activations in order, each with the next of the numbers that it takes."""
    names = list(node.attributes.get_strings("activations", ())) or list(default) * n
    if len(names) != len(default) * n:
        raise _refused(node, f"{len(default) * n} activations, not {len(names)}")
    alphas, betas = (
        iter(node.attributes.get_floats(f"activation_{k}", ())) for k in ("alpha", "beta")
    )
    for name in (name.lower() for name in names):
        if name not in _ACTIVATIONS:
            raise _refused(node, f"no activation {name!r}; valid are {', '.join(_ACTIVATIONS)}")
        a = next(alphas, _ALPHA.get(name)) if name in _TAKES_ALPHA else 0.0
        b = next(betas, _BETA.get(name)) if name in _TAKES_BETA else 0.0
        if a is None or b is None:
            raise _refused(node, f"{name} without activation_alpha or activation_beta: write them")
        yield _function(name, a, b)


def _function(name: str, a: float, b: float) -> Function:
    return lambda op, x: op.set_type_like(_ACTIVATIONS[name](op, x, a, b), x)


def _refused(node: ir.Node, what: str) -> NoGradientRule:
    return NoGradientRule(f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r}): {what}")


# -- sequences of different lengths ---------------------------------------------------------------


def _lengths(node: ir.Node, x: ir.Value) -> ir.Value | None:
    """Return the lengths of the sequences, None where they are known to be all as long as X."""
    v = node.inputs[4] if len(node.inputs) > 4 else None
    known, steps = constant(v), _dims(x)[0]
    whole = known is not None and isinstance(steps, int) and bool((known >= steps).all())
    return None if whole else v


def _seen(op: Emit, x: ir.Value, lengths: ir.Value) -> ir.Value:
    """Return which steps belong to which rows: booleans (time, batch, 1)."""
    steps, n = op.dim(x, 0), op.Cast(lengths, to=ir.DataType.INT64)
    if isinstance(steps, int):
        t = op.const(np.arange(steps).reshape(-1, 1))
    else:
        t = op.Unsqueeze(op.Range(np.int64(0), op.Squeeze(steps, [0]), np.int64(1)), [1])
    time, batch, _ = _dims(x)
    return _shaped(op.Unsqueeze(op.Less(t, n), [2]), time, batch, 1)


def _without(
    op: Emit, results: list[ir.Value], seen: ir.Value | None, lengths: ir.Value
) -> list[ir.Value]:
    """Return zeros for what lies beyond a sequence, and for sequences of no steps."""
    any_step = _shaped(op.Greater(op.Unsqueeze(lengths, [1]), op.const(np.int32(0))), None, 1)
    return [
        op.set_type_like(op.Where(any_step if i else seen, v, op.const(0.0, v.dtype)), v)
        for i, v in enumerate(results)
    ]


# -- the Scan -------------------------------------------------------------------------------------


def _scan(
    op: Emit,
    node: ir.Node,
    of: _Direction,
    elements: list[ir.Value],
    step: Step,
    seen: ir.Value | None,
    reverse: bool,
) -> list[ir.Value]:
    """Return the outputs of all steps (time, batch, hidden), then the states after the last.

    In reverse, a row waits with its initial state until its sequence begins.
    """
    body = ir.Graph([], [], nodes=[], name=op.name(f"{node.op_type.lower()}_step"))
    inner = Emit(body, outer=op)
    stacks = elements if seen is None else [*elements, seen]
    states = [_inside(inner, v, "state", 0) for v in of.states]
    slices = [_inside(inner, v, "element", 1) for v in stacks]
    body.inputs.extend([*states, *slices])
    with inner:
        new = step(inner, states, slices[: len(elements)])
        if seen is not None:
            pairs = zip(new, states, strict=True)
            new = [inner.Where(slices[-1], after, before) for after, before in pairs]
        new = [
            inner.set_type_like(after, before) for after, before in zip(new, states, strict=True)
        ]
        inner.give([*new, new[0]])
    body.outputs[-1].shape = states[0].shape
    attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(stacks)}
    if reverse:
        attributes["scan_input_directions"] = [1] * len(stacks)
        attributes["scan_output_directions"] = [1]
    operands = [*of.states, *stacks]
    *finals, y = op.emit_many("Scan", operands, attributes, outputs=len(states) + 1, fresh=True)
    for final, state in zip(finals, states, strict=True):
        final.shape = state.shape
    return [_shaped(y, _dims(stacks[0])[0], *_dims(states[0])), *finals]


def _inside(op: Emit, v: ir.Value, name: str, start: int) -> ir.Value:
    """Return what stands in the body for `v`, or for a slice of it."""
    return ir.Value(name=op.name(name), type=v.type, shape=ir.Shape(_dims(v)[start:]))


def _split(op: Emit, v: ir.Value, sizes: int | list[int] | ir.Value, axis: int) -> list[ir.Value]:
    """Return parts of `v`: so many equal ones, or two of these sizes."""
    equal = isinstance(sizes, int)
    n = sizes if isinstance(sizes, int) else 2
    attributes = {"axis": axis, "num_outputs": n} if equal else {"axis": axis}
    made = op.emit_many("Split", [v] if equal else [v, op.const(sizes)], attributes, outputs=n)
    shape, whole = list(_dims(v)), _dims(v)[axis]
    each = whole // n if equal and isinstance(whole, int) else None
    for i, part in enumerate(made):
        shape[axis] = sizes[i] if isinstance(sizes, list) else each
        _shaped(part, *shape)
    return made


def _sizes(op: Emit, r: ir.Value, *parts: int) -> list[int] | ir.Value:
    """Return so many times the number of hidden units, known now or when it runs."""
    return op.vector(*(k * op.dim(r, 1) for k in parts))


def _dims(v: ir.Value) -> Dims:
    """Return the dimensions of a value of known rank."""
    shape = dims(v)
    assert shape is not None
    return shape


def _shaped(v: ir.Value, *shape: Dim) -> ir.Value:
    """State what is known of a shape, beside what is known already."""
    known = dims(v) or (None,) * len(shape)
    v.shape = ir.Shape([b if a is None else a for a, b in zip(known, shape, strict=True)])
    return v
