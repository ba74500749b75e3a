"""What results show in a notebook: tables of the same cells as their text, with names escaped."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import onnx

import onnxgrad as og
from tests.support.models import parse_model

MODEL = """<ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}>
    { h = MatMul(x, w) y = Tanh(h) }"""
NAME = "<b>w & \u202e"


def named_model() -> onnx.ModelProto:
    made = parse_model(MODEL)
    made.graph.initializer[0].name = made.graph.node[0].input[1] = NAME
    return made


class TableReader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.texts.append("")
        self.tag = tag

    def handle_data(self, data):
        if self.tag == "p":
            self.texts[-1] += data
        else:
            self.rows[-1][-1] += data


def read_table(value) -> TableReader:
    reader = TableReader()
    reader.feed(value._repr_html_())
    assert reader.tags <= {"table", "tr", "td", "th", "p"}
    assert len({len(row) for row in reader.rows}) <= 1
    assert "\u202e" not in value._repr_html_()
    return reader


def test_trainable():
    table = og.trainable(named_model())
    found = read_table(table)
    assert found.rows[1] == [r"<b>w & \u202e", "[2, 1]", "float32", "yes", "factor of MatMul"]
    assert found.texts == [str(table).splitlines()[-1]]


def test_gradient_report():
    report = og.check_gradient(named_model())
    found = read_table(report)
    assert [row[0] for row in found.rows[1:]] == [
        row.name.replace("\u202e", r"\u202e") for row in report.rows
    ]
    assert {row[-1] for row in found.rows[1:]} == {"ok"}
    wrong = og.graph.GradientReport((og.graph.GradientRow("x", 2.0, 2.1, 0.05, 1e-6),), "float64")
    assert read_table(wrong).rows[1] == ["x", "1", "2", "2.1", "0.05", "WRONG"]
    assert read_table(wrong).texts == ["WRONG, float64"]


def test_partition():
    parts = og.partition(named_model())
    found = read_table(parts)
    assert [row[0] for row in found.rows[1:]] == [tensor.name for tensor in parts.saved]
    assert (
        found.texts[0] == f"{len(parts.saved)} tensors saved: {parts.bytes_per_row:,} bytes per row"
    )


def test_trainer():
    trainer = og.Trainer(named_model(), "squared_error")
    assert read_table(trainer).texts == ["1 weights train; 0 steps were made"]
    x = np.ones((8, 2), np.float32)
    trainer.fit(x, x[:, :1], epochs=12, batch_size=4)
    found = read_table(trainer)
    assert len(found.rows) == 1 + 10
    assert found.texts == ["1 weights train; 24 steps were made"]
    column = found.rows[0].index("loss")
    losses = [float(row[column]) for row in found.rows[1:]]
    np.testing.assert_allclose(losses, [e["loss"] for e in trainer.history[-10:]], rtol=1e-4)


def test_summary():
    table = og.summary(named_model(), lengths={"N": 3})
    found = read_table(table)
    assert found.rows[1] == ["MatMul", "MatMul", "[3, 1]", "2", "2", "6", "12"]
    assert found.texts == ["for N=3"]
