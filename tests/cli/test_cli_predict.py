"""`onnxgrad predict` and `eval`: files, pipes, labels inside models; and models from pipes."""

import io
import json
import os
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from onnxgrad import read_table
from tests.support.commands import (
    HEADER,
    as_json,
    features,
    refused,
    save,
    succeed,
    write_all,
    write_csv,
)
from tests.support.running import run_named

REGRESSION = ("--target", "y", "--loss", "squared_error")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


def read(path):
    """Return the columns of a file of predictions."""
    if path.endswith(".npz"):
        return dict(np.load(path))
    table = (
        pq.read_table(path)
        if path.endswith(("parquet", "pq"))
        else pa.csv.read_csv(
            path, parse_options=pa.csv.ParseOptions(delimiter="\t" if path.endswith("tsv") else ",")
        )
    )
    return {name: table[name].to_numpy() for name in table.column_names}


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["o.csv", "o.tsv", "o.parquet", "o.pq", "o.npz", "O.CSV"])
@pytest.mark.parametrize("batch", [7, 256])
def test_every_kind_of_file(here, output, batch):
    line = ("predict", "layers.onnx", "kinds.csv", "--ignore", "kind", "-o", output)
    result = as_json(*line, "--batch-size", batch)
    assert (result["files"], result["rows"]) == ([output], 40)
    columns = read(output)
    [z] = run_named("layers.onnx", x=features()).values()
    if "npz" in output:
        np.testing.assert_allclose(columns["z"], z, rtol=1e-6)
    else:
        assert list(columns) == ["z_0", "z_1", "z_2"]
        np.testing.assert_allclose(np.stack(list(columns.values()), 1), z, rtol=1e-6)
    assert f"{output} exists" in refused(*line)
    given = read_table(output)  # what is written can be read
    assert given.columns == list(columns)
    for name, array in columns.items():
        np.testing.assert_array_equal(given[name], array)


def test_files_that_are_refused(here):
    line = ("predict", "layers.onnx", "kinds.csv", "--ignore", "kind")
    assert "'.txt'" in refused(*line, "-o", "o.txt")
    assert "kinds.csv is the input file" in refused(*line, "-o", "kinds.csv", "--overwrite")
    assert "both go to standard output" in refused(*line, "--json")
    assert "output 'q'" in refused(*line, "--outputs", "q")
    assert "'x' takes 2 values a row" in refused(*line[:3])
    assert not [f for f in os.listdir() if "onnxgrad" in f]


def test_numbers_in_csv_are_exact(here):
    succeed("predict", "layers.onnx", "kinds.csv", "--ignore", "kind", "-o", "o.csv")
    [z] = run_named("layers.onnx", x=features()).values()
    columns = [np.float32(c) for c in read("o.csv").values()]
    np.testing.assert_array_equal(np.stack(columns, 1), z)


def test_a_static_batch_and_an_output_without_rows(here):
    text = HEADER + (
        "g (float[16,2] x) => (float[16,1] y, float total) { y = MatMul(x, W) "
        "total = ReduceSum <keepdims = 0> (y) }"
    )
    save("static.onnx", text, W=[[2.0], [1.0]])
    line = ("predict", "static.onnx", "rows.csv", "--ignore", "y", "-o", "o.npz")
    said = succeed(*line).stderr
    assert "output total has no rows, and is left out" in said
    np.testing.assert_allclose(np.load("o.npz")["y"], features() @ [[2], [1]], rtol=1e-5)
    assert "'total' has no row for each row" in refused(*line[:-1], "p.npz", "--outputs", "total")


def test_columns_of_a_training_are_taken_by_name(here):
    succeed("train", "linear.onnx", "rows.csv", *REGRESSION, "--epochs", 1, "--no-curves")
    a, b = features().T
    write_csv(here / "turned.csv", b=b, a=a)
    said = succeed("predict", "trained.onnx", "turned.csv", "-o", "o.npz").stderr
    assert "are taken by name, in the order of its training: a, b (the data has b, a)" in said
    [y] = run_named("trained.onnx", x=features()).values()
    np.testing.assert_allclose(np.load("o.npz")["y"], y, rtol=1e-5)
    said = succeed("predict", "trained.onnx", "rows.csv", "-o", "o.npz", "--overwrite").stderr
    assert "ignored columns: y" in said  # the label of the training


def test_eval_weighs_rows(here):
    a, b = features().T
    weight = np.linspace(0, 1, 40).round(3)
    write_csv(here / "weighed.csv", a=a, b=b, y=a, w=weight)
    result = as_json("eval", "linear.onnx", "weighed.csv", *REGRESSION, "--sample-weight", "w")
    [y] = run_named("linear.onnx", x=features()).values()
    expected = np.average((y[:, 0].astype(float) - a) ** 2, weights=weight)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)


# -- standard input and output ----------------------------------------------------------------


