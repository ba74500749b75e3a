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

from onnxgrad.data import read_table
from onnxgrad.reporting import warn_once
from tests.support.commands import (
    as_json,
    assert_names,
    csv_rows,
    features,
    refusal,
    save_model,
    succeed,
    write_csv_columns,
)
from tests.support.running import run_named

REGRESSION = ("--target", "y", "--loss", "squared_error")


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


@pytest.mark.parametrize(
    ("output", "batch"),
    [("o.csv", 7), ("o.csv", 256), ("o.tsv", 7), ("o.pq", 7), ("o.parquet", 256), ("o.npz", 7),
     ("O.CSV", 256)],
)  # fmt: skip
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
    assert f"{output} exists" in refusal(*line)
    given = read_table(output)  # what is written can be read
    assert given.columns == list(columns)
    for name, array in columns.items():
        np.testing.assert_array_equal(given[name], array)


def test_files_that_are_refused(here):
    line = ("predict", "layers.onnx", "kinds.csv", "--ignore", "kind")
    assert "'.txt'" in refusal(*line, "-o", "o.txt")
    assert "kinds.csv is" in refusal(*line, "-o", "kinds.csv", "--overwrite")
    assert_names(refusal(*line, "--json"), "standard output")
    assert "output 'q'" in refusal(*line, "--outputs", "q")
    assert "'x' takes 2 values" in refusal(*line[:3])
    assert not [f for f in os.listdir() if "onnxgrad" in f]


def test_numbers_in_csv_are_exact(here):
    succeed("predict", "layers.onnx", "kinds.csv", "--ignore", "kind", "-o", "o.csv")
    [z] = run_named("layers.onnx", x=features()).values()
    columns = [np.float32(c) for c in read("o.csv").values()]
    np.testing.assert_array_equal(np.stack(columns, 1), z)


def test_a_static_batch_and_an_output_without_rows(here):
    text = (
        "g (float[16,2] x) => (float[16,1] y, float total) { y = MatMul(x, W) "
        "total = ReduceSum <keepdims = 0> (y) }"
    )
    save_model("static.onnx", text, W=[[2.0], [1.0]])
    line = ("predict", "static.onnx", "rows.csv", "--ignore", "y", "-o", "o.npz")
    said = succeed(*line).stderr
    assert "output total has" in said
    np.testing.assert_allclose(np.load("o.npz")["y"], features() @ [[2], [1]], rtol=1e-5)
    assert "'total' has" in refusal(*line[:-1], "p.npz", "--outputs", "total")


def test_a_file_that_takes_one_row_at_a_time(here, caplog):
    """It states any number of rows; the shell runs it row by row, and says so."""
    text = "f (float[N,2] x) => (float[N,2] y) { r = Reshape(x, one) y = MatMul(r, w) }"
    weights = np.float32([[1, 2], [3, 4]])
    save_model("one_row.onnx", text, one=np.int64([1, 2]), w=weights)
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    write_csv_columns("rows.csv", a=rows[:, 0], b=rows[:, 1])
    warn_once.cache_clear()
    succeed("predict", "one_row.onnx", "rows.csv", "-o", "o.npz")
    assert_names(caplog.text, "one row at a time")
    np.testing.assert_allclose(np.load("o.npz")["y"], rows @ weights)


def test_columns_of_a_training_are_taken_by_name(here):
    succeed("train", "linear.onnx", "rows.csv", *REGRESSION, "--epochs", 1, "--no-curves")
    a, b = features().T
    write_csv_columns(here / "turned.csv", b=b, a=a)
    said = succeed("predict", "trained.onnx", "turned.csv", "-o", "o.npz").stderr
    assert_names(said, "by name ... training: a, b ... data has b, a")
    [y] = run_named("trained.onnx", x=features()).values()
    np.testing.assert_allclose(np.load("o.npz")["y"], y, rtol=1e-5)
    said = succeed("predict", "trained.onnx", "rows.csv", "-o", "o.npz", "--overwrite").stderr
    assert "ignored columns: y" in said  # the label of the training


