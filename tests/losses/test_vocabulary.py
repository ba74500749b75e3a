"""Cross entropy over many classes in chunks: the same as PyTorch, and as the plain form."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.losses import vocabulary
from onnxgrad.model import weights as model_weights
from onnxgrad.training.data import as_dataset
from onnxgrad.training.recipe import Recipe
from tests.support.causal_lm_cases import (
    IDS,
    LABELS,
    assert_step,
    causal_model,
    divide_logits,
    step_gradients,
)
from tests.support.combinations import parametrize_chosen
from tests.support.models import parse_model

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


CHUNKS = ("positions", "words")
BY_WORDS = parametrize_chosen("chunks", [("words",)], CHUNKS)
BY_POSITIONS = parametrize_chosen("chunks", [("positions",)], CHUNKS)


def model_with_head(dtype: str = "double", shape: str = "N, T", **arrays) -> onnx.ModelProto:
    """Return a hidden layer, and a head with a bias whose matrix is (words, width)."""
    text = f"""g ({dtype}[{shape}, {WIDTH}] x) => ({dtype}[{shape}, {WORDS}] logits) {{
        z = MatMul(x, hidden) h = Tanh(z) back = Transpose<perm = [1, 0]>(head)
        product = MatMul(h, back) logits = Add(product, bias) }}"""
    proto = parse_model(text, opset=21)
    for name, array in (ARRAYS | arrays).items():
        kind = onnx.TensorProto.DataType.Value(dtype.upper())
        tensor = onnx.helper.make_tensor(name, kind, array.shape, array.ravel())
        proto.graph.initializer.append(tensor)
    return proto


def torch_step(x, y, *, weight=None, shift=False, ignore_index=-100, weighted_mean=True, **options):
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
    counts = kept * classes[torch.where(kept, target.flatten(), 0)]
    counts = counts * w.flatten() if weighted_mean else counts
    loss = (losses * w.flatten()).sum() / counts.sum()
    loss.backward()
    return loss.item(), {name: v.grad.numpy() for name, v in own.items()}


def head_trainer(proto, *, axis=2, options=None, **more) -> og.Trainer:
    """Return a trainer of SGD with options of the loss, among them weights of classes."""
    options = dict(options or {})
    classes = options.pop("class_weight", None)
    more = {"optimizer": "sgd", "learning_rate": 1.0, "class_weight": classes} | more
    return og.Trainer(proto, "cross_entropy", loss_options={"axis": axis, **options}, **more)


def has_scan(trainer, x, y):
    recipe = Recipe.for_data(trainer._job, trainer.state, as_dataset(x, y))
    graph = recipe.step(recipe.objective()).model.graph
    return any(node.op_type == "Scan" for node in graph)


CHOSEN = [*((name, "words") for name in ("smoothing", "classes", "ignored", "both"))]


@parametrize_chosen("name chunks", [*CHOSEN, ("plain", "positions")], OPTIONS, CHUNKS)
def test_options(name, chunks, monkeypatch):
    divide_logits(monkeypatch, chunks)
    options = OPTIONS[name]
    y = np.where(Y == -100, 3, Y) if name == "ignored" else Y
    found = step_gradients(head_trainer(model_with_head(), options=options), X, y)
    assert_step(found, *torch_step(X, y, **options))


@parametrize_chosen(
    "shift shape chunks",
    [(False, (ROWS,), "words"), (True, (ROWS, TOKENS), "words"), (True, (ROWS,), "positions")],
    [False, True],
    [(ROWS,), (ROWS, TOKENS)],
    CHUNKS,
)
def test_sample_weights(shift, shape, chunks, monkeypatch):
    divide_logits(monkeypatch, chunks)
    weight, options = RNG.random(shape), {"shift": shift, "label_smoothing": 0.1}
    found = step_gradients(head_trainer(model_with_head(), options=options), X, Y, weight)
    assert_step(found, *torch_step(X, Y, weight=weight, **options))


@parametrize_chosen(
    "shift shape chunks",
    [(False, (ROWS,), "positions"), (True, (ROWS, TOKENS), "words")],
    [False, True],
    [(ROWS,), (ROWS, TOKENS)],
    CHUNKS,
)
def test_negative_weights(shift, shape, chunks, monkeypatch):
    """The divisor counts tokens and classes, not sample weights."""
    divide_logits(monkeypatch, chunks)
    weight = RNG.standard_normal(shape)
    weight -= weight.mean() + 0.2
    options = {"shift": shift, "weighted_mean": False, **OPTIONS["classes"]}
    found = step_gradients(head_trainer(model_with_head(), options=options), X, Y, weight)
    assert_step(found, *torch_step(X, Y, weight=weight, **options))


@BY_POSITIONS
def test_rows(chunks, monkeypatch):
    """Of a classifier, (rows, classes)."""
    divide_logits(monkeypatch, chunks)
    x, y = X[:, 0], np.abs(Y[:, 0]) % WORDS
    weight = RNG.random(ROWS)
    found = step_gradients(head_trainer(model_with_head(shape="N"), axis=1), x, y, weight)
    assert_step(found, *torch_step(x, y, weight=weight))


def test_what_is_written_in_chunks(monkeypatch):
    divide_logits(monkeypatch, "positions")
    x, proto = X.astype(np.float32), model_with_head("float")
    assert has_scan(head_trainer(proto), x, Y)
    both = {"label_smoothing": 0.1, "class_weight": {0: 2.0}}
    assert not has_scan(head_trainer(proto, options=both), x, Y)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
    assert not has_scan(head_trainer(proto), x, Y)


@BY_WORDS
def test_no_label_counts(chunks, monkeypatch):
    divide_logits(monkeypatch, chunks)
    with pytest.warns(UserWarning, match="label"):
        _, found = step_gradients(head_trainer(model_with_head()), X, np.full_like(Y, -100))
    assert not any(g.any() for g in found.values())


@BY_WORDS
def test_masked_words(chunks, monkeypatch):
    """Logits of -inf have the probability zero, also where a block has no others."""
    divide_logits(monkeypatch, chunks)
    bias = ARRAYS["bias"].copy()
    bias[:16] = -np.inf
    trainer = head_trainer(model_with_head(bias=bias), train=["hidden", "head"])
    y = np.where(Y == -100, Y, 16 + Y % 16)
    losses, found = step_gradients(trainer, X, y)
    own = {name: torch.tensor(a, requires_grad=name != "bias") for name, a in ARRAYS.items()}
    logits = torch.tanh(torch.tensor(X) @ own["hidden"]) @ own["head"].T + torch.tensor(bias)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(y).flatten())
    loss.backward()
    np.testing.assert_allclose(losses, loss.item(), rtol=1e-9)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, own[name].grad, rtol=1e-9, atol=1e-9)


PRECISIONS = [("float", "auto"), ("float16", "auto"), ("bfloat16", "auto"), ("float16", "file")]


@parametrize_chosen(
    "precision chunks",
    [(("float16", "file"), "positions"), (("bfloat16", "auto"), "words")],
    PRECISIONS,
    CHUNKS,
)
@pytest.mark.filterwarnings("ignore")
def test_precisions(precision, chunks, monkeypatch):
    """As near to float64 as the plain form."""
    divide_logits(monkeypatch, chunks)
    loss, gradients = torch_step(X, Y)
    dtype, more = precision[0], {"precision": precision[1]}
    x = X.astype({"float16": np.float16}.get(dtype, np.float32))
    losses, found = step_gradients(head_trainer(model_with_head(dtype), **more), x, Y)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
    plain_losses, plain = step_gradients(head_trainer(model_with_head(dtype), **more), x, Y)
    rough = 1e-6 if dtype == "float" else 2e-3 if dtype == "float16" else 2e-2
    np.testing.assert_allclose(losses, loss, rtol=rough)
    np.testing.assert_allclose(losses, plain_losses, rtol=rough)
    for name, gradient in found.items():
        error, of_plain = (
            np.abs(g.astype(np.float64) - gradients[name]).max() for g in (gradient, plain[name])
        )
        assert error < 2 * of_plain + rough


OTHERS = [{"accumulate": 2}, {"recompute": "all"}, {"recompute": "cheap"}, {"clip_norm": 0.1}]


@parametrize_chosen(
    "options chunks", [*zip(OTHERS, ["words", "positions"] * 2, strict=True)], OTHERS, CHUNKS
)
def test_same_as_the_plain_form(options, chunks, monkeypatch):
    divide_logits(monkeypatch, chunks)
    losses, found = step_gradients(head_trainer(model_with_head(), **options), X, Y)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", WORDS + 1)
    plain_losses, plain = step_gradients(head_trainer(model_with_head(), **options), X, Y)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-10)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, plain[name], rtol=1e-8, atol=1e-12)


@parametrize_chosen("name chunks", [(name, "words") for name in ARRAYS], ARRAYS, CHUNKS)
def test_frozen(name, chunks, monkeypatch):
    """Only gradients of what trains are written, and they are the same."""
    divide_logits(monkeypatch, chunks)
    loss, gradients = torch_step(X, Y)
    found = step_gradients(head_trainer(model_with_head(), train=[name]), X, Y)
    assert_step(found, loss, {name: gradients[name]})


@BY_WORDS
def test_adapters(chunks, monkeypatch):
    """Of a head with low-rank adapters, which train as by the plain form."""
    divide_logits(monkeypatch, chunks)
    proto, found = og.add_lora(model_with_head(), ["head", "hidden"], rank=2), []
    for classes in (1, WORDS + 1):
        monkeypatch.setattr(vocabulary, "MANY_CLASSES", classes)
        trainer = head_trainer(proto, learning_rate=0.01)
        trainer.fit(X, Y, epochs=3, batch_size=2)
        found.append(trainer.state.weights)
    assert len(found[0]) == 4
    for name, array in found[0].items():
        np.testing.assert_allclose(array, found[1][name], rtol=1e-8, atol=1e-12)


@BY_WORDS
def test_resume(chunks, tmp_path, monkeypatch):
    """Bit for bit."""
    divide_logits(monkeypatch, chunks)
    x = X.astype(np.float32)

    def fit(epochs, **more):
        made = head_trainer(model_with_head("float"), optimizer="adam", learning_rate=0.001)
        return made.fit(x, Y, epochs=epochs, batch_size=2, **more).state

    whole = fit(4)
    fit(2).save(tmp_path / "state")
    again = fit(4, resume=tmp_path / "state")
    for name, array in whole.weights.items():
        np.testing.assert_array_equal(again.weights[name], array)


@BY_WORDS
def test_metrics(chunks, monkeypatch):
    """They see all logits, in training's validation and in an evaluation."""
    divide_logits(monkeypatch, chunks)
    trainer = head_trainer(model_with_head(), metrics=["accuracy", "perplexity"])
    y = np.abs(Y) % WORDS
    found, (loss, _) = trainer.evaluate(X, y), torch_step(X, y)
    logits = np.tanh(X @ ARRAYS["hidden"]) @ ARRAYS["head"].T + ARRAYS["bias"]
    assert found["loss"] == pytest.approx(loss, rel=1e-9)
    assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-9)
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == y).mean())
    trainer.fit(X, y, validation=(X, y))
    assert {"validation_loss", "validation_accuracy"} <= set(trainer.history[-1])


