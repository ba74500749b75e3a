"""Columns of pyarrow of every type, whole, chunked and sliced; the witness is `to_pylist`."""

from decimal import Decimal

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import onnxgrad as og
from onnxgrad.cli import app
from onnxgrad.data.arrays import DataError, column_array, to_numbers
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.columns import stack_columns
from onnxgrad.data.tables import read_table
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.small_models import two_column_model

DECIMALS = [Decimal("1.5"), Decimal("-2.25"), None]
HALVES = pa.array(np.float16([0.5, 1.5]))
MATRICES = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]]
KINDS = ["list_", "large_list", "list_view", "large_list_view"]
WIDTHS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()


def dictionary_coded(values):
    return pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), values)


def columns_of_three_rows():
    """Yield columns of three rows by name."""
    for name in WIDTHS:
        yield name, pa.array(np.array([1, 2, 3]).astype(name))
        values = list(np.array([1, 2, 3]).astype(name))
        yield f"{name}, null", pa.array([values[0], None, values[2]], getattr(pa, name)())
    yield "bool", pa.array([True, False, True])
    yield "bool, null", pa.array([True, None, False])
    yield "null", pa.nulls(3)
    for kind in (pa.decimal128(9, 2), pa.decimal256(40, 5)):
        yield str(kind), pa.array(DECIMALS, kind)
    for of, width in (("ints", np.int32), ("halves", np.float16), ("bools", np.bool_)):
        kind, values = pa.from_numpy_dtype(width), list(np.array(MATRICES[0]).astype(width))
        for name in KINDS:
            yield f"{name} of {of}", pa.array([*values, values[0]], getattr(pa, name)(kind))
        yield f"fixed lists of {of}", pa.array([*values, values[0]], pa.list_(kind, 2))
    for outer in KINDS:
        for inner in KINDS:
            kind = getattr(pa, outer)(getattr(pa, inner)(pa.int16()))
            yield f"{outer} of {inner}", pa.array(MATRICES, kind)
        fixed, lists = pa.list_(pa.int8(), 2), getattr(pa, outer)
        yield f"{outer} of fixed lists", pa.array(MATRICES, lists(fixed))
        yield f"fixed lists of {outer}", pa.array(MATRICES, pa.list_(lists(pa.int8()), 2))
    yield "lists of decimals", pa.array([DECIMALS[:2]] * 3)
    yield "lists with nulls", pa.array([[1, None], [3, 4], [5, 6]])
    yield "empty lists", pa.array([[], [], []], pa.list_(pa.float32()))
    yield "coded ints", dictionary_coded(pa.array([10, 20]))
    yield "coded halves", dictionary_coded(HALVES)
    yield "coded bools", dictionary_coded(pa.array([True, False]))
    yield "coded decimals", dictionary_coded(pa.array(DECIMALS[:2]))
    lists = pa.array([[1, 2], [3, 4]])
    yield "coded lists", pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), lists)
    values = pa.array([10, 20, 10]).dictionary_encode()
    yield "lists of coded", pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), values)
    yield "runs", pa.RunEndEncodedArray.from_arrays([2, 3], [1.5, 2.5])
    rows = pa.array([2, 0, 0], pa.int32()), pa.array([2, 2, 2], pa.int32())
    yield "views of shared rows", pa.ListViewArray.from_arrays(*rows, pa.array([1, 2, 3, 4]))
    stored = pa.array([1, 0, 1], pa.int8())
    yield "bool8", pa.ExtensionArray.from_storage(pa.bool8(), stored)


COLUMNS = dict(columns_of_three_rows())


def in_files(names):
    """Return the names, of views as values of newer versions: pyarrow 25 writes them."""
    return [pytest.param(n, marks=pytest.mark.newest) if "view" in n else n for n in names]


def in_chunks(column):
    return pa.chunked_array([column.slice(0, 1), column.slice(1, 0), column.slice(1)])


def cut_column(column):
    whole = in_chunks(column)
    return [column, column.slice(1), whole, whole.slice(1), whole.slice(1, 1)]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_as_an_array(name):
    for column in cut_column(COLUMNS[name]):
        values = np.array(column.to_pylist(), float)  # None is NaN
        for array in (column_array("a", column), to_numbers("a", column)):
            np.testing.assert_allclose(array.astype(float), values, rtol=1e-15)
            assert len(array) == len(column)
        table = pa.table({"a": column, "b": pa.array(np.arange(len(column)))})
        rows = np.concatenate([values.reshape(len(column), -1), table["b"].to_numpy()[:, None]], 1)
        np.testing.assert_allclose(stack_columns("x", table).astype(float), rows, rtol=1e-15)


