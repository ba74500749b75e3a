"""`vjp`, `jvp`, `hvp`, `jacobian`, `hessian`: against differences, PyTorch, and each other."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from onnxgrad import (
    NoGradientRule,
    add_loss_output,
    hessian,
    hvp,
    jacobian,
    jvp,
    onnx_derivative,
    rule,
    vjp,
)
from onnxgrad.reporting import warn_once
from tests.support.cases import row_feed, row_model
from tests.support.errors import naming
from tests.support.models import add_initializers, initializer_arrays, operator_names, parse_model
from tests.support.pages import code_of
from tests.support.running import in_sweep, run_named
from tests.support.signatures import input_names, output_names, output_shape
from tests.support.table import ROWS

RNG = np.random.default_rng(0)


def draw_normal(*sizes: int, dtype=np.float64) -> np.ndarray:
    """Return the next numbers of the file's generator."""
    return RNG.standard_normal(sizes).astype(dtype)


def wide_network(act: str = "Tanh", dtype: str = "double", batch="N") -> onnx.ModelProto:
    """Return a network of 4, 5 and 3 columns."""
    kind = np.float64 if dtype == "double" else np.float32 if dtype == "float" else np.float16
    sizes = {"w": (4, 5), "b": (5,), "v": (5, 3), "c": (3,)}
    return parse_model(
        f"""mlp ({dtype}[{batch},4] X) => ({dtype}[{batch},3] Y)
        {{ h = MatMul(X, w)  i = Add(h, b)  j = {act}(i)  k = MatMul(j, v)  Y = Add(k, c) }}""",
        **{name: draw_normal(*s).astype(kind) for name, s in sizes.items()},
    )


def two_by_two() -> onnx.ModelProto:
    """Y depends on A and B, Z on A only, and L holds integers."""
    return parse_model("""two (double[2,3] A, double[3] B, int64[1] I)
        => (double[2,3] Y, double[2] Z, int64[1] L)
        { e = Exp(B)  Y = Mul(A, e)  s = Mul(A, A)  one = Constant<value_ints=[1]>()
          Z = ReduceSum<keepdims=0>(s, one)  L = Neg(I) }""")


TWO = {"A": draw_normal(2, 3), "B": draw_normal(3), "I": np.int64([4])}
E = np.exp(TWO["B"])
MLP = wide_network()
X = draw_normal(6, 4)


def difference(made: onnx.ModelProto, values: dict, name: str, v: np.ndarray, output: str = "Y"):
    """Return the derivative of an output along `v`, by central differences."""
    h = 1e-5
    high, low = (run_named(made, values | {name: values[name] + s * v})[output] for s in (h, -h))
    return (high - low) / (2 * h)


def numeric(made: onnx.ModelProto, values: dict, name: str, output: str = "Y") -> np.ndarray:
    """Return the Jacobian by central differences."""
    x = values[name]
    columns = []
    for i in range(x.size):
        unit = np.zeros(x.size)
        unit[i] = 1
        columns.append(difference(made, values, name, unit.reshape(x.shape), output))
    y = columns[0]
    return np.stack(columns, -1).reshape(*y.shape, *x.shape)


close = np.testing.assert_allclose


# -- names, order, dtypes ---------------------------------------------------------------------


def test_names():
    two = two_by_two()
    assert input_names(vjp(two)) == ["A", "B", "I", "Y_grad", "Z_grad"]
    assert output_names(vjp(two)) == ["Y", "Z", "L", "A_grad", "B_grad"]
    assert input_names(jvp(two)) == ["A", "B", "I", "A_tangent", "B_tangent"]
    assert output_names(jvp(two)) == ["Y", "Z", "L", "Y_tangent", "Z_tangent"]
    assert input_names(hvp(two)) == ["A", "B", "I", "Y_grad", "Z_grad", "A_vector", "B_vector"]
    assert output_names(hvp(two)) == ["Y", "Z", "L", "A_grad", "B_grad", "A_hvp", "B_hvp"]
    assert input_names(jacobian(two)) == ["A", "B", "I"]
    blocks = [f"{y}_{x}_jacobian" for y in "YZ" for x in "AB"]
    assert output_names(jacobian(two)) == ["Y", "Z", "L", *blocks]
    assert output_names(jacobian(two, outputs=["Z"], inputs=["A"])) == ["Z", "Z_A_jacobian"]
    assert output_names(jvp(two, outputs=["Z", "Y"])) == ["Z", "Y", "Z_tangent", "Y_tangent"]
    loss = parse_model("""l (double[2] A, double[2] B) => (double L)
        { a = Mul(A, B)  L = ReduceSum<keepdims=0>(a) }""")
    assert input_names(hvp(loss)) == ["A", "B", "A_vector", "B_vector"]
    assert output_names(hessian(loss))[:3] == ["L", "A_grad", "B_grad"]
    assert output_names(hessian(loss))[3:] == [
        "A_hessian", "A_B_hessian", "B_A_hessian", "B_hessian"
    ]  # fmt: skip


def test_weights_are_inputs():
    assert input_names(jvp(MLP, ["v", "b"], [])) == ["X", "v", "b", "v_tangent", "b_tangent"]
    assert input_names(vjp(MLP, None)) == ["X", "w", "b", "v", "c", "Y_grad"]
    assert input_names(jacobian(MLP)) == ["X"]


def test_model_is_not_modified():
    before = MLP.SerializeToString()
    for make in (vjp, jvp, hvp, jacobian):
        make(MLP)
    assert MLP.SerializeToString() == before


def test_bytes_and_paths(tmp_path):
    onnx.save(MLP, tmp_path / "m.onnx")
    assert jvp(tmp_path / "m.onnx") == jvp(MLP.SerializeToString()) == jvp(MLP)


