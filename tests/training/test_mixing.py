"""Mixup and CutMix against the steps of PyTorch's reference code, batch by batch."""

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep
from tests.support.trainings import assert_close_arrays

torch = pytest.importorskip("torch")

STREAM = 3
LINEAR = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w)  y = Add(h, b) }"
IMAGES = """f (float[N,2,5,6] x) => (float[N,3] y) {
    h = Flatten <axis = 1> (x)  y = Gemm <transB = 1> (h, w) }"""
W = np.random.default_rng(7).normal(size=(4, 3)).astype(np.float32)
B = np.float32([0.1, -0.2, 0.3])
WI = np.random.default_rng(8).normal(size=(3, 60)).astype(np.float32) / 8
SGD = {"optimizer": "sgd", "learning_rate": 0.1, "seed": 3}


def mixing_trainer(mix, text=LINEAR, w=W, loss="cross_entropy", make=og.Trainer, **options):
    weights = {"w": w} | ({"b": B} if text == LINEAR else {})
    return make(parse_model(text, opset=20, **weights), loss, mix=mix, **options)


def drawn_rows(count, shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, *shape)).astype(np.float32), rng.integers(0, 3, count)


def mixing_numbers(mix, seed, step, count):
    """Return the permutation and the numbers of a step, from what the documentation says."""
    rng = np.random.default_rng([seed, STREAM, step])
    numbers = [rng.random(8)] if isinstance(mix, type(og.losses.cutmix())) else []
    share = rng.beta(mix.alpha, mix.alpha)
    return share, (numbers[0] if numbers else None), rng.permutation(count)


def mixed(mix, x, seed, step):
    """Return a mixed batch, its share and its permutation, as the reference code mixes it."""
    share, centers, order = mixing_numbers(mix, seed, step, len(x))
    if centers is None:
        return share * x + (1 - share) * x[order], share, order
    height, width = x.shape[2:]
    half = 0.5 * np.sqrt(1 - share)
    y, x0 = (centers[:2] * (height, width)).astype(int)
    dy, dx = int(half * height), int(half * width)
    top, bottom = max(y - dy, 0), min(y + dy, height)
    left, right = max(x0 - dx, 0), min(x0 + dx, width)
    x = x.clone()
    x[:, :, top:bottom, left:right] = x[order][:, :, top:bottom, left:right]
    return x, 1 - (bottom - top) * (right - left) / (height * width), order


def trained_by_torch(mix, X, y, *, criterion, weights, batch=8, seed=3, rate=0.1, forward, sw=None):
    values = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
    optimizer = torch.optim.SGD(values.values(), lr=rate)
    losses = []
    for step, at in enumerate(range(0, len(X), batch)):
        x, label = torch.tensor(X[at : at + batch]), torch.tensor(y[at : at + batch])
        x, share, order = mixed(mix, x, seed, step)
        out = forward(values, x)
        own = () if sw is None else (torch.tensor(sw[at : at + batch]),)
        theirs = [w[order] for w in own]
        loss = share * criterion(out, label, *own) + (1 - share) * criterion(
            out, label[order], *theirs
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: v.detach().numpy() for name, v in values.items()}, losses


def linear_output(values, x):
    return x @ values["w"] + values["b"]


WEIGHTS = {0: 0.5, 1: 2.0, 2: 1.5}


@pytest.mark.parametrize(
    ("options", "class_weight"),
    [
        ({}, None),
        ({"label_smoothing": 0.1}, WEIGHTS),
        ({"ignore_index": 1}, WEIGHTS),
        in_sweep({}, WEIGHTS),
        in_sweep({"label_smoothing": 0.1}, None),
        in_sweep({"ignore_index": 1}, None),
    ],
)
def test_mixup_of_classes_is_that_of_the_reference_code(options, class_weight):
    X, y = drawn_rows(36, (4,))
    mix = og.losses.mixup(alpha=0.7)
    trainer = mixing_trainer(mix, class_weight=class_weight, loss_options=options, **SGD)
    trainer.fit(X, y, batch_size=8, shuffle=False)
    weight = None if class_weight is None else torch.tensor([0.5, 2.0, 1.5])
    criterion = torch.nn.CrossEntropyLoss(weight=weight, **options)
    expected, losses = trained_by_torch(
        mix, X, y, criterion=criterion, weights={"w": W, "b": B}, forward=linear_output
    )
    assert_close_arrays(trainer.state.weights, expected, rtol=2e-5, atol=2e-6)
    if not options.get("ignore_index") and class_weight is None:
        sizes = [8, 8, 8, 8, 4]
        mean = np.average(losses, weights=sizes)
        np.testing.assert_allclose(trainer.history[0]["loss"], mean, rtol=1e-5)


