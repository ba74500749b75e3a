"""Einsum, cumulative sums and products, determinants, and slopes near the edge of a domain."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.operators.shapes import dims
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run


def of_text(text: str, opset: int = 20, known: bool = True) -> onnx.ModelProto:
    """Return the model of a text, of whose inputs the shapes are `known`."""
    made = parse_model(text, opset=opset, output_shapes=False)
    for x in () if known else made.graph.input:
        x.type.tensor_type.ClearField("shape")
    return made


def slopes_of(model: onnx.ModelProto, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the gradient by each input, for ones arriving."""
    options = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    names = [x.name for x in model.graph.input]
    made = onnx_derivative(model, options=options)
    return run(made, dict(zip(names, arrays, strict=True)))[:-1]


# -- Einsum -------------------------------------------------------------------------------------

BROADCAST = 'e = Einsum<equation="...i,...i->...i">(x, y)'


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ("1,n", "m,n", ("m", "n")),
        ("1,2,3", "n,2,3", ("n", 2, 3)),
        ("n,3", "4,3", (4, 3)),
        ("4,n", "4,n", (4, "n")),
    ],
)
def test_an_einsum_that_broadcasts_has_the_shape_that_onnx_gets_wrong(x, y, expected):
    body = f'{BROADCAST}  f = Exp(e)  z = Einsum<equation="...i->i...">(f)'
    graph = prepare(of_text(f"g (float[{x}] x, float[{y}] y) => (float z) {{ {body} }}")).graph
    e, f, z = (node.outputs[0] for node in graph)
    assert dims(e) == dims(f) == expected
    assert dims(z) == (expected[-1], *expected[:-1])
    assert {node.domain for node in graph} == {""}


def test_two_symbols_may_broadcast():
    model = prepare(of_text(f"g (float[a,n] x, float[b,n] y) => (float e) {{ {BROADCAST} }}"))
    first, last = dims(model.graph.outputs[0])
    assert first not in ("a", "b")
    assert last == "n"


def test_what_follows_an_einsum_that_broadcasts():
    body = f'{BROADCAST}  f = Exp(e)  z = Einsum<equation="...i,...j->...ij">(f, y)'
    made = of_text(f"g (float[1,n] x, float[m,n] y) => (float z) {{ {body} }}")
    feed = {"x": np.full((1, 3), 0.3), "y": np.random.default_rng(0).standard_normal((4, 3))}
    report = check_gradient(made, feed=feed, order=2)
    assert report.ok, str(report)


def test_an_einsum_whose_ellipsis_is_summed_is_refused():
    made = of_text('g (float[2,3] x) => (float y) { y = Einsum<equation="...i->i">(x) }')
    with pytest.raises(NoGradientRule, match=naming("Einsum", "ellipsis")):
        onnx_derivative(made)


# -- against torch ------------------------------------------------------------------------------

ROWS = [[1, 2, 3, 4], [0, 2, 3, 4], [1, 0, 3, 4], [1, 2, 3, 0], [0, 2, 0, 4], [1, 0, 0, 0]]


@pytest.mark.parametrize("axis", [0, 1])
def test_cumulative_product_with_zeros(axis):
    torch = pytest.importorskip("torch")
    x = torch.tensor(ROWS, dtype=torch.float32, requires_grad=True)
    x.cumprod(axis).sum().backward()
    body = f"a = Constant<value_int={axis}>()  y = CumProd(x, a)"
    [dx] = slopes_of(of_text(f"g (float[n,m] x) => (float y) {{ {body} }}", 26), np.float32(ROWS))
    np.testing.assert_allclose(dx, x.grad.numpy())


def test_long_cumulative_product():
    """A row of zeros and one whose product underflows, in float32."""
    torch = pytest.importorskip("torch")
    values = np.stack([np.full(300, 0.5), np.zeros(300), np.full(300, -1.01)]).astype(np.float32)
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    x.cumprod(1).sum().backward()
    body = "a = Constant<value_int=1>()  y = CumProd(x, a)"
    [dx] = slopes_of(of_text(f"g (float[n,m] x) => (float y) {{ {body} }}", 26), values)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_determinants_of_singular_matrices(n, known):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(n)
    of_rank = [rng.standard_normal((n, r)) @ rng.standard_normal((r, n)) for r in range(n + 1)]
    values = np.float32(of_rank)
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    cofactors = torch.stack([_cofactors(torch, m) for m in x.detach()])
    made = of_text("g (float[b,n,n] x) => (float y) { y = Det(x) }", known=known)
    [dx] = slopes_of(made, values)
    np.testing.assert_allclose(dx, cofactors.numpy(), rtol=1e-4, atol=1e-4)


def _cofactors(torch, x):
    """Return the signed minors of a matrix: the gradient that PyTorch documents."""
    n = len(x)

    def minor(i, j):
        rows, columns = ([k for k in range(n) if k != at] for at in (i, j))
        return (-1) ** (i + j) * torch.linalg.det(x[rows][:, columns])

    return torch.stack([torch.stack([minor(i, j) for j in range(n)]) for i in range(n)])


