"""`Trainer`: against PyTorch's loop, whole and interrupted, and what it refuses."""

import json
import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.training.callbacks.checkpoint import checkpoints
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run_named
from tests.support.trainings import (
    ActAtStep,
    assert_close_arrays,
    assert_equal_trainings,
    interrupt_training,
    two_layer_model,
)

ROWS = 203


def rows_of_three_classes(dtype=np.float32):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 4)).astype(dtype)
    return X, (X @ rng.normal(size=(4, 3)) + rng.normal(size=(ROWS, 3))).argmax(axis=1)


def perceptron_trainer(model=None, loss="cross_entropy", **options):
    options = {"optimizer": "adamw", "learning_rate": 0.05, **options}
    return og.Trainer(model or two_layer_model((4, 8, 3)), loss, **options)


# -- steps: `test_matrix.py` compares whole trainings with PyTorch --------------------------------


def test_weights_of_classes_are_a_list_or_a_dict():
    X, y = rows_of_three_classes()
    listed = perceptron_trainer(class_weight=[0.2, 1.0, 3.0]).fit(X, y)
    named = perceptron_trainer(class_weight={0: 0.2, 2: 3.0}).fit(X, y)
    assert_equal_trainings(listed, named)
    rows = np.array([0.2, 1.0, 3.0])[y]
    weighted = perceptron_trainer().fit(X, y, sample_weight=rows)
    assert_close_arrays(weighted.state.weights, listed.state.weights, rtol=1e-5, atol=1e-6)