@pytest.mark.parametrize(("kind", "rtol"), [("float16", 5e-2), ("float", 1e-4)])
def test_other_dtypes(kind, rtol):
    made = wide_network(dtype=kind)
    dtype = initializer_arrays(made)["w"].dtype
    values = {"X": X.astype(dtype), "X_tangent": draw_normal(6, 4).astype(dtype)}
    double = wide_network()
    exact_weights = {k: w.astype(np.float64) for k, w in initializer_arrays(made).items()}
    del double.graph.initializer[:]
    add_initializers(double, exact_weights)
    exact = {k: v.astype(np.float64) for k, v in values.items()}
    for one in (jvp, jacobian):
        found, expected = run_named(one(made), values), run_named(one(double), exact)
        assert found
        for name in found:
            assert found[name].dtype == dtype
            close(found[name], expected[name], rtol=rtol, atol=rtol)


def test_shapes_are_stated():
    assert output_shape(jvp(MLP), "Y_tangent") == ["N", 3]
    assert output_shape(jacobian(MLP), "Y_X_jacobian") == ["N", 3, "N", 4]
    assert output_shape(jacobian(MLP, batched=True), "Y_X_jacobian") == ["N", 3, 4]


# -- vjp and jvp ------------------------------------------------------------------------------


def test_vjp_is_the_gradient():
    values = {"X": X, "Y_grad": draw_normal(6, 3)} | initializer_arrays(MLP)
    made, gradient = run_named(vjp(MLP, None), values), run_named(onnx_derivative(MLP), values)
    assert len(gradient) == 1 + len(initializer_arrays(MLP))
    for name in gradient:
        close(made[name], gradient[name])
    close(made["Y"], run_named(MLP, values)["Y"])


@pytest.mark.parametrize("name", ["X", "w", "b", "v", "c"])
def test_jvp_of_an_mlp(name):
    asked = ([], ["X"]) if name == "X" else ([name], [])
    values = {"X": X} | initializer_arrays(MLP)
    primal = vjp(MLP, *asked)  # whose inputs are the weights too
    v = draw_normal(*values[name].shape)
    found = run_named(jvp(MLP, *asked), values | {f"{name}_tangent": v})["Y_tangent"]
    close(found, difference(primal, values | {"Y_grad": draw_normal(6, 3)}, name, v), atol=1e-8)


def test_jvp_computes_nothing_else():
    nodes = operator_names(jvp(wide_network("Relu")))
    assert sorted(nodes)[:2] == ["Add", "Add"]
    assert len([n for n in nodes if n in ("Gemm", "MatMul")]) == 4  # two a pass
    assert len(nodes) <= 10


SEQUENCE = "ConcatFromSequence of pieces 1 0"  # which is lowered


def table_rows() -> list:
    """Return rows of the table of rules with what is known of shapes; few by default."""
    chosen = [r for r in ROWS if r.runs][::7]
    assert len(chosen) > 150
    pairs = [(r, known) for r in chosen for known in ("lengths", "rank")]
    return [
        pytest.param(
            *pair,
            id=f"{pair[0].id}, {pair[1]}",
            marks=[pytest.mark.sweep] * (i % 17 > 0 and pair[0].id != SEQUENCE),
        )
        for i, pair in enumerate(pairs)
    ]


@pytest.mark.parametrize(("row", "known"), table_rows())
def test_jvp_and_vjp_are_adjoint(row, known):
    """<u, J v> = <J^T u, v>."""
    made = row_model(row, known)
    try:
        pull, push = vjp(made), jvp(made)
    except NoGradientRule:
        assert row.needs  # more than the rank
        return
    fed = row_feed(row)
    values = {k: x.astype(np.float32) if x.dtype.kind == "f" else x for k, x in fed.items()}
    ys = run_named(made, values)
    us = {f"{k}_grad": draw_normal(*y.shape, dtype=np.float32) for k, y in ys.items()}
    names = [n for n in input_names(push) if n.endswith("_tangent")]
    vs = {n: draw_normal(*values[n[:-8]].shape, dtype=np.float32) for n in names}
    pulled = run_named(pull, values | us)
    pushed = run_named(push, values | vs)
    pairs = [(pulled[f"{n[:-8]}_grad"], v) for n, v in vs.items()]
    left = sum(np.vdot(g.astype(float), v) for g, v in pairs)
    reached = [k for k in ys if f"{k}_tangent" in pushed]
    right = sum(np.vdot(us[f"{k}_grad"].astype(float), pushed[f"{k}_tangent"]) for k in reached)
    size = sum(np.abs(g * v).sum() for g, v in pairs)
    assert abs(left - right) <= 1e-3 * (size + 1e-3)


def test_jvp_by_a_scale_of_unknown_length():
    made = parse_model(
        "m (float[N,M] X, float[M] S) => (float[N,M] Y) { Y = LayerNormalization(X, S) }"
    )
    pushed = jvp(made)
    shapes = {"X": (2, 3), "S": (3,), "X_tangent": (2, 3), "S_tangent": (3,)}
    values = {name: draw_normal(*n, dtype=np.float32) for name, n in shapes.items()}
    n = (values["X"] - values["X"].mean(1, keepdims=True)) / values["X"].std(1, keepdims=True)
    zero = values | {"X_tangent": np.zeros((2, 3), np.float32)}
    close(run_named(pushed, zero)["Y_tangent"], n * values["S_tangent"], rtol=1e-2, atol=1e-2)


# -- zeros, and errors ------------------------------------------------------------------------


