"""Pooling, unpooling, convolutions and Fourier transforms against PyTorch, kinks included."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad import DerivativeOptions, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.operators.shapes import dims
from tests.support.cases import typed
from tests.support.models import parse_model
from tests.support.packs import side_by_side
from tests.support.running import in_sweep, run

torch = pytest.importorskip("torch")
functional = torch.nn.functional
NORMAL = np.random.default_rng(0).standard_normal((2, 3, 6, 5, 7)).astype(np.float32)
CUBE = np.round(2 * NORMAL)  # many ties, and many zeros
LINE, PLANE = CUBE[0, :, :, 0], CUBE[0]


def gradient_for(
    body: str, *arrays: np.ndarray, g: np.ndarray, opset: int = 20
) -> list[np.ndarray]:
    """Return the gradient by the float inputs x0, x1, ... of a body that writes y."""
    given = {f"x{i}": a for i, a in enumerate(arrays)}
    kinds = {"f": "float", "i": "int64"}
    inputs = ", ".join(f"{typed(kinds[a.dtype.kind], a.shape)} {n}" for n, a in given.items())
    text = f"g ({inputs}) => (float y) {{ {body} }}"
    model = parse_model(text, opset=opset, output_shapes=False)
    return run(onnx_derivative(model), {**given, "y_grad": g})


def as_in_torch(body: str, function, *arrays: np.ndarray) -> None:
    """Compare the gradients of a body with those of a function of PyTorch."""
    tensors = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    y = function(*tensors)
    g = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(g))
    expected = [t.grad.numpy() for t in tensors if t.requires_grad]
    for found, wanted in zip(gradient_for(body, *arrays, g=g), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


POOLS = {
    "max_pool1d": ("MaxPool<kernel_shape=[3], strides=[2], pads=[1, 1], dilations=[2]>", LINE),
    "max_pool2d": ("MaxPool<kernel_shape=[3, 2], strides=[2, 1], ceil_mode=1>", PLANE),
    "max_pool3d": ("MaxPool<kernel_shape=[2, 2, 2], strides=[1, 2, 2]>", CUBE),
    "avg_pool1d": ("AveragePool<kernel_shape=[3], strides=[2], pads=[1, 1], ceil_mode=1>", LINE),
    "avg_pool3d": ("AveragePool<kernel_shape=[2, 3, 2], strides=[2, 1, 3], ceil_mode=1>", CUBE),
}
OPTIONS = {
    "max_pool1d": {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
    "max_pool2d": {"kernel_size": (3, 2), "stride": (2, 1), "ceil_mode": True},
    "max_pool3d": {"kernel_size": 2, "stride": (1, 2, 2)},
    "avg_pool1d": {
        "kernel_size": 3,
        "stride": 2,
        "padding": 1,
        "ceil_mode": True,
        "count_include_pad": False,
    },
    "avg_pool3d": {"kernel_size": (2, 3, 2), "stride": (2, 1, 3), "ceil_mode": True},
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_with_ties_as_torch(name):
    node, x = POOLS[name]
    as_in_torch(f"y = {node}(x0)", lambda t: getattr(functional, name)(t, **OPTIONS[name]), x)


@pytest.mark.parametrize(
    "kernel", [(3,), (64,), (2, 3), (4, 1), (1, 7), (2, 3, 2)], ids=lambda kernel: str(list(kernel))
)
def test_average_of_windows_side_by_side_as_torch(kernel):
    x = np.random.default_rng(0).standard_normal((2, 3, *(5 * k for k in kernel)))
    name = f"avg_pool{len(kernel)}d"
    node = f"AveragePool<kernel_shape={list(kernel)}, strides={list(kernel)}>"
    as_in_torch(f"y = {node}(x0)", lambda t: getattr(functional, name)(t, kernel), x.astype("f4"))


@pytest.mark.parametrize("x", [LINE, PLANE, CUBE], ids=["line", "plane", "space"])
def test_global_max_as_torch(x):
    axes = tuple(range(2, x.ndim))
    as_in_torch("y = GlobalMaxPool(x0)", lambda t: t.amax(axes, keepdim=True), x)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool_as_torch(p):
    node = f"LpPool<p={p}, kernel_shape=[2, 3], strides=[2, 2]>"
    as_in_torch(f"y = {node}(x0)", lambda t: functional.lp_pool2d(t.abs(), p, (2, 3), 2), NORMAL[0])


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(
    "node", ["LpPool<kernel_shape=[2], strides=[2], p={}>", "GlobalLpPool<p={}>"]
)
def test_norm_zero_has_gradient_zero(node, p):
    x = np.zeros((1, 2, 4), np.float32)
    x[0, 1] = 1, -2, 0, 0
    as_torch_norm = torch.tensor(x, requires_grad=True)
    parts = as_torch_norm.reshape(1, 2, -1, 2) if "GlobalLp" not in node else as_torch_norm
    y = torch.linalg.vector_norm(parts, p, dim=-1, keepdim="GlobalLp" in node)
    y.sum().backward()
    (found,) = gradient_for(f"y = {node.format(p)}(x0)", x, g=np.ones(y.shape, np.float32))
    np.testing.assert_allclose(found, as_torch_norm.grad.numpy(), rtol=1e-6)


def test_maximum_of_minus_infinity_as_torch():
    x = np.full((1, 2, 4), -np.inf, np.float32)
    x[0, 0, 3] = 1
    for attributes in ("strides=[2]", "strides=[1]"):
        pool = f"MaxPool<kernel_shape=[2], {attributes}>"
        stride = int(attributes[-2])
        as_in_torch(f"y = {pool}(x0)", lambda t, s=stride: functional.max_pool1d(t, 2, s), x)


def test_windows_between_elements_have_no_gradient():
    x = np.ones((3, 2, 2, 2), np.float32)
    pool = "MaxPool<kernel_shape=[2, 2], dilations=[3, 3], pads=[1, 1, 1, 1]>"
    (found,) = gradient_for(f"y = {pool}(x0)", x, g=np.ones((3, 2, 1, 1), np.float32))
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("wide", [False, True])
def test_output_padding_of_a_stride_and_more_as_torch(wide):
    rng = np.random.default_rng(2)
    x, w = (
        rng.standard_normal(s).astype(np.float32) for s in ((2, 2, 4), (2, 3, 70 if wide else 2))
    )
    attributes = "strides=[2], dilations=[4], output_padding=[3], pads=[1, 1]"
    options = {"stride": 2, "dilation": 4, "output_padding": 3, "padding": 1}
    node = f"ConvTranspose<{attributes}>"
    as_in_torch(f"y = {node}(x0, x1)", lambda *t: functional.conv_transpose1d(*t, **options), x, w)


def test_unpool_as_torch():
    indices = np.array([[[[6, 8], [16, 19]]]])
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    shape = np.array([1, 1, 5, 5])
    g = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    tensor = torch.tensor(x, requires_grad=True)
    made = functional.max_unpool2d(tensor, torch.tensor(indices), 2, 2, output_size=(5, 5))
    made.backward(torch.tensor(g))
    node = "MaxUnpool<kernel_shape=[2, 2], strides=[2, 2]>"
    (found,) = gradient_for(f"y = {node}(x0, x1, x2)", x, indices, shape, g=g)
    np.testing.assert_array_equal(found, tensor.grad.numpy())


@pytest.mark.parametrize("n", [4, 5, 9])
def test_one_sided_transform_as_torch(n):
    def forward(t):
        return torch.view_as_real(torch.fft.rfft(t[..., 0], n))

    x = NORMAL[0, :, 0, :, :1]
    as_in_torch(f"n = Constant<value_int={n}>()  y = DFT<onesided=1>(x0, n)", forward, x)


# where bins are not n // 2 + 1 onnxruntime's forward is wrong: the gradient is the standard's
@pytest.mark.parametrize(("n", "bins"), [(4, 3), (5, 3), (9, 5), (4, 5), (9, 3), (8, 3)])
def test_one_sided_inverse_as_torch(n, bins):
    def inverse(t):
        return torch.fft.irfft(torch.view_as_complex(t), n)[..., None]

    x = np.ascontiguousarray(NORMAL[0, :, 0, :bins, :2])
    as_in_torch(f"n = Constant<value_int={n}>()  y = DFT<onesided=1, inverse=1>(x0, n)", inverse, x)


def test_stft_as_torch():
    def stft(x, w):
        options = {"center": False, "return_complex": True}
        made = torch.stft(x[..., 0], 6, hop_length=4, window=w, **options)
        return torch.view_as_real(made).swapaxes(1, 2)

    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 21, 1), (6,)))
    as_in_torch("s = Constant<value_int=4>()  y = STFT(x0, s, x1)", stft, x, w)


def model_of_lengths(x, w, s):
    """Return a model whose lengths onnx infers wrongly where they follow from the nodes alone."""
    text = f"g (float{list(x)} x, float{list(w)} w) => (float y) {{ {s} }}"
    return parse_model(text, output_shapes=False)


WRONGLY_INFERRED = {
    "windows that start beyond": (
        (1, 2, 5),
        (3, 2, 1),
        "p = AveragePool<kernel_shape=[2], strides=[3], ceil_mode=1, pads=[1, 1]>(x)  "
        "q = Conv(p, w)  y = LpPool<kernel_shape=[1], strides=[3], ceil_mode=1>(q)",
    ),
    "one that starts beyond along one axis": (
        (1, 1, 6, 8),
        (1, 1, 1, 1),
        "p = MaxPool<kernel_shape=[3, 1], strides=[3, 2], pads=[2, 0, 0, 0], ceil_mode=1>(x)  "
        "q = Mul(p, p)  y = Conv(q, w)",
    ),
    "auto_pad and output_padding": (
        (1, 2, 3),
        (2, 1, 3),
        'p = ConvTranspose<auto_pad="SAME_UPPER", strides=[2], output_padding=[1]>(x, w)  '
        "y = Mul(p, p)",
    ),
    "one-sided by default": (
        (2, 9, 1),
        (4,),
        "s = Constant<value_int=2>()  p = STFT(x, s, w)  y = Mul(p, p)",
    ),
}


@pytest.mark.parametrize("name", WRONGLY_INFERRED)
@pytest.mark.parametrize("order", [1, in_sweep(2)])
def test_lengths_that_onnx_infers_wrongly(name, order):
    assert check_gradient(model_of_lengths(*WRONGLY_INFERRED[name]), order=order).ok


def drawn_windows() -> list:
    """Return windows of two axes: lengths, kernels, strides, dilations and padding."""
    rng = np.random.default_rng(0)
    drawn = []
    while len(drawn) < 60:
        lengths, kernel, strides = (rng.integers(*ends, 2) for ends in ((4, 10), (1, 4), (1, 5)))
        dilations = rng.integers(1, 3, 2) if len(drawn) % 2 else np.ones(2, int)
        width = (kernel - 1) * dilations + 1
        pads = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
        if (width <= lengths).all():
            drawn.append([v.tolist() for v in (lengths, kernel, strides, dilations)] + [pads])
    return drawn


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool", "LpPool"])
def test_lengths_of_ceil_mode_are_those_of_onnxruntime(operator):
    """The gradient has a mean behind the pool, and uses its length."""
    models, feed, expected = [], {}, []
    for lengths, kernel, strides, dilations, pads in drawn_windows():
        node = f"""{operator}<kernel_shape={kernel}, strides={strides}, dilations={dilations},
            pads={pads}, ceil_mode=1>(x)"""
        model = parse_model(
            f"""g (float[1, 2, {lengths[0]}, {lengths[1]}] x) => (float[a, b, c, d] y)
            {{ p = {node}  m = ReduceMean<keepdims=1>(p)  q = Sub(p, m)  y = Mul(q, q) }}""",
            opset=19,
        )
        x = np.random.default_rng(0).standard_normal((1, 2, *lengths)).astype(np.float32)
        try:
            expected += run(model, x=x)
        except ort.capi.onnxruntime_pybind11_state.Fail:
            continue  # onnxruntime refuses the pool
        feed[f"r{len(models)}_x"] = x
        models.append(model)
    assert len(expected) > 40
    model = side_by_side(models)
    prepared = prepare(model)
    assert [dims(y) for y in prepared.graph.outputs] == [y.shape for y in expected]
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    found = run(onnx_derivative(model, options=options), feed)
    for again, y in zip(found[len(expected) :], expected, strict=True):
        np.testing.assert_allclose(again, y, rtol=1e-5)
    for dx, x in zip(found[: len(expected)], feed.values(), strict=True):
        assert dx.shape == x.shape
