"""Perceptual losses, and scores of frozen models as losses, against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.errors import ModelError
from onnxgrad.losses import LossModel, perceptual_loss
from onnxgrad.model.convert import convert_precision
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, session_of
from tests.support.written_losses import WrittenLoss, torch_leaf

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 3, 3, 3))
KERNEL = RNG.standard_normal((8, 3, 3, 3)) / 3
DENSE = RNG.standard_normal((8 * 6 * 6, 40)) / 9
X, Y = RNG.standard_normal((5, 3, 6, 6)), RNG.standard_normal((5, 3, 6, 6))
ROWS = RNG.random(5) + 0.1


def generator_model(n="N", opset=20):
    """Return a convolution of images, computed as a product, as there is none in float64."""
    text = f"""g (double[{n},3,6,6] x) => (double[{n},3,6,6] y)
        <int64[2] flat = {{0, -1}}, int64[4] image = {{0, 3, 6, 6}}>
        {{ r = Reshape(x, flat) h = MatMul(r, w) y = Reshape(h, image) }}"""
    return parse_model(text, opset=opset, w=convolution_matrix(W))


def convolution_matrix(kernel):
    """Return the matrix (inputs, outputs) of a convolution of 6 x 6 images."""
    channels = kernel.shape[1]
    unit = torch.eye(channels * 36, dtype=torch.float64).reshape(-1, channels, 6, 6)
    return functional.conv2d(unit, torch.tensor(kernel), padding=1).flatten(1).numpy()


def encoder_model(rows="N", opset=20):
    """Return an encoder with a map of features, and a vector of features."""
    text = f"""e (double[{rows},3,6,6] image) => (double[{rows},40] code, double[{rows},8,6,6] map)
        <int64[2] flat = {{{"1" if rows == 1 else "0"}, -1}}, int64[4] grid = {{-1, 8, 6, 6}}>
        {{ r = Reshape(image, flat) k = MatMul(r, kernel) t = Tanh(k) map = Reshape(t, grid)
           s = Reshape(map, flat) code = MatMul(s, dense) }}"""
    return parse_model(text, opset=opset, kernel=convolution_matrix(KERNEL), dense=DENSE)


def encoder_features(x):
    spread = functional.conv2d(x, torch.tensor(KERNEL), padding=1).tanh()
    return spread.flatten(1) @ torch.tensor(DENSE), spread


def prediction(w):
    return (torch.tensor(X).flatten(1) @ w).reshape(-1, 3, 6, 6)


DISTANCES = {
    "squared_error": lambda a, b: ((a - b) ** 2).flatten(1).mean(1),
    "mae": lambda a, b: (a - b).abs().flatten(1).mean(1),
    "cosine": lambda a, b: 1 - functional.cosine_similarity(a.flatten(1), b.flatten(1)),
    "largest": lambda a, b: (a - b).abs().flatten(1).max(1).values,
}


def largest_row_difference(op, a, b):
    """Write the largest difference of each row."""
    return op.ReduceMax(op.Flatten(op.Abs(a - b)), [1], keepdims=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", ["N", 1])
@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_of_features(distance, rows, weighted):
    given = largest_row_difference if distance == "largest" else distance
    loss = perceptual_loss(encoder_model(rows), {"map": 0.3, "code": 2.0}, given, factor=0.5)
    w, model = torch_leaf(convolution_matrix(W)), generator_model()
    mine, wanted = encoder_features(prediction(w)), encoder_features(torch.tensor(Y))
    code, spread = (DISTANCES[distance](a, b) for a, b in zip(mine, wanted, strict=True))
    each = 0.5 * (2.0 * code + 0.3 * spread)
    share = torch.tensor(ROWS / ROWS.sum() if weighted else np.full(5, 0.2))
    trainer = og.Trainer(model, loss, optimizer="sgd", learning_rate=1.0)
    trainer.fit(X, Y, sample_weight=ROWS if weighted else None, batch_size=5)
    expected = (share * each).sum()
    expected.backward()
    assert trainer.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-10)
    change = w.detach().numpy() - trainer.state.weights["w"]
    np.testing.assert_allclose(change, w.grad.numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("opsets", [(18, 24), *map(in_sweep, [(24, 18), (21, 20)])])
def test_beside_a_loss_of_pixels_behind_a_change_of_scale(opsets):
    loss = perceptual_loss(
        encoder_model(opset=opsets[1]),
        "code",
        loss="l1",
        factor=0.1,
        preprocess=lambda op, x: (x - 0.5) / 2.0,
    )
    w, y = torch_leaf(convolution_matrix(W)), torch.tensor(Y)
    mine, wanted = (encoder_features((x - 0.5) / 2)[0] for x in (prediction(w), y))
    expected = functional.l1_loss(prediction(w), y) + 0.1 * functional.mse_loss(mine, wanted)
    model = generator_model(opset=opsets[0])
    trainer = og.Trainer(model, {"y": loss}, optimizer="sgd", learning_rate=1.0)
    assert trainer.evaluate(X, Y)["loss"] == pytest.approx(expected.item(), rel=1e-10)
    trainer.fit(X, Y, batch_size=5)
    expected.backward()
    change = w.detach().numpy() - trainer.state.weights["w"]
    np.testing.assert_allclose(change, w.grad.numpy(), rtol=1e-8, atol=1e-12)


def test_another_precision_than_the_encoder():
    """The encoder is float64, and the trained model float32 or float16, computed in both ways."""
    w, y = torch_leaf(convolution_matrix(W)), torch.tensor(Y)
    mine, wanted = encoder_features(prediction(w))[1], encoder_features(y)[1]
    expected = functional.mse_loss(mine, wanted).item()
    loss = perceptual_loss(encoder_model(), "map")
    for dtype, precision in (("float32", "auto"), ("float16", "auto"), ("float16", "mixed")):
        model = convert_precision(generator_model(), ir.DataType.from_numpy(np.dtype(dtype)))
        trainer = og.Trainer(model, loss, precision=precision, optimizer="sgd")
        found = trainer.evaluate(X.astype(dtype), Y.astype(dtype))["loss"]
        tolerance = 1e-5 if dtype == "float32" else 0.02
        assert found == pytest.approx(expected, rel=tolerance)
        trainer.fit(X.astype(dtype), Y.astype(dtype), epochs=2, batch_size=5)
        assert trainer.history[1]["loss"] < trainer.history[0]["loss"]


def test_both_copies_of_the_encoder_share_its_weights():
    model = og.add_loss_output(generator_model(), perceptual_loss(encoder_model(), "code"))
    sizes = [np.prod(t.dims) for t in model.graph.initializer]
    assert sizes.count(3 * 36 * 8 * 36) == sizes.count(DENSE.size) == 1
    [loss, _] = session_of(model).run(None, {"x": X, "label": Y})
    w, y = torch.tensor(convolution_matrix(W)), torch.tensor(Y)
    mine, wanted = (encoder_features(x)[0] for x in (prediction(w), y))
    assert loss.item() == pytest.approx(5 * functional.mse_loss(mine, wanted).item())


def test_a_score_that_training_maximizes():
    """A loss model of one row, whose score is turned into a loss by a formula."""
    text = """s (double[1,3,6,6] image) => (double[1,2] scores) <int64[2] flat = {1, -1}>
        { r = Reshape(image, flat) scores = MatMul(r, v) }"""
    v = RNG.standard_normal((108, 2))
    loss = LossModel(
        parse_model(text, v=v),
        inputs={"image": "y"},
        formula=lambda op, scores: 5.0 - op.Gather(scores, [1], axis=1),
    )
    w = torch_leaf(convolution_matrix(W))
    result = WrittenLoss(generator_model(), loss, {"x": X}, wrt="w")
    scores = prediction(w).flatten(1) @ torch.tensor(v)
    result.check((5 - scores[:, 1]).mean(), w, rtol=1e-9)


TWO_INPUTS = "e (double[N,3] a, double[N,3] b) => (double[N,3] y) { y = Add(a, b) }"
NO_ROWS = "e (double[N,3,6,6] a) => (double y) { y = ReduceMean<keepdims=0>(a) }"
OF_VECTORS = "e (double[N,4] a) => (double[N,4] y) { y = Exp(a) }"


def train_with_encoder(text: str) -> None:
    og.Trainer(generator_model(), perceptual_loss(parse_model(text))).fit(X, Y)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: perceptual_loss(encoder_model()), ["features="]),
        (lambda: perceptual_loss(encoder_model(), "nothing"), ["'nothing'"]),
        (lambda: perceptual_loss(encoder_model(), "code", "far"), ["distance", "'far'"]),
        (lambda: perceptual_loss(encoder_model(), "code", loss="cross_entropy"), ["cross_entropy"]),
        (lambda: perceptual_loss(encoder_model(), {"code": -1.0}), ["features"]),
        (lambda: perceptual_loss(parse_model(TWO_INPUTS)), ["['a', 'b']", "add_initializer"]),
        (lambda: train_with_encoder(NO_ROWS), ["()", "each row"]),
        (lambda: train_with_encoder(OF_VECTORS), ["the encoder", "['N', 4]"]),
    ],
)
def test_refuses(make, parts):
    with pytest.raises((ValueError, ModelError), match=naming(*parts)):
        make()
