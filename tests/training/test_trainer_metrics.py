"""Metrics of a `Trainer`: of token losses, of batches without weights, and whose warning it is."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from tests.support.running import PATIENCE


def bigram():
    """Return a model with the scores of the next token after each token."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> bigram (int64[N,T] ids) => (float[N,T,5] logits)
        { logits = Gather(table, ids) }""")
    table = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    return model


def test_metrics_of_a_token_loss_compare_with_the_next_token():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))
    labels = np.where(ids == 4, -100, ids)
    trainer = og.Trainer(
        bigram(), "cross_entropy", loss_options={"shift": True}, metrics=["perplexity", "accuracy"]
    )
    results = trainer.evaluate(ids, labels)
    before, after = trainer.predict(ids)[:, :-1], labels[:, 1:]
    kept = after != -100
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]), rel=1e-5)
    assert results["accuracy"] == np.mean(before.argmax(axis=-1)[kept] == after[kept])


def test_batches_without_weights_have_metrics_that_take_none():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))
    labels = np.roll(ids, 1)

    def share(prediction, label):
        return float(np.mean(prediction.argmax(axis=-1) == label))

    trainer = og.Trainer(bigram(), "cross_entropy", loss_options={"axis": 2}, metrics=[share])
    batches = [(ids[i : i + 4], labels[i : i + 4]) for i in (0, 4)]
    assert trainer.evaluate(batches) == pytest.approx(trainer.evaluate(ids, labels))
    weighted = [(*batches[0], np.full(4, 2.0)), batches[1]]
    with pytest.raises(ValueError, match="'share' has no parameter sample_weight"):
        trainer.evaluate(weighted)


def test_weights_of_some_batches():
    ids = np.random.default_rng(1).integers(0, 5, (8, 6))

    def total(prediction, label, sample_weight=None):
        return float(sample_weight.sum())

    trainer = og.Trainer(bigram(), "cross_entropy", loss_options={"axis": 2}, metrics=[total])
    batches = [(ids[:4], ids[:4], np.full(4, 2.0)), (ids[4:], ids[4:])]
    assert trainer.evaluate(batches)["total"] == 12


def test_the_warning_of_a_weight_without_effect_is_shown_at_the_call():
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y, float[N,1] z)
        <float[2,1] a = {1.0, 2.0}, float[2,1] b = {1.0, 2.0}> { y = MatMul(x, a) z = MatMul(x, b) }
    """)
    X = np.ones((4, 2), np.float32)
    with pytest.warns(UserWarning, match=r"does not depend on \['b'\]") as caught:
        og.Trainer(model, {"y": "mse"}).fit(X, X[:, :1])
    assert caught[0].filename == __file__


def rows(count, swap=False):
    """Return data on which the identity has the accuracy 1, or 0."""
    X = np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)
    return X, X.argmin(axis=1) if swap else X.argmax(axis=1)


