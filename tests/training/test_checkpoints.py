"""Checkpoints that were damaged, mixed up or copied, and other folders beside them."""

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.report.run import load_run
from onnxgrad.training import saving
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.trainings import assert_equal_trainings, linear_model

STEPS = 4  # an epoch
OPTIMIZERS = {"adam": "adam", "ema": og.optimizers.ema(og.optimizers.adam(), 0.9)}
FILES = ("weights.safetensors", "slots.safetensors", "buffers.safetensors", "kept.safetensors")


def fit_in_folder(folder, epochs, optimizer="adam", **options):
    model = linear_model([[1], [2], [3]])
    X = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    y = X.sum(1, keepdims=True)
    options = {"every_steps": STEPS, **options}
    callbacks = [og.EarlyStopping("loss", patience=99), og.Checkpoint(folder, **options)]
    trainer = og.Trainer(model, "mse", optimizer=optimizer, learning_rate=0.1, callbacks=callbacks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="EarlyStopping")
        return trainer.fit(X, y, epochs=epochs, batch_size=16, resume=folder)


def step_folder(folder, number):
    return folder / f"step-{number:010d}"


def flip_bit(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 0x20
    file.write_bytes(data)


@pytest.fixture(scope="module")
def trained_folders(tmp_path_factory):
    """Folders of trainings of three epochs, to be copied, and trainings of four, by optimizer."""
    folder, made = tmp_path_factory.mktemp("trainings"), {}
    for name, optimizer in OPTIMIZERS.items():
        fit_in_folder(folder / name, 3, optimizer)
        made[name] = folder / name, fit_in_folder(folder / f"{name} whole", 4, optimizer)
    return made


@pytest.mark.parametrize(
    ("file", "optimizer"),
    [
        *((file, "adam") for file in (*FILES, "state.json", "files.json")),
        (FILES[1], "ema"),
        *(
            in_sweep(file, "ema")
            for file in (*FILES, "state.json", "files.json")
            if file != FILES[1]
        ),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_taken(
    tmp_path, file, optimizer, trained_folders
):
    folder, whole = trained_folders[optimizer]
    optimizer = OPTIMIZERS[optimizer]
    shutil.copytree(folder, tmp_path / "a")
    flip_bit(step_folder(tmp_path / "a", 12) / file, 3)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        og.callbacks.TrainState.load(step_folder(tmp_path / "a", 12))
    with pytest.warns(UserWarning, match=naming(file, "step-0000000008")):
        assert_equal_trainings(fit_in_folder(tmp_path / "a", 4, optimizer), whole)
    (aside,) = (tmp_path / "a").glob("*.damaged-*")
    assert aside.name.startswith("step-0000000012")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal_trainings(fit_in_folder(tmp_path / "a", 4, optimizer), whole)


def test_any_bit_counts(tmp_path):
    fit_in_folder(tmp_path, 1)
    path, rng = step_folder(tmp_path, STEPS), np.random.default_rng(0)
    for file in (*FILES, "state.json"):
        size = (path / file).stat().st_size
        for position in rng.integers(0, size, 5):
            flip_bit(path / file, position)
            with pytest.raises(ValueError, match=file):
                og.callbacks.TrainState.load(path)
            flip_bit(path / file, position)
    assert og.callbacks.TrainState.load(path).step == STEPS


@pytest.mark.parametrize("file", ["weights.safetensors", "slots.safetensors", "state.json"])
def test_a_file_of_another_step_is_noticed(tmp_path, file, trained_folders):
    shutil.copytree(trained_folders["adam"][0], tmp_path, dirs_exist_ok=True)
    shutil.copy(step_folder(tmp_path, 8) / file, step_folder(tmp_path, 12) / file)
    with pytest.warns(UserWarning, match=file):
        fit_in_folder(tmp_path, 4)


def test_without_an_intact_checkpoint_training_does_not_begin(tmp_path, trained_folders):
    shutil.copytree(trained_folders["adam"][0], tmp_path, dirs_exist_ok=True)
    for number in (8, 12):
        flip_bit(step_folder(tmp_path, number) / "weights.safetensors", -1)
    with (
        pytest.warns(UserWarning, match=r"0012.*weights\.safetensors"),
        pytest.raises(ValueError, match=r"0008.*weights\.safetensors"),
    ):
        fit_in_folder(tmp_path, 4)
    with pytest.raises(ValueError, match=r"0012.*damaged"):
        fit_in_folder(step_folder(tmp_path, 12), 4)  # where one was asked for, no other is taken


def test_the_page_of_a_report_is_of_an_intact_checkpoint(tmp_path):
    fit_in_folder(tmp_path, 3)
    flip_bit(step_folder(tmp_path, 12) / "weights.safetensors", -1)
    with pytest.warns(UserWarning, match="0012"):
        assert len(load_run(tmp_path)["history"]) == 2


def test_folders_of_others_stay_and_are_not_taken(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    fit_in_folder(run, 2)
    fit_in_folder(other, 1, optimizer="sgd")
    kept = [run / "step-0000000004-good", run / "step-old", run / "step-0000000003"]
    for path in kept[:-1]:
        shutil.copytree(step_folder(run, 8), path)
    kept[-1].mkdir()
    (run / ".step-mine.partial").mkdir()
    shutil.rmtree(step_folder(run, 4))
    shutil.copytree(
        step_folder(other, 4), step_folder(run, 4)
    )  # a checkpoint, and of another training
    foreign = [*kept, step_folder(run, 4), run / ".step-mine.partial"]
    whole = fit_in_folder(tmp_path / "whole", 6)
    assert_equal_trainings(fit_in_folder(run, 6, keep=1), whole)
    assert sorted(p.name for p in run.iterdir()) == sorted(
        p.name for p in [*foreign, step_folder(run, 24)]
    )


def test_a_copy_under_the_name_of_a_later_step_is_not_the_newest(tmp_path):
    fit_in_folder(tmp_path, 2)
    copy = shutil.copytree(step_folder(tmp_path, 4), step_folder(tmp_path, 99))
    with (
        pytest.warns(UserWarning, match="0099"),
        pytest.raises(ValueError, match=naming("0099", "checkpoint")),
    ):
        fit_in_folder(tmp_path, 3)
    own = copy.rename(tmp_path / "mine")
    assert fit_in_folder(tmp_path, 3).state.step == 12
    assert og.callbacks.TrainState.load(own).step == 4


def test_a_state_that_the_user_saved_is_not_replaced(tmp_path):
    trainer = fit_in_folder(tmp_path / "run", 1)
    trainer.state.save(step_folder(tmp_path / "run", 8))
    with (
        pytest.warns(UserWarning, match="0008"),
        pytest.raises(ValueError, match=naming("0008", "checkpoint")),
    ):
        fit_in_folder(tmp_path / "run", 2)
    assert og.callbacks.TrainState.load(step_folder(tmp_path / "run", 8)).step == STEPS


def test_the_best_checkpoint_is_kept_by_its_mark(tmp_path):
    fit_in_folder(tmp_path, 5, keep=1, monitor="loss", mode="max")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000004", "step-0000000020"]
    assert saving.read_mark(step_folder(tmp_path, 4))["name"] == "step-0000000004"


def test_what_a_loss_captured_is_compared(tmp_path):
    def scaled(factor):
        return lambda op, f, y: factor * (f - y) * (f - y)

    model = linear_model([[1], [2]])
    x = np.ones((4, 2), np.float32)

    def trained(loss, **options):
        kept = og.Checkpoint(tmp_path)
        return og.Trainer(model, loss, callbacks=[kept]).fit(x, x[:, :1], epochs=2, **options)

    trained(scaled(2.0))
    trained(scaled(2.0), resume=tmp_path)
    with pytest.raises(ValueError, match=r"loss: .*2\.0.*3\.0"):
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
    model = linear_model([[1], [2]])
    x = np.ones((4, 2), np.float32)
    kept = og.Checkpoint(tmp_path)
    trainer = og.Trainer(model, squared, callbacks=[kept], optimizer="sgd", learning_rate=0.0)
    trainer.fit(x, x[:, :1], epochs=2)
    for other in (cubed, absolute):
        with pytest.raises(ValueError, match="loss: "):
            og.Trainer(model, other, callbacks=[kept], optimizer="sgd", learning_rate=0.0).fit(
                x, x[:, :1], epochs=2, resume=tmp_path
            )
    losses = {}
    for loss in (squared, cubed, absolute, squared):  # the kept step and evaluator are rebuilt
        trainer._change_job(loss=loss)
        trainer.partial_fit(x, x[:, :1])
        losses.setdefault(loss, []).append(
            (trainer.history[-1]["loss"], trainer.evaluate(x, x[:, :1])["loss"])
        )
    assert losses[squared] == [(4.0, 4.0)] * 2
    assert losses[cubed] == [(8.0, 8.0)]
    assert losses[absolute] == [(2.0, 2.0)]


def test_long_weights_of_classes_are_compared(tmp_path):
    """Their text is shortened in the middle."""
    text = "f (float[N,2000] x) => (float[N,2000] y) { y = Add(x, b) }"
    model = parse_model(text, b=[0.0])
    x, y = np.zeros((4, 2000), np.float32), np.full(4, 1000)
    weights = [np.where(np.arange(2000) == 1000, n, 1.0) for n in (1.0, 3.0)]
    first, second = (
        og.losses.LOSSES["cross_entropy"].with_options({"class_weight": w}) for w in weights
    )
    trainer = og.Trainer(model, first, train=["b"], callbacks=[og.Checkpoint(tmp_path)])
    trainer.fit(x, y, epochs=2)
    again = og.Trainer(model, second, train=["b"])
    with pytest.raises(ValueError, match="loss: "):
        again.fit(x, y, epochs=2, resume=tmp_path)


def test_what_a_living_process_writes_stays(tmp_path, monkeypatch):
    """Another training in the folder begins while a state is written, and then replaced."""
    names, moves, rename = re.compile("state"), [], Path.rename

    def begin_training(path, target):
        saving.remove_leftovers(tmp_path, names)
        moves.append(Path(target).name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", begin_training)
    for step in (1, 2):
        saving.write_state(tmp_path / "state", {"weights": {"w": np.ones(2)}}, {"step": step})
    assert saving.read_state(tmp_path / "state")[1] == {"step": 2}
    assert len(moves) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
