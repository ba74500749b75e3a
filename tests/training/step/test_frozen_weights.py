"""Frozen weights in the loop over batches: outside of its body if they are large."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import Trainer
from tests.support.models import parse_model
from tests.support.running import in_sweep

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
ROWS, TARGET = RNG.standard_normal((4, 3)), RNG.standard_normal((4, 4096))
FIRST = RNG.standard_normal((3, 4096))


def large_matrix(seed: int) -> np.ndarray:
    """Return a matrix of 64 MiB, a product of a column and a row."""
    rng = np.random.default_rng(seed)
    return np.outer(rng.standard_normal(4096), rng.standard_normal(4096) / 4096).astype(np.float32)


@pytest.mark.parametrize(
    ("matrices", "dtype"),
    [in_sweep(1, np.float32), (2, np.float32), in_sweep(4, np.float16)],
)
def test_large_frozen_factors_are_outside_of_the_loop(matrices, dtype, monkeypatch):
    bodies, session = [], ort.InferenceSession

    def recorded_session(model, *args, **options):
        proto = onnx.load_model_from_string(model)
        bodies.extend(n.attribute[0].g for n in proto.graph.node if n.op_type == "Scan")
        return session(model, *args, **options)

    monkeypatch.setattr(ort, "InferenceSession", recorded_session)
    frozen = {f"f{i}": large_matrix(i).astype(dtype) for i in range(matrices)}
    rows_and_labels, kind = [a.astype(dtype) for a in (ROWS, TARGET)], np.dtype(dtype).name
    nodes = " ".join(f"h{i + 1} = MatMul(h{i}, f{i})" for i in range(matrices))
    model = parse_model(
        f"""m ({kind.removesuffix("32")}[N,3] x) => ({kind.removesuffix("32")}[N,4096] y)
        {{ h0 = MatMul(x, w) {nodes} y = Tanh(h{matrices}) }}""",
        w=FIRST.astype(dtype),
        **frozen,
    )
    trainer = Trainer(model, "mse", train="w", optimizer="sgd", learning_rate=1.0)
    trainer.fit(*rows_and_labels, batch_size=2, shuffle=False)

    w = torch.tensor(FIRST.astype(dtype)).float().requires_grad_()
    losses = []
    for rows in (slice(0, 2), slice(2, 4)):
        x, y = (torch.tensor(a[rows]).float() for a in rows_and_labels)
        h = x @ w
        for matrix in frozen.values():
            h = h @ torch.tensor(matrix).float()
        loss = torch.nn.functional.mse_loss(torch.tanh(h), y)
        losses.append(loss.item())
        w = (w - torch.autograd.grad(loss, w)[0]).detach().requires_grad_()
    assert trainer.history[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    np.testing.assert_allclose(trainer.state.weights["w"], w.detach(), rtol=1e-4, atol=1e-5)
    assert bodies
    held = [t for body in bodies for t in body.initializer if np.prod(t.dims) == 4096**2]
    assert bool(held) == (matrices == 1)