@pytest.mark.parametrize("fmod", [0, 1])
def test_modulus(fmod):
    torch = pytest.importorskip("torch")
    a, b = np.float32([5.5, -5.5, 5.5, -5.5, 0.5, 1e6]), np.float32([2, 2, -2, -2, 3, 0.7])
    made = of_text(f"g (float[n] a, float[n] b) => (float y) {{ y = Mod<fmod={fmod}>(a, b) }}", 26)
    ta, tb = (torch.tensor(v, requires_grad=True) for v in (a, b))
    (torch.fmod if fmod else torch.remainder)(ta, tb).sum().backward()
    for found, t in zip(slopes_of(made, a, b), (ta, tb), strict=True):
        np.testing.assert_allclose(found, t.grad.numpy())


NEAR, BIG = 1 - 2**-24, 1e30
EDGES = [
    ("Asin", lambda t, x: t.asin(x), [NEAR, -NEAR, 0.999]),
    ("Acos", lambda t, x: t.acos(x), [NEAR, -NEAR, 0.999]),
    ("Atanh", lambda t, x: t.atanh(x), [NEAR, -NEAR, 0.999]),
    ("Acosh", lambda t, x: t.acosh(x), [1 + 2**-23, 1.001, BIG]),
    ("Asinh", lambda t, x: t.asinh(x), [BIG, -BIG, 1e-30]),
    ("Atan", lambda t, x: t.atan(x), [BIG, -BIG, 1e-30]),
    ("Log", lambda t, x: t.log(x), [1.2e-38, BIG]),
    ("Sqrt", lambda t, x: t.sqrt(x), [1.2e-38, BIG]),
    ("Tanh", lambda t, x: t.tanh(x), [BIG, -BIG]),
    ("Sigmoid", lambda t, x: t.sigmoid(x), [BIG, -BIG]),
    ("Erf", lambda t, x: t.erf(x), [BIG, -BIG]),
    ("Softsign", lambda t, x: t.nn.functional.softsign(x), [BIG, -BIG]),
    ("Softplus", lambda t, x: t.nn.functional.softplus(x), [BIG, -BIG]),
    ("Mish", lambda t, x: t.nn.functional.mish(x), [BIG, -BIG, 50, -80]),
    ("HardSwish", lambda t, x: t.nn.functional.hardswish(x), [BIG, -BIG]),
    ("Gelu", lambda t, x: t.nn.functional.gelu(x), [BIG, -BIG, 9, -9]),
    (
        'Gelu<approximate="tanh">',
        lambda t, x: t.nn.functional.gelu(x, approximate="tanh"),
        [300, -300, 9, -9, 12],
    ),
    ("Elu", lambda t, x: t.nn.functional.elu(x), [np.inf, BIG, -BIG]),
    ("Elu<alpha=-0.5>", lambda t, x: t.nn.functional.elu(x, -0.5), [np.inf, BIG, -BIG]),
    ("Selu", lambda t, x: t.nn.functional.selu(x), [np.inf, BIG, -BIG]),
    ("Celu", lambda t, x: t.nn.functional.celu(x), [np.inf, BIG, -BIG]),
]


@pytest.mark.parametrize(("node", "function", "points"), EDGES, ids=[e[0] for e in EDGES])
def test_slopes_at_the_edge_of_the_domain(node, function, points):
    torch = pytest.importorskip("torch")
    points = np.float32(points)
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    function(torch, x).sum().backward()
    [dx] = slopes_of(of_text(f"g (float[n] x) => (float y) {{ y = {node}(x) }}"), points)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=2e-6, atol=1e-7)


def test_the_approximated_gelu_of_large_numbers():
    for dtype, large in (("float", 1e30), ("float16", 6e4), ("float16", 300)):
        model = of_text(f'g ({dtype}[n] x) => ({dtype} y) {{ y = Gelu<approximate="tanh">(x) }}')
        points = np.array([-large, large], np.float16 if dtype == "float16" else np.float32)
        np.testing.assert_array_equal(slopes_of(model, points)[0], [0, 1])


@pytest.mark.parametrize("opset", [24, 25, 26])
def test_swish_runs_at_every_opset(opset):
    points = np.float32([-3, 0, 2])
    [dx] = slopes_of(
        of_text("g (float[n] x) => (float y) { y = Swish<alpha=0.7>(x) }", opset), points
    )
    s = 1 / (1 + np.exp(-0.7 * points))
    np.testing.assert_allclose(dx, s + 0.7 * points * s * (1 - s), rtol=1e-6)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (3, 4), (4, 2)])
def test_matrix_product_of_operands_of_unknown_rank(ranks):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, 5, 4, 3)[-ranks[0] :]).astype(np.float32)
    b = rng.standard_normal((1, 5, 3, 2)[-ranks[1] :] if ranks[1] > 1 else (3,)).astype(np.float32)
    ta, tb = (torch.tensor(v, requires_grad=True) for v in (a, b))
    (ta @ tb).sum().backward()
    model = of_text("g (float[n] a, float[n] b) => (float y) { y = MatMul(a, b) }", known=False)
    for found, t in zip(slopes_of(model, a, b), (ta, tb), strict=True):
        np.testing.assert_allclose(found, t.grad.numpy(), rtol=1e-4, atol=1e-5)
