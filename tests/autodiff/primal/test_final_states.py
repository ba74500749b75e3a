"""The last output of a recurrent layer is read from its final state, and so is its gradient.

Gradients are compared with central differences of the file as it is.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import check_gradient
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from tests.support.models import parse_model
from tests.support.running import run

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TIME, ROWS = 5, 3
READS = {  # nodes behind Y (time, directions, rows, hidden), what is read, the axis of time in it
    "of PyTorch": ("s = Squeeze(y, one)  t = Transpose<perm=[1, 0, 2]>(s)", "t", 1),
    "time first": ("t = Squeeze(y, one)", "t", 0),
    "all axes": ("t = Transpose<perm=[2, 3, 1, 0]>(y)", "t", 3),
    "Y": ("", "y", 0),
}
LAST, LAST_AS_VECTOR = "value_int=-1", "value_ints=[-1]"


def recurrent_layer(
    kind: str,
    read: str,
    index: str = LAST,
    attributes: str = "",
    lengths: bool = False,
    rows_first: bool = False,
    time: str = "T",
) -> onnx.ModelProto:
    """Return a layer of which one time step is read, with neither bias nor initial state."""
    between, name, axis = READS[read]
    directions = 1 + ("bidirectional" in attributes)
    x = f"N, {time}, 2" if rows_first else f"{time}, N, 2"
    sizes = f"{directions}, {GATES[kind] * 4}"
    attributes = ", ".join(filter(None, ["hidden_size=4", attributes, "layout=1" * rows_first]))
    text = f"""g (float[{x}] x, float[{sizes}, 2] w, float[{sizes}, 4] r, int32[N] n)
        => (float z) {{
            one = Constant<value_ints=[1]>()  k = Constant<{index}>()
            y = {kind}<{attributes}>(x, w, r{", , n" * lengths})
            {between}
            e = Gather<axis={axis + rows_first}>({name}, k)
            f = Sin(e)  z = ReduceSum<keepdims=0>(f) }}"""
    return parse_model(text, opset=22)


def random_operands(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, known = np.random.default_rng(0), {"T": TIME, "N": ROWS}
    made = {"n": np.array([2, 5, 1], np.int32)}
    for x in model.graph.input[:3]:
        shape = [d.dim_value or known[d.dim_param] for d in x.type.tensor_type.shape.dim]
        made[x.name] = rng.standard_normal(shape).astype(np.float32)
    return made


def reads_outputs(model: onnx.ModelProto) -> bool:
    """Return whether the outputs of all steps are read in the prepared model; check its results."""
    prepared, arrays = to_proto(prepare(model)), random_operands(model)
    for found, expected in zip(run(prepared, arrays), run(model, arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert check_gradient(model, feed=arrays).ok
    (node,) = (n for n in prepared.graph.node if n.op_type in GATES)
    return any(node.output[0] in n.input for n in prepared.graph.node)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("read", READS)
def test_the_last_output(kind, read):
    assert not reads_outputs(recurrent_layer(kind, read))


@pytest.mark.parametrize("index", [LAST_AS_VECTOR, f"value_int={TIME - 1}"])
def test_other_forms_of_the_index(index):
    assert not reads_outputs(recurrent_layer("GRU", "of PyTorch", index, time=str(TIME)))


@pytest.mark.parametrize("read", ["of PyTorch", "Y"])
def test_a_slice(read):
    model = recurrent_layer("LSTM", read, LAST_AS_VECTOR)
    (gather,) = (n for n in model.graph.node if n.op_type == "Gather")
    values = {"starts": -1, "ends": 2**31 - 1, "axes": gather.attribute[0].i}
    for name, value in values.items():
        model.graph.initializer.append(onnx.helper.make_tensor(name, 7, [1], [value]))
    gather.CopyFrom(onnx.helper.make_node("Slice", [gather.input[0], *values], ["e"]))
    assert not reads_outputs(model)
    model.graph.initializer[0].int64_data[0] = -2
    assert reads_outputs(model)


def test_the_first_output_of_a_reversed_layer():
    assert not reads_outputs(recurrent_layer("LSTM", "Y", "value_int=0", 'direction="reverse"'))


@pytest.mark.parametrize(
    "others",
    [
        {"index": "value_int=0"},
        {"index": "value_ints=[-1, -2]"},
        {"index": f"value_int={TIME - 1}"},  # of a length that is not stated
        {"attributes": 'direction="reverse"'},
        {"attributes": 'direction="bidirectional"'},
        {"lengths": True},
    ],
    ids=str,
)
def test_outputs_that_are_no_final_state(others):
    assert reads_outputs(recurrent_layer("LSTM", "Y", **others))


def test_another_axis():
    model = recurrent_layer("GRU", "Y")
    gather = next(n for n in model.graph.node if n.op_type == "Gather")
    gather.attribute[0].i = 2  # the last row of the batch
    assert reads_outputs(model)


def test_rows_first():
    model = recurrent_layer("GRU", "Y", rows_first=True)  # which onnxruntime does not run
    prepared = to_proto(prepare(model, on_demand=True))
    x = random_operands(model)["x"]
    (expected,) = run(
        recurrent_layer("GRU", "Y"), random_operands(model) | {"x": x.transpose(1, 0, 2)}
    )
    (found,) = run(prepared, random_operands(model))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