def test_data_and_predictions_through_pipes(here):
    text = (here / "rows.csv").read_text()
    made = succeed("predict", "linear.onnx", "-", "--ignore", "y", "-o", "-", input=text)
    [y] = run_named("linear.onnx", x=features()).values()
    lines = made.stdout.split()
    assert lines[0].strip('"') == "y"
    np.testing.assert_allclose(np.array(lines[1:], float), y[:, 0], rtol=1e-6)
    result = as_json("eval", "linear.onnx", "-", *REGRESSION, input=text)
    assert result == as_json("eval", "linear.onnx", "rows.csv", *REGRESSION)
    message = refused("eval", "linear.onnx", "-", *REGRESSION, input="a,b,y\n1,,2\n3,oh,4\n")
    assert "'standard input': column 'b' is text, first in row 2: 'oh'" in message


def test_models_through_pipes(here):
    model = (here / "linear.onnx").read_bytes()
    fast = (*REGRESSION, "--epochs", 2, "--seed", 3, "--no-curves")
    made = succeed("train", "-", "rows.csv", *fast, "-o", "-", input=model)
    succeed("train", "linear.onnx", "rows.csv", *fast)
    assert made.stdout_bytes == (here / "trained.onnx").read_bytes()
    assert "training loss" in made.stderr
    gradient = succeed("grad", "-", "-o", "-", input=model)
    names = [y.name for y in onnx.load(io.BytesIO(gradient.stdout_bytes)).graph.output]
    assert names == ["x_grad", "W_grad", "b_grad"]
    shown = json.loads(succeed("show", "-", "--json", input=model).stdout)
    assert shown["nodes"] == 2
    for arguments, message in (
        (("train", "-", "-", *fast, "-o", "no.onnx"), "standard input is only one of them"),
        (("train", "linear.onnx", "rows.csv", *fast, "-o", "-", "--json"), "both go to standard"),
        (("train", "-", "rows.csv", *fast, "-o", "no.onnx"), "no ONNX model"),
    ):
        assert message in refused(*arguments, input=b"nothing")


# -- labels inside models ---------------------------------------------------------------------


@pytest.fixture
def pipeline(here):
    """A classifier of scikit-learn with labels that are texts, as `names.onnx`."""
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    table = pa.csv.read_csv("names.csv")
    labels = table["kind"].to_numpy(zero_copy_only=False).astype(str)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1)).fit(features(), labels)
    onnx.save(skl2onnx.to_onnx(model, features()[:1]), "names.onnx")
    return model, labels


CLASSES = ("names.csv", "--target", "kind", "--loss", "cross_entropy")


def test_eval_of_a_classifier_with_labels(pipeline):
    from sklearn.metrics import accuracy_score, log_loss

    model, labels = pipeline
    result = as_json("eval", "names.onnx", *CLASSES)
    p = model.predict_proba(features())
    assert result["loss"] == pytest.approx(log_loss(labels, p), rel=1e-4)
    expected = accuracy_score(labels, model.predict(features()))
    assert result["metrics"]["accuracy"] == pytest.approx(expected)


def test_predictions_of_a_classifier_with_labels(pipeline):
    model, _ = pipeline
    succeed("predict", "names.onnx", "names.csv", "--ignore", "kind", "-o", "o.csv")
    columns = read("o.csv")
    assert columns["output_label"].tolist() == model.predict(features()).tolist()
    p = np.stack([columns[f"output_probability_{name}"] for name in model.classes_], 1)
    np.testing.assert_allclose(p, model.predict_proba(features()), rtol=1e-4, atol=1e-6)


def test_training_of_a_classifier_with_labels(pipeline):
    model, labels = pipeline
    more = ("--epochs", 40, "--lr", 0.05, "--validation", 0, "--no-curves", "--json")
    result = json.loads(succeed("train", "names.onnx", *CLASSES, *more).stdout)
    assert result["loss"] < as_json("eval", "names.onnx", *CLASSES)["loss"]
    succeed("predict", "trained.onnx", "names.csv", "-o", "o.csv", "--outputs", "output_label")
    assert (read("o.csv")["output_label"] == labels).mean() >= model.score(features(), labels)
    line = ("train", "names.onnx", "other.csv", *CLASSES[1:], "-o", "no.onnx")
    text = Path("names.csv").read_text().replace("eel", "cow")
    Path("other.csv").write_text(text)
    row = next(i for i, line in enumerate(text.split()) if line.endswith("cow"))
    message = refused(*line)
    assert "'other.csv': column 'kind': the classes are cat, dog, eel, not cow (row" in message
    assert f"{row}" in message


def test_what_a_failed_prediction_leaves(here, monkeypatch):
    (here / "o.csv").write_text("precious")
    (here / "bad.csv").write_text((here / "rows.csv").read_text() + "1,oh,3\n")
    line = ("predict", "linear.onnx", "bad.csv", "--ignore", "y", "-o", "o.csv", "--overwrite")
    assert "column 'b' is text, first in row 41" in refused(*line)
    assert (here / "o.csv").read_text() == "precious"
    assert not [f for f in os.listdir() if "onnxgrad" in f]