def test_gradients_and_update_as_two_models_are_the_fused_step():
    X, y = rows_of_three_classes()
    made = perceptron_trainer(clip_norm=0.5)
    gradients, update = made.step_models(X, y)
    weights = dict(made.state.weights)
    slots = {}
    order = np.random.default_rng([0, 0]).permutation(ROWS)
    for step in range(3):
        rows = order[step * 20 : step * 20 + 20]
        results = run_named(gradients, {**weights, "x": X[rows], "label": y[rows]})
        fed = {"minus_learning_rate": np.float32(-0.05), "step": np.int64(step + 1)}
        for x in update.graph.input:
            if x.name in results or x.name in weights:
                fed[x.name] = results.get(x.name, weights.get(x.name))
            elif x.name not in fed:
                shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
                fed[x.name] = slots.get(x.name, np.zeros(shape, np.float32))
        new = run_named(update, fed)
        weights = {name: new[f"{name}.new"] for name in weights}
        slots = {name.removesuffix(".new"): value for name, value in new.items()}
    made.fit(X[order[:60]], y[order[:60]], batch_size=20, shuffle=False)
    assert_close_arrays(made.state.weights, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("factors", [{"y": 2.0, "z": 0.3}, {"z": 0.3}])
def test_losses_of_outputs_are_weighted(factors):
    """Against PyTorch, by a step of gradient descent."""
    torch = pytest.importorskip("torch")
    X = rows_of_three_classes()[0]
    labels = {"y": X[:, :2], "z": X[:, 2:3]}
    w = {"u": np.full((4, 2), 0.3, np.float32), "v": np.full((4, 1), -0.2, np.float32)}
    text = "f (float[N,4] x) => (float[N,2] y, float[N,1] z) { y = MatMul(x, u) z = MatMul(x, v) }"
    loss, options = {"y": "mse", "z": "mse"}, {"optimizer": "sgd", "learning_rate": 0.1}
    made = og.Trainer(parse_model(text, **w), loss, loss_weights=factors, **options)
    made.fit(X, labels, batch_size=ROWS)
    u, v = (torch.tensor(a, requires_grad=True) for a in w.values())
    x = torch.tensor(X)
    total = factors.get("y", 1.0) * ((x @ u - x[:, :2]) ** 2).mean()
    total = total + factors["z"] * ((x @ v - x[:, 2:3]) ** 2).mean()
    total.backward()
    assert made.history[0]["loss"] == pytest.approx(total.item(), rel=1e-5)
    expected = {"u": w["u"] - 0.1 * u.grad.numpy(), "v": w["v"] - 0.1 * v.grad.numpy()}
    assert_close_arrays(made.state.weights, expected, rtol=1e-5)


# -- the state -----------------------------------------------------------------------------------


RESUMED = {
    "plain": {},
    "dropout": {"accumulate": 3, "dropout": {"h": 0.3}},
    "average": {
        "optimizer": og.optimizers.ema(og.optimizers.adam(), 0.9),
        "learning_rate": og.schedules.plateau(0.1, patience=0),
    },
    "muon": {"optimizer": "muon", "clip_norm": 1.0},
}
BROKEN_OFF = {"plain": (1, 5, 21), "dropout": (22,), "average": (60,), "muon": (5,)}


@pytest.mark.parametrize(
    ("name", "steps"),
    [*BROKEN_OFF.items(), *(in_sweep(name, (1, 5, 21, 22, 60)) for name in RESUMED)],
)
def test_a_resumed_training_ends_bit_for_bit_as_a_whole_one(name, steps, tmp_path):
    X, y = rows_of_three_classes()

    def fit(*callbacks, **more):
        callbacks = [og.EarlyStopping(patience=10), *callbacks]
        options = {"learning_rate": og.schedules.cosine(0.05, warmup=10), **RESUMED[name]}
        made = perceptron_trainer(**options, callbacks=callbacks, metrics=["accuracy"])
        return made.fit(X, y, **{"epochs": 4, "batch_size": 10, "validation": (X, y), **more})

    whole = fit()
    for step in steps:
        folder = tmp_path / str(step)
        with pytest.raises(KeyboardInterrupt):
            fit(
                og.Checkpoint(folder, every_steps=7),
                ActAtStep("step_end", step, interrupt_training, every_steps=step),
            )
        resumed = fit(og.Checkpoint(folder), resume=folder)
        assert_equal_trainings(resumed, whole)
        assert resumed.state.step == 84
        assert resumed.model.SerializeToString() == whole.model.SerializeToString()


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    X, y = rows_of_three_classes()
    perceptron_trainer(callbacks=[og.Checkpoint(tmp_path)]).fit(X, y, epochs=2, batch_size=10)
    for more, options, words in (
        ({"batch_size": 11}, {}, "batch_size: 10 .*11"),
        ({}, {"clip_norm": 1.0}, r"clip_norm: None .*1\.0"),
        ({}, {"optimizer": "sgd"}, "optimizer: .*'Chain"),
        ({}, {"freeze": "b*"}, "trained: "),
        ({}, {"loss": "softmax_focal"}, "loss: "),
    ):
        before = perceptron_trainer(**options)
        weights = dict(before.state.weights)
        with pytest.raises(ValueError, match=words):
            before.fit(X, y, **{"epochs": 3, "batch_size": 10, **more}, resume=tmp_path)
        np.testing.assert_equal(before.state.weights, weights)
    with pytest.raises(ValueError, match=r"data\.digest"):
        perceptron_trainer().fit(X + 1, y, epochs=3, batch_size=10, resume=tmp_path)
    with pytest.raises(FileNotFoundError, match="none"):
        perceptron_trainer().fit(X, y, resume=tmp_path / "none")
    begun = perceptron_trainer(callbacks=[og.Checkpoint(tmp_path / "new")])
    assert begun.fit(X, y, resume=tmp_path / "new").state.epoch == 1


def test_a_loader_that_shuffles_cannot_resume_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch")
    X, y = rows_of_three_classes()
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(y))
    for shuffle in (False, True):
        loader = torch.utils.data.DataLoader(rows, batch_size=50, shuffle=shuffle)
        folder = tmp_path / str(shuffle)
        perceptron_trainer(callbacks=[og.Checkpoint(folder)]).fit(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            perceptron_trainer().fit(loader, epochs=2, resume=folder)
        told = [w for w in caught if "order" in str(w.message)]
        assert len(told) == shuffle


def test_checkpoints_that_are_kept(tmp_path):
    X, y = rows_of_three_classes()
    keep = og.Checkpoint(tmp_path, keep=2, monitor="validation_loss")
    made = perceptron_trainer(learning_rate=1.0, callbacks=[keep])
    made.fit(X, y, epochs=8, batch_size=50, validation=(X, y))
    losses = [entry["validation_loss"] for entry in made.history]
    best = made.history[int(np.argmin(losses))]["step"]
    steps = {int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path)}
    assert steps == {best, made.history[-1]["step"], made.history[-2]["step"]}
    saved = og.callbacks.TrainState.load(tmp_path / f"step-{best:010d}")
    assert saved.step == best
    assert saved.history == made.history[: len(saved.history)]


def test_nan_is_not_the_best(tmp_path):
    X, y = rows_of_three_classes()
    values = iter([np.nan, 2.0, 1.0, 3.0])
    keep = og.Checkpoint(tmp_path, keep=1, monitor="validation_mine", mode="min")

    def mine(prediction, label):
        return next(values)

    made = perceptron_trainer(callbacks=[keep], metrics=[mine])
    made.fit(X, y, epochs=4, batch_size=50, validation=(X, y))
    steps = [int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path)]
    assert steps == [made.history[2]["step"], made.history[3]["step"]]


