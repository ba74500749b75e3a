"""Model cards: what they say is what is known, read back with a YAML reader."""

import hashlib
import re

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.commands import refusal, succeed
from tests.support.models import parse_model

MODEL = parse_model("""
    <ir_version: 9, opset_import: ["": 20], producer_name: "ex|porter">
    net (float[N,2] x) => (float[N,3] y) <float[2,3] w_1 = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}> {
        y = MatMul(x, w_1) }
""")
X = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
Y = np.arange(50) % 3


def metadata_and_body(text):
    """Return the metadata of a card."""
    yaml = pytest.importorskip("yaml")
    _, front, body = re.split("^---$", text, maxsplit=2, flags=re.M)
    return yaml.safe_load(front), body


def table_of_section(body, section):
    """Return the table of a section, by its first column."""
    [part] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", body, re.M | re.S)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line[:1] == "|"]
    plain = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in row] for row in rows]
    return part, {first: rest for first, *rest in plain if first not in ("", "---")}


def train_classifier(**arguments):
    trainer = og.Trainer(MODEL, "cross_entropy", metrics=["accuracy"], **arguments)
    return trainer.fit(X, Y, validation=0.2, epochs=3, batch_size=8)


def test_what_is_known(tmp_path):
    base = tmp_path / "base.onnx"
    onnx.save(MODEL, base)
    trainer = train_classifier(mix=og.losses.mixup(0.3))
    file = og.plot.write_card(
        trainer, tmp_path, license="apache-2.0", base=base, data="Noise.", tags=["vision: a"]
    )
    assert file == tmp_path / "README.md"
    front, body = metadata_and_body(file.read_text())
    assert front == {
        "license": "apache-2.0",
        "library_name": "onnx",
        "tags": ["onnx", "onnxgrad", "vision: a"],
        "metrics": ["accuracy"],
    }
    assert "# net\n" in body
    _, of_base = table_of_section(body, "Base model")
    assert of_base["file"] == ["base.onnx"]
    assert of_base["SHA-256"] == [hashlib.sha256(base.read_bytes()).hexdigest()]
    assert of_base["producer"] == ["ex|porter"]
    text, data = table_of_section(body, "Data")
    assert "Noise." in text
    assert data["rows"] == ["40"]
    assert data["digest"] == [trainer.state.identity["data"]["digest"]]
    assert data["input x"] == ["float32 [40, 2]"]
    _, training = table_of_section(body, "Training")
    assert training["steps"] == training["weights are those of step"] == ["15"]
    assert training["rows of a batch"] == ["8"]
    assert training["trained weights"] == ["1, of 6 elements"]
    assert training["their names"] == ["w_1"]
    assert training["mix"] == ["Mixup(alpha=0.3, inputs=None)"]
    _, results = table_of_section(body, "Results")
    last = trainer.history[-1]
    columns = results["epoch"]
    for name in ("loss", "validation_loss", "validation_accuracy"):
        assert results["3"][columns.index(name)] == f"{last[name]:.5g}"
    _, machine = table_of_section(body, r"Versions and machine")
    assert machine["onnxgrad"] == [og.__version__]


def test_what_is_not_known_is_called_unknown(tmp_path):
    trainer = og.Trainer(MODEL, "cross_entropy").fit(X, Y)
    front, body = metadata_and_body(og.plot.write_card(trainer, tmp_path / "card.md").read_text())
    assert front["license"] == "unknown"
    assert "metrics" not in front
    for section in ("Use and limits", "License", "Data"):
        assert "Unknown." in table_of_section(body, section)[0]
    _, base = table_of_section(body, "Base model")
    assert base["file"] == base["SHA-256"] == ["unknown"]
    assert "unknown" in table_of_section(body, "Results")[0]


def test_restored_weights_are_named(tmp_path):
    stop = og.EarlyStopping(patience=1)
    trainer = og.Trainer(MODEL, "cross_entropy", learning_rate=5.0, callbacks=[stop])
    trainer.fit(X, Y, validation=(X, Y), epochs=30)
    restored = stop.entry(trainer.state)["restored"]
    assert restored is not None
    _, body = metadata_and_body(og.plot.write_card(trainer, tmp_path).read_text())
    assert table_of_section(body, "Training")[1]["weights are those of step"] == [str(restored)]


def test_data_of_batches(tmp_path):
    trainer = og.Trainer(MODEL, "cross_entropy")
    trainer.fit([(X[:20], Y[:20]), (X[20:], Y[20:])], epochs=25)
    _, body = metadata_and_body(og.plot.write_card(trainer, tmp_path).read_text())
    assert table_of_section(body, "Data")[1]["rows"]
    assert "20 of 25 records" in body


def test_refusals(tmp_path):
    with pytest.raises(og.NotFittedError):
        og.plot.write_card(og.Trainer(MODEL, "cross_entropy"), tmp_path)
    stack = og.TrainerStack(MODEL, "cross_entropy", learning_rate=[0.1, 0.2]).fit(X, Y)
    with pytest.raises(ValueError, match=r"stack.* by hand"):
        og.plot.write_card(stack, tmp_path)
    og.plot.write_card(train_classifier(), tmp_path)
    with pytest.raises(FileExistsError):
        og.plot.write_card(train_classifier(), tmp_path, overwrite=False)


def test_card_of_the_command_line(working_folder):
    kinds = ("train", "layers.onnx", "kinds.csv", "--target", "kind", "--loss", "cross_entropy")
    fast = ("--epochs", 2, "--no-curves")
    succeed(*kinds, *fast, "--card", "README.md", "--license", "mit")
    front, body = metadata_and_body((working_folder / "README.md").read_text())
    assert front["license"] == "mit"
    digest = hashlib.sha256((working_folder / "layers.onnx").read_bytes()).hexdigest()
    assert table_of_section(body, "Base model")[1]["SHA-256"] == [digest]
    assert "`kinds.csv`" in table_of_section(body, "Data")[0]
    again = (*kinds, *fast, "--output", "other.onnx", "--card", "README.md")
    assert "README.md exists" in refusal(*again)
    assert "--card" in refusal(*kinds, *fast, "--output", "other.onnx", "--license", "mit")
    assert not (working_folder / "other.onnx").exists()