@pytest.mark.parametrize("name", in_files(COLUMNS))
def test_a_column_of_a_file(name, tmp_path):
    path = tmp_path / "a.parquet"
    try:
        pq.write_table(pa.table({"a": COLUMNS[name]}), path)
    except pa.ArrowNotImplementedError:
        assert name in ("coded lists", "runs")
        return
    values = np.array(COLUMNS[name].to_pylist(), float)
    read = [read_table(path)["a"]]
    read += [X["a"] for (X,) in arrow_dataset(path).batches(3, None, 0)]
    assert len(read) == 2
    for array in read:
        np.testing.assert_allclose(array.astype(float), values, rtol=1e-15)


def test_no_rows_are_no_lists_that_differ():
    for name, column in COLUMNS.items():
        assert len(column_array(name, column.slice(0, 0))) == 0
    assert len(COLUMNS) > 60


@pytest.mark.parametrize("kind", [*KINDS, "fixed"])
def test_lists_that_no_array_holds(kind):
    make = (lambda t: pa.list_(t, 1)) if kind == "fixed" else getattr(pa, kind)
    with pytest.raises(DataError, match=naming("column 'a'", "missing")):
        column_array("a", pa.array([[1], None], make(pa.int8())))
    with pytest.raises(DataError, match=naming("column 'a'", "missing")):
        column_array("a", pa.array([[[1]], [None]], pa.list_(make(pa.int8()))))
    if kind != "fixed":
        with pytest.raises(DataError, match=naming("column 'a'", "length")):
            column_array("a", pa.array([[1], [1, 2]], make(pa.int8())))


def test_tensors_in_another_order_of_axes(tmp_path):
    flat = pa.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]], pa.list_(pa.int32(), 6))
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    column = pa.ExtensionArray.from_storage(kind, flat)
    tensors = column.to_numpy_ndarray()
    assert tensors.shape == (2, 3, 2)
    for taken in cut_column(column):
        np.testing.assert_array_equal(to_numbers("a", taken), tensors[-len(taken) :][: len(taken)])
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet")
    np.testing.assert_array_equal(read_table(tmp_path / "a.parquet")["a"], tensors)
    np.testing.assert_array_equal(stack_columns("x", pa.table({"a": column})), tensors)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_frames_of_nested_lists_and_decimals(name):
    frame = pytest.importorskip(name).DataFrame
    made = frame({"a": [[[1, 2]], [[3, 4]]], "b": [Decimal("0.5"), Decimal("1.5")]})
    np.testing.assert_array_equal(stack_columns("x", made), [[1, 2, 0.5], [3, 4, 1.5]])


@pytest.mark.parametrize("kind", ["large_list", "tensor", *map(in_sweep, ["list_", "fixed"])])
def test_the_shell_trains_on_lists(kind, tmp_path):
    X = np.random.default_rng(0).normal(size=(40, 2)).astype("f")
    if kind == "tensor":
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    else:
        make = (lambda t: pa.list_(t, 2)) if kind == "fixed" else getattr(pa, kind)
        column = pa.array(X.tolist(), make(pa.float32()))
    table = pa.table({"x": column, "label": X.sum(1)})
    data, folder, model = tmp_path / "rows.parquet", tmp_path / "rows", tmp_path / "model.onnx"
    folder.mkdir()
    pq.write_table(table, data), pq.write_table(table, folder / "0.parquet")
    onnx.save(two_column_model(), model)
    expected = og.Trainer(two_column_model(), "squared_error").predict(X)
    given = ["--target", "label", "--loss", "squared_error"]
    for source in (data, folder):  # in memory, and read while training

        def shell(command, *more, source=source):
            made = CliRunner().invoke(app, [command, str(model), str(source), *map(str, more)])
            assert made.exit_code == 0, made.output
            return made

        options = ("--epochs", 1, "--validation", 0)
        shell("train", *given, *options, "--output", tmp_path / f"{source.name}.onnx")
        shell("eval", *given)
        out = tmp_path / f"{source.name}.npz"
        shell("predict", "--ignore", "label", "--output", out)
        np.testing.assert_allclose(np.load(out)["y"], expected, rtol=1e-5)