def test_what_does_not_depend_is_zero():
    two = two_by_two()
    v = {"A_tangent": draw_normal(2, 3), "B_tangent": draw_normal(3)}
    found = run_named(jvp(two, inputs=["B"]), TWO | v)
    close(found["Z_tangent"], [0, 0])
    close(found["Y_tangent"], TWO["A"] * E * v["B_tangent"])
    found = run_named(vjp(two, outputs=["Z"], inputs=["A", "B"]), TWO | {"Z_grad": np.ones(2)})
    close(found["A_grad"], 2 * TWO["A"])
    close(found["B_grad"], np.zeros(3))
    for mode in ("forward", "reverse"):
        found = run_named(jacobian(two, mode=mode), TWO)
        close(found["Z_B_jacobian"], np.zeros((2, 3)))
        assert found["Z_B_jacobian"].dtype == np.float64
    # by default only what is reached
    assert output_names(vjp(two, outputs=["Z"])) == ["Z", "A_grad"]


def test_linear_functions_have_no_hessian():
    text = "m (double[3] X) => (double Y) { a = Mul(X, w)  Y = ReduceSum<keepdims=0>(a) }"
    made = parse_model(text, w=np.arange(3.0))
    values = {"X": draw_normal(3), "X_vector": draw_normal(3)}
    close(run_named(hvp(made), values)["X_hvp"], np.zeros(3))
    found = run_named(hessian(made), values)
    close(found["X_hessian"], np.zeros((3, 3)))
    close(found["X_grad"], np.arange(3.0))


@pytest.mark.parametrize("make", [vjp, jvp, hvp, jacobian, hessian])
def test_unknown_names(make):
    with pytest.raises(ValueError, match=naming("input 'x'", "'X'")):
        make(MLP, inputs=["x"])
    with pytest.raises(ValueError, match="weight 'ww'"):
        make(MLP, ["ww"])
    named = {"output": "y"} if make is hessian else {"outputs": ["y"]}
    with pytest.raises(ValueError, match=naming("output 'y'", "'Y'")):
        make(MLP, **named)
    with pytest.raises(ValueError, match=naming("'X'", "twice")):
        make(MLP, inputs=["X", "X"])


@pytest.mark.parametrize("make", [vjp, jvp, hvp, jacobian])
def test_wrong_kinds(make):
    two = two_by_two()
    with pytest.raises(ValueError, match="output 'L' holds INT64"):
        make(two, outputs=["L"])
    with pytest.raises(ValueError, match="input 'I' holds INT64"):
        make(two, inputs=["I"])
    flat = parse_model("m (double[N] X) => (double[N] Y) { Y = Sign(X) }")
    with pytest.raises(ValueError, match=naming("'X'", "'Y'", "differentiable path")):
        make(flat)


def test_wrong_options():
    for make, model, options, named in (
        (jacobian, MLP, {"mode": "foward"}, ["mode 'foward'", "'forward'"]),
        (jacobian, MLP, {"batched": "yes"}, ["`batched`", "'yes'"]),
        (hessian, scalar_rows(), {"weights": ["w"], "batched": True}, ["inputs", "['w']"]),
        (hessian, two_by_two(), {}, ["['Y', 'Z']", "name one"]),
        (hessian, MLP, {}, ["'Y'", "one element"]),
        (hessian, MLP, {"batched": True}, ["'Y'", "one element", "each row"]),
    ):
        with pytest.raises(ValueError, match=naming(*named)):
            make(model, **options)


def test_rule_that_is_not_linear_has_no_forward_mode():
    made = parse_model("m (double[N] X) => (double[N] Y) { a = Sin(X)  Y = Identity2(a) }")
    made.graph.node[1].domain = "own"
    made.opset_import.append(onnx.OperatorSetIdProto(domain="own", version=1))
    made.functions.append(onnx.parser.parse_function(
        '<opset_import: ["": 18], domain: "own"> Identity2 (a) => (b) { b = Identity(a) }'
    ))  # fmt: skip

    @rule("Identity2", domain="own")
    def clipped(op, node, g):
        return (op.Clip(g, -1.0, 1.0),)

    with pytest.raises(NoGradientRule, match=naming("Y_tangent", "not linear")):
        jvp(made)
    vjp(made)


# -- Jacobians --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "reverse", "auto"])
def test_full_jacobians(mode):
    found = run_named(jacobian(two_by_two(), mode=mode), TWO)
    close(found["Y_A_jacobian"].reshape(6, 6), np.diag(np.tile(E, 2)))
    for name in "AB":
        close(found[f"Y_{name}_jacobian"], numeric(two_by_two(), TWO, name), atol=1e-8)
    close(found["Z_A_jacobian"], numeric(two_by_two(), TWO, "A", "Z"), atol=1e-8)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("batched", [True, "unchecked"])
def test_jacobians_of_rows(mode, batched):
    full = run_named(jacobian(MLP), {"X": X})["Y_X_jacobian"]
    close(full, numeric(MLP, {"X": X}, "X"), atol=1e-8)
    found = run_named(jacobian(MLP, batched=batched, mode=mode), {"X": X})["Y_X_jacobian"]
    close(found, np.einsum("nmnk->nmk", full))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_many_outputs(mode):
    """Of which some do not depend on some of the inputs, so that there are loops of nothing."""
    names = [f"Y{i}" for i in range(12)]
    body = "  ".join(
        f"{y} = {'Exp' if i % 3 else 'Sin'}({'AB'[i % 2]})" for i, y in enumerate(names)
    )
    made = parse_model(f"m (double[3] A, double[3] B) => (double[3] {', double[3] '.join(names)})"
                 f" {{ {body} }}")  # fmt: skip
    values = {"A": draw_normal(3), "B": draw_normal(3)}
    found = run_named(jacobian(made, inputs=["A"], mode=mode), values)
    for i, y in enumerate(names):
        slope = (np.exp if i % 3 else np.cos)(values["A"]) * (i % 2 == 0)
        close(found[f"{y}_A_jacobian"], np.diag(slope))


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_jacobian_by_a_weight(mode):
    values = {"X": X} | initializer_arrays(MLP)
    found = run_named(jacobian(MLP, ["w"], [], mode=mode), values)["Y_w_jacobian"]
    close(
        found, numeric(vjp(MLP, ["w"], []), values | {"Y_grad": draw_normal(6, 3)}, "w"), atol=1e-8
    )


