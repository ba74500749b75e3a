"""Data that fits the model, or is refused before onnxruntime sees it."""

import json
import pickle

import numpy as np
import onnx
import pyarrow as pa
import pytest

from tests.support.combinations import parametrize_chosen
from tests.support.errors import naming
from tests.support.small_models import (
    BOTH_TRAINERS,
    float32_model,
    inner_loss_trainer,
    outer_loss_trainer,
)

R = np.random.default_rng(0)


class Frame:
    """What tables of all libraries have in common: names, and columns by name."""

    def __init__(self, **columns):
        self.columns, self.values = list(columns), columns

    def __getitem__(self, name):
        return self.values[name]


class ArrayFrame(Frame):
    """A table that is an array too, as those of pandas and polars are."""

    def __array__(self, dtype=None, copy=None):
        columns = [self[name] for name in self.columns]
        if all(column.ndim == 1 for column in columns):
            return np.stack(columns, 1)
        cells = np.empty((len(columns[0]), len(columns)), object)  # of arrays, as pandas does
        for i, column in enumerate(columns):
            cells[:, i] = list(column) if column.ndim > 1 else column
        return cells


def pandas_frame(**columns):
    return pytest.importorskip("pandas").DataFrame(
        {name: list(array) if array.ndim > 1 else array for name, array in columns.items()}
    )


def polars_frame(**columns):
    return pytest.importorskip("polars").DataFrame(columns)


def arrow_table(**columns):
    return pa.table({name: array.tolist() for name, array in columns.items()})


FRAMES = (Frame, ArrayFrame, arrow_table, pandas_frame, polars_frame)
TRAINERS = (inner_loss_trainer, outer_loss_trainer)
EACH_FRAME = parametrize_chosen(
    "trainer frame",
    [*((outer_loss_trainer, frame) for frame in FRAMES), (inner_loss_trainer, ArrayFrame)],
    *(TRAINERS, FRAMES),
)

# -- names of columns ----------------------------------------------------------------------------

X = np.float32(R.standard_normal((20, 3)))
Y = X @ np.float32([[2], [-1], [1]])
LINEAR = float32_model(
    "g (float[N,3] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.zeros((3, 1))
)


def table_of(names, frame=ArrayFrame):
    return frame(**{name: X[:, "abc".index(name)] for name in names})


