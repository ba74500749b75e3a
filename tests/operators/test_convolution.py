"""Convolutions and pooling: central differences, PyTorch, and what no graph should contain."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from onnxgrad import NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.forms import convolutions
from tests.support.convolution_cases import (
    CHECK,
    CONVOLUTIONS,
    Convolution,
    conv_model,
    convolution_feed,
    convolution_parts,
    sweep_of,
)
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.packs import failures, side_by_side
from tests.support.paths import ROOT
from tests.support.running import run

RUN_TIME_SHAPES = {"Shape", "Size", "ConstantOfShape", "Range", "NonZero"}
CNN = ROOT / "data" / "digits_cnn.onnx"


@pytest.mark.parametrize("known", ["rows", "kernels", "nothing"])
@pytest.mark.parametrize("start", range(0, len(CONVOLUTIONS), 27))
def test_gradient_of_first_order(start, known):
    parts = convolution_parts(CONVOLUTIONS[start : start + 27], known)
    assert failures(parts, CHECK) == []


@pytest.mark.parametrize("known", ["all", "rows", "channels"])
@sweep_of(CONVOLUTIONS)
def test_gradient(case, known):
    made = conv_model(case, known)
    report = check_gradient(made, feed=convolution_feed(case), order=2)
    assert report.ok, str(report)


def test_no_run_time_shapes_for_symbolic_rows():
    def run_time_shapes(parts):
        model = side_by_side([part.model for part in parts])
        found = RUN_TIME_SHAPES & set(operator_names(onnx_derivative(model, weights=[])))
        return [f"{', '.join(part.name for part in parts)}: {found}"] if found else []

    assert failures(convolution_parts(CONVOLUTIONS, "rows"), run_time_shapes) == []


LARGE = [
    Convolution("padding", "Conv<pads=[1,1,1,1]>(x, w)", ((2, 8, 6, 7), (5, 8, 3, 3))),
    Convolution(
        "uneven", "Conv<pads=[0,1,2,1], dilations=[1,2]>(x, w)", ((2, 8, 6, 9), (5, 8, 3, 2))
    ),
    Convolution("groups", "Conv<group=2, pads=[2,0,1,1]>(x, w)", ((1, 16, 6, 7), (4, 8, 3, 3))),
    Convolution("auto_pad", 'Conv<auto_pad="SAME_UPPER">(x, w)', ((2, 9, 6, 7), (5, 9, 4, 3))),
    Convolution("3-D", "Conv(x, w)", ((1, 8, 4, 4, 5), (3, 8, 2, 3, 2))),
    Convolution("1x1", "Conv(x, w)", ((2, 8, 5), (3, 8, 1))),
    Convolution("strides", "Conv<strides=[2]>(x, w)", ((1, 8, 9), (3, 8, 3))),
    Convolution("padding beyond the kernel", "Conv<pads=[3,3]>(x, w)", ((1, 8, 5), (3, 8, 2))),
    Convolution("transposed", "ConvTranspose<group=2>(x, w)", ((2, 4, 6, 7), (4, 8, 3, 3))),
]


def test_gradient_of_large_images(monkeypatch):
    """Which is written with fewer elements in memory at once."""
    monkeypatch.setattr(convolutions, "LEAST_LARGE_COPIES", 1)
    for case in LARGE:
        kinds = set(operator_names(onnx_derivative(conv_model(case, "all"))))
        transposed = case.id in ("strides", "padding beyond the kernel")
        assert ("ConvTranspose" in kinds) == transposed, case.id
    assert failures(convolution_parts(LARGE, "all"), CHECK) == []


@sweep_of(LARGE)
def test_second_order_of_large_images(case, monkeypatch):
    monkeypatch.setattr(convolutions, "LEAST_LARGE_COPIES", 1)
    report = check_gradient(conv_model(case, "all"), feed=convolution_feed(case), order=2)
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
    made = onnx_derivative(conv_model(Convolution("", node, (x_shape, w_shape)), known))
    for ours, operand in zip(results_of(made, [x, w, g]), operands, strict=True):
        np.testing.assert_allclose(ours, operand.grad.numpy(), rtol=1e-4, atol=1e-3)


HEAVY = [
    Convolution(
        "line", "Conv<dilations=[2], strides=[2], pads=[1,2]>(x, w)", ((2, 3, 9), (4, 3, 3))
    ),
    Convolution("2-D", "Conv<dilations=[2,1], pads=[2,0,1,1]>(x, w)", ((2, 3, 6, 5), (4, 3, 3, 2))),
    Convolution("rest", "Conv<strides=[3,2], pads=[1,0,0,1]>(x, w)", ((2, 3, 7, 6), (4, 3, 2, 3))),
    Convolution("space", "Conv<pads=[1,0,0,0,1,0]>(x, w)", ((2, 2, 3, 4, 4), (3, 2, 2, 1, 3))),
]


@pytest.mark.parametrize("case", HEAVY, ids=lambda case: case.id)
@pytest.mark.parametrize("known", ["all", "rows"])
def test_gradient_of_the_input_of_a_heavy_weight(case, known, monkeypatch):
    """Is one product for all images of two axes, and equals that of a light one."""
    x, w = (v.astype(np.float32) for v in convolution_feed(case).values())
    light = onnx_derivative(conv_model(case, known))
    monkeypatch.setattr(convolutions, "LEAST_HEAVY_WEIGHT", 1)
    heavy = onnx_derivative(conv_model(case, known))
    kinds = [set(operator_names(made)) for made in (light, heavy)]
    plane = case.id not in ("line", "space")
    assert ["Col2Im" in names for names in kinds] == [False, plane]
    assert ["ConvTranspose" in names for names in kinds] == [True, not plane]
    shape = next(v for v in light.graph.input if v.name == "y_grad").type.tensor_type.shape
    g = np.ones([2, *(d.dim_value for d in shape.dim[1:])], np.float32)
    g *= np.random.default_rng(1).standard_normal(g.shape).astype(np.float32)
    for ours, expected in zip(*(results_of(m, [x, w, g]) for m in (heavy, light)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_no_run_time_shapes_in_the_gradient_of_a_cnn():
    made = onnx_derivative(CNN)
    operators = Counter(operator_names(made))
    assert not RUN_TIME_SHAPES & set(operators)
    assert operators["ConvTranspose"] == operators["Conv"] == 2


def results_of(made: onnx.ModelProto, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a model for arrays in the order of its inputs."""
    return run(made, dict(zip([x.name for x in made.graph.input], arrays, strict=True)))


