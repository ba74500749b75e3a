"""Every form of data means the same: in `fit`, validation, `partial_fit`, `evaluate`, `predict`."""

import numpy as np
import onnx
import onnxruntime as ort
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import onnxgrad as og
from onnxgrad import LearningRateSGD, explain
from tests.support.small_models import BOTH_TRAINERS, inner_loss_trainer, two_column_model

ROWS, SIZE = 11, 4  # the last batch is shorter
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 2)).astype("f"), RNG.normal(size=(ROWS, 1)).astype("f")
CUTS = [slice(i, i + SIZE) for i in range(0, ROWS, SIZE)]
PAIRS = [(X[cut], Y[cut]) for cut in CUTS]
DICTS = [{"x": x, "label": y} for x, y in PAIRS]


def table():
    return pa.table({"a": X[:, 0], "b": X[:, 1], "price": Y[:, 0]})


def named():
    """Return a table with the names of inputs."""
    return pa.table({"x": [*X], "label": Y[:, 0]})


def frame(name):
    return pytest.importorskip(name).DataFrame(table().to_pydict())


def parquet(path):
    pq.write_table(table(), path / "rows.parquet")
    return path / "rows.parquet"


def memmap(path):
    np.save(path / "x.npy", X)
    return np.load(path / "x.npy", mmap_mode="r")


def filled(wrap=lambda a: a):
    """Return a function that yields one buffer, filled again and again."""

    def batches():
        x, y = np.empty((SIZE, 2), "f"), np.empty((SIZE, 1), "f")
        for features, labels in PAIRS:
            n = len(features)
            x[:n], y[:n] = features, labels
            yield wrap(x[:n]), wrap(y[:n])

    return batches


def filled_dicts():
    for x, y in filled()():
        yield {"x": x, "label": y}


class Rows:
    """Rows by number, all in one buffer."""

    def __init__(self):
        self.x, self.y = np.empty(2, "f"), np.empty(1, "f")

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.x[:], self.y[:] = X[i], Y[i]
        return self.x, self.y


def torch():
    return pytest.importorskip("torch")


def stream():
    class Stream(torch().utils.data.IterableDataset):
        def __iter__(self):
            rows = Rows()
            return (rows[i] for i in range(ROWS))

    return Stream()


def loader(**options):
    data = torch().utils.data.TensorDataset(torch().from_numpy(X), torch().from_numpy(Y))
    return torch().utils.data.DataLoader(data, **{"batch_size": SIZE} | options)


def unbatched():
    return torch().utils.data.DataLoader(list(PAIRS), batch_size=None)


def frames():
    """Return a function that generates frames of pandas."""
    pytest.importorskip("pandas")
    return lambda: (named()[c].to_pandas() for c in CUTS)


def hugging_face():
    return pytest.importorskip("datasets").Dataset.from_dict(table().to_pydict())


FORMS = {  # data, and the columns of labels
    "dict of arrays": lambda path: ({"x": X, "label": Y}, None),
    "pair": lambda path: ((X, Y), None),
    "pair of dicts": lambda path: (({"x": X}, {"y": Y}), None),
    "lists of rows": lambda path: (([*X], [*Y]), None),
    "lists of numbers": lambda path: ((X.tolist(), Y.tolist()), None),
    "table": lambda path: (table(), "price"),
    "pandas": lambda path: (frame("pandas"), "price"),
    "polars": lambda path: (frame("polars"), "price"),
    "tensors": lambda path: ((torch().from_numpy(X), torch().from_numpy(Y)), None),
    "memmap": lambda path: ((memmap(path), Y), None),
    "parquet": lambda path: (parquet(path), "price"),
    "arrow dataset": lambda path: (pads.dataset(table()), "price"),
    "list": lambda path: (PAIRS, None),
    "tuple": lambda path: (tuple(PAIRS), None),
    "list of lists": lambda path: ([[*pair] for pair in PAIRS], None),
    "tuple of lists": lambda path: (tuple([*pair] for pair in PAIRS), None),
    "list of dicts": lambda path: (DICTS, None),
    "tuple of dicts": lambda path: (tuple(DICTS), None),
    "tuple of pairs of dicts": lambda path: (tuple(({"x": x}, {"y": y}) for x, y in PAIRS), None),
    "list of frames": lambda path: ([(frame("pandas")[["a", "b"]][c], Y[c]) for c in CUTS], None),
    "list of tables": lambda path: ([named()[c] for c in CUTS], None),
    "record batches": lambda path: (named().to_batches(SIZE), None),
    "generator of frames": lambda path: (frames(), None),
    "generator": lambda path: (lambda: iter(PAIRS), None),
    "filled arrays": lambda path: (filled(), None),
    "filled dicts": lambda path: (filled_dicts, None),
    "filled tensors": lambda path: (filled(torch().from_numpy), None),
    "filled OrtValues": lambda path: (filled(ort.OrtValue.ortvalue_from_numpy), None),
    "filled frames": lambda path: (filled(pytest.importorskip("pandas").DataFrame), None),
    "filled rows": lambda path: (Rows(), None),
    "filled stream": lambda path: (stream(), None),
    "loader": lambda path: (loader(), None),
    "tuple of a loader": lambda path: (tuple(loader()), None),
    "loader of batches": lambda path: (unbatched(), None),
    "hugging face": lambda path: (hugging_face(), "price"),
}
EACH = pytest.mark.parametrize("form", FORMS)


