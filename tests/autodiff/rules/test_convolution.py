"""Convolutions and pooling: central differences, PyTorch, and what no graph should contain."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import check_gradient, onnx_derivative
from onnxgrad.autodiff.forms import correlation
from onnxgrad.autodiff.rules import windows
from tests.support.convolution_cases import CASES, Case
from tests.support.paths import ROOT

RUN_TIME_SHAPES = {"Shape", "Size", "ConstantOfShape", "Range", "NonZero"}
CNN = ROOT / "data" / "digits_cnn.onnx"


def model(case: Case, known: str) -> onnx.ModelProto:
    """Return the model of a row, of x all axes `known`, the "rows" not, or their "lengths"."""
    names = "xwb"[: len(case.shapes)]
    shapes = [list(map(str, shape)) for shape in case.shapes]
    if known != "all":
        shapes[0][0] = "N"
    if known == "channels":
        shapes[0][2:] = [f"L{i}" for i in range(len(shapes[0]) - 2)]
    inputs = ", ".join(f"float[{', '.join(s)}] {n}" for n, s in zip(names, shapes, strict=True))
    rank = len(shapes[0])
    output = f"float[{', '.join(f'd{i}' for i in range(rank))}] y"
    body = f"y = {case.node}"
    if "MaxUnpool" in case.node:
        body = f"v, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)  y = {case.node}"
        body = body.replace("(MaxPool)", "(v, i)")
    text = f'<ir_version: 9, opset_import: ["": 20]> g ({inputs}) => ({output}) {{ {body} }}'
    return onnx.parser.parse_model(text)


def feed(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {n: rng.standard_normal(s) for n, s in zip("xwb", case.shapes, strict=False)}


@pytest.mark.parametrize("known", ["rows"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradient_of_first_order(case, known):
    report = check_gradient(model(case, known), feed=feed(case))
    assert report.ok, str(report)


@pytest.mark.sweep
@pytest.mark.parametrize("known", ["all", "rows", "channels"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradient(case, known):
    made = model(case, known)
    report = check_gradient(made, feed=feed(case), order=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_run_time_shapes_for_symbolic_rows(case):
    made = onnx_derivative(model(case, "rows"))
    assert not RUN_TIME_SHAPES & {node.op_type for node in made.graph.node}


LARGE = [
    Case("padding", "Conv<pads=[1,1,1,1]>(x, w)", ((2, 8, 6, 7), (5, 8, 3, 3))),
    Case("uneven", "Conv<pads=[0,1,2,1], dilations=[1,2]>(x, w)", ((2, 8, 6, 9), (5, 8, 3, 2))),
    Case("groups", "Conv<group=2, pads=[2,0,1,1]>(x, w)", ((1, 16, 6, 7), (4, 8, 3, 3))),
    Case("auto_pad", 'Conv<auto_pad="SAME_UPPER">(x, w)', ((2, 9, 6, 7), (5, 9, 4, 3))),
    Case("3-D", "Conv(x, w)", ((1, 8, 4, 4, 5), (3, 8, 2, 3, 2))),
    Case("1x1", "Conv(x, w)", ((2, 8, 5), (3, 8, 1))),
    Case("strides", "Conv<strides=[2]>(x, w)", ((1, 8, 9), (3, 8, 3))),
    Case("padding beyond the kernel", "Conv<pads=[3,3]>(x, w)", ((1, 8, 5), (3, 8, 2))),
    Case("transposed", "ConvTranspose<group=2>(x, w)", ((2, 4, 6, 7), (4, 8, 3, 3))),
]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_gradient_of_large_images(case, monkeypatch):
    """Which is written with fewer elements in memory at once."""
    monkeypatch.setattr(windows, "_LARGE", 1)
    made = onnx_derivative(model(case, "all"))
    kinds = {node.op_type for node in made.graph.node}
    assert ("ConvTranspose" in kinds) == (case.id in ("strides", "padding beyond the kernel"))
    report = check_gradient(model(case, "all"), feed=feed(case), order=2)
    assert report.ok, str(report)


UNIT_STRIDE = [
    Case("1-D", "Conv<dilations=[2], pads=[1,2]>(x, w)", ((2, 3, 9), (4, 3, 3))),
    Case("2-D", "Conv<dilations=[2,1], pads=[2,0,1,1]>(x, w)", ((2, 3, 6, 5), (4, 3, 3, 2))),
    Case("groups", "Conv<group=2, pads=[1,1,1,1]>(x, w)", ((2, 4, 4, 5), (6, 2, 3, 3))),
    Case("3-D", "Conv<pads=[1,0,0,0,1,0]>(x, w)", ((2, 2, 3, 4, 4), (3, 2, 2, 1, 3))),
    Case("1x1", "Conv<pads=[0,1,2,0]>(x, w)", ((2, 3, 4, 5), (4, 3, 1, 1))),
    Case("1x1, strides", "Conv<strides=[2,3], group=2>(x, w)", ((2, 4, 6, 5), (4, 2, 1, 1))),
    Case("a channel a group", "Conv<group=3, dilations=[1,2]>(x, w)", ((2, 3, 6, 7), (6, 1, 3, 2))),
    Case("transposed", "ConvTranspose<group=2>(x, w)", ((2, 4, 3, 4), (4, 3, 3, 2))),
]


@pytest.mark.parametrize("form", ["_shifted_cotangents", "_shifted_inputs", "_columns"])
@pytest.mark.parametrize("case", UNIT_STRIDE, ids=lambda case: case.id)
def test_gradient_of_the_weight_in_every_form(case, form, monkeypatch):
    only = {getattr(correlation, form): 1.0}
    monkeypatch.setattr(correlation, "_times", lambda *_: only)
    report = check_gradient(model(case, "rows"), feed=feed(case), order=2)
    assert report.ok, str(report)


STRIDED = [
    Case("2-D", "Conv<strides=[2,2], pads=[1,1,1,1]>(x, w)", ((2, 3, 6, 7), (4, 3, 3, 3))),
    Case("rest", "Conv<strides=[3,3], pads=[2,0,1,1]>(x, w)", ((2, 3, 9, 7), (4, 3, 4, 2))),
    Case("patches", "Conv<strides=[2,2]>(x, w)", ((2, 3, 5, 6), (4, 3, 2, 2))),
    Case("1-D", "Conv<strides=[3], pads=[2,1]>(x, w)", ((2, 2, 11), (3, 2, 5))),
    Case("a channel a group", "Conv<strides=[2,2], group=3>(x, w)", ((2, 3, 8, 7), (3, 1, 3, 3))),
    Case("transposed", "ConvTranspose<strides=[2,2]>(x, w)", ((2, 3, 3, 4), (3, 2, 3, 2))),
]


@pytest.mark.parametrize("case", STRIDED, ids=lambda case: case.id)
def test_gradient_of_the_weight_with_strides_as_channels(case, monkeypatch):
    monkeypatch.setattr(correlation, "_pays_to_split", lambda *_: True)
    made = onnx_derivative(model(case, "rows"))
    assert ("SpaceToDepth" in {node.op_type for node in made.graph.node}) == (case.id != "1-D")
    report = check_gradient(model(case, "rows"), feed=feed(case), order=2)
    assert report.ok, str(report)


IMAGE = [
    ("Conv<pads=[1,1,1,1]>(x, w)", (3, 16, 16, 16), (16, 16, 3, 3)),
    ("Conv<pads=[1,1,1,1]>(x, w)", (3, 3, 16, 16), (16, 3, 3, 3)),
    ("Conv<pads=[1,1,1,1], strides=[2,2]>(x, w)", (3, 16, 16, 16), (16, 16, 3, 3)),
    ("Conv<pads=[1,1,1,1], group=16>(x, w)", (3, 16, 16, 16), (16, 1, 3, 3)),
    ("Conv<pads=[1,1,1,1], group=16>(x, w)", (3, 16, 8, 8), (16, 1, 3, 3)),
    ("Conv<pads=[1,1,1,1], group=16, strides=[2,2]>(x, w)", (3, 16, 16, 16), (16, 1, 3, 3)),
    ("Conv(x, w)", (3, 16, 16, 16), (32, 16, 1, 1)),
    ("Conv(x, w)", (3, 64, 2, 2), (64, 64, 1, 1)),
    ("Conv<pads=[1,1,1,1]>(x, w)", (3, 128, 2, 2), (128, 128, 3, 3)),
]


@pytest.mark.parametrize(("node", "x_shape", "w_shape"), IMAGE)
@pytest.mark.parametrize("known", ["all", "rows"])
def test_gradient_of_images_as_torch(node, x_shape, w_shape, known):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (x_shape, w_shape))
    operands = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    options = {"padding": int("pads" in node), "stride": 2 if "strides" in node else 1}
    y = torch.nn.functional.conv2d(*operands, groups=x_shape[1] // w_shape[1], **options)
    g = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(g))
    made = onnx_derivative(model(Case("", node, (x_shape, w_shape)), known))
    for ours, operand in zip(gradients(made, [x, w, g]), operands, strict=True):
        np.testing.assert_allclose(ours, operand.grad.numpy(), rtol=1e-4, atol=1e-3)


HEAVY = [
    Case("line", "Conv<dilations=[2], strides=[2], pads=[1,2]>(x, w)", ((2, 3, 9), (4, 3, 3))),
    Case("2-D", "Conv<dilations=[2,1], pads=[2,0,1,1]>(x, w)", ((2, 3, 6, 5), (4, 3, 3, 2))),
    Case("rest", "Conv<strides=[3,2], pads=[1,0,0,1]>(x, w)", ((2, 3, 7, 6), (4, 3, 2, 3))),
    Case("space", "Conv<pads=[1,0,0,0,1,0]>(x, w)", ((2, 2, 3, 4, 4), (3, 2, 2, 1, 3))),
]


@pytest.mark.parametrize("case", HEAVY, ids=lambda case: case.id)
@pytest.mark.parametrize("known", ["all", "rows"])
def test_gradient_of_the_input_of_a_heavy_weight(case, known, monkeypatch):
    """Is one product for all images of two axes, and equals that of a light one."""
    x, w = (v.astype(np.float32) for v in feed(case).values())
    light = onnx_derivative(model(case, known))
    monkeypatch.setattr(windows, "_HEAVY", 1)
    heavy = onnx_derivative(model(case, known))
    kinds = [{node.op_type for node in made.graph.node} for made in (light, heavy)]
    plane = case.id not in ("line", "space")
    assert ["Col2Im" in names for names in kinds] == [False, plane]
    assert ["ConvTranspose" in names for names in kinds] == [True, not plane]
    shape = next(v for v in light.graph.input if v.name == "y_grad").type.tensor_type.shape
    g = np.ones([2, *(d.dim_value for d in shape.dim[1:])], np.float32)
    g *= np.random.default_rng(1).standard_normal(g.shape).astype(np.float32)
    for ours, expected in zip(*(gradients(m, [x, w, g]) for m in (heavy, light)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_no_run_time_shapes_in_the_gradient_of_a_cnn():
    made = onnx_derivative(CNN)
    operators = Counter(node.op_type for node in made.graph.node)
    assert not RUN_TIME_SHAPES & set(operators)
    assert operators["ConvTranspose"] == operators["Conv"] == 2


def gradients(made: onnx.ModelProto, arrays: list[np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return session.run(None, dict(zip(names, arrays, strict=True)))


def test_ties_of_max_go_where_torch_sends_them():
    torch = pytest.importorskip("torch")
    x = np.ones((1, 1, 4, 4), np.float32)
    g = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)
    given = torch.tensor(x, requires_grad=True)
    torch.nn.functional.max_pool2d(given, 2).backward(torch.tensor(g))
    case = next(c for c in CASES if c.id == "max")
    made = model(case._replace(shapes=((1, 1, 4, 4),)), "rows")
    np.testing.assert_array_equal(gradients(onnx_derivative(made), [x, g])[0], given.grad.numpy())


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_as_torch(groups):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    shapes = (3, 4, 9, 8), (6, 4 // groups, 3, 2), (6,)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    given = [torch.tensor(a, requires_grad=True) for a in (x, w, b)]
    y = torch.nn.functional.conv2d(*given, stride=2, padding=1, dilation=(1, 2), groups=groups)
    g = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(g))
    node = f"Conv<strides=[2,2], pads=[1,1,1,1], dilations=[1,2], group={groups}>(x, w, b)"
    made = onnx_derivative(model(Case("", node, shapes), "rows"))
    for found, expected in zip(gradients(made, [x, w, b, g]), given, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-4, atol=1e-4)