@parametrize_chosen(
    "head chunks", [("tied", "words"), ("flat", "positions")], ["plain", "tied", "flat"], CHUNKS
)
def test_large_weights(head, chunks, monkeypatch):
    """Weights in place train as weights in one graph; their gradients are not copied at the end."""
    divide_logits(monkeypatch, chunks)
    table = RNG.standard_normal((2_100, 8))  # more than 64 KiB, from which on a weight is in place
    trained = []
    for large in (False, True):
        if large:
            monkeypatch.setattr(model_weights, "LARGE", 0)
        proto = causal_model(head, "float", table)
        trainer = og.Trainer(proto, "causal_lm", train="*", optimizer="adam", learning_rate=0.1)
        trainer.fit(IDS, LABELS, epochs=2, shuffle=False)
        assert trainer._last_loop.runner.in_place == large
        trained.append(trainer.state.weights)
    assert len(trained[0]) == {"plain": 2, "tied": 1, "flat": 3}[head]
    for name, array in trained[0].items():
        np.testing.assert_allclose(trained[1][name], array, rtol=1e-5, atol=1e-5)


@BY_POSITIONS
def test_stack(chunks, monkeypatch):
    """Each member trains as a trainer of its own; a stack writes the plain form."""
    divide_logits(monkeypatch, chunks)
    rates, options = [0.5, 0.1], {"loss_options": {"axis": 2}, "optimizer": "sgd"}
    stack = og.TrainerStack(model_with_head(), "cross_entropy", learning_rate=rates, **options)
    stack.fit(X, Y, epochs=2, batch_size=2, shuffle=False)
    for k, rate in enumerate(rates):
        one = head_trainer(model_with_head(), learning_rate=rate)
        one.fit(X, Y, epochs=2, batch_size=2, shuffle=False)
        for name, w in one.state.weights.items():
            np.testing.assert_allclose(stack.state.weights[name][k], w, rtol=1e-8, atol=1e-10)


