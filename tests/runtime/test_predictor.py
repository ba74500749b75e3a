"""`Predictor` against a plain session of onnxruntime."""

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad.reporting import warn_once
from onnxgrad.runtime.predictor import Predictor
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run_named

RNG = np.random.default_rng(0)
X = RNG.normal(size=(11, 3)).astype(np.float32)
WEIGHTS = RNG.normal(size=(3, 2)).astype(np.float32)
COUNTS = np.arange(11, dtype=np.int64)


def two_input_model(rows="N"):
    return parse_model(
        f"""f (float[{rows},3] x, int64[{rows}] k) => (float[{rows},2] y, float[{rows}] z,
        float s) {{
            h = MatMul(x, w)  f = Cast<to=1>(k)  c = Unsqueeze(f, one)  y = Mul(h, c)
            z = Neg(f)  s = ReduceSum<keepdims=0>(x) }}""",
        w=WEIGHTS,
        one=np.int64([1]),
    )


@pytest.mark.parametrize("rows", ["N", 1, 4, 11, 16])
@pytest.mark.parametrize("size", [1, 4, 256])
def test_each_row_equals_a_call_with_that_row(rows, size):
    predictor = Predictor(two_input_model(rows), ["y", "z"])
    assert predictor.fixed_rows == (0 if rows == "N" else rows)
    found = predictor.predict({"x": X, "k": COUNTS}, size)
    single = two_input_model(1)
    for i in range(11):
        expected = run_named(single, {"x": X[i : i + 1], "k": COUNTS[i : i + 1]})
        np.testing.assert_allclose(found["y"][i], expected["y"][0], rtol=1e-6)
        np.testing.assert_allclose(found["z"][i], expected["z"][0])
    assert {name: len(y) for name, y in found.items()} == {"y": 11, "z": 11}


def test_arrays_are_cast_to_the_dtypes_of_inputs():
    predictor = Predictor(two_input_model())
    assert {n: str(d) for n, d in predictor.dtypes.items()} == {
        "x": "float32", "k": "int64", "y": "float32", "z": "float32", "s": "float32",
    }  # fmt: skip
    wide = predictor.run({"x": X.astype(np.float64), "k": COUNTS.astype(np.int32)})
    plain = run_named(two_input_model(), {"x": X, "k": COUNTS})
    assert [np.shape(y) for y in wide] == [np.shape(y) for y in plain.values()]


def test_a_session_computes_from_arrays_and_ortvalues_among_other_values():
    model = parse_model(
        """f (float[N,3] x, float[3,2] w) => (float[N,2] y, float[N,2] z)
        { y = MatMul(x, w) z = Neg(y) }"""
    )
    predictor = Predictor(ort.InferenceSession(model.SerializeToString()), ["z"], fixed_rows=0)
    values = {"w": ort.OrtValue.ortvalue_from_numpy(WEIGHTS), "x": X, "unused": COUNTS}
    expected = run_named(model, {"x": X, "w": WEIGHTS})
    np.testing.assert_array_equal(predictor.compute(values)[0], expected["z"])
    np.testing.assert_array_equal(predictor.compute(values, ["y"])[0], expected["y"])


@pytest.mark.parametrize(("rows", "size"), [("N", 4), ("N", None), (4, None)])
def test_an_array_without_rows_goes_into_every_call(rows, size):
    model = parse_model(
        f"f (float[{rows},3] x, float[3,2] w) => (float[{rows},2] y) {{ y = MatMul(x, w) }}"
    )
    predictor = Predictor(model, fixed_rows=0 if rows == "N" else rows)
    found = predictor.run_rows({"w": WEIGHTS, "x": X}, size, {"w"})
    np.testing.assert_allclose(found["y"], X @ WEIGHTS, rtol=1e-5)


def test_calls_whose_outputs_differ_in_length_are_named():
    model = parse_model(
        "f (int64[N] k) => (int64[N,M] y) { r = Unsqueeze(k, one) "
        "m = ReduceMax<keepdims=1>(k) s = Concat<axis=0>(one, m) y = Expand(r, s) }",
        one=np.int64([1]),
    )
    with pytest.raises(ValueError, match=naming("'y'", "[N, 4]", "[N, 6]")):
        Predictor(model).run_rows({"k": np.int64([3, 4, 5, 6])}, 2)


