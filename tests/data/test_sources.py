"""Sources of batches: each row once, in an order of the generator alone, from any kind of data."""

import json
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from onnxgrad import Trainer, add_loss_output
from onnxgrad.compat import LearningRateSGD, OrtGradientOptimizer
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.columns import stack_columns
from onnxgrad.data.prefetch import read_ahead
from onnxgrad.data.readers import Batches, describe_arrays
from onnxgrad.losses.info import LossInfo
from onnxgrad.training.batches import ReaderSource
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import DataSpec
from tests.support.errors import naming
from tests.support.small_models import float32_model, two_column_model
from tests.support.trainings import objective_with_loss

ROWS, SIZE = 47, 5
NUMBERS = np.arange(ROWS)
X = np.float32(np.stack([NUMBERS, NUMBERS % 7], 1))  # the first column numbers the rows
Y = np.float32(NUMBERS[:, None] * 10)
LINEAR = add_loss_output(two_column_model())
CONSTANT = LearningRateSGD(0.05, learning_rate="constant")


def fields_of(model=LINEAR, batch_axes=None, weights=("w",)):
    return DataSpec(objective_with_loss(model, weights), batch_axes)


def train_once(model, data, *more, **options):
    options = {"max_iter": 1, "learning_rate": CONSTANT, "random_state": 0} | options
    return OrtGradientOptimizer(model, **options).fit(data, *more)


# -- every source --------------------------------------------------------------------------------


def numbered_table():
    return pa.table({"a": X[:, 0], "b": X[:, 1], "price": Y[:, 0]})


def parquet_dataset(tmp_path):
    pq.write_table(numbered_table(), tmp_path / "rows.parquet", row_group_size=6)
    return Dataset(str(tmp_path / "rows.parquet"), "price")


def dataset_of_small_blocks(tmp_path):
    pq.write_table(numbered_table(), tmp_path / "rows.parquet", row_group_size=6)
    return Dataset(arrow_dataset(tmp_path / "rows.parquet", "price", shuffle_rows=11))


def parquet_folder(tmp_path):
    for i, start in enumerate(range(0, ROWS, 20)):
        pq.write_table(
            numbered_table()[start : start + 20], tmp_path / f"{i}.parquet", row_group_size=7
        )
    return Dataset(tmp_path, "price")


def arrow_file(tmp_path):
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), numbered_table().schema) as writer:
        writer.write_table(numbered_table(), max_chunksize=9)
    return Dataset(tmp_path / "rows.arrow", ["price"])