def trainer(**options):
    return og.Trainer(
        two_column_model(), "squared_error", optimizer="adam", metrics=["r2"], **options
    )


def fitted(data, y, form=trainer, validation=None, **options):
    made = form(**options)
    return made.fit(data, y, epochs=2, batch_size=SIZE, shuffle=False, validation=validation)


def assert_same(made, expected):
    for name, w in expected.state.weights.items():
        np.testing.assert_allclose(made.state.weights[name], w, rtol=1e-6)
    assert len(made.history) == len(expected.history) == 2
    for entry, other in zip(made.history, expected.history, strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


@EACH
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_same(form, accumulate, tmp_path):
    data, y = FORMS[form](tmp_path)
    made, expected = (
        fitted(*given, accumulate=accumulate).partial_fit(*given, batch_size=SIZE, shuffle=False)
        for given in ((data, y), (X, Y))
    )
    made.state.history.pop(), expected.state.history.pop()
    assert_same(made, expected)


@EACH
def test_validation_is_the_same(form, tmp_path):
    data, y = FORMS[form](tmp_path)
    given = data if y is None else (data, y)
    expected = fitted(X, Y, validation=(X, Y))
    assert "validation_r2" in expected.history[0]
    assert_same(fitted(X, Y, validation=given), expected)


@EACH
def test_results_are_the_same(form, tmp_path):
    data, y = FORMS[form](tmp_path)
    results = trainer().evaluate(data, y, batch_size=SIZE)
    assert results == pytest.approx(trainer().evaluate(X, Y), rel=1e-5)
    predicted = fitted(data, y).predict(data, batch_size=SIZE)  # a table: not of its labels
    np.testing.assert_allclose(predicted, fitted(X, Y).predict(X), rtol=1e-5)


@pytest.mark.parametrize("form", ["pair", "list", "tuple", "tuple of dicts", "filled arrays"])
def test_stacks_and_estimators_take_the_same(form, tmp_path):
    data, _ = FORMS[form](tmp_path)
    options = {"batch_size": SIZE, "shuffle": False}
    made, expected = (
        og.TrainerStack(two_column_model(), "squared_error", learning_rate=[0.1, 0.2])
        for _ in range(2)
    )
    made.fit(data, validation=data, **options), expected.fit(X, Y, validation=(X, Y), **options)
    np.testing.assert_allclose(made.predict(data), expected.predict(X), rtol=1e-6)
    losses = [each.history[0]["validation_loss"] for each in (made, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    if "dict" not in form:
        ours = inner_loss_trainer(two_column_model()).fit(data, X_val=data)
        assert np.isfinite(ours.validation_losses_).all()


@pytest.mark.parametrize("form", ["arrays", "lists", "dict", "list", "tuple", "dicts", "by output"])
@pytest.mark.parametrize("labels", ["indices", "column", "one-hot", "soft"])
def test_labels_of_classes_are_told_apart_in_all_data(form, labels):
    model = two_column_model()
    for weight in model.graph.initializer:  # of three classes
        array = np.repeat(onnx.numpy_helper.to_array(weight), 3, axis=-1)
        weight.CopyFrom(onnx.numpy_helper.from_array(array * np.float32([1, 2, 3]), weight.name))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3
    soft = RNG.dirichlet([1, 1, 1], ROWS).astype("f")
    classes = soft.argmax(1)
    kinds = {"indices": classes, "column": classes[:, None], "one-hot": np.eye(3)[classes]}
    y = (kinds | {"soft": soft})[labels]
    pairs = [(X[c], y[c]) for c in CUTS]
    data = {
        "arrays": (X, y),
        "lists": (X.tolist(), y.tolist()),
        "dict": {"x": X, "label": y},
        "list": pairs,
        "tuple": tuple(pairs),
        "dicts": [{"x": x, "label": label} for x, label in pairs],
        "by output": [{"x": x, "y": label} for x, label in pairs],
    }[form]
    scores = X @ np.float32([[0.1, 0.2, 0.3], [0.2, 0.4, 0.6]]) + np.float32([0.3, 0.6, 0.9])
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -(log_p * (soft if labels == "soft" else np.eye(3)[classes])).sum(1).mean()
    for results in (
        og.Trainer(model, "cross_entropy").evaluate(data),
        og.Trainer(model, "cross_entropy", learning_rate=1e-12).fit(data).history[0],
    ):
        assert results["loss"] == pytest.approx(expected, rel=1e-5)


@BOTH_TRAINERS
@pytest.mark.parametrize("kind", ["arrays", "list", "memmap", "parquet"])
def test_a_batch_of_more_rows_than_there_are_has_them_all(trainer, kind, tmp_path):
    forms = {"arrays": (X, Y), "list": ([(X, Y)],), "memmap": (memmap(tmp_path), Y)}
    data = forms[kind] if kind in forms else (parquet(tmp_path), "price")
    options = {"learning_rate": LearningRateSGD(0.05, learning_rate="constant")}
    made, expected = (
        trainer(two_column_model(), batch_size=size, **options).fit(*given)
        for size, given in ((1000, data), (ROWS, (X, Y)))
    )
    for name, w in expected.get_state().items():
        np.testing.assert_allclose(made.get_state()[name], w, rtol=1e-5)
    assert made.train_losses_ == pytest.approx(expected.train_losses_, rel=1e-5)


def test_a_tuple_that_may_be_batches_or_rows_is_refused():
    for same in (((X, X), (X, X)), ([X, X], [Y, Y]), ([X, X], [Y, Y], [Y[0], Y[1]])):
        for call in (trainer().fit, trainer().evaluate, trainer().predict, trainer().partial_fit):
            with pytest.raises(ValueError, match="batches, or the rows of X and of y: pass a"):
                call(same)
        with pytest.raises(ValueError, match="may be batches"):
            fitted(X, Y, validation=same)
    assert trainer().predict(((X, X), (X, X), (X, X))).shape == (3 * ROWS, 1)  # X is no weight
    with pytest.raises(ValueError, match="takes the array of the input, not a list of batches"):
        explain.saliency(two_column_model(), tuple(PAIRS))


def test_rows_of_other_shapes_are_refused():
    for data in ((PAIRS, Y), ([[1.0, 2.0], [3.0]], Y[:2])):
        with pytest.raises(ValueError, match="rows of 'x' differ in shape: pad them, as by_length"):
            trainer().fit(*data)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_refused(kind):
    sparse = getattr(torch().from_numpy(X), kind)()
    for data in ((sparse, Y), [(sparse, Y)]):
        with pytest.raises(ValueError, match=r"is not supported: pass its \.to_dense"):
            trainer().fit(data)


def test_tensors_that_numpy_does_not_have():
    x, y = torch().from_numpy(X).bfloat16(), torch().complex(*[torch().from_numpy(Y)] * 2)
    for data in ((x, y.conj().imag), [(x, y.conj().imag)]):
        loss = trainer().evaluate(data)["loss"]
        assert loss == pytest.approx(trainer().evaluate(x.float().numpy(), -Y)["loss"], rel=1e-5)
