"""Labels of classes that are texts or numbers of their own, of a `Trainer` and of readers."""

import numpy as np
import pyarrow as pa
import pytest

import onnxgrad as og
from onnxgrad.data.class_numbers import class_weights_by_index, labels_to_class_indices
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep

X = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
NUMBERS = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1)
NAMES = np.array(["emu", "cat", "dog"])


def classifier_of(k=3):
    text = f"f (float[N,2] x) => (float[N,{k}] y) {{ y = MatMul(x, w) }}"
    return parse_model(text, opset=20, w=np.zeros((2, k), np.float32))


def train_named(y, *, of=None, loss="cross_entropy", validation=None, **more):
    trainer = og.Trainer(classifier_of() if of is None else of, loss, metrics=["accuracy"], **more)
    return trainer.fit(X, y, epochs=2, validation=(X, y if validation is None else validation))


@pytest.fixture(scope="module")
def plain():
    return train_named(NUMBERS)


def forms_of_names():
    pd = pytest.importorskip("pandas")
    texts = NAMES[NUMBERS]
    return [
        texts,
        texts.astype(object),
        texts.tolist(),
        pd.Series(texts, name="kind"),
        pd.Series(texts).astype("category"),
        pd.Series(texts).astype("string"),
        pd.DataFrame({"kind": texts}),
        pa.chunked_array([texts[:30].tolist(), texts[30:].tolist()]),
        texts[:, None],
    ]


def test_names_train_as_their_numbers(plain):
    named = train_named(NAMES[NUMBERS], classes=NAMES.tolist())
    assert named.history == plain.history
    expected = plain.evaluate(X, NUMBERS)
    stored = og.Trainer(named.model, "cross_entropy")
    for y in forms_of_names():
        assert named.evaluate(X, y) == expected
        assert stored.evaluate(X, y)["loss"] == expected["loss"]


@pytest.mark.sweep
@pytest.mark.parametrize("form", range(1, 9))
def test_forms_of_names_train_as_numbers(plain, form):
    y = forms_of_names()[form]
    assert train_named(y, classes=NAMES.tolist()).history == plain.history


def test_names_in_batches_weights_and_partial_fits(plain):
    texts, classes = NAMES[NUMBERS], NAMES.tolist()
    batches = [(X[i : i + 20], texts[i : i + 20]) for i in (0, 20, 40)]
    numbered = [(X[i : i + 20], NUMBERS[i : i + 20]) for i in (0, 20, 40)]
    losses = [
        og.Trainer(classifier_of(), "cross_entropy", classes=c).fit(b, epochs=2).history[-1]["loss"]
        for b, c in ((batches, classes), (numbered, ()))
    ]
    assert losses[0] == losses[1]
    weighted = train_named(texts, classes=classes, class_weight={"cat": 3.0, "dog": 0.5})
    assert weighted.history == train_named(NUMBERS, class_weight={1: 3.0, 2: 0.5}).history
    balanced = train_named(texts, classes=classes, class_weight="balanced")
    assert balanced.history == train_named(NUMBERS, class_weight="balanced").history
    one = og.Trainer(classifier_of(), "cross_entropy", classes=classes)
    one.partial_fit(X, texts)
    two = og.Trainer(classifier_of(), "cross_entropy")
    two.partial_fit(X, NUMBERS)
    np.testing.assert_array_equal(one.state.weights["w"], two.state.weights["w"])


def test_numbers_that_are_no_places(plain):
    own = np.array([3, 5, 8])[NUMBERS]
    named = train_named(own, classes=[3, 5, 8])
    assert named.history == plain.history
    assert train_named(own.astype(float), classes=["3", "5", "8"]).history == plain.history
    assert og.Trainer(named.model, "cross_entropy").evaluate(X, own)["loss"] == pytest.approx(
        named.evaluate(X, own)["loss"], rel=1e-6
    )
    assert named.evaluate(X, own.astype(object)) == named.evaluate(X, own)
    with pytest.raises(ValueError, match=naming("label 1", "row", "3, 5, 8")):
        named.evaluate(X, NUMBERS)
    with pytest.raises(ValueError, match=naming("outside 0..2", "classes=['3', '5', '8']")):
        train_named(own)
    with pytest.raises(ValueError, match=naming("outside 0..2", "replace_head")):
        train_named(np.arange(60) + 3)


