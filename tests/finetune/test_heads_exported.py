"""New heads of networks of PyTorch and of classifiers of scikit-learn, which are the witnesses."""

from itertools import product

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.model.notes import HEAD, read_metadata
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import initializer_arrays
from tests.support.running import in_sweep, run_named

RNG = np.random.default_rng(0)
CLASSES = ["cat", "dog", "bird", "fish", "owl"]


def exported_head(net, x, dynamo):
    import torch

    if dynamo:
        options = {"dynamic_shapes": ({0: torch.export.Dim("N")},)}
    else:
        options = {"dynamic_axes": {"x": {0: "N"}}}
    return export_module(net, (x,), dynamo=dynamo, input_names=["x"], opset_version=18, **options)


def network_with_head(head):
    import torch
    from torch import nn

    torch.manual_seed(0)
    last = {
        "linear": [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)],
        "no bias": [nn.Flatten(), nn.Linear(96, 3, bias=False)],
        "conv": [nn.Conv2d(6, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
    }[head]
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.Tanh(), *last)


@pytest.mark.parametrize(
    ("head", "dynamo"),
    [
        ("linear", False),
        ("conv", False),
        in_sweep("linear", True),
        in_sweep("conv", True),
        in_sweep("no bias", False),
        in_sweep("no bias", True),
    ],
)
def test_like_a_layer_of_pytorch(head, dynamo):
    """The outputs and three steps of SGD equal those of the network with another last layer."""
    torch = pytest.importorskip("torch")
    net = network_with_head(head)
    x = torch.randn(8, 2, 6, 6)
    model = og.replace_head(exported_head(net, x, dynamo), 5)
    tensors = initializer_arrays(model)
    i = 2 if head == "conv" else len(net) - 1
    if head == "conv":
        net[i] = torch.nn.Conv2d(6, 5, 1)
    else:
        net[i] = torch.nn.Linear(net[i].in_features, 5, bias=head == "linear")
    w = tensors["head.weight"]
    w = w.reshape(net[i].weight.shape) if w.shape[0] == 5 else w.T
    state = {"weight": torch.tensor(w.copy())}
    if head != "no bias":
        state["bias"] = torch.tensor(tensors["head.bias"])
    net[i].load_state_dict(state)
    [y] = run_named(model, x=x.numpy()).values()
    np.testing.assert_allclose(y, net(x).detach(), rtol=1e-4, atol=1e-5)
    labels = torch.arange(8) % 5
    trainer = og.Trainer(model, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(x.numpy(), labels.numpy(), epochs=3, batch_size=8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    assert len([t for t in og.trainable(model) if t.trains]) == len(list(net.parameters()))
    [y] = run_named(trainer.model, x=x.numpy()).values()
    np.testing.assert_allclose(y, net(x).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dynamo", [False, in_sweep(True)])
def test_backbone_and_head_of_pytorch(dynamo):
    """The features are those in front of the last layer, and another network reads them."""
    torch = pytest.importorskip("torch")
    net, x = network_with_head("linear"), torch.randn(4, 2, 6, 6)
    part = og.graph.features(exported_head(net, x, dynamo))
    [y] = run_named(part, x=x.numpy()).values()
    np.testing.assert_allclose(y, net[:-1](x).detach(), rtol=1e-4, atol=1e-5)
    top = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    joined = og.attach(part, exported_head(top, torch.randn(4, 6), dynamo))
    [y] = run_named(joined, x=x.numpy()).values()
    np.testing.assert_allclose(y, top(net[:-1](x)).detach(), rtol=1e-4, atol=1e-5)


# -- scikit-learn --------------------------------------------------------------------------------

X = RNG.normal(size=(80, 4)).astype(np.float32)
NEW = RNG.integers(0, 5, 80)
SEPARATED = (X + 4 * np.eye(5, 4)[NEW]).astype(np.float32)


def fitted_classifier(kind, classes):
    from sklearn import linear_model, neural_network, pipeline, preprocessing, svm

    labels = np.array(["a", "b", "c"] if classes > 0 else [7, 8, 9])[np.arange(80) % abs(classes)]
    perceptron = neural_network.MLPClassifier((8,), max_iter=3)
    return {
        "logistic": linear_model.LogisticRegression(),
        "mlp": perceptron,
        "pipeline": pipeline.make_pipeline(preprocessing.StandardScaler(), perceptron),
        "linear svc": svm.LinearSVC(),
        "sgd": linear_model.SGDClassifier(),
        "ridge": linear_model.RidgeClassifier(),
    }[kind].fit(X, labels)


WITHOUT_ZIPMAP = ("linear svc", "ridge")
ESTIMATORS = [  # kind, number of classes, below 0 of numbers as labels; ZipMap
    ("logistic", 2, True),
    ("mlp", -3, False),
    ("pipeline", -3, True),
    ("linear svc", 2, False),
    ("sgd", 2, False),
    ("ridge", -3, False),
]
OTHERS = [
    in_sweep(*case)
    for case in product(
        ["logistic", "mlp", "pipeline", "linear svc", "sgd", "ridge"], [2, 3, -3], [True, False]
    )
    if case not in ESTIMATORS and not (case[2] and case[0] in WITHOUT_ZIPMAP)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "classes", "zipmap"), [*ESTIMATORS, *OTHERS])
def test_classes_of_scikit_learn(kind, classes, zipmap):
    """The new classes are returned and learned; labels and probabilities agree."""
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    options = {} if kind in WITHOUT_ZIPMAP else {"options": {"zipmap": zipmap}}
    model = skl2onnx.to_onnx(fitted_classifier(kind, classes), X[:1], **options)
    changed = og.replace_head(model, CLASSES)
    onnx.checker.check_model(changed, full_check=True)
    trainer = og.Trainer(changed, "cross_entropy", optimizer="adam", learning_rate=0.05)
    trainer.fit(SEPARATED, NEW, epochs=20)
    assert {"head.weight", "head.bias"} <= set(trainer.trained)
    for trained in (changed, trainer.model):
        labels, scores = run_named(trained, X=SEPARATED).values()
        if zipmap:
            assert {frozenset(row) for row in scores} == {frozenset(CLASSES)}
            scores = np.array([[row[c] for c in CLASSES] for row in scores])
        assert labels.shape == (80,)
        assert np.array_equal(np.array(CLASSES)[scores.argmax(1)], labels)
        if kind in ("logistic", "mlp", "pipeline"):
            np.testing.assert_allclose(scores.sum(1), 1, rtol=1e-5)
    assert (labels == np.array(CLASSES)[NEW]).mean() > 0.8
    assert read_metadata(trainer.model, HEAD) == ["head.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore")
def test_numbers_for_labels_of_scikit_learn():
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    model = og.replace_head(skl2onnx.to_onnx(fitted_classifier("logistic", 3), X[:1]), 4)
    labels, rows = run_named(model, X=X).values()
    assert labels.dtype == np.int64
    assert set(rows[0]) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match=naming("two classes", "[0]")):
        og.replace_head(model, 1)


@pytest.mark.filterwarnings("ignore")
def test_refused_of_scikit_learn():
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn import ensemble, svm

    forest = ensemble.RandomForestClassifier(2).fit(X, NEW)
    for estimator, message in ((svm.SVC().fit(X, NEW), "support vectors"), (forest, "trees")):
        with pytest.raises(ValueError, match=message):
            og.replace_head(skl2onnx.to_onnx(estimator, X[:1]), 5)
    columns = skl2onnx.to_onnx(
        fitted_classifier("logistic", 3), X[:1], options={"zipmap": "columns"}
    )
    with pytest.raises(ValueError, match="zipmap=False"):
        og.replace_head(columns, 5)
