"""Resize and sampling, against PyTorch at the kinks and against what older opsets meant."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from onnxgrad import (
    DerivativeOptions,
    ModelError,
    NoGradientRule,
    check_gradient,
    onnx_derivative,
)
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from onnxgrad.model.weights import constant_refs
from tests.support.cases import run_in_dtype
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run, run_named


def of_parts(inputs: str, body: str, opset: int = 20, initializers: str = "") -> onnx.ModelProto:
    text = f"g ({inputs}) => (float y) <{initializers}> {{ {body} }}"
    return parse_model(text, opset=opset, ir_version=8, output_shapes=False)


def output_and_gradients(made: onnx.ModelProto, feed: dict, inputs: list[str]) -> tuple:
    """Return the output, what arrives there, and the gradients of the inputs."""
    (y,) = run_in_dtype(made, feed)
    arrives = np.random.default_rng(3).standard_normal(y.shape)
    derivative = onnx_derivative(made, inputs=inputs, weights=[])
    return y, arrives, run_in_dtype(derivative, feed | {"y_grad": arrives})


@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_grid_sample_is_that_of_torch_between_and_at_elements(mode, padding, aligned):
    """Places are whole elements, where the slope jumps, and halfway; the border is passed twice."""
    torch = pytest.importorskip("torch")
    h, w = 4, 5
    x = np.random.default_rng(0).standard_normal((1, 3, h, w)).astype(np.float32)
    across, down = np.meshgrid(np.arange(-6, w + 6, 0.5), np.arange(-5, h + 5, 0.5))
    if mode == "nearest":  # halfway onnxruntime does not round as PyTorch does
        across, down = across + 0.1, down - 0.1
    places = [(across, w), (down, h)]
    u = [2 * p / (n - 1) - 1 if aligned else (2 * p + 1) / n - 1 for p, n in places]
    grid = np.stack(u, axis=-1)[None].astype(np.float32)
    node = f'GridSample<mode="{mode}", padding_mode="{padding}", align_corners={aligned}>(x, u)'
    made = of_parts("float[n, c, h, w] x, float[n, p, q, 2] u", f"y = {node}")
    inputs = ["x"] if mode == "nearest" else ["x", "u"]
    y, arrives, found = output_and_gradients(made, {"x": x, "u": grid}, inputs)
    given = [torch.tensor(v, requires_grad=True) for v in (x, grid)]
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    expected = torch.nn.functional.grid_sample(*given, name, padding, bool(aligned))
    np.testing.assert_allclose(y, expected.detach(), atol=1e-5)
    expected.backward(torch.tensor(arrives, dtype=torch.float32))
    for a, b in zip(found, given, strict=False):
        np.testing.assert_allclose(a, b.grad, rtol=1e-4, atol=2e-4)


def test_nearest_follows_the_runtime_where_places_are_halfway():
    places = np.array([-1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5])
    grid = np.stack([(2 * places + 1) / 4 - 1, 0 * places], axis=-1)[None, None].astype(np.float32)
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 4)).astype(np.float32)
    node = 'y = GridSample<mode="nearest", padding_mode="reflection">(x, u)'
    made = of_parts("float[n, c, h, w] x, float[n, p, q, 2] u", node)
    y, arrives, (dx,) = output_and_gradients(made, {"x": x, "u": grid}, ["x"])
    np.testing.assert_allclose(np.vdot(y, arrives), np.vdot(x, dx), rtol=1e-5)  # y is linear in x


ANTIALIASED = {"antialias": 1, "exclude_outside": 1}
RESIZES = [
    ("linear", {}, {"mode": "bilinear"}),
    ("linear", {"coordinate_transformation_mode": "align_corners"}, {"align_corners": True}),
    ("linear", ANTIALIASED, {"antialias": True}),
    ("cubic", {}, {"mode": "bicubic"}),
    ("cubic", ANTIALIASED | {"cubic_coeff_a": -0.5}, {"mode": "bicubic", "antialias": True}),
]


@pytest.mark.parametrize(("mode", "attributes", "options"), RESIZES)
@pytest.mark.parametrize("sizes", [(7, 9), (3, 2), (1, 1)])
def test_resize_is_that_of_torch(mode, attributes, options, sizes):
    torch = pytest.importorskip("torch")
    said = {"mode": mode} | attributes
    text = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in said.items())
    made = of_parts("float[n, c, h, w] x, int64[4] s", f"y = Resize<{text}>(x, , , s)")
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype(np.float32)
    y, arrives, (dx,) = output_and_gradients(made, {"x": x, "s": np.array([2, 3, *sizes])}, ["x"])
    given = torch.tensor(x, requires_grad=True)
    options = {"mode": "bilinear"} | options
    expected = torch.nn.functional.interpolate(given, size=sizes, **options)
    np.testing.assert_allclose(y, expected.detach(), atol=1e-5)
    expected.backward(torch.tensor(arrives, dtype=torch.float32))
    np.testing.assert_allclose(dx, given.grad, atol=1e-4)


def test_resize_by_whole_numbers_needs_no_matrix():
    said = 'nearest_mode="floor", coordinate_transformation_mode="asymmetric"'
    made = of_parts(
        "float[n, c, h, w] x", f"y = Resize<{said}>(x, , s)", 20, "float[4] s={1,1,2,3}"
    )
    operators = {n.op_type for n in onnx_derivative(made).graph.node}
    assert "ReduceSum" in operators
    assert "MatMul" not in operators


@pytest.mark.parametrize(
    ("opset", "node", "scales"),
    [
        (7, 'Upsample<mode="linear", scales=[1.0, 1.0, 2.0, 3.0]>(x)', ""),
        (7, "Upsample<scales=[1.0, 1.0, 2.5, 3.0]>(x)", ""),
        (9, 'Upsample<mode="linear">(x, s)', "float[4] s={1, 1, 2, 3}"),
        (9, "Upsample(x, s)", "float[4] s={1, 1, 1.6, 2.5}"),
        (10, 'Resize<mode="linear">(x, s)', "float[4] s={1, 1, 1.5, 0.6}"),
        (10, "Resize(x, s)", "float[4] s={1, 1, 1.5, 2.5}"),
        (10, "Resize(x, s)", "float[4] s={1, 1, 0.5, 0.3}"),
    ],
)
def test_resize_before_opset_11_keeps_its_meaning(opset, node, scales):
    made = of_parts("float[1, 2, 6, 7] x", f"y = {node}", opset, scales)
    feed = {"x": np.random.default_rng(0).standard_normal((1, 2, 6, 7)).astype(np.float32)}
    np.testing.assert_allclose(
        run_in_dtype(to_proto(prepare(made)), feed)[0], run_in_dtype(made, feed)[0], rtol=1e-5
    )
    report = check_gradient(made, feed=feed)
    assert report.ok, str(report)


def test_resize_before_opset_11_that_both_grows_and_shrinks_is_refused():
    scales = "float[4] s={1, 1, 1.5, 0.6}"
    with pytest.raises(ModelError, match=naming("nearest", "scales")):
        prepare(of_parts("float[1, 2, 6, 7] x", "y = Resize(x, s)", 10, scales))


def test_scales_are_no_weights():
    made = of_parts("float[n, c, h, w] x", "y = Resize(x, , s)", 20, "float[4] s={1, 1, 2, 3}")
    assert not any(site.default for site in constant_refs(made))


def test_scales_put_together_are_no_weights():
    """As PyTorch exports `nn.Upsample` without folding constants."""
    body = """a = Constant<value_floats=[1.0, 1.0]>()  b = Constant<value_floats=[2.0, 1.5]>()
        c = Concat<axis=0>(a, b)  s = Identity(c)  z = Mul(x, w)  y = Resize<mode="linear">(z, , s)
    """
    made = of_parts("float[n, 2, 6, 7] x", body, 20, "float[7] w={1, 2, 3, 4, 5, 6, 7}")
    assert [site.name for site in constant_refs(made) if site.default] == ["w"]
    assert [y.name for y in onnx_derivative(made).graph.output] == ["x_grad", "w_grad"]
    body = body.replace("b = Constant<value_floats=[2.0, 1.5]>()", "")
    taken = of_parts(
        "float[n, 2, 6, 7] x, float[2] b", body, 20, "float[7] w={1, 2, 3, 4, 5, 6, 7}"
    )
    assert [y.name for y in onnx_derivative(taken, []).graph.output] == ["x_grad"]


@pytest.mark.parametrize(
    ("attributes", "inputs", "refused"),
    [
        ('mode="linear"', "x, , s", "scales"),
        ('mode="linear", coordinate_transformation_mode="align_corners"', "x, , s", None),
        ('nearest_mode="floor"', "x, , s", None),
        ('mode="cubic", coordinate_transformation_mode="tf_crop_and_resize"', "x, r, s", "roi"),
        ('coordinate_transformation_mode="tf_crop_and_resize"', "x, r, s", None),
    ],
)
def test_gradients_of_scales_and_roi_are_refused_where_there_are_any(attributes, inputs, refused):
    made = of_parts(
        "float[1, 1, 3, 4] x, float[8] r, float[4] s", f"y = Resize<{attributes}>({inputs})"
    )
    error, what = NoGradientRule, f"the gradient of its {refused} is not covered"
    if refused is None:
        error, what = ValueError, "the gradient is zero everywhere"
    with pytest.raises(error, match=what):
        onnx_derivative(made, inputs=["x", "r", "s"])


def test_col2im_of_unknown_rank_is_refused():
    made = of_parts("float[n, c, l] x, int64[m] i, int64[m] b", "y = Col2Im(x, i, b)")
    with pytest.raises(NoGradientRule, match=naming("Col2Im", "rank")):
        onnx_derivative(made, inputs=["x"])


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_no_regions(mode):
    body = f'y = RoiAlign<mode="{mode}", output_height=2>(x, r, b)'
    made = of_parts("float[1, 2, 4, 4] x, float[n, 4] r, int64[n] b", body)
    feed = {"x": np.ones((1, 2, 4, 4)), "r": np.ones((0, 4)), "b": np.zeros(0, np.int64)}
    _, _, (dx, dr) = output_and_gradients(made, feed, ["x", "r"])
    np.testing.assert_array_equal(dx, np.zeros((1, 2, 4, 4)))
    assert dr.shape == (0, 4)


def test_max_roi_pool_is_that_of_a_loop():
    """Regions that lie half outside, upside down and on halves that are rounded."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, 5, 6)).astype(np.float32)
    rois = np.array(
        [[0, 1, 1, 4, 3], [1, -2, 0.5, 7, 2.5], [0, 3, 3, 1, 1], [1, 9, 9, 9, 9]], np.float32
    )
    made = of_parts(
        "float[n, c, h, w] x, float[m, 5] r", "y = MaxRoiPool<pooled_shape=[2, 3]>(x, r)"
    )
    y, arrives, (dx,) = output_and_gradients(made, {"x": x, "r": rois}, ["x"])
    expected = np.zeros_like(x)
    for r, c, p, q in np.ndindex(y.shape):
        at = np.argwhere(x[int(rois[r, 0]), c] == y[r, c, p, q])
        if len(at):
            expected[int(rois[r, 0]), c, at[0][0], at[0][1]] += arrives[r, c, p, q]
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)


