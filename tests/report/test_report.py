"""What a training records, and the page of it: against numpy, scikit-learn and the history."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.report import figures, predictions, recorder
from onnxgrad.report.run import load_run
from tests.support.commands import as_json, assert_names, refusal, succeed
from tests.support.errors import naming
from tests.support.models import add_initializers, initializer_arrays, parse_model

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
BAD = "<script>alert(1)</script>&\"'"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 4)).astype(np.float32)
KIND = (X @ RNG.normal(size=(4, 3))).argmax(axis=1)
Y = (X[:, :1] - 2 * X[:, 1:2] + 0.1 * RNG.normal(size=(90, 1))).astype(np.float32)


def recorded_network(outputs, names=("w", "b", "v", "y")):
    """Return a network whose weights and output have these names."""
    w, b, v, y = names
    shapes = {w: (4, 5), b: (5,), v: (5, outputs)}
    rng = np.random.default_rng(1)
    model = parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,4] x) => (float[N,{outputs}] y) {{
            a = MatMul(x, w)  c = Add(a, b)  h = Tanh(c)  y = MatMul(h, v) }}""")
    renamed = dict(zip("wbvy", names, strict=True))
    for node in model.graph.node:
        node.input[:] = [renamed.get(n, n) for n in node.input]
        node.output[:] = [renamed.get(n, n) for n in node.output]
    model.graph.output[0].name = y
    arrays = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    add_initializers(model, arrays)
    return model


def train_recorded(folder, loss="cross_entropy", label=KIND, callbacks=(), names=None, **more):
    """Return a trainer that has been fitted; its records are in a folder, unless it is None."""
    own = {k: more.pop(k) for k in list(more) if k in ("classes", "every_steps", "gradient_norms")}
    recorder = [] if folder is None else [og.callbacks.Recorder(folder, **own)]
    model = recorded_network(3 if loss == "cross_entropy" else 1, names or ("w", "b", "v", "y"))
    fit = {"epochs": 3, "batch_size": 16, "validation": (X[:40], label[:40]), **more}
    metrics = ["accuracy"] if loss == "cross_entropy" else ["mae"]
    trainer = og.Trainer(
        model, loss, learning_rate=0.01, metrics=metrics, callbacks=[*recorder, *callbacks]
    )
    return trainer.fit(X[40:], label[40:], **fit)


@pytest.fixture(scope="module")
def recorded_classifier(tmp_path_factory):
    """A trainer with records of three classes, and their folder, which no test changes."""
    folder = tmp_path_factory.mktemp("classifier") / "deep" / "run"  # not there beforehand
    return train_recorded(folder, classes=["ant", "bee", "cow"]), folder


@pytest.fixture(scope="module")
def recorded_regressor(tmp_path_factory):
    """A trainer with records of a regression, and their folder, which no test changes."""
    folder = tmp_path_factory.mktemp("regressor")
    return train_recorded(folder, "squared_error", Y), folder


@pytest.fixture
def own_run(recorded_classifier, tmp_path):
    """A folder with the records of the classifier but its norms, which a test may change."""
    run = recorded_values(recorded_classifier[1]) | {"norms": []}  # whose curves take a while
    (tmp_path / "run.json").write_text(json.dumps(run))
    return tmp_path


@pytest.fixture(scope="module")
def classifier_page(recorded_classifier, tmp_path_factory):
    """The page of the classifier."""
    return page_of(recorded_classifier[1], output=tmp_path_factory.mktemp("page") / "report.html")


def recorded_values(folder):
    return json.loads(Path(folder, "run.json").read_text())


def page_of(run, **more):
    return og.plot.write_report(run, **more).read_text()


