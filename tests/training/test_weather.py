"""A weather model with attention in shifted windows, beside the same module in PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.running import in_sweep

torch = pytest.importorskip("torch")

from weather import (  # noqa: E402
    INPUTS,
    OUTPUTS,
    PROJECTIONS,
    RANK,
    LowRank,
    add_adapters,
    fields,
    loss_of,
    new_model,
    write_file,
)

LOSS = {"loss": dict.fromkeys(OUTPUTS, "mae"), "loss_weights": {"output_surface": 0.25}}
NAME, STEPS = "tiny", 3


@pytest.fixture(name="path", scope="module")
def weather_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weather") / "weather.onnx"
    write_file(NAME, path)
    return path


@pytest.mark.parametrize("recompute", [in_sweep("none"), "all"])
def test_loss_and_gradients_of_all_weights(path, recompute):
    model, data = new_model(NAME), fields(NAME, rows=2)
    expected = loss_of(model, data)
    expected.backward()
    start = {name: p.detach().numpy().astype(np.float64) for name, p in model.named_parameters()}
    wanted = {name: p.grad.numpy().astype(np.float64) for name, p in model.named_parameters()}
    size = max(np.abs(g).max() for g in wanted.values())  # so that changes are not rounded away
    trainer = og.Trainer(path, **LOSS, optimizer="sgd", learning_rate=1 / size, recompute=recompute)
    trainer.fit(data, batch_size=2)
    assert trainer.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert trainer.state.weights.keys() == wanted.keys()
    off = {name: (w - trainer.state.weights[name]) * size for name, w in start.items()}
    for name, g in wanted.items():
        np.testing.assert_allclose(off[name], g, rtol=1e-3, atol=1e-5 * size, err_msg=name)
    lengths = [
        np.sqrt(sum(np.square(g).sum() for g in gs))
        for gs in ([off[name] - g for name, g in wanted.items()], wanted.values())
    ]
    assert lengths[0] < 1e-5 * lengths[1]


class OneExample(torch.nn.Module):
    """A model of rows as a model of one example."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return tuple(y[0] for y in self.model(*(x[None] for x in inputs)))


def test_a_file_without_rows(tmp_path):
    """Five fields on levels and four at the surface, as in the files of Pangu-Weather: a batch is
    one example, which goes into the model whole.
    """
    data = {name: array[0] for name, array in fields(NAME).items()}
    examples = [data, {name: array[..., ::-1].copy() for name, array in data.items()}]
    model, path = new_model(NAME), tmp_path / "one.onnx"

    inputs = tuple(torch.tensor(data[name]) for name in INPUTS)
    onnx.save(
        export_module(OneExample(model), inputs, input_names=INPUTS, output_names=OUTPUTS), path
    )
    losses = [loss_of(model, {n: a[None] for n, a in e.items()}).item() for e in examples]
    assert abs(losses[0] / losses[1] - 1) > 1e-4
    trainer = og.Trainer(
        path, **LOSS, train="model.embed.weight", optimizer="sgd", learning_rate=1e-9
    )
    trainer.fit(examples, shuffle=False, validation=examples[1:])
    assert trainer.history[0]["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert trainer.history[0]["validation_loss"] == pytest.approx(losses[1], rel=1e-5)
    assert trainer.evaluate(examples[:1])["loss"] == pytest.approx(losses[0], rel=1e-5)
    with pytest.raises(ValueError, match=naming("'input': 5", "'input_surface': 4", "dicts")):
        trainer.fit(data)


def test_blocks_in_front_of_adapters_are_computed_once(path, caplog):
    last = og.add_lora(path, [f"layer4.{p}" for p in PROJECTIONS], rank=RANK, alpha=RANK)
    data, weights = fields(NAME, rows=3), []
    for cache in (False, True):
        trainer = og.Trainer(last, **LOSS, optimizer="sgd", learning_rate=0.01)
        with caplog.at_level("INFO", "onnxgrad"):
            trainer.fit(data, batch_size=2, epochs=2, cache=cache)
        weights.append(trainer.state.weights)
    for name, expected in weights[0].items():
        np.testing.assert_allclose(weights[1][name], expected, rtol=0, atol=1e-6, err_msg=name)
    assert re.search(r"cache: '.*' of 3 rows take .* in place of [56]\d", caplog.text)


def test_adapters_beside_the_projections_of_attention(path):
    proto = og.add_lora(path, PROJECTIONS, rank=RANK, alpha=RANK)
    trainer = og.Trainer(proto, **LOSS, optimizer="adam", learning_rate=0.01)
    model, data = new_model(NAME), fields(NAME, rows=2)
    add_adapters(model, model)
    adapters = {name: m for name, m in model.named_modules() if isinstance(m, LowRank)}
    names = {name: f"{name}.lora_{{}}.weight" for name in adapters}
    for name, module in adapters.items():
        for part, parameter in (("A", module.a), ("B", module.b)):
            value = trainer.state.weights[names[name].format(part)]
            parameter.data = torch.tensor(np.array(value))
    assert len(trainer.state.weights) == 2 * len(adapters) == 24
    trainer.fit(data, batch_size=2, epochs=STEPS)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
        assert trainer.history[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert loss.item() < 0.999 * trainer.history[0]["loss"]
    for name, module in adapters.items():
        for part, parameter in (("A", module.a), ("B", module.b)):
            found = trainer.state.weights[names[name].format(part)]
            np.testing.assert_allclose(found, parameter.detach(), atol=2e-3, err_msg=name)
    merged = og.merge_lora(trainer.model)
    kept = {t.name for t in merged.graph.initializer}
    assert {f"{name.removesuffix('.layer')}.weight" for name in adapters} <= kept