def scalar_rows() -> onnx.ModelProto:
    return parse_model(
        "m (double[N,4] X) => (double[N,1] Y) { a = MatMul(X, w)  Y = Tanh(a) }",
        w=draw_normal(4, 1),
    )


@pytest.mark.parametrize(
    ("mode", "batched", "inputs"),
    [
        ("forward", True, None),
        ("reverse", "unchecked", []),
        in_sweep("forward", "unchecked", []),
        in_sweep("reverse", True, None),
    ],
)
def test_jacobians_of_rows_by_weights(mode, batched, inputs):
    values = {"X": X} | initializer_arrays(MLP)
    full = run_named(jacobian(MLP, None, inputs, mode=mode), values)
    made = jacobian(MLP, None, inputs, batched=batched, mode=mode)
    found = run_named(made, values)
    assert list(found) == list(full)
    for name, whole in full.items():
        of_input = name == "Y_X_jacobian"
        close(found[name], np.einsum("nmnk->nmk", whole) if of_input else whole)
    assert [x.name for x in made.graph.input] == ["X", *initializer_arrays(MLP)]
    assert output_shape(made, "Y_w_jacobian") == ["N", 3, *initializer_arrays(MLP)["w"].shape]
    found = run_named(made, values | {"X": np.zeros((0, 4))})
    assert found["Y_w_jacobian"].shape == (0, 3, *initializer_arrays(MLP)["w"].shape)


def test_gradients_of_single_rows_are_those_of_torch():
    """Labels have rows, too, and a class weight has none."""
    torch = pytest.importorskip("torch")
    made = parse_model(
        """m (float[N,4] X, int64[M] label, float[3] s) => (float[K] loss)
        { a = Gemm(X, w, b)  c = Mul(a, s)
          loss = SoftmaxCrossEntropyLoss<reduction="none">(c, label) }""",
        w=draw_normal(4, 3).astype("f4"),
        b=draw_normal(3).astype("f4"),
    )
    values = {"X": X.astype("f4"), "label": np.arange(6) % 3, "s": np.float32([1, 2, 3])}
    values |= initializer_arrays(made)
    found = run_named(jacobian(made, ["w", "b"], [], batched="unchecked"), values)

    def loss(w, b, x, y):
        scores = (x @ w + b) * torch.tensor(values["s"])
        return torch.nn.functional.cross_entropy(scores[None], y[None])

    tensors = [torch.tensor(values[name]) for name in ("w", "b", "X", "label")]
    each = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0, 0))(*tensors)
    for name, expected in zip("wb", each, strict=True):
        np.testing.assert_allclose(found[f"loss_{name}_jacobian"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("m = ReduceMean<axes=[0]>(a)  Y = Sub(a, m)", "batched=False"),
        ("l = Shape<start=0, end=1>(X)  c = Cast<to=11>(l)  Y = Div(a, c)", "batched=False"),
        ("Y = Tanh(a)  Z = ReduceSum(a)", r"\['Z'\].* rows of 'Y'"),
    ],
)
def test_rows_that_mix_have_no_jacobians_by_weights(body, message):
    more = ", double[1,1] Z" * ("Z =" in body)
    opset = 17 if "axes" in body else 18
    text = f"m (double[N,4] X) => (double[N,2] Y{more}) {{ a = MatMul(X, w)  {body} }}"
    made = parse_model(text, opset=opset, w=draw_normal(4, 2))
    with pytest.raises(ValueError, match=message):
        jacobian(made, ["w"], [], batched=True)


def test_inputs_without_rows_have_no_jacobians_of_rows():
    text = "m (double[4] s, double[N,4] X) => (double[N,3] Y) { a = Mul(X, s)  Y = MatMul(a, w) }"
    made = parse_model(text, w=draw_normal(4, 3))
    with pytest.raises(ValueError, match=naming("['s']", "no rows")):
        jacobian(made, ["w"], ["s"], batched=True)
    of_rows = jacobian(made, ["w"], [], batched=True)
    onnx.checker.check_model(of_rows, full_check=True)
    found = run_named(of_rows, {"X": X, "s": np.ones(4)} | initializer_arrays(made))
    assert found["Y_w_jacobian"].shape == (6, 3, 4, 3)
    made.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ValueError, match=naming("['s']", "unknown", "declare")):
        jacobian(made, ["w"], [], batched=True)
    alone = parse_model("m (double[3] s) => (double[2,3] Y) { Y = Mul(w, s) }", w=draw_normal(2, 3))
    with pytest.raises(ValueError, match=naming("['s']", "no rows")):
        jacobian(alone, ["w"], [], batched=True)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_shapes_known_at_run_time_only(mode):
    text = "m (double X) => (double Y) { a = Sin(X)  Y = Mul(a, X) }"
    made = parse_model(text, output_shapes=False)
    made.graph.input[0].type.tensor_type.ClearField("shape")
    values = {"X": draw_normal(2, 3)}
    found = run_named(jacobian(made, mode=mode), values)["Y_X_jacobian"]
    close(found, numeric(made, values, "X"), atol=1e-8)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("batched", [False, True])
def test_no_rows(mode, batched):
    found = run_named(jacobian(MLP, batched=batched, mode=mode), {"X": np.zeros((0, 4))})
    assert found["Y_X_jacobian"].shape == ((0, 3, 4) if batched else (0, 3, 0, 4))


