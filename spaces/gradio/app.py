"""A page for an .onnx file: which of its tensors train, its layers, and a check of its gradient.

Files come from strangers. Each is read by a process of its own, with limits on time and memory:
`python app.py FILE`, which prints the three tables as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 50_000_000  # of an uploaded file
MAX_ROWS = 500  # of a table on the page
MAX_SECONDS = 60  # for all tables of a file
CHECK_SECONDS = 20  # after which the check of the gradient begins no further direction
MAX_MEMORY = 4 << 30  # bytes of the process that reads a file

Table = list[list[str]]
Answer = tuple[str, Table, Table, Table]  # what the page shows: a text, and three tables

TENSOR_COLUMNS = ["name", "shape", "type", "trains", "why"]
LAYER_COLUMNS = ["layer", "operators", "output", "parameters", "multiply-adds"]
CHECK_COLUMNS = ["name", "by central differences", "by the gradient model", "relative error"]


def describe_model(path: str) -> Answer:
    """Return a summary of a model as text, its tensors, its layers, and the check of its gradient.

    An error of the check is a part of the text: a model without a gradient has layers, too.
    """
    import onnxgrad as og

    tensors, layers = og.trainable(path), og.summary(path)
    text = f"{len(tensors.trained)} of {len(tensors)} tensors train by default. "
    if max(len(tensors), len(layers)) > MAX_ROWS:
        text += f"The tables have the first {MAX_ROWS} rows. "
    checked: Table = []
    try:
        report = og.check_gradient(path, budget_seconds=CHECK_SECONDS)
    except Exception as e:
        text += f"The gradient was not checked: {e}"
    else:
        text += str(report).splitlines()[-1]
        checked = [
            [row.name, f"{row.expected:.6g}", f"{row.found:.6g}", f"{row.error:.1e}"]
            for row in report.rows
        ]
    return (
        text,
        [
            [t.alias or t.name, str(list(t.shape)), t.dtype, "yes" if t.trains else "no", t.why]
            for t in tensors[:MAX_ROWS]
        ],
        [
            [
                layer.name,
                ", ".join(layer.operators),
                ", ".join(shape_text(shape) for shape in layer.shapes),
                f"{layer.parameters:,}",
                f"{layer.multiply_adds:,}",
            ]
            for layer in layers[:MAX_ROWS]
        ],
        checked[:MAX_ROWS],
    )


def shape_text(shape: Iterable[object] | None) -> str:
    """Return the shape of an output as text; "?" if it is unknown."""
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"


def describe_upload(path: str | None) -> Answer:
    """Return what `describe_model` returns, within limits; an error is the text."""
    if path is None:
        return "Choose an .onnx file.", [], [], []
    size = Path(path).stat().st_size
    if size > MAX_BYTES:
        limit = MAX_BYTES // 1_000_000
        return f"The file has {size / 1e6:.0f} MB; this page reads up to {limit} MB.", [], [], []
    command = [sys.executable, __file__, path]
    settings = {**os.environ, "MALLOC_ARENA_MAX": "2"}  # threads would reserve memory without use
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MAX_SECONDS, env=settings
        )
    except subprocess.TimeoutExpired:
        return f"Stopped after {MAX_SECONDS} s: run onnxgrad on your machine.", [], [], []
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"The process ended by {done.returncode}."]
        return lines[-1].replace(path, Path(path).name), [], [], []
    text, tensors, layers, checked = json.loads(done.stdout)
    return text.replace(path, Path(path).name), tensors, layers, checked


def limit_memory() -> None:
    """Limit the memory of this process, where the system can: not on macOS and Windows."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def build_page():
    """Return the page as `gradio.Blocks`."""
    import gradio

    with gradio.Blocks(title="onnxgrad") as page:
        gradio.Markdown(
            "# Can this ONNX model be trained?\n"
            "Upload an `.onnx` file to see which of its tensors `onnxgrad` trains by default and"
            " why, its layers, and whether its gradient agrees with central differences."
        )
        upload = gradio.File(label="An .onnx file", file_types=[".onnx"], type="filepath")
        text = gradio.Textbox(label="Result", lines=3)
        tables = [
            gradio.Dataframe(headers=headers, label=label, wrap=True)
            for label, headers in (
                ("What trains", TENSOR_COLUMNS),
                ("Layers", LAYER_COLUMNS),
                ("Check of the gradient", CHECK_COLUMNS),
            )
        ]
        upload.change(describe_upload, upload, [text, *tables], concurrency_limit=2)
    return page


if __name__ == "__main__":
    if len(sys.argv) > 1:
        limit_memory()
        try:
            print(json.dumps(describe_model(sys.argv[1])))
        except Exception as e:
            sys.exit(f"{type(e).__name__}: {' '.join(str(e).split())}")
    else:
        build_page().launch(max_file_size=MAX_BYTES)
