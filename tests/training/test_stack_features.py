"""What a stack has in common with a trainer: its members are compared with trainers."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.optimizers import Chain, clip_by_global_norm, clip_by_norm
from onnxgrad.training.callbacks.trackers import Tracker
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named
from tests.support.small_models import float32_model
from tests.support.stacks import assert_equal_members, fit_all, stack_and_trainers
from tests.support.trainings import ActAtStep, assert_close_arrays, interrupt_training

ROWS, CLASSES = 59, 4
RATES = [0.01, 0.03, 0.05]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 6)).astype(np.float32)
Y = RNG.integers(0, CLASSES, ROWS)
VALIDATION = (X[40:], Y[40:])
FITTED = {"epochs": 3, "batch_size": 8}


def drawn_weight(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 0.4, shape)


def perceptron(norm=False, dtype=np.float32):
    """Return two layers, with a BatchNormalization between them if it has a `norm`."""
    # in front of a normalization, the gradient of a bias is noise
    normed = "n = BatchNormalization(a, s, o, mean, var)" if norm else "n = Add(a, b0)"
    weights = {"w0": drawn_weight(6, 5), "w1": drawn_weight(5, CLASSES, seed=2)}
    weights |= {} if norm else {"b0": drawn_weight(5, seed=1)}
    if norm:
        weights |= {"s": 1 + drawn_weight(5, seed=3) / 4, "o": drawn_weight(5, seed=4) / 4}
        weights |= {"mean": drawn_weight(5, seed=5) / 4, "var": 1 + drawn_weight(5, seed=6) ** 2}
    kind = {"f": "float", "d": "double"}[np.dtype(dtype).char]
    return parse_model(
        f"""g ({kind}[N,6] x) => ({kind}[N,{CLASSES}] y) {{
            a = MatMul(x, w0)  {normed}  r = Relu(n)  y = MatMul(r, w1) }}""",
        **{name: w.astype(dtype) for name, w in weights.items()},
    )


def normed_perceptron():
    return perceptron(norm=True)


def convolutions():
    weights = {"w0": drawn_weight(3, 1, 3), "w1": drawn_weight(12, CLASSES, seed=2)}
    norms = {
        "s": np.ones(3),
        "o": np.zeros(3),
        "mean": drawn_weight(3, seed=5) / 4,
        "var": np.ones(3),
    }
    return float32_model(
        f"""g (float[N,6] x) => (float[N,{CLASSES}] y) {{
            u = Unsqueeze(x, one)  a = Conv <kernel_shape = [3]> (u, w0)
            n = BatchNormalization(a, s, o, mean, var)  r = Tanh(n)
            f = Flatten(r)  y = MatMul(f, w1) }}""",
        one=np.array([1]),
        **weights,
        **norms,
    )


def half_perceptron():
    return parse_model(
        f"""g (float[N,6] x) => (float[N,{CLASSES}] y) {{
            c = Cast <to = 10> (x)  a = MatMul(c, w0)  r = Relu(a)
            b = MatMul(r, w1)  y = Cast <to = 1> (b) }}""",
        w0=drawn_weight(6, 5).astype(np.float16),
        w1=drawn_weight(5, CLASSES).astype(np.float16),
    )


def fused():
    """Return layers as optimizers of onnxruntime write them."""
    return float32_model(
        f"""g (float[N,6] x) => (float[N,{CLASSES}] y) {{
            h = com.microsoft.FusedMatMul <alpha = 0.5> (x, w0)
            t = com.microsoft.BiasGelu(h, b)  n = com.microsoft.SkipLayerNormalization(t, h, s, o)
            y = com.microsoft.FusedGemm <activation = "Tanh"> (n, w1, c) }}""",
        w0=drawn_weight(6, 5),
        b=drawn_weight(5, seed=1),
        s=1 + drawn_weight(5, seed=2),
        o=drawn_weight(5, seed=3),
        w1=drawn_weight(5, CLASSES, seed=4),
        c=drawn_weight(CLASSES, seed=5),
    )


def streaming():
    """Return a recurrent step, whose output `state` is the input `before` of the next batch."""
    return float32_model(
        f"""g (float[N,6] x, float[N,5] before) => (float[N,{CLASSES}] y, float[N,5] state) {{
            a = MatMul(x, w0)  b = MatMul(before, w1)  c = Add(a, b)
            state = Tanh(c)  y = MatMul(state, w2) }}""",
        w0=drawn_weight(6, 5),
        w1=drawn_weight(5, 5, seed=1),
        w2=drawn_weight(5, CLASSES, seed=2),
    )


def pair(model, **options):
    return stack_and_trainers(model, **{"learning_rate": RATES} | options)


OPTIMIZERS = [
    *("lamb", "muon"),
    *map(in_sweep, "sgd momentum nesterov adam adamw adamax nadam radam adagrad adadelta".split()),
    *map(in_sweep, "rmsprop rprop lion adafactor schedule_free".split()),
]
FEATURES = {
    "accumulate, clip": (perceptron, {"accumulate": 3, "clip_norm": 0.3}),
    "batch norm of images": (convolutions, {"batch_norm": "train", "optimizer": "momentum"}),
    "dropout, batch norm, clip": (
        normed_perceptron,
        {"dropout": {"r": 0.3}, "batch_norm": "train", "clip_norm": 0.5},
    ),
    "recompute, norm": (normed_perceptron, {"recompute": "cheap", "batch_norm": "train"}),
    "recompute all": (normed_perceptron, {"recompute": "all"}),
    "groups": (
        perceptron,
        {
            "optimizer": og.optimizers.param_groups(
                {"b*": og.optimizers.sgd()}, og.optimizers.adam()
            )
        },
    ),
    "groups, rates": (
        perceptron,
        {
            "optimizer": [
                og.optimizers.param_groups(
                    {"w*": og.optimizers.ParamGroup(rate=rate)}, og.optimizers.adam()
                )
                for rate in (0.5, 2.0, 0.5)
            ]
        },
    ),
    "averages": (
        perceptron,
        {"optimizer": og.optimizers.ema(og.optimizers.adam(), 0.9), "accumulate": 2},
    ),
    "averages from a step on": (
        normed_perceptron,
        {"optimizer": og.optimizers.swa(og.optimizers.momentum(), 5)},
    ),
    "lookahead": (
        perceptron,
        {"optimizer": Chain((clip_by_norm(0.1), og.optimizers.lookahead(og.optimizers.sgd(), 3)))},
    ),
    "decays": (
        perceptron,
        {"optimizer": [og.optimizers.adamw(weight_decay=d) for d in (0.0, 0.1, 1.0)]},
    ),
    "decays of gradients": (
        perceptron,
        {
            "optimizer": [og.optimizers.sgd(0.9, weight_decay=d) for d in (0.0, 0.1, 1.0)],
            "clip_norm": 0.5,
        },
    ),
    "decays or none": (
        perceptron,
        {"optimizer": [og.optimizers.sgd(weight_decay=d) for d in (0.1, 0.0, 0.0)]},
    ),
    "decays of averages": (
        perceptron,
        {
            "optimizer": [
                og.optimizers.ema(og.optimizers.adam(weight_decay=d), 0.9) for d in (0.0, 0.1, 0.0)
            ]
        },
    ),
    "clips": (
        perceptron,
        {
            "optimizer": [
                Chain((clip_by_global_norm(c), og.optimizers.adam())) for c in (0.1, 1.0, 0.1)
            ]
        },
    ),
    "drawn weights": (
        perceptron,
        {"init": "glorot", "seed": 5, "train": ["w1", "b0"], "learning_rate": 0.01},
    ),
    "schedules": (
        perceptron,
        {
            "learning_rate": [
                og.schedules.cosine(0.03, warmup=3),
                og.schedules.plateau(0.03, patience=1),
                0.02,
            ]
        },
    ),
    "com.microsoft": (fused, {"optimizer": "momentum", "accumulate": 2}),
    "half": (half_perceptron, {"optimizer": "sgd", "dropout": {"r": 0.5}}),
}


@pytest.mark.filterwarnings("ignore:.*train in float16")
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature):
    build, options = FEATURES[feature]
    stack, trainers = pair(build(), metrics=["accuracy"], **options)
    fit_all(stack, trainers, X[:40], Y[:40], validation=VALIDATION, **FITTED)
    tolerance = {"atol": 1e-3, "rtol": 1e-2} if feature == "half" else {}
    assert_equal_members(stack, trainers, X, Y, **tolerance)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_with_everything(optimizer):
    options = {"batch_norm": "train", "dropout": {"r": 0.3}, "accumulate": 2, "clip_norm": 0.5}
    rates = [r / 10 for r in RATES] if optimizer in ("rprop", "lion", "muon") else RATES
    model, wide = perceptron(True, np.float64), X.astype(np.float64)
    stack, trainers = pair(model, optimizer=optimizer, learning_rate=rates, **options)
    fit_all(stack, trainers, wide, Y, **FITTED)
    assert_equal_members(stack, trainers, wide, Y, atol=1e-9)


@pytest.mark.parametrize(
    ("optimizers", "kinds"),
    [
        (["adam", "adam", "sgd"], ["members 0 and 2", "ScaleByAdam", "ScaleByLearningRate"]),
        (
            [og.optimizers.adam(), og.optimizers.adam(amsgrad=True)],
            ["members 0 and 1", "amsgrad=True"],
        ),
        (["muon", og.optimizers.ema(og.optimizers.adam(), 0.9)], ["Orthogonalize", "ScaleByAdam"]),
    ],
)
def test_optimizers_of_two_kinds_are_refused(optimizers, kinds):
    stack = og.TrainerStack(perceptron(), "cross_entropy", optimizer=optimizers)
    with pytest.raises(ValueError, match=naming(*kinds, "TrainerStack")):
        stack.fit(X, Y)


def test_carried_states():
    data = {"x": X[:56], "before": np.zeros((56, 5), np.float32)}
    stack, trainers = pair(streaming(), carry={"before": "state"}, loss={"y": "cross_entropy"})
    options = {"shuffle": False, "validation": (data, Y[:56]), "epochs": 3, "batch_size": 8}
    fit_all(stack, trainers, data, Y[:56], **options)
    assert_equal_members(stack, trainers, data, Y[:56], batch_size=8)


def test_partial_fit_goes_on():
    stack, trainers = pair(
        normed_perceptron(), batch_norm="train", learning_rate=og.schedules.constant(0.02)
    )
    for trainer in (stack, *trainers):
        for i in range(4):
            trainer.partial_fit(X[i * 10 : i * 10 + 10], Y[i * 10 : i * 10 + 10], batch_size=5)
    assert stack.state.step == 8
    assert len(stack.history) == 4
    assert_equal_members(stack, trainers, X, Y)
    stack.fit(X, Y, **FITTED)
    stack.partial_fit(X, Y, batch_size=8)
    assert stack.state.epoch == 4


def test_frozen_members_stay_so_until_fit():
    class Freeze(og.callbacks.Callback):
        def on_epoch_end(self, trainer, state, control):
            control.freeze |= {0, 1} if state.epoch < 2 else {2}

    stack, _ = pair(perceptron(), callbacks=lambda: [Freeze()])
    stack.fit(X, Y, epochs=1, batch_size=30)
    before = stack.state.weights["w0"]
    with pytest.warns(UserWarning, match=naming("[0, 1]", "frozen")):
        stack.partial_fit(X, Y, batch_size=30)
    after = stack.state.weights["w0"]
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False]
    assert stack.state.frozen == {0: 2, 1: 2, 2: 4}
    with pytest.raises(ValueError, match=naming("all members", "frozen", "call fit")):
        stack.partial_fit(X, Y)
    stack.fit(X, Y, epochs=1, batch_size=30)
    assert stack.state.frozen == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("optimizer", "every_steps"),
    [
        ("adam", 3),
        ([og.optimizers.lamb(b1) for b1 in (0.8, 0.9, 0.95)], None),
        in_sweep("adam", None),
    ],
)
def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path, optimizer, every_steps):
    options = {"batch_norm": "train", "dropout": {"r": 0.3}, "accumulate": 2, "init": "redrawn"}
    options |= {
        "learning_rate": [og.schedules.plateau(0.05, patience=1), 0.03, og.schedules.cosine(0.02)]
    }

    def stack(*callbacks):
        made = {**options, "optimizer": optimizer, "callbacks": callbacks}
        return og.TrainerStack(normed_perceptron(), "cross_entropy", members=3, **made)

    data = {"epochs": 4, "batch_size": 8, "validation": VALIDATION}
    whole = stack().fit(X[:40], Y[:40], **data)
    folder = tmp_path / "checkpoints"
    broken = ActAtStep("step_end", 12, interrupt_training, every_steps=None)
    with pytest.raises(KeyboardInterrupt):
        stack(og.Checkpoint(folder, every_steps=every_steps), broken).fit(X[:40], Y[:40], **data)
    resumed = stack(og.Checkpoint(folder)).fit(X[:40], Y[:40], resume=folder, **data)
    for kind in ("weights", "slots", "buffers"):
        np.testing.assert_equal(getattr(resumed.state, kind), getattr(whole.state, kind))
    np.testing.assert_equal(resumed.history, whole.history)
    other = og.TrainerStack(
        normed_perceptron(), "cross_entropy", learning_rate=RATES, batch_norm="train"
    )
    with pytest.raises(ValueError, match="learning_rates"):
        other.fit(X[:40], Y[:40], resume=folder, **data)


def test_a_frozen_member_stays_so_in_a_checkpoint(tmp_path):
    def stack():
        return og.TrainerStack(
            perceptron(),
            "squared_error",
            optimizer="momentum",
            learning_rate=[0.01, 1e30, 0.02],
            callbacks=[og.Checkpoint(tmp_path)],
        )

    target = np.eye(CLASSES, dtype=np.float32)[Y]
    with pytest.warns(og.ConvergenceWarning, match="member 1"):
        first = stack().fit(X, target, epochs=2)
    resumed = stack().fit(X, target, epochs=4, resume=tmp_path)
    assert resumed.state.frozen == first.state.frozen
    assert list(resumed.state.frozen) == [1]
    whole = og.Trainer(perceptron(), "squared_error", optimizer="momentum", learning_rate=0.02)
    whole.fit(X, target, epochs=4)
    np.testing.assert_allclose(
        resumed.state.weights["w0"][2], whole.state.weights["w0"], rtol=0, atol=1e-6
    )
    loaded = og.callbacks.TrainState.load(sorted(tmp_path.glob("step-*"))[-1])
    assert loaded.frozen == first.state.frozen
    assert loaded.members == 3


@pytest.mark.parametrize(
    "optimizer", ["sgd", og.optimizers.ema(og.optimizers.sgd(), 0.5)], ids=["plain", "averages"]
)
def test_members_stop_early_one_by_one(optimizer):
    # the rates make one member overshoot at once, and another improve to the end
    options = {"learning_rate": [3.0, 0.001, 0.5], "optimizer": optimizer}
    options["callbacks"] = lambda: [og.EarlyStopping(patience=2)]
    stack, trainers = pair(normed_perceptron(), batch_norm="train", **options)
    options = {"validation": VALIDATION, "epochs": 12, "batch_size": 8}
    fit_all(stack, trainers, X[:40], Y[:40], **options)
    ends = [trainer.state.epoch for trainer in trainers]
    assert len(set(ends)) > 1  # else it tells nothing of single members
    for k, trainer in enumerate(trainers):
        ours, theirs = stack.state.values[k], trainer.state.values
        assert_close_arrays(ours.weights, theirs.weights, atol=1e-6)
        assert_close_arrays(ours.buffers, theirs.buffers, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stack.predict(X)[k], trainer.predict(X), rtol=1e-4, atol=1e-5)
        entry = trainer._job.callbacks.all[0].entry(trainer.state)
        own = stack._job.callbacks.all[0].entry(stack.state)["members"][k]
        for key in ("step", "epoch", "waiting", "stopped", "restored"):
            assert own[key] == entry[key], key
        np.testing.assert_allclose(own["best"], entry["best"], rtol=1e-5)
    bests = [min(t.state.validation_losses) for t in trainers]
    assert stack.best() == int(np.argmin(bests))


def test_a_callback_freezes_a_member():
    class Freeze(og.callbacks.Callback):
        def on_epoch_end(self, trainer, state, control):
            assert trainer.members == 3
            if state.epoch == 2:
                control.freeze.add(1)

    stack, trainers = pair(perceptron())
    stack._job.callbacks.callbacks.append(Freeze())
    stack.fit(X, Y, epochs=5, batch_size=16)
    trainers[1].fit(X, Y, epochs=2, batch_size=16)
    trainers[2].fit(X, Y, epochs=5, batch_size=16)
    for k in (1, 2):
        expected = trainers[k].state.weights
        assert_close_arrays(stack.state.values[k].weights, expected, atol=1e-6)
    assert stack.state.frozen == {1: 8}
    assert np.isnan(stack.history[-1]["loss"]).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="one model"):
        og.Trainer(perceptron(), "cross_entropy", callbacks=[FreezeFirst()]).fit(X, Y)


def test_a_callback_that_freezes_an_unknown_member_ends_the_training():
    class Freeze(og.callbacks.Callback):
        def on_epoch_end(self, trainer, state, control):
            control.freeze.add(7)

    stack, _ = pair(perceptron(), callbacks=lambda: [Freeze()])
    with pytest.raises(ValueError, match=naming("control.freeze", "[7]", "0 to 2")):
        stack.fit(X, Y)
    assert not stack.state.frozen


class FreezeFirst(og.callbacks.Callback):
    def on_epoch_end(self, trainer, state, control):
        control.freeze.add(0)


def test_every_callback_takes_members(tmp_path, capsys):
    class Log(Tracker):
        def begin(self, state, parameters):
            self.parameters, self.numbers = parameters, {}

        def log(self, step, scalars):
            self.numbers |= {(step, name): value for name, value in scalars.items()}

        def end(self, state):
            self.ended = state.step

    log = Log(every_steps=1)
    callbacks = [
        og.Progress(),
        og.callbacks.History(tmp_path / "history.csv"),
        og.callbacks.History(tmp_path / "history.json"),
        og.callbacks.Norms(every_steps=2),
        log,
        og.Checkpoint(tmp_path / "best", monitor="validation_accuracy"),
        og.callbacks.NanWatch(),
        og.EarlyStopping("validation_accuracy", patience=2),
    ]
    stack = og.TrainerStack(
        perceptron(),
        "cross_entropy",
        learning_rate=RATES,
        metrics=["accuracy"],
        callbacks=callbacks,
    )
    stack.fit(X[:40], Y[:40], validation=VALIDATION, epochs=4, batch_size=8)
    shown = capsys.readouterr().err
    assert "validation loss" in shown
    assert " to " in shown
    records = json.loads((tmp_path / "history.json").read_text())
    np.testing.assert_allclose(records[0]["loss"], stack.history[0]["loss"])
    header = (tmp_path / "history.csv").read_text().splitlines()[0].split(",")
    assert {"step", "epoch", "loss/0", "loss/1", "loss/2", "validation_accuracy/2"} <= set(header)
    last = stack.history[-1]
    assert log.numbers[last["step"], "validation_loss/2"] == last["validation_loss"][2]
    assert log.numbers[last["step"], "learning_rate/1"] == RATES[1]
    assert log.ended == last["step"]
    assert "0.01" in log.parameters["learning_rate"]
    norms = stack._job.callbacks.all[3].entry(stack.state)["records"][-1]
    weights = stack.state.weights["w0"]
    assert np.shape(norms["weight_norm"]) == (3,)
    assert weights.shape[0] == 3
    best = stack._job.callbacks.all[5].entry(stack.state)["best"]
    assert best == max(np.max(r["validation_accuracy"]) for r in stack.history)
    with pytest.raises(ValueError, match="Recorder"):
        og.TrainerStack(
            perceptron(), learning_rate=RATES, callbacks=[og.callbacks.Recorder(tmp_path / "r")]
        )


def test_norms_of_gradients_are_those_of_each_member():
    stack, trainers = pair(perceptron(), callbacks=lambda: [og.callbacks.Norms()], clip_norm=0.1)
    fit_all(stack, trainers, X, Y, **FITTED)
    for name, norm in stack.gradient_norms.items():
        theirs = [trainer.gradient_norms[name] for trainer in trainers]
        np.testing.assert_allclose(norm, theirs, rtol=1e-4)
    ours = stack._job.callbacks.all[0].entry(stack.state)["records"][-1]
    for k, trainer in enumerate(trainers):
        theirs = trainer._job.callbacks.all[0].entry(trainer.state)["records"][-1]
        for key in ("gradient_norm", "weight_norm"):
            np.testing.assert_allclose(ours[key][k], theirs[key], rtol=1e-4)


def test_models_and_files_of_members(tmp_path):
    stack, _ = pair(
        normed_perceptron(),
        batch_norm="train",
        optimizer=og.optimizers.ema(og.optimizers.adam(), 0.9),
    )
    stack.fit(X, Y, **FITTED)
    stack.save(tmp_path / "member.onnx", 1)
    assert onnx.load(tmp_path / "member.onnx") == stack.model(1)
    assert stack.model(0) != stack.model(1)
    with pytest.raises(IndexError):
        stack.model(3)


def test_a_weight_without_gradient_is_that_of_its_member():
    """The loss reads it behind a Round, through which no gradient passes."""
    model = float32_model(
        """g (float[N,6] x) => (float[N,4] y) {
            a = MatMul(x, w0)  r = Round(w1)  m = Mul(a, r)  y = Identity(m) }""",
        w0=drawn_weight(6, 4),
        w1=3 * drawn_weight(1, 4, seed=1),
    )
    options = {"train": ["w0", "w1"], "optimizer": "sgd"}
    stack, trainers = pair(model, **options)
    for k, rate in enumerate(RATES):
        own = stack.state.values[k].weights
        file = onnx.ModelProto.FromString(model.SerializeToString())
        for t in file.graph.initializer:
            t.CopyFrom(onnx.numpy_helper.from_array(own[t.name], t.name))
        trainers[k] = og.Trainer(file, "cross_entropy", learning_rate=rate, **options)
    for trainer in (stack, *trainers):
        with pytest.warns(UserWarning, match="'w1'"):
            trainer.fit(X, Y, **FITTED)
    assert_equal_members(stack, trainers, X, Y)


def test_data_of_every_kind():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcdef"))
    batches = [(X[i : i + 8], Y[i : i + 8], np.ones(len(Y[i : i + 8]))) for i in range(0, ROWS, 8)]
    for data in ((frame, Y), (batches,), (UncountedPieces(batches),)):
        stack, trainers = pair(perceptron(), optimizer="momentum")
        fit_all(stack, trainers, *data, epochs=2, batch_size=8, validation=VALIDATION)
        assert_equal_members(stack, trainers, frame if data[0] is frame else X, Y)


class UncountedPieces:
    """Batches to read again and again, whose number is unknown."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


