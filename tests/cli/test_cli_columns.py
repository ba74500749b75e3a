"""The names of columns: told, kept in the trained model, and compared."""

from pathlib import Path

import numpy as np
import onnx

from tests.support.commands import (
    LINEAR,
    assert_names,
    metadata_of_file,
    refusal,
    run_command,
    save_model,
    succeed,
)
from tests.support.models import initializer_arrays

PAIR = LINEAR.replace("[N,1]", "[N,2]")


WIDE = ("--target", "y", "--loss", "squared_error", "--epochs", 1, "--batch-size", 1, "--no-curves")
OLD, NEW = ("train", "linear.onnx", "wide.csv", *WIDE), ("train", "trained.onnx", "wide.csv", *WIDE)


def write_wide(header, values="1,2,3"):
    Path("wide.csv").write_text(f"{header}\n" + f"{values}\n" * 5)


def test_the_order_of_the_columns_is_told_and_kept(here):
    write_wide("a,b,y")
    made = succeed(*OLD)
    assert_names(made.stdout, "input x ... order: a, b\n")
    assert metadata_of_file("trained.onnx") == {
        "onnxgrad.columns": '{"x": ["a", "b"]}',
        "onnxgrad.target": '["y"]',
        "onnxgrad.training_loss": '[{"loss": "squared_error"}]',
    }
    again = ("--output", "again.onnx", "--overwrite")
    write_wide("y,a,b")
    assert "order: a, b" not in succeed(*NEW, *again).stdout
    write_wide("b,a,y")
    lines = [line for line in succeed(*NEW, *again).stderr.splitlines() if "columns of" in line]
    assert len(lines) == 1
    assert_names(lines[0], "input x ... by name ... training: a, b ... data has b, a")
    for header, message in (
        ("a,c,y", "no column 'b' ... column 'c' that"),
        ("a,y,B", "no column 'b' ... column 'B' that"),
        ("a,b,y,c", "column 'c' that"),
    ):
        write_wide(header, "1,2,3,4" if header.count(",") == 3 else "1,2,3")
        assert_names(refusal(*NEW, *again), message)


def test_names_of_columns_cannot_write_to_the_terminal(here):
    write_wide("\x1b[31ma,\x9bb,y")
    made = succeed(*OLD)
    assert r"\x1b[31ma, \x9bb" in made.stdout
    write_wide("\x1b[31mb,\x9bc,y")
    errors = run_command(*NEW, "--output", "again.onnx").stderr
    write_wide("\x1b[31ma,\x1b[31ma,y")
    errors += run_command(*OLD, "--overwrite").stderr
    write_wide("a,b,y", "\x1b[31mred,2,3")
    errors += run_command(*OLD, "--overwrite").stderr
    assert errors.count("Error: ") == 3
    assert not {"\x1b", "\x9b"} & set(errors + made.stdout)


def test_targets_are_taken_by_name(here):
    save_model("pair.onnx", PAIR, W=np.eye(2), b=np.zeros(2))
    write_wide("a,b,u,v", "1,2,3,4")
    both = ("--loss", "l2", "--epochs", 1, "--batch-size", 1, "--overwrite", "--no-curves")
    succeed("train", "pair.onnx", "wide.csv", "--target", "u", "--target", "v", *both)
    turned = ("--target", "v", "--target", "u", "--output", "again.onnx")
    succeed("train", "trained.onnx", "wide.csv", *turned, *both)
    kept = {e.key: e.value for e in onnx.load("again.onnx").metadata_props}
    assert kept["onnxgrad.target"] == '["u", "v"]'


def test_all_columns_that_may_be_left_out_are_named(here):
    """One of the first may be no feature, as a number of rows: nothing says which."""
    write_wide("id,a,b,y", "1,2,3,4")
    message = refusal(*OLD)
    assert_names(message, "--ignore", "--columns", "id, a, b")
    assert "--ignore b" not in message


def test_columns_that_skl2onnx_renames(here):
    text = """g (float[N,1] width__cm_, float[N,1] _2nd) => (float[N,1] y) {
        h = Mul(width__cm_, W) y = Add(h, _2nd) }"""
    save_model("linear.onnx", text, W=[[1.0]])
    write_wide("2nd,width (cm),y")
    succeed(*OLD)
    kept = metadata_of_file("trained.onnx")["onnxgrad.columns"]
    assert kept == '{"width__cm_": ["width (cm)"], "_2nd": ["2nd"]}'
    write_wide("2nd,width (cm),width [cm],y", "1,2,3,4")
    assert_names(refusal(*OLD, "--overwrite"), "'width__cm_'", "'width (cm)'", "'width [cm]'")


THREE = LINEAR.replace("[N,1]", "[N,3]")


def write_classes(labels, weights=(1, 2, 1, 3, 1, 2)):
    rng = np.random.default_rng(0)
    rows = [
        ",".join(map(str, [*rng.normal(size=2), y, w]))
        for y, w in zip(labels, weights, strict=True)
    ]
    Path("rows.csv").write_text("\n".join(["a,b,lab,w", *rows]))


def test_names_of_classes_meet_labels_that_are_ignored(here):
    """With balanced weights, too; and the table of the training is predicted."""
    save_model("three.onnx", THREE, W=np.ones((2, 3)), b=np.zeros(3))
    common = ("--loss", "cross_entropy", "--epochs", 2, "--batch-size", 2, "--overwrite")
    common += ("--loss-option", "ignore_index=-100", "--target", "lab", "--no-curves")
    common += ("--sample-weight", "w", "--class-weight", "balanced", "--validation", 0)
    weights = []
    for labels, more in (
        ([3, 8, 5, -100, 5, 3], ("--classes", "3,5,8")),
        ([0, 2, 1, -100, 1, 0], ()),
    ):
        write_classes(labels)
        succeed("train", "three.onnx", "rows.csv", *common, *more)
        weights.append(initializer_arrays(onnx.load("trained.onnx")))
        assert metadata_of_file("trained.onnx")["onnxgrad.weight"] == '["w"]'
        succeed("predict", "trained.onnx", "rows.csv", "--output", "out.csv", "--overwrite")
        evaluated = ("--loss-option", "ignore_index=-100", *more)
        succeed("eval", "trained.onnx", "rows.csv", "--loss", "cross_entropy", *evaluated)
    np.testing.assert_equal(weights[0], weights[1])


def test_columns_of_several_scores_are_no_names(here):
    """0 and 1 of each class stay, whatever the classes are called."""
    save_model("three.onnx", THREE, W=np.ones((2, 3)), b=np.zeros(3))
    Path("rows.csv").write_text("a,b,p,q,r\n" + "1,2,1,0,1\n0,1,0,0,1\n" * 4)
    common = ("--loss", "binary_cross_entropy", "--epochs", 1, "--overwrite", "--no-curves")
    common += ("--target", "p", "--target", "q", "--target", "r", "--validation", 0)
    weights = []
    for more in ((), ("--classes", "1,0,2")):
        succeed("train", "three.onnx", "rows.csv", *common, *more)
        weights.append(initializer_arrays(onnx.load("trained.onnx")))
    np.testing.assert_equal(weights[0], weights[1])
