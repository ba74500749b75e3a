"""Connectionist temporal classification: the likelihood of a sequence under all its alignments."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.losses.spec import (
    LOWEST,
    LabelKind,
    axis_positions,
    known_dims,
    lowest_logit,
    register,
    where_const,
    widen_to_float32,
)

_INFINITE = 1e29  # a loss above it has no alignment


def _time_row_class_axes(options: Any) -> tuple[int, int, int]:
    """Return the indices of the time, row and class axes of a prediction."""
    classes = options["axis"] % 3
    rest = [i for i in range(3) if i != classes]
    rows, time = rest[::-1] if options["time_major"] else rest
    return time, rows, classes


def _ctc_label_kind(options: Any) -> LabelKind:
    """Return dtype and shape of CTC labels for a prediction (N, T, C), or time-major (T, N, C)."""
    _, rows, classes = _time_row_class_axes(options)
    return LabelKind(
        dtype=ir.DataType.INT64,
        shape=lambda f: (f[rows] if f else None, None),
        accepts=lambda f: f is not None and len(f) == 3,
        needs="scores (T, N, C)" if options["time_major"] else "scores (N, T, C)",
        # the first column holds lengths with input_lengths, which are not classes
        classes=lambda f: None if options["input_lengths"] else (f and f[classes]) or "C",
    )


@register("ctc", labels=_ctc_label_kind, has_ignore_index=True, activation="Softmax", mixes=False)
def ctc(
    op, prediction, label, blank=0, time_major=False, input_lengths=False, zero_infinity=False,
    ignore_index=-100, from_logits=True, eps=1e-7, axis=2,
):  # fmt: skip
    """-log sum over alignments of prod_t p_t, p_t the probability of the alignment's class at time
    t.  Graves et al. 2006.

    An alignment is a path of T classes that becomes the labels when repeated classes are merged and
    blanks removed. One loss for every row, not divided by the number of labels.

    The prediction holds scores (N, T, C), or (T, N, C) with time_major, with the classes along
    `axis`; logarithms of probabilities are scores, too. Scores must be finite. Probabilities, with
    from_logits=False, are at least eps. Labels are int64 (N, S), padded at the end with
    ignore_index or the blank. With input_lengths, they are (N, 1 + S), and the first column is the
    number of time steps of the row. Where labels do not fit into the time steps, the loss is
    infinite, or zero with zero_infinity, and its gradient is zero.
    """
    dtype, prediction = prediction.dtype, widen_to_float32(op, prediction)
    order = _time_row_class_axes({"axis": axis, "time_major": time_major})
    if order != (0, 1, 2):
        prediction = op.Transpose(prediction, perm=list(order))
    log_p = op.LogSoftmax(prediction, axis=2) if from_logits else op.Log(op.Clip(prediction, eps))
    lengths = None
    if input_lengths:
        lengths, label = (op.Slice(label, [i], [j], [1]) for i, j in ((0, 1), (1, 2**31)))
        label.shape = ir.Shape([known_dims(prediction)[1], None])
    kept = op.Not(op.Or(op.Equal(label, ignore_index), op.Equal(label, blank)))
    clean = op.Where(kept, label, np.int64(blank))
    states = _interleave_filler(op, clean, np.int64(blank))
    alpha = _write_ctc_log_likelihood(op, log_p, states, _skip_penalties(op, clean, log_p), lengths)
    last = 2 * op.ReduceSum(op.Cast(kept, to=ir.DataType.INT64), [1], keepdims=1)
    at = op.Unsqueeze(axis_positions(op, states, 1), [0])
    end = op.Or(op.Equal(at, last), op.Equal(at, last - 1))  # a blank, or the last label
    loss = -op.ReduceLogSumExp(op.Where(end, alpha, lowest_logit(op, log_p)), [1], keepdims=0)
    infinite = op.const(0.0 if zero_infinity else np.inf, loss.dtype)
    return op.Cast(op.Where(op.Greater(loss, _INFINITE), infinite, loss), to=dtype)


def _write_ctc_log_likelihood(
    op: Any, log_p: ir.Value, states: ir.Value, repeats: ir.Value, lengths: ir.Value | None
) -> ir.Value:
    """Write the log-likelihood of all paths to each state at the last time step, (N, 2S + 1).

    From a state, a path goes to itself, to the next one, or over a blank to another label.
    """
    time, n, _ = known_dims(log_p)
    index = op.Expand(op.Unsqueeze(states, [0]), op.vector(op.dim(log_p, 0), 1, 1))
    scores = op.GatherElements(log_p, index, axis=2)
    shape = ir.Shape([n, known_dims(states)[1]])
    scores.shape = ir.Shape([time, *shape])
    first = op.Equal(axis_positions(op, states, 1), np.int64(0))
    low = lowest_logit(op, log_p)
    start = op.Expand(op.Where(first, op.const(0.0, log_p.dtype), low), op.shape_of(states))
    start.shape = shape
    stacks = [scores]
    if lengths is not None:  # whether a time step is within the length of the row, (T, N, 1)
        steps = op.Unsqueeze(axis_positions(op, log_p, 0), [1, 2])
        stacks.append(op.Less(steps, op.Unsqueeze(lengths, [0])))
        stacks[1].shape = ir.Shape([time, n, 1])
    body = ir.Graph([], [], nodes=[], name=op.name("ctc_step"))
    inner = Emit(body, outer=op)
    elements = [
        ir.Value(name=op.name("element"), type=v.type, shape=ir.Shape(v.shape[1:])) for v in stacks
    ]
    alpha = ir.Value(name=op.name("alpha"), type=log_p.type, shape=shape)
    body.inputs.extend([alpha, *elements])
    with inner:
        padded = inner.Pad(alpha, [0, 2, 0, 0], low)
        one, two = (inner.Slice(padded, [2 - i], [-i], [1]) for i in (1, 2))
        one.shape = two.shape = shape
        ways = [inner.Unsqueeze(x, [0]) for x in (alpha, one, two + repeats)]
        new = inner.ReduceLogSumExp(inner.Concat(*ways, axis=0), [0], keepdims=0) + elements[0]
        if lengths is not None:
            new = inner.Where(elements[1], new, alpha)
        inner.give([inner.set_type_like(new, alpha)])
    attributes = {"body": body, "num_scan_inputs": len(stacks)}
    [end] = op.emit_many("Scan", [start, *stacks], attributes, outputs=1, fresh=True)
    end.shape = shape
    return end


def _interleave_filler(op: Any, x: ir.Value, filler: Any) -> ir.Value:
    """Interleave `x` (N, S) with a filler: filler, x_1, filler, x_2, ..., filler, (N, 2S + 1)."""
    fillers = op.expand_to(op.const(filler, x.dtype), x)
    pairs = op.Concat(op.Unsqueeze(fillers, [2]), op.Unsqueeze(x, [2]), axis=2)
    y = op.Pad(op.Flatten(pairs, axis=1), [0, 0, 0, 1], op.const(filler, x.dtype))
    n, length = known_dims(x)
    y.shape = ir.Shape([n, 2 * length + 1 if isinstance(length, int) else None])
    return y


def _skip_penalties(op: Any, clean: ir.Value, like: ir.Value) -> ir.Value:
    """Write 0 where a CTC path may skip the blank before a label, else log 0, (N, 2S + 1).

    A path must not leap to a label that equals the label before.
    """
    before = op.Slice(op.Pad(clean, [0, 1, 0, 0], np.int64(-1)), [0], [-1], [1])
    leaps = where_const(op, op.Equal(clean, before), LOWEST, 0.0, like)
    leaps.shape = clean.shape
    return _interleave_filler(op, leaps, LOWEST)
