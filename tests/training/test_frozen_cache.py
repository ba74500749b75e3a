"""`fit(cache=True)` trains the same weights as without, and computes frozen layers once."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import Checkpoint, EarlyStopping, Trainer, TrainerStack, add_lora
from onnxgrad.data import IndexedReader, Reader, image_folder
from onnxgrad.data.image_transforms import random_flip
from onnxgrad.losses import mixup
from onnxgrad.runtime import session as sessions
from tests.support.errors import naming
from tests.support.models import parse_model

rng = np.random.default_rng(0)


def scaled(*shape):
    return rng.normal(0, 0.4, shape).astype(np.float32)


CNN = parse_model(
    """f (float[N,2,8,8] x) => (float[N,3] y) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)
    h = BatchNormalization(a, scale, bias, mean, variance)  r = Relu(h)
    p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
    s = Shape<start=0, end=1>(x)  t = Concat<axis=0>(s, last)  f = Reshape(p, t)
    d = Dropout(f)  y = Gemm(d, v, c) }""",
    w=scaled(4, 2, 3, 3), b=scaled(4), v=scaled(64, 3), c=scaled(3), scale=1 + scaled(4),
    bias=scaled(4), mean=scaled(4), variance=1 + scaled(4) ** 2, last=np.int64([-1]),
)  # fmt: skip
X = rng.normal(size=(30, 2, 8, 8)).astype(np.float32)
Y = rng.integers(0, 3, 30)
WEIGHT = rng.uniform(0.5, 2, 30).astype(np.float32)
HEAD = ["v", "c"]


def fitted(model, cache, data=(X, Y), loss="cross_entropy", fit=None, **options):
    given = {"optimizer": "adamw", "learning_rate": 0.01, "train": HEAD, **options}
    trainer = Trainer(model, loss, **given)
    return trainer.fit(*data, cache=cache, **{"epochs": 3, "batch_size": 8, **(fit or {})})


def compare_with_uncached(model=CNN, **arguments) -> Trainer:
    """Compare weights, histories and the saved model; return the trainer with a cache."""
    cached, plain = fitted(model, True, **arguments), fitted(model, False, **arguments)
    for name, array in plain.evaluated().items():
        np.testing.assert_allclose(cached.evaluated()[name], array, rtol=1e-5, atol=1e-6)
    for own, other in zip(cached.history, plain.history, strict=True):
        assert own == pytest.approx(other, rel=1e-4, abs=1e-6)
    before, after = ([t.name for t in m.graph.initializer] for m in (plain.model, cached.model))
    assert before == after
    return cached


CASES = {
    "plain": {},
    "shares of the rows": {"fit": {"validation": 0.25}, "metrics": ["accuracy"]},
    "validation data": {"fit": {"validation": (X[:7], Y[:7])}},
    "sample weights": {"fit": {"sample_weight": WEIGHT}},
    "weights of classes": {"class_weight": "balanced", "fit": {"validation": 0.25}},
    "micro-batches": {"accumulate": 2, "fit": {"batch_size": 6}},
    "dropout behind": {"dropout": {"d": 0.4}},
    "clipped": {"clip_norm": 0.1},
    "early stopping": {"callbacks": [EarlyStopping("validation_loss", patience=1)],
                       "fit": {"validation": 0.25, "epochs": 6}},
    "in order": {"fit": {"shuffle": False}},
    "recomputed": {"recompute": "all"},
    "a dict": {"data": ({"x": X}, {"y": Y})},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_trains_the_same_weights(name):
    compare_with_uncached(**CASES[name])


def count_convolutions(monkeypatch) -> list[int]:
    """Return a list that gets the count of Conv nodes of each session which is opened."""
    counts, real = [], sessions.open_session

    def open_session(model, *arguments):
        counts.append(sum(n.op_type == "Conv" for n in _nodes(model.graph)))
        return real(model, *arguments)

    monkeypatch.setattr(sessions, "open_session", open_session)
    return counts


def _nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def test_frozen_layers_are_in_no_step(monkeypatch):
    counts = count_convolutions(monkeypatch)
    fitted(CNN, True, fit={"validation": 0.25})
    assert sum(counts) == 2  # the frozen parts of both kinds of rows
    del counts[:]
    fitted(CNN, False, fit={"validation": 0.25})
    assert sum(counts) > 2


def test_a_fixed_batch():
    model = onnx.ModelProto()
    model.CopyFrom(CNN)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 5
    compare_with_uncached(model, fit={"batch_size": 10})


def test_rows_on_another_axis():
    model = parse_model(
        """f (float[T,N,4] x) => (float[N,2] y) {
           h = MatMul(x, a)  t = Tanh(h)
           m = ReduceMean<keepdims=0>(t, zero)  y = MatMul(m, v) }""",
        a=scaled(4, 6), v=scaled(6, 2), zero=np.int64([0]),
    )  # fmt: skip
    x = rng.normal(size=(5, 30, 4)).astype(np.float32)
    compare_with_uncached(
        model, data=(x, scaled(30, 2)), loss="squared_error", train=["v"], batch_axes={"x": 1}
    )
    frozen = parse_model(
        """f (float[T,N,4] x) => (float[N,2] y) {
           h = MatMul(x, a)  t = Tanh(h)
           k = MatMul(t, v)  y = ReduceMean<keepdims=0>(k, zero) }""",
        a=scaled(4, 6), v=scaled(6, 2), zero=np.int64([0]),
    )  # fmt: skip
    compare_with_uncached(
        frozen, data=(x, scaled(30, 2)), loss="squared_error", train=["v"], batch_axes={"x": 1}
    )


MASKED = parse_model(
    """f (int64[N,T] ids, int64[N,T] mask) => (float[N,2] y) {
    e = Gather(table, ids)  q = MatMul(e, a)  k = Transpose<perm=[0,2,1]>(e)
    s = MatMul(q, k)  m = Cast<to=1>(mask)  o = Unsqueeze(m, one)  z = Mul(s, o)
    w = Softmax(z)  h = MatMul(w, e)  u = MatMul(h, b)  g = Tanh(u)
    n = Unsqueeze(m, two)  i = Mul(g, n)  r = ReduceSum<keepdims=0>(i, one)  y = MatMul(r, v) }""",
    table=scaled(20, 6), a=scaled(6, 6), b=scaled(6, 6), v=scaled(6, 2),
    one=np.int64([1]), two=np.int64([2]),
)  # fmt: skip
TOKENS = {
    "ids": rng.integers(0, 20, (30, 5)),
    "mask": (rng.random((30, 5)) < 0.8).astype(np.int64),
}


def test_inputs_that_both_parts_read():
    labels = rng.integers(0, 2, 30)
    compare_with_uncached(MASKED, data=(TOKENS, labels), train=["v"])
    compare_with_uncached(MASKED, data=(TOKENS, labels), train=["b", "v"])


def test_moves_of_a_kept_value_are_computed_from_it(caplog):
    """The block reads the frozen product h in two layouts, and is kept once."""
    model = parse_model(
        """f (float[N,4] x) => (float[N,2] y) {
           h = MatMul(x, a)  r = Reshape(h, cells)  t = Transpose<perm=[0, 2, 1]>(r)
           m = MatMul(t, v)  q = Flatten(m)  s = Sub(q, h)  y = MatMul(s, w) }""",
        a=scaled(4, 6), cells=np.array([-1, 3, 2]), v=scaled(3, 3), w=scaled(6, 2),
    )  # fmt: skip
    data = rng.normal(size=(30, 4)).astype(np.float32), scaled(30, 2)
    with caplog.at_level("INFO", "onnxgrad"):
        compare_with_uncached(model, data=data, loss="squared_error", train=["v", "w"])
    assert "cache: 'h' of 30 rows" in caplog.text


def test_a_feature_that_a_branch_reads():
    """The trained branch of an If reads the features, beside the results of frozen layers."""
    model = parse_model(
        """f (float[N,4] x) => (float[N,2] y) {
           h = MatMul(x, a)  t = Tanh(h)  s = ReduceSum<keepdims=0>(u)  c = Greater(s, zero)
           y = If(c) <then_branch = g () => (p) { k = Concat<axis=1>(t, x)  p = MatMul(k, v) },
                      else_branch = e () => (q) { q = MatMul(t, w) }> }""",
        a=scaled(4, 6), u=np.float32([1]), zero=np.float32(0), v=scaled(10, 2), w=scaled(6, 2),
    )  # fmt: skip
    data = rng.normal(size=(30, 4)).astype(np.float32), scaled(30, 2)
    compare_with_uncached(model, data=data, loss="squared_error", train=["v", "w"])


def test_adapters():
    adapted = add_lora(CNN, "v", rank=2)
    compare_with_uncached(adapted, train=None)


def test_a_stack():
    stacks = [
        TrainerStack(
            CNN, "cross_entropy", optimizer="sgd", learning_rate=[0.01, 0.1], train=HEAD
        ).fit(X, Y, epochs=2, batch_size=8, cache=cache)
        for cache in (True, False)
    ]
    for name, array in stacks[1].state.weights.items():
        np.testing.assert_allclose(stacks[0].state.weights[name], array, rtol=1e-5, atol=1e-6)


def test_statistics_behind_the_frozen_part():
    model = parse_model(
        """f (float[N,4] x) => (float[N,2] y) { h = MatMul(x, a)  t = Tanh(h)  k = MatMul(t, b)
           n = BatchNormalization(k, s, o, m, v)  y = MatMul(n, w) }""",
        a=scaled(4, 6), b=scaled(6, 5), s=1 + scaled(5), o=scaled(5), m=scaled(5),
        v=1 + scaled(5) ** 2, w=scaled(5, 2),
    )  # fmt: skip
    data = rng.normal(size=(32, 4)).astype(np.float32), scaled(32, 2)
    compare_with_uncached(model, data=data, loss="squared_error", train=["w"], batch_norm="train")


def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path):
    def fit_to(epochs, folder, resume=None):
        return fitted(
            CNN, True, callbacks=[Checkpoint(folder)], fit={"epochs": epochs, "resume": resume}
        )

    whole = fit_to(4, tmp_path / "whole")
    fit_to(2, tmp_path / "part")
    resumed = fit_to(4, tmp_path / "part", tmp_path / "part")
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(resumed.state.weights[name], array)


# -- data on disk ----------------------------------------------------------------------------------


def test_memory_mapped_arrays(tmp_path):
    np.save(tmp_path / "x.npy", X)
    compare_with_uncached(data=(np.load(tmp_path / "x.npy", mmap_mode="r"), Y))


def test_parquet_files(tmp_path):
    table, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    model = parse_model(
        "f (float[N,4] x) => (float[N,1] y) { h = MatMul(x, a)  t = Tanh(h)  y = MatMul(t, v) }",
        a=scaled(4, 6), v=scaled(6, 1),
    )  # fmt: skip
    x = rng.normal(size=(50, 4)).astype(np.float32)
    columns = {f"c{i}": x[:, i] for i in range(4)} | {"y": x.sum(axis=1)}
    parquet.write_table(table.table(columns), tmp_path / "rows.parquet", row_group_size=7)
    compare_with_uncached(
        model, data=(tmp_path / "rows.parquet", "y"), loss="squared_error", train=["v"]
    )


def write_images(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    for i in range(12):
        place = folder / f"kind{i % 3}"
        place.mkdir(exist_ok=True, parents=True)
        image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(place / f"{i}.png")


COLORS = parse_model(
    """f (float[N,3,8,8] x) => (float[N,3] y) { a = Conv<kernel_shape=[3,3]>(x, w)  r = Relu(a)
       p = GlobalAveragePool(r)  f = Flatten(p)  y = Gemm(f, v, c) }""",
    w=scaled(4, 3, 3, 3), v=scaled(4, 3), c=scaled(3),
)  # fmt: skip


def test_a_folder_of_images(tmp_path):
    write_images(tmp_path)
    compare_with_uncached(COLORS, data=(image_folder(tmp_path, 8),), fit={"batch_size": 5})
    moving = image_folder(tmp_path, 8, [random_flip(0.5)])
    with pytest.raises(ValueError, match=naming("cache", "random")):
        fitted(COLORS, True, data=(moving,))


class Noisy(IndexedReader):
    rows = 20

    def take(self, indices, seed):
        noise = 0 if seed is None else np.random.default_rng(seed).normal(size=(len(indices), 1))
        return (X.reshape(30, -1)[indices, :4] + noise).astype(np.float32), Y[indices]


class Streamed(Reader):
    shuffles = False

    def batches(self, size, seed, skip):
        for start in range(skip * size, 30, size):
            yield X[start : start + size], Y[start : start + size]


ROWS_AT_RANDOM = parse_model(
    "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, a)  t = Tanh(h)  y = MatMul(t, v) }",
    a=scaled(4, 6), v=scaled(6, 3),
)  # fmt: skip

REFUSED = {
    "rows that change": (ROWS_AT_RANDOM, (Noisy(),), {"train": ["v"]}, ("cache", "random")),
    "a stream": (CNN, (Streamed(),), {}, ("cache", "one order")),
    "batches": (CNN, ([(X[:8], Y[:8]), (X[8:], Y[8:])],), {}, ("cache", "one order")),
    "all weights": (CNN, (X, Y), {"train": "*"}, ("cache=True", "'x'")),
    "mixed rows": (CNN, (X, Y), {"mix": mixup(0.2)}, ("cache=True", "'x'")),
    "no folder": (CNN, (X, Y), {"fit": {"cache": 3}}, ("cache", "3")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept(name):
    model, data, options, parts = REFUSED[name]
    arguments = {"epochs": 1, "cache": True, **options.pop("fit", {})}
    trainer = Trainer(model, "cross_entropy", **{"train": HEAD, **options})
    before = {n: a.copy() for n, a in trainer.state.weights.items()}
    with pytest.raises(ValueError, match=naming(*parts)):
        trainer.fit(*data, **arguments)
    for n, array in before.items():
        np.testing.assert_array_equal(trainer.state.weights[n], array)


# -- files -----------------------------------------------------------------------------------------


def test_a_folder_serves_later_trainings(tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    first = fitted(CNN, folder, fit={"validation": 0.25})
    assert len(list(folder.iterdir())) == 2
    counts = count_convolutions(monkeypatch)
    second = fitted(CNN, folder, fit={"validation": 0.25})
    assert sum(counts) == 0
    for name, array in first.state.weights.items():
        np.testing.assert_array_equal(second.state.weights[name], array)
    fitted(CNN, folder, data=(X + 1, Y))  # other data have other values
    assert len(list(folder.iterdir())) == 3
    assert sum(counts) == 1


def test_large_values_are_in_a_file_that_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("onnxgrad.training.frozen_cache.free_memory", lambda: 1000.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain, there = fitted(CNN, False), fitted(CNN, True)
    for name, array in plain.state.weights.items():
        np.testing.assert_allclose(there.state.weights[name], array, rtol=1e-5, atol=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    trainer = Trainer(CNN, "cross_entropy", train=HEAD)
    with pytest.raises(OSError, match=naming("cache", "100")):
        trainer.fit(X, Y, cache=tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == []
    trainer.fit(X, Y)


def test_the_delivered_file_is_whole():
    trainer = fitted(CNN, True)
    session = ort.InferenceSession(trainer.model.SerializeToString())
    np.testing.assert_allclose(
        session.run(["y"], {"x": X})[0], trainer.predict(X), rtol=1e-5, atol=1e-6
    )
    assert trainer.evaluate(X, Y)["loss"] < Trainer(CNN, "cross_entropy").evaluate(X, Y)["loss"]
