"""Columns that names call: each kind of data, in each call, means what plain arrays mean."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep

ROWS, SIZE, IGNORED = 22, 8, -100
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
W = RNG.normal(size=(3, 3)).astype(np.float32)
CLASS = RNG.permutation(np.arange(ROWS) % 4).clip(max=2)  # of three, one more frequent
WEIGHT = RNG.uniform(0.5, 2, ROWS).astype(np.float32)
SOFT = RNG.dirichlet([1, 1, 1], ROWS).astype(np.float32)
TAGS = (RNG.uniform(size=(ROWS, 3)) < 0.5).astype(np.float32)
SOME = CLASS.copy()
SOME[::5] = IGNORED


def scores_of_three():
    return parse_model("f (float[N,3] x) => (float[N,3] y) { y = MatMul(x, w) }", opset=20, w=W)


def called(values, names):
    """Return labels as names of classes; what is ignored stays."""
    return [type(names[0])(v) if v == IGNORED else names[v] for v in values.tolist()]


# by kind: columns of labels, the same as arrays, and arguments of a trainer for both
LABELS = {
    "numbers": ({"lab": CLASS}, CLASS, {}),
    "texts": ({"lab": called(CLASS, ["rosé", "b", "c"])}, CLASS, {"classes": ["rosé", "b", "c"]}),
    "own numbers": ({"lab": np.array([3, 5, 8])[CLASS]}, CLASS, {"classes": [3, 5, 8]}),
    "ignored": ({"lab": SOME}, SOME, {}),
    "ignored own": ({"lab": np.array(called(SOME, [3, 5, 8]))}, SOME, {"classes": [3, 5, 8]}),
    "ignored texts": (
        {"lab": called(SOME, ["a", "b", "c"])},
        SOME,
        {"classes": ["a", "b", "c"]},
    ),
    "soft": (dict(zip(("p", "q", "r"), SOFT.T, strict=True)), SOFT, {"classes": [3, 5, 8]}),
    "tags": (dict(zip(("p", "q", "r"), TAGS.T, strict=True)), TAGS, {"classes": [3, 5, 8]}),
}


def parquet(columns, path):
    file = path / f"{len([*path.iterdir()])}.parquet"
    pq.write_table(pa.table(columns), file)
    return file


def frame(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def cut(table):
    return [table[i : i + SIZE] for i in range(0, ROWS, SIZE)]


def as_dict(table):
    """Return features as one array for the input, and each other column as an array."""
    others = {name: table[name].to_numpy() for name in table.columns if name not in "abc"}
    return {"x": table[["a", "b", "c"]].to_numpy(), **others}


def hugging_face(columns):
    return pytest.importorskip("datasets").Dataset.from_dict({n: [*c] for n, c in columns.items()})


KINDS = {
    "pandas": lambda columns, path: frame(columns),
    "polars": lambda columns, path: pytest.importorskip("polars").DataFrame(columns),
    "arrow": lambda columns, path: pa.table(columns),
    "parquet": parquet,
    "list of frames": lambda columns, path: cut(frame(columns)),
    "list of tables": lambda columns, path: cut(pa.table(columns)),
    "list of dicts": lambda columns, path: [*map(as_dict, cut(frame(columns)))],
    "generator of dicts": lambda columns, path: lambda: map(as_dict, cut(frame(columns))),
    "dict": lambda columns, path: as_dict(frame(columns)),
    "generator": lambda columns, path: lambda: iter(cut(frame(columns))),
    "hugging face": lambda columns, path: hugging_face(columns),
    "stream": lambda columns, path: hugging_face(columns).to_iterable_dataset(),
}


@dataclass(frozen=True)
class Drawn:
    """A combination: the kind of data and of labels, the call, and what is named."""

    kind: str
    labels: str
    face: str
    weighted: bool
    balanced: bool
    order: tuple[str, ...]  # of the columns in the second table


def drawn(seed):
    rng = np.random.default_rng(seed)

    def choose(values):
        return list(values)[rng.integers(len(values))]

    labels = choose(LABELS)
    names = ["a", "b", "c", *LABELS[labels][0], "w"]
    return Drawn(
        choose(KINDS),
        labels,
        choose(["fit", "evaluate", "predict", "validation", "partial_fit"]),
        bool(rng.integers(2)),
        bool(rng.integers(2)) and labels not in ("soft", "tags"),
        tuple(np.array(names)[rng.permutation(len(names))].tolist()),
    )


def balance(labels):
    own = labels[labels != IGNORED]
    return {int(c): len(own) / (3 * (own == c).sum()) for c in np.unique(own)}


def compare(case, stacked, path):
    columns, y, options = LABELS[case.labels]
    every = dict(zip("abc", X.T, strict=True)) | columns
    every |= {"w": WEIGHT} if case.weighted else {}
    names = [*columns] if len(columns) > 1 else "lab"
    loss = "binary_cross_entropy" if case.labels == "tags" else "cross_entropy"
    kind, rates = og.Trainer, 0.1
    if stacked:
        kind, rates = og.TrainerStack, [0.1, 0.2]
    given = {"optimizer": "adam", "learning_rate": rates}
    if case.labels != "soft":
        given["metrics"] = ["accuracy"]
    weights = {"class_weight": "balanced"} if case.balanced else {}
    made = kind(scores_of_three(), loss, **given, **options, **weights)
    if case.balanced:
        weights = {"class_weight": balance(y)}
    plain = kind(scores_of_three(), loss, **given, **weights)
    of_rows = {"sample_weight": "w"} if case.weighted else {}
    of_arrays = {"sample_weight": WEIGHT} if case.weighted else {}
    first = KINDS[case.kind](every, path)
    second = KINDS[case.kind]({n: every[n] for n in case.order if n in every}, path)
    more = {"epochs": 2, "batch_size": SIZE, "shuffle": False}
    validation = plain_validation = None
    if case.face == "validation":
        validation = (second, names, *of_rows.values())
        plain_validation = (X, y, *of_arrays.values())
    made.fit(first, names, validation=validation, **of_rows, **more)
    plain.fit(X, y, validation=plain_validation, **of_arrays, **more)
    if case.face == "evaluate":
        results = made.evaluate(second, names, **of_rows), plain.evaluate(X, y, **of_arrays)
    elif case.face == "predict":
        results = made.predict(second), plain.predict(X)
    else:
        if case.face == "partial_fit":
            made.partial_fit(second, names, batch_size=SIZE, shuffle=False, **of_rows)
            plain.partial_fit(X, y, batch_size=SIZE, shuffle=False, **of_arrays)
        results = made.history[-1], plain.history[-1]
    own, expected = (r if isinstance(r, dict) else {"": r} for r in results)
    assert own.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(own[name], value, rtol=2e-5, atol=1e-6, err_msg=str(case))


@pytest.mark.parametrize("seed", [*range(4), *map(in_sweep, range(4, 200))])
def test_named_columns_mean_what_arrays_mean(seed, tmp_path):
    for number in range(3 * seed, 3 * seed + 3):
        compare(drawn(number), number % 4 == 0, tmp_path)


def test_balanced_weights_are_of_the_rows_that_train(tmp_path):
    """A share that is held out does not count, nor does a label that the loss ignores."""
    ignoring = og.losses.LOSSES["cross_entropy"].with_options({"ignore_index": 2})
    kept = np.sort(np.random.default_rng([0, 1]).permutation(ROWS)[round(ROWS * 0.3) :])
    own = CLASS[kept]
    counts = np.bincount(own)
    for loss, classes, held_out in (("cross_entropy", 3, 0.3), (ignoring, 2, np.float32(0.3))):
        weights = {c: counts[:classes].sum() / (classes * counts[c]) for c in range(classes)}
        made, plain = (
            og.Trainer(scores_of_three(), loss, class_weight=given).fit(
                X, CLASS, validation=held_out
            )
            for given in ("balanced", weights)
        )
        assert made.history[0] == pytest.approx(plain.history[0])
        assert made.evaluate(X, CLASS) == pytest.approx(plain.evaluate(X, CLASS))
        halves = made.step_models(X[kept], own), plain.step_models(X, CLASS)
        assert [len(half.graph.node) for half in halves[0]] == [
            len(h.graph.node) for h in halves[1]
        ]
    for y in (SOFT, X):
        with pytest.raises(ValueError, match=naming("class_weight='balanced'")):
            og.Trainer(scores_of_three(), "cross_entropy", class_weight="balanced").fit(X, y)


def test_columns_and_classes_of_several_outputs():
    text = """f (float[N,3] x) => (float[N,3] kind, float[N,2] size)
        { kind = MatMul(x, w) size = MatMul(x, v) }"""
    two = parse_model(text, opset=20, w=W, v=W[:, :2])
    losses = {"kind": "cross_entropy", "size": "squared_error"}
    table = pa.table(
        {**dict(zip("abc", X.T, strict=True)), "lab": CLASS, "u": X[:, 0], "v": X[:, 1]}
    )
    named, by_output = {"kind": "lab", "size": ["u", "v"]}, {"kind": CLASS, "size": X[:, :2]}
    balanced = {"balanced": "balanced", "by output": {"kind": "balanced"}}
    plain = og.Trainer(two, losses, class_weight={"kind": balance(CLASS)}).fit(X, by_output)
    for weights in balanced.values():
        made = og.Trainer(two, losses, class_weight=weights).fit(table, named)
        assert made.history == plain.history
    expected = plain.predict(X)
    for output, values in made.predict(table).items():
        np.testing.assert_allclose(values, expected[output], rtol=1e-6)
    with pytest.raises(ValueError, match=naming("'lab'", "twice")):
        made.fit(table, named | {"size": ["lab", "u"]})


def test_a_function_is_called_once_for_each_pass():
    """Its first batch is read before the others, and its random numbers stay in their order."""
    rng, calls = np.random.default_rng(0), []

    def batches():
        calls.append(rng.integers(100))
        for part in np.split(np.arange(ROWS - 2), 2):
            yield X[part] + np.float32(rng.normal()), SOFT[part]

    made = og.Trainer(scores_of_three(), "cross_entropy").fit(batches, epochs=2)
    assert len(calls) == 2
    rng = np.random.default_rng(0)
    listed = [list(batches()) for _ in range(2)]
    expected = og.Trainer(scores_of_three(), "cross_entropy").fit(listed[0])
    expected.partial_fit(listed[1])
    np.testing.assert_array_equal(made.state.weights["w"], expected.state.weights["w"])
