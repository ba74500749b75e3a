"""Groups that begin to train later, against PyTorch's `requires_grad`."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep
from tests.support.trainings import linear_model

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.normal(size=shape).astype(np.float32) / 2
    for name, shape in {"body_w": (5, 8), "body_b": (8,), "head_w": (8, 3), "head_b": (3,)}.items()
}
MODEL = parse_model(
    """f (float[N,5] x) => (float[N,3] y) {
        a = MatMul(x, body_w)  b = Add(a, body_b)  h = Tanh(b)
        c = MatMul(h, head_w)  y = Add(c, head_b) }""",
    opset=20,
    **WEIGHTS,
)
X = RNG.normal(size=(48, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 48)
START = {"body_w": 6, "body_b": 3, "head_w": 0, "head_b": 0}


def torch_weights(build, clip=None, steps=12, sizes=8):
    """Train with weights that require a gradient from their step on."""
    values = {name: torch.tensor(w, requires_grad=True) for name, w in WEIGHTS.items()}
    optimizer = build(values.values())
    for step in range(steps):
        for name, value in values.items():
            value.requires_grad_(step >= START[name])
        at = slice(step * sizes % 48, step * sizes % 48 + sizes)
        h = torch.tanh(torch.tensor(X[at]) @ values["body_w"] + values["body_b"])
        loss = torch.nn.functional.cross_entropy(
            h @ values["head_w"] + values["head_b"], torch.tensor(Y[at])
        )
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([v for v in values.values() if v.grad is not None], clip)
        optimizer.step()
    return {name: v.detach().numpy() for name, v in values.items()}


CASES = {
    "adam": (og.optimizers.adam(), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": (
        og.optimizers.adamw(weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    ),
    "momentum": (
        og.optimizers.momentum(weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    ),
    "rmsprop": (og.optimizers.rmsprop(), lambda p: torch.optim.RMSprop(p, lr=0.05)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("clip", "accumulate"), [(None, 1), (0.3, 2), in_sweep(None, 2), in_sweep(0.3, 1)]
)
def test_weights_are_those_of_requires_grad(name, clip, accumulate):
    own, theirs = CASES[name]
    late = {name: og.optimizers.ParamGroup(start=START[name]) for name in ("body_w", "body_b")}
    options = {"optimizer": og.optimizers.param_groups(late, own), "learning_rate": 0.05}
    options |= {"clip_norm": clip, "accumulate": accumulate}
    trainer = og.Trainer(MODEL, "cross_entropy", **options)
    trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False)
    for weight, expected in torch_weights(theirs, clip).items():
        np.testing.assert_allclose(
            trainer.state.weights[weight], expected, rtol=2e-4, atol=2e-5, err_msg=weight
        )


def test_weights_and_slots_stay_bit_for_bit_until_they_start():
    optimizer = og.optimizers.gradual_unfreezing(
        ["head_*", "*"], every=4, optimizer=og.optimizers.adamw(0.1)
    )
    trainer = og.Trainer(MODEL, "cross_entropy", optimizer=optimizer, learning_rate=0.05)
    trainer.fit(X[:32], Y[:32], batch_size=8, shuffle=False)
    state = trainer.state
    for name in ("body_w", "body_b"):
        assert state.weights[name].tobytes() == WEIGHTS[name].tobytes()
        assert not any(np.any(slot) for slot in state.slots[name].values())
    assert not np.array_equal(state.weights["head_w"], WEIGHTS["head_w"])
    trainer.partial_fit(X[32:40], Y[32:40], batch_size=8)
    assert not np.array_equal(trainer.state.weights["body_w"], WEIGHTS["body_w"])


def test_resumed_training_starts_groups_at_the_same_step(tmp_path):
    def trainer(*callbacks):
        optimizer = og.optimizers.gradual_unfreezing(["head_*", "body_b", "*"], every=4, rate=0.5)
        return og.Trainer(MODEL, "cross_entropy", optimizer=optimizer, callbacks=callbacks)

    whole = trainer().fit(X, Y, batch_size=8, epochs=3)
    trainer(og.Checkpoint(tmp_path)).fit(X, Y, batch_size=8, epochs=1)
    resumed = trainer().fit(X, Y, batch_size=8, epochs=3, resume=tmp_path)
    for name in WEIGHTS:
        assert resumed.state.weights[name].tobytes() == whole.state.weights[name].tobytes()


def test_groups_that_begin_later_average_nothing():
    later = og.optimizers.gradual_unfreezing(["w", "*"], every=3)
    assert not later.averages
    assert og.optimizers.ema(later, 0.9).averages
    assert og.optimizers.gradual_unfreezing(
        ["w", "*"], every=3, optimizer=og.optimizers.ema(og.optimizers.adam())
    ).averages


def test_averages_begin_with_the_group():
    def trained(start, epochs):
        group = og.optimizers.ParamGroup(og.optimizers.ema(og.optimizers.sgd(), 0.5), start=start)
        optimizer = og.optimizers.param_groups(
            {"body_*": group}, default=og.optimizers.ema(og.optimizers.sgd(), 0.5)
        )
        trainer = og.Trainer(MODEL, "cross_entropy", optimizer=optimizer, learning_rate=0.1)
        trainer.fit(X[:8], Y[:8], batch_size=8, epochs=epochs)
        return initializer_arrays(trainer.model)["body_w"]

    assert np.array_equal(trained(2, 2), WEIGHTS["body_w"])
    assert not np.array_equal(trained(2, 3), WEIGHTS["body_w"])


def test_members_of_a_stack_may_start_at_different_steps():
    optimizers = [
        og.optimizers.gradual_unfreezing(["head_*", "*"], every=every, optimizer="adam")
        for every in (2, 4)
    ]
    stack = og.TrainerStack(MODEL, "cross_entropy", optimizer=optimizers, learning_rate=0.05)
    stack.fit(X, Y, batch_size=8, shuffle=False)
    for k, optimizer in enumerate(optimizers):
        one = og.Trainer(MODEL, "cross_entropy", optimizer=optimizer, learning_rate=0.05)
        one.fit(X, Y, batch_size=8, shuffle=False)
        for name in WEIGHTS:
            np.testing.assert_allclose(
                stack.state.weights[name][k], one.state.weights[name], rtol=1e-5, atol=1e-6
            )


def test_large_weights_in_blocks():
    w = np.random.default_rng(1).normal(size=(300, 400)).astype(np.float32) / 20
    model = linear_model(w)
    data = np.random.default_rng(2).normal(size=(8, 300)).astype(np.float32)
    label = np.zeros((8, 400), np.float32)

    def trained(epochs, start):
        group = og.optimizers.ParamGroup(og.optimizers.adam(), start=start)
        trainer = og.Trainer(
            model, "squared_error", optimizer=og.optimizers.param_groups({"w": group})
        )
        return trainer.fit(data, label, batch_size=8, epochs=epochs).state.weights["w"]

    assert trained(2, 2).tobytes() == w.tobytes()
    np.testing.assert_allclose(trained(5, 2), trained(3, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: og.optimizers.ParamGroup(start=-1), "start"),
        (lambda: og.optimizers.ParamGroup(start=0.5), "start"),
        (lambda: og.optimizers.gradual_unfreezing("head", 3), "write"),
        (lambda: og.optimizers.gradual_unfreezing([], 3), "one or more"),
        (lambda: og.optimizers.gradual_unfreezing(["*"], 0), "every"),
    ],
)
def test_arguments_are_checked(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_weights_that_no_pattern_names_are_refused():
    optimizer = og.optimizers.gradual_unfreezing(["head_*"], every=2)
    with pytest.raises(ValueError, match="no pattern"):
        og.Trainer(MODEL, "cross_entropy", optimizer=optimizer).fit(X, Y)