def identity(**options):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,2] y)
        <float[2,2] w = {1.0, 0.0, 0.0, 1.0}> { y = MatMul(x, w) }""")
    return og.Trainer(model, "cross_entropy", **options)


class Held(og.Metric):
    """An accuracy whose first batch waits until another evaluation has begun."""

    name, waits = "held", threading.Barrier(2, timeout=PATIENCE)

    def begin(self, prediction):
        self.right = []

    def update(self, prediction, label, weight=None):
        if not self.right:
            self.waits.wait()
        self.right += (prediction.argmax(axis=1) == label).tolist()

    def compute(self):
        return float(np.mean(self.right))


def test_evaluations_at_the_same_time_have_metrics_of_their_own():
    trainer = identity(metrics=["accuracy", Held()])
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(lambda d: trainer.evaluate(*d, batch_size=8), [rows(64), rows(64, True)])
        )
    assert [(r["accuracy"], r["held"]) for r in results] == [(1, 1), (0, 0)]


def test_an_evaluation_inside_of_another_has_metrics_of_its_own():
    inner = []

    class Nested(og.Metric):
        name = "nested"

        def begin(self, prediction):
            self.rows = 0

        def update(self, prediction, label, weight=None):
            if not inner:
                inner.append(None)
                inner.append(trainer.evaluate(*rows(16, True)))
            self.rows += len(label)

        def compute(self):
            return self.rows

    trainer = identity(metrics=["accuracy", Nested()])
    assert trainer.evaluate(*rows(64), batch_size=8)["nested"] == 64
    assert (inner[1]["nested"], inner[1]["accuracy"]) == (16, 0)


def test_metrics_that_cannot_be_copied():
    lock = threading.Lock()

    class Locked(og.Metric):
        name = "locked"

        def __init__(self):
            self.lock = lock

        def begin(self, prediction):
            self.rows = 0

        def update(self, prediction, label, weight=None):
            self.rows += len(label)

        def compute(self):
            return self.rows

    with pytest.raises(
        ValueError, match=r"'locked' cannot be copied.*Locked a method __deepcopy__"
    ):
        identity(metrics=[Locked()]).evaluate(*rows(4))

    class Called:  # a function may hold anything
        __name__ = "called"

        def __init__(self):
            self.lock = lock

        def __call__(self, prediction, label):
            return float(len(label))

    assert identity(metrics=[Called()]).evaluate(*rows(4))["called"] == 4


# -- balanced classes -----------------------------------------------------------------------------


def test_balanced_classes_are_those_of_the_last_fit():
    """Against PyTorch, with weights of scikit-learn from the labels of `fit`."""
    torch = pytest.importorskip("torch")
    weights = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 2)).astype(np.float32)
    first, second = (rng.choice(2, 100, p=p) for p in ([0.8, 0.2], [0.3, 0.7]))
    V, labels = X[:30], rng.choice(2, 30, p=[0.1, 0.9])

    def expected(fitted):
        w = torch.tensor(weights("balanced", classes=np.arange(2), y=fitted))
        scores = torch.from_numpy(trainer.predict(V)).double()
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels), weight=w)
        return pytest.approx(loss.item(), rel=1e-6)

    trainer = identity(class_weight="balanced")
    assert trainer.predict(V).shape == (30, 2)
    for call in (trainer.evaluate, trainer.partial_fit):
        with pytest.raises(ValueError, match="'balanced' is computed from the labels of fit"):
            call(X, first)
    for fitted in (first, second):
        trainer.fit(X, fitted, validation=(V, labels))
        assert trainer.history[-1]["validation_loss"] == expected(fitted)
        for data in ((V, labels), ({"x": V, "label": labels},), ([(V, labels)],)):
            assert trainer.evaluate(*data)["loss"] == expected(fitted)
        one = np.zeros(5, int)
        assert math.isfinite(trainer.evaluate(V[:5], one)["loss"])
    trainer.partial_fit(V, labels)
    assert trainer.evaluate(V, labels)["loss"] == expected(second)


def test_balanced_classes_are_in_the_state(tmp_path):
    X, y = rows(60)
    y[:20] = 0
    trainer = identity(class_weight="balanced").fit(X, y)
    trainer.state.save(tmp_path / "state")
    other = identity(class_weight="balanced")
    other.state = og.TrainState.load(tmp_path / "state")
    assert other.evaluate(X[:9], y[:9]) == trainer.evaluate(X[:9], y[:9])
    stack = og.TrainerStack(
        trainer.model, "cross_entropy", class_weight="balanced", learning_rate=[0.1, 0.2]
    )
    stack.fit(X, y, validation=(X[:9], y[:9]))
    assert stack.evaluate(X[:9], y[:9])["loss"] == pytest.approx(
        stack.history[-1]["validation_loss"]
    )


def test_labels_that_are_ignored_have_no_balance():
    X, y = rows(60)
    ignored = np.where(np.arange(60) < 15, 1, y)
    options = {"loss_options": {"ignore_index": 1}}
    kept = ignored != 1
    one = identity(class_weight="balanced", **options).fit(X, ignored)
    assert one.state.balanced == {0: 1.0}
    assert one.evaluate(X, ignored)["loss"] == pytest.approx(one.evaluate(X[kept], y[kept])["loss"])


# -- metrics that do not fit ----------------------------------------------------------------------

FIT = rows(16)


class Narrow(og.Metric):
    """A metric that takes labels of two axes only."""

    name = "narrow"

    def begin(self, prediction):
        self.count = 0

    def update(self, prediction, label, weight=None):
        if label.ndim != 2:
            raise ValueError(f"narrow takes (rows, outputs), not {label.shape}")

    def compute(self):
        return 0.0


def regression(make, **options):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)
        <float[2,1] w = {1.0, 0.0}> { y = MatMul(x, w) }""")
    return make(model, "mse", **options), (FIT[0], FIT[0][:, :1])


def classes(make, **options):
    return make(identity().model, "cross_entropy", train="w", **options), FIT


def stack(*args, **options):
    return og.TrainerStack(*args, learning_rate=[0.1, 0.2], **options)


def only_once(data):
    return lambda: iter([data])


@pytest.mark.parametrize("make", [og.Trainer, stack])
@pytest.mark.parametrize(("metric", "message", "problem", "forms"), [
    ("f1_macro", "'f1_macro' compares numbers of", regression, "arrays share list iterable"),
    ("top_5_accuracy", "of 2 classes is always 1", classes, "arrays iterable"),
    (Narrow(), r"not \(16,\)", classes, "arrays list"),
])  # fmt: skip
def test_metrics_that_do_not_fit_are_refused_before_the_first_step(
    make, metric, message, problem, forms
):
    for form in forms.split():
        trainer, data = problem(make, metrics=[metric])
        before = {n: w.copy() for n, w in trainer.state.weights.items()}
        validation = {"arrays": data, "share": 0.5, "list": [data], "iterable": only_once(data)}
        message = message if form != "share" else message.replace("16", "8")
        with pytest.raises(ValueError, match=message):
            trainer.fit(*data, validation=validation[form])
        assert not trainer.history
        for name, w in trainer.state.weights.items():
            np.testing.assert_array_equal(w, before[name])


def test_validation_data_that_are_no_list_are_read_once_an_epoch():
    calls = []

    def validation():
        calls.append(None)
        return iter([FIT])

    trainer = identity(metrics=["accuracy"]).fit(*FIT, validation=validation, epochs=2)
    assert len(calls) == 2
    assert trainer.history[-1]["validation_accuracy"] == 1
    once = identity(metrics=["accuracy"]).fit(*FIT, validation=iter([FIT]))
    assert once.history[-1]["validation_accuracy"] == 1