@pytest.mark.parametrize("sizes", [(5, 2), (2, 5)])
def test_auto_takes_the_fewer(sizes):
    text = (
        f"m (double[N,{sizes[0]}] X) => (double[N,{sizes[1]}] Y) {{ a = MatMul(X, w) Y = Sin(a) }}"
    )
    made = jacobian(parse_model(text, w=draw_normal(*sizes)), batched=True)
    (scan,) = (n for n in made.graph.node if n.op_type == "Scan")
    del made.graph.output[:]
    made.graph.output.add(name=scan.input[0]).type.tensor_type.elem_type = onnx.TensorProto.INT64
    (directions,) = run_named(made, {"X": draw_normal(3, sizes[0])}).values()
    assert len(directions) == 2


def test_the_loop_computes_what_is_needed_only():
    made = jacobian(wide_network("Exp"), mode="reverse", batched=True)
    (scan,) = (n for n in made.graph.node if n.op_type == "Scan")
    body = [n.op_type for a in scan.attribute for n in a.g.node]
    assert "Exp" not in body
    assert len([n for n in body if n in ("MatMul", "Gemm")]) == 2


def test_attention_and_layer_normalization():
    d = 4
    made = parse_model(
        f"""net (double[N,3,{d}] X) => (double[N,2] Y) {{
        q = MatMul(X, wq)  k = MatMul(X, wk)  t = Transpose<perm=[0,2,1]>(k)  s = MatMul(q, t)
        p = Softmax(s)  a = MatMul(p, X)  r = Add(a, X)
        n = LayerNormalization(r, g, c)  f = Flatten(n)  Y = MatMul(f, wo) }}""",
        wq=draw_normal(d, d), wk=draw_normal(d, d), g=draw_normal(d), c=draw_normal(d),
        wo=draw_normal(3 * d, 2),
    )  # fmt: skip
    values = {"X": draw_normal(3, 3, d)}
    expected = np.einsum("nmnij->nmij", numeric(made, values, "X"))
    for mode in ("forward", "reverse"):
        found = run_named(jacobian(made, batched=True, mode=mode), values)["Y_X_jacobian"]
        close(found, expected, atol=1e-4)  # onnxruntime normalizes in float32
    values["X_tangent"] = draw_normal(3, 3, d)
    found = run_named(jvp(made), values)["Y_tangent"]
    close(found, np.einsum("nmij,nij->nm", expected, values["X_tangent"]), atol=1e-4)


# -- rows that mix ----------------------------------------------------------------------------


CONSTANTS = {
    "zero": np.int64([0]), "one": np.int64([1]), "two": np.int64([0, 2, 2]), "big": np.int64([99]),
    "four": np.int64([0, 4]), "sixteen": np.int64([0, 16]), "turned": np.int64([4, -1]),
    "rows": np.int64([1, 0, 0, 0]), "columns": np.int64([0, 1, 0, 2]), "y": np.float64(2),
    "f": draw_normal(4) ** 2 + 1, "m": draw_normal(4, 4), "e": draw_normal(2, 2),
}  # fmt: skip


def model_of_rows(body: str) -> onnx.ModelProto:
    """Return a model whose rows X the nodes of `body` turn into Y, with the constants it names."""
    text = f"m (double[N,4] X) => (double Y) {{ {body} }}"
    read = {name: a for name, a in CONSTANTS.items() if re.search(rf"\b{name}\b", body)}
    return parse_model(text, output_shapes=False, **read)


MIXING = {
    "sum over rows": "a = ReduceSum<keepdims=1>(X, zero)  Y = Mul(X, a)",
    "mean of all": "a = ReduceMean<keepdims=0>(X)  Y = Mul(X, a)",
    "softmax over rows": "Y = Softmax<axis=0>(X)",
    "attention over rows": "t = Transpose<perm=[1,0]>(X)  a = MatMul(X, t)  Y = MatMul(a, X)",
    "rows and columns added": "a = Squeeze(s, one)  Y = Add(X, a)",
    "slice of rows": "a = Slice(X, zero, one, zero)  Y = Mul(X, a)",
    "cumulative sum": "z = Squeeze(zero)  Y = CumSum(X, z)",
    "batch statistics": "Y = BatchNormalization<training_mode=1>(X, f, f, f, f)",
    "rows gathered": "i = ArgMax<axis=0, keepdims=0>(X)  Y = Gather(X, i)",
    "product over rows": "s = Shape(X)  z = ConstantOfShape(s)  o = Cos(z)  t = Transpose(o)"
    "  c = MatMul(o, t)  d = CastLike(c, X)  x = Transpose(X)  p = MatMul(x, d)  Y = Transpose(p)",
    "reshaped": "a = Reshape(X, turned)  b = Tanh(a)  Y = Transpose(b)",
    "padded": "a = Pad(X, rows)  z = Slice(a, one, big, zero)  Y = Slice(z, zero, big, zero)",
}


@pytest.mark.parametrize("body", MIXING.values(), ids=MIXING)
def test_rows_that_mix_are_refused(body):
    body = "s = ReduceSum<keepdims=1>(X, one)  " + body if "(s, one)" in body else body
    made = model_of_rows(body)
    with pytest.raises(ValueError, match=r"batched=False, or batched=\"unchecked\""):
        jacobian(made, batched=True)
    with pytest.raises(ValueError, match="batched=False"):
        hessian(made, batched=True)
    jacobian(made)