@parametrize_chosen(
    "hard chunks",
    [("cross_entropy", "words"), ("causal_lm", "positions")],
    ["cross_entropy", "causal_lm"],
    CHUNKS,
)
def test_distillation(hard, chunks, monkeypatch):
    """It reads all logits, and its hard loss has a gradient, too."""
    divide_logits(monkeypatch, chunks)
    x, teacher = X.astype(np.float32), model_with_head("float")
    loss = og.losses.distillation(teacher, hard, alpha=0.0, axis=2)
    options = {"optimizer": "sgd", "learning_rate": 1.0, "train": ["head"]}
    trainer = og.Trainer(model_with_head("float"), loss, **options)
    y = np.abs(Y) % WORDS
    found = step_gradients(trainer, x, y)[1]["head"]
    _, gradients = torch_step(X, y, shift=hard == "causal_lm")
    np.testing.assert_allclose(found, gradients["head"], rtol=1e-4, atol=1e-5)


def test_a_table_of_100_000_words_that_is_also_the_head():
    """In the size from which on the words are divided: nothing is patched."""
    words, width = vocabulary.MANY_WORDS, 4
    rng = np.random.default_rng(0)
    table = rng.normal(size=(words, width)).astype(np.float32)
    text = f"""g (int64[N, T] input_ids) => (float[N, T, {words}] logits) {{
        h = Gather(table, input_ids) back = Transpose<perm = [1, 0]>(table) z = Tanh(h)
        logits = MatMul(z, back) }}"""
    proto = parse_model(text, opset=21, table=table)
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