def mapped_dataset(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return Dataset(np.load(tmp_path / "x.npy", mmap_mode="r"), Y)


def frame_dataset(name):
    return Dataset(pytest.importorskip(name).DataFrame(numbered_table().to_pydict()), "price")


class NumberedSamples:
    """What a dataset of torch is: rows by number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return X[i], Y[i]


def hugging_face_dataset(stream=False):
    made = pytest.importorskip("datasets").Dataset.from_dict(numbered_table().to_pydict())
    return Dataset(made.to_iterable_dataset(num_shards=4) if stream else made, "price")


def torch_dataset():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return Dataset(data)


def torch_stream():
    class Stream(pytest.importorskip("torch").utils.data.IterableDataset):
        def __iter__(self):
            return zip(X, Y, strict=True)

    return Dataset(Stream())


def loader_dataset():
    torch = pytest.importorskip("torch")
    return Dataset(torch.utils.data.DataLoader(torch_dataset().X, batch_size=SIZE))


def fixed_batches():
    return [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, ROWS, SIZE)]


def generated_batches():
    yield from fixed_batches()


SHUFFLED = {
    "arrays": lambda path: Dataset(X, Y),
    "table": lambda path: Dataset(numbered_table(), "price"),
    "pandas": lambda path: frame_dataset("pandas"),
    "polars": lambda path: frame_dataset("polars"),
    "memmap": mapped_dataset,
    "parquet": parquet_dataset,
    "small blocks": dataset_of_small_blocks,
    "folder": parquet_folder,
    "arrow file": arrow_file,
    "arrow dataset": lambda path: Dataset(pads.dataset(numbered_table()), "price"),
    "samples": lambda path: Dataset(NumberedSamples()),
    "torch dataset": lambda path: torch_dataset(),
    "hugging face": lambda path: hugging_face_dataset(),
    "hugging face stream": lambda path: hugging_face_dataset(stream=True),
}
FIXED = {
    "list": lambda path: Dataset(fixed_batches()),
    "generator function": lambda path: Dataset(generated_batches),
    "torch stream": lambda path: torch_stream(),
    "loader": lambda path: loader_dataset(),
}
KINDS = pytest.mark.parametrize("kind", [*SHUFFLED, *FIXED])


def source_of(kind, tmp_path, **options):
    return (SHUFFLED | FIXED)[kind](tmp_path).source(fields_of(), SIZE, **options)


def drawn_numbers(source, seed=None, skip=0, most=3):
    """Return the batches of an epoch as lists of the numbers of rows; check that y belongs to x."""
    rng = None if seed is None else np.random.default_rng(seed)
    found = []
    for piece in source.epoch(rng, skip, lambda batch: most):
        x, label = piece.arrays["x"], piece.arrays["label"]
        assert x.shape == (piece.batches, piece.rows, 2)
        assert x.dtype == label.dtype == np.float32
        assert piece.batches <= most
        np.testing.assert_array_equal(x[..., :1] * 10, label)
        np.testing.assert_array_equal(x[..., 1], x[..., 0] % 7)
        found += [[int(n) for n in batch] for batch in x[..., 0]]
    return found


def flat(batches):
    return list(chain.from_iterable(batches))


@KINDS
def test_an_epoch_has_every_row_once(kind, tmp_path):
    """Also without a thread; batches that are skipped change nothing."""
    source = source_of(kind, tmp_path)
    first = drawn_numbers(source, seed=0)
    assert sorted(flat(first)) == list(range(ROWS))
    assert [len(batch) for batch in first] == [SIZE] * 9 + [2]
    assert drawn_numbers(source, seed=0) == first
    assert (flat(drawn_numbers(source, seed=1)) != flat(first)) == (kind in SHUFFLED)
    in_order = drawn_numbers(source)
    assert flat(in_order) == list(range(ROWS))
    assert (source.rows, source.batches) == (ROWS, 10)
    for seed, whole in ((None, in_order), (0, first)):
        for skip in (1, 4, 9, 10):
            assert drawn_numbers(source, seed, skip, most=2) == whole[skip:]
    assert drawn_numbers(source_of(kind, tmp_path, prefetch=0), 0) == first


@KINDS
def test_a_description_is_the_same_for_the_same_data(kind, tmp_path):
    data = (SHUFFLED | FIXED)[kind](tmp_path)
    description = data.source(fields_of(), SIZE).description
    assert json.loads(json.dumps(description)) == data.source(fields_of(), SIZE).description
    assert description.get("rows", ROWS) == ROWS


def test_descriptions_change_with_the_data(tmp_path):
    def of(data):
        return data.source(fields_of(), SIZE).description

    changed = X.copy()
    changed[20] += 1
    assert of(Dataset(X, Y)) == of(Dataset(X.copy(), Y))
    assert of(Dataset(X, Y)) != of(Dataset(changed, Y))
    assert of(Dataset(fixed_batches())) == of(Dataset(fixed_batches()))
    assert of(Dataset(fixed_batches())) != of(
        Dataset([*fixed_batches()[:-1], (changed[45:], Y[45:])][::-1])
    )
    before = of(parquet_dataset(tmp_path))
    assert of(parquet_dataset(tmp_path))["rows"] == ROWS
    pq.write_table(numbered_table()[:40], tmp_path / "rows.parquet")
    assert of(Dataset(tmp_path / "rows.parquet", "price")) != before
    large = np.zeros((100_000, 4), np.float32)  # of which some rows are read
    one = of(Dataset(large[:, :2], large[:, :1]))
    large[:] = 1
    assert of(Dataset(large[:, :2], large[:, :1])) != one


def test_a_shuffle_reaches_beyond_a_row_group(tmp_path):
    source = parquet_dataset(tmp_path).source(fields_of(), SIZE)
    groups = [{n // 6 for n in batch} for batch in drawn_numbers(source, seed=0)]
    assert max(map(len, groups)) > 3


def test_skipped_blocks_are_not_decoded(tmp_path, monkeypatch):
    reader = dataset_of_small_blocks(tmp_path).X
    read = []
    decode = type(reader).decode
    monkeypatch.setattr(
        type(reader),
        "decode",
        lambda self, *args: (read.append(len(p["a"])) or p for p in decode(self, *args)),
    )
    assert len(list(reader.batches(SIZE, 0, 8))) == 2
    assert 0 < sum(read) <= 12


# -- in a thread ---------------------------------------------------------------------------------


def numbers_with_pauses(count, seconds=0.0):
    for i in range(count):
        time.sleep(seconds)
        yield i


def test_items_are_read_ahead_but_not_many(new_threads):
    read = []

    def items():
        for i in range(20):
            read.append(i)
            yield i

    ahead = read_ahead(items(), 3)
    assert next(ahead) == 0
    while len(read) < 4:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(read) == 4  # the one that was taken, and three that wait
    assert list(ahead) == list(range(1, 20))
    assert not new_threads()


def test_an_error_is_raised_with_its_traceback(new_threads):
    def wrong_item():
        yield 1
        raise OSError("the disk is gone")

    ahead = read_ahead(wrong_item(), 2)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk") as caught:
        next(ahead)
    assert "wrong_item" in "".join(traceback.format_exception(caught.value))
    assert not new_threads()


def test_the_thread_ends_with_its_consumer(new_threads):
    closed = []

    def items():
        try:
            yield from numbers_with_pauses(1000, 0.001)
        finally:
            closed.append(True)

    ahead = read_ahead(items(), 2)
    next(ahead)
    assert [t.name for t in new_threads()] == ["onnxgrad-data"]
    ahead.close()
    assert closed == [True]
    assert not new_threads()


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, None])
def test_no_thread_is_left_by_a_training_that_ends(new_threads, end):
    def stop(progress):
        if end is not None:
            raise end
        return False

    made = OrtGradientOptimizer(LINEAR, max_iter=2, learning_rate=CONSTANT)
    with pytest.raises(end) if end else nullcontext():
        made.fit(lambda: iter(fixed_batches() * 20), callback=stop)
    assert not new_threads()


# -- slices --------------------------------------------------------------------------------------


def test_a_change_of_shape_begins_a_slice():
    lengths = [4, 4, 4, 2, 2, 3, 4]
    cut = np.cumsum([0, *lengths])
    parts = [(X[a:b], Y[a:b]) for a, b in pairwise(cut)]
    asked = []

    def budget(batch):
        asked.append(batch)
        return 2

    pieces = list(Dataset(parts).source(fields_of(), SIZE).epoch(None, 0, budget))
    assert [(p.batches, p.rows) for p in pieces] == [(2, 4), (1, 4), (2, 2), (1, 3), (1, 4)]
    assert asked == [0, 2, 3, 5, 6]
    found = np.concatenate([p.arrays["x"].reshape(-1, 2) for p in pieces])
    np.testing.assert_array_equal(found, X[: sum(lengths)])


def test_slices_are_bounded_in_memory(monkeypatch):
    monkeypatch.setattr("onnxgrad.training.batches.SLICE_BYTES", 3 * SIZE * 12)
    for data in (Dataset(X, Y), Dataset(fixed_batches())):
        pieces = data.source(fields_of(), SIZE).epoch(None, 0, lambda batch: 100)
        assert [p.batches for p in pieces] == [3, 3, 3, 1]


# -- batches as they are -------------------------------------------------------------------------

W = np.float64([[1], [2], [3]])
R = np.random.default_rng(0)


def transposed_product(x):
    return x.transpose(1, 0, 2) @ W, lambda g: np.einsum("ntf,tnk->fk", x, g)


def scaled_product(x, rate):
    return x * rate @ W, lambda g: (x * rate).T @ g


def edge_product(x, edge):
    return x[edge] @ W, lambda g: x[edge].T @ g


def averaged_product(x):
    return (x @ W).mean(), lambda g: x.mean(0)[:, None] * g


AS_THEY_ARE = {
    "time-major": (
        "float[N,T,3] X) => (float[T,N,1] Y) { t=Transpose<perm=[1,0,2]>(X) Y=MatMul(t,W) }",
        [{"X": (2, 5, 3), "label": (5, 2, 1)}, {"X": (3, 4, 3), "label": (4, 3, 1)}],
        transposed_product,
    ),
    "a scalar": (
        "float[N,3] X, float[] rate) => (float[N,1] Y) { t=Mul(X,rate) Y=MatMul(t,W) }",
        [{"X": (4, 3), "rate": (), "label": (4, 1)}] * 2,
        scaled_product,
    ),
    "a scalar of rank 0": (
        "float[N,3] X, float rate) => (float[N,1] Y) { t=Mul(X,rate) Y=MatMul(t,W) }",
        [{"X": (4, 3), "rate": (), "label": (4, 1)}, {"X": (2, 3), "rate": (), "label": (2, 1)}],
        scaled_product,
    ),
    "nodes and edges": (
        "float[V,3] X, int64[E] edge) => (float[E,1] Y) { t=Gather(X,edge) Y=MatMul(t,W) }",
        [
            {"X": (4, 3), "edge": (7,), "label": (7, 1)},
            {"X": (9, 3), "edge": (2,), "label": (2, 1)},
        ],
        edge_product,
    ),
    "a prediction of rank 0": (
        "float[N,3] X) => (float Y) { t=MatMul(X,W) Y=ReduceMean<keepdims=0>(t) }",
        [{"X": (4, 3), "label": ()}, {"X": (6, 3), "label": ()}],
        averaged_product,
    ),
}


def as_it_is(name):
    text, shapes, forward = AS_THEY_ARE[name]
    model = add_loss_output(float32_model(f"g ({text}", W=W), "squared_error", reduction="mean")
    fed = [
        {k: R.integers(0, 4, s) if k == "edge" else np.float32(R.random(s)) for k, s in b.items()}
        for b in shapes
    ]
    return model, fed, forward


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_a_dict_goes_in_as_it_is(name):
    model, fed, forward = as_it_is(name)
    made = train_once(model, fed, weights_to_train=["W"])
    w, start = W.copy(), W.copy()
    for batch in fed:
        features = [np.asarray(a) for n, a in batch.items() if n != "label"]
        W[:] = w
        y, backward = forward(*features)
        rows = len(batch["label"]) if batch["label"].ndim else 1
        w = w - 0.05 * backward(2 * (y - batch["label"]) / rows)
    W[:] = start
    np.testing.assert_allclose(made.trained_coef_["W"], w, rtol=1e-5)


def test_dicts_that_do_not_fit():
    model, (batch, _), _ = as_it_is("nodes and edges")
    empty = {"label": np.ones((0, 1)), "edge": batch["edge"][:0]}
    for change, parts in (
        ({"label": np.ones((6, 1))}, ["'label'", "length 6", "axis 0", "'edge'"]),
        ({"X": np.ones((4, 2))}, ["'X'", "(V, 3)", "(4, 2)", "axis 1"]),
        ({"X": np.full((4, 3), np.nan)}, ["NaN", "12 of 12", "(0, 0)"]),
        ({"edge": batch["edge"] + 0.5}, ["'edge'", "int64", "7 of 7 rows"]),
        (empty, ["'label'", "empty"]),
        ({"more": 1}, ["'more'"]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            train_once(model, [batch | change])
    with pytest.raises(ValueError, match=naming("data", "['edge']")):
        train_once(model, [{"X": batch["X"], "label": batch["label"]}])
    fixed = add_loss_output(
        float32_model("g (float[4,3] x) => (float[4,1] y) { y = MatMul(x, W) }", W=W)
    )
    with pytest.raises(ValueError, match=naming("(4, 3)", "(8, 3)", "axis 0")):
        train_once(fixed, [{"x": np.ones((8, 3)), "label": np.ones((8, 1))}])


def test_a_sum_is_divided_by_the_rows_of_the_label():
    x, y = R.random((2, 5, 3)), R.random((5, 2, 1))
    text = "g (float[N,5,3] X) => (float[5,N,1] Y) { t=Transpose<perm=[1,0,2]>(X) Y=MatMul(t,W) }"
    model = add_loss_output(float32_model(text, W=W))
    made = train_once(model, [{"X": x, "label": y}], weights_to_train=["W"])
    found, backward = transposed_product(x)
    expected = W - 0.05 * backward(2 * (found - y)) / 2  # of N = 2, and not of 5
    np.testing.assert_allclose(made.trained_coef_["W"], expected, rtol=1e-5)


def test_indices_into_tables_of_a_single_number():
    text = (
        "g (float[N,3] x, int64 which) => (float[N,1] y) { t = Gather(T, which) y = MatMul(x, t) }"
    )
    model = add_loss_output(float32_model(text, T=R.random((2, 3, 1))))
    batch = {"x": np.ones((4, 3)), "which": 1, "label": np.ones((4, 1))}
    made = train_once(model, [batch], weights_to_train=["T"])
    assert made.n_iter_ == 1
    with pytest.raises(ValueError, match=naming("'which'", "'T'", "elements")):
        train_once(model, [batch | {"which": 2}], weights_to_train=["T"])


# -- rows of arrays ------------------------------------------------------------------------------


def slices_of(model, data, batch_axes=None, size=2):
    source = Dataset(*data).source(fields_of(model, batch_axes, ["W"]), size)
    pieces = list(source.epoch(np.random.default_rng(0), 0, lambda batch: 2))
    order = np.random.default_rng(0).permutation(source.rows)
    return pieces, [order[i : i + size] for i in range(0, source.rows, size)]


def check_batches(pieces, cut, data, axes):
    """Check that the batches are the rows of `data` along `axes`, in the order of `cut`."""
    found = [
        {n: a[i] for n, a in p.model_arrays().items()} for p in pieces for i in range(p.batches)
    ]
    assert len(found) == len(cut)
    for batch, rows in zip(found, cut, strict=True):
        for name, axis in axes.items():
            array = np.asarray(data[name])
            expected = array if axis is None else array.take(rows, axis)
            np.testing.assert_array_equal(batch[name], np.float32(expected))


def model_as_it_is(name):
    return as_it_is(name)[0]


def test_rows_on_another_axis():
    data = {"X": R.random((5, 4, 3)), "label": R.random((4, 5, 1))}
    for stated in ({"X": 0}, {"label": 1}, {"X": 0, "label": -2}):
        pieces, cut = slices_of(model_as_it_is("time-major"), (data,), stated)
        assert [p.rows for p in pieces] == [2, 1]
        check_batches(pieces, cut, data, {"X": 0, "label": 1})
    pieces, cut = slices_of(model_as_it_is("time-major"), (data,), {"X": 1, "label": 0})
    check_batches(pieces, cut, data, {"X": 1, "label": 0})
    for axes, parts in (
        (None, ["rows", "batch_axes={'X': axis"]),
        ({"x": 0}, ["batch_axes", "'x'"]),
        ({"X": 3}, ["batch_axes['X']", "3 axes"]),
        ({"X": 0, "label": 0}, ["numbers", "rows"]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            slices_of(model_as_it_is("time-major"), (data,), axes)


STATE = """g (float[N,3] x, float[2,N,3] state, float[4,3] table, float rate) => (float[N,1] y) {
    s = ReduceSum<keepdims=0>(state, zero)  t = ReduceMean<keepdims=0>(table, zero)
    a = Add(x, s)  b = Add(a, t)  c = Mul(b, rate)  y = MatMul(c, W) }"""


def test_what_has_no_rows_goes_into_every_batch():
    model = add_loss_output(float32_model(STATE, W=W, zero=np.array([0])))
    data = {"x": R.random((5, 3)), "state": R.random((2, 5, 3)), "table": R.random((4, 3))}
    data |= {"rate": np.float32(0.5), "label": R.random((5, 1))}
    pieces, cut = slices_of(model, (data,))
    axes = {"x": 0, "state": 1, "table": None, "rate": None, "label": 0}
    check_batches(pieces, cut, data, axes)
    of_four = {n: np.take(a, range(4), axes[n]) if n != "rate" and axes[n] is not None else a
               for n, a in data.items()}  # as many rows as the table has  # fmt: skip
    pieces, cut = slices_of(model, (of_four,))
    check_batches(pieces, cut, of_four, axes)
    made = train_once(model, data, batch_size=5, weights_to_train=["W"])
    inner = (data["x"] + data["state"].sum(0) + data["table"].mean(0)) * 0.5
    gradient = 2 * inner.T @ (inner @ W - data["label"]) / 5
    np.testing.assert_allclose(made.trained_coef_["W"], W - 0.05 * gradient, rtol=1e-4)
    with pytest.raises(ValueError, match=naming("'table'", "(4, 3)", "(3, 3)")):
        slices_of(model, (data | {"table": R.random((3, 3))},))
    with pytest.raises(ValueError, match=naming("rows")):
        slices_of(model, (data | {"label": R.random((4, 1))},))


def test_an_array_of_other_rows_goes_in_whole():
    data = {"X": R.random((4, 3)), "edge": np.arange(7) % 4, "label": R.random((7, 1))}
    pieces, cut = slices_of(model_as_it_is("nodes and edges"), (data,))
    check_batches(pieces, cut, data, {"X": None, "edge": 0, "label": 0})
    whole = {"X": data["X"], "edge": np.array([0, 3, 1, 1]), "label": data["label"][:4]}
    pieces, cut = slices_of(model_as_it_is("nodes and edges"), (whole,), {"X": None})
    check_batches(pieces, cut, whole, {"X": None, "edge": 0, "label": 0})


@pytest.mark.parametrize("names", ["N N", "N M", "? ?", "N ?", "? N"])
def test_rows_may_have_several_names(names):
    first, second = names.split()
    text = f"""g (float[{first},3] x, int64[{second}] k) => (float[?,1] y)
        {{ e = Gather(t, k)  h = MatMul(x, W)  y = Add(h, e) }}"""
    model = add_loss_output(float32_model(text, W=W, t=np.zeros((3, 1))))
    data = {"x": R.random((10, 3)), "k": np.arange(10) % 3}
    y = data["x"] @ [[1], [2], [4]]
    made = train_once(model, data, y, batch_size=10, weights_to_train=["W", "t"])
    slope = 2 * (data["x"] @ W - y) / 10
    np.testing.assert_allclose(made.trained_coef_["W"], W - 0.05 * data["x"].T @ slope, rtol=1e-5)
    expected = [-0.05 * slope[data["k"] == i].sum() for i in range(3)]
    np.testing.assert_allclose(made.trained_coef_["t"].ravel(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=naming("rows")):
        train_once(model, data, y[:9])


def test_a_fixed_batch_leaves_no_row_over():
    text = "g (float[5,2] x) => (float[5,1] y) { y = MatMul(x, w) }"
    model = add_loss_output(float32_model(text, w=np.zeros((2, 1))))
    with pytest.raises(ValueError, match=naming("5 rows", "47")):
        train_once(model, NumberedSamples(), batch_size=5)
    assert (
        train_once(model, arrow_dataset(numbered_table()[:45], "price"), batch_size=5).n_iter_ == 1
    )


def test_rows_on_two_axes_have_to_be_said():
    text = (
        "g (float[N,3] x, float[N,N] pairs) => (float[N,1] y) { t=MatMul(pairs,x) y=MatMul(t,W) }"
    )
    model = add_loss_output(float32_model(text, W=W))
    data = {"x": R.random((4, 3)), "pairs": R.random((4, 4)), "label": R.random((4, 1))}
    with pytest.raises(ValueError, match=naming("'pairs'", "batch_axes={'pairs'")):
        slices_of(model, (data,))
    assert train_once(model, [data], weights_to_train=["W"]).n_iter_ == 1


def test_dicts_of_other_rows_than_the_label():
    with pytest.raises(ValueError, match=naming("rows", "symbols")):
        train_once(LINEAR, [{"x": X[:6], "label": Y[:1]}])  # which onnxruntime would broadcast


def test_several_labels():
    text = """g (float[N,3] x, float[N,1] first, int64[N] second) => (float[1,1] total)
        { y = MatMul(x, W)  c = Cast<to=1>(second)  d = Sub(y, first)  e = Add(d, c)
          s = Mul(e, e)  total = ReduceSum(s) }"""
    objective = objective_with_loss(float32_model(text, W=W), ["W"], "total", "")
    objective.written.infos.update(first=LossInfo(), second=LossInfo(classes=3))
    made = DataSpec(objective)
    y = {"first": np.ones((4, 1)), "second": np.arange(4) % 3}
    assert (made.label, made.labels, made.features) == ("first", ["first", "second"], ["x"])
    assert list(made.checked_arrays(np.ones((4, 3)), y)) == ["x", "first", "second"]
    with pytest.raises(ValueError, match=r"labels outside 0..2 in 1 of 4 rows: 3"):
        made.checked_arrays(np.ones((4, 3)), y | {"second": np.arange(4)})
    with pytest.raises(ValueError, match="Unknown label 'third'"):
        made.checked_arrays(np.ones((4, 3)), y | {"third": np.arange(4)})
    with pytest.raises(ValueError, match=naming("labels", "dict")):
        made.checked_arrays(np.ones((4, 3)), np.ones((4, 1)))


# -- files and tables ----------------------------------------------------------------------------


def one_batch(data, fields):
    """Return the arrays of all rows, by input."""
    (piece,) = data.source(fields, 1000).epoch(None, 0, lambda batch: 1)
    return piece.first_batch()


def test_lists_become_axes_and_columns_go_to_their_inputs(tmp_path):
    text = """g (float[N,2,2] x, int64[N] k) => (float[N,2] y)
        { e = Gather(t, k)  s = ReduceSum<keepdims=0>(x, o)  y = Add(s, e) }"""
    model = add_loss_output(
        float32_model(text, t=np.zeros((3, 2)), o=np.array([1])), weight_name="weight"
    )
    x, k, y = R.random((20, 2, 2)), np.arange(20) % 3, R.random((20, 2))
    columns = {"image": x.tolist(), "kind": k, "u": y[:, 0], "v": y[:, 1], "how": k + 1.0, "id": k}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=6)
    reader = arrow_dataset(
        tmp_path / "a.parquet", ["u", "v"], "how", columns={"x": "image", "k": ["kind"]}
    )
    made = fields_of(model, weights=["t"])
    (piece,) = Dataset(reader).source(made, 20).epoch(None, 0, lambda batch: 1)
    for name, expected in {"x": x, "k": k, "label": y, "weight": k + 1}.items():
        np.testing.assert_allclose(piece.arrays[name][0], expected, rtol=1e-6)
    assert made.names.columns == {"x": ["image"], "k": ["kind"]}
    assert made.names.target == ["u", "v"]
    again = one_batch(Dataset(reader), fields_of(model, weights=["t"]))
    np.testing.assert_array_equal(again["k"], k)


def test_columns_with_the_names_of_inputs(tmp_path):
    pq.write_table(pa.table({"label": Y[:, 0], "x": X.tolist()}), tmp_path / "a.parquet")
    for data in (Dataset(tmp_path / "a.parquet"), Dataset(pq.read_table(tmp_path / "a.parquet"))):
        arrays = one_batch(data, fields_of())
        np.testing.assert_array_equal(arrays["x"], X)
        np.testing.assert_array_equal(arrays["label"], Y)


def test_large_integers_beside_floats_are_exact():
    text = """g (int64[N] id, float[N,1] x) => (float[N,1] y)
        { h = Mod(id, seven)  c = Cast<to=1>(h)  u = Unsqueeze(c, one)  m = Mul(u, w)
          y = Add(m, x) }"""
    model = add_loss_output(
        float32_model(text, w=np.ones((1, 1)), one=np.array([1]), seven=np.array([7]))
    )
    ids = 2**60 + np.arange(10)
    data = arrow_dataset(pa.table({"id": ids, "x": np.ones(10), "label": np.ones(10)}))
    np.testing.assert_array_equal(one_batch(Dataset(data), fields_of(model))["id"], ids)


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(numbered_table(), path)
    ragged = pa.table({"x": [[1.0, 2.0]] * 8 + [[1.0]], "label": [1.0] * 9})
    missing = pa.table({"a": [1.0, None], "b": [1.0, 2.0], "label": [1.0, 2.0]})
    for data, y, parts in (
        (path, "prise", ["column", "'prise'", "'price'"]),
        (tmp_path / "missing.parquet", "price", ["missing.parquet"]),
        (tmp_path / "a.csv", "price", ["one kind"]),
        (path, Y, ["y", "columns"]),
        (numbered_table(), "prise", ["column", "'prise'"]),
        (X, "price", ["y=['price']", "table"]),
        (missing, None, ["batch 0", "'x'", "float32", "NaN", "1 of 2 rows"]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            train_once(LINEAR, arrow_dataset(data) if y is None else data, y, batch_size=2)
    with pytest.raises(ValueError, match=naming("'x'", "length")):
        train_once(LINEAR, arrow_dataset(ragged), batch_size=2)
    with pytest.raises(ValueError, match=naming("file", "filtered")):
        arrow_dataset(pads.dataset(path).filter(pads.field("a") > 3), "price")
    with pytest.raises(ValueError, match=naming("no rows", "pass files")):
        arrow_dataset(numbered_table()[:0], "price")


def test_labels_beside_data_that_bring_theirs():
    for data in (NumberedSamples(), arrow_dataset(numbered_table(), "price")):
        with pytest.raises(ValueError, match=naming("labels")):
            train_once(LINEAR, data, Y)


def test_samples_that_differ_in_shape():
    class Ragged(NumberedSamples):
        def __getitem__(self, i):
            return np.ones(2 + i % 2), Y[i]

    with pytest.raises(ValueError, match=r"shape.* 0: "):
        train_once(LINEAR, Ragged())


def test_samples_as_dicts_and_of_several_inputs():
    class Dicts(NumberedSamples):
        def __getitem__(self, i):
            return {"x": X[i], "label": Y[i]}

    class Nested(NumberedSamples):
        def __getitem__(self, i):
            return {"x": X[i]}, Y[i]

    for data in (Dicts(), Nested()):
        assert flat(drawn_numbers(Dataset(data).source(fields_of(), SIZE))) == list(range(ROWS))


def test_a_generator_is_read_once():
    source = Dataset(generated_batches()).source(fields_of(), SIZE)
    assert flat(drawn_numbers(source)) == list(range(ROWS))
    with pytest.raises(ValueError, match=naming("generator", "once")):
        drawn_numbers(source)


def test_an_order_that_is_drawn_in_the_thread_leaves_the_generator_alone():
    class Watched(Batches):
        shuffles = True

    rng = np.random.default_rng(0)
    source = ReaderSource(Watched(generated_batches), fields_of(), SIZE)
    pieces = source.epoch(rng, 0, lambda batch: 1)
    next(pieces)
    before = rng.bit_generator.state
    list(pieces)
    assert rng.bit_generator.state == before


# -- memory --------------------------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
from onnxgrad.data.arrow import arrow_dataset
from onnxgrad.data.columns import stack_columns


def peak():
    # since the process began, in kB; that of getrusage may be that of the process which started it
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


reader = arrow_dataset(sys.argv[1], "y", shuffle_rows=2000)
before = peak()
rows = sum(len(stack_columns("", y)) for _, y, *_ in reader.batches(500, 0, 0))
print(rows, (peak() - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path):
    count, path = 200_000, tmp_path / "a.parquet"  # 51 MB
    schema = pa.schema([("x", pa.list_(pa.float32(), 64)), ("y", pa.float32())])
    values, y = pa.array(np.ones(64 * 4000, np.float32)), pa.array(np.ones(4000, np.float32))
    part = pa.table([pa.FixedSizeListArray.from_arrays(values, 64), y], schema=schema)
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for _ in range(count // 4000):
            writer.write_table(part)
    assert path.stat().st_size > 50e6
    command = [sys.executable, "-c", MEMORY, str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    rows, more = map(int, run.stdout.split())
    assert rows == count
    assert more < 30, "MB more than at the beginning"


def test_arrays_of_bfloat16_have_a_digest():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    one, two = (
        describe_arrays("arrays", {"x": np.full((3, 2), n, ml_dtypes.bfloat16)}) for n in (1.0, 2.0)
    )
    assert one["inputs"] == two["inputs"] == {"x": {"shape": [3, 2], "dtype": "bfloat16"}}
    assert one["digest"] != two["digest"]


def test_digests_stay_as_earlier_versions_wrote_them():
    """A training that was saved goes on with the same data."""
    described = describe_arrays("arrays", {"x": np.arange(6.0).reshape(2, 3)})
    assert described["digest"] == "3d91e4af8cb16544b719e24d6c5f0bd8"


# -- what the Trainer does with them -------------------------------------------------------------


def test_the_trainer_takes_columns_in_another_order_by_name(tmp_path):
    trainer = Trainer(two_column_model(), "squared_error").fit(numbered_table(), "price")
    other = numbered_table().select(["b", "price", "a"])
    pq.write_table(other, tmp_path / "b.parquet")
    expected = trainer.evaluate(numbered_table(), "price")
    for data in (other, tmp_path / "b.parquet"):
        np.testing.assert_array_equal(trainer.predict(data), trainer.predict(X))
        assert trainer.evaluate(data, "price") == trainer.evaluate(data) == expected
        fresh = Trainer(trainer.model, "squared_error", learning_rate=1e-12)
        loss = fresh.fit(data, "price", batch_size=ROWS).history[0]["loss"]
        assert loss == pytest.approx(expected["loss"], rel=1e-5)


def test_columns_of_a_training_that_failed_are_forgotten():
    trainer = Trainer(two_column_model(), "squared_error")
    with pytest.raises(ValueError, match="holds NaN"):
        trainer.fit(pa.table({"u": [np.nan], "v": [1.0], "price": [1.0]}), "price")
    assert trainer.fit(numbered_table(), "price").state.step == 2


# -- Parquet -------------------------------------------------------------------------------------


def decoded_rows(path, **options):
    """Return the rows of all batches, in order."""
    read = list(arrow_dataset(path, "price", **options).batches(7, None, 0))
    return [np.concatenate([stack_columns("", part[i]) for part in read]) for i in (0, 1)]


def test_files_of_a_folder_may_differ(tmp_path):
    """In the order of columns, their types, their row groups; and one has no rows."""
    pq.write_table(numbered_table()[:0], tmp_path / "0.parquet")
    with pq.ParquetWriter(tmp_path / "1.parquet", numbered_table().schema) as writer:
        for part in (numbered_table()[:0], numbered_table()[:9], numbered_table()[9:20]):
            writer.write_table(part)
    other = numbered_table()[20:].select(["price", "b", "a"])
    other = other.set_column(1, "b", other["b"].cast(pa.float64()))
    pq.write_table(other, tmp_path / "2.parquet")
    x, y = decoded_rows(tmp_path)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_columns_that_a_file_lacks(tmp_path):
    """A label may be missing, where the loss ignores NaN, but no input."""
    pq.write_table(numbered_table()[:20], tmp_path / "0.parquet")
    pq.write_table(numbered_table()[20:].select(["a", "b"]), tmp_path / "1.parquet")
    x, y = decoded_rows(tmp_path)
    np.testing.assert_array_equal(np.isnan(y).ravel(), NUMBERS >= 20)
    np.testing.assert_array_equal(x, X)
    pq.write_table(numbered_table()[20:].select(["a", "price"]), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=naming("1.parquet", "column 'b'")):
        decoded_rows(tmp_path)


def test_partitions_are_columns(tmp_path):
    pads.write_dataset(numbered_table(), tmp_path, format="parquet", partitioning=["b"],
                       partitioning_flavor="hive")  # fmt: skip
    x, y = decoded_rows(tmp_path, columns=["a", "b"])
    order = np.argsort(x[:, 0])
    np.testing.assert_array_equal(x[order], X)
    np.testing.assert_array_equal(y[order], Y)


def test_row_groups_that_were_selected(tmp_path):
    pq.write_table(numbered_table(), tmp_path / "rows.parquet", row_group_size=6)
    (fragment,) = pads.dataset(tmp_path / "rows.parquet").get_fragments()
    chosen = [fragment.subset(row_group_ids=[1, 3])]
    dataset = pads.FileSystemDataset(chosen, numbered_table().schema, pads.ParquetFileFormat())
    np.testing.assert_array_equal(decoded_rows(dataset)[0], X[[*range(6, 12), *range(18, 24)]])


def test_a_folder_of_arrow_files(tmp_path):
    arrow_file(tmp_path)
    np.testing.assert_array_equal(decoded_rows(tmp_path)[0], X)
    pq.write_table(numbered_table(), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=naming(".arrow", "one kind")):
        decoded_rows(tmp_path)


def test_a_loader_is_iterated_once_an_epoch():
    """More passes would draw from the seed of its order."""
    passes = []

    class Counted(list):
        def __iter__(self):
            passes.append(len(self))
            return super().__iter__()

    batches = Counted([(X[:5], Y[:5]), (X[5:10], Y[5:10])])
    held_out = Counted([(X[10:], Y[10:]) for _ in range(3)])
    trainer = Trainer(two_column_model(), "squared_error", learning_rate=1e-4)
    trainer.fit(iter_again(batches), validation=iter_again(held_out), epochs=3)
    assert passes == [2, 3] * 3


def iter_again(batches):
    """Return an iterable that is no list."""

    class Again:
        def __iter__(self):
            return iter(batches)

    return Again()
