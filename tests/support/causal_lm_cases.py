"""A language model with heads of several forms, its data, and its loss by PyTorch in float64."""

from __future__ import annotations

import re

import numpy as np
import onnx

from onnxgrad.losses import vocabulary, word_blocks
from tests.support.models import parse_model

RNG = np.random.default_rng(3)
ROWS, TOKENS, WIDTH, WORDS = 4, 7, 8, 32
IDS = RNG.integers(0, WORDS, (ROWS, TOKENS))
MASK = np.ones_like(IDS)
MASK[1, 4:] = MASK[2, 2:] = 0
LABELS = np.where(RNG.random(IDS.shape) < 0.3, -100, IDS)
TABLE = RNG.standard_normal((WORDS, WIDTH))
HEAD = RNG.standard_normal((WIDTH, WORDS))
BIAS = RNG.standard_normal(WORDS)

HEADS = {  # the nodes from the hidden states h to the logits, and the same in PyTorch
    "plain": ("logits = MatMul(h, head)", lambda h, table, head, bias: h @ head),
    "tied": (
        "back = Transpose<perm = [1, 0]>(table) logits = MatMul(h, back)",
        lambda h, table, head, bias: h @ table.T,
    ),
    "bias": (
        "product = MatMul(h, head) logits = Add(bias, product)",
        lambda h, table, head, bias: h @ head + bias,
    ),
    "softcap": (
        "z = MatMul(h, head) d = Div(z, cap) t = Tanh(d) logits = Mul(t, cap)",
        lambda h, table, head, bias: 2.0 * (h @ head / 2.0).tanh(),
    ),
    "flat": (
        "f = Reshape(h, flat) z = Gemm(f, head, bias) logits = Reshape(z, whole)",
        lambda h, table, head, bias: h @ head + bias,
    ),
    "mixed": (  # not position by position: the logits are written as they are
        "z = MatMul(h, head) s = CumSum(z, one) logits = Add(z, s)",
        lambda h, table, head, bias: h @ head + (h @ head).cumsum(1),
    ),
}


def causal_model(head: str, dtype: str = "double", table: np.ndarray = TABLE) -> onnx.ModelProto:
    """Return a model of one embedding, one product that mixes tokens, and a head."""
    words = len(table) if head == "tied" else WORDS
    text = f"""g (int64[N, T] input_ids) => ({dtype}[N, T, {words}] logits)
        <int64[2] flat = {{-1, {WIDTH}}}, int64[3] whole = {{{ROWS}, {TOKENS}, {WORDS}}},
         int64 one = {{1}}, {dtype} cap = {{2.0}}> {{
            rows = Gather(table, input_ids) mean = CumSum(rows, one) wave = Tanh(mean)
            h = Add(rows, wave) {HEADS[head][0]} }}"""
    arrays = {"table": table, "head": HEAD, "bias": BIAS}
    kind = np.float64 if dtype == "double" else np.float32
    read = set(re.findall(r"\w+", HEADS[head][0])) | {"table"}
    weights = {name: array.astype(kind) for name, array in arrays.items() if name in read}
    return parse_model(text, opset=21, **weights)


def torch_loss_and_gradients(head, labels, weight=None):
    """Return the loss and its gradients by name, by PyTorch in float64."""
    import torch

    table, matrix, bias = (torch.tensor(a, requires_grad=True) for a in (TABLE, HEAD, BIAS))
    rows = table[torch.tensor(IDS)]
    h = rows + torch.tanh(rows.cumsum(1))
    logits = HEADS[head][1](h, table, matrix, bias)
    target = torch.tensor(labels)[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), target, reduction="none", ignore_index=-100
    )
    w = torch.ones_like(losses) if weight is None else torch.tensor(weight)
    w = w.expand_as(torch.tensor(IDS))[:, 1:] if weight is not None else w
    w = w * (target != -100)
    loss = (losses * w).sum() / w.sum()
    loss.backward()
    found = {"table": table, "head": matrix, "bias": bias}
    return loss.item(), {n: v.grad.numpy() for n, v in found.items() if v.grad is not None}


def divide_logits(monkeypatch, chunks: str) -> None:
    """Divide the logits by "positions" or "words", or not; 16 positions are the least."""
    monkeypatch.setattr(vocabulary, "MOST_LOGITS", 1 << 24 if chunks == "whole" else 16 * WORDS)
    monkeypatch.setattr(vocabulary, "MANY_WORDS", 1 if chunks == "words" else 1 << 20)
    monkeypatch.setattr(word_blocks, "BLOCK", 8)
    monkeypatch.setattr(vocabulary, "MANY_CLASSES", 1)


def step_gradients(trainer, X, y=None, weight=None):
    """Return the losses of an evaluation and of a step of SGD of rate 1, and the gradients."""
    before = {name: array.copy() for name, array in trainer.state.weights.items()}
    evaluated = trainer.evaluate(X, y, sample_weight=weight)["loss"]
    trainer.fit(X, y, sample_weight=weight, shuffle=False, batch_size=ROWS)
    gradients = {name: before[name] - w for name, w in trainer.state.weights.items()}
    return [evaluated, trainer.history[-1]["loss"]], gradients


def assert_step(found, loss, gradients, rtol=1e-9):
    """Compare losses and gradients of `step_gradients` with expected ones."""
    losses, by_name = found
    np.testing.assert_allclose(losses, loss, rtol=rtol)
    assert by_name.keys() == gradients.keys()
    for name, gradient in by_name.items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=rtol, atol=rtol)