def test_labels_that_are_ignored_stay_among_names():
    some = NUMBERS.copy()
    some[::7] = -100
    options = {"loss_options": {"ignore_index": -100}, "class_weight": "balanced"}
    expected = train_named(some, **options).history
    mixed = [int(n) if n < 0 else str(NAMES[n]) for n in some]
    for y in (np.array(mixed), np.array(mixed, object), mixed):
        assert train_named(y, classes=NAMES.tolist(), **options).history == expected
    with pytest.raises(ValueError, match=naming("-7", "row 0", "emu, cat, dog")):
        train_named([-7 if n == -100 else n for n in mixed], classes=NAMES.tolist())


def test_two_classes_and_one_output():
    text = NAMES[NUMBERS.clip(max=1)]
    named = train_named(
        text, of=classifier_of(1), loss="binary_cross_entropy", classes=["emu", "cat"]
    )
    plain = train_named(NUMBERS.clip(max=1), of=classifier_of(1), loss="binary_cross_entropy")
    assert named.history == plain.history


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": og.optimizers.ema(og.optimizers.adamw(), 0.5)},
        {"loss_options": {"label_smoothing": 0.1}},
        *map(in_sweep, [{"accumulate": 2}, {"recompute": "all"}, {"clip_norm": 0.01}]),
    ],
    ids=lambda more: next(iter(more)),
)
def test_names_with_other_features(more):
    named = train_named(NAMES[NUMBERS], classes=NAMES.tolist(), **more)
    assert named.history == train_named(NUMBERS, **more).history


def test_members_of_a_stack():
    text, rates = NAMES[NUMBERS], [0.01, 0.1]
    named = og.TrainerStack(
        classifier_of(), "cross_entropy", learning_rate=rates, classes=NAMES.tolist()
    )
    plain = og.TrainerStack(classifier_of(), "cross_entropy", learning_rate=rates)
    both = named.fit(X, text, epochs=2), plain.fit(X, NUMBERS, epochs=2)
    assert len({str([e["loss"].tolist() for e in t.history]) for t in both}) == 1


@pytest.mark.parametrize(
    ("labels", "classes", "parts"),
    [
        (["cat", "dog", "cat"], (), ["text", "'cat'", "classes=['cat', 'dog']"]),
        (["cat", "cow"], ["cat", "dog"], ["'cow'", "row 1", "cat, dog"]),
        ([3, 4], [3, 5], ["label 4", "row 1", "3, 5"]),
        ([["cat", "dog"], ["dog", "cow"]], ["cat", "dog"], ["'cow'", "row 1", "cat, dog"]),
    ],
)
def test_labels_that_are_none(labels, classes, parts):
    with pytest.raises(ValueError, match=naming(*parts)):
        labels_to_class_indices(labels, classes)


def test_names_of_weights_that_are_none():
    with pytest.raises(ValueError, match=naming("class_weight=", "'cow'", "'emu'")):
        og.Trainer(
            classifier_of(), "cross_entropy", classes=NAMES.tolist(), class_weight={"cow": 2}
        )


def test_numbers_stay_where_names_are_known(plain):
    """A file that stores names of classes still takes their numbers."""
    named = train_named(NAMES[NUMBERS], classes=NAMES.tolist())
    assert og.Trainer(named.model, "cross_entropy", metrics=["accuracy"]).evaluate(
        X, NUMBERS
    ) == pytest.approx(plain.evaluate(X, NUMBERS))


def test_targets_of_a_regression_are_no_classes():
    with pytest.raises(ValueError, match="numbers"):
        og.Trainer(classifier_of(1), "squared_error", classes=["a", "b"]).fit(X, ["a", "b"] * 30)


