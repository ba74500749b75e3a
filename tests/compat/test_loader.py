"""Batches of a loop of one's own."""

from __future__ import annotations

import pickle

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad.compat import OrtDataLoader, ProviderError
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import session_of

X = np.arange(26, dtype=np.float32).reshape(13, 2)
Y = np.arange(39).reshape(13, 3)
W = np.arange(13.0)


def joined_batches(batches) -> list[np.ndarray]:
    """Return each array of the batches put together."""
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


@pytest.mark.parametrize("size", [1, 5, 13, 100])
@pytest.mark.parametrize("weight", [None, W, W[:, None]])
def test_the_order_is_kept(weight, size):
    data = OrtDataLoader(X, Y, weight, batch_size=size, random_iter=False)
    batches = list(data.iter_numpy())
    assert [len(b[0]) for b in batches] == [min(size, 13 - i) for i in range(0, 13, size)]
    made = joined_batches(batches)
    assert len(made) == (2 if weight is None else 3)
    for found, expected in zip(made, (X, Y, W), strict=False):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert np.shares_memory(batches[-1][0], X)  # no copy
    assert len(data) == 13


@pytest.mark.parametrize("size", [1, 5, 13, 100])
def test_every_row_once_in_random_order(size):
    data = OrtDataLoader(X, Y, W, batch_size=size, random_state=0)
    passes = [joined_batches(data.iter_numpy()) for _ in range(3)]
    for x, y, w in passes:
        np.testing.assert_array_equal(x[:, 0], 2 * w)  # rows stay together
        np.testing.assert_array_equal(y[:, 0], 3 * w)
        np.testing.assert_array_equal(np.sort(w), W)
    assert len({tuple(w) for _, _, w in passes}) == 3
    again = OrtDataLoader(X, Y, W, batch_size=size, random_state=0)
    np.testing.assert_array_equal(joined_batches(again.iter_numpy())[2], passes[0][2])
    generator = OrtDataLoader(X, Y, W, batch_size=size, random_state=np.random.default_rng(0))
    np.testing.assert_array_equal(joined_batches(generator.iter_numpy())[2], passes[0][2])


@pytest.mark.parametrize("size", [0, -1])
def test_all_rows_in_one_batch(size):
    [(x, y)] = OrtDataLoader(X, Y, batch_size=size, random_iter=False).iter_numpy()
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_shapes_and_dtypes():
    data = OrtDataLoader(X.tolist(), Y[:, 0], W.astype(np.float16)[:, None])
    x, y, w = data.data
    assert (y.shape, y.dtype, w.shape, w.dtype) == ((13, 1), Y.dtype, (13,), np.float16)
    assert data.desc == [((13, 2), x.dtype), ((13, 1), y.dtype), ((13,), w.dtype)]
    image = OrtDataLoader(np.zeros((4, 3, 2, 2)), np.zeros((4, 2, 2)))
    assert [a.shape for a in image.data] == [(4, 3, 2, 2), (4, 2, 2)]
    columns = OrtDataLoader(np.asfortranarray(X), Y, random_iter=False, batch_size=4)
    np.testing.assert_array_equal(joined_batches(columns.iter_numpy())[0], X)
    assert repr(data) == "OrtDataLoader(..., ..., batch_size=20, device='cpu', random_iter=True)"
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(X, requires_grad=True)
    np.testing.assert_array_equal(OrtDataLoader(tensor, Y).data[0], X)


@pytest.mark.parametrize("shuffled", [True, False])
def test_ortvalues(shuffled):
    data, same = (
        OrtDataLoader(X, Y, W, batch_size=5, random_iter=shuffled, random_state=3) for _ in "ab"
    )
    batches = list(data.iter_ortvalue())
    for values, arrays in zip(batches, same.iter_numpy(), strict=True):
        for value, array in zip(values, arrays, strict=True):
            assert isinstance(value, ort.OrtValue)
            np.testing.assert_array_equal(value.numpy(), array)


def binding_session() -> ort.InferenceSession:
    return session_of(
        parse_model("""g (float[N,2] x, int64[N,3] label, double[N] w, float[1] rate) => (
            float[N,2] a, int64[N,3] b, double[N] c) {
            a = Mul(x, rate)  b = Identity(label)  c = Identity(w) }""")
    )


@pytest.mark.parametrize("shuffled", [True, False])
def test_binding(shuffled):
    running = binding_session()
    bind = running.io_binding()
    bind.bind_cpu_input("rate", np.float32([2]))
    data = OrtDataLoader(X, Y, W, batch_size=5, random_iter=shuffled)
    rows, batches = [], []
    for count in data.iter_bind(bind, ["x", "label", "w"]):
        for name in "abc":
            bind.bind_output(name, "cpu")
        running.run_with_iobinding(bind)
        batches.append(bind.copy_outputs_to_cpu())
        rows.append(count)
    assert rows == [5, 5, 3]
    a, b, c = joined_batches(batches)
    np.testing.assert_array_equal(np.sort(c), W)
    np.testing.assert_array_equal(a, 2 * X[c.astype(int)])
    np.testing.assert_array_equal(b, Y[c.astype(int)])
    running.run_with_iobinding(bind)  # the last batch is still there
    np.testing.assert_array_equal(bind.copy_outputs_to_cpu()[2], c[-3:])
    assert list(data.iter_bind(bind, ["x", "label", "w", "rate"])) == [5, 5, 3]


def test_names_to_bind():
    data, bind = OrtDataLoader(X, Y, W), binding_session().io_binding()
    for names in (["x", "label"], ["x", "label", "w", "rate", "more"], "xyw"):
        with pytest.raises(ValueError, match=naming("iter_bind", "3 or 4 names")):
            data.iter_bind(bind, names)


def test_pickling():
    data = OrtDataLoader(X, Y, W, batch_size=5, random_state=0)
    list(data.iter_ortvalue())
    again = pickle.loads(pickle.dumps(data))
    for a, b in zip(
        joined_batches(again.iter_numpy()), joined_batches(data.iter_numpy()), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert repr(again) == repr(data)


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((X, Y[:5]), {}, "{'X': 13, 'y': 5}|pass the same number"),
        ((X, Y, W[:5]), {}, "{'X': 13, 'y': 13, 'sample_weight': 5}"),
        ((X, Y, X), {}, "'sample_weight'|(N,)|(13, 2)"),
        ((X[:0], Y[:0]), {}, "'X'|(0, 2)|pass at least one row"),
        ((X, 3), {}, "'y'|()|pass at least one row"),
        ((X, np.array(["a"] * 13)), {}, "'y'|numbers|<U1|index"),
    ],
)
def test_what_cannot_be_drawn_from(args, options, text):
    with pytest.raises(ValueError, match=naming(*text.split("|"))):
        OrtDataLoader(*args, **options)


def test_devices():
    with pytest.raises(ProviderError, match="device 'cpu2'"):
        OrtDataLoader(X, Y, device="cpu2")
    with pytest.raises(TypeError):
        OrtDataLoader(X, Y, batch_size=2.5)


def test_what_was_read_of_a_batch_outlives_it():
    X = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    loader = OrtDataLoader(X, X[:, :1], batch_size=100, random_state=0)
    kept = [x.numpy() for x, _ in loader.iter_ortvalue()]
    np.testing.assert_array_equal(np.sort(np.concatenate(kept)[:, 0]), X[:, 0])
