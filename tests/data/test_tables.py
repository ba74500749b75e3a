"""Data files and their columns, as what a model is fed."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import onnxgrad as og
from onnxgrad.data.arrays import DataError
from onnxgrad.data.cells import Cells, RowNumbers
from onnxgrad.data.columns import Names
from onnxgrad.data.field import Field
from onnxgrad.data.tables import read_table
from onnxgrad.losses.info import LossInfo
from onnxgrad.operators.shapes import dims
from onnxgrad.tasks.tables import Targets
from tests.support.errors import naming
from tests.support.models import initializer_arrays
from tests.support.small_models import two_column_model


def typed_value(name, dtype, *dims):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType[dtype]), shape=ir.Shape(dims))


def image_input(*dims):
    return typed_value("image", "FLOAT", *dims)


def assigned_columns(table, targets, inputs, trained=None):
    rest = [name for name in table if name not in targets]
    arrays = [name for name in rest if table[name].ndim > 1]
    return (trained or Names()).columns_by_input(rest, [x.name for x in inputs], arrays)


def as_value(table, names, x, what, **limits):
    cells = Cells({name: table[name] for name in names}, what, RowNumbers())
    return Field(x.name, x.dtype.numpy(), dims(x), **limits).convert_cells(cells)


def fed_array(table, x, targets=("y",)):
    return as_value(table, assigned_columns(table, targets, [x])[x.name], x, f"input {x.name!r}")


def label_array(table, targets, label, info):
    limits = {"classes": info.classes, "ignored": info.ignore_index, "allowed": info.bounds}
    return as_value(table, targets, label, f"target {targets}", **limits)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "a.csv"
    os.mkfifo(path)
    with ThreadPoolExecutor() as pool:
        pool.submit(path.write_text, "a,b\n1,2.5\n3,4.5\n")
        table = read_table(path)
    np.testing.assert_array_equal(table["b"], [2.5, 4.5])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_text("a;b;name\n1;2.5;x\n3;;y\n".replace(";", delimiter))
    table = read_table(path)
    assert list(table) == ["a", "b", "name"]
    assert table["a"].tolist() == [1, 3]
    assert table["b"][0] == 2.5
    assert np.isnan(table["b"][1])
    assert table["name"].tolist() == ["x", "y"]


def test_npz(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((3, 2, 2)), y=[1, 2, 3])
    assert read_table(tmp_path / "a.npz")["x"].shape == (3, 2, 2)


def csv_file(text):
    return "a.csv", lambda path: path.write_text(text)


def npz_file(**arrays):
    return "a.npz", lambda path: np.savez(path, **arrays)


def parquet_table_file(**columns):
    return "a.parquet", lambda path: pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        (("a.csv", lambda path: None), ["a.csv", "No such"]),
        (("a.csv", lambda path: path.mkdir()), ["a.csv", "directory"]),
        (("a.txt", lambda path: path.write_text("a")), [".csv, .tsv, .parquet, .npz"]),
        (csv_file(""), ["damaged", "mpty"]),
        (csv_file("a,b\n"), ["no rows"]),
        (csv_file("a,b\n1,2\n1\n"), ["damaged", "2 columns", "got 1"]),
        (csv_file("a,a\n1,2\n"), ["two columns", "'a'"]),
        (("a.parquet", lambda path: path.write_text("PAR1")), ["damaged", ".parquet"]),
        (parquet_table_file(a=[[1], [1, 2]]), ["column 'a'", "length"]),
        (parquet_table_file(a=[[1], None]), ["column 'a'", "missing"]),
        (("a.npz", lambda path: path.write_bytes(b"PK\3\4 cut")), ["damaged", ".npz"]),
        (npz_file(a=np.array([{}])), ["damaged", "bject arrays"]),
        (npz_file(a=1.0), ["'a'", "single"]),
        (npz_file(a=np.zeros((0, 2))), ["no rows"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path, file, parts):
    name, write = file
    write(tmp_path / name)
    with pytest.raises(DataError, match=naming(*parts)):
        read_table(tmp_path / name)


def test_single_input_takes_all_columns_in_order():
    table = {"a": np.array([1, 2]), "y": np.array([0, 1]), "b": np.array([[3, 4, 5], [6, 7, 8]])}
    made = fed_array(table, image_input("N", 1, 2, 2))
    assert made.dtype == np.float32
    assert made.tolist() == [[[[1, 3], [4, 5]]], [[[2, 6], [7, 8]]]]
    assert fed_array(table, image_input("N", "k")).shape == (2, 4)


def test_single_input_takes_the_array_of_its_name():
    table = {"image": np.ones((2, 4)), "id": np.arange(2), "y": np.arange(2)}
    assert assigned_columns(table, ["y"], [image_input("N", 4)])["image"] == ["image"]


def test_several_inputs_take_the_column_of_their_name():
    table = {"a": np.array([1.0, 2.0]), "ids": np.array([[1.0, 2], [3, 4]]), "y": np.arange(2)}
    inputs = [typed_value("ids", "INT64", "N", 2), typed_value("a", "DOUBLE", "N", 1)]
    columns = assigned_columns(table, ["y"], inputs)
    assert columns == {"ids": ["ids"], "a": ["a"]}
    ids, a = (as_value(table, columns[x.name], x, x.name) for x in inputs)
    assert ids.dtype == np.int64
    assert a.tolist() == [[1.0], [2.0]]
    with pytest.raises(ValueError, match=r"column .* 'b'.*Valid: 'a', 'ids'"):
        assigned_columns(table, ["y"], [*inputs, typed_value("b", "FLOAT", "N")])


def test_text_input():
    table = {"s": np.array(["u", "v"], object), "y": np.arange(2)}
    assert fed_array(table, typed_value("s", "STRING", "N", 1)).tolist() == [["u"], ["v"]]


@pytest.mark.parametrize(
    ("column", "x", "parts"),
    [
        ([1.0, 2.0], image_input("N", 1, 8, 8), ["'image'", "64 values", "1 "]),
        ([[1.0, 2, 3]] * 2, image_input("N", 2, "k"), ["multiple of 2"]),
        (np.array(["1", "x"], object), image_input("N", 1), ["column 'c'", "row 2", "'x'"]),
        (np.array(["2020-01-01"] * 2, "M8[D]"), image_input("N", 1), ["column 'c'", "datetime64"]),
        ([1, np.nan], image_input("N", 1), ["1 cell", "empty", "column 'c'", "row 2", "fill"]),
        ([np.inf, -np.inf], image_input("N", 1), ["2 cells", "column 'c'", "rows 1, 2"]),
        ([1, 1e39], image_input("N", 1), ["float32", "infinity", "1e+39", "row 2"]),
        ([1, 1.5], typed_value("i", "INT64", "N", 1), ["int64", "1.5", "row 2"]),
        ([1, 300], typed_value("i", "UINT8", "N", 1), ["uint8", "300", "row 2"]),
    ],
)
def test_columns_that_an_input_does_not_take(column, x, parts):
    with pytest.raises(DataError, match=naming(*parts)):
        fed_array({"c": np.asarray(column), "y": np.arange(2)}, x)


def info_of(label: ir.Value, loss: str) -> LossInfo:
    if label.dtype == ir.DataType.INT64:
        return LossInfo(classes=3, ignore_index=-100, loss=loss)
    return LossInfo(loss=loss)


@pytest.mark.parametrize(
    ("y", "label", "loss", "expected"),
    [
        ([0.0, 2.0], typed_value("l", "INT64", "N"), "cross_entropy", [0, 2]),
        ([0, -100], typed_value("l", "INT64", "N"), "cross_entropy", [0, -100]),
        ([0, 1], typed_value("l", "INT64", "N", 1), "log", [[0], [1]]),
        ([3, 4], typed_value("l", "DOUBLE", "N", 1), "squared_error", [[3.0], [4.0]]),
        ([3, 4], typed_value("l", "FLOAT", "N"), "squared_error", [3.0, 4.0]),
        ([0, 1], typed_value("l", "FLOAT", "N", 1), "binary_cross_entropy", [[0.0], [1.0]]),
    ],
)
def test_labels(y, label, loss, expected):
    made = label_array({"y": np.array(y)}, ["y"], label, info_of(label, loss))
    assert made.dtype == label.dtype.numpy()
    assert made.tolist() == expected


INDICES, COLUMN = ("INT64", "N"), ("FLOAT", "N", 1)


@pytest.mark.parametrize(
    ("y", "label", "loss", "parts"),
    [
        ([0, 3], INDICES, "cross_entropy", ["outside 0..2", "3", "row 2"]),
        ([-1, 0], INDICES, "cross_entropy", ["outside 0..2", "-1", "row 1"]),
        ([0.5, 0], INDICES, "cross_entropy", ["int64", "0.5", "row 1"]),
        ([0, 2], COLUMN, "binary_cross_entropy", ["between 0 and 1", "2"]),
        ([0, 2], COLUMN, "hinge", ["-1 and 1, or 0 and 1", "2"]),
        ([-1, 2], COLUMN, "poisson", ["0 or more", "-1", "row 1"]),
        ([0, 2], ("FLOAT", "N", 4), "l2", ["4 values", "1"]),
    ],
)
def test_labels_that_a_loss_does_not_take(y, label, loss, parts):
    label = typed_value("l", *label)
    with pytest.raises(DataError, match=naming(*parts)):
        label_array({"y": np.array(y)}, ["y"], label, info_of(label, loss))


def test_several_targets():
    table = {"a": np.array([1, 2]), "b": np.array([3, 4])}
    made = label_array(table, ["b", "a"], typed_value("l", "FLOAT", "N", 2), LossInfo())
    assert made.tolist() == [[3, 1], [4, 2]]


def test_unknown_target_names_the_close_ones():
    with pytest.raises(ValueError, match=naming("'lable'", "'label'")):
        Targets.choose(["lable"], ["label"], Names())


def test_all_columns_are_targets():
    with pytest.raises(DataError, match=naming("column", "label")):
        assigned_columns({"a": np.arange(2)}, ["a"], [image_input("N", 1)])


def test_arrays_of_different_length():
    table = {"a": np.arange(2), "b": np.arange(3), "y": np.arange(2)}
    with pytest.raises(DataError, match=naming("rows", "'b': 3")):
        fed_array(table, image_input("N", 2))


def test_columns_that_the_model_was_trained_on():
    table = {"b": np.array([1, 2]), "y": np.arange(2), "a": np.array([3, 4])}
    named = assigned_columns(table, ["y"], [image_input("N", 2)], Names({"image": ["b", "a"]}))[
        "image"
    ]
    assert named == ["b", "a"]
    assert fed_array(table, image_input("N", 2)).tolist() == [[1, 3], [2, 4]]
    by_name = assigned_columns(table, ["y"], [image_input("N", 2)], Names({"image": ["a", "b"]}))[
        "image"
    ]
    assert by_name == ["a", "b"]
    assert as_value(table, by_name, image_input("N", 2), "x").tolist() == [[3, 1], [4, 2]]
    with pytest.raises(DataError, match="no column 'c'"):
        assigned_columns(table, ["y"], [image_input("N", 2)], Names({"image": ["a", "c"]}))
    inputs = [typed_value("u", "FLOAT", "N", 2), typed_value("v", "FLOAT", "N", 1)]
    names = Names({"u": ["a", "b"], "v": ["c"]})
    columns = assigned_columns(table | {"c": np.arange(2)}, ["y"], inputs, names)
    assert as_value(table, columns["u"], inputs[0], "u").tolist() == [[3, 1], [4, 2]]
    with pytest.raises(ValueError, match=r"column .* 'c'"):
        assigned_columns(table, ["y"], inputs, names)


# -- the table in Python ------------------------------------------------------------------------

CSV = "a,b,kind,y\n1,2,cat,3\n,1,dog,1\n4,1,dog,9\n2,5,cat,1\n"


@pytest.fixture
def csv_path(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(CSV)
    return path


def test_a_table_trains_as_its_arrays(csv_path):
    table = read_table(csv_path, ignore=["kind"], drop_missing=True)
    assert table.columns == ["a", "b", "y"]
    assert re.search(naming("1 of 4 rows", ": 2"), table.note)
    arrays = np.float32([[1, 2], [4, 1], [2, 5]]), np.float32([3, 9, 1])
    trained = [
        og.Trainer(two_column_model(), "squared_error", optimizer="sgd")
        .fit(*data, batch_size=3)
        .model
        for data in ((table, "y"), arrays)
    ]
    weights = [initializer_arrays(model) for model in trained]
    for name, array in weights[1].items():
        np.testing.assert_array_equal(weights[0][name], array)
    start = initializer_arrays(two_column_model())["w"]
    assert (weights[0]["w"] != start).any()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"ignore": ["kind"]}, ["1 cell", "column 'a'", "row 2", "drop_missing=True"]),
        ({"drop_missing": True}, ["'kind'", "row 1", "'cat'", "ignore=['kind"]),
        ({"ignore": ["kinds"]}, ["ignore=", "'kinds'", "'kind'"]),
    ],
)
def test_errors_of_a_table_name_arguments_of_python(csv_path, options, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        og.Trainer(two_column_model(), "squared_error").fit(read_table(csv_path, **options), "y")


def test_rows_keep_their_numbers(csv_path):
    table = read_table(csv_path, drop_missing=True)
    for part in (table.rows(slice(1, None)), table.rows(np.array([1, 2]))):
        assert part["y"].tolist() == [9, 1]
        with pytest.raises(DataError, match=naming("classes", "dog", "cat", "row 4")):
            part.encode("kind", ["dog"])


def test_labels_are_encoded(csv_path):
    table = read_table(csv_path).encode("kind", ["dog", "cat"])
    assert table["kind"].tolist() == [1, 0, 0, 1]
    assert table.encode("kind", ["dog", "cat"])["kind"].tolist() == [1, 0, 0, 1]
    assert read_table(csv_path).encode("y", [9, 3, 1])["y"].tolist() == [1, 2, 0, 2]
    with pytest.raises(DataError, match=naming("cat, eel", "dog", "rows 2, 3")):
        read_table(csv_path).encode("kind", ["cat", "eel"])
    with pytest.raises(DataError, match=r"with classes=\['cat', 'dog'\], or"):
        read_table(csv_path).encode("kind", None)