def test_sample_weights_stay_with_their_labels():
    X, y = drawn_rows(32, (4,))
    sw = np.random.default_rng(1).random(32).astype(np.float32)
    mix = og.losses.mixup(alpha=1.0)
    trainer = mixing_trainer(mix, **SGD)
    trainer.fit(X, y, sample_weight=sw, batch_size=8, shuffle=False)

    def criterion(out, label, w):
        each = torch.nn.functional.cross_entropy(out, label, reduction="none")
        return (each * w).sum() / w.sum()

    expected, _ = trained_by_torch(
        mix, X, y, criterion=criterion, weights={"w": W, "b": B}, forward=linear_output, sw=sw
    )
    assert_close_arrays(trainer.state.weights, expected, rtol=2e-5, atol=2e-6)


def test_cutmix_is_that_of_the_reference_code():
    X, y = drawn_rows(40, (2, 5, 6))
    mix = og.losses.cutmix(alpha=1.0)
    trainer = mixing_trainer(mix, IMAGES, WI, **SGD)
    trainer.fit(X, y, batch_size=8, shuffle=False)
    expected, losses = trained_by_torch(
        mix,
        X,
        y,
        criterion=torch.nn.CrossEntropyLoss(),
        weights={"w": WI},
        forward=lambda values, x: x.flatten(1) @ values["w"].T,
    )
    np.testing.assert_allclose(trainer.state.weights["w"], expected["w"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(trainer.history[0]["loss"], np.mean(losses), rtol=1e-5)


def test_regression_has_the_gradient_of_mixed_labels():
    X, _ = drawn_rows(24, (4,))
    y = np.random.default_rng(2).normal(size=(24, 3)).astype(np.float32)
    mix = og.losses.mixup(alpha=0.7)
    trainer = mixing_trainer(mix, loss="squared_error", **SGD)
    trainer.fit(X, y, batch_size=8, shuffle=False)
    w, b = torch.tensor(W, requires_grad=True), torch.tensor(B, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=0.1)
    for step in range(3):
        at = slice(8 * step, 8 * step + 8)
        x, share, order = mixed(mix, torch.tensor(X[at]), 3, step)
        label = torch.tensor(y[at])
        label = share * label + (1 - share) * label[order]  # eq. (1) of the paper
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(x @ w + b, label).backward()
        optimizer.step()
    np.testing.assert_allclose(trainer.state.weights["w"], w.detach(), rtol=2e-5, atol=2e-6)


def test_resumed_training_is_the_same_bit_for_bit(tmp_path):
    X, y = drawn_rows(40, (4,))

    def trainer(*callbacks):
        return mixing_trainer(og.losses.mixup(), seed=5, callbacks=callbacks)

    whole = trainer().fit(X, y, batch_size=8, epochs=4)
    trainer(og.Checkpoint(tmp_path)).fit(X, y, batch_size=8, epochs=2)
    resumed = trainer().fit(X, y, batch_size=8, epochs=4, resume=tmp_path)
    assert resumed.state.weights["w"].tobytes() == whole.state.weights["w"].tobytes()
    other = mixing_trainer(og.losses.mixup(0.9), seed=5)
    with pytest.raises(ValueError, match=naming("mix: ", "0.2", "0.9", "checkpoint")):
        other.fit(X, y, batch_size=8, epochs=4, resume=tmp_path)
    plain = mixing_trainer(None, seed=5).fit(X, y, batch_size=8, epochs=4)
    assert not np.array_equal(plain.state.weights["w"], whole.state.weights["w"])


def test_evaluation_mixes_nothing():
    X, y = drawn_rows(20, (4,))
    trainer = mixing_trainer(og.losses.mixup(1.0), learning_rate=1e-9)
    trainer.fit(X, y, validation=(X, y), batch_size=5)
    logits = torch.tensor(X @ W + B)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(y)).item()
    assert trainer.history[0]["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.history[0]["loss"] != pytest.approx(expected, rel=1e-3)


def test_micro_batches_are_mixed_within_themselves():
    X, y = drawn_rows(16, (4,))
    sw = np.random.default_rng(1).random(16).astype(np.float32)
    trainer = mixing_trainer(og.losses.mixup(1.0), accumulate=2, **SGD)
    trainer.fit(X, y, sample_weight=sw, batch_size=16, shuffle=False)
    w, b = torch.tensor(W, requires_grad=True), torch.tensor(B, requires_grad=True)
    total = 0
    for part in range(2):
        at = slice(8 * part, 8 * part + 8)
        x, label, own = torch.tensor(X[at]), torch.tensor(y[at]), torch.tensor(sw[at])
        x, share, order = mixed(
            og.losses.mixup(1.0), x, 3, part
        )  # the number of the draw of step 0
        for factor, of in ((share, np.arange(8)), (1 - share, order)):
            each = torch.nn.functional.cross_entropy(x @ w + b, label[of], reduction="none")
            total = total + factor * (each * own[of]).sum()
    (total / sw.sum()).backward()
    expected = W - 0.1 * w.grad.numpy()
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=2e-5, atol=2e-6)


def test_members_of_a_stack_see_the_mixed_rows_of_a_trainer():
    X, y = drawn_rows(24, (4,))
    options = {"make": og.TrainerStack, "learning_rate": [0.01, 0.1], "seed": 2}
    stack = mixing_trainer(og.losses.mixup(1.0), **options)
    stack.fit(X, y, batch_size=8, epochs=2)
    for k, rate in enumerate((0.01, 0.1)):
        one = mixing_trainer(og.losses.mixup(1.0), learning_rate=rate, seed=2)
        one.fit(X, y, batch_size=8, epochs=2)
        np.testing.assert_allclose(
            stack.state.weights["w"][k], one.state.weights["w"], rtol=1e-4, atol=1e-6
        )


TWO = """f (float[N,4] x, float[N,4] z, int64[N,1] k) => (float[N,3] y) {
    a = Add(x, z)  f = Cast <to = 1> (k)  c = Mul(a, f)  y = MatMul(c, w) }"""


def test_inputs_are_mixed_by_name():
    X, y = drawn_rows(8, (4,))
    Z, _ = drawn_rows(8, (4,), seed=9)
    K = np.ones((8, 1), np.int64)
    mix = og.losses.mixup(0.7, inputs=["x"])
    trainer = mixing_trainer(mix, TWO, **SGD)
    trainer.fit({"x": X, "z": Z, "k": K}, y, batch_size=8, shuffle=False)
    w = torch.tensor(W, requires_grad=True)
    x, share, order = mixed(mix, torch.tensor(X), 3, 0)
    out, label = (x + torch.tensor(Z)) @ w, torch.tensor(y)
    loss = torch.nn.functional.cross_entropy
    (share * loss(out, label) + (1 - share) * loss(out, label[order])).backward()
    expected = W - 0.1 * w.grad.numpy()
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=2e-5, atol=2e-6)
    for wrong, message in (
        (og.losses.mixup(), r"\['x', 'z', 'k'\]"),
        (og.losses.mixup(inputs=["k"]), "'k'"),
        (og.losses.mixup(inputs=["q"]), "'q'"),
    ):
        with pytest.raises(ValueError, match=message):
            mixing_trainer(wrong, TWO).fit({"x": X, "z": Z, "k": K}, y, batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "triplet"}, "'triplet'"),
        ({"loss": "contrastive"}, "'contrastive'"),
        ({"loss": og.losses.OutputLoss(lambda op, y: op.Abs(y))}, "OutputLoss"),
        ({"mix": og.losses.cutmix()}, r"'x'.*\(rows, channels, height, width\).*axes=\(1, 2\)"),
        ({"mix": og.losses.cutmix(axes=(0,))}, r"axes=\(0,\).*'x'"),
        ({"batch_axes": {"x": 1}}, r"batch_axes for \['x'\].*leave out"),
    ],
)
def test_what_cannot_be_mixed_is_refused(arguments, message):
    X, y = drawn_rows(8, (4,))
    chosen = {"loss": "cross_entropy", "mix": og.losses.mixup()} | arguments
    with pytest.raises(ValueError, match=message):
        mixing_trainer(**chosen).fit(
            X, None if isinstance(chosen["loss"], og.losses.OutputLoss) else y, batch_size=4
        )