def test_ties_of_max_go_where_torch_sends_them():
    torch = pytest.importorskip("torch")
    x = np.ones((1, 1, 4, 4), np.float32)
    g = np.arange(1, 5, dtype=np.float32).reshape(1, 1, 2, 2)
    given = torch.tensor(x, requires_grad=True)
    torch.nn.functional.max_pool2d(given, 2).backward(torch.tensor(g))
    case = next(c for c in CONVOLUTIONS if c.id == "max")
    made = conv_model(case._replace(shapes=((1, 1, 4, 4),)), "rows")
    np.testing.assert_array_equal(results_of(onnx_derivative(made), [x, g])[0], given.grad.numpy())


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
    made = onnx_derivative(conv_model(Convolution("", node, shapes), "rows"))
    for found, expected in zip(results_of(made, [x, w, b, g]), given, strict=True):
        np.testing.assert_allclose(found, expected.grad.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("node", ["Conv(x, w)", "ConvTranspose(x, w)", "ConvTranspose(x, w, b)"])
def test_images_of_unknown_rank_are_refused(node):
    inputs = "float[16] p, float[36] q, int64[k] s, int64[l] t, float[2] b"
    body = f"w = Reshape(p, s)  x = Reshape(q, t)  y = {node}"
    made = parse_model(f"g ({inputs}) => (float y) {{ {body} }}", output_shapes=False)
    with pytest.raises(NoGradientRule, match=naming(node.split("(")[0], "'y'", "rank")):
        onnx_derivative(made, inputs=["p"])


def test_what_is_not_padded_gets_no_pads():
    made = onnx_derivative(conv_model(CONVOLUTIONS[0], "all"))
    assert "Pad" not in operator_names(made)