class PageReader(HTMLParser):
    """The tags of a page, and its text; raises for what is not nested."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.cells, self.open, self.text = [], [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "img", "path", "use", "polyline", "rect", "line", "circle"):
            self.open.append(tag)
        self.cells += [""] * (tag in ("td", "th"))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if self.open and tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th", "i") and self.cells:
            self.cells[-1] += data


# -- what is recorded -----------------------------------------------------------------------------


def test_the_training_is_the_same_bit_for_bit(tmp_path, recorded_classifier):
    without = train_recorded(None)
    for with_it in (
        recorded_classifier[0],
        train_recorded(tmp_path, every_steps=2, gradient_norms=False),
    ):
        assert with_it.history == without.history
        for name, w in without.state.weights.items():
            np.testing.assert_array_equal(with_it.state.weights[name], w)


def test_the_history_is_that_of_the_trainer(recorded_classifier):
    trainer, folder = recorded_classifier
    run = recorded_values(folder)
    assert run["format"] == "onnxgrad.run.1"
    assert run["history"] == trainer.history
    assert [s[0] for s in run["steps"]][-1] == run["step"] == trainer.state.step == 12
    for epoch in range(3):  # the losses of the steps of an epoch have its mean
        steps = [s for s in run["steps"] if 4 * epoch < s[0] <= 4 * epoch + 4]
        mean = np.average([s[2] for s in steps], weights=[s[1] for s in steps])
        assert mean == pytest.approx(trainer.history[epoch]["loss"], rel=1e-6)
        assert sum(s[1] for s in steps) == 50


def test_norms_are_those_of_numpy(tmp_path):
    class Keep(og.callbacks.Callback):
        every_steps = 1

        def __init__(self):
            self.weights = {}

        def on_train_begin(self, trainer, state, control):
            self.on_step_end(trainer, state, control)

        def on_step_end(self, trainer, state, control):
            self.weights[state.step] = {n: w.astype(float) for n, w in state.weights.items()}

    keep = Keep()
    model = recorded_network(3)
    recorder = og.callbacks.Recorder(tmp_path, every_steps=2)
    og.Trainer(
        model, "cross_entropy", optimizer="sgd", learning_rate=0.1, callbacks=[recorder, keep]
    ).fit(X, KIND, epochs=2, batch_size=30)
    records = recorded_values(tmp_path)["norms"]
    assert [(r["since"], r["step"]) for r in records] == [(0, 2), (2, 4), (4, 6)]
    for r in records:
        new, old, before = (keep.weights[i] for i in (r["step"], r["since"], r["step"] - 1))
        for name, w in new.items():
            assert r["weight"][name] == pytest.approx(np.linalg.norm(w), rel=1e-6)
            assert r["update"][name] == pytest.approx(np.linalg.norm(w - old[name]), rel=1e-6)
            gradient = (before[name] - w) / 0.1
            assert r["gradient"][name] == pytest.approx(np.linalg.norm(gradient), rel=1e-3)


def test_histograms_are_those_of_numpy(recorded_classifier):
    trainer, folder = recorded_classifier
    run, before = recorded_values(folder), initializer_arrays(recorded_network(3))
    for key, weights in (("before", before), ("after", trainer.state.weights)):
        for name, w in weights.items():
            counts, edges = np.histogram(w.astype(float), predictions.BINS)
            assert run[key][name]["counts"] == counts.tolist()
            assert [run[key][name]["low"], run[key][name]["high"]] == [edges[0], edges[-1]]


def test_confusions_and_worst_rows_are_those_of_scikit_learn(recorded_classifier, classifier_page):
    metrics = pytest.importorskip("sklearn.metrics")
    trainer, folder = recorded_classifier
    found = recorded_values(folder)["examined"]
    scores = trainer.predict(X[:40]).astype(float)
    predicted = scores.argmax(axis=1)
    matrix = np.zeros((3, 3), int)
    for label, prediction, count in found["outputs"][0]["confusion"]:
        matrix[label, prediction] = count
    expected = metrics.confusion_matrix(KIND[:40], predicted, labels=[0, 1, 2])
    np.testing.assert_array_equal(matrix, expected)
    log = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    losses = -log[np.arange(40), KIND[:40]]
    worst = np.argsort(-losses)[:20]
    assert [w["row"] for w in found["worst"]] == worst.tolist()
    np.testing.assert_allclose([w["loss"] for w in found["worst"]], losses[worst], rtol=1e-5)
    values = [w["values"][0] for w in found["worst"]]
    assert [v["label"] for v in values] == [[k] for k in KIND[worst].tolist()]
    assert [v["prediction"] for v in values] == [[k] for k in predicted[worst].tolist()]
    page = PageReader(classifier_page)
    start = page.cells.index("ant")
    right = int(np.trace(expected))
    assert_names(page.text, f"Accuracy {right / 40:.4g} ... 40 labels, {right} of")
    rows = np.array(page.cells[start + 3 : start + 15]).reshape(3, 4)
    assert rows[:, 0].tolist() == ["ant", "bee", "cow"]
    np.testing.assert_array_equal(rows[:, 1:].astype(int), expected)
    assert {"ant", "bee", "cow"} >= {page.cells[page.cells.index("score") + 3]}


def test_an_accuracy_of_one_is_written_with_digits(own_run):
    run = recorded_values(own_run)
    run["examined"]["outputs"][0]["confusion"] = [[0, 0, 30], [1, 1, 40], [2, 2, 2]]
    run["history"][-1]["validation_accuracy"] = 1.0
    (own_run / "run.json").write_text(json.dumps(run))
    page = PageReader(page_of(own_run)).text
    assert_names(page, "Accuracy 1.00 ... 72 labels, 72 of")
    assert re.search(r"validation accuracy\s*1\.00", page)


def test_the_numbers_are_those_of_the_weights_that_are_kept(recorded_classifier, own_run):
    run = recorded_values(own_run)
    kept = {"epoch": 2, "step": 8, "whole": True}
    run |= {"kept": kept, "stop_reason": "callback", "reason": f"loss stood {BAD}"}
    (own_run / "run.json").write_text(json.dumps(run))
    page = PageReader(page_of(own_run)).text
    assert_names(page, f"loss stood {BAD} ... step 8, in epoch 2")
    middle = recorded_classifier[0].history[1]
    assert re.search(rf"loss\s*{middle['loss']:.4g}\s*lowest", page)
    assert re.search(rf"validation loss\s*{middle['validation_loss']:.4g}\s*lowest", page)
    accuracy = middle["validation_accuracy"]
    assert re.search(rf"validation accuracy\s*{accuracy:.4g}0?\s*at step 8", page)


def test_residuals_are_those_of_numpy(recorded_regressor):
    trainer, folder = recorded_regressor
    found = recorded_values(folder)["examined"]
    residuals = (trainer.predict(X[:40]) - Y[:40]).astype(float)[:, 0]
    (column,) = found["outputs"][0]["columns"]
    assert column["mean"] == pytest.approx(residuals.mean(), rel=1e-5)
    assert column["rmse"] == pytest.approx(np.sqrt((residuals**2).mean()), rel=1e-5)
    points = np.array(column["points"])
    np.testing.assert_allclose(points[:, 1] - points[:, 0], residuals, rtol=1e-4, atol=1e-6)
    assert column["residuals"]["counts"] == np.histogram(residuals, predictions.BINS)[0].tolist()
    assert found["worst"][0]["row"] == np.abs(residuals).argmax()
    assert "RMSE" in page_of(folder)


def test_rows_of_a_hold_out_have_their_own_numbers(tmp_path):
    labels = KIND.copy()
    trainer = og.Trainer(
        recorded_network(3), "cross_entropy", callbacks=[og.callbacks.Recorder(tmp_path)]
    )
    trainer.fit(X, labels, epochs=2, validation=0.3)
    found = recorded_values(tmp_path)["examined"]
    assert (found["rows"], found["data"]) == (27, "validation")
    scores = trainer.predict(X).astype(float)
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(90), labels]
    for row in found["worst"]:
        assert row["loss"] == pytest.approx(losses[row["row"]], rel=1e-4)
    assert max(row["row"] for row in found["worst"]) >= 27


def test_scores_of_next_tokens_are_compared_with_the_tokens_behind(tmp_path):
    rng = np.random.default_rng(2)
    ids, table = rng.integers(0, 5, (8, 6)), rng.normal(size=(5, 5)).astype(np.float32)
    model = parse_model(
        "f (int64[N,T] i) => (float[N,T,5] y) { y = Gather(table, i) }", opset=20, table=table
    )
    trainer = og.Trainer(
        model,
        "cross_entropy",
        loss_options={"shift": True},
        callbacks=[og.callbacks.Recorder(tmp_path, profile=0)],
    )
    trainer.fit(ids, ids, epochs=1, validation=(ids, ids))
    predicted, matrix = trainer.predict(ids)[:, :-1].argmax(axis=-1), np.zeros((5, 5), int)
    np.add.at(matrix, (ids[:, 1:], predicted), 1)
    found = recorded_values(tmp_path)["examined"]
    pairs = [[*pair, matrix[*pair]] for pair in np.argwhere(matrix).tolist()]
    assert found["outputs"][0]["confusion"] == pairs
    for row in found["worst"]:
        (values,) = row["values"]
        assert values["label"] == ids[row["row"], 1:].tolist()
        assert values["prediction"] == predicted[row["row"]].tolist()


def test_operators_are_those_of_a_step(recorded_classifier):
    rows = {row[0]: row for row in recorded_values(recorded_classifier[1])["operators"]["rows"]}
    products = sum(rows[name][1] for name in rows if name.endswith(("MatMul", "Gemm")))
    assert products == 5  # two forward, one for the input of the second, one for each weight
    # onnxruntime joins the first one with the addition and Tanh; of 16 rows, not of the last 2
    assert rows["FusedGemm"][3] == 16 * 5 * 4
    assert all(row[2] > 0 for row in rows.values())


def test_what_cannot_be_recorded_is_said(tmp_path):
    batches = [(X[i : i + 30], KIND[i : i + 30]) for i in (0, 30)]
    trainer = og.Trainer(
        recorded_network(3), "cross_entropy", callbacks=[og.callbacks.Recorder(tmp_path, profile=0)]
    )
    trainer.fit(iter(batches), epochs=1)
    page = PageReader(page_of(tmp_path)).text
    assert_names(page, "Predictions were not ... no validation data")
    assert_names(page, "by operator were not ... profile=0")


def test_a_training_that_breaks_off_is_recorded(tmp_path):
    class Fail(og.callbacks.Callback):
        def on_epoch_begin(self, trainer, state, control):
            if state.epoch == 2:
                raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        train_recorded(tmp_path, callbacks=[Fail()])
    run = recorded_values(tmp_path)
    assert (run["stop_reason"], len(run["history"])) == ("error", 2)
    page = PageReader(page_of(tmp_path)).text
    assert_names(page, "off: error ... Predictions were not ... broke off")


def test_a_resumed_training_goes_on_with_its_records(tmp_path):
    def fit(epochs, resume=None):
        keep = og.Checkpoint(tmp_path / "ck")
        return train_recorded(tmp_path / "run", callbacks=[keep], epochs=epochs, resume=resume)

    fit(2)
    fit(4, resume=tmp_path / "ck")
    run = recorded_values(tmp_path / "run")
    assert [r["step"] for r in run["norms"]] == [4, 8, 12, 16]
    assert [r["since"] for r in run["norms"]] == [0, 4, 8, 12]
    assert run["first_step"] == 0
    assert len(run["environments"]) == 1
    weights = initializer_arrays(recorded_network(3))
    assert run["before"] == {name: predictions.histogram(w) for name, w in weights.items()}


def test_many_records_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MOST_NORMS", 4)
    train_recorded(tmp_path, epochs=8)
    run = recorded_values(tmp_path)
    assert [r["step"] for r in run["norms"]] == [4, 20, 32]
    assert [r["since"] for r in run["norms"]] == [0, 16, 24]


# -- what is read ---------------------------------------------------------------------------------


def test_a_page_of_a_history_has_its_numbers_and_says_what_is_missing(tmp_path):
    logs = [og.callbacks.History(tmp_path / "log.csv"), og.callbacks.History(tmp_path / "log.json")]
    trainer = train_recorded(None, callbacks=logs)
    for log in ("log.csv", "log.json"):
        page = PageReader(page_of(tmp_path / log, output=tmp_path / "page.html")).text
        last = trainer.history[-1]
        for name in ("loss", "validation_loss", "validation_accuracy"):
            assert f"{last[name]:.4g}" in page
        for missing in ("gradients and updates", "Predictions", "model", "the machine"):
            assert f"{missing} were not" in page or f"{missing} was not" in page
        assert page.count("onnxgrad train --record FOLDER") >= 6


def test_a_page_of_a_checkpoint(tmp_path):
    train_recorded(None, callbacks=[og.Checkpoint(tmp_path), og.callbacks.Norms()])
    run = load_run(tmp_path)
    assert [r["step"] for r in run["norms"]] == [4, 8, 12]
    page = PageReader(page_of(tmp_path)).text
    assert_names(page, "a checkpoint ... of all gradients ... of updates were not")


@pytest.mark.parametrize(
    "content",
    ['{"format": "onnxgrad.run.1", "norms": 3}', '{"format": "other"}', "[1]", "{", "null",
     '{"format": "onnxgrad.run.1", "history": [{"loss": 1}]}',
     '{"format": "onnxgrad.run.1", "examined": {"outputs": [{"kind": "classes"}]}}'],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged.* it again|neither .* folder"):
        og.plot.write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "a.txt").write_text("")
    for name, message in (("a.csv", "'step'"), ("a.txt", "Recorder")):
        with pytest.raises(ValueError, match=naming(name, message)):
            og.plot.write_report(tmp_path / name)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError):
            og.plot.write_report(path)


def test_a_page_is_replaced_only_if_it_may_be(own_run):
    page = og.plot.write_report(own_run)
    with pytest.raises(FileExistsError):
        og.plot.write_report(own_run, overwrite=False)
    page.write_text("")
    assert og.plot.write_report(own_run).read_text()


# -- curves ---------------------------------------------------------------------------------------


def curve_of(tmp_path, losses, name="loss"):
    """Return the curve of a history of these losses: its points in SVG, and what is said below."""
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"step": 4 * i + 4, name: v} for i, v in enumerate(losses)]))
    page = page_of(log)
    figure = page[page.index("<figcaption>") : page.index("</figure>")]
    [line] = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--c0\)', figure)
    points = np.array(re.findall(r"[ML] (\S+) (\S+)", line), float)
    [said] = re.findall(r"Outside of the axis[^<]*", figure) or [""]
    return points, said


def test_the_first_epoch_does_not_flatten_the_others(tmp_path):
    losses = [2.3, 0.5, 0.42, 0.38, 0.35, 0.33, 0.3, 0.29]
    points, said = curve_of(tmp_path, losses)
    assert said.endswith(": 2.3 at step 4.")
    heights = points[:, 1].max() - points[:, 1]  # of the picture, whose axis y goes down
    slope = (heights[1] - heights[-1]) / (losses[1] - losses[-1])
    assert heights[1] - heights[-1] > 100  # points; the figure has 194
    np.testing.assert_allclose(np.diff(heights[1:]), slope * np.diff(losses[1:]), atol=0.01)


def test_an_axis_that_fits_all_values_shows_all(tmp_path):
    for losses in ([1.0, 0.8, 0.6, 0.4, 0.2], [0.5, 1.0, 1.0, 1.0], [3.0, 1.0], [2.0]):
        assert curve_of(tmp_path, losses)[1] == ""


def test_values_of_several_decades_have_a_logarithmic_axis(tmp_path):
    losses = [10.0**-i for i in range(6)]
    points, said = curve_of(tmp_path, losses)
    assert said == ""
    np.testing.assert_allclose(np.diff(points[:, 1]), np.diff(points[:, 1])[0], atol=0.01)
    points, said = curve_of(tmp_path, [1e6, 2.0, 1.9, 1.8, 1.7])  # one value is no decade
    assert said.endswith(": 1e+06 at step 4.")
    np.testing.assert_allclose(np.diff(points[1:, 1]), np.diff(points[1:, 1])[0], atol=0.01)


def test_points_outside_of_an_axis_are_counted(tmp_path):
    losses = np.random.default_rng(0).uniform(0.1, 0.2, 200)
    losses[:4] = 5.0, 4.0, 3.0, 2.0
    losses[100] = 7.0
    _, said = curve_of(tmp_path, losses.tolist(), "score")
    assert_names(said, "5 points ... 7 at step 404.")


def test_small_curves_are_cut_alike():
    losses = [9.0, 0.5, 0.4, 0.3, 0.2]
    heights = [float(y) for y in re.findall(r",(\S+?)[ \"]", str(figures.sparkline(losses)))]
    np.testing.assert_allclose(heights, [2, 2, 2 + 28 / 3, 2 + 56 / 3, 30], atol=0.01)


def test_the_axis_of_a_curve():
    """It is that of most values where the others would take three times its length."""
    values = [*map(float, range(100, 110))]
    assert figures.axis_scale_and_range([[110.0, *values]], False) == (False, None)
    assert figures.axis_scale_and_range([[127.0, *values]], False) == (False, (100, 109))
    assert figures.axis_scale_and_range([[126.9, *values]], False) == (False, None)
    assert figures.axis_scale_and_range([[10.0, 10.0, 10.0]], True) == (False, None)
    assert figures.axis_scale_and_range([[100.0, *values, 1.0]], True) == (True, None)


# -- rows that are files --------------------------------------------------------------------------


def write_gray_images(folder):
    """Write images of two sizes, a class a shade of gray; return their names and shades."""
    image = pytest.importorskip("PIL.Image")
    shades = {}
    for k, kind in enumerate(("dark", "light")):
        (folder / kind).mkdir(parents=True)
        for i in range(10):
            shade, size = 60 + 100 * k + 4 * i, (200, 100) if i % 2 else (8, 8)
            pixels = np.full((*size[::-1], 3), shade, np.uint8)
            image.fromarray(pixels).save(folder / kind / f"{BAD[:4]}{i}.png")
            shades[f"{kind}/{BAD[:4]}{i}.png"] = (shade, size)
    return shades


def test_worst_rows_of_a_folder_have_names_and_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    shades = write_gray_images(tmp_path / "images")
    model = parse_model(
        """f (float[N,3,5,5] x) => (float[N,2] y) {
            m = ReduceMean <keepdims = 0> (x, axes)  y = MatMul(m, w) }""",
        axes=[2, 3],
        w=[[1.0, -1.0]] * 3,  # lighter images are of class 0: wrong
    )
    trainer = og.Trainer(
        model,
        "cross_entropy",
        learning_rate=1e-6,
        callbacks=[og.callbacks.Recorder(tmp_path / "run")],
    )
    trainer.fit(og.data.image_folder(tmp_path / "images", 5), epochs=1, validation=0.5)
    worst = recorded_values(tmp_path / "run")["examined"]["worst"]
    assert len(worst) == 10

    def expected_loss(name):
        score = np.float64([3, -3]) * shades[name][0] / 255
        return np.log(np.exp(score).sum()) - score[int(name.startswith("light"))]

    found = [row["file"] for row in worst]
    assert found == sorted(found, key=expected_loss, reverse=True)
    np.testing.assert_allclose(
        [row["loss"] for row in worst], [*map(expected_loss, found)], rtol=1e-3
    )
    for row in worst:
        shade, size = shades[row["file"]]
        head, _, data = row["picture"].partition(",")
        shown = image.open(io.BytesIO(base64.b64decode(data)))
        assert head == f"data:image/{shown.format.lower()};base64"
        assert shown.size == ((64, 32) if size == (200, 100) else size)
        assert abs(np.asarray(shown).astype(int) - shade).max() <= 1
        assert len(data) < 4000
    page = PageReader(page_of(tmp_path / "run"))
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert sources == [row["picture"] for row in worst]
    assert all(name in page.text for name in found)


def test_pictures_of_a_file_that_are_none_are_left_out(own_run):
    run = recorded_values(own_run)
    good = "data:image/png;base64,AAAA"
    pictures = ["https://a.b/c.png", f'{good}" onload="alert(1)', 3, "data:text/html,<b>", good]
    for row, picture in zip(run["examined"]["worst"], pictures, strict=False):
        row |= {"file": f"{BAD}.png", "picture": picture}
    (own_run / "run.json").write_text(json.dumps(run))
    tags = PageReader(page_of(own_run)).tags
    assert [a["src"] for tag, a in tags if tag == "img"] == [good]
    assert "script" not in {tag for tag, _ in tags}


# -- names are data -------------------------------------------------------------------------------


def hostile_page(folder):
    """Record a training in which all that may be a name is a script; return its page."""
    names = tuple(f"{n}{BAD}" for n in "wbvy")
    train_recorded(folder, names=names, classes=[f"{n}{BAD}" for n in "abc"])
    run = recorded_values(folder)
    run["about"] = {f"k{BAD}": f"v{BAD}", BAD: {BAD: BAD}}
    run["model"] |= {"name": BAD, "producer": BAD, "opsets": {BAD: 1}, "operators": {BAD: 2}}
    run["parameters"] = {BAD: BAD}
    run["environments"][0]["machine"][BAD] = f"{BAD}\x1b\u202e"
    run["begun"], run["stop_reason"] = BAD, BAD
    run["absent"] = {}
    run["operators"]["rows"][0][0] = BAD
    for record in run["history"]:
        record |= {BAD: 0.5, f"validation_{BAD}": 0.25, "$\\frac{": 0.5}
    (Path(folder) / "run.json").write_text(json.dumps(run))
    return og.plot.write_report(folder)


def test_names_of_files_do_not_become_elements(tmp_path):
    folder = tmp_path / "<b>run"
    page = hostile_page(folder).read_text()
    tags = PageReader(page).tags
    names = {name for name, _ in tags}
    assert not names & {"script", "img", "iframe", "object", "b>run", "a"}
    assert not [a for _, attributes in tags for a in attributes if a.startswith("on")]
    assert "<script" not in page
    assert page.count(html.escape("<script>alert(1)</script>")) > 20
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert r"\x1b\u202e" in page


def test_the_page_loads_nothing(classifier_page):
    tags = PageReader(classifier_page).tags
    assert "default-src 'none'" in str(tags)
    for _, attributes in tags:
        for name in ("src", "href", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:"))
    assert not re.search(r"@import|url\((?!#)", classifier_page)


# -- the command line -----------------------------------------------------------------------------


TRAIN = ("train", "layers.onnx", "names.csv", "--target", "kind", "--loss", "cross_entropy")
TRAIN = (*TRAIN, "--classes", "cat,dog,eel", "--epochs", 2)


def test_the_command(working_folder):
    succeed(*TRAIN, "--record", "runs/a", "--history", "h.csv", "--checkpoint", "ck", "--no-curves")
    assert as_json("report", "runs/a") == {"files": ["runs/a/report.html"]}
    page = PageReader((working_folder / "runs/a/report.html").read_text())
    assert {"cat", "dog", "eel", "names.csv"} <= set(page.cells)
    assert "from 1." in page.text
    with open("h.csv", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    assert f"{float(last['validation_loss']):.4g}" in page.text
    with open("names.csv", newline="") as file:
        kinds = list(csv.DictReader(file))
    start = page.cells.index("score") + 1
    worst = [page.cells[i : i + 5] for i in range(start, start + 8 * 5, 5)]
    for row, _, label, _, _ in worst:
        assert kinds[int(row) - 1]["kind"] == label
    assert "exists" in refusal("report", "runs/a")
    succeed("report", "runs/a", "--overwrite")
    succeed("report", "h.csv", "-o", "h.html")
    succeed("report", "ck")


def test_what_the_command_refuses(working_folder):
    (working_folder / "file").write_text("")
    assert "--record file" in refusal(*TRAIN, "--record", "file")
    succeed(*TRAIN, "--record", "runs", "-o", "a.onnx", "--no-curves")
    assert "run.json exists" in refusal(*TRAIN, "--record", "runs", "-o", "b.onnx")
    assert "does not exist" in refusal("report", "nothing")
    assert "RUN is missing" in refusal("report")
    succeed(*TRAIN, "--record", "runs", "--overwrite", "--no-curves")


# -- in a browser ---------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_chromium(tmp_path, recorded_classifier, recorded_regressor):
    sync = pytest.importorskip("playwright.sync_api")
    classes, numbers = (
        og.plot.write_report(run, output=tmp_path / f"{run.name}.html")
        for _, run in (recorded_classifier, recorded_regressor)
    )
    hostile = hostile_page(tmp_path / "hostile")
    views = [
        *[(classes, 1200, "light"), (classes, 320, "dark"), (numbers, 390, "light")],
        *[(hostile, 320, "light"), (hostile, 1200, "dark")],
    ]
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for path, width, scheme in views:
            opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            said: list[str] = []
            opened.on("console", lambda m, said=said: said.append(m.text))
            opened.on("pageerror", lambda e, said=said: said.append(str(e)))
            opened.on("dialog", lambda d, said=said: said.append(d.message))
            opened.on("request", lambda r, said=said: said.append(r.url))
            opened.goto(path.as_uri())
            opened.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert [s for s in said if s not in (path.as_uri(), "data:,")] == []
            ink, paper = (
                opened.evaluate(f"getComputedStyle(document.body).{name}")
                for name in ("color", "backgroundColor")
            )
            light, dark = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in (ink, paper))
            assert (light > dark) == (scheme == "dark")
            opened.close()
        browser.close()
