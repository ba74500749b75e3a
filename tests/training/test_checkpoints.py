"""Checkpoints that were damaged, mixed up or copied, and other folders beside them."""

import shutil
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.report.run import load_run
from onnxgrad.training import saving

STEPS = 4  # an epoch
FILES = ("weights.safetensors", "slots.safetensors", "buffers.safetensors", "kept.safetensors")


def fit(folder, epochs, optimizer="adam", **options):
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        f (float[N,3] x) => (float[N,1] y) <float[3,1] w = {1,2,3}> { y = MatMul(x, w) }""")
    X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    y = X.sum(1, keepdims=True)
    options = {"every_steps": STEPS, **options}
    callbacks = [og.EarlyStopping("loss", patience=99), og.Checkpoint(folder, **options)]
    trainer = og.Trainer(model, "mse", optimizer=optimizer, learning_rate=0.1, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="EarlyStopping")
        return trainer.fit(X, y, epochs=epochs, batch_size=16, resume=folder)


def step(folder, number):
    return folder / f"step-{number:010d}"


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 0x20
    file.write_bytes(data)


def equal(one, two):
    for a, b in ((one.state.weights, two.state.weights), (one.state.slots, two.state.slots)):
        np.testing.assert_equal(a, b)
    assert one.history == two.history


@pytest.mark.parametrize("optimizer", ["adam", og.ema(og.adam(), 0.9)], ids=["adam", "ema"])
@pytest.mark.parametrize("file", [*FILES, "state.json", "files.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_taken(tmp_path, file, optimizer):
    whole = fit(tmp_path / "whole", 4, optimizer)
    fit(tmp_path / "a", 3, optimizer)
    flip(step(tmp_path / "a", 12) / file, 3)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        og.TrainState.load(step(tmp_path / "a", 12))
    with pytest.warns(UserWarning, match=rf"{file}.*before it is .*step-0000000008"):
        equal(fit(tmp_path / "a", 4, optimizer), whole)
    (aside,) = (tmp_path / "a").glob("*.damaged-*")
    assert aside.name.startswith("step-0000000012")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equal(fit(tmp_path / "a", 4, optimizer), whole)


def test_any_bit_counts(tmp_path):
    fit(tmp_path, 1)
    path, rng = step(tmp_path, STEPS), np.random.default_rng(0)
    for file in (*FILES, "state.json"):
        size = (path / file).stat().st_size
        for position in rng.integers(0, size, 5):
            flip(path / file, position)
            with pytest.raises(ValueError, match=file):
                og.TrainState.load(path)
            flip(path / file, position)
    assert og.TrainState.load(path).step == STEPS


@pytest.mark.parametrize("file", [*FILES, "state.json"])
def test_a_file_of_another_step_is_noticed(tmp_path, file):
    fit(tmp_path, 3)
    before, last = step(tmp_path, 8) / file, step(tmp_path, 12) / file
    same = before.read_bytes() == last.read_bytes()
    shutil.copy(before, last)
    if same:  # there are no buffers
        assert file == "buffers.safetensors"
        return
    with pytest.warns(UserWarning, match=file):
        fit(tmp_path, 4)


def test_without_an_intact_checkpoint_training_does_not_begin(tmp_path):
    fit(tmp_path, 3)
    for number in (8, 12):
        flip(step(tmp_path, number) / "weights.safetensors", -1)
    with (
        pytest.warns(UserWarning, match=r"0012.*weights\.safetensors"),
        pytest.raises(ValueError, match=r"0008.*weights\.safetensors"),
    ):
        fit(tmp_path, 4)
    with pytest.raises(ValueError, match=r"0012.*damaged"):
        fit(step(tmp_path, 12), 4)  # where one was asked for, no other is taken


def test_the_page_of_a_report_is_of_an_intact_checkpoint(tmp_path):
    fit(tmp_path, 3)
    flip(step(tmp_path, 12) / "weights.safetensors", -1)
    with pytest.warns(UserWarning, match="0012"):
        assert len(load_run(tmp_path)["history"]) == 2


def test_folders_of_others_stay_and_are_not_taken(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    fit(run, 2)
    fit(other, 1, optimizer="sgd")
    kept = [run / "step-0000000004-good", run / "step-old", run / "step-0000000003"]
    for path in kept[:-1]:
        shutil.copytree(step(run, 8), path)
    kept[-1].mkdir()
    (run / ".step-mine.partial").mkdir()
    shutil.rmtree(step(run, 4))
    shutil.copytree(step(other, 4), step(run, 4))  # a checkpoint, and of another training
    foreign = [*kept, step(run, 4), run / ".step-mine.partial"]
    whole = fit(tmp_path / "whole", 6)
    equal(fit(run, 6, keep=1), whole)
    assert sorted(p.name for p in run.iterdir()) == sorted(
        p.name for p in [*foreign, step(run, 24)]
    )


def test_a_copy_under_the_name_of_a_later_step_is_not_the_newest(tmp_path):
    fit(tmp_path, 2)
    copy = shutil.copytree(step(tmp_path, 4), step(tmp_path, 99))
    with (
        pytest.warns(UserWarning, match="0099 is ignored"),
        pytest.raises(ValueError, match="0099 is no checkpoint that was written there"),
    ):
        fit(tmp_path, 3)
    own = copy.rename(tmp_path / "mine")
    assert fit(tmp_path, 3).state.step == 12
    assert og.TrainState.load(own).step == 4


def test_a_state_that_the_user_saved_is_not_replaced(tmp_path):
    trainer = fit(tmp_path / "run", 1)
    trainer.state.save(step(tmp_path / "run", 8))
    with (
        pytest.warns(UserWarning, match="0008 is ignored"),
        pytest.raises(ValueError, match="0008 is no checkpoint"),
    ):
        fit(tmp_path / "run", 2)
    assert og.TrainState.load(step(tmp_path / "run", 8)).step == STEPS


def test_the_best_checkpoint_is_kept_by_its_mark(tmp_path):
    fit(tmp_path, 5, keep=1, monitor="loss", mode="max")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000004", "step-0000000020"]
    assert saving.mark_of(step(tmp_path, 4))["name"] == "step-0000000004"


def test_what_a_loss_captured_is_compared(tmp_path):
    def scaled(factor):
        return lambda op, f, y: factor * (f - y) * (f - y)

    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)'
        "<float[2,1] w = {1, 2}> { y = MatMul(x, w) }"
    )
    x = np.ones((4, 2), np.float32)

    def trained(loss, **options):
        kept = og.Checkpoint(tmp_path)
        return og.Trainer(model, loss, callbacks=[kept]).fit(x, x[:, :1], epochs=2, **options)

    trained(scaled(2.0))
    trained(scaled(2.0), resume=tmp_path)
    with pytest.raises(ValueError, match=r"another training. loss: .*2\.0.*3\.0"):
        trained(scaled(3.0), resume=tmp_path)


def test_a_function_inside_of_a_loss_is_compared(tmp_path):
    def squared(op, f, y):
        def term(d):
            return d * d

        return term(f - y)

    def absolute(op, f, y):
        def term(d):
            return op.Abs(d)

        return term(f - y)

    def cubed(op, f, y):
        def term(d):
            return d * d * d

        return term(f - y)

    cubed.__qualname__ = squared.__qualname__
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)'
        "<float[2,1] w = {1, 2}> { y = MatMul(x, w) }"
    )
    x = np.ones((4, 2), np.float32)
    kept = og.Checkpoint(tmp_path)
    trainer = og.Trainer(model, squared, callbacks=[kept], optimizer="sgd", learning_rate=0.0)
    trainer.fit(x, x[:, :1], epochs=2)
    for other in (cubed, absolute):
        with pytest.raises(ValueError, match=r"another training. loss: "):
            og.Trainer(model, other, callbacks=[kept], optimizer="sgd", learning_rate=0.0).fit(
                x, x[:, :1], epochs=2, resume=tmp_path
            )
    losses = {}
    for loss in (squared, cubed, absolute, squared):  # the kept step and evaluator are rebuilt
        trainer.loss = loss
        trainer.partial_fit(x, x[:, :1])
        losses.setdefault(loss, []).append(
            (trainer.history[-1]["loss"], trainer.evaluate(x, x[:, :1])["loss"])
        )
    assert losses[squared] == [(4.0, 4.0)] * 2
    assert losses[cubed] == [(8.0, 8.0)]
    assert losses[absolute] == [(2.0, 2.0)]


def test_long_weights_of_classes_are_compared(tmp_path):
    """Their text is shortened in the middle."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> f (float[N,2000] x) => (float[N,2000] y)'
        "<float[1] b = {0}> { y = Add(x, b) }"
    )
    x, y = np.zeros((4, 2000), np.float32), np.full(4, 1000)
    weights = [np.where(np.arange(2000) == 1000, n, 1.0) for n in (1.0, 3.0)]
    first, second = (og.LOSSES["cross_entropy"].with_options({"class_weight": w}) for w in weights)
    trainer = og.Trainer(model, first, train=["b"], callbacks=[og.Checkpoint(tmp_path)])
    trainer.fit(x, y, epochs=2)
    again = og.Trainer(model, second, train=["b"])
    with pytest.raises(ValueError, match=r"another training. loss"):
        again.fit(x, y, epochs=2, resume=tmp_path)
