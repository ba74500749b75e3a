"""Every form of data means the same: in `fit`, validation, `partial_fit`, `evaluate`, `predict`."""

import numpy as np
import onnx
import onnxruntime as ort
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import onnxgrad as og
from onnxgrad import explain
from onnxgrad.compat import LearningRateSGD
from tests.support.errors import naming
from tests.support.running import in_sweep
from tests.support.small_models import BOTH_TRAINERS, inner_loss_trainer, two_column_model

ROWS, SIZE = 11, 4  # the last batch is shorter
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 2)).astype("f"), RNG.normal(size=(ROWS, 1)).astype("f")
CUTS = [slice(i, i + SIZE) for i in range(0, ROWS, SIZE)]
PAIRS = [(X[cut], Y[cut]) for cut in CUTS]
DICTS = [{"x": x, "label": y} for x, y in PAIRS]


def price_table():
    return pa.table({"a": X[:, 0], "b": X[:, 1], "price": Y[:, 0]})


def table_by_input():
    """Return a table with the names of inputs."""
    return pa.table({"x": [*X], "label": Y[:, 0]})


def price_frame(name):
    return pytest.importorskip(name).DataFrame(price_table().to_pydict())


def write_parquet(path):
    pq.write_table(price_table(), path / "rows.parquet")
    return path / "rows.parquet"


def mapped_array(path):
    np.save(path / "x.npy", X)
    return np.load(path / "x.npy", mmap_mode="r")


def filled_batches(wrap=lambda a: a):
    """Return a function that yields one buffer, filled again and again."""

    def batches():
        x, y = np.empty((SIZE, 2), "f"), np.empty((SIZE, 1), "f")
        for features, labels in PAIRS:
            n = len(features)
            x[:n], y[:n] = features, labels
            yield wrap(x[:n]), wrap(y[:n])

    return batches


def filled_dicts():
    for x, y in filled_batches()():
        yield {"x": x, "label": y}


class LazyTorch:
    """PyTorch, imported by the first test that reads an attribute."""

    def __getattr__(self, name):
        return getattr(pytest.importorskip("torch"), name)


torch = LazyTorch()


class BufferedRows:
    """Rows by number, all in one buffer."""

    def __init__(self):
        self.x, self.y = np.empty(2, "f"), np.empty(1, "f")

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.x[:], self.y[:] = X[i], Y[i]
        return self.x, self.y


def row_stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            rows = BufferedRows()
            return (rows[i] for i in range(ROWS))

    return Stream()


def tensor_loader(**options):
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, **{"batch_size": SIZE} | options)


def loader_of_batches():
    return torch.utils.data.DataLoader(list(PAIRS), batch_size=None)


def frame_generator():
    """Return a function that generates frames of pandas."""
    pytest.importorskip("pandas")
    return lambda: (table_by_input()[c].to_pandas() for c in CUTS)


def hugging_face_table():
    return pytest.importorskip("datasets").Dataset.from_dict(price_table().to_pydict())


