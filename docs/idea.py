"""Draw the picture of the landing page: `python docs/idea.py` writes `images/idea*.svg`.

A square is a node of a real model: the CNN in `data`, what `onnx_derivative` and
`generate_artifacts` make of it, and what a training returns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

import onnxgrad as og

DOCS = Path(__file__).parent
MODEL = DOCS.parent / "data" / "digits_cnn.onnx"
FORWARD, BACKWARD, UPDATE = "#3b82c4", "#d9822b", "#3a9a5f"
GRAY = "#808080"  # readable on white and on black
WIDTH, SIDE, GAP, COLUMNS = 230, 11, 60, 14  # of a box, a square, an arrow; squares in a row
Stage = tuple[str, str, dict[str, int]]


def stages() -> list[Stage]:
    """Return the title, a line of text, and the numbers of nodes by color of each model."""
    model = onnx.load(MODEL)
    forward = len(model.graph.node)
    gradient = len(og.onnx_derivative(model).graph.node)
    with tempfile.TemporaryDirectory() as folder:
        og.artifacts.generate_artifacts(
            MODEL, loss="CrossEntropyLoss", optimizer="AdamW", artifact_directory=folder
        )
        files = ("training_model.onnx", "optimizer_model.onnx")
        halves = [len(onnx.load(Path(folder, file)).graph.node) for file in files]
    X, y = np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64)
    trained = og.Trainer(model, "cross_entropy").fit(X, y).model
    return [
        ("model.onnx", "your file", {FORWARD: forward}),
        (
            "gradient model",
            "with a backward pass",
            {FORWARD: forward, BACKWARD: gradient - forward},
        ),
        (
            "training step",
            "with loss and optimizer",
            {FORWARD: forward, BACKWARD: halves[0] - forward, UPDATE: halves[1]},
        ),
        ("trained.onnx", "your file, new weights", {FORWARD: len(trained.graph.node)}),
    ]


def height_of(stage: Stage) -> int:
    """Return the height of the box of a model."""
    return 110 + -(-sum(stage[2].values()) // COLUMNS) * (SIDE + 3)


def box(x: int, y: int, stage: Stage, height: int) -> Iterator[str]:
    """Yield the elements of one model, whose upper left corner is (x, y)."""
    title, line, nodes = stage
    yield f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="10" class="box"/>'
    center = x + WIDTH // 2
    yield f'<text x="{center}" y="{y + 30}" class="title">{title}</text>'
    yield f'<text x="{center}" y="{y + 52}">{line}</text>'
    colors = [color for color, count in nodes.items() for _ in range(count)]
    columns = min(COLUMNS, len(colors))
    left = center - columns * (SIDE + 3) // 2
    for i, color in enumerate(colors):
        row, column = divmod(i, columns)
        place = f'x="{left + column * (SIDE + 3)}" y="{y + 70 + row * (SIDE + 3)}"'
        yield f'<rect {place} width="{SIDE}" height="{SIDE}" rx="2" fill="{color}"/>'
    yield f'<text x="{center}" y="{y + height - 12}">{len(colors)} nodes</text>'


def arrow(x: int, y: int, down: bool) -> str:
    """Return an arrow that begins at (x, y)."""
    turn = f' transform="rotate(90 {x} {y})"' if down else ""
    return f'<path d="M{x + 12} {y} h{GAP - 30} m-8 -7 l9 7 l-9 7" class="arrow"{turn}/>'


def picture(models: list[Stage], down: bool) -> str:
    """Return the picture as SVG: one model beside the other, or below it."""
    heights = [height_of(stage) for stage in models]
    if not down:
        heights = [max(heights)] * len(models)
    gaps = GAP * (len(models) - 1) + 4
    size = (
        (WIDTH + 4, sum(heights) + gaps) if down else (WIDTH * len(models) + gaps, heights[0] + 4)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img">',
        f"<style>text {{ font: 15px sans-serif; fill: {GRAY}; text-anchor: middle }}"
        f" .title {{ font-weight: bold; font-size: 18px }}"
        f" .box, .arrow {{ fill: none; stroke: {GRAY}; stroke-width: 2 }}</style>",
    ]
    x = y = 2
    for i, (stage, height) in enumerate(zip(models, heights, strict=True)):
        if i:
            start = (x + WIDTH // 2, y - GAP) if down else (x - GAP, y + height // 2)
            parts.append(arrow(*start, down))
        parts += box(x, y, stage, height)
        x, y = (x, y + height + GAP) if down else (x + WIDTH + GAP, y)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the picture for wide and for narrow screens."""
    models = stages()
    for name, down in {"idea.svg": False, "idea-narrow.svg": True}.items():
        (DOCS / "images" / name).write_text(picture(models, down))


if __name__ == "__main__":
    main()