def test_eval_computes_what_the_file_does(here):
    a, b = features().T
    weight = np.linspace(0, 1, 40).round(3)
    write_csv_columns(here / "weighed.csv", a=a, b=b, y=a, w=weight)
    line = ("eval", "linear.onnx", "weighed.csv", *REGRESSION)
    [y] = run_named("linear.onnx", x=features()).values()
    errors = y[:, 0].astype(float) - a
    result = as_json(*line, "--ignore", "w", "--metrics", "mae")
    assert result["loss"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert result["metrics"]["mae"] == pytest.approx(abs(errors).mean(), rel=1e-5)
    result = as_json(*line, "--sample-weight", "w")
    assert result["loss"] == pytest.approx(np.average(errors**2, weights=weight), rel=1e-5)


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
    message = refusal("eval", "linear.onnx", "-", *REGRESSION, input="a,b,y\n1,,2\n3,oh,4\n")
    assert_names(message, "'standard input' ... column 'b' ... row 2: 'oh'")


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
        (("train", "-", "-", *fast, "-o", "no.onnx"), "standard input"),
        (
            ("train", "linear.onnx", "rows.csv", *fast, "-o", "-", "--json"),
            "--json ... standard output",
        ),
        (("train", "-", "rows.csv", *fast, "-o", "no.onnx"), "ONNX"),
    ):
        assert_names(refusal(*arguments, input=b"nothing"), message)


# -- labels inside models ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def labeled_classifier():
    """A classifier of scikit-learn with labels that are texts, and its model."""
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    a, b = features().T  # as `write_all` has them
    labels = np.array(["cat", "dog", "eel"])[np.where(a > b, 1, 0) + (a + b > 1)]
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1)).fit(features(), labels)
    return classifier, labels, skl2onnx.to_onnx(classifier, features()[:1])


@pytest.fixture
def pipeline(here, labeled_classifier):
    """The classifier and its labels; its model is the file `names.onnx`."""
    classifier, labels, model = labeled_classifier
    onnx.save(model, "names.onnx")
    return classifier, labels


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
    parts = f"'other.csv' ... column 'kind' ... cat, dog, eel ... cow ... row ... {row}"
    assert_names(refusal(*line), parts)


def test_what_a_failed_prediction_leaves(here, monkeypatch):
    (here / "o.csv").write_text("precious")
    (here / "bad.csv").write_text((here / "rows.csv").read_text() + "1,oh,3\n")
    line = ("predict", "linear.onnx", "bad.csv", "--ignore", "y", "-o", "o.csv", "--overwrite")
    assert_names(refusal(*line), "column 'b' ... row 41")
    assert (here / "o.csv").read_text() == "precious"
    assert not [f for f in os.listdir() if "onnxgrad" in f]


def test_spreadsheets_find_no_formula(here):
    """They would run the name of a class, which a stranger may have chosen."""
    labels = [["=1+1", "-2", "rosé"], ["@sum(a)", "+x", "-y"]]
    model = onnx.load("layers.onnx")
    model.graph.output[0].name = model.graph.node[-1].output[0] = "=z"
    expected = []
    for classes in labels:
        del model.metadata_props[:]
        model.metadata_props.add(key="onnxgrad.classes", value=json.dumps(classes))
        onnx.save(model, "named.onnx")
        line = ("predict", "named.onnx", "kinds.csv", "--ignore", "kind", "--overwrite", "--output")
        succeed(*line, "out.csv")
        succeed(*line, "out.parquet")
        kept = pq.read_table("out.parquet")
        rows = csv_rows(Path("out.csv").read_text())
        assert "'=z_0" in rows[0]
        expected += [(row["label"], kept["label"][i].as_py()) for i, row in enumerate(rows)]
    told = {told for told, _ in expected}
    assert told <= {"'=1+1", "-2", "rosé", "'@sum(a)", "'+x", "'-y"}
    assert {told.removeprefix("'") for told in told} == {kept for _, kept in expected}
    assert len(told) > 2