FORMS = {  # data, and the columns of labels
    "dict of arrays": lambda path: ({"x": X, "label": Y}, None),
    "pair": lambda path: ((X, Y), None),
    "pair of dicts": lambda path: (({"x": X}, {"y": Y}), None),
    "lists of rows": lambda path: (([*X], [*Y]), None),
    "lists of numbers": lambda path: ((X.tolist(), Y.tolist()), None),
    "table": lambda path: (price_table(), "price"),
    "pandas": lambda path: (price_frame("pandas"), "price"),
    "polars": lambda path: (price_frame("polars"), "price"),
    "tensors": lambda path: ((torch.from_numpy(X), torch.from_numpy(Y)), None),
    "memmap": lambda path: ((mapped_array(path), Y), None),
    "parquet": lambda path: (write_parquet(path), "price"),
    "paths": lambda path: ([write_parquet(path)], "price"),
    "arrow dataset": lambda path: (pads.dataset(price_table()), "price"),
    "list": lambda path: (PAIRS, None),
    "tuple": lambda path: (tuple(PAIRS), None),
    "list of lists": lambda path: ([[*pair] for pair in PAIRS], None),
    "tuple of lists": lambda path: (tuple([*pair] for pair in PAIRS), None),
    "list of dicts": lambda path: (DICTS, None),
    "tuple of dicts": lambda path: (tuple(DICTS), None),
    "tuple of pairs of dicts": lambda path: (tuple(({"x": x}, {"y": y}) for x, y in PAIRS), None),
    "list of frames": lambda path: (
        [(price_frame("pandas")[["a", "b"]][c], Y[c]) for c in CUTS],
        None,
    ),
    "list of tables": lambda path: ([table_by_input()[c] for c in CUTS], None),
    "record batches": lambda path: (table_by_input().to_batches(SIZE), None),
    "generator of frames": lambda path: (frame_generator(), None),
    "generator": lambda path: (lambda: iter(PAIRS), None),
    "filled arrays": lambda path: (filled_batches(), None),
    "filled dicts": lambda path: (filled_dicts, None),
    "filled tensors": lambda path: (filled_batches(torch.from_numpy), None),
    "filled OrtValues": lambda path: (filled_batches(ort.OrtValue.ortvalue_from_numpy), None),
    "filled frames": lambda path: (filled_batches(pytest.importorskip("pandas").DataFrame), None),
    "filled rows": lambda path: (BufferedRows(), None),
    "filled stream": lambda path: (row_stream(), None),
    "loader": lambda path: (tensor_loader(), None),
    "tuple of a loader": lambda path: (tuple(tensor_loader()), None),
    "loader of batches": lambda path: (loader_of_batches(), None),
    "hugging face": lambda path: (hugging_face_table(), "price"),
    "hugging face stream": lambda path: (hugging_face_table().to_iterable_dataset(), "price"),
}


def squares_trainer(**options):
    model = two_column_model()
    return og.Trainer(model, "squared_error", optimizer="adam", metrics=["r2"], **options)


OPTIONS = {"batch_size": SIZE, "shuffle": False}


def results_of_training(data, y, accumulate):
    """Return weights, history, metrics and predictions of a training that is validated."""
    made = squares_trainer(accumulate=accumulate)
    given = data if y is None else (data, y)
    made.fit(data, y, epochs=2, validation=given, **OPTIONS)
    history = [dict(entry) for entry in made.history]
    metrics = made.evaluate(data, y, batch_size=SIZE)
    predicted = made.predict(data, batch_size=SIZE)  # a table: not of its labels
    made.partial_fit(data, y, **OPTIONS)
    return made.state.weights, history, metrics, predicted


@pytest.fixture(scope="module")
def array_results():
    """Results of arrays for each number of micro-batches."""
    return {accumulate: results_of_training(X, Y, accumulate) for accumulate in (1, 2)}


TWICE = ("filled arrays", "filled rows", "parquet", "generator of frames")  # in micro-batches


@pytest.mark.parametrize(
    ("form", "accumulate"),
    [
        (form, n) if n == 1 + (form in TWICE) else in_sweep(form, n)
        for form in FORMS
        for n in (1, 2)
    ],
)
def test_results_are_those_of_arrays(form, accumulate, array_results, tmp_path):
    data, y = FORMS[form](tmp_path)
    weights, history, metrics, predicted = results_of_training(data, y, accumulate)
    expected = array_results[accumulate]
    for name, w in expected[0].items():
        np.testing.assert_allclose(weights[name], w, rtol=1e-6)
    assert len(history) == len(expected[1]) == 2
    for entry, other in zip(history, expected[1], strict=True):
        assert "validation_r2" in entry
        assert entry == pytest.approx(other, rel=1e-5)
    assert metrics == pytest.approx(expected[2], rel=1e-5)
    np.testing.assert_allclose(predicted, expected[3], rtol=1e-5)


