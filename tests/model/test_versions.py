"""Models of any opset: raised to what rules know, or lowered to what onnxruntime loads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxgrad import DerivativeOptions, ModelError, add_loss_output, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal import prepare
from onnxgrad.model.opsets import newest_opset
from onnxgrad.operators import add_facts
from tests.support.cases import run_in_dtype
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, run_named

ONES = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs


def model_of_opset(body: str, opset: int) -> onnx.ModelProto:
    """Return the model of nodes from x to y."""
    text = f"g (float[2, 3] x) => (float[2, 3] y) {{ {body} }}"
    return parse_model(text, opset=opset, ir_version=10)


def stated_opset(made: onnx.ModelProto) -> int:
    return next(o.version for o in made.opset_import if not o.domain)


@pytest.mark.parametrize(("given", "made"), [(9, 18), (18, 18), (22, 22), (28, newest_opset())])
def test_opset_of_the_gradient(given, made):
    assert stated_opset(onnx_derivative(model_of_opset("y = Relu(x)", given))) == made


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_opset_that_is_stated_twice(domain):
    """As skl2onnx does for linear regressions: the result is of one, which its nodes are of."""
    given = model_of_opset("h = ReduceMax<axes=[1]>(x)  y = Add(x, h)", 13)
    given.opset_import.add(domain=domain, version=13)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for made in (onnx_derivative(given, options=ONES), add_loss_output(given)):
        assert [(o.domain, o.version) for o in made.opset_import] == [("", 18)]
    dx, y = run_in_dtype(onnx_derivative(given, options=ONES), {"x": x})
    assert np.array_equal(y, x + x.max(axis=1, keepdims=True))
    assert np.array_equal(dx, [[1, 1, 4], [1, 1, 4]])


@pytest.mark.parametrize(
    "body",
    [
        "y = SwiGLU<alpha=0.5>(x, x)",
        "y = SwiGLU(x, x)",
        "y = Celu<alpha=2.0>(x)",
        "y = Swish<alpha=0.7>(x)",
        "h = Exp(x)  y = Mod(x, h)",
        "h = Cast<to=11>(x)  y = Cast<to=1>(h)",
        pytest.param(  # states a wrong shape of y, which only a run corrects
            "c = Constant<value = bool[3] {1, 0, 1}>()  y = Compress<axis=1>(x, c)",
            marks=pytest.mark.newest,
        ),
        'y = Einsum<equation = "ij,ij->ij">(x, x)',
        "h = Exp(x)  y = ReduceLogSum(h)",
        "y = ReduceLogSumExp(x)",
        "n = Constant<value_ints=[2, 1, 2]>()  y = ReverseSequence(x, n)",
        "u = Concat<axis=0>(x, x)  s = Constant<value_ints=[1, 4, 1, 3]>()  r = Reshape(u, s)"
        "  y = DepthToSpace<blocksize=2>(r)",
        "u = Concat<axis=0>(x, x)  s = Constant<value_ints=[1, 1, 2, 6]>()  r = Reshape(u, s)"
        "  y = SpaceToDepth<blocksize=2>(r)",
        "i = Constant<value_ints=[0, 2]>()  d = Constant<value_int=3>()"
        "  a = Constant<value_ints=[1]>()  v = ReduceSum<keepdims=0>(x, a)  y = OneHot(i, d, v)",
        "s = ReduceMean<keepdims=0>(x)  h = Constant<value_float=2.5>()  e = Add(s, h)"
        "  d = Constant<value_float=1.0>()  y = Range(s, e, d)",
    ],
)
def test_newest_operators(body):
    """Not all runtimes have their kernels; what replaces them runs."""
    made = model_of_opset(body, 28)
    report = check_gradient(made, order=2)
    assert report.ok, str(report)
    gradient = onnx_derivative(made, options=ONES)
    assert stated_opset(gradient) == newest_opset()
    dx, y = run_in_dtype(gradient, {"x": np.full((2, 3), 0.3)})
    assert np.isfinite(dx).all()
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", ["Optional", "DequantizeLinear"])
def test_newest_operators_without_kernel(name):
    """onnxruntime 1.32 loads opset 28, but lacks these kernels: the gradient is of an older one."""
    bodies = {
        "Optional": "o = Optional(x)  h = OptionalHasElement(o)  f = Cast<to=1>(h)"
        "  e = OptionalGetElement(o)  m = Mul(e, e)  y = Mul(m, f)",
        "DequantizeLinear": "q = Constant<value = int8[2, 3] {1, -5, 9, 0, 127, -128}>()"
        "  z = Constant<value = int8[3] {3, 0, -4}>()  a = Constant<value_ints=[0]>()"
        "  s = ReduceSumSquare<keepdims=0>(x, a)  d = DequantizeLinear<axis=1>(q, s, z)"
        "  y = Mul(d, x)",
    }
    x = np.array([[0.5, -1.5, 2.0], [1.0, 0.25, -0.5]], np.float32)
    dx, y = run_in_dtype(onnx_derivative(model_of_opset(bodies[name], 28), options=ONES), {"x": x})
    if name == "Optional":
        expected = x * x, 2 * x
    else:
        levels = np.array([[-2, -5, 13], [-3, 127, -124]])
        scales, products = (x * x).sum(0), levels * x
        expected = scales * products, scales * levels + 2 * x * products.sum(0)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5)
    np.testing.assert_allclose(dx, expected[1], rtol=1e-5)


@pytest.mark.parametrize("body", ["y = Celu(x)", "y = Einsum<equation = 'ij,ij->ij'>(x, x)"])
@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
@pytest.mark.parametrize("newest", [26, pytest.param(None, marks=pytest.mark.newest)])
def test_types_that_an_opset_has_added(monkeypatch, newest, dtype, body):
    """A runtime of an older opset gets other operators where it lacks the type.

    Opset 28 needs a newer runtime than the oldest.
    """
    if newest is not None:
        monkeypatch.setattr(prepare, "newest_opset", lambda: newest)
    text = f"g ({dtype}[2, 3] x) => ({dtype}[2, 3] y) {{ {body} }}".replace("'", '"')
    gradient = onnx_derivative(parse_model(text, opset=28, ir_version=10), options=ONES)
    assert stated_opset(gradient) == (newest or newest_opset())
    if "Celu" in body:
        kept = newest is None or dtype == "float"
        assert ("Celu" in operator_names(gradient)) == kept
        if dtype == "double" and not kept:  # its body is Elu, which onnxruntime has in float32
            return
    kind = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    x = np.array([[-1.5, -0.5, 0.5], [1, 2, 3]], kind)
    named = run_named(gradient, x=x)
    y, dx = (np.minimum(np.expm1(x), x.clip(0)), np.minimum(np.exp(x), 1))
    y, dx = (np.where(x > 0, x, y), dx) if "Celu" in body else (x * x, 2 * x)
    np.testing.assert_allclose(named["y"], y, rtol=1e-2)
    np.testing.assert_allclose(named["x_grad"], dx, rtol=1e-2)


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_operators_of_the_runtime_need_no_import(opset):
    """onnxruntime runs such models, and its optimizer for transformers makes them in memory."""
    made = model_of_opset(
        "h = com.microsoft.FusedMatMul<transB = 1>(x, x)  y = MatMul(h, h)", opset
    )
    made.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2
    del made.opset_import[1:]
    assert [o.domain for o in made.opset_import] == [""]
    named = run_named(made, x=(x := np.float32([[1, 2], [3, 4]])))
    found = run_named(onnx_derivative(made, options=ONES), x=x)
    gram = x @ x.T
    np.testing.assert_array_equal(found["y"], named["y"])
    np.testing.assert_allclose(named["y"], gram @ gram)
    dh = np.ones((2, 2)) @ gram.T + gram.T @ np.ones((2, 2))
    np.testing.assert_allclose(found["x_grad"], (dh + dh.T) @ x)
    assert [o.domain for o in made.opset_import] == [""]


def test_an_operator_without_a_kernel_of_its_opset():
    """onnxruntime has quantization at opset 26, and at 28 not."""
    text = """g (float[2, 3] x) => (float[2, 3] y) {
        s = Constant<value = float {0.5}>()  q = QuantizeLinear(x, s)
        d = DequantizeLinear(q, s)  y = Mul(d, x) }"""
    gradient = onnx_derivative(parse_model(text, opset=28, ir_version=10), options=ONES)
    x = np.float32([[0.1, 1.1, 2.1], [3.1, 4.1, 5.1]])
    assert np.isfinite(run_named(gradient, x=x)["x_grad"]).all()


def test_an_operator_of_another_meaning_keeps_its_opset():
    """Modes of GridSample have other names before opset 20; RoiAlign has no newer kernel."""
    text = """g (float[1, 1, 4, 4] x, float[1, 2, 2, 2] p, float[1, 4] r) => (float[1, 1, 2, 2] y)
        <int64[1] i = {0}> { s = GridSample(x, p)
        a = RoiAlign<output_height = 2, output_width = 2>(x, r, i)  y = Add(a, s) }"""
    made = [onnx_derivative(parse_model(text, opset=v, ir_version=10)) for v in (20, 21, 22)]
    assert list(map(stated_opset, made)) == [20, 21, 21]


def test_body_is_the_last_resort():
    """An operator with a rule stays as it is, although the specification has a body for it."""
    made = onnx_derivative(model_of_opset("y = Selu(x)", 22), options=ONES)
    assert "Selu" in {node.op_type for node in made.graph.node}


def test_body_with_a_loop():
    """The body of LinearAttention is a Scan over the tokens; its lowering takes another."""
    add_facts("", "LinearAttention", lowering=None)
    text = """<ir_version: 10, opset_import: ["": 27]> g (float[N, T, 4] q) => (float[N, T, 4] y) {
        y, s = LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(q, q, q) }"""
    feed = {"q": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    report = check_gradient(onnx.parser.parse_model(text), feed=feed, order=2)
    assert report.ok, str(report)


def test_scan_over_a_batch():
    text = """<ir_version: 4, opset_import: ["": 8]>
        g (float[2,3] s, float[2,4,3] x) => (float[2,3] y) {
        y = Scan<num_scan_inputs = 1, body = b (float[3] a, float[3] u) => (float[3] c) {
            c = Add(a, u) }>(, s, x) }"""
    with pytest.raises(ModelError, match=naming("Scan", "opset 8")):
        onnx_derivative(onnx.parser.parse_model(text))


@pytest.mark.parametrize("length", [1, 3])
def test_slopes_before_opset_7_are_of_channels(length):
    """Later they are of the last axis, which the converter of onnx forgets."""
    made = onnx.parser.parse_model(f"""<ir_version: 3, opset_import: ["": 6]>
        g (float[2, 3, 3] x, float[{length}] s) => (float[2, 3, 3] y) {{ y = PRelu(x, s) }}""")
    x = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32)
    s = np.array([1, 10, 100][:length], np.float32)
    dx, ds, y = run_in_dtype(onnx_derivative(made, options=ONES), {"x": x, "s": s})
    slopes = np.broadcast_to(s[:, None], (3, 1))
    np.testing.assert_allclose(y, np.where(x > 0, x, slopes * x))
    np.testing.assert_allclose(dx, np.where(x > 0, 1, slopes * np.ones_like(x)))
    np.testing.assert_allclose(
        ds, np.minimum(x, 0).sum(axis=(0, 2) if length > 1 else None).reshape(length), rtol=1e-5
    )


def test_slopes_before_opset_7_need_a_rank():
    made = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 6]>
        g (float[] x, float[3] s) => (float[] y) { y = PRelu(x, s) }""")
    made.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match=naming("PRelu", "shape", "'x'")):
        onnx_derivative(made)


