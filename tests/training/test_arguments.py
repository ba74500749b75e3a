"""What a resumed training must have equal: each argument of every signature is compared or free."""

import inspect
import re
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.metrics.classification import F1
from onnxgrad.training.job import ARGUMENTS
from onnxgrad.training.sharing import Sharing
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.public_names import public_objects

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 4)).astype(np.float32), RNG.integers(0, 3, 24)
HELD = RNG.normal(size=(9, 4)).astype(np.float32), RNG.integers(0, 3, 9)
CALL = {"epochs": 1, "batch_size": 8, "validation": HELD, "sample_weight": np.ones(24)}


def small_classifier(scale=1.0, kind="float"):
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    return parse_model(
        f"""f ({kind}[N,4] x) => ({kind}[N,3] y, {kind}[N,3] z) {{
            h = MatMul(x, w)  n = BatchNormalization(h, s, b, m, v)  y = MatMul(n, u)
            z = Identity(y) }}""",
        opset=20,
        w=(scale * RNG.normal(size=(4, 3))).astype(dtype),
        u=np.eye(3, dtype=dtype),
        **{name: np.ones(3, dtype) for name in "sbmv"},
    )


MODEL = small_classifier()
BASE = {
    "model": MODEL,
    "loss": {"y": "cross_entropy"},
    "optimizer": "adam",
    "learning_rate": 0.01,
    "metrics": {"y": ["top_2_accuracy"]},
    "callbacks": [og.EarlyStopping("validation_loss", patience=3)],
}
CHANGED = {  # of each argument that is compared, another value, with what else must change
    "model": {"model": small_classifier(2.0)},
    "loss": {"loss": {"y": "softmax_focal"}},
    "loss_options": {"loss_options": {"y": {"label_smoothing": 0.1}}},
    "loss_weights": {"loss_weights": {"y": 2.0}},
    "class_weight": {"class_weight": {"y": [1.0, 2.0, 3.0]}},
    "classes": {"classes": [0, 1, 2]},
    "optimizer": {"optimizer": og.optimizers.adam(b1=0.8)},
    "learning_rate": {"learning_rate": 0.02},
    "train": {"train": ["w", "u"]},
    "freeze": {"freeze": ["u"]},
    "clip_norm": {"clip_norm": 1.0},
    "accumulate": {"accumulate": 2},
    "batch_norm": {"batch_norm": "train"},
    "dropout": {"dropout": {"h": 0.5}},
    "mix": {"mix": og.losses.mixup(0.2)},
    "batch_axes": {"batch_axes": {"x": 0, "label": 0}},
    "carry": {"carry": {"x": "x"}},
    "recompute": {"recompute": "cheap"},
    "seed": {"seed": 1},
    "X": {"X": X + 1},
    "y": {"y": Y[::-1].copy()},
    "sample_weight": {"sample_weight": np.full(24, 2.0)},
    "validation": {"validation": (HELD[0] + 1, HELD[1])},
    "batch_size": {"batch_size": 12},
    "shuffle": {"shuffle": False},
}
FREE = {
    "metrics": {"metrics": {"y": ["accuracy"]}},
    "callbacks": {
        "callbacks": [og.EarlyStopping("validation_loss", patience=9), og.callbacks.Timing()]
    },
    "epochs": {"epochs": 2},
    "resume": {},
}
ELSEWHERE = {  # compared in tests of their own, or without an effect on this model
    *("train_ranges", "precision", "device", "parallel", "members", "weights", "init", "carry"),
    "cache",
}


def fit_with(folder=None, **changes):
    options = BASE | changes
    call = {"X": X, "y": Y} | CALL | {n: v for n, v in options.items() if n in FIT_ARGUMENTS}
    trainer = og.Trainer(**{n: v for n, v in options.items() if n not in call})
    return trainer.fit(**call, resume=folder)


