"""Write the pictures of `report.md`: `python docs/report_pictures.py`.

It trains a classifier of the digits of scikit-learn by the command line, and photographs its report
by an installed Chromium and playwright.
"""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
from onnx import numpy_helper
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from onnxgrad.cli import app

IMAGES = Path(__file__).parent / "images"
SHOTS = {"desktop": (1100, "light"), "phone": (390, "light"), "dark": (1100, "dark")}
COMMAND = (
    "train digits.onnx digits.csv --target digit --loss cross_entropy --optimizer adamw --lr 0.01 "
    "--schedule cosine --epochs 12 --metrics accuracy,f1_macro --record run"
)


def write_inputs() -> None:
    """Write a network for images of 8 x 8 pixels, and the digits as a table."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["": 20]>
        digits (float[N,64] pixels) => (float[N,10] logits) {
            hidden = Gemm(pixels, w1, b1)  r = Relu(hidden)  logits = Gemm(r, w2, b2) }""")
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (64, 48)), ("b1", (48,)), ("w2", (48, 10)), ("b2", (10,))):
        values = rng.normal(size=shape) * (len(shape) - 1) / np.sqrt(shape[0])
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    onnx.save(model, "digits.onnx")
    X, y = load_digits(return_X_y=True)
    with open("digits.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{i}" for i in range(64)), "digit"])
        writer.writerows([*(row / 16).tolist(), digit] for row, digit in zip(X, y, strict=True))


def run(command: str) -> None:
    """Run a command of the command line, as a terminal would."""
    sys.argv = ["onnxgrad", *command.split()]
    done = CliRunner().invoke(app, command.split())
    if done.exit_code:
        sys.exit(done.output)


def photograph(page: Path) -> None:
    """Write the pictures of the upper part of a page, in two widths and in the dark."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, (width, scheme) in SHOTS.items():
            opened = browser.new_page(
                viewport={"width": width, "height": 1500}, color_scheme=scheme
            )
            opened.goto(page.as_uri())
            if name == "dark":
                opened.locator("#predictions").scroll_into_view_if_needed()
                opened.evaluate("document.querySelector('#predictions').scrollIntoView()")
            opened.screenshot(path=IMAGES / f"report-{name}.png")
        browser.close()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        write_inputs()
        run(COMMAND)
        run("report run")
        photograph(Path(folder, "run", "report.html"))
