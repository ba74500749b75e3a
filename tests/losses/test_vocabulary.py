"""Cross entropy over many classes in chunks: the same as PyTorch, and as the plain form."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.losses import vocabulary
from onnxgrad.model import without_elements
from onnxgrad.training.data import as_dataset
from onnxgrad.training.recipe import Facts, Recipe
from tests.support.causal_lm_cases import IDS, LABELS, causal_model, divide_logits

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(4)
ROWS, TOKENS, WIDTH, WORDS = 4, 9, 6, 32
X = RNG.standard_normal((ROWS, TOKENS, WIDTH))
Y = np.where(RNG.random((ROWS, TOKENS)) < 0.2, -100, RNG.integers(0, WORDS, (ROWS, TOKENS)))
ARRAYS = {
    "hidden": RNG.standard_normal((WIDTH, WIDTH)),
    "head": RNG.standard_normal((WORDS, WIDTH)),
    "bias": RNG.standard_normal(WORDS),
}
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2},
    "classes": {"class_weight": np.linspace(0.5, 2.0, WORDS).tolist()},
    "both": {"label_smoothing": 0.2, "class_weight": np.linspace(0.5, 2.0, WORDS).tolist()},
    "ignored": {"ignore_index": 3},
}


def model(dtype: str = "double", shape: str = "N, T") -> onnx.ModelProto:
    """Return a hidden layer, and a head with a bias whose matrix is (words, width)."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g ({dtype}[{shape}, {WIDTH}] x) => ({dtype}[{shape}, {WORDS}] logits) {{
            z = MatMul(x, hidden) h = Tanh(z) back = Transpose<perm = [1, 0]>(head)
            product = MatMul(h, back) logits = Add(product, bias) }}""")
    for name, array in ARRAYS.items():
        tensor = onnx.numpy_helper.from_array(array, name)
        if dtype != "double":
            kind = {"float": 1, "float16": 10, "bfloat16": 16}[dtype]
            tensor = onnx.helper.make_tensor(name, kind, array.shape, array.ravel())
        proto.graph.initializer.append(tensor)
    return proto


def expected(x, y, *, weight=None, shift=False, ignore_index=-100, **options):
    """Return the loss and its gradients by name, by PyTorch in float64."""
    own = {name: torch.tensor(a, requires_grad=True) for name, a in ARRAYS.items()}
    logits = torch.tanh(torch.tensor(x) @ own["hidden"]) @ own["head"].T + own["bias"]
    target, w = torch.tensor(y), torch.ones(y.shape, dtype=torch.float64)
    if weight is not None:
        w = torch.tensor(weight).reshape(weight.shape + (1,) * (y.ndim - weight.ndim)).expand_as(w)
    if shift:
        logits, target, w = logits[:, :-1], target[:, 1:], w[:, 1:]
    classes = options.pop("class_weight", None)
    classes = torch.tensor([1.0] * WORDS if classes is None else classes, dtype=torch.float64)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2),
        target.flatten(),
        weight=classes,
        reduction="none",
        ignore_index=ignore_index,
        **options,
    )
    kept = target.flatten() != ignore_index
    counts = w.flatten() * kept * classes[torch.where(kept, target.flatten(), 0)]
    loss = (losses * w.flatten()).sum() / counts.sum()
    loss.backward()
    return loss.item(), {name: v.grad.numpy() for name, v in own.items()}


def stepped(proto, x, y, weight=None, *, options=None, **more):
    """Return the losses of an evaluation and of a step, and the gradients by a step of SGD."""
    options = dict(options or {})
    classes = options.pop("class_weight", None)
    trainer = og.Trainer(
        proto, "cross_entropy", optimizer="sgd", learning_rate=1.0,
        loss_options={"axis": len(y.shape), **options}, class_weight=classes, **more,
    )  # fmt: skip
    before = {name: array.copy() for name, array in trainer.state.weights.items()}
    evaluated = trainer.evaluate(x, y, sample_weight=weight)["loss"]
    trainer.fit(x, y, sample_weight=weight, shuffle=False, batch_size=len(x))
    found = {name: before[name] - w for name, w in trainer.state.weights.items()}
    return [evaluated, trainer.history[-1]["loss"]], found


def check(found, loss, gradients, rtol=1e-9):
    losses, by_name = found
    np.testing.assert_allclose(losses, loss, rtol=rtol)
    assert set(by_name) == set(ARRAYS)
    for name, gradient in by_name.items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=rtol, atol=rtol)


@pytest.fixture(params=["positions", "words"])
def chunks(request, monkeypatch):
    divide_logits(monkeypatch, request.param)


def has_scan(trainer, x, y):
    recipe = Recipe(trainer, Facts.of(trainer, as_dataset(x, y)))
    graph = recipe.step(recipe.objective()).model.graph
    return any(node.op_type == "Scan" for node in graph)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, chunks):
    options = OPTIONS[name]
    y = np.where(Y == -100, 3, Y) if name == "ignored" else Y
    check(stepped(model(), X, y, options=options), *expected(X, y, **options))


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, TOKENS)])
@pytest.mark.parametrize("shift", [False, True])
def test_sample_weights(shift, shape, chunks):
    weight, options = RNG.random(shape), {"shift": shift, "label_smoothing": 0.1}
    found = stepped(model(), X, Y, weight, options=options)
    check(found, *expected(X, Y, weight=weight, **options))


def test_rows(chunks):
    """Of a classifier, (rows, classes)."""
    x, y = X[:, 0], np.abs(Y[:, 0]) % WORDS
    weight = RNG.random(ROWS)
    found = stepped(model(shape="N"), x, y, weight, options={"axis": 1})
    check(found, *expected(x, y, weight=weight))


def test_what_is_written_in_chunks(monkeypatch):
    divide_logits(monkeypatch, "positions")
    options = {"axis": 2}

    def trainer(**more):
        return og.Trainer(model("float"), "cross_entropy", **{"loss_options": options} | more)

    x = X.astype(np.float32)
    assert has_scan(trainer(), x, Y)
    both = {"loss_options": options | {"label_smoothing": 0.1}, "class_weight": {0: 2.0}}
    assert not has_scan(trainer(**both), x, Y)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
    assert not has_scan(trainer(), x, Y)


def test_no_label_counts(chunks):
    with pytest.warns(UserWarning, match="no label counts"):
        _, found = stepped(model(), X, np.full_like(Y, -100))
    assert not any(g.any() for g in found.values())


def test_masked_words(chunks):
    """Logits of -inf have the probability zero, also where a block has no others."""
    proto = model()
    bias = ARRAYS["bias"].copy()
    bias[:16] = -np.inf
    proto.graph.initializer[2].CopyFrom(onnx.numpy_helper.from_array(bias, "bias"))
    y = np.where(Y == -100, Y, 16 + Y % 16)
    losses, found = stepped(proto, X, y, train=["hidden", "head"])
    own = {name: torch.tensor(a, requires_grad=name != "bias") for name, a in ARRAYS.items()}
    logits = torch.tanh(torch.tensor(X) @ own["hidden"]) @ own["head"].T + torch.tensor(bias)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(y).flatten())
    loss.backward()
    np.testing.assert_allclose(losses, loss.item(), rtol=1e-9)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, own[name].grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float", "auto"), ("float16", "auto"), ("bfloat16", "auto"), ("float16", "file")],
)
def test_precisions(dtype, precision, chunks, monkeypatch):
    """As near to float64 as the plain form."""
    loss, gradients = expected(X, Y)
    kind = {"float": np.float32, "float16": np.float16}.get(dtype, np.float32)
    x, more = X.astype(kind), {"precision": precision}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, found = stepped(model(dtype), x, Y, **more)
        monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
        plain_losses, plain = stepped(model(dtype), x, Y, **more)
    rough = 1e-6 if dtype == "float" else 2e-3 if dtype == "float16" else 2e-2
    np.testing.assert_allclose(losses, loss, rtol=rough)
    np.testing.assert_allclose(losses, plain_losses, rtol=rough)
    for name, gradient in found.items():
        error, of_plain = (
            np.abs(g.astype(np.float64) - gradients[name]).max() for g in (gradient, plain[name])
        )
        assert error < 2 * of_plain + rough


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"recompute": "all"}, {"recompute": "cheap"}, {"clip_norm": 0.1}],
    ids=str,
)
def test_same_as_the_plain_form(options, chunks, monkeypatch):
    losses, found = stepped(model(), X, Y, **options)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
    plain_losses, plain = stepped(model(), X, Y, **options)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-10)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, plain[name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("train", [["hidden"], ["head"], ["bias"]])
def test_frozen(train, chunks):
    """Only gradients of what trains are written, and they are the same."""
    _, gradients = expected(X, Y)
    _, found = stepped(model(), X, Y, train=train)
    assert list(found) == train
    np.testing.assert_allclose(found[train[0]], gradients[train[0]], rtol=1e-9, atol=1e-9)


def test_adapters(chunks, monkeypatch):
    """Of a head with low-rank adapters, which train as by the plain form."""
    proto, found = og.add_lora(model(), ["head", "hidden"], rank=2), []
    for classes in (1, WORDS + 1):
        monkeypatch.setattr(vocabulary, "MANY_CLASSES", classes)
        trainer = og.Trainer(proto, "cross_entropy", loss_options={"axis": 2}, optimizer="sgd")
        trainer.fit(X, Y, epochs=3, batch_size=2)
        found.append(trainer.state.weights)
    assert len(found[0]) == 4
    for name, array in found[0].items():
        np.testing.assert_allclose(array, found[1][name], rtol=1e-8, atol=1e-12)


def test_resume(chunks, tmp_path):
    """Bit for bit."""
    options = {"loss_options": {"axis": 2}, "optimizer": "adam"}
    whole = og.Trainer(model("float"), "cross_entropy", **options)
    x = X.astype(np.float32)
    whole.fit(x, Y, epochs=4, batch_size=2)
    begun = og.Trainer(model("float"), "cross_entropy", **options)
    begun.fit(x, Y, epochs=2, batch_size=2).state.save(tmp_path / "state")
    again = og.Trainer(model("float"), "cross_entropy", **options)
    again.fit(x, Y, epochs=4, batch_size=2, resume=tmp_path / "state")
    for name, array in whole.state.weights.items():
        np.testing.assert_array_equal(again.state.weights[name], array)


def test_metrics(chunks):
    """They see all logits, in training's validation and in an evaluation."""
    trainer = og.Trainer(
        model(), "cross_entropy", loss_options={"axis": 2}, metrics=["accuracy", "perplexity"]
    )
    y = np.abs(Y) % WORDS
    found, (loss, _) = trainer.evaluate(X, y), expected(X, y)
    logits = np.tanh(X @ ARRAYS["hidden"]) @ ARRAYS["head"].T + ARRAYS["bias"]
    assert found["loss"] == pytest.approx(loss, rel=1e-9)
    assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-9)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())
    trainer.fit(X, y, validation=(X, y))
    assert {"validation_loss", "validation_accuracy"} <= set(trainer.history[-1])


