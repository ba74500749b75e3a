"""Models as text."""

import re

import pytest

from onnxgrad.plot import onnx_simple_text_plot, onnx_text_plot_io
from tests.support.drawn_models import ATTRIBUTES, BRANCHES, SEED
from tests.support.models import parse_model

EXPECTED = """\
opset: domain='' version=14
input: name='x' type=dtype('float32') shape=('N', 2)
input: name='label' type=dtype('float32') shape=('N', 1)
init: name='init' type=dtype('float32') shape=(1, 2) -- array([ 0.5 , -0.33333], dtype=float32)
init: name='init_2' type=dtype('int64') shape=(1,) -- array([1])
init: name='long' type=dtype('float32') shape=(11,)
Mul(x, x) -> out_mul_0
  Mul(out_mul_0, init) -> out_mul_0_1
Mul(x, init) -> out_mul_0_2
  Add(out_mul_0_2, out_mul_0_1) -> out_add_0
    ReduceSum(out_add_0, init_2, keepdims=1) -> y
      Sub(y, label) -> loss_diff
        Mul(loss_diff, loss_diff) -> loss_diff_2
          ReduceSum(loss_diff_2) -> loss
output: name='loss' type=dtype('float32') shape=(1, 1)"""

BRANCHES_TEXT = """\
opset: domain='' version=18
opset: domain='own' version=1
input: name='x' type=dtype('float32') shape=('N',)
input: name='c' type=dtype('bool') shape=()
own.twice(x) -> a
If(c) -> y
  then_branch:
    Constant(value=[3.0]) -> k
      Add(a, k) -> p
    output: name='p' type=dtype('float32') shape=('N',)
  else_branch:
    Identity(a) -> q
    output: name='q' type=dtype('float32') shape=?
output: name='y' type=dtype('float32') shape=('N',)
function: own.twice(v)
  Add(v, v) -> w
  return w"""


def test_the_style_of_the_seeds():
    assert onnx_simple_text_plot(parse_model(SEED)) == EXPECTED


def test_branches_and_functions_stand_below():
    assert onnx_simple_text_plot(parse_model(BRANCHES)) == BRANCHES_TEXT


@pytest.mark.parametrize(
    "line",
    [
        "ai.onnx.ml.Scaler(x, offset=[0.1], scale=[11 values]) -> s",
        "  LeakyRelu(s, alpha=0.25) -> r",
        "Constant(value=type=dtype('float32') shape=(11,)) -> o",
        "output: name='z' type=sequence",
        "output: name='y' type=dtype('float32') shape=()",
    ],
)
def test_attributes_and_types(line):
    assert line in onnx_simple_text_plot(parse_model(ATTRIBUTES)).splitlines()


def test_without_indent():
    text = onnx_simple_text_plot(parse_model(SEED), indent=False)
    assert not any(line.startswith(" ") for line in text.splitlines())


def test_io_has_no_nodes_and_no_values():
    nodes = [line for line in EXPECTED.splitlines() if "->" not in line]
    expected = [line.split(" -- ")[0] for line in nodes]
    assert onnx_text_plot_io(parse_model(SEED)).splitlines() == expected


def test_deep_models_stay_readable():
    body = "".join(f"v{i + 1} = Relu(v{i})\n" for i in range(500))
    text = onnx_simple_text_plot(parse_model(f"g (float[N] v0) => (float[N] v500) {{{body}}}"))
    assert max(map(len, text.splitlines())) < 100


def model_in_modules():
    model = parse_model("""g (float[N] x) => (float[N] y, float[N] c)
        { a = Relu(x) b = Exp(a) c = Relu(b) d = Neg(c) y = Add(d, b) }""")
    names = ["/enc/0/act/Relu", "/enc/0/exp/Exp", "/enc/1/act/Relu", "/head/Neg", "plain"]
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, ["enc/... 3 nodes (2 Relu, Exp) -> b, c", "head/... 1 node (Neg) -> d"]),
        (2, ["enc.0/... 2 nodes (Relu, Exp) -> b", "enc.1/... 1 node (Relu) -> c",
             "head/... 1 node (Neg) -> d"]),
    ],
)  # fmt: skip
def test_modules_in_one_line(depth, expected):
    lines = onnx_simple_text_plot(model_in_modules(), depth=depth).splitlines()
    assert lines[2:-2] == [*expected, "Add(d, b) -> y"]


def test_values_that_a_subgraph_reads_leave_their_module():
    model = parse_model("""g (float[N] x, bool c) => (float[N] y) { a = Exp(x) y = If(c) <
            then_branch = t () => (float[N] p) { p = Neg(a) },
            else_branch = e () => (float[N] q) { q = Abs(x) }> }""")
    model.graph.node[0].name = "/enc/Exp"
    lines = onnx_simple_text_plot(model, depth=1).splitlines()
    assert "enc/... 1 node (Exp) -> a" in lines
    assert "    Neg(a) -> p" in lines


def test_colors():
    for model in (model_in_modules(), parse_model(BRANCHES)):
        for options in ({}, {"depth": 1}):
            plain = onnx_simple_text_plot(model, **options)
            colored = onnx_simple_text_plot(model, color=True, **options)
            assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
            for line in colored.splitlines():
                if "->" in line or "put: " in line:
                    assert line.count("\x1b[0m") == 1
    assert "\x1b[1;36mAdd\x1b[0m(d, b) -> y" in onnx_simple_text_plot(
        model_in_modules(), color=True
    )
    with pytest.raises(ValueError, match=r"depth.* 1, not 0"):
        onnx_simple_text_plot(model_in_modules(), depth=0)
