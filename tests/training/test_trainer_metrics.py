"""Metrics of a `Trainer`: of token losses, of batches without weights, and whose warning it is."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import PATIENCE
from tests.support.trainings import linear_model

IDS = np.random.default_rng(1).integers(0, 5, (8, 6))


def bigram_trainer(metrics, **options):
    """Return a trainer of the scores of the next token after each token."""
    text = "bigram (int64[N,T] ids) => (float[N,T,5] logits) { logits = Gather(table, ids) }"
    table = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    model = parse_model(text, table=table)
    return og.Trainer(model, "cross_entropy", loss_options=options, metrics=metrics)


def test_metrics_of_a_token_loss_compare_with_the_next_token():
    labels = np.where(IDS == 4, -100, IDS)
    trainer = bigram_trainer(["perplexity", "accuracy"], shift=True)
    results = trainer.evaluate(IDS, labels)
    before, after = trainer.predict(IDS)[:, :-1], labels[:, 1:]
    kept = after != -100
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]), rel=1e-5)
    assert results["accuracy"] == np.mean(before.argmax(axis=-1)[kept] == after[kept])


def test_batches_without_weights_have_metrics_that_take_none():
    labels = np.roll(IDS, 1)

    def share(prediction, label):
        return float(np.mean(prediction.argmax(axis=-1) == label))

    trainer = bigram_trainer([share], axis=2)
    batches = [(IDS[i : i + 4], labels[i : i + 4]) for i in (0, 4)]
    assert trainer.evaluate(batches) == pytest.approx(trainer.evaluate(IDS, labels))
    weighted = [(*batches[0], np.full(4, 2.0)), batches[1]]
    with pytest.raises(ValueError, match=naming("'share'", "sample_weight")):
        trainer.evaluate(weighted)


def test_weights_of_some_batches():
    def total(prediction, label, sample_weight=None):
        return float(sample_weight.sum())

    batches = [(IDS[:4], IDS[:4], np.full(4, 2.0)), (IDS[4:], IDS[4:])]
    assert bigram_trainer([total], axis=2).evaluate(batches)["total"] == 12


def test_the_warning_of_a_weight_without_effect_is_shown_at_the_call():
    text = "f (float[N,2] x) => (float[N,1] y, float[N,1] z) { y = MatMul(x, a) z = MatMul(x, b) }"
    model = parse_model(text, a=[[1.0], [2.0]], b=[[1.0], [2.0]])
    X = np.ones((4, 2), np.float32)
    with pytest.warns(UserWarning, match=r"\['b'\]") as caught:
        og.Trainer(model, {"y": "mse"}).fit(X, X[:, :1])
    assert caught[0].filename == __file__


def separable_rows(count, swap=False):
    """Return data on which the identity has the accuracy 1, or 0."""
    X = np.random.default_rng(0).normal(size=(count, 2)).astype(np.float32)
    return X, X.argmin(axis=1) if swap else X.argmax(axis=1)


def identity_trainer(make=og.Trainer, **options):
    return make(linear_model(np.eye(2)), "cross_entropy", **options)


def stack_of_rates(*arguments, **options):
    return og.TrainerStack(*arguments, learning_rate=[0.1, 0.2], **options)


class Held(og.metrics.Metric):
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
    trainer = identity_trainer(metrics=["accuracy", Held()])
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(
                lambda d: trainer.evaluate(*d, batch_size=8),
                [separable_rows(64), separable_rows(64, True)],
            )
        )
    assert [(r["accuracy"], r["held"]) for r in results] == [(1, 1), (0, 0)]


def test_an_evaluation_inside_of_another_has_metrics_of_its_own():
    inner = []

    class Nested(og.metrics.Metric):
        name = "nested"

        def begin(self, prediction):
            self.rows = 0

        def update(self, prediction, label, weight=None):
            if not inner:
                inner.append(None)
                inner.append(trainer.evaluate(*separable_rows(16, True)))
            self.rows += len(label)

        def compute(self):
            return self.rows

    trainer = identity_trainer(metrics=["accuracy", Nested()])
    assert trainer.evaluate(*separable_rows(64), batch_size=8)["nested"] == 64
    assert (inner[1]["nested"], inner[1]["accuracy"]) == (16, 0)


def test_metrics_that_cannot_be_copied():
    lock = threading.Lock()

    class Locked(og.metrics.Metric):
        name = "locked"

        def __init__(self):
            self.lock = lock

        def begin(self, prediction):
            self.rows = 0

        def update(self, prediction, label, weight=None):
            self.rows += len(label)

        def compute(self):
            return self.rows

    with pytest.raises(ValueError, match=naming("'locked'", "Locked", "__deepcopy__")):
        identity_trainer(metrics=[Locked()]).evaluate(*separable_rows(4))

    class Called:  # a function may hold anything
        __name__ = "called"

        def __init__(self):
            self.lock = lock

        def __call__(self, prediction, label):
            return float(len(label))

    assert identity_trainer(metrics=[Called()]).evaluate(*separable_rows(4))["called"] == 4


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

    trainer = identity_trainer(class_weight="balanced")
    assert trainer.predict(V).shape == (30, 2)
    for call in (trainer.evaluate, trainer.partial_fit):
        with pytest.raises(ValueError, match=naming("class_weight='balanced'", "call fit")):
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
    X, y = separable_rows(60)
    y[:20] = 0
    trainer = identity_trainer(class_weight="balanced").fit(X, y)
    trainer.state.save(tmp_path / "state")
    other = identity_trainer(class_weight="balanced")
    other.state = og.callbacks.TrainState.load(tmp_path / "state")
    assert other.evaluate(X[:9], y[:9]) == trainer.evaluate(X[:9], y[:9])
    stack = identity_trainer(stack_of_rates, class_weight="balanced")
    stack.fit(X, y, validation=(X[:9], y[:9]))
    assert stack.evaluate(X[:9], y[:9])["loss"] == pytest.approx(
        stack.history[-1]["validation_loss"]
    )


def test_labels_that_are_ignored_have_no_balance():
    X, y = separable_rows(60)
    ignored = np.where(np.arange(60) < 15, 1, y)
    options = {"loss_options": {"ignore_index": 1}}
    kept = ignored != 1
    one = identity_trainer(class_weight="balanced", **options).fit(X, ignored)
    assert one.state.balanced == {"y": {0: 1.0}}
    assert one.evaluate(X, ignored)["loss"] == pytest.approx(one.evaluate(X[kept], y[kept])["loss"])


# -- metrics that do not fit ----------------------------------------------------------------------

FIT = separable_rows(16)


class NarrowMetric(og.metrics.Metric):
    """A metric that takes labels of two axes only."""

    name = "narrow"

    def begin(self, prediction):
        self.count = 0

    def update(self, prediction, label, weight=None):
        if label.ndim != 2:
            raise ValueError(f"narrow takes (rows, outputs), not {label.shape}")

    def compute(self):
        return 0.0


def regression_problem(make, **options):
    return make(linear_model([[1], [0]]), "mse", **options), (FIT[0], FIT[0][:, :1])


def class_problem(make, **options):
    return identity_trainer(make, **options), FIT


@pytest.mark.parametrize("make", [og.Trainer, stack_of_rates])
@pytest.mark.parametrize(("metric", "message", "problem", "forms"), [
    ("f1_macro", "'f1_macro'", regression_problem, "arrays share list iterable"),
    ("top_5_accuracy", "top_5_accuracy.* 2 ", class_problem, "arrays iterable"),
    (NarrowMetric(), r"not \(16,\)", class_problem, "arrays list"),
])  # fmt: skip
def test_metrics_that_do_not_fit_are_refused_before_the_first_step(
    make, metric, message, problem, forms
):
    for form in forms.split():
        trainer, data = problem(make, metrics=[metric])
        before = copy.deepcopy(trainer.state.weights)
        validation = {
            "arrays": data,
            "share": 0.5,
            "list": [data],
            "iterable": iter([data]),
        }
        message = message if form != "share" else message.replace("16", "8")
        with pytest.raises(ValueError, match=message):
            trainer.fit(*data, validation=validation[form])
        assert not trainer.history
        np.testing.assert_equal(trainer.state.weights, before)


def test_metrics_of_two_outputs_are_told_apart_by_name():
    model = parse_model(
        "f (float[N,2] x) => (float[N,1] y, float[N,1] z) { y = MatMul(x, v)  z = MatMul(x, w) }",
        v=np.float32([[1.0], [0.0]]),
        w=np.float32([[0.0], [1.0]]),
    )
    x, labels = np.float32([[2.0, 5.0]]), dict.fromkeys("yz", np.zeros((1, 1), np.float32))

    def evaluated(metrics):
        return og.Trainer(model, {"y": "mse", "z": "mse"}, metrics=metrics).evaluate(x, labels)

    assert evaluated({"z": ["mae"], "y": ["mae"]}) == {"loss": 29.0, "z_mae": 5.0, "y_mae": 2.0}
    with pytest.raises(ValueError, match=naming("metrics 'u'", "'y', 'z'")):
        evaluated({"u": ["mae"]})
    with pytest.raises(ValueError, match=naming("metrics={output: [...]}", "['y', 'z']")):
        evaluated(["mae"])


def test_validation_data_that_are_no_list_are_read_once_an_epoch():
    calls = []

    def validation():
        calls.append(None)
        return iter([FIT])

    trainer = identity_trainer(metrics=["accuracy"]).fit(*FIT, validation=validation, epochs=2)
    assert len(calls) == 2
    assert trainer.history[-1]["validation_accuracy"] == 1
    once = identity_trainer(metrics=["accuracy"]).fit(*FIT, validation=iter([FIT]))
    assert once.history[-1]["validation_accuracy"] == 1


def test_metrics_that_are_undefined_for_the_rows_are_nan():
    X, y = separable_rows(60)
    one = parse_model(
        "f (float[N,2] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.ones((2, 1), np.float32)
    )
    of_one_class = X[:8], np.zeros(8, np.int64)
    trainings = {
        "auc": lambda: identity_trainer(metrics=["auc"]).fit(X, y, validation=of_one_class),
        "r2": lambda: og.Trainer(one, "squared_error", metrics=["r2"]).fit(
            X, X[:, :1], validation=(X[:1], X[:1, :1])
        ),
    }
    for metric, train in trainings.items():
        with pytest.warns(UserWarning, match=naming(metric, "NaN")):
            made = train()
        assert np.isnan(made.history[-1][f"validation_{metric}"])
        assert np.isfinite(made.history[-1]["validation_loss"])