@pytest.mark.parametrize("head", ["plain", "tied", "flat"])
def test_large_weights(head, chunks, monkeypatch):
    """Weights in place train as weights in one graph; their gradients are not copied at the end."""
    table = RNG.standard_normal((WORDS, 8))
    trained = []
    for large in (False, True):
        if large:
            monkeypatch.setattr(without_elements, "LARGE", 0)
            monkeypatch.setattr(without_elements, "_EACH", 200)
        proto = causal_model(head, "float", table)
        trainer = og.Trainer(proto, "causal_lm", train="*", optimizer="adam", learning_rate=0.1)
        trainer.fit(IDS, LABELS, epochs=3, shuffle=False)
        assert trainer._loop.runner.in_place == large
        trained.append(trainer.state.weights)
    assert len(trained[0]) == {"plain": 2, "tied": 1, "flat": 3}[head]
    for name, array in trained[0].items():
        np.testing.assert_allclose(trained[1][name], array, rtol=1e-5, atol=1e-5)


def test_stack(chunks):
    """Each member trains as a trainer of its own; a stack writes the plain form."""
    rates, options = [0.5, 0.1], {"loss_options": {"axis": 2}, "optimizer": "sgd"}
    stack = og.TrainerStack(model(), "cross_entropy", learning_rate=rates, **options)
    stack.fit(X, Y, epochs=2, batch_size=2, shuffle=False)
    for k, rate in enumerate(rates):
        one = og.Trainer(model(), "cross_entropy", learning_rate=rate, **options)
        one.fit(X, Y, epochs=2, batch_size=2, shuffle=False)
        for name, w in one.state.weights.items():
            np.testing.assert_allclose(stack.state.weights[name][k], w, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("hard", ["cross_entropy", "causal_lm"])
def test_distillation(hard, chunks):
    """It reads all logits, and its hard loss has a gradient, too."""
    x, teacher = X.astype(np.float32), model("float")
    loss = og.distillation(teacher, hard, alpha=0.0, axis=2)
    options = {"optimizer": "sgd", "learning_rate": 1.0, "train": ["head"]}
    trainer = og.Trainer(model("float"), loss, **options)
    before = trainer.state.weights["head"].copy()
    y = np.abs(Y) % WORDS
    trainer.fit(x, y, batch_size=ROWS, shuffle=False)
    _, gradients = expected(X, y, shift=hard == "causal_lm")
    found = before - trainer.state.weights["head"]
    np.testing.assert_allclose(found, gradients["head"], rtol=1e-4, atol=1e-5)


def test_a_table_of_150_000_words_that_is_also_the_head():
    """In its true size, where the words are divided: nothing is patched."""
    words, width = 150_000, 8
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (int64[N, T] input_ids) => (float[N, T, {words}] logits)
            <float[{words}, {width}] table> {{
            h = Gather(table, input_ids) back = Transpose<perm = [1, 0]>(table) z = Tanh(h)
            logits = MatMul(z, back) }}""")
    rng = np.random.default_rng(0)
    table = rng.normal(size=(words, width)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    ids = rng.integers(0, words, (2, 7))
    trainer = og.Trainer(proto, "causal_lm", optimizer="sgd", learning_rate=1.0, train="*")
    trainer.fit(ids, batch_size=2)
    theirs = torch.tensor(table, requires_grad=True)
    logits = torch.tanh(theirs[torch.tensor(ids)]) @ theirs.T
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), torch.tensor(ids)[:, 1:].flatten()
    )
    loss.backward()
    np.testing.assert_allclose(trainer.history[-1]["loss"], loss.item(), rtol=1e-5)
    found = table - trainer.state.weights["table"]
    np.testing.assert_allclose(found, theirs.grad, rtol=1e-3, atol=1e-6)
