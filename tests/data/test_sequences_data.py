"""Sequences of different length: padding, masks, and batches of similar length."""

import json
import re

import numpy as np
import pytest

from onnxgrad import Checkpoint, Trainer, add_loss_output
from onnxgrad.callbacks import Callback
from onnxgrad.compat import LearningRateSGD, OrtGradientOptimizer
from onnxgrad.data.padding import by_length, pad_sequences
from onnxgrad.training.data import Dataset
from onnxgrad.training.fields import DataSpec
from tests.support.errors import naming
from tests.support.small_models import float32_model
from tests.support.trainings import objective_with_loss

R = np.random.default_rng(0)
LENGTHS = R.integers(1, 30, 203)
IDS = [R.integers(0, 9, n) for n in LENGTHS]
Y = np.float32(np.arange(203)[:, None])
TABLE, W = R.standard_normal((9, 2)), R.standard_normal((2, 1))

MEAN = """g (int64[N,T] ids, float[N,T] mask, int64[N] lengths) => (float[N,1] y)
    { e = Gather(t, ids)  u = Unsqueeze(mask, last)  m = Mul(e, u)
      s = ReduceSum<keepdims=0>(m, one)  v = Unsqueeze(lengths, one)  c = Cast<to=1>(v)
      d = Div(s, c)  y = MatMul(d, w) }"""


def masked_mean_model():
    return add_loss_output(float32_model(MEAN, t=TABLE, w=W, last=np.array([2]), one=np.array([1])))


def reader_of_ids(**options):
    return by_length({"ids": IDS}, Y, mask="mask", lengths="lengths", **options)


def drawn_batches(data, seed=None, skip=0, size=8):
    source = Dataset(data).source(
        DataSpec(objective_with_loss(masked_mean_model(), ["w"], row_weight="")), size
    )
    rng = None if seed is None else np.random.default_rng(seed)
    return [
        {name: array[i] for name, array in piece.arrays.items()}
        for piece in source.epoch(rng, skip, lambda batch: 3)
        for i in range(piece.batches)
    ]