def test_inputs_that_are_missing_or_unknown_are_named():
    predictor = Predictor(two_input_model())
    with pytest.raises(ValueError, match=naming("['k']", "x")):
        predictor.run({"x": X})
    with pytest.raises(ValueError, match=naming("['q']", "['x', 'k']")):
        predictor.run({"x": X, "k": COUNTS, "q": X})


def test_an_output_without_rows_is_named():
    with pytest.raises(ValueError, match=naming("'s'", "outputs")):
        Predictor(two_input_model()).predict({"x": X, "k": COUNTS})


def test_an_output_as_long_as_a_part_of_a_static_batch_has_no_rows():
    """The last call has three rows, and the output three elements, whatever the rows are."""
    model = parse_model(
        "f (float[4,3] x) => (float[4,3] y, float[3] m) { y = Neg(x)  m = ReduceMean(x, first) }",
        first=np.int64([0]),
    )
    model.graph.node[1].attribute.add(name="keepdims", type=2, i=0)
    predictor = Predictor(model)
    assert [*predictor.run_rows({"x": X[:3]})] == ["y"]
    with pytest.raises(ValueError, match=naming("'m'", "outputs")):
        predictor.predict({"x": X[:3]})


def test_a_static_batch_needs_a_row():
    with pytest.raises(ValueError, match=naming("4 rows", "pass")):
        Predictor(two_input_model(4)).run_rows({"x": X[:0], "k": COUNTS[:0]})


def test_no_rows():
    found = Predictor(two_input_model(), ["y"]).predict({"x": X[:0], "k": COUNTS[:0]})
    assert found["y"].shape == (0, 2)


ONE_ROW = {  # files that state any number of rows, and take one
    "a Reshape to one row": "r = Reshape(x, row) y = MatMul(r, w)",
    "a Squeeze of the rows": "r = Squeeze(x, zero) h = MatMul(r, w) y = Unsqueeze(h, zero)",
    "a mean of the rows": "r = ReduceMean(x, zero) y = MatMul(r, w)",
}
TENSORS = {"row": np.int64([1, 3]), "zero": np.int64([0])}


@pytest.mark.parametrize("name", ONE_ROW)
def test_a_file_that_takes_one_row_at_a_time(name, caplog):
    text, rows = ONE_ROW[name], X[:5]
    used = {n: a for n, a in TENSORS.items() if n in text}
    model = parse_model(f"f (float[N,3] x) => (float[N,2] y) {{ {text} }}", w=WEIGHTS, **used)
    predictor = Predictor(model)
    assert predictor.fixed_rows == 0
    warn_once.cache_clear()
    for found in (predictor.predict({"x": rows}), predictor.run_rows({"x": rows})):
        np.testing.assert_allclose(found["y"], rows @ WEIGHTS, rtol=1e-5)
    assert predictor.fixed_rows == 1
    [said] = [r.getMessage() for r in caplog.records]
    assert "one row at a time" in said
    single = Predictor(model).predict({"x": rows[:1]})
    np.testing.assert_array_equal(single["y"], found["y"][:1])


def test_rows_that_fail_are_no_sign_of_a_static_batch():
    model = parse_model("f (int64[N] k) => (float[N,2] y) { y = Gather(w, k) }", w=WEIGHTS)
    predictor = Predictor(model)
    with pytest.raises(Exception, match="Gather"):
        predictor.predict({"k": np.int64([0, 1, 9])})
    assert predictor.fixed_rows == 0


def test_a_result_of_all_rows_that_the_file_states_is_no_row_of_one():
    model = parse_model(
        "f (float[N,3] x) => (float[1,3] y) { y = ReduceMean(x, zero) }", zero=np.int64([0])
    )
    with pytest.raises(ValueError, match=naming("'y'", "outputs")):
        Predictor(model).predict({"x": X})


def test_lists_of_maps_of_several_calls_are_one_list():
    model = parse_model(
        """<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> f (float[1,2] x) => (float y)
        { y = ai.onnx.ml.ZipMap<classlabels_int64s = [3, 5]>(x) }"""
    )
    kind = model.graph.output[0].type.sequence_type.elem_type.map_type
    kind.key_type, kind.value_type.tensor_type.elem_type = 7, 1
    found = Predictor(model).run_rows({"x": X[:4, :2]})
    assert found == {"y": [{3: a, 5: b} for a, b in X[:4, :2].tolist()]}