def test_gradient_models_load_without_warnings_of_shape():
    body = 'y = Resize<mode="linear">(x, , s)'
    made = of_parts("float[1, 2, 6, 7] x", body, 20, "float[4] s={1, 1, 2, 1.5}")
    session = ort.InferenceSession(
        onnx_derivative(made).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    assert session.get_outputs()[0].shape == [1, 2, 6, 7]


def test_scales_are_no_input_by_default():
    made = of_parts("float[1, 1, 4] x, float[3] s", 'y = Resize<mode = "linear">(x, , s)')
    assert [y.name for y in onnx_derivative(made).graph.output] == ["x_grad"]
    feed = {"x": np.arange(4.0).reshape(1, 1, 4), "s": np.array([1, 1, 1.7])}
    report = check_gradient(made, feed=feed)
    assert report.ok, str(report)
    with pytest.raises(NoGradientRule, match=naming("Resize", "scales")):
        onnx_derivative(made, inputs=["s"])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_region_in_half_precision(dtype):
    """y is linear in x, so that sum(x dx) is sum(y)."""
    nodes = (
        "y = Resize<mode = 'linear', coordinate_transformation_mode = 'tf_crop_and_resize'>"
        "(x, roi, , s)"
    ).replace("'", '"')
    made = parse_model(
        f"g (float16[1,1,4,4] x) => (float16[1,1,3,3] y) {{ {nodes} }}",
        opset=21, roi=np.array([0, 0, 0.4, 0.6, 1, 1, 0.6, 0.8], dtype), s=np.array([1, 1, 3, 3]),
    )  # fmt: skip
    x = np.random.default_rng(0).random((1, 1, 4, 4)).astype(np.float16)
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    found = run_named(onnx_derivative(made, [], ["x"], options), x=x)
    np.testing.assert_array_equal(found["y"], run(made, x=x)[0])
    np.testing.assert_allclose((found["x_grad"] * x).sum(), found["y"].sum(), rtol=1e-2)
