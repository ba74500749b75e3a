"""The names of columns: told, kept in the trained model, and compared."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.commands import LINEAR, invoke, save, write_all

PAIR = LINEAR.replace("[N,1]", "[N,2]")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    return tmp_path


WIDE = ("--target", "y", "--loss", "squared_error", "--epochs", 1, "--batch-size", 1)
OLD, NEW = ("train", "linear.onnx", "wide.csv", *WIDE), ("train", "trained.onnx", "wide.csv", *WIDE)


def wide(header, values="1,2,3"):
    Path("wide.csv").write_text(f"{header}\n" + f"{values}\n" * 5)


def test_the_order_of_the_columns_is_told_and_kept(here):
    wide("a,b,y")
    made = invoke(*OLD)
    assert made.exit_code == 0, made.output
    assert "columns of input x, in this order: a, b\n" in made.stdout
    kept = {e.key: e.value for e in onnx.load("trained.onnx").metadata_props}
    assert kept == {
        "onnxgrad.columns": '{"x": ["a", "b"]}',
        "onnxgrad.target": '["y"]',
        "onnxgrad.training_loss": '[{"loss": ["squared_error"]}]',
    }
    again = ("--output", "again.onnx", "--overwrite")
    wide("y,a,b")
    made = invoke(*NEW, *again)
    assert made.exit_code == 0, made.output
    assert "in this order" not in made.stdout
    wide("b,a,y")
    made = invoke(*NEW, *again)
    assert made.exit_code == 0, made.output
    told = "columns of input x are taken by name, in the order of its training: a, b (the data has"
    assert sum(told in line for line in made.stderr.splitlines()) == 1
    for header, message in (
        ("a,c,y", "no column 'b' and column 'c' that was not in training"),
        ("a,y,B", "no column 'b' and column 'B' that"),
        ("a,b,y,c", "column 'c' that was not in training"),
    ):
        wide(header, "1,2,3,4" if header.count(",") == 3 else "1,2,3")
        made = invoke(*NEW, *again)
        assert made.exit_code == 2
        [line] = made.stderr.splitlines()
        assert message in line


def test_names_of_columns_cannot_write_to_the_terminal(here):
    wide("\x1b[31ma,\x9bb,y")
    made = invoke(*OLD)
    assert made.exit_code == 0, made.output
    assert r"\x1b[31ma, \x9bb" in made.stdout
    wide("\x1b[31mb,\x9bc,y")
    errors = invoke(*NEW, "--output", "again.onnx").stderr
    wide("\x1b[31ma,\x1b[31ma,y")
    errors += invoke(*OLD, "--overwrite").stderr
    wide("a,b,y", "\x1b[31mred,2,3")
    errors += invoke(*OLD, "--overwrite").stderr
    assert errors.count("Error: ") == 3
    assert not {"\x1b", "\x9b"} & set(errors + made.stdout)


def test_targets_keep_their_order(here):
    save("pair.onnx", PAIR, W=np.eye(2), b=np.zeros(2))
    wide("a,b,u,v", "1,2,3,4")
    both = ("--loss", "l2", "--epochs", 1, "--batch-size", 1, "--overwrite")
    made = invoke("train", "pair.onnx", "wide.csv", "--target", "u", "--target", "v", *both)
    assert made.exit_code == 0, made.output
    turned = ("--target", "v", "--target", "u", "--output", "again.onnx")
    made = invoke("train", "trained.onnx", "wide.csv", *turned, *both)
    assert "the target: column 1 is 'v', and was 'u' in training" in made.stderr