def test_padding():
    arrays = [R.standard_normal((n, 2)) for n in (3, 1, 0, 2)]
    padded, mask, lengths = pad_sequences(arrays, value=-7)
    assert padded.shape == (4, 3, 2)
    assert lengths.tolist() == [3, 1, 0, 2]
    assert mask.dtype == bool
    for row, inside, array in zip(padded, mask, arrays, strict=True):
        np.testing.assert_array_equal(row[: len(array)], array)
        assert (row[len(array) :] == -7).all()
        assert inside.tolist() == [True] * len(array) + [False] * (3 - len(array))
    assert pad_sequences([[1], [2, 3]], length=4)[0].tolist() == [[1, 0, 0, 0], [2, 3, 0, 0]]
    assert pad_sequences([[], [2, 3]])[0].dtype == np.int64
    for arguments, message in (
        (([],), "sequence"),
        (([[1, 2, 3], [1]], 0, 2), r"length=2.*sequence 0.* 3"),
        (([[1], [2]], 0.5), r"int64.*=0\.5"),
        (
            ([np.ones((2, 3)), np.ones((2, 4))],),
            r"\[\(3,\), \(4,\)\]",
        ),
        (([3, 4],), r"sequence 0.*single"),
        ((["ab"],), "numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            pad_sequences(*arguments)


@pytest.mark.parametrize("seed", [None, 0])
def test_every_sequence_once(seed):
    found = drawn_batches(reader_of_ids(value=8), seed)
    rows = [int(n) for batch in found for n in batch["label"].ravel()]
    assert sorted(rows) == list(range(203))
    assert (rows == list(range(203))) == (seed is None)
    assert sorted(len(batch["ids"]) for batch in found) == [3] + [8] * 25
    for batch in found:
        assert batch["ids"].shape[1] == batch["lengths"].max()
        for row, mask, n, i in zip(
            batch["ids"], batch["mask"], batch["lengths"], batch["label"].ravel(), strict=True
        ):
            np.testing.assert_array_equal(row[:n], IDS[int(i)])
            assert (row[n:] == 8).all()
            assert mask.tolist() == [1] * n + [0] * (len(row) - n)


def test_batches_of_similar_length():
    def padding(batches):
        return sum(int((batch["mask"] == 0).sum()) for batch in batches)

    found = drawn_batches(reader_of_ids(), 0)
    assert padding(found) < 0.2 * padding(drawn_batches(reader_of_ids()))
    widths = [batch["ids"].shape[1] for batch in found]
    assert widths != sorted(widths)


def test_the_seed_decides_and_skips_are_exact():
    first = drawn_batches(reader_of_ids(), 1)
    for skip in (0, 1, 13, 26):
        again = drawn_batches(reader_of_ids(), 1, skip)
        assert len(again) == len(first) - skip
        for a, b in zip(first[skip:], again, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)
    other = drawn_batches(reader_of_ids(), 2)
    assert any(
        a["label"].tolist() != b["label"].tolist() for a, b in zip(first, other, strict=True)
    )


def test_padding_changes_no_gradient():
    """A step on all sequences is that of each sequence by itself, in float64."""
    rate = LearningRateSGD(0.1, learning_rate="constant")
    options = {"max_iter": 1, "batch_size": 203, "learning_rate": rate, "weights_to_train": ["w"]}
    made = OrtGradientOptimizer(masked_mean_model(), **options).fit(reader_of_ids(value=3))
    means = np.stack([TABLE[ids].mean(0) for ids in IDS])
    expected = W - 0.1 * 2 * means.T @ (means @ W - Y) / 203
    np.testing.assert_allclose(made.trained_coef_["w"], expected, rtol=1e-4)


TAGS = """g (int64[N,T] ids) => (float[N,K,T] y)
    { e = Gather(t, ids)  y = Transpose<perm=[0, 2, 1]>(e) }"""


def tagging_model():
    made = float32_model(TAGS.replace("K", "2"), t=TABLE)
    return add_loss_output(made, "cross_entropy", reduction="sum")


def test_labels_that_are_sequences():
    """What is padded is ignored: the loss is that of each element, in float64."""
    tags = [ids % 2 for ids in IDS]
    made = OrtGradientOptimizer(tagging_model(), max_iter=1, batch_size=203, learning_rate=1e-9)
    made.fit(by_length(IDS, tags, value=0))
    total = 0.0
    for ids, tag in zip(IDS, tags, strict=True):
        scores = TABLE[ids] - np.log(np.exp(TABLE[ids]).sum(1, keepdims=True))
        total -= scores[np.arange(len(ids)), tag].sum()
    np.testing.assert_allclose(made.train_losses_[0], total / 203, rtol=1e-5)
    with pytest.raises(ValueError, match=naming("'label'", "outside 0..1")):
        OrtGradientOptimizer(tagging_model(), max_iter=1).fit(
            by_length(IDS, tags, value=0, y_value=7)
        )
    with pytest.raises(ValueError, match=naming("floats", "pass y_value")):
        by_length(IDS, [ids / 2 for ids in IDS])


def test_other_inputs_and_weights():
    text = """g (float[N,T] s, float[N,2] x) => (float[N,1] y)
        { a = ReduceSum<keepdims=1>(s, one)  b = MatMul(x, w)  y = Add(a, b) }"""
    made = add_loss_output(float32_model(text, w=W, one=np.array([1])), weight_name="weight")
    x, weight = R.random((203, 2)), np.arange(203) + 1.0
    fields = DataSpec(objective_with_loss(made, ["w"]))
    data = Dataset(by_length({"s": IDS, "x": x}, Y, weight, value=0)).source(fields, 203)
    (piece,) = data.epoch(np.random.default_rng(0), 0, lambda batch: 1)
    rows = piece.arrays["label"][0, :, 0].astype(int)
    np.testing.assert_allclose(piece.arrays["x"][0], x[rows], rtol=1e-6)
    np.testing.assert_array_equal(piece.arrays["weight"][0], weight[rows])


def test_sequences_that_do_not_fit():
    for arguments, options, message in (
        ((IDS, Y), {"mask": "mask"}, "pass X"),
        (({"ids": IDS, "mask": IDS}, Y), {"mask": "mask"}, "input 'mask'"),
        ((IDS, Y[:5]), {}, "{'X': 203, 'y': 5}"),
        ((np.ones((4, 3)), Y[:4]), {}, "no sequences"),
        (({"a": IDS[:3], "b": [*IDS[:2], [1]]}, Y[:3]), {}, r"row 2 .*'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            by_length(*arguments, **options)
    with pytest.raises(ValueError, match=naming("'masks'", "'mask'")):
        drawn_batches(by_length({"ids": IDS}, Y, mask="masks", lengths="lengths"))


# -- several sequences, and other axes ------------------------------------------------------------

OTHERS = [R.integers(1, 9, n) for n in R.integers(1, 20, 203)]
WIDE = [R.standard_normal((2, 4, n)).astype("f") for n in LENGTHS]
TWO = """g (int64[N,S] ids, int64[N,T] others) => (float[N,1] y)
    { a = ReduceSum<keepdims=1>(ids, one)  b = ReduceSum<keepdims=1>(others, one)
      c = Concat<axis=1>(a, b)  f = Cast<to=1>(c)  y = MatMul(f, w) }"""


def pad_with(rows, value, axis=0):
    """Return rows padded by `numpy.pad`."""
    longest = max(row.shape[axis] for row in rows)
    widths = [[(0, (longest - r.shape[i]) * (i == axis)) for i in range(r.ndim)] for r in rows]
    return np.stack(
        [np.pad(r, w, constant_values=value) for r, w in zip(rows, widths, strict=True)]
    )


@pytest.mark.parametrize("seed", [None, 0])
def test_each_sequence_is_padded_by_its_own_rule(seed):
    X = {"ids": IDS, "others": OTHERS, "images": WIDE, "number": np.arange(203)}
    masks, counts = {"ids": "m", "y": "my", "images": "mi"}, {"others": "n"}
    options = {"mask": masks, "lengths": counts, "axis": {"images": -1}}
    made = by_length(X, OTHERS, value={"others": 9, "images": 0.5}, y_value=-1, **options)
    batches = list(made.batches(8, seed, 0))
    assert len(batches) == 26
    rows = [row for X, _, _ in batches for row in X["number"].tolist()]
    assert sorted(rows) == list(range(203))
    for X, y, weight in batches:
        at = X["number"]
        ids, others = [IDS[i] for i in at], [OTHERS[i] for i in at]
        np.testing.assert_array_equal(X["ids"], pad_with(ids, 0))
        np.testing.assert_array_equal(X["others"], pad_with(others, 9))
        np.testing.assert_array_equal(X["images"], pad_with([WIDE[i] for i in at], 0.5, 2))
        np.testing.assert_array_equal(y, pad_with(others, -1))
        np.testing.assert_array_equal(X["m"], pad_with([np.ones(len(s)) for s in ids], 0))
        np.testing.assert_array_equal(X["mi"], X["m"])
        np.testing.assert_array_equal(X["my"], pad_with([np.ones(len(s)) for s in others], 0))
        assert X["n"].tolist() == [len(s) for s in others]
        assert weight is None


def test_labels_by_output_and_widths_alone():
    labels = {"a": [image[0, 0] for image in WIDE], "b": Y}
    [(X, y, _)] = by_length(WIDE, labels, value=0, y_value=7).batches(203, None, 0)
    np.testing.assert_array_equal(X, pad_with(WIDE, 0, 2))
    np.testing.assert_array_equal(y["a"], pad_with(labels["a"], 7))
    np.testing.assert_array_equal(y["b"], Y)
    lists = [image.tolist() for image in WIDE]
    [(again, none, _)] = by_length(lists, value=0).batches(203, None, 0)
    np.testing.assert_allclose(again, X)
    assert none is None


def test_two_sequences_train_as_each_row_by_itself():
    model = float32_model(TWO, one=np.array([1]), w=W)
    sums = np.stack([[s.sum() for s in IDS], [s.sum() for s in OTHERS]], 1) * 1.0
    expected = W - 1e-4 * 2 * sums.T @ (sums @ W - Y) / 203
    made = Trainer(model, "squared_error", optimizer="sgd", learning_rate=1e-4)
    made.fit(by_length({"ids": IDS, "others": OTHERS}, Y, value=0), batch_size=203)
    np.testing.assert_allclose(made.state.weights["w"], expected, rtol=1e-4)


def test_lengths_that_have_to_agree():
    most = [*OTHERS[:-1], np.append(OTHERS[-1], 0)]
    data = {"ids": OTHERS, "others": most}
    n = len(OTHERS[-1])
    with pytest.raises(ValueError, match=naming("row 202", f"{n + 1}", "'others'", f"{n}")):
        by_length(data)
    with pytest.raises(ValueError, match="same_length=False"):
        by_length({"ids": IDS, "others": OTHERS}, same_length=True)
    [(X, _, _)] = by_length(data, value=0, same_length=False).batches(203, None, 0)
    np.testing.assert_array_equal(X["others"], pad_with(most, 0))
    both = {"ids": IDS, "others": OTHERS}
    for X, options, message in (
        (both, {"mask": "m"}, r"length.*'m'.*mask=\{'ids': 'm'\}"),
        (both, {"lengths": {"idz": "m"}}, r"lengths.*'idz'"),
        (both, {"mask": {"ids": "m", "others": "m"}}, "input 'm'"),
        (both, {"value": {"idz": 1}}, r"value.*'idz'"),
        (both, {"axis": {"idz": 1}}, r"axis.*'idz'"),
        ({"a": WIDE}, {"mask": "m"}, r"mask= of 'a'.*pass axis="),
        (WIDE, {"axis": 1}, r"'X'.*axis 2.*axis 1"),
        ([np.ones((2, 3)), np.ones((3, 2))], {}, r"axis 1.*axis 0"),
        ([np.ones((2, 3)), np.ones(3)], {}, r"\[1, 2\] axes: give all rows"),
    ):
        with pytest.raises(ValueError, match=message):
            by_length(X, **options)


# -- sequences that nothing masks -----------------------------------------------------------------

NARROW = """g (float[N,C,H,W] images) => (float[N,1] y)
    { m = ReduceMean<keepdims=0>(images, last)  r = ReduceMax<keepdims=0>(m, last)
      f = Relu(r)  y = MatMul(f, w) }"""
RECURRENT = """g (int64[N,T] ids) => (float[N,1] y)
    { e = Gather(t, ids)  x = Transpose<perm=[1, 0, 2]>(e)
      all, h = RNN<hidden_size=2>(x, weight, state)
      s = Squeeze(h, axes)  y = MatMul(s, w) }"""
STATE = R.standard_normal((2, 1, 2, 2))


def recurrent_model():
    arrays = {"weight": STATE[0], "state": STATE[1], "axes": np.array([0])}
    return float32_model(RECURRENT, t=TABLE, w=W, **arrays)


def last_state(ids):
    """Return the state of the network after a sequence, in float64."""
    state = np.zeros(2)
    for i in ids:
        state = np.tanh(STATE[0][0] @ TABLE[i] + STATE[1][0] @ state)
    return state


STATES = np.stack([last_state(ids) for ids in IDS])


@pytest.mark.parametrize("seed", [None, 0])
def test_rows_of_one_length_make_a_batch(seed):
    data = by_length({"ids": IDS, "others": OTHERS, "number": np.arange(203)}, OTHERS, y_value=-1)
    for size in (1, 4, 300):
        batches = list(data.batches(size, seed, 0))
        rows = [row for X, _, _ in batches for row in X["number"].tolist()]
        assert sorted(rows) == list(range(203))
        if seed is None:
            assert rows == data.order.tolist()
        pairs = [(len(a), len(b)) for a, b in zip(IDS, OTHERS, strict=True)]
        assert len(batches) == sum(-(-pairs.count(pair) // size) for pair in {*pairs})
        assert len(batches) == data.count_batches(size)
        for X, y, _ in batches:
            for i, row in enumerate(X["number"]):
                np.testing.assert_array_equal(X["ids"][i], IDS[row])
                np.testing.assert_array_equal(X["others"][i], OTHERS[row])
                np.testing.assert_array_equal(y[i], OTHERS[row])
        for skip in (1, len(batches) - 1):
            again = list(data.batches(size, seed, skip))
            assert len(again) == len(batches) - skip
            for a, b in zip(batches[skip:], again, strict=True):
                np.testing.assert_array_equal(a[0]["number"], b[0]["number"])


def test_a_network_without_mask_sees_no_padding(caplog):
    """Losses are means of rows, predictions have their order; PyTorch would pack the rows."""
    data = by_length({"ids": IDS}, Y / 100)
    trainer = Trainer(
        recurrent_model(), "squared_error", optimizer="sgd", learning_rate=1e-9, train="w"
    )
    expected = STATES @ W
    np.testing.assert_allclose(trainer.predict(data), expected, rtol=1e-4, atol=1e-5)
    loss = np.mean((expected - Y / 100) ** 2)
    assert trainer.evaluate(
        data,
    )["loss"] == pytest.approx(loss, rel=1e-5)
    trainer.fit(data, epochs=2, batch_size=8, validation=data)
    for entry in trainer.history:
        assert entry["loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["validation_loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["step"] == entry["epoch"] * data.count_batches(8)
    assert [r.message for r in caplog.records].count(caplog.records[0].message) == 1
    assert re.search(naming("'ids'", "length"), caplog.text)
    padded = by_length({"ids": IDS}, Y / 100, value=0)
    assert abs(Trainer(recurrent_model(), "squared_error").predict(padded) - expected).max() > 0.1


def test_gradients_of_rows_of_one_length():
    ten = [i for i in range(203) if LENGTHS[i] == 10]
    data = by_length({"ids": [IDS[i] for i in ten] + [IDS[0][:1]]}, np.append(Y[ten], [[0]], 0))
    trainer = Trainer(
        recurrent_model(), "squared_error", optimizer="sgd", learning_rate=0.01, train="w"
    )
    trainer.fit(data, batch_size=100, shuffle=False)
    w = W.copy()
    for states, y in ((last_state(IDS[0][:1])[None], np.zeros((1, 1))), (STATES[ten], Y[ten])):
        w = w - 0.01 * 2 * states.T @ (states @ w - y) / len(y)
    np.testing.assert_allclose(trainer.state.weights["w"], w, rtol=1e-4)


def test_widths_of_images_and_two_outputs_of_rows():
    w = R.standard_normal((2, 1))
    model = float32_model(NARROW, last=np.array([-1]), w=w)
    images = {"images": WIDE}
    expected = np.stack([np.maximum(image.mean(2).max(1), 0) for image in WIDE]) @ w
    trainer = Trainer(model, "squared_error", optimizer="sgd", learning_rate=1e-9)
    data = by_length(images, Y)
    np.testing.assert_allclose(trainer.predict(data), expected, rtol=1e-4, atol=1e-5)
    trainer.fit(data, batch_size=16)
    assert trainer.history[0]["loss"] == pytest.approx(np.mean((expected - Y) ** 2), rel=1e-5)


def test_a_share_for_validation_and_an_interrupted_training(tmp_path):
    """Half of the epoch, saved and continued, is the same as all of it, bit for bit."""

    class Stop(Callback):
        every_steps = 70

        def on_step_end(self, trainer, state, control):
            control.stop = control.save = state.step == 70

    def trained(*callbacks):
        model = recurrent_model()
        return Trainer(model, "squared_error", learning_rate=0.01, callbacks=callbacks, seed=3)

    data = by_length({"ids": IDS}, Y / 100)
    options = {"epochs": 2, "batch_size": 4, "validation": 0.25}
    whole = trained().fit(data, **options)
    part = trained(Stop(), Checkpoint(tmp_path)).fit(data, **options)
    assert part.state.step == 70
    assert part.history == whole.history[:1]
    rest = trained(Checkpoint(tmp_path)).fit(data, **options, resume=tmp_path)
    assert rest.history == whole.history
    for name, value in whole.state.weights.items():
        np.testing.assert_array_equal(rest.state.weights[name], value)


def test_predictions_of_sequences_that_differ_in_length():
    made = float32_model("g (int64[N,T] ids) => (float[N,T,2] y) { y = Gather(t, ids) }", t=TABLE)
    trainer = Trainer(made, "squared_error")
    with pytest.raises(ValueError, match=naming("'y'", "[N, 1, 2]", "batch")):
        trainer.predict(by_length(IDS))
    found = trainer.predict(by_length(IDS, value=0), batch_size=203)
    np.testing.assert_allclose(found, TABLE[pad_with(IDS, 0)], rtol=1e-5)


def test_what_masks_a_sequence():
    ones = [np.ones(n, np.int64) for n in LENGTHS]
    for X, options, apart in (
        ({"ids": IDS}, {}, ["ids"]),
        ({"ids": IDS}, {"mask": "m"}, []),
        ({"ids": IDS}, {"lengths": "n"}, []),
        ({"ids": IDS}, {"value": 0}, []),
        ({"ids": IDS, "attention_mask": ones}, {}, []),
        ({"ids": IDS, "n": LENGTHS}, {}, []),
        ({"ids": IDS, "types": IDS}, {"value": {"types": 0}}, ["ids"]),
        ({"ids": IDS, "others": OTHERS}, {"mask": {"ids": "m"}}, ["others"]),
        ({"ids": IDS, "others": OTHERS}, {"mask": {"y": "m"}}, ["ids"]),
        ({"ids": [ids[:1] for ids in IDS]}, {}, []),
    ):
        data = by_length(X, OTHERS, **options)
        assert data.describe().get("apart", []) == apart
        assert (data.order is None) == (apart == [])


def test_descriptions():
    def of(data):
        return data.describe()

    assert json.loads(json.dumps(of(reader_of_ids()))) == of(reader_of_ids())
    assert of(reader_of_ids()) != of(by_length({"ids": IDS[::-1]}, Y, mask="mask"))


def test_sequences_that_are_read_when_they_are_needed():
    """Those that state their shapes are read once for each batch, and are as those in memory."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(3, 2, n)).astype(np.float32) for n in (4, 2, 7, 3, 5)]
    taken = []

    class Files:
        shapes = tuple(row.shape for row in rows)

        def __len__(self):
            return len(rows)

        def __getitem__(self, i):
            taken.append(int(i))
            return rows[i]

    labels = [[1, 2], [3], [9], [4], [5, 6, 7]]
    lazy = by_length(Files(), labels, axis=2, same_length=False)
    assert taken == []
    for seed in None, 1:
        plain = by_length(rows, labels, axis=2, same_length=False).batches(2, seed, 0)
        for got, expected in zip(lazy.batches(2, seed, 0), plain, strict=True):
            for a, b in zip(got[:2], expected[:2], strict=True):
                np.testing.assert_array_equal(a, b)
        assert sorted(taken) == list(range(5))
        taken.clear()