def with_metadata(model, **texts):
    """Return a copy with these metadata."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for key, value in texts.items():
        made.metadata_props.add(key=key, value=value)
    return made


def metadata_of(model):
    return {e.key: e.value for e in model.metadata_props}


@EACH_FRAME
def test_the_trained_model_keeps_the_names(trainer, frame):
    made = trainer(LINEAR).fit(table_of("abc", frame), frame(price=Y[:, 0]))
    trained = made.get_trained_onnx()
    kept = metadata_of(trained)
    assert json.loads(kept["onnxgrad.columns"]) == {"x": ["a", "b", "c"]}
    assert json.loads(kept["onnxgrad.target"]) == ["price"]
    assert list(made.feature_names_in_) == ["a", "b", "c"]
    again = pickle.loads(pickle.dumps(made))
    assert again.get_trained_onnx() == trained
    new = type(made)(trained, max_iter=1, random_state=0).fit(table_of("abc", frame), Y)
    more = frame(a=X[:, 0], b=X[:, 1], c=X[:, 2], d=X[:, 2])
    for data, parts in (
        (table_of("ab", frame), ["column 'c'"]),
        (more, ["column 'd'", "fit"]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            type(made)(trained, max_iter=1).fit(data, Y)
    turned = type(made)(trained, max_iter=1, random_state=0).fit(table_of("bac", frame), Y)
    assert turned.train_losses_ == new.train_losses_


@BOTH_TRAINERS
def test_arrays_add_no_metadata(trainer):
    made = trainer(LINEAR).fit(X, Y)
    assert not metadata_of(made.get_trained_onnx(LINEAR))
    trained = trainer(LINEAR).fit(table_of("abc"), Y).get_trained_onnx(LINEAR)
    assert list(metadata_of(trained)) == ["onnxgrad.columns"]
    more = trainer(trained).fit(X, Y).get_trained_onnx(trained)  # names stay
    assert metadata_of(more) == metadata_of(trained)


def test_the_metadata_of_the_user_stay():
    model = with_metadata(LINEAR, author="somebody")
    trained = outer_loss_trainer(model).fit(table_of("abc"), Y).get_trained_onnx()
    assert metadata_of(trained) == {
        "author": "somebody",
        "onnxgrad.columns": json.dumps({"x": ["a", "b", "c"]}),
    }
    assert metadata_of(model) == {"author": "somebody"}


def test_metadata_that_cannot_be_read():
    for value in ("{", "[1]", '{"x": "abc"}'):
        model = with_metadata(LINEAR, **{"onnxgrad.columns": value})
        with pytest.raises(ValueError, match=naming("'onnxgrad.columns'", "JSON")):
            outer_loss_trainer(model).fit(X, Y)


def test_columns_in_another_order_are_taken_by_name():
    made, swapped = outer_loss_trainer(LINEAR).fit(table_of("abc"), Y), table_of("acb")
    for use in (made.predict, lambda x: made.score(x, Y), lambda x: made.losses(x, Y)):
        np.testing.assert_array_equal(use(swapped), use(table_of("abc")))
    expected = outer_loss_trainer(LINEAR).fit(table_of("abc"), Y, X_val=table_of("abc"), y_val=Y)
    made = outer_loss_trainer(LINEAR).fit(table_of("abc"), Y, X_val=swapped, y_val=Y)
    assert made.validation_losses_ == expected.validation_losses_
    twice = [
        inner_loss_trainer(LINEAR).fit([(table_of("abc"), Y), (other, Y)])
        for other in (table_of("abc"), swapped)
    ]
    assert twice[0].train_losses_ == twice[1].train_losses_
    kept = metadata_of(twice[1].get_trained_onnx())["onnxgrad.columns"]
    assert json.loads(kept) == {"x": ["a", "b", "c"]}
    assert made.fit(swapped, Y).predict(swapped).shape == (20, 1)  # training begins anew


def test_labels_of_several_columns_are_taken_by_name():
    model = float32_model(
        "g (float[N,3] x) => (float[N,2] y) { y = MatMul(x, w) }", w=np.zeros((3, 2))
    )
    first, second = ArrayFrame(u=X[:, 0], v=X[:, 1]), ArrayFrame(v=X[:, 1], u=X[:, 0])
    trained = outer_loss_trainer(model).fit(X, first).get_trained_onnx()
    both = [outer_loss_trainer(trained).fit(X, y).train_losses_ for y in (first, second)]
    assert both[0] == both[1]
    outer_loss_trainer(trained).fit(X, ArrayFrame(w=X[:, 0], z=X[:, 1]))


TWO = """g (float[N,2] x, int64[N] k) => (float[N,1] y)
    { e = Gather(t, k)  h = MatMul(x, w)  y = Add(h, e) }"""
TWO = float32_model(TWO, w=np.zeros((2, 1)), t=np.zeros((3, 1)))


@EACH_FRAME
def test_a_table_is_split_among_several_inputs(trainer, frame):
    k = np.arange(20) % 3
    columns = {"k": k, "x": X[:, :2], "label": Y[:, 0]}
    made = trainer(TWO).fit(frame(**columns))
    expected = trainer(TWO).fit({"x": X[:, :2], "k": k}, Y)
    assert made.train_losses_ == expected.train_losses_
    assert "onnxgrad.columns" not in metadata_of(made.get_trained_onnx())
    with pytest.raises(ValueError, match=r"column .* 'x'"):
        trainer(TWO).fit(frame(k=k, xx=k), Y)
    with pytest.raises(ValueError, match=naming("columns", "['spare']")):
        trainer(TWO).fit(frame(k=k, x=X[:, :2], spare=k), Y)
    with pytest.raises(ValueError, match=naming("columns", "['label']")):
        trainer(TWO).fit(frame(**columns), Y)


def test_columns_that_the_model_names_for_several_inputs():
    columns = '{"x": ["a", "b"], "k": ["kind"]}'
    model = with_metadata(TWO, **{"onnxgrad.columns": columns})
    k = np.arange(20) % 3
    made = outer_loss_trainer(model).fit(Frame(b=X[:, 1], kind=k, a=X[:, 0]), Y)
    assert (
        made.train_losses_ == outer_loss_trainer(TWO).fit({"x": X[:, :2], "k": k}, Y).train_losses_
    )
    assert metadata_of(made.get_trained_onnx()) == metadata_of(model)


# -- shapes --------------------------------------------------------------------------------------

IMAGE = float32_model(
    """g (float[N,1,8,8] image) => (float[N,1] y)
    { c = Conv(image, k)  f = Flatten(c)  y = MatMul(f, w) }""",
    k=R.standard_normal((1, 1, 5, 5)),
    w=R.standard_normal((16, 1)),
)
PIXELS = np.float32(R.standard_normal((20, 64)))
IMAGES = PIXELS.reshape(20, 1, 8, 8)


def table_of_pixels(frame, count=64, **more):
    return frame(**{f"p{i}": PIXELS[:, i % 64] for i in range(count)}, **more)


@EACH_FRAME
def test_a_table_feeds_an_image_model(trainer, frame):
    expected = trainer(IMAGE).fit(IMAGES, Y, X_val=IMAGES, y_val=Y)
    halves = frame(top=PIXELS[:, :32], bottom=PIXELS[:, 32:])
    mixed = frame(first=PIXELS[:, 0], rest=PIXELS[:, 1:])
    every = frame in (ArrayFrame, pandas_frame)
    forms = [{"image": table_of_pixels(frame)}, mixed]
    for X in (table_of_pixels(frame), frame(row=PIXELS), halves, *forms) if every else forms:
        made = trainer(IMAGE).fit(X, Y, X_val=X, y_val=Y)
        assert made.train_losses_ == expected.train_losses_
        assert made.validation_losses_ == expected.validation_losses_
        if trainer is outer_loss_trainer:
            np.testing.assert_array_equal(made.predict(X), expected.predict(IMAGES))
            np.testing.assert_array_equal(made.losses(X, Y), expected.losses(IMAGES, Y))
    with pytest.raises(ValueError, match=naming("'image'", "64 values", "63")):
        trainer(IMAGE).fit(table_of_pixels(frame, 63), Y)


@BOTH_TRAINERS
def test_arrays_are_not_reshaped(trainer):
    with pytest.raises(ValueError, match=naming("(rows, 1, 8, 8)", "(20, 64)")):
        trainer(IMAGE).fit(PIXELS, Y)


def test_tables_that_hold_no_numbers():
    with pytest.raises(ValueError, match=naming("numbers", "'u'", "row 1")):
        outer_loss_trainer(LINEAR).fit(
            Frame(a=X[:, 0], b=X[:, 1], c=np.array([1, "u"] * 10, object)), Y
        )
    with pytest.raises(ValueError, match="column 1 is called 'Unnamed: 0'"):
        outer_loss_trainer(LINEAR).fit(Frame(**{"Unnamed: 0": X[:, 0]}, b=X[:, 1], c=X[:, 2]), Y)
    twice = ArrayFrame(a=X[:, 0], b=X[:, 1])
    twice.columns = ["a", "b", "a"]
    with pytest.raises(ValueError, match=naming("two columns", "'a'")):
        outer_loss_trainer(LINEAR).fit(twice, Y)


# -- axes ----------------------------------------------------------------------------------------

MASKED = float32_model(
    """g (int64[N,T] ids, float[N,T] mask) => (float[N,1] y)
    { e = Gather(t, ids)  u = Unsqueeze(mask, last)  m = Mul(e, u)
      s = ReduceSum<keepdims=0>(m, one)  y = MatMul(s, w) }""",
    t=R.standard_normal((5, 2)),
    w=R.standard_normal((2, 1)),
    last=np.array([2]),
    one=np.array([1]),
)


@BOTH_TRAINERS
def test_axes_of_one_symbol_have_one_length(trainer):
    ids, y = np.arange(80).reshape(20, 4) % 5, Y
    fed = {"ids": ids, "mask": np.ones((20, 4))}
    made = trainer(MASKED).fit(fed, y)
    message = r"'mask' has length 1 along axis 1, and 'ids', axis 1 has length 4.* 'T'"
    wrong = {"ids": ids, "mask": np.ones((20, 1))}  # which onnxruntime would broadcast
    for data in ((wrong, y), ([{**fed, "label": y}, {**wrong, "label": y}],)):
        with pytest.raises(ValueError, match=message):
            trainer(MASKED).fit(*data)
    with pytest.raises(ValueError, match=message):
        trainer(MASKED).fit(fed, y, X_val=wrong, y_val=y)
    if trainer is outer_loss_trainer:
        with pytest.raises(ValueError, match=message):
            made.predict(wrong)


@BOTH_TRAINERS
def test_axes_without_a_symbol_may_differ(trainer):
    model = onnx.ModelProto()
    model.CopyFrom(MASKED)
    for x in model.graph.input:
        x.type.tensor_type.shape.dim[1].dim_param = "?"
    fed = {"ids": np.arange(80).reshape(20, 4) % 5, "mask": np.ones((20, 1))}
    assert np.isfinite(trainer(model).fit(fed, Y).train_losses_[0])
