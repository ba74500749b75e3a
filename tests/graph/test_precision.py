"""Inputs and results of 16 bits in float32, and back; those of other dtypes stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import narrow_result, widen_input, widen_result
from onnxgrad.model.convert import to_ir, to_proto
from tests.support.models import parse_model
from tests.support.running import run_named

X = np.float32([1, 1 / 3, -2.0003])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float", "double"])
def test_an_input_of_16_bits_becomes_float32_and_is_read_rounded(kind):
    model = to_ir(parse_model(f"g ({kind}[3] a, {kind}[3] w) => ({kind}[3] y) {{ y = Mul(w, w) }}"))
    a, w = model.graph.inputs
    given = widen_input(Emit(model.graph), w)
    halved = kind.endswith("16")
    assert [x.name for x in model.graph.inputs] == ["a", "w"]
    assert list(model.graph.inputs) == [a, given]
    assert (given is w) == (not halved)
    assert given.dtype == (ir.DataType.FLOAT if halved else w.dtype)
    assert len(list(model.graph)) == 1 + halved
    if kind == "float16":
        found = run_named(to_proto(model), a=X.astype(np.float16), w=X)["y"]
        np.testing.assert_array_equal(found, np.square(X.astype(np.float16)))


@pytest.mark.parametrize("kind", ["float16", "float", "double"])
def test_a_result_of_16_bits_becomes_float32_and_back(kind):
    model = to_ir(parse_model(f"g ({kind}[3] x) => ({kind}[3] y) {{ y = Abs(x) }}"))
    op, [y] = Emit(model.graph), model.graph.outputs
    wide = widen_result(op, y)
    back = narrow_result(op, wide, model.graph.inputs[0])
    assert wide.name == "y"
    assert back.dtype == y.dtype
    assert wide.dtype == (ir.DataType.FLOAT if kind == "float16" else y.dtype)
    assert narrow_result(op, wide, None) is wide
    assert (wide is y, back is y) == (kind != "float16",) * 2