def test_readers_tell_the_names_of_their_classes(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for k, name in enumerate(("b", "a", "c")):
        (tmp_path / name).mkdir()
        image.new("RGB", (8, 8), (90 * k,) * 3).save(tmp_path / name / "0.png")
    text = """f (float[N,3,8,8] x) => (float[N,3] y)
        { p = GlobalAveragePool(x) f = Flatten(p) y = MatMul(f, w) }"""
    model = parse_model(text, opset=20, w=np.zeros((3, 3), np.float32))
    reader = og.data.image_folder(tmp_path, 8)
    made = og.Trainer(model, "cross_entropy").fit(reader, epochs=1).model
    kept = {e.key: e.value for e in made.metadata_props}
    assert kept["onnxgrad.classes"] == '["a", "b", "c"]'
    other = og.Trainer(made, "cross_entropy", classes=["c", "b", "a"])
    with pytest.raises(ValueError, match=naming("a, b, c", "c, b, a")):
        other.evaluate(reader)
    turned = og.data.image_folder(tmp_path, 8, classes=["c", "b", "a"])
    assert np.isfinite(other.evaluate(turned)["loss"])


@pytest.mark.parametrize(
    ("weights", "classes", "count", "expected"),
    [
        ({"cat": 2.0, 0: 3.0}, ["emu", "cat"], None, {1: 2.0, 0: 3.0}),
        ({5: 2.0, "8": 3.0}, [3, 5, 8], None, {1: 2.0, 2: 3.0}),
        ({3.0: 2.0}, [3, 5, 8], None, {0: 2.0}),
        ({"kind": {"cat": 2.0}, "size": "balanced"}, ["emu", "cat"], None,
         {"kind": {1: 2.0}, "size": "balanced"}),
        ({"1": 2.0}, [], 2, {1: 2.0}),
        ({"1": 2.0, "emu": 3.0}, ["emu", "cat"], 2, {1: 2.0, 0: 3.0}),
        ({"a": 2.0}, [], None, {"a": 2.0}),
        ([1.0, 2.0], ["emu", "cat"], None, [1.0, 2.0]),
    ],
)  # fmt: skip
def test_weights_of_classes_are_by_number(weights, classes, count, expected):
    assert class_weights_by_index(weights, classes, count) == expected


@pytest.mark.parametrize(
    ("weights", "classes", "count"),
    [({"cow": 1.0}, ["emu", "cat"], None), ({4: 1.0}, [3, 5, 8], None), ({"2": 1.0}, [], 2)],
)
def test_weights_of_unknown_classes_are_refused(weights, classes, count):
    with pytest.raises(ValueError, match=naming("class_weight=", repr(str(*weights)))):
        class_weights_by_index(weights, classes, count)


# -- names of classes and losses ------------------------------------------------------------------

LOSSES_OF_CLASSES = {3: "cross_entropy softmax_focal", 1: "binary_cross_entropy focal hinge"}
WEIGHTS, IGNORED = (1.0, 2.0, 3.0), -100


@pytest.mark.parametrize(
    "names", [["ärztin", "b", "c"], *map(in_sweep, ([3, 5, 8], ["2", "0", "1"]))], ids=str
)
@pytest.mark.parametrize("outputs", LOSSES_OF_CLASSES)
def test_every_loss_of_classes_takes_their_names(names, outputs):
    """Numbers of classes, their weights and ignored labels give the same by name, to each loss."""
    rng, names = np.random.default_rng(0), names[: max(2, outputs)]
    numbers, x = rng.integers(0, len(names), 12), rng.normal(size=(12, 4)).astype(np.float32)
    model = parse_model(
        f"f (float[N,4] x) => (float[N,{outputs}] y) {{ y = MatMul(x, w) }}",
        w=rng.normal(size=(4, outputs)).astype(np.float32),
    )
    some = np.where(np.arange(12) % 4, numbers, IGNORED)
    named = [type(names[0])(IGNORED) if n == IGNORED else names[n] for n in some]
    for loss in LOSSES_OF_CLASSES[outputs].split():
        cases = [({}, {}, numbers, [names[n] for n in numbers])]
        options = og.losses.LOSSES[loss].all_options
        if "class_weight" in options:
            weights = (
                dict(zip(names, WEIGHTS, strict=False)),
                dict(enumerate(WEIGHTS[: len(names)])),
            )
            cases += [tuple({"class_weight": w} for w in weights) + cases[0][2:]]
        if "ignore_index" in options:
            ignoring = {"loss_options": {"ignore_index": IGNORED}}
            cases += [(ignoring, ignoring, some, named)]
        for own, other, y, by_name in cases:
            trainers = (
                og.Trainer(model, loss, classes=names, **own),
                og.Trainer(model, loss, **other),
            )
            first, second = (
                t.fit(x, given, epochs=2) for t, given in zip(trainers, (by_name, y), strict=True)
            )
            assert first.history == second.history, (loss, own)
            assert first.evaluate(x, by_name) == second.evaluate(x, y)


# by form: a model, the shapes of its rows and labels, and losses with the number of classes
SHAPED = {
    "rows": ("x = MatMul(f, w)", (3,), (), {"cross_entropy": 3, "softmax_focal": 3}),
    "tokens": ("x = MatMul(f, w)", (5, 3), (5,), {"cross_entropy": 3}),
    "masks": ("x = Conv(f, k)", (3, 2, 4), (2, 4), {"cross_entropy": 3, "softmax_dice": 3}),
    "one score": ("x = MatMul(f, v)", (3,), (), {"binary_cross_entropy": 2, "hinge": 2}),
}
CALLED = {"texts": ["rosé", "b", "c"], "own": [3, 5, 8], "digits": ["3", "5", "8"]}


def draw_names(seed):
    """Return a model, its loss, rows, labels as names and as numbers, and options of both."""
    rng = np.random.default_rng(seed)
    body, row, label, losses = SHAPED[str(rng.choice([*SHAPED]))]
    axes = ["N", *(["C", "H", "W"] if len(row) == 3 else ["T", "C"])[-len(row) :]]
    outputs = [*axes[:-1], "1"] if "v" in body else axes
    shapes = [",".join(axes).replace("C", "3"), ",".join(outputs).replace("C", "3")]
    weights = {"w": (3, 3), "k": (3, 3, 1, 1), "v": (3, 1)}
    model = parse_model(
        f"g (float[{shapes[0]}] f) => (float[{shapes[1]}] x) {{ {body} }}",
        opset=20,
        **{n: rng.normal(size=s).astype("f") for n, s in weights.items() if f"{n})" in body},
    )
    loss = str(rng.choice([*losses]))
    called = CALLED[str(rng.choice([*CALLED]))][: losses[loss]]
    numbers = rng.integers(0, len(called), (12, *label))
    names, options, own = np.array(called)[numbers], {}, {}
    if loss == "cross_entropy" and (ignored := rng.choice([0, -100, 255])):
        mask = rng.uniform(size=numbers.shape) < 0.3
        numbers, names = np.where(mask, ignored, numbers), np.where(mask, ignored, names)
        options["loss_options"] = {"ignore_index": int(ignored)}
    if "cross_entropy" in loss and rng.integers(2):
        options["class_weight"] = own["class_weight"] = "balanced"
    elif "cross_entropy" in loss:
        options["class_weight"], own["class_weight"] = {0: 2.0}, {called[0]: 2.0}
    form = rng.choice(["array", "list", "object"])
    y = {"array": names, "list": names.tolist(), "object": names.astype(object)}[str(form)]
    rows = rng.normal(size=(12, *row)).astype("f")
    return model, loss, rows, (y, numbers), ({**options, **own, "classes": called}, options)


@pytest.mark.parametrize("seed", [*range(2), *map(in_sweep, range(2, 100))])
def test_drawn_names_are_numbers(seed):
    model, loss, rows, labels, options = draw_names(seed)
    histories = []
    for y, more in zip(labels, options, strict=True):
        trainer = og.Trainer(model, loss, learning_rate=0.1, **more)
        trainer.fit(rows, y, validation=(rows, y), batch_size=5, shuffle=False)
        histories.append([trainer.history[-1], trainer.evaluate(rows, y)])
    assert histories[0] == histories[1]
