"""Models whose float inputs have a leading axis of members, and what each member is to return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.autodiff.members import MemberAxis
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_proto
from onnxgrad.operators.shapes import dims
from tests.support.cases import run_in_dtype

MEMBERS = 3
LOWEST = float(np.finfo(np.float32).min)


def stack_members(
    prepared: ir.Model, names: Sequence[str], symbol: str | None = None
) -> onnx.ModelProto:
    """Return the model of all members; the inputs `names` of the prepared one get their axis.

    It has the length `symbol`, which the graph reads; None: `MEMBERS`.
    """
    graph = prepared.graph
    op, new = Emit(graph), {}
    length = symbol or MEMBERS
    for i, x in enumerate(graph.inputs):
        if x.name in names:
            new[x] = ir.Value(name=x.name, type=x.type, shape=ir.Shape([length, *(dims(x) or ())]))
            graph.inputs[i] = new[x]
    with op.at(next(iter(graph), None)):
        count = op.Shape(next(iter(new.values())), start=0, end=1) if symbol else MEMBERS
    axis, outputs = MemberAxis(op, count, new, symbol), list(graph.outputs)
    axis.push(graph)
    graph.outputs[:] = [axis.expanded_value(y) for y in outputs]
    tidy(prepared)
    return to_proto(prepared)


def assert_own_results(
    many: onnx.ModelProto, one: onnx.ModelProto, names: Sequence[str], feed: dict
) -> None:
    """Check that the model of all members returns what the one returns for each of them."""
    members = [dict(feed) for _ in range(MEMBERS)]
    for name in names:
        for k, own in enumerate(members):
            own[name] = np.asarray(feed[name] * (1 - k / 64), feed[name].dtype)
    results = run_in_dtype(
        many, feed | {name: np.stack([own[name] for own in members]) for name in names}
    )
    for k, own in enumerate(members):
        for result, expected in zip(results, run_in_dtype(one, own), strict=True):
            if np.asarray(expected).dtype.kind == "f":  # a mask is the lowest number, or -inf
                result, expected = (np.maximum(y, LOWEST) for y in (result, expected))
            np.testing.assert_allclose(result[k], expected, rtol=1e-4, atol=1e-5)
