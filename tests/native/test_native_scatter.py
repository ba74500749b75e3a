"""The native form of gradients of embeddings, for sessions on one thread."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.device import Device
from tests.support.models import operator_names, parse_model
from tests.support.running import run

ADD = """rows = Reshape(i, column)  shape = Shape(u)  indices = Expand(rows, shape)
    y = ScatterElements<axis=0, reduction="add">(x, indices, u)"""


def native_scatter(text: str, threads: int = 1) -> onnx.ModelProto:
    """Return the native form of a model for a number of threads."""
    model = to_ir(parse_model(text))
    infer(model)
    to_native(model.graph, Target(Device.of("cpu"), threads))
    return to_proto(model)


def scatter(x: str, u: str, column: str, dtype: str = "float", body: str = ADD) -> str:
    n = column.count(",") + 1
    return f"""g (int64[M] i, {dtype}[{x}] x, {dtype}[{u}] u) => ({dtype}[{x}] y)
        <int64[{n}] column = {{{column}}}> {{ {body} }}"""


@pytest.mark.parametrize("width", ["3", "2, 3"])
def test_rows_are_added_where_indices_repeat_and_are_negative(width):
    column = ", ".join(["-1"] + ["1"] * (width.count(",") + 1))
    model = native_scatter(scatter(f"5, {width}", f"M, {width}", column))
    assert "ScatterND" in operator_names(model)
    assert "ScatterElements" not in operator_names(model)
    rng = np.random.default_rng(0)
    shape = tuple(map(int, width.split(",")))
    x, i = rng.standard_normal((5, *shape)).astype(np.float32), np.array([4, 0, -1, 4, -5, 2])
    u = rng.standard_normal((6, *shape)).astype(np.float32)
    expected = x.copy()
    np.add.at(expected, i, u)
    np.testing.assert_allclose(run(model, i=i, x=x, u=u)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        (scatter("5, 3", "M, 3", "-1, 1"), 2),  # ScatterND would race
        (scatter("5, 3", "M, 2", "-1, 1"), 1),  # parts of rows
        (scatter("5, 3", "M, 3", "-1, 1", "double"), 1),
        (scatter("5, 3", "M, 3", "-1, 1", body=ADD.replace("axis=0", "axis=1")), 1),
        (scatter("5, 3", "M, 3", "-1, 1", body=ADD.replace('"add"', '"mul"')), 1),
        (scatter("5, 3", "M, 3", "1, -1"), 1),  # a column for each element of a row
        (scatter("5, 3", "4, 3", "1, 1"), 1),  # one index for all rows
    ],
)
def test_what_is_no_sum_of_rows_on_one_thread_is_left_alone(text, threads):
    assert "ScatterElements" in operator_names(native_scatter(text, threads))