APART = {
    "columns": "a = ReduceMax<keepdims=1>(X, one)  b = Sub(X, a)  Y = LogSoftmax(b)",
    "there and back": "t = Transpose(X)  a = MatMul(m, t)  Y = Transpose(a)",
    "moved": "a = Unsqueeze(X, zero)  b = Concat<axis=0>(a, a)  c = ReduceProd<keepdims=0>(b, zero)"
    "  Y = Sigmoid(c)",
    "parts": "a = Slice(X, one, big, one)  b, c = Split<axis=1, num_outputs=2>(X)"
    "  Y = Concat<axis=1>(a, b, c)",
    "reshaped": 'a = Reshape(X, two)  b = Einsum<equation="nij,jk->nik">(a, e)  '
    "c = Reshape(b, four)  Y = Sin(c)",
    "normalized": "Y = BatchNormalization(X, f, f, f, f)",
    "gathered": "Y = Gather<axis=1>(X, one)",
    "product": "a = Unsqueeze(X, one)  t = Transpose<perm=[0,2,1]>(a)  p = MatMul(t, a)"
    "  Y = Reshape(p, sixteen)",
    "masked": "z = ReduceMean<keepdims=1>(X, zero)  g = Greater(X, z)  Y = Where(g, X, y)",
    "padded": "Y = Pad(X, columns)",
    "flat": "a = Gemm<transB=1>(X, m)  b = Unsqueeze(a, one)  c = Flatten(b)  Y = Elu(c)",
    "rows in front": "a = Unsqueeze(X, one)  b = Transpose<perm=[1,0,2]>(a)  c = MatMul(b, m)"
    "  d = Tanh(c)  Y = Squeeze(d, zero)",
}


@pytest.mark.parametrize("body", APART.values(), ids=APART)
def test_rows_that_do_not_mix_are_proven_so(body):
    made = model_of_rows(body)
    values = {"X": draw_normal(3, 4)}
    full = numeric(made, values, "X")
    for mode in ("forward", "reverse"):
        found = run_named(jacobian(made, batched=True, mode=mode), values)["Y_X_jacobian"]
        close(found, np.einsum("nmnk->nmk", full), atol=1e-7)


def test_fixed_number_of_rows():
    made = wide_network(batch=2)
    full = run_named(jacobian(made), {"X": X[:2]})["Y_X_jacobian"]
    found = run_named(jacobian(made, batched=True), {"X": X[:2]})["Y_X_jacobian"]
    close(found, np.einsum("nmnk->nmk", full))
    one = parse_model("m (double[1,4] X) => (double[1,4] Y) { Y = Softmax<axis=0>(X) }")
    jacobian(one, batched=True)  # with one row there is none to mix with
    for body in ("Gather(X, other)", "Pad(X, shift)", "Slice(X, one, least, zero, back)"):
        moved = parse_model(
            f"m (double[2,4] X) => (double[2,4] Y) {{ Y = {body} }}",
            other=np.int64([1, 0]), shift=np.int64([1, 0, -1, 0]), one=np.int64([1]),
            least=np.int64([-9]), zero=np.int64([0]), back=np.int64([-1]),
        )  # fmt: skip
        with pytest.raises(ValueError, match=naming("output 'Y'", "mixes", "batched=False")):
            jacobian(moved, batched=True)
    turned = parse_model("m (double[2,4] X) => (double[4,2] Y) { Y = Transpose(X) }")
    with pytest.raises(ValueError, match=naming("'Y'", "axis 1", "transpose")):
        jacobian(turned, batched=True)
    flat = parse_model("m (double[2,4] X) => (double Y) { Y = ReduceSum<keepdims=0>(X) }")
    with pytest.raises(ValueError, match=naming("'Y'", "a scalar", "choose")):
        jacobian(flat, batched=True)


def test_rows_of_several_inputs():
    made = parse_model("m (double[N,2] A, double[M,2] B) => (double[N,2] Y) { Y = Mul(A, B) }")
    values = {"A": draw_normal(3, 2), "B": draw_normal(3, 2)}
    found = run_named(jacobian(made, batched=True), values)
    close(found["Y_A_jacobian"], values["B"][:, :, None] * np.eye(2))
    close(found["Y_B_jacobian"], values["A"][:, :, None] * np.eye(2))


# -- Hessians ---------------------------------------------------------------------------------


def quadratic() -> onnx.ModelProto:
    return parse_model("""m (double[3] A, double[2] B) => (double L)
        { a = MatMul(A, S)  b = Mul(a, A)  c = MatMul(A, T)  d = Mul(c, B)  e = Exp(B)
          s = ReduceSum<keepdims=0>(b)  t = ReduceSum<keepdims=0>(d)  u = ReduceSum<keepdims=0>(e)
          L = Sum(s, t, u) }""", S=S, T=T)  # fmt: skip


S, T = draw_normal(3, 3), draw_normal(3, 2)
AB = {"A": draw_normal(3), "B": draw_normal(2)}


def test_hessian_of_a_quadratic():
    found = run_named(hessian(quadratic()), AB)
    close(found["A_hessian"], S + S.T, atol=1e-12)
    close(found["A_B_hessian"], T)
    close(found["B_A_hessian"], T.T)
    close(found["B_hessian"], np.diag(np.exp(AB["B"])))
    close(found["A_grad"], (S + S.T) @ AB["A"] + T @ AB["B"])


def test_hvp_of_a_quadratic():
    v = {"A_vector": draw_normal(3), "B_vector": draw_normal(2)}
    found = run_named(hvp(quadratic()), AB | v)
    close(found["A_hvp"], (S + S.T) @ v["A_vector"] + T @ v["B_vector"])
    close(found["B_hvp"], T.T @ v["A_vector"] + np.exp(AB["B"]) * v["B_vector"])


def test_two_inputs_with_one_gradient():
    made = parse_model("""m (double[2] A, double[2] B) => (double L)
        { s = Add(A, B)  c = Mul(s, s)  d = Mul(c, s)  L = ReduceSum<keepdims=0>(d) }""")
    values = {k: draw_normal(2) for k in ("A", "B", "A_vector", "B_vector")}
    expected = 6 * (values["A"] + values["B"]) * (values["A_vector"] + values["B_vector"])
    found = run_named(hvp(made), values)
    close(found["A_hvp"], expected)
    close(found["B_hvp"], expected)
    tangents = {f"{k}_tangent": values[f"{k}_vector"] for k in "AB"}
    found = run_named(jvp(made), values | tangents)["L_tangent"]
    slope = 3 * (values["A"] + values["B"]) ** 2
    close(found, np.sum(slope * (tangents["A_tangent"] + tangents["B_tangent"])))


