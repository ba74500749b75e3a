"""Netron opens every kind of file that is written, and draws each of its nodes."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.running import PATIENCE

netron = pytest.importorskip("netron")
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

MLP = """<ir_version: 9, opset_import: ["": 20]>
    f (float[N,4] x) => (float[N,2] y)
    { h = MatMul(x, w) i = Add(h, b) t = Tanh(i) k = MatMul(t, v) y = Add(k, c) }"""


def small_mlp() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 8), "b": (8,), "v": (8, 2), "c": (2,)}
    return parse_model(MLP, **{n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()})


def write_every_kind(folder: Path) -> dict[str, Path]:
    parts = og.partition(small_mlp())
    x = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    models = {
        "trained": og.Trainer(small_mlp(), "squared_error").fit(x, x[:, :2], epochs=2).model,
        "gradient": og.onnx_derivative(small_mlp(), note_primal=True),
        "with loss": og.add_loss_output(small_mlp()),
        "forward": parts.forward,
        "backward": parts.backward,
        "joint": parts.joint,
        "lora": og.add_lora(small_mlp(), "*", rank=2),
        "jacobian": og.jacobian(small_mlp()),
    }
    found = {}
    for name, model in models.items():
        found[name] = folder / f"{name}.onnx"
        og.save(model, found[name])
    artifacts = folder / "artifacts"
    og.artifacts.generate_artifacts(
        small_mlp(), ["w", "b", "v", "c"], loss="squared_error", optimizer="adam",
        artifact_directory=artifacts,
    )  # fmt: skip
    return found | {f"artifacts/{path.name}": path for path in sorted(artifacts.glob("*.onnx"))}


@pytest.mark.sweep
def test_netron_draws_every_file(tmp_path):
    written = write_every_kind(tmp_path)
    assert len(written) >= 11
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        drawn = {name: errors_and_boxes(browser, path) for name, path in written.items()}
        browser.close()
    for name, (errors, count) in drawn.items():
        graph = onnx.load(written[name]).graph
        shown = [node for node in graph.node if node.op_type != "Constant"]
        assert not errors, (name, errors)
        expected = len(shown) + len(graph.input) + len(graph.output)
        nested = any(a.HasField("g") for node in graph.node for a in node.attribute)
        assert count > expected if nested else count == expected, name


def errors_and_boxes(browser, path: Path) -> tuple[list[str], int]:
    """Return what Netron complains of, and the number of boxes that it draws of a file."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = free.getsockname()
    netron.serve(str(path), None, address)
    page, errors = browser.new_page(), []
    # it asks for the country of its user, and reports to a service
    page.route(
        lambda url: urlsplit(url).hostname != "localhost",
        lambda route: route.fulfill(json={"country": "US"}),
    )
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else 0
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(f"http://localhost:{address[1]}")
        page.locator("g.node").first.wait_for(timeout=1000 * PATIENCE)
        page.locator("body.default").wait_for(timeout=1000 * PATIENCE)
        return errors, page.locator("g.node").count()
    finally:
        page.close()
        netron.stop(address)