HOT = np.eye(CLASSES, dtype=np.float32)[Y]


def two_outputs():
    return float32_model(
        """g (float[N,6] x) => (float[N,4] y, float[N,2] z) {
            h = MatMul(x, w0)  r = Tanh(h)  y = MatMul(r, w1)  z = MatMul(r, w2) }""",
        w0=drawn_weight(6, 5),
        w1=drawn_weight(5, CLASSES, seed=1),
        w2=drawn_weight(5, 2, seed=2),
    )


LOSSES = {
    "balanced": (perceptron, Y, {"class_weight": "balanced"}),
    "options": (perceptron, Y, {"loss_options": {"label_smoothing": 0.1, "ignore_index": 2}}),
    "function": (perceptron, HOT, {"loss": lambda op, p, label: op.Abs(p - label)}),
    "object of the seeds": (perceptron, HOT, {"loss": og.compat.SquareLearningLoss()}),
    "teacher": (perceptron, Y, {}),
    "two outputs": (
        two_outputs,
        {"y": Y, "z": X[:, :2]},
        {"loss": {"y": "cross_entropy", "z": "mse"}, "loss_weights": {"y": 1.0, "z": 0.3}},
    ),
    "rates by epoch": (
        perceptron,
        Y,
        {
            "optimizer": "sgd",
            "learning_rate": [
                og.compat.LearningRateSGD(0.05),
                og.compat.LearningRateSGD(0.01),
                0.02,
            ],
        },
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_of_loss_and_rate(loss):
    build, labels, options = LOSSES[loss]
    if loss == "teacher":
        options = {"loss": og.losses.distillation(perceptron(), "cross_entropy")}
    stack, trainers = pair(build(), **options)
    fit_all(stack, trainers, X, labels, **FITTED)
    for k, trainer in enumerate(trainers):
        ours, theirs = stack.state.values[k].weights, trainer.state.weights
        assert_close_arrays(ours, theirs, atol=1e-6)
        for ours, entry in zip(stack.history, trainer.history, strict=True):
            np.testing.assert_allclose(ours["loss"][k], entry["loss"], rtol=1e-5)
            np.testing.assert_allclose(ours["learning_rate"][k], entry["learning_rate"])


NETWORKS = [
    "gru, learned state",
    *map(in_sweep, ("cnn", "vit", "gpt", "t5", "detr")),
    *map(in_sweep, ("preactivation", "depthwise", "unet", "mae", "rotary decoder", "encoder")),
    *map(in_sweep, ("lstm", "gru", "rnn", "detector", "point detector", "swin", "convnext")),
    *map(in_sweep, ("cosine attention", "alibi", "scaled logits", "weight norm", "blur pool")),
    *map(in_sweep, ("rezero", "recommender", "float mask", "alibi table", "rotary computed")),
]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    from tests.support.networks_more import NETWORKS as BUILD

    network, inputs = BUILD[name]()
    names = [f"x{i}" for i in range(len(inputs))]
    axes = {name: {0: "N"} for name in names}
    model = export_module(network, inputs, input_names=names, dynamic_axes=axes)
    read = {x.name for x in model.graph.input}
    data = {
        n: np.tile(x.numpy(), (3, *[1] * (x.ndim - 1))) for n, x in zip(names, inputs, strict=True)
    }
    data = {name: array for name, array in data.items() if name in read}
    predictions = run_named(model, data)
    output = next(n for n, y in predictions.items() if y.dtype == np.float32)
    labels = np.random.default_rng(0).normal(size=predictions[output].shape).astype(np.float32)
    options = {"optimizer": "momentum", "learning_rate": [0.001, 0.002, 0.003]}
    options |= {"recompute": "cheap", "accumulate": 2, "loss": {output: "squared_error"}}
    stack, trainers = pair(model, **options)
    fit_all(stack, trainers, data, labels, epochs=2, batch_size=4)
    for k, trainer in enumerate(trainers):
        ours, theirs = stack.state.values[k].weights, trainer.state.weights
        assert_close_arrays(ours, theirs, rtol=1e-5, atol=1e-6)