def test_a_monitor_that_the_history_does_not_have(tmp_path):
    X, y = rows_of_three_classes()
    keep = og.Checkpoint(tmp_path, monitor="validation_acuracy", mode="max")
    with pytest.raises(ValueError, match=r"'validation_acuracy'.*loss"):
        perceptron_trainer(callbacks=[keep]).fit(X, y, epochs=3)


def test_a_state_in_files(tmp_path):
    X, y = rows_of_three_classes()
    made = perceptron_trainer().fit(X, y)
    made.state.kept["Mine"] = {"a/b": np.arange(3)}
    made.state.callbacks["Mine"] = {"n": np.int64(3)}
    made.state.save(tmp_path / "state")
    made.state.save(tmp_path / "state")  # replaces it
    loaded = og.callbacks.TrainState.load(tmp_path / "state")
    np.testing.assert_equal(loaded.weights, made.state.weights)
    np.testing.assert_equal(loaded.slots, made.state.slots)
    assert (loaded.step, loaded.history) == (made.state.step, made.history)
    assert loaded.kept["Mine"]["a/b"].tolist() == [0, 1, 2]
    assert loaded.callbacks["Mine"] == {"n": 3}
    names = {path.name for path in (tmp_path / "state").iterdir()}
    arrays = {f"{n}.safetensors" for n in ("weights", "slots", "buffers", "kept")}
    assert names == {*arrays, "state.json", "files.json"}
    assert json.loads((tmp_path / "state" / "state.json").read_text())["step"] == 7
    (tmp_path / "state" / "weights.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        og.callbacks.TrainState.load(tmp_path / "state")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="mine"):
        made.state.save(tmp_path / "mine")


def test_a_state_that_was_being_replaced_is_read(tmp_path):
    state = og.callbacks.TrainState()
    state.weights = {"w": np.float32([1])}
    state.save(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / ".s.0123.replaced")  # as after a crash between two renames
    assert og.callbacks.TrainState.load(tmp_path / "s").weights["w"] == 1


def test_callbacks_see_and_set_the_live_state():
    X, y = rows_of_three_classes()
    seen = []

    class Watch(og.callbacks.Callback):
        every_steps = 3

        def on_step_end(self, trainer, state, control):
            seen.append((state.step, state.weights["b1"].copy(), trainer.progress.rows))
            if state.step == 9:
                state.weights = {"b1": np.zeros(3)}
                assert (state.weights["b1"] == 0).all()
                control.stop = True

    made = perceptron_trainer(callbacks=[Watch()]).fit(X, y, epochs=5, batch_size=10)
    steps = [step for step, _, _ in seen]
    assert {3, 6, 9} <= set(steps)
    assert steps[-1] == 9
    assert made.state.stop_reason == "callback"
    assert not np.array_equal(seen[0][1], seen[-1][1])
    assert (made.state.weights["b1"] == 0).all()
    assert seen[-1][2] == 90


# -- names, modes and results --------------------------------------------------------------------


def test_what_trains():
    X, y = rows_of_three_classes()
    start = initializer_arrays(two_layer_model((4, 8, 3)))
    made = perceptron_trainer(train=["w*", "b1"], freeze="w0").fit(X, y)
    assert made.trained == ["w1", "b1"]
    trained = initializer_arrays(made.model)
    for name, array in start.items():
        assert np.array_equal(array, trained[name]) == (name not in made.trained)
    for options, named in (
        ({"train": ["v*"]}, "'v*'"),
        ({"freeze": "w3"}, "w1"),
        ({"freeze": "*"}, "nothing"),
    ):
        with pytest.raises(ValueError, match=naming(named)):
            perceptron_trainer(**options)


def test_results(tmp_path):
    X, y = rows_of_three_classes()
    made = perceptron_trainer(metrics=["accuracy"]).fit(X, y, epochs=5)
    logits = made.predict(X, batch_size=7)
    evaluated = made.evaluate(X, y)
    assert evaluated["accuracy"] == (logits.argmax(axis=1) == y).mean()
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    assert evaluated["loss"] == pytest.approx(-np.log(p[np.arange(ROWS), y]).mean(), rel=1e-5)
    assert made.evaluate(X, y, batch_size=9)["loss"] == pytest.approx(evaluated["loss"], rel=1e-6)
    made.save(tmp_path / "m.onnx")
    exported = run_named(onnx.load(tmp_path / "m.onnx"), {"x": X})["y"]
    np.testing.assert_allclose(exported, logits, rtol=1e-5, atol=1e-6)


def test_metrics_of_several_outputs():
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y, float[N,1] z) { y = MatMul(x, v) z = MatMul(x, w) }",
        v=np.float32(np.random.default_rng(0).normal(size=(4, 3))),
        w=[[1.0], [0.0], [0.0], [0.0]],
    )
    X, y = rows_of_three_classes()
    loss = {"y": "cross_entropy", "z": "mse"}
    labels = {"label_y": y, "label_z": X[:, :1]}
    made = og.Trainer(model, loss, metrics={"y": ["accuracy"], "z": ["mae", "r2"]})
    made.fit(X, labels, validation=0.2)
    results = made.evaluate(X, labels)
    predictions = made.predict(X)
    assert results["y_accuracy"] == (predictions["y"].argmax(axis=1) == y).mean()
    assert results["z_mae"] == pytest.approx(np.abs(predictions["z"] - X[:, :1]).mean(), rel=1e-5)
    assert {"validation_y_accuracy", "validation_z_r2"} <= made.history[-1].keys()
    for metrics, words in (
        (["accuracy"], r"pass metrics=\{output"),
        ({"q": ["accuracy"]}, "'q'"),
        ("accuracy", r"metrics=\['accuracy'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            og.Trainer(model, loss, metrics=metrics).fit(X, labels, validation=0.2)


def test_a_validation_share_is_held_out():
    X, y = rows_of_three_classes()
    made = perceptron_trainer(metrics=["accuracy"]).fit(X, y, validation=0.2, batch_size=10)
    assert made.state.step == 17  # of 162 rows
    assert {"loss", "validation_loss", "validation_accuracy"} <= made.history[-1].keys()
    for share in (0.0, 1.0, 0.001):
        with pytest.raises(ValueError, match=naming(f"validation={share}", "(X, y)")):
            perceptron_trainer().fit(X, y, validation=share)


def test_progress_before_a_training():
    with pytest.raises(og.NotFittedError, match="fit"):
        _ = perceptron_trainer().progress


def test_data_as_a_tuple():
    X, y = rows_of_three_classes()
    weight = np.random.default_rng(2).random(ROWS)
    one = perceptron_trainer().fit(X, y, sample_weight=weight, validation=(X, y, weight))
    two = perceptron_trainer().fit((X, y, weight), validation=(X, y, weight))
    assert one.history == two.history
    assert one.evaluate((X, y)) == two.evaluate(X, y)
    batches = ((X[:50], y[:50]), (X[50:100], y[50:100]))
    assert perceptron_trainer().fit(batches).state.step == 2


def test_a_second_fit_begins_anew_with_the_weights_of_the_first():
    X, y = rows_of_three_classes()
    made = perceptron_trainer().fit(X, y, epochs=2)
    first = dict(made.state.weights)
    other = perceptron_trainer(made.model).fit(X, y)
    made.fit(X, y)
    np.testing.assert_equal(made.state.weights, other.state.weights)
    assert len(made.history) == 1
    assert not np.array_equal(first["w0"], made.state.weights["w1"])


def test_a_loss_that_the_model_computes():
    X, y = rows_of_three_classes()
    inside = perceptron_trainer(
        og.add_loss_output(two_layer_model((4, 8, 3)), "cross_entropy", reduction="mean"), None
    ).fit(X, y)
    summed = perceptron_trainer(
        og.add_loss_output(two_layer_model((4, 8, 3)), "cross_entropy"), None
    ).fit(X, y)
    outside = perceptron_trainer().fit(X, y)
    for made in (inside, summed):
        assert_close_arrays(made.state.weights, outside.state.weights, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=naming("output", "loss")):
        perceptron_trainer(two_layer_model((4, 8, 3)), None).fit(X, y)


def test_an_unfit_beginning_changes_nothing():
    X, y = rows_of_three_classes()
    made = perceptron_trainer().fit(X, y)
    state = made.state
    for arguments, words in (
        ((X[:, :3], y), "shape"),
        ((X, y[:-1]), "rows"),
        ((X, y + 1), r"0\.\.2"),
        ((X, y, {"epochs": 0}), "epochs"),
        ((X, y, {"batch_size": 0}), "batch_size"),
    ):
        *xy, more = arguments if len(arguments) == 3 else (*arguments, {})
        with pytest.raises(ValueError, match=words):
            made.fit(*xy, **more)
        assert made.state is state
    for options, words in (
        ({"batch_norm": "on"}, "batch_norm.*'on'.*'frozen'"),
        ({"accumulate": 0}, "accumulate"),
        ({"seed": -1}, "seed"),
        ({"metrics": ["acuracy"]}, "accuracy"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"optimizer": "adamm"}, "adam"),
        ({"callbacks": [og.EarlyStopping]}, r"EarlyStopping is a class.*EarlyStopping\(\)"),
        ({"dropout": {"nothing": 0.1}}, "nothing"),
        ({"batch_norm": "train"}, "BatchNormalization"),
        ({"loss": "cross_entropi"}, "cross_entropy"),
    ):
        with pytest.raises(ValueError, match=words):
            perceptron_trainer(**options).fit(X, y)


def test_what_is_not_finite_is_named():
    X, y = rows_of_three_classes()
    made = perceptron_trainer(
        learning_rate=1e38, optimizer="sgd", callbacks=[og.callbacks.NanWatch()]
    )
    with pytest.raises(og.ConvergenceError, match=r"NaN.*\(.*output"):
        made.fit(X, y, epochs=3)
    assert made.state.stop_reason == "not finite"
    assert all(np.isfinite(w).all() for w in made.state.weights.values())


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (
            "(float[N,T,3] X) => (float[T,N,1] Y)"
            "{ t = Transpose<perm=[1,0,2]>(X) Y = MatMul(t, W) }",
            {"X": (2, 5, 3), "label": (5, 2, 1)},
        ),
        (
            "(float[N,3] X, float[] rate) => (float[N,1] Y) { t = Mul(X, rate) Y = MatMul(t, W) }",
            {"X": (4, 3), "rate": (), "label": (4, 1)},
        ),
        (
            "(float[V,3] X, int64[E] edge) => (float[E,1] Y)"
            "{ t = Gather(X, edge) Y = MatMul(t, W) }",
            {"X": (4, 3), "edge": (7,), "label": (7, 1)},
        ),
        (
            "(float[N,3] X) => (float Y) { t = MatMul(X, W) Y = ReduceMean<keepdims=0>(t) }",
            {"X": (4, 3), "label": ()},
        ),
    ],
    ids=["time-major", "a scalar", "nodes and edges", "rank 0"],
)
def test_batches_as_the_model_takes_them(model, shapes):
    made = parse_model(f"g {model}", W=[[1.0], [2.0], [3.0]])
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, 4, shape) if name == "edge" else np.float32(rng.normal(size=shape))
        for name, shape in shapes.items()
    }
    features = {name: array for name, array in batch.items() if name != "label"}
    before = np.asarray(run_named(made, features)["Y"])
    trained = og.Trainer(made, "mse", optimizer="sgd", learning_rate=0.01)
    trained.fit([batch, batch], epochs=2, validation=[batch])
    expected = np.mean((before - batch["label"]) ** 2)
    assert trained.history[0]["loss"] < expected
    assert trained.evaluate([batch])["loss"] == trained.history[-1]["validation_loss"]
    after = run_named(trained.model, features)["Y"]
    np.testing.assert_allclose(trained.predict([features]).reshape(after.shape), after, rtol=1e-5)