FIT_ARGUMENTS = [name for name in inspect.signature(og.Trainer.fit).parameters if name != "self"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    fit_with(callbacks=[*BASE["callbacks"], og.Checkpoint(folder)])
    return folder


def test_every_argument_is_classified():
    signatures = og.Trainer, og.TrainerStack, og.Trainer.fit
    names = {name for of in signatures for name in inspect.signature(of).parameters}
    names -= {"self", "arguments"}  # of a stack, the ones of a `Trainer`
    assert names == set(ARGUMENTS)
    assert names == {*CHANGED, *FREE, *ELSEWHERE}
    for name in CHANGED:
        assert not ARGUMENTS[name].free
    for name in FREE:
        assert ARGUMENTS[name].free


STACKED = {og.Trainer: {}, og.TrainerStack: {"members": 2, "init": "redrawn"}}


@pytest.mark.parametrize("name", ["learning_rate", "optimizer", "loss", "seed"])
@pytest.mark.parametrize("kind", STACKED)
def test_arguments_of_a_trainer_cannot_be_assigned(kind, name):
    """An assignment would be in vain, silently."""
    trainer = kind(MODEL, {"y": "cross_entropy"}, **STACKED[kind])
    with pytest.raises(AttributeError, match=naming(kind.__name__, name)):
        setattr(trainer, name, 1)


@pytest.mark.parametrize("kind", STACKED)
def test_public_attributes_are_documented(kind):
    trainer = kind(MODEL, {"y": "cross_entropy"}, **STACKED[kind])
    public = {n for n in {*dir(kind), *vars(trainer)} if not n.startswith("_")}
    methods = {n for n in public if inspect.isfunction(inspect.getattr_static(kind, n, None))}
    _, _, attributes = inspect.getdoc(kind).partition("\nAttributes:\n")
    listed, _, _ = attributes.partition("\n\n")
    assert set(re.findall(r"^    (\w+): ", listed, re.MULTILINE)) == public - methods


@pytest.mark.parametrize("name", sorted({*CHANGED} - ELSEWHERE))
def test_a_training_with_another_argument_is_not_resumed(name, checkpoint):
    with pytest.raises(ValueError, match=naming(str(checkpoint), "resume")):
        fit_with(checkpoint, **CHANGED[name])


@pytest.mark.parametrize("name", sorted(FREE))
def test_an_argument_that_changes_no_weight_may_be_another(name, checkpoint):
    assert fit_with(checkpoint, **FREE[name]).state.epoch == FREE[name].get("epochs", 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout", 0.1), ("batch_axes", 1), ("carry", "state"), ("loss_options", "mean")],
)
def test_one_value_in_place_of_a_mapping_is_refused(name, value):
    with pytest.raises(ValueError, match=naming(name, "mapping", repr(value))):
        og.Trainer(**BASE, **{name: value})


def test_another_precision_is_refused(tmp_path):
    options = {"model": small_classifier(kind="float16"), "X": X.astype(np.float16)}
    options["validation"] = HELD[0].astype(np.float16), HELD[1]
    fit_with(**options, precision="mixed", callbacks=[og.Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match=naming("precision: 'mixed'", "'float32' now")):
        fit_with(tmp_path, **options, precision="float32", callbacks=[])


def test_another_number_of_members_is_refused_and_other_first_weights_are_not(tmp_path):
    def fit(folder=None, **options):
        stack = og.TrainerStack(MODEL, {"y": "cross_entropy"}, learning_rate=[0.1, 0.2], **options)
        return stack.fit(X, Y, resume=folder)

    fit(callbacks=[og.Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match=naming("members", "2", "3")):
        og.TrainerStack(MODEL, {"y": "cross_entropy"}, learning_rate=[0.1, 0.2, 0.3]).fit(
            X, Y, resume=tmp_path
        )
    assert fit(tmp_path, init="redrawn").state.epoch == 1


# -- callbacks and metrics ------------------------------------------------------------------------

FREE_OF_CALLBACKS = {
    "EarlyStopping": {"patience"},  # documented: training goes on if it is larger
    "Checkpoint": {"folder", "every_steps", "every_seconds", "keep"},  # when and where it writes
}


def test_every_argument_of_callbacks_that_decide_is_classified():
    kinds = [v for v in public_objects().values() if inspect.isclass(v)]
    deciding = [k for k in kinds if issubclass(k, og.callbacks.Callback) and k.compared_arguments]
    assert {kind.__name__ for kind in deciding} == set(FREE_OF_CALLBACKS)
    for kind in deciding:
        arguments = set(inspect.signature(kind).parameters)
        assert arguments == {*kind.compared_arguments} | FREE_OF_CALLBACKS[kind.__name__]


@pytest.mark.parametrize(
    "change", [{"monitor": "validation_top_2_accuracy"}, {"restore": False}, {"min_delta": 0.1}]
)
def test_what_early_stopping_has_kept_is_compared_by_its_arguments(change, checkpoint):
    options = {"monitor": "validation_loss", "patience": 3} | change
    with pytest.raises(ValueError, match=naming("EarlyStopping", *change)):
        fit_with(checkpoint, callbacks=[og.EarlyStopping(**options)])


def test_a_monitored_metric_is_compared(tmp_path):
    def fit(zero_division, *callbacks, **call):
        metrics = {"y": [F1("macro", zero_division)]}
        stopping = og.EarlyStopping("validation_y_f1_macro", mode="max")
        fit_with(metrics=metrics, callbacks=[stopping, *callbacks], **call)

    fit(0.0, og.Checkpoint(tmp_path))
    with pytest.raises(ValueError, match=naming("f1_macro", "zero_division")):
        fit(1.0, folder=tmp_path)


# -- files that arguments name --------------------------------------------------------------------


@pytest.fixture
def scaled_loss(tmp_path):
    def write(factor):
        proto = parse_model(
            """l (float[N,3] y, int64[N] label) => (float loss) {
                a = SoftmaxCrossEntropyLoss(y, label)  loss = Mul(a, c) }""",
            opset=20,
            c=np.float32(factor),
        )
        onnx.save(proto, tmp_path / "loss.onnx")
        return str(tmp_path / "loss.onnx")

    return write


def test_the_content_of_a_loss_file_counts(tmp_path, scaled_loss):
    options = {"loss": scaled_loss(1.0), "metrics": ()}
    trainer = fit_with(**options, sample_weight=None, callbacks=[og.Checkpoint(tmp_path / "state")])
    before = trainer.evaluate(X, Y)["loss"]
    scaled_loss(100.0)
    assert trainer.evaluate(X, Y)["loss"] == pytest.approx(100 * before, rel=1e-5)
    with pytest.raises(ValueError, match=naming("loss: ", "checkpoint")):
        fit_with(tmp_path / "state", **options, sample_weight=None, callbacks=[])


# -- readers --------------------------------------------------------------------------------------


def test_readers_keep_every_argument_but_the_data():
    functions = [f for f in public_objects().values() if inspect.isfunction(f)]
    names = {kind.__name__ for kind in _subclasses_of(og.data.Reader)} | {"Reader"}
    readers = [f for f in functions if f.__annotations__.get("return") in names]
    assert len(readers) > 7
    for function in readers:
        arguments = inspect.signature(function).parameters
        assert {*function.data_arguments} < {*arguments}, function.__name__
    data = {name for function in readers for name in function.data_arguments}
    assert data == {*"path source X y sample_weight data labels tokenizer images noise".split()}


def _subclasses_of(kind):
    for own in kind.__subclasses__():
        yield own
        yield from _subclasses_of(own)


@pytest.mark.parametrize(
    "change",
    [{"y": "b"}, {"columns": {"x": ["q", "p"]}}, {"shuffle_rows": 8}, {"sample_weight": "w"}],
    ids=lambda change: next(iter(change)),
)
def test_roles_and_order_of_the_columns_of_files_are_compared(change, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"p": X[:, 0], "q": X[:, 1], "a": Y, "b": Y[::-1], "w": np.full(24, 0.5)}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    model = parse_model(
        "f (float[N,2] x) => (float[N,3] y) { y = MatMul(x, w) }", w=np.ones((2, 3), np.float32)
    )

    def fit(*callbacks, resume=None, **options):
        options = {"y": "a", "columns": {"x": ["p", "q"]}} | options
        data = og.data.arrow_dataset(tmp_path / "t.parquet", **options)
        og.Trainer(model, "cross_entropy", callbacks=callbacks).fit(data, resume=resume)

    fit(og.Checkpoint(tmp_path / "state"))
    fit(resume=tmp_path / "state")
    with pytest.raises(ValueError, match=naming("data", *change)):
        fit(resume=tmp_path / "state", **change)


# -- processes ------------------------------------------------------------------------------------

SHARED = {  # what a group computes, by an option that differs from the default
    "sync_batch_norm": ({"sync_batch_norm": True}, "train"),
    "shards": ({"shards": True}, "frozen"),
}


def identity_of_group(batch_norm="frozen", **options):
    group = SimpleNamespace(rank=0, size=2)
    return Sharing(group, og.parallel.DataParallel(**options)).compared_options(batch_norm)


def test_options_of_processes_on_which_weights_depend_are_compared():
    free = {"engine", "shard_optimizer"}  # how they exchange, and where slots are kept
    assert {*inspect.signature(og.parallel.DataParallel).parameters} == {*SHARED} | free
    for options, batch_norm in SHARED.values():
        assert identity_of_group(batch_norm, **options) != identity_of_group(batch_norm)
    assert identity_of_group(shard_optimizer=True) == identity_of_group() == {}


@pytest.mark.parametrize(
    ("name", "meant"), [("lr", "learning_rate"), ("epochs", "fit"), ("weight_decay", "adamw")]
)
@pytest.mark.parametrize("trainer", [og.Trainer, og.TrainerStack])
def test_arguments_of_other_libraries(trainer, name, meant):
    with pytest.raises(TypeError, match=naming(f"'{name}'", meant)):
        trainer("none.onnx", "mse", **{name: 0.1})
    with pytest.raises(TypeError, match=naming("'learning_rat'")):
        trainer("none.onnx", "mse", learning_rat=0.1)