@pytest.mark.parametrize(
    ("batch", "accumulate"), [(1, 1), (4, 4), (7, 3)]
)  # seven rows are cut into equal parts
def test_single_rows_are_refused(batch, accumulate):
    X, y = drawn_rows(14, (4,))
    trainer = mixing_trainer(og.losses.mixup(), accumulate=accumulate)
    with pytest.raises(ValueError, match=naming(f"of {batch} rows", "batch_size")):
        trainer.fit(X, y, batch_size=batch)
    assert trainer.state.step == 0


def test_arguments_are_checked():
    for wrong in (0, -1, float("inf"), True):
        with pytest.raises(ValueError, match="alpha"):
            og.losses.mixup(wrong)
    with pytest.raises(ValueError, match=naming("inputs=['x']")):
        og.losses.mixup(inputs="x")
    with pytest.raises(ValueError, match=naming("mixup(...)", "'mixup'")):
        mixing_trainer("mixup")


SEGMENT = "f (float[N,2,5,6] x) => (float[N,3,5,6] y) { y = Conv(x, w) }"


def test_labels_of_pixels_are_mixed_but_not_cut():
    X = np.random.default_rng(0).normal(size=(8, 2, 5, 6)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, 3, (8, 5, 6))
    w = np.random.default_rng(2).normal(size=(3, 2, 1, 1)).astype(np.float32)
    with pytest.raises(ValueError, match="pixels"):
        mixing_trainer(og.losses.cutmix(), SEGMENT, w).fit(X, y)
    mix = og.losses.mixup(1.0)
    trainer = mixing_trainer(mix, SEGMENT, w, optimizer="sgd", learning_rate=0.5, seed=3)
    trainer.fit(X, y, batch_size=8, shuffle=False)
    expected, _ = trained_by_torch(
        mix,
        X,
        y,
        criterion=torch.nn.CrossEntropyLoss(),
        weights={"w": w},
        rate=0.5,
        forward=lambda values, x: torch.nn.functional.conv2d(x, values["w"]),
    )
    np.testing.assert_allclose(trainer.state.weights["w"], expected["w"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "arguments", [{"recompute": "all"}, {"dropout": {"h": 0.5}}, {"clip_norm": 0.1}]
)
def test_other_arguments_go_with_it(arguments):
    X, y = drawn_rows(24, (4,))
    trainers = [
        mixing_trainer(og.losses.mixup(1.0), **arguments).fit(X, y, batch_size=8) for _ in range(2)
    ]
    assert trainers[0].state.weights["w"].tobytes() == trainers[1].state.weights["w"].tobytes()
    assert not np.array_equal(trainers[0].state.weights["w"], W)


def test_images_with_channels_last_and_a_static_batch():
    text = IMAGES.replace("float[N,2,5,6] x", "uint8[4,5,6,2] x").replace(
        "h = Flatten <axis = 1> (x)", "c = Cast <to = 1> (x) h = Flatten <axis = 1> (c)"
    )
    X = np.random.default_rng(0).integers(0, 9, (8, 5, 6, 2)).astype(np.uint8)
    y = np.arange(8) % 3
    with pytest.raises(ValueError, match=naming("'x'", "cutmix(axes=(1, 2))")):
        mixing_trainer(og.losses.cutmix(), text, WI).fit(X, y)
    mix = og.losses.cutmix(axes=(1, 2))
    trainer = mixing_trainer(mix, text, WI, **SGD).fit(X, y, shuffle=False)
    expected, _ = trained_by_torch(
        mix,
        np.moveaxis(X, 3, 1),
        y,
        batch=4,
        criterion=torch.nn.CrossEntropyLoss(),
        weights={"w": WI},
        forward=lambda values, x: x.permute(0, 2, 3, 1).flatten(1).float() @ values["w"].T,
    )
    np.testing.assert_allclose(trainer.state.weights["w"], expected["w"], rtol=2e-5, atol=2e-6)


def test_step_models_have_inputs_of_what_is_drawn():
    X, y = drawn_rows(8, (4,))
    trainer = mixing_trainer(og.losses.mixup())
    gradients, _ = trainer.step_models(X, y)
    names = [x.name for x in gradients.graph.input]
    assert names[-2:] == ["partners", "mix_numbers"]
