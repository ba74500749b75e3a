"""Losses of classes, masks, distributions, embeddings and sequences, against PyTorch in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad import Trainer
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.data import by_length
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.losses import LOSSES
from onnxgrad.losses.embeddings import info_nce, nt_xent, triplet_margin
from onnxgrad.losses.in_graph import make_label_input
from onnxgrad.losses.objectives import training_loss
from onnxgrad.losses.spec import Terms
from onnxgrad.model.convert import to_proto
from tests.support.combinations import parametrize_chosen
from tests.support.errors import naming
from tests.support.models import initializer_arrays, parse_model
from tests.support.running import in_sweep, run
from tests.support.written_losses import WrittenLoss, torch_leaf

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = np.random.default_rng(0)
F = 3 * RNG.standard_normal((6, 4))
MAPS = RNG.standard_normal((3, 4, 2, 5))
BITS = (RNG.random((6, 4)) > 0.4) * 1.0
CLASSES = np.array([0, 3, 1, 1, 2, 3])
MAP_CLASSES = RNG.integers(0, 4, (3, 2, 5))
IGNORED = np.where(RNG.random((3, 2, 5)) > 0.3, MAP_CLASSES, -100)
IGNORED[2] = -100
SOFT = RNG.dirichlet(np.ones(4), 6)
SOFT[0] = [1, 0, 0, 0]
POINTS = RNG.standard_normal((7, 3))
OF_POINTS = np.array([0, 1, 0, 0, 1, 2, 0])
PAIRS = RNG.standard_normal((5, 2, 3))
DIMS = ("symbols", "static", "all symbols")  # what the shapes of the inputs state
EACH_DIMS = pytest.mark.parametrize("dims", ["symbols", *map(in_sweep, DIMS[1:])])


def loss_and_gradients(
    formula, values, label=None, kind=None, dims="symbols", dtype=np.float64, opset=18
):
    """Return the loss sum(w l) / sum(w), the losses, and the gradients by `values`."""
    inputs = []
    for i, value in enumerate(values):
        shape = {
            "symbols": ["N", *value.shape[1:]],
            "static": value.shape,
            "all symbols": [f"d{k}" for k in range(value.ndim)],
        }[dims]
        tensor = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
        inputs.append(ir.Value(name=f"x{i}", type=tensor, shape=ir.Shape(shape)))
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name="g")
    op, labels, feed = Emit(graph), [], dict(zip(("x0", "x1", "x2"), values, strict=False))
    if label is not None:
        y = make_label_input(op, inputs[0], kind, "test", "label")
        if dims == "static":
            y.shape = ir.Shape(label.shape)
        labels, feed["label"] = [y], label.astype(y.dtype.numpy())
        graph.inputs.append(y)
    with op:
        terms = formula(op, *inputs, *labels)
        terms = terms if isinstance(terms, Terms) else Terms(terms)
        weights = op.ones_like(terms.losses) if terms.weights is None else terms.weights
        total = op.ReduceSum(terms.losses * weights, keepdims=0)
        loss = total / op.ReduceSum(weights, keepdims=0)
        gradients = sweep(op, {loss: op.const(np.ones((), dtype))}, inputs)
        graph.outputs.extend([loss, op.copy_of(terms.losses)])
        graph.outputs.extend(op.copy_of(gradients[x]) for x in inputs)
    model = ir.Model(graph, ir_version=10)
    infer(model)
    feed = {k: v.astype(dtype) if v.dtype == np.float64 else v for k, v in feed.items()}
    loss, losses, *gradients = run(to_proto(model), feed)
    return loss, losses, gradients


def loss_by_name(name, value, label, dims="symbols", dtype=np.float64, **options):
    spec = LOSSES[name].with_options(options)

    def formula(op, prediction, label):
        return spec.formula(op, prediction, label, **options)

    loss, losses, [gradient] = loss_and_gradients(
        formula, [value], label, spec.label_kind, dims, dtype
    )
    return loss, losses, gradient


def assert_as_torch(results, loss, *inputs):
    """Compare loss and gradients with those of torch."""
    loss.backward()
    np.testing.assert_allclose(results[0], loss.item(), rtol=1e-9)
    gradients = results[2] if isinstance(results[2], list) else [results[2]]
    for gradient, x in zip(gradients, inputs, strict=True):
        np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-10)


# -- classes and masks


def sigmoid_focal(x, y, alpha, gamma):
    """Return torchvision.ops.sigmoid_focal_loss, written again."""
    p = x.sigmoid()
    ce = functional.binary_cross_entropy_with_logits(x, y, reduction="none")
    p_t = p * y + (1 - p) * (1 - y)
    loss = ce * (1 - p_t) ** gamma
    return loss if alpha is None else (alpha * y + (1 - alpha) * (1 - y)) * loss


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (None, 2.0), (0.6, 0.0), (0.9, 0.7)])
@pytest.mark.parametrize("from_logits", [True, False])
def test_focal(alpha, gamma, from_logits):
    x = torch_leaf(F)
    value = F if from_logits else 1 / (1 + np.exp(-F))
    options = {"alpha": alpha, "gamma": gamma, "from_logits": from_logits}
    results = loss_by_name("focal", value, BITS, **options)
    if from_logits:
        assert_as_torch(results, sigmoid_focal(x, torch.tensor(BITS), alpha, gamma).mean(), x)
    else:
        want = sigmoid_focal(x, torch.tensor(BITS), alpha, gamma).detach().numpy()
        np.testing.assert_allclose(results[1], want, rtol=1e-9)


def test_focal_is_finite_far_from_zero():
    x = np.array([[-800.0, 800.0, -800.0, 800.0]])
    for gamma in (0.5, 2.0):
        _, losses, gradient = loss_by_name("focal", x, np.array([[0.0, 0, 1, 1]]), gamma=gamma)
        np.testing.assert_allclose(losses, [[0, 600, 200, 0]])
        np.testing.assert_allclose(gradient, [[0, 0.75 / 4, -0.25 / 4, 0]])
        _, losses, gradient = loss_by_name("softmax_focal", x, np.array([1]), gamma=gamma)
        np.testing.assert_allclose(losses, [np.log(2) * 0.5**gamma])
        assert np.isfinite(gradient).all()
        _, losses, gradient = loss_by_name("softmax_focal", x[:, :2], np.array([1]), gamma=gamma)
        assert losses == [0]
        assert (gradient == 0).all()


SHARES = [0.1, 0.2, 0.3, 0.4]


@parametrize_chosen(
    "alpha dims",
    [(None, "static"), (0.25, "symbols"), (SHARES, DIMS[2])],
    [None, 0.25, SHARES],
    DIMS,
)
def test_softmax_focal(alpha, dims):
    x, y = torch_leaf(MAPS), torch.tensor(IGNORED)
    log_p = x.log_softmax(1).gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1)
    a = torch.ones(4) if alpha is None else torch.tensor(alpha, dtype=torch.float64).expand(4)
    loss = (-a[y.clamp(min=0)] * (1 - log_p.exp()) ** 1.5 * log_p)[y >= 0].mean()
    results = loss_by_name("softmax_focal", MAPS, IGNORED, dims, alpha=alpha, gamma=1.5)
    assert_as_torch(results, loss, x)
    probabilities = MAPS.max() - MAPS + 1
    probabilities /= probabilities.sum(1, keepdims=True)
    loss, *_ = loss_by_name("softmax_focal", np.log(probabilities), IGNORED, gamma=1.5)
    same, *_ = loss_by_name("softmax_focal", probabilities, IGNORED, gamma=1.5, from_logits=False)
    np.testing.assert_allclose(loss, same, rtol=1e-9)


@pytest.mark.parametrize("axis", [-1, 2])
def test_last_axis_of_classes(axis):
    last, soft = MAPS[:, :, 0].transpose(0, 2, 1), np.moveaxis(MAPS[::-1, :, 0], 1, 2)
    soft = np.exp(soft) / np.exp(soft).sum(2, keepdims=True)
    for name, label, second in (
        ("softmax_focal", IGNORED[:, 0], IGNORED[:, 0]),
        ("softmax_dice", IGNORED[:, 0], IGNORED[:, 0]),
        ("kl_divergence", soft, soft.transpose(0, 2, 1)),
    ):
        loss, _, gradient = loss_by_name(name, last, label, axis=axis)
        want, _, expected = loss_by_name(name, MAPS[:, :, 0], second)
        np.testing.assert_allclose(loss, want)
        np.testing.assert_allclose(gradient, expected.transpose(0, 2, 1), atol=1e-12)


def test_softmax_focal_refuses_other_numbers_of_alpha():
    with pytest.raises(ValueError, match=naming("alpha", "each class")):
        loss_by_name("softmax_focal", F, CLASSES, alpha=[1.0, 2.0])


def dice_of(p, t, axes, smooth):
    return 1 - (2 * (p * t).sum(axes) + smooth) / (p.sum(axes) + t.sum(axes) + smooth)


@parametrize_chosen(
    "smooth per_channel dims",
    [(1.0, True, "static"), (1e-5, False, "symbols")],
    [1.0, 1e-5],
    [True, False],
    DIMS[:2],
)
def test_dice(smooth, per_channel, dims):
    x, bits = torch_leaf(MAPS), (MAPS[::-1] > 0) * 1.0
    axes = (2, 3) if per_channel else (1, 2, 3)
    loss = dice_of(x.sigmoid(), torch.tensor(bits), axes, smooth).mean()
    assert_as_torch(
        loss_by_name("dice", MAPS, bits, dims, smooth=smooth, per_channel=per_channel), loss, x
    )
    if not per_channel:
        probabilities = 1 / (1 + np.exp(-MAPS))
        results = loss_by_name("dice", probabilities, bits, smooth=smooth, from_logits=False)
        np.testing.assert_allclose(results[0], loss.item())


@parametrize_chosen("per_channel dims", [(True, "static"), (False, "symbols")], [True, False], DIMS)
def test_dice_leaves_out_labels_that_are_nan(per_channel, dims):
    x, bits = torch_leaf(MAPS), (MAPS[::-1] > 0) * 1.0
    bits[:2, :, 0, :3] = bits[2] = np.nan  # a row without any label has no weight
    axes, kept = (2, 3) if per_channel else (1, 2, 3), torch.tensor(~np.isnan(bits))
    t = torch.tensor(np.nan_to_num(bits))
    loss = dice_of(x.sigmoid() * kept, t, axes, 1.0)[:2].mean()
    results = loss_by_name("dice", MAPS, bits, dims, per_channel=per_channel, ignore_nan=True)
    assert_as_torch(results, loss, x)


@EACH_DIMS
def test_softmax_dice(dims):
    x = torch_leaf(MAPS)
    kept = torch.tensor(IGNORED >= 0).unsqueeze(1)
    t = functional.one_hot(torch.tensor(IGNORED).clamp(min=0), 4).movedim(-1, 1) * kept
    per_class = dice_of(x.softmax(1) * kept, t, (2, 3), 1.0)
    assert not kept[2].any()  # a row that has no label has no weight
    assert_as_torch(loss_by_name("softmax_dice", MAPS, IGNORED, dims), per_class[:2].mean(), x)


# -- distributions


@pytest.mark.parametrize("from_logits", [True, False])
def test_kl_divergence(from_logits):
    x = torch_leaf(F if from_logits else SOFT[::-1] * 0.9 + 0.025)
    log_p = x.log_softmax(1) if from_logits else x.log()
    loss = functional.kl_div(log_p, torch.tensor(SOFT), reduction="batchmean")
    value = x.detach().numpy()
    assert_as_torch(loss_by_name("kl_divergence", value, SOFT, from_logits=from_logits), loss, x)


@pytest.mark.parametrize("q", [0.5, 0.1, [0.05, 0.2, 0.5, 0.95]])
def test_quantile(q):
    x, y = torch_leaf(F), BITS[:, :1] if isinstance(q, list) else BITS
    d = torch.tensor(y) - x
    levels = torch.tensor(q, dtype=torch.float64)
    assert_as_torch(
        loss_by_name("quantile", F, y, q=q), torch.maximum(levels * d, (levels - 1) * d).mean(), x
    )


@pytest.mark.parametrize("q", [0.0, 1.5, [0.1, 2], [[0.5]]])
def test_quantile_refuses(q):
    with pytest.raises(ValueError, match=naming("q=", "quantile", "between 0 and 1")):
        loss_by_name("quantile", F, BITS, q=q)
    with pytest.raises(ValueError, match=naming("4 columns", "q 2 quantiles", "one quantile")):
        loss_by_name("quantile", F, BITS[:, :1], q=[0.1, 0.9])


def test_log_cosh():
    x = torch_leaf(F)
    assert_as_torch(
        loss_by_name("log_cosh", F, BITS), (x - torch.tensor(BITS)).cosh().log().mean(), x
    )
    _, losses, gradient = loss_by_name("log_cosh", np.array([[-900.0, 900.0]]), np.zeros((1, 2)))
    np.testing.assert_allclose(losses, [[900 - np.log(2)] * 2])
    np.testing.assert_allclose(gradient, [[-0.5, 0.5]])


@pytest.mark.parametrize("full", [True, False])
def test_gaussian_nll(full):
    x, y = torch_leaf(PAIRS), torch.tensor(PAIRS[:, 0] + 1)
    loss = functional.gaussian_nll_loss(x[:, 0], y, x[:, 1].exp(), full=full)
    assert_as_torch(loss_by_name("gaussian_nll", PAIRS, y.numpy(), full=full), loss, x)


# -- embeddings


@pytest.mark.parametrize("margin", [0.0, 0.4])
def test_cosine_embedding(margin):
    x, y = torch_leaf(PAIRS), np.array([1.0, -1, -1, 1, -1])
    loss = functional.cosine_embedding_loss(x[:, 0], x[:, 1], torch.tensor(y), margin=margin)
    assert_as_torch(loss_by_name("cosine_embedding", PAIRS, y, margin=margin), loss, x)


def triplets(labels):
    n = range(len(labels))
    return [
        (a, b, c)
        for a, b, c in product(n, n, n)
        if a != b and labels[a] == labels[b] and labels[a] != labels[c]
    ]


@parametrize_chosen("p dims", [(1, "static"), (2, "all symbols")], [1, 2], DIMS)
def test_all_triplets(p, dims):
    x = torch_leaf(POINTS)
    a, b, c = (x[list(i)] for i in zip(*triplets(OF_POINTS), strict=True))
    loss = functional.triplet_margin_loss(a, b, c, margin=0.7, p=p)
    assert_as_torch(loss_by_name("triplet", POINTS, OF_POINTS, dims, margin=0.7, p=p), loss, x)


@EACH_DIMS
def test_hardest_triplets(dims):
    x, hardest = torch_leaf(POINTS), {}
    for a, b, c in triplets(OF_POINTS):
        near, far = (np.linalg.norm(POINTS[a] - POINTS[i]) for i in (c, b))
        best = hardest.get(a, ((0, None), (np.inf, None)))
        hardest[a] = max(best[0], (far, b)), min(best[1], (near, c))
    rows = [(a, b, c) for a, ((_, b), (_, c)) in hardest.items()]
    assert len(rows) == 6  # row 5 is the only one of its class
    a, b, c = (x[list(i)] for i in zip(*rows, strict=True))
    loss = functional.triplet_margin_loss(a, b, c)
    assert_as_torch(loss_by_name("triplet", POINTS, OF_POINTS, dims, mining="hard"), loss, x)


@parametrize_chosen("dims p", [("static", 1), ("symbols", 2)], DIMS[:2], [1, 2])
def test_semi_hard_triplets(dims, p):
    x, rows = torch_leaf(POINTS), []
    n, far = range(len(POINTS)), np.linalg.norm(POINTS[:, None] - POINTS + 1e-6, p, axis=2)
    kinds = []
    for a, b in product(n, n):
        if a != b and OF_POINTS[a] == OF_POINTS[b]:
            negatives = [c for c in n if OF_POINTS[c] != OF_POINTS[a]]
            farther = [c for c in negatives if far[a, c] > far[a, b]]
            kinds.append(bool(farther))
            c = min(farther, key=far[a].item) if farther else max(negatives, key=far[a].item)
            rows.append((a, b, c))
    assert len(rows) == 14
    assert {*kinds} == {True, False}
    a, b, c = (x[list(i)] for i in zip(*rows, strict=True))
    loss = functional.triplet_margin_loss(a, b, c, p=p)
    assert_as_torch(
        loss_by_name("triplet", POINTS, OF_POINTS, dims, mining="semi-hard", p=p), loss, x
    )


def test_triplets_of_one_class_only():
    losses = loss_by_name("triplet", POINTS, np.zeros(7, np.int64), mining="semi-hard")[1]
    assert not losses.any()


@parametrize_chosen(
    "dims symmetric negatives",
    [("symbols", True, 2), ("static", False, 0), ("all symbols", True, 0)],
    DIMS,
    [True, False],
    [0, 2],
)
def test_multiple_negatives(dims, symmetric, negatives):
    values = RNG.standard_normal((4, 2 + negatives, 3))
    labels = np.arange(4)[:, None] + 4 * np.maximum(np.arange(2 + negatives) - 1, 0)
    x = torch_leaf(values.reshape(-1, 3))
    a, b, *others = functional.normalize(x).reshape(4, -1, 3).unbind(1)
    scores = 20 * a @ torch.cat([b, *others]).T
    loss = functional.cross_entropy(scores, torch.arange(4))
    if symmetric:
        loss = (loss + functional.cross_entropy(scores[:, :4].T, torch.arange(4))) / 2
    flat = values.reshape(-1, 3)
    assert_as_torch(
        loss_by_name("multiple_negatives", flat, labels.ravel(), dims, symmetric=symmetric), loss, x
    )


def test_multiple_positives():
    """Of three rows of a class, the first is the anchor, and both others are positives."""
    x = torch_leaf(POINTS)
    z = functional.normalize(x)
    rest = [2, 3, 4, 5, 6]  # rows 0 and 1 are the anchors
    log_p = (5 * z[[0, 1]] @ z[rest].T).log_softmax(1)
    loss = -(log_p[0, [0, 1, 4]].mean() + log_p[1, 2]) / 2
    assert_as_torch(loss_by_name("multiple_negatives", POINTS, OF_POINTS, scale=5.0), loss, x)


COSINES = np.concatenate([RNG.uniform(-1, 1, (5, 4)), [[-0.99, 0.99, -1, 1]]])


@parametrize_chosen(
    "dims label margin",
    [("symbols", 0, 0.5), ("static", 1, 0.5), ("all symbols", 1, 0.0)],
    DIMS,
    [0, 1],
    [0.5, 0.0],
)
def test_arcface(dims, label, margin):
    """In the last row, the label 0 has an angle near pi, and 1 one near 0."""
    x, labels = torch_leaf(COSINES), np.append(CLASSES[:5], label)
    hit = functional.one_hot(torch.tensor(labels), 4).bool()
    angle = x.clamp(-1 + 1e-7, 1 - 1e-7).acos()
    beyond = angle.cos() - margin * np.sin(margin)
    moved = torch.where(angle + margin <= np.pi, (angle + margin).cos(), beyond)
    loss = functional.cross_entropy(16 * torch.where(hit, moved, x), torch.tensor(labels))
    assert_as_torch(
        loss_by_name("arcface", COSINES, labels, dims, margin=margin, scale=16), loss, x
    )


@EACH_DIMS
def test_cosface(dims):
    x, hit = torch_leaf(COSINES), functional.one_hot(torch.tensor(CLASSES), 4).double()
    loss = functional.cross_entropy(64 * (x - 0.35 * hit), torch.tensor(CLASSES))
    assert_as_torch(loss_by_name("cosface", COSINES, CLASSES, dims), loss, x)


@EACH_DIMS
def test_cosine_similarity(dims):
    x, y = torch_leaf(POINTS[:6]), np.array([0.5, 0.5, 0.9, 0.9, -0.2, -0.2])
    cosine = functional.cosine_similarity(x[::2], x[1::2])
    loss = functional.mse_loss(cosine, torch.tensor(y[::2]))
    assert_as_torch(loss_by_name("cosine_similarity", POINTS[:6], y, dims), loss, x)


def test_triplet_refuses():
    with pytest.raises(ValueError, match=naming("mining", "'hardest'", "'semi-hard'")):
        loss_by_name("triplet", POINTS, OF_POINTS, mining="hardest")
    with pytest.raises(ValueError, match=naming("p=3", "p=1 or p=2")):
        loss_by_name("triplet", POINTS, OF_POINTS, p=3)


@pytest.mark.parametrize("swap", [True, False])
def test_triplet_margin(swap):
    values = RNG.standard_normal((3, 9, 4))
    leaves = [torch_leaf(v) for v in values]
    loss = functional.triplet_margin_loss(*leaves, margin=0.5, swap=swap)

    def formula(op, *values):
        return triplet_margin(op, *values, margin=0.5, swap=swap)

    assert_as_torch(loss_and_gradients(formula, list(values)), loss, *leaves)


def supervised_contrast(z, labels, temperature):
    """Return the loss of the rows that have another one of their class, row by row."""
    z = functional.normalize(z, dim=1)
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        scores = z[others] @ z[i] / temperature
        hits = [j for j, a in enumerate(others) if labels[a] == labels[i]]
        if hits:
            losses.append(-scores.log_softmax(0)[hits].mean())
    return torch.stack(losses).mean()


@EACH_DIMS
def test_contrastive(dims):
    x = torch_leaf(POINTS)
    loss = supervised_contrast(x, OF_POINTS, 0.5)
    results = loss_by_name("contrastive", POINTS, OF_POINTS, dims, temperature=0.5)
    assert_as_torch(results, loss, x)
    views, labels = torch_leaf(PAIRS), np.array([0, 1, 2, 1, 0])
    loss = supervised_contrast(views.reshape(10, 3), labels.repeat(2), 0.1)
    assert_as_torch(loss_by_name("contrastive", PAIRS, labels, dims), loss, views)


def test_contrastive_of_a_low_temperature():
    """All scores are far below the lowest float16; a row is no other one of its class."""
    turns = 2 * np.pi / 3 * np.arange(3)
    x, labels = torch_leaf(np.stack([np.cos(turns), np.sin(turns)], axis=1)), np.array([0, 0, 1])
    loss = supervised_contrast(x, labels, 1e-6)
    value = x.detach().numpy()
    results = loss_by_name("contrastive", value, labels, temperature=1e-6)
    np.testing.assert_allclose(results[0], loss.item(), rtol=1e-6)


def test_nt_xent():
    a, b = torch_leaf(PAIRS[:, 0]), torch_leaf(PAIRS[:, 1])
    loss = supervised_contrast(torch.cat([a, b]), [*range(5), *range(5)], 0.1)
    assert_as_torch(loss_and_gradients(nt_xent, [PAIRS[:, 0], PAIRS[:, 1]]), loss, a, b)


@pytest.mark.parametrize("symmetric", [True, False])
def test_info_nce(symmetric):
    a, b = torch_leaf(PAIRS[:, 0]), torch_leaf(PAIRS[:, 1])
    scores = functional.normalize(a) @ functional.normalize(b).T / 0.2
    loss = functional.cross_entropy(scores, torch.arange(5))
    if symmetric:
        loss = (loss + functional.cross_entropy(scores.T, torch.arange(5))) / 2

    def formula(op, *values):
        return info_nce(op, *values, temperature=0.2, symmetric=symmetric)

    assert_as_torch(loss_and_gradients(formula, [PAIRS[:, 0], PAIRS[:, 1]]), loss, a, b)


# -- sequences

SCORES = 2 * RNG.standard_normal((6, 9, 4))  # rows, time steps, classes
SEQUENCES = [[1, 2, 3], [2, 2, 2, 1], [], [3], [1, 1], [1, 2, 1, 2, 1]]


def pad_sequences_with(sequences, pad=-100, width=6):
    return np.array([[*s, *[pad] * (width - len(s))] for s in sequences])


def ctc_of_torch(x, sequences, lengths, **options):
    flat = torch.tensor([y for s in sequences for y in s], dtype=torch.long)
    counts = torch.tensor([len(s) for s in sequences])
    log_p = x.log_softmax(2).transpose(0, 1)
    return functional.ctc_loss(
        log_p, flat, torch.tensor(lengths), counts, reduction="none", **options
    )


@parametrize_chosen(
    "pad time_major dims",
    [(-100, False, "symbols"), (0, True, "static"), (-100, True, "all symbols")],
    [-100, 0],
    [True, False],
    DIMS,
)
def test_ctc(pad, time_major, dims):
    x = torch_leaf(SCORES)
    loss = ctc_of_torch(x, SEQUENCES, [9] * 6)
    value = SCORES.transpose(1, 0, 2) if time_major else SCORES
    if time_major and dims == "symbols":
        dims = "all symbols"  # its first axis is not the rows
    results = loss_by_name(
        "ctc", value, pad_sequences_with(SEQUENCES, pad), dims, time_major=time_major
    )
    np.testing.assert_allclose(results[1], loss.detach().numpy(), rtol=1e-9)
    if time_major:
        results = *results[:2], results[2].transpose(1, 0, 2)
    assert_as_torch(results, loss.mean(), x)


@pytest.mark.parametrize("data", ["arrays", "reader"])
@pytest.mark.parametrize("length", [4, in_sweep("T")])
def test_ctc_of_rows_behind_time_steps(data, length):
    """Rows have weights, and a reader counts rows, where time steps are first."""
    made = parse_model(
        f"""f (float[N,{length},2] x) => (float[{length},N,3] y)
        {{ t = Transpose<perm=[1,0,2]>(x)  y = MatMul(t, w) }}""",
        w=[[3.0, -1.0, -1.0], [2.0, 0.0, 1.0]],
    )
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(6, 4, 2)).astype("f"), rng.integers(1, 3, size=(6, 2))
    weight = np.ones(6) if data == "reader" else np.float32([1, 2, 1, 0.5, 0, 3])
    scores = torch.tensor(x @ initializer_arrays(made)["w"])
    each = ctc_of_torch(scores, label.tolist(), [4] * 6)
    trainer = Trainer(made, "ctc", loss_options={"time_major": True})
    if data == "reader":
        rows = by_length([*x], [*label], axis={"X": 0, "y": 0}, value=0, same_length=False)
        found = trainer.evaluate(rows, batch_size=4)
    else:
        found = trainer.evaluate(x, label, sample_weight=weight, batch_size=4)
    expected = (each.numpy() * weight).sum() / weight.sum()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("time_major", [True, False])
def test_ctc_of_probabilities_along_another_axis(time_major):
    p = np.exp(SCORES) / np.exp(SCORES).sum(2, keepdims=True)
    moved = p.transpose(2, 1, 0) if time_major else p.transpose(0, 2, 1)
    axis = 0 if time_major else 1
    options = {"from_logits": False, "axis": axis, "time_major": time_major}
    loss = ctc_of_torch(torch_leaf(SCORES), SEQUENCES, [9] * 6)
    _, losses, _ = loss_by_name(
        "ctc", moved, pad_sequences_with(SEQUENCES), "all symbols", **options
    )
    np.testing.assert_allclose(losses, loss.detach().numpy(), rtol=1e-9)


@parametrize_chosen("blank dims", [(0, "static"), (3, "symbols")], [0, 3], DIMS[:2])
def test_ctc_of_shorter_inputs(blank, dims):
    sequences = [[(y - 1 + (blank == 0)) for y in s] for s in SEQUENCES]
    lengths = [9, 8, 5, 1, 3, 5]  # each just long enough, or longer
    x = torch_leaf(SCORES)
    loss = ctc_of_torch(x, sequences, lengths, blank=blank)
    labels = np.c_[lengths, pad_sequences_with(sequences)]
    results = loss_by_name("ctc", SCORES, labels, dims, blank=blank, input_lengths=True)
    assert_as_torch(results, loss.mean(), x)
    assert (results[2][3, 1:] == 0).all()


@pytest.mark.parametrize("zero_infinity", [True, False])
def test_ctc_without_alignment(zero_infinity):
    lengths = [2, 9, 9, 9, 2, 0]  # [1, 1] needs three time steps
    x = torch_leaf(SCORES)
    loss = ctc_of_torch(x, SEQUENCES, lengths, zero_infinity=zero_infinity)
    labels = np.c_[lengths, pad_sequences_with(SEQUENCES)]
    options = {"input_lengths": True, "zero_infinity": zero_infinity}
    _total, losses, gradient = loss_by_name("ctc", SCORES, labels, **options)
    np.testing.assert_allclose(losses, loss.detach().numpy())
    infinite = [0, 4, 5]
    assert np.isinf(losses[infinite]).all() != zero_infinity
    assert (gradient[infinite] == 0).all()
    ctc_of_torch(x, SEQUENCES, lengths, zero_infinity=True).mean().backward()
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_ctc_without_labels():
    x = torch_leaf(SCORES)
    loss = ctc_of_torch(x, [[]] * 6, [9] * 6)
    assert_as_torch(loss_by_name("ctc", SCORES, np.zeros((6, 0))), loss.mean(), x)
    np.testing.assert_allclose(loss.detach(), -x.log_softmax(2)[:, :, 0].sum(1).detach())


def test_ctc_of_long_sequences_in_float32():
    scores = RNG.standard_normal((2, 200, 30))
    labels = RNG.integers(1, 30, (2, 60))
    x = torch_leaf(scores)
    loss = ctc_of_torch(x, labels.tolist(), [200, 200]).mean()
    loss.backward()
    got, _, gradient = loss_by_name("ctc", scores, labels, dtype=np.float32)
    np.testing.assert_allclose(got, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-4)


COSINE_LABELS = np.array([0.5, 0.5, 0.9, 0.9, -0.2, -0.2])
SEMI_HARD, SYMMETRIC = {"mining": "semi-hard"}, {"symmetric": True}
BY_NAME = [  # name, prediction, label, options
    ("focal", F, BITS, {}),
    ("softmax_focal", F, CLASSES, {}),
    ("softmax_focal", MAPS, IGNORED, {"axis": 1}),
    ("dice", MAPS, (MAPS > 0) * 1.0, {}),
    ("dice", MAPS, (MAPS > 0) * 1.0, {"per_channel": True}),
    ("softmax_dice", MAPS, IGNORED, {"axis": 1}),
    ("kl_divergence", F, SOFT, {}),
    ("quantile", F, BITS, {}),
    ("quantile", F, BITS[:, :1], {"q": [0.2, 0.4, 0.6, 0.8]}),
    ("log_cosh", F, BITS, {}),
    ("gaussian_nll", PAIRS, PAIRS[:, 0] + 1, {}),
    ("cosine_embedding", PAIRS, np.array([1.0, -1, -1, 1, -1]), {}),
    ("triplet", POINTS, OF_POINTS, {}),
    ("triplet", POINTS, OF_POINTS, {"mining": "hard"}),
    ("triplet", POINTS, OF_POINTS, SEMI_HARD),
    ("contrastive", POINTS, OF_POINTS, {}),
    ("contrastive", PAIRS, np.array([0, 1, 2, 1, 0]), {}),
    ("multiple_negatives", POINTS, OF_POINTS, {}),
    ("multiple_negatives", POINTS, OF_POINTS, SYMMETRIC),
    ("cosine_similarity", POINTS[:6], COSINE_LABELS, {}),
    ("arcface", COSINES, CLASSES, {}),
    ("arcface", COSINES, CLASSES, {"scale": 10.0}),
    ("cosface", COSINES, CLASSES, {}),
    ("cosface", COSINES, CLASSES, {"margin": 0.2}),
    ("ctc", SCORES, pad_sequences_with(SEQUENCES), {}),
    ("ctc", SCORES.transpose(0, 2, 1), pad_sequences_with(SEQUENCES), {"axis": 1}),
    ("ctc", SCORES, np.c_[[9] * 6, pad_sequences_with(SEQUENCES)], {"input_lengths": True}),
]


@pytest.mark.parametrize("weighted", [True, in_sweep(False)])
@pytest.mark.parametrize("case", BY_NAME, ids=lambda case: f"{case[0]} {case[3]}")
def test_training_loss(case, weighted):
    """The mean that a trainer minimizes, with sample weights, and the same in float16."""
    name, value, label, options = case
    dims = ",".join(["N", *map(str, value.shape[1:])])
    model = parse_model(f"g (double[{dims}] x) => (double[{dims}] y) {{ y = Identity(x) }}")
    objective, rows = training_loss(name, options=options), np.arange(1.0, len(value) + 1)
    feed = {"x": value, "label": label, "weight": rows}
    result = WrittenLoss(model, objective, feed, weighted=weighted)
    spec = LOSSES[name].with_options(options)

    def losses_and_weights(op, prediction, label):
        terms = spec.terms(op, prediction, label)
        weights = op.ones_like(terms.losses) if terms.weights is None else terms.weights
        return op.Concat(op.Unsqueeze(terms.losses, [0]), op.Unsqueeze(weights, [0]), axis=0)

    _, both, _ = loss_and_gradients(losses_and_weights, [value], label, spec.label_kind)
    losses, weights = both
    plain = (losses * weights).sum() / weights.sum()
    if weighted:
        weights = weights * rows.reshape([-1] + [1] * (losses.ndim - 1))
    np.testing.assert_allclose(result.counts, [weights.sum()])
    np.testing.assert_allclose(result.total, (weights * losses).sum() / weights.sum())
    half, _, gradient = loss_by_name(name, value, label, dtype=np.float16, **options)
    np.testing.assert_allclose(half, plain, rtol=1e-2)
    assert np.isfinite(gradient).all()
    assert gradient.any()