@pytest.mark.parametrize("act", ["Tanh", "Softplus"])
def test_hvp_of_a_loss_by_its_weights(act):
    loss = add_loss_output(wide_network(act), "squared_error")
    w = initializer_arrays(loss)
    names = ["w", "b", "v", "c"]
    values = {"X": X, "label": draw_normal(6, 3)} | {k: w[k] for k in names}
    v = {f"{k}_vector": draw_normal(*w[k].shape) for k in names}
    made = hvp(loss, names, [], outputs=["loss"])
    found, h = run_named(made, values | v), 1e-5
    moved = [
        run_named(made, values | v | {k: w[k] + s * v[f"{k}_vector"] for k in names})
        for s in (h, -h)
    ]
    for k in names:
        expected = (moved[0][f"{k}_grad"] - moved[1][f"{k}_grad"]) / (2 * h)
        close(found[f"{k}_hvp"], expected, rtol=1e-5, atol=1e-5)


def test_hessian_of_rows():
    head = parse_model(
        "h (double[N,3] Z) => (double[N,1] P) { P = ReduceSumSquare(Z, one) }", one=np.int64([1])
    )
    head = onnx.compose.merge_models(wide_network(), head, io_map=[("Y", "Z")])
    full = run_named(hessian(head, output="P", batched="unchecked"), {"X": X})["X_hessian"]
    found = run_named(hessian(head, batched=True), {"X": X})
    close(found["X_hessian"], full)
    assert full.shape == (6, 4, 4)
    gradient = hvp(head)
    values = {"X": X, "P_grad": np.ones((6, 1)), "X_vector": X}
    expected = np.einsum("nmnk->nmk", numeric(gradient, values, "X", "X_grad"))
    close(found["X_hessian"], expected, atol=1e-7)


def test_hessian_of_a_loss_by_a_weight():
    loss = add_loss_output(wide_network(), "squared_error")
    values = {"X": X, "label": draw_normal(6, 3)} | initializer_arrays(loss)
    found = run_named(hessian(loss, ["v"], [], output="loss"), values)["v_hessian"]
    made = hvp(loss, ["v"], [], outputs=["loss"])
    expected = numeric(made, values | {"v_vector": values["v"]}, "v", "v_grad")
    close(found, expected, atol=1e-6)


# -- against PyTorch --------------------------------------------------------------------------


def convolutional() -> onnx.ModelProto:
    return parse_model(
        """c (float[N,2,6,6] X) => (float[N,3] Y) {
        a = Conv<pads=[1,1,1,1], strides=[2,2]>(X, w, b)  r = Softplus(a)
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)  f = Flatten(p)  Y = Gemm(f, v, c) }""",
        w=draw_normal(4, 2, 3, 3, dtype=np.float32), b=draw_normal(4, dtype=np.float32),
        v=draw_normal(4, 3, dtype=np.float32), c=draw_normal(3, dtype=np.float32),
    )  # fmt: skip


def test_convolution_as_in_torch():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    made = convolutional()
    w = {k: torch.tensor(a) for k, a in initializer_arrays(made).items()}

    def net(x, w=w):
        y = F.max_pool2d(F.softplus(F.conv2d(x, w["w"], w["b"], stride=2, padding=1)), 2)
        return y.flatten(1) @ w["v"] + w["c"]

    x, t = draw_normal(2, 2, 6, 6, dtype=np.float32), draw_normal(2, 2, 6, 6, dtype=np.float32)
    tx, tt = torch.tensor(x), torch.tensor(t)
    _, expected = torch.func.jvp(net, (tx,), (tt,))
    close(
        run_named(jvp(made), {"X": x, "X_tangent": t})["Y_tangent"], expected, rtol=1e-3, atol=1e-4
    )
    whole = torch.func.jacrev(net)(tx)
    rows_ = torch.func.vmap(torch.func.jacrev(lambda x: net(x[None])[0]))(tx)
    for mode in ("forward", "reverse"):
        found = run_named(jacobian(made, mode=mode), {"X": x})["Y_X_jacobian"]
        close(found, whole, rtol=1e-3, atol=1e-4)
        found = run_named(jacobian(made, batched=True, mode=mode), {"X": x})["Y_X_jacobian"]
        close(found, rows_, rtol=1e-3, atol=1e-4)
    tangents = {k: torch.randn_like(v) for k, v in w.items()}
    _, expected = torch.func.jvp(lambda w: net(tx, w), (w,), (tangents,))
    values = (
        {f"{k}_tangent": v.numpy() for k, v in tangents.items()}
        | initializer_arrays(made)
        | {"X": x}
    )
    found = run_named(jvp(made, None, []), values)["Y_tangent"]
    close(found, expected, rtol=1e-3, atol=1e-4)


def test_hessian_as_in_torch():
    torch = pytest.importorskip("torch")
    head = parse_model("h (double[N,3] Z) => (double P) { P = ReduceLogSumExp<keepdims=0>(Z) }")
    made = onnx.compose.merge_models(wide_network(), head, io_map=[("Y", "Z")])
    w = {k: torch.tensor(a) for k, a in initializer_arrays(made).items()}

    def f(x):
        return torch.logsumexp(torch.tanh(x @ w["w"] + w["b"]) @ w["v"] + w["c"], (0, 1))

    x, v = torch.tensor(X[:3]), torch.tensor(draw_normal(3, 4))
    close(run_named(hessian(made), {"X": x})["X_hessian"], torch.func.hessian(f)(x), atol=1e-8)
    _, expected = torch.func.jvp(torch.func.grad(f), (x,), (v,))
    close(run_named(hvp(made), {"X": x, "X_vector": v})["X_hvp"], expected, atol=1e-8)