def test_rows_on_another_axis_must_be_named():
    text = (
        "g (float[N,T,3] X) => (float[T,N,1] Y) { t = Transpose<perm=[1,0,2]>(X) Y = MatMul(t, W) }"
    )
    model = parse_model(text, W=[[1.0], [2.0], [3.0]])
    X = np.random.default_rng(0).normal(size=(9, 5, 3)).astype(np.float32)
    y = X.transpose(1, 0, 2).sum(axis=2, keepdims=True)  # rows on axis 1
    with pytest.raises(ValueError, match=naming("'X' (N, T, 3)", "'label' (T, N")):
        og.Trainer(model, "mse").fit(X, y)
    trained = og.Trainer(model, "mse", batch_axes={"X": 0, "label": 1}).fit(X, y, batch_size=6)
    whole = trained.predict(X, batch_size=9)
    assert whole.shape == (5, 9, 1)
    np.testing.assert_allclose(trained.predict(X, batch_size=2), whole, rtol=1e-5)


def test_the_two_estimators_say_that_running_statistics_stay():
    model = parse_model(
        """f (float[N,2] x) => (float[N,2] y) {
            y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v) }""",
        s=[1.0, 1.0],
        b=[0.0, 0.0],
        m=[0.0, 0.0],
        v=[1.0, 2.0],
    )
    X = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    with pytest.warns(UserWarning, match=naming("statistics", "y")):
        og.compat.OrtGradientForwardBackwardOptimizer(model, max_iter=1).fit(X, X)
    made = og.Trainer(model, "mse", batch_norm="train").fit(X, X)
    trained = initializer_arrays(made.model)
    np.testing.assert_allclose(trained["m"], X.mean(axis=0) * 0.1, rtol=1e-4, atol=1e-6)
    assert not any(a.name == "training_mode" for a in made.model.graph.node[0].attribute)