@pytest.mark.parametrize(
    "form", ["list", "filled arrays", *map(in_sweep, ["pair", "tuple", "tuple of dicts"])]
)
def test_stacks_and_estimators_take_the_same(form, tmp_path):
    data, _ = FORMS[form](tmp_path)
    made, expected = (
        og.TrainerStack(two_column_model(), "squared_error", learning_rate=[0.1, 0.2])
        for _ in range(2)
    )
    made.fit(data, validation=data, **OPTIONS), expected.fit(X, Y, validation=(X, Y), **OPTIONS)
    np.testing.assert_allclose(made.predict(data), expected.predict(X), rtol=1e-6)
    losses = [each.history[0]["validation_loss"] for each in (made, expected)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    if "dict" not in form:
        ours = inner_loss_trainer(two_column_model()).fit(data, X_val=data)
        assert np.isfinite(ours.validation_losses_).all()


@pytest.mark.parametrize("labels", ["indices", "column", "one-hot", "soft"])
def test_labels_of_classes_are_told_apart_in_all_data(labels):
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
    forms = [
        (X, y),
        (X.tolist(), y.tolist()),
        {"x": X, "label": y},
        pairs,
        tuple(pairs),
        [{"x": x, "label": label} for x, label in pairs],
        [{"x": x, "y": label} for x, label in pairs],
    ]
    scores = X @ np.float32([[0.1, 0.2, 0.3], [0.2, 0.4, 0.6]]) + np.float32([0.3, 0.6, 0.9])
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -(log_p * (soft if labels == "soft" else np.eye(3)[classes])).sum(1).mean()
    trainer = og.Trainer(model, "cross_entropy", learning_rate=1e-12)
    for data in forms:
        for results in (trainer.evaluate(data), trainer.fit(data).history[-1]):
            assert results["loss"] == pytest.approx(expected, rel=1e-5)


@BOTH_TRAINERS
@pytest.mark.parametrize("kind", ["list", "parquet", *map(in_sweep, ["arrays", "memmap"])])
def test_a_batch_of_more_rows_than_there_are_has_them_all(trainer, kind, tmp_path):
    forms = {"arrays": (X, Y), "list": ([(X, Y)],), "memmap": (mapped_array(tmp_path), Y)}
    data = forms[kind] if kind in forms else (write_parquet(tmp_path), "price")
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
        for name in ("fit", "evaluate", "predict", "partial_fit"):
            with pytest.raises(ValueError, match=naming("batches", "rows", "X", "y")):
                getattr(squares_trainer(), name)(same)
        with pytest.raises(ValueError, match=naming("batches", "rows", "X", "y")):
            squares_trainer().fit(X, Y, validation=same)
    assert squares_trainer().predict(((X, X), (X, X), (X, X))).shape == (
        3 * ROWS,
        1,
    )  # X is no weight
    with pytest.raises(ValueError, match=naming("array", "batches")):
        explain.saliency(two_column_model(), tuple(PAIRS))


def test_rows_of_other_shapes_are_refused():
    for data in ((PAIRS, Y), ([[1.0, 2.0], [3.0]], Y[:2])):
        with pytest.raises(ValueError, match=naming("'x'", "shape", "by_length")):
            squares_trainer().fit(*data)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_refused(kind):
    sparse = getattr(torch.from_numpy(X), kind)()
    for data in ((sparse, Y), [(sparse, Y)]):
        with pytest.raises(ValueError, match=r"\.to_dense"):
            squares_trainer().fit(data)


def test_tensors_that_numpy_does_not_have():
    x, y = torch.from_numpy(X).bfloat16(), torch.complex(*[torch.from_numpy(Y)] * 2)
    for data in ((x, y.conj().imag), [(x, y.conj().imag)]):
        loss = squares_trainer().evaluate(data)["loss"]
        assert loss == pytest.approx(
            squares_trainer().evaluate(x.float().numpy(), -Y)["loss"], rel=1e-5
        )