IN_BRANCH = """g (float[1,1,H,L] x, bool c) => (float[1,1,P,Q] y) {{ y = If(c) <
    then_branch = t () => (p) {{ {body} }}, else_branch = e () => (q) {{ q = Exp(x) }}> }}"""
SCALES = "s = Constant<value = float[4] {1.0, 1.0, 1.5, 2.0}>() "


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ('p = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 3.0]>(x)', 7),
        (SCALES + 'p = Upsample<mode = "linear">(x, s)', 9),
        (SCALES + 'p = Upsample<mode = "nearest">(x, s)', 9),
        (SCALES + 'p = Resize<mode = "linear">(x, s)', 10),
        (SCALES.replace("1.5, 2.0", "0.7, 0.4") + 'p = Resize<mode = "nearest">(x, s)', 10),
    ],
)
def test_places_before_opset_11_in_branches(body, opset):
    made = parse_model(IN_BRANCH.format(body=body), opset=opset, ir_version=6)
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 6)).astype(np.float32)
    report = check_gradient(made, feed={"x": x, "c": np.array(True)})
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("body", "opset", "match"),
    [
        ("p = PRelu(x, x)", 6, "PRelu .*in the subgraph 't' before opset 7"),
        ("p = Scan<num_scan_inputs = 1, body = b (a) => (z) { z = Neg(a) }>(, x)", 8, "opset 8"),
    ],
)
def test_what_is_not_converted_in_branches_is_refused(body, opset, match):
    made = parse_model(IN_BRANCH.format(body=body), opset=opset, ir_version=6)
    with pytest.raises(ModelError, match=match):
        onnx_derivative(made)


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
@pytest.mark.parametrize("branch", [in_sweep(False), True])
@pytest.mark.parametrize(
    "node", ["Clip<max = 0.5>(x)", "Clip<min = 0.0>(x)", "Pad<pads = [1, 0, 0, 0], value = 0.5>(x)"]
)
def test_numbers_that_were_attributes_have_the_dtype_of_x(node, branch, dtype):
    """The converter writes them in float32; onnxruntime has no such Clip of float64 to compare."""
    body = f"y = {node}"
    if branch:
        body = (
            "z = ReduceSum<keepdims = 0>(x)  c = Greater(z, z)  y = If<then_branch = t () => "
            f"({dtype}[M, 3] p) {{ p = Neg(x) }}, else_branch = e () => ({dtype}[M, 3] q) {{ "
            f"q = {node} }}>(c)"
        )
    made = parse_model(
        f"g ({dtype}[2, 3] x) => ({dtype}[M, 3] y) {{ {body} }}", opset=9, ir_version=6
    )
    x = np.float32([[-1, 0.25, 2], [0.125, 0.75, -3]])
    y = np.pad(x, [(1, 0), (0, 0)], constant_values=0.5) if "Pad" in node else x
    lowest, most = 0.0 if "min" in node else -np.inf, 0.5 if "max" in node else np.inf
    kind = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    named = run_named(onnx_derivative(made, options=ONES), x=x.astype(kind))
    dx, found = named["x_grad"], named["y"]
    assert found.dtype == dx.dtype == kind
    np.testing.assert_array_equal(found, np.clip(y, lowest, most))
    np.testing.assert_array_equal(dx, (lowest <= x) & (x <= most))