# -- results as models ------------------------------------------------------------------------


def test_results_can_be_differentiated():
    values = {"X": X, "Y_grad": draw_normal(6, 3), "X_vector": draw_normal(6, 4)}
    again = jvp(vjp(MLP), inputs=["X"], outputs=["X_grad"])
    found = run_named(again, values | {"X_tangent": values["X_vector"]})["X_grad_tangent"]
    close(found, run_named(hvp(MLP), values)["X_hvp"])


def test_names_that_are_taken():
    made = parse_model("m (double[3] X, double[3] X_tangent) => (double[3] Y_tangent, double[3] Y) "
                 "{ Y_tangent = Sin(X)  Y = Mul(Y_tangent, X_tangent) }")  # fmt: skip
    pushed = jvp(made, inputs=["X"])
    assert input_names(pushed)[:2] == ["X", "X_tangent"]
    assert output_names(pushed)[:2] == ["Y_tangent", "Y"]
    x, c, v = draw_normal(3), draw_normal(3), draw_normal(3)
    found = run_named(pushed, dict(zip(input_names(pushed), (x, c, v), strict=True)))
    first, second = (found[name] for name in output_names(pushed)[2:])
    close(first, np.cos(x) * v)
    close(second, np.cos(x) * v * c)


def test_standard_operators_only():
    for made in (jvp(MLP, None), hvp(MLP), jacobian(MLP, batched=True)):
        onnx.checker.check_model(made, full_check=True)
        assert {entry.domain for entry in made.opset_import} == {""}


def test_dropout_draws_once():
    made = parse_model(
        "m (float[N,64] X) => (float[N,64] Y) { a = Dropout(X, half, yes)  Y = Mul(a, a) }",
        half=np.float32(0.5),
        yes=np.bool_(True),
    )
    ones = np.ones((2, 64), np.float32)
    found = run_named(jvp(made), {"X": ones, "X_tangent": ones})
    close(found["Y_tangent"], 2 * found["Y"])
    found = run_named(jacobian(made, batched=True), {"X": ones})
    close(found["Y_X_jacobian"], 2 * found["Y"][:, :, None] * np.eye(64))


def test_document(capsys):
    *_, code = code_of("derivatives.md")
    exec(code, {})
    assert capsys.readouterr().out.split("\n") == ["(2, 3, 2)", "True", ""]


OF_OLD_OPSETS = [
    (17, "y = ReduceMean<axes = [2, 3], keepdims = 0>(x)"),
    (13, "h = Relu(x)  y = ReduceMax<axes = [-1], keepdims = 0>(h)"),
    (17, "y = ReduceLogSumExp<axes = [1], keepdims = 1>(x)"),
    (11, "y = ReduceSum<axes = [1]>(x)"),
    (11, "h = Unsqueeze<axes = [2]>(x)  k = Exp(h)  y = Squeeze<axes = [2]>(k)"),
    (9, "y = Slice<axes = [1], starts = [0], ends = [2]>(x)"),
    (9, "y = Pad<pads = [0, 0, 1, 0, 0, 0, 1, 0]>(x)"),
    (7, "y = Upsample<scales = [1.0, 1.0, 2.0, 2.0]>(x)"),
]


@pytest.mark.parametrize(("opset", "node"), OF_OLD_OPSETS)
def test_rows_of_operators_whose_axes_were_attributes(opset, node):
    text = f"g (float[N, 3, 2, 2] x) => (float[N] y) {{ {node} }}"
    made = parse_model(text, opset=opset, output_shapes=False)
    x = np.random.default_rng(0).standard_normal((3, 3, 2, 2)).astype(np.float32)
    rows = run_named(jacobian(made, batched=True), {"x": x})["y_x_jacobian"]
    whole = run_named(jacobian(made), {"x": x})["y_x_jacobian"]
    n = rows.ndim - 4
    for i in range(3):
        np.testing.assert_allclose(rows[i], np.take(whole[i], i, axis=n), rtol=1e-6)


@pytest.mark.parametrize("name", ["probabilities", "map", None])
def test_outputs_in_maps(name, caplog):
    """The output of a ZipMap is the tensor of probabilities in it, and a warning says so."""
    made = parse_model("""f (float[N,2] x) => (float[N,2] y, seq(map(int64, float)) map) {
        y = MatMul(x, w)  probabilities = Softmax(y)
        map = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(probabilities) }""",
        w=[[1.0, -1.0], [0.5, 2.0]])  # fmt: skip
    x, w = np.float32([[0.5, 1], [-1, 0.25]]), np.float32([[1, -1], [0.5, 2]])
    chosen = None if name is None else [name]
    warn_once.cache_clear()
    with caplog.at_level("WARNING"):
        found = run_named(jacobian(made, batched=True, outputs=chosen), x=x)
    assert caplog.text.count("the tensor 'probabilities'") == 1
    gradient = vjp(made, outputs=chosen)
    powers = np.exp(x @ w)
    p = powers / powers.sum(1, keepdims=True)
    slopes = np.einsum("nk,kj->nkj", p, np.eye(2)) - np.einsum("nk,nj->nkj", p, p)
    np.testing.assert_allclose(found["probabilities_x_jacobian"], slopes @ w.T, rtol=1e-5)
    assert "probabilities_grad" in input_names(gradient)
    kept = ["probabilities"] if name else ["y", "probabilities"]
    assert output_names(gradient) == [*kept, "x_grad"]
