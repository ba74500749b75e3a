"""`derivative_family`: against central differences, and against CasADi, which reads the files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from onnxgrad import onnx_derivative
from onnxgrad.graph import derivative_family
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.pages import code_of
from tests.support.running import in_sweep, run_named

RNG = np.random.default_rng(0)


def tanh_network(batch="1") -> onnx.ModelProto:
    return parse_model(
        f"""f (double[{batch},2] x) => (double[{batch},3] y)
        {{ h = MatMul(x, W) i = Add(h, b) j = Tanh(i) y = MatMul(j, V) }}""",
        W=np.random.default_rng(1).standard_normal((2, 5)),
        b=np.random.default_rng(2).standard_normal(5),
        V=np.random.default_rng(3).standard_normal((5, 3)),
    )


def matrices_and_integers() -> onnx.ModelProto:
    """A matrix, a vector and integers in; a matrix and a scalar out."""
    return parse_model("""two (double[2,3] x, double[2] z, int64[2] i) => (double[2,3] y, double q)
        <int64[2] column = {2, 1}>
        { a = Gather(z, i) s = Reshape(a, column) t = Mul(x, s) e = Tanh(t) y = Mul(e, x)
          q = ReduceSum<keepdims=0>(y) }""")


BRANCH = """f (double[3] x) => (double[3] y) <double zero = {0.0}>
    { s = ReduceSum<keepdims=0>(x) c = Greater(s, zero)
      y = If<then_branch = a () => (double[3] p) { p = Tanh(x) },
             else_branch = b () => (double[3] r) { r = Exp(x) }>(c) }"""


def signature(made: onnx.ModelProto) -> tuple[list, list]:
    return tuple(
        [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in vs]
        for vs in (made.graph.input, made.graph.output)
    )


# -- by themselves ------------------------------------------------------------------------------


def casadi_matrix(array: np.ndarray) -> np.ndarray:
    """Return an array as CasADi reads it."""
    return array if array.ndim == 2 else array.reshape(-1, 1)


def differences_along(function, x: dict, seeds: dict, h: float = 1e-5) -> dict:
    """Return central differences of `function` along each column block of `seeds`, packed."""
    width = {k: casadi_matrix(x[k]).shape[1] for k in seeds}
    (count,) = {s.shape[1] // width[k] for k, s in seeds.items()}
    blocks = []
    for d in range(count):
        v = {k: s[:, d * width[k] : (d + 1) * width[k]] for k, s in seeds.items()}
        up, down = (
            function(x | {k: x[k] + sign * h * v[k].reshape(x[k].shape) for k in v})
            for sign in (1, -1)
        )
        blocks.append({k: casadi_matrix((up[k] - down[k]) / (2 * h)) for k in up})
    return {k: np.hstack([b[k] for b in blocks]) for k in blocks[0]}


def seeds_of(x: dict, prefix: str, count: int) -> dict:
    shapes = {k: casadi_matrix(v).shape for k, v in x.items() if v.dtype == np.float64}
    return {f"{prefix}_{k}": RNG.standard_normal((r, count * c)) for k, (r, c) in shapes.items()}


CASES = {  # a function that makes a model, or its text; and what to feed
    "network": (tanh_network, {"x": RNG.standard_normal((1, 2))}),
    "rows": (lambda: tanh_network("N"), {"x": RNG.standard_normal((4, 2))}),
    "two": (
        matrices_and_integers,
        {"x": RNG.standard_normal((2, 3)), "z": RNG.standard_normal(2), "i": np.array([1, 1])},
    ),
    "cube": (
        "cube (double[2,2,3] x) => (double[2,2,3] y) { y = Tanh(x) }",
        {"x": RNG.standard_normal((2, 2, 3))},
    ),
    "then": (BRANCH, {"x": np.array([1.0, 2.0, -1.0])}),
    "else": (BRANCH, {"x": np.array([1.0, -2.0, -1.0])}),
    "symbols": (
        "f (double[N,M] x) => (double[N,M] y) { y = Tanh(x) }",
        {"x": RNG.standard_normal((2, 3))},
    ),
    "linear": (
        "f (double[2] x) => (double[2] y) { y = Identity(x) }",
        {"x": RNG.standard_normal(2)},
    ),
}


@pytest.mark.parametrize(("nfwd", "nadj"), [in_sweep(1, 1), (2, 3), in_sweep(3, 2)])
@pytest.mark.parametrize("case", CASES)
def test_against_differences(case, nfwd, nadj):
    source, x = CASES[case]
    made = parse_model(source) if isinstance(source, str) else source()
    family = derivative_family(made)
    y = run_named(made, x)
    original = {k: v.copy() for k, v in run_named(family["f"], x).items()}
    np.testing.assert_equal(original, y)

    fwd, adj = seeds_of(x, "fwd", nfwd), seeds_of(y, "adj", nadj)
    slopes = differences_along(
        lambda x: run_named(made, x), x, {k.removeprefix("fwd_"): v for k, v in fwd.items()}
    )
    forward = run_named(family["fwd_f"], x | fwd)
    for name, value in slopes.items():
        np.testing.assert_allclose(forward[f"fwd_{name}"], value, atol=1e-8)
        np.testing.assert_allclose(forward[name], y[name])

    # <u, J v> = <J^T u, v> for every pair of seeds
    adjoint = run_named(family["adj_f"], x | adj)
    left = sum(_products(adj[f"adj_{k}"], slopes[k], casadi_matrix(y[k])) for k in y)
    right = sum(
        _products(adjoint[f"adj_{k[4:]}"], v, casadi_matrix(x[k[4:]])) for k, v in fwd.items()
    )
    np.testing.assert_allclose(left, right, atol=1e-7)

    # the derivative of the adjoint, which is a function of x and of its seeds
    both = {
        f"fwd_{k}": RNG.standard_normal((v.shape[0], nfwd * v.shape[1])) for k, v in adj.items()
    }
    point = {k: v for k, v in x.items() if f"fwd_{k}" in fwd} | adj
    rest = {k: v for k, v in x.items() if k not in point}

    def gradients(p: dict) -> dict:
        results = run_named(family["adj_f"], p | rest)
        return {k: v for k, v in results.items() if k.startswith("adj_")}

    bent = differences_along(
        gradients, point, {k.removeprefix("fwd_"): v for k, v in (fwd | both).items()}
    )
    curved = run_named(family["fwd_adj_f"], x | adj | fwd | both)
    for name, value in bent.items():
        np.testing.assert_allclose(curved[f"fwd_{name}"], value, atol=1e-8)


def _products(a: np.ndarray, b: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return the inner product of every pair of packed seeds."""
    r, c = like.shape
    return np.einsum("rkc,rlc->kl", a.reshape(r, -1, c), b.reshape(r, -1, c))


def test_signatures():
    family = derivative_family(matrices_and_integers())
    given, kept = [("x", [2, 3]), ("z", [2]), ("i", [2])], [("y", [2, 3]), ("q", [])]
    assert signature(family["f"]) == (given, kept)
    u = [("adj_y", [2, "nadj_x_3"]), ("adj_q", [1, "nadj"])]
    v = [("fwd_x", [2, "nfwd_x_3"]), ("fwd_z", [2, "nfwd"])]
    gradients = [("adj_x", [2, "nadj_x_3"]), ("adj_z", [2, "nadj"])]
    assert signature(family["adj_f"]) == ([*given, *u], [*kept, *gradients])
    tangents = [("fwd_y", [2, "nfwd_x_3"]), ("fwd_q", [1, "nfwd"])]
    assert signature(family["fwd_f"]) == ([*given, *v], [*kept, *tangents])
    w = [("fwd_adj_y", [2, "nfwd_x_nadj_x_3"]), ("fwd_adj_q", [1, "nfwd_x_nadj"])]
    products = [("fwd_adj_x", [2, "nfwd_x_nadj_x_3"]), ("fwd_adj_z", [2, "nfwd_x_nadj"])]
    assert signature(family["fwd_adj_f"]) == ([*given, *u, *v, *w], [*kept, *products])
    for made in family.values():
        onnx.checker.check_model(made, full_check=True)


def test_numbers_of_directions_that_differ_are_an_error():
    family = derivative_family(matrices_and_integers())
    x = CASES["two"][1]
    seeds = {"adj_y": np.ones((2, 6)), "adj_q": np.ones((1, 3))}  # two directions, and three
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="indices"):
        run_named(family["adj_f"], x | seeds)


def test_inputs_outputs_and_weights():
    family = derivative_family(matrices_and_integers(), inputs=["z"], outputs=["q"])
    x, _ = signature(family["fwd_adj_f"])
    assert [name for name, _ in x] == ["x", "z", "i", "adj_q", "fwd_z", "fwd_adj_q"]
    family = derivative_family(tanh_network(), weights=["b"], inputs=[])
    x, y = signature(family["adj_f"])
    assert [name for name, _ in x] == ["x", "b", "adj_y"]
    assert [name for name, _ in y] == ["y", "adj_b"]
    fed = {"x": np.ones((1, 2)), "b": np.zeros(5)}
    want = run_named(onnx_derivative(tanh_network(), ["b"], []), fed, y_grad=np.ones((1, 3)))[
        "b_grad"
    ]
    got = run_named(family["adj_f"], fed, adj_y=np.ones((1, 3)))["adj_b"]
    np.testing.assert_allclose(got[:, 0], want)


def test_float64():
    made = parse_model("f (float[2] x) => (float[2] y) { s = Exp(x) y = Mul(s, s) }")
    x = np.array([0.3, 0.4])
    family = derivative_family(made, dtype="float64")
    np.testing.assert_allclose(run_named(family["f"], x=x)["y"], np.exp(2 * x), rtol=1e-14)
    got = run_named(family["adj_f"], x=x, adj_y=np.ones((2, 1)))["adj_x"]
    np.testing.assert_allclose(got[:, 0], 2 * np.exp(2 * x), rtol=1e-14)
    assert derivative_family(made)["f"].graph.input[0].type.tensor_type.elem_type == 1


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("f (double[2] fwd_x) => (double[2] y) { y = Tanh(fwd_x) }", {}, "names ['fwd_x']"),
        ("f (double[2] x) => (double[2] adj2_y) { adj2_y = Tanh(x) }", {}, "names ['adj2_y']"),
        ("f (double[2] out_y) => (double[2] y) { y = Tanh(out_y) }", {}, "names ['out_y']"),
        ("f (double[2] x) => (double[2] y) { y = Tanh(x) }", {"dtype": "half"}, "Unknown dtype"),
        ("f (double[2] x) => (double[2] y) { y = Tanh(x) }", {"path": "f.pb"}, "end in .onnx"),
        ("f (double[2] x) => (double[2] y) { y = Tanh(x) }", {"inputs": ["z"]}, "Unknown input"),
        ("f (double[2] x) => (double[2] y, int64[1] n) { y = Tanh(x) n = Shape(x) }", {}, "['n']"),
        ("f (double[2] x) => (double[2] y) { y = Floor(x) }", {}, "differentiable path"),
        ("f (double[2] x, int64[K] s) => (double y) { y = Reshape(x, s) }", {}, "rank"),
    ],
)
def test_refused(text, options, message):
    made = parse_model(text)
    if message == "rank":
        made.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ValueError, match=re.escape(message)):
        derivative_family(made, **options)


def test_names_that_are_taken_get_a_prefix():
    made = parse_model("f (double[2] fwd_x) => (double[2] y) { y = Tanh(fwd_x) }")
    family = derivative_family(onnx.compose.add_prefix(made, "f_"))
    assert signature(family["fwd_f"])[1][1] == ("fwd_f_y", [2, "nfwd"])


def test_a_hidden_value_gives_its_name(tmp_path):
    made = parse_model(
        "f (double[2] x) => (double[2] y) { adj_y = Tanh(x) adj_x = Exp(adj_y) y = Mul(adj_x, x) }"
    )
    got = run_named(derivative_family(made)["adj_f"], x=np.zeros(2), adj_y=np.ones((2, 1)))
    np.testing.assert_allclose(got["adj_x"], np.ones((2, 1)))


# -- in CasADi ----------------------------------------------------------------------------------


@pytest.fixture
def casadi(monkeypatch):
    library = next((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"), None)
    if library is None:
        pytest.skip("this onnxruntime has no shared library of its own")
    monkeypatch.setenv("CASADI_ONNXRUNTIME_LIB", str(library))
    module = pytest.importorskip("casadi", minversion="3.8")
    if not module.has_onnxbackend("ort"):
        pytest.skip("this CasADi has no backend for onnxruntime")
    return module


def both_functions(casadi, path, **sizes):
    """Return the function of the files, and CasADi's own, which it differentiates itself."""
    made = []
    for options in ({}, {"symbolic": True}):
        builder = casadi.GraphBuilder(str(path))
        for name, size in sizes.items():
            builder.bind_dim(name, size)
        made.append(builder.create("f", options))
    return made


def assert_same_function(f, own):
    assert (f.name_in(), f.name_out()) == (own.name_in(), own.name_out())
    arguments = [
        np.zeros(f.size_in(i)) if name.startswith("out_") else RNG.standard_normal(f.size_in(i))
        for i, name in enumerate(f.name_in())
    ]
    for a, b in zip(f.call(arguments), own.call(arguments), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-10, atol=1e-12)


MATRICES = """two (double[2,3] x, double[2] z) => (double[2,3] y, double q)
    <int64[2] column = {2, 1}>
    { s = Reshape(z, column) t = Mul(x, s) e = Sin(t) y = Mul(e, x)
      q = ReduceSum<keepdims=0>(y) }"""


@pytest.mark.parametrize("rows", [None, 3])
def test_casadi_finds_the_derivatives(casadi, tmp_path, rows):
    made, sizes = (parse_model(MATRICES), {}) if rows is None else (tanh_network("N"), {"N": rows})
    derivative_family(made, tmp_path / "f.onnx")
    f, own = both_functions(casadi, tmp_path / "f.onnx", **sizes)
    assert_same_function(f, own)
    for adjoint in (1, 2):
        assert_same_function(f.reverse(adjoint), own.reverse(adjoint))
        assert_same_function(f.forward(adjoint), own.forward(adjoint))
        for forward in (1, 3):
            assert_same_function(
                f.reverse(adjoint).forward(forward), own.reverse(adjoint).forward(forward)
            )


@pytest.mark.parametrize("names", [("x", "out_y"), ("out_x", "y"), ("jac_x", "y"), ("a.1", "b")])
def test_names_that_casadi_takes(casadi, tmp_path, names):
    made = parse_model("f (double[2] x) => (double[2] y) { y = Sin(x) }")
    for value, name in ((made.graph.input, names[0]), (made.graph.output, names[1])):
        value[0].name = name
    made.graph.node[0].input[0], made.graph.node[0].output[0] = names
    derivative_family(made, tmp_path / "f.onnx")
    f, own = both_functions(casadi, tmp_path / "f.onnx")
    assert_same_function(f.reverse(1).forward(2), own.reverse(1).forward(2))


def test_casadi_knows_what_is_not_differentiated(casadi, tmp_path):
    derivative_family(matrices_and_integers(), tmp_path / "f.onnx")
    f = casadi.GraphBuilder(str(tmp_path / "f.onnx")).create("f")
    assert f.is_diff_in() == [True, True, False]


def solution(casadi, function):
    """Return the least of a function with constraints on x, by ipopt with exact Hessians."""
    problem = casadi.Opti()
    x = problem.variable(1, 2)
    y = function(x)
    problem.minimize(casadi.sumsqr(y) + 0.1 * casadi.sumsqr(x))
    problem.subject_to(casadi.sumsqr(x) <= 1.5)
    problem.subject_to(y[1] >= 0.2)
    problem.set_initial(x, casadi.DM([[0.3, -0.2]]))
    problem.solver("ipopt", {"print_time": False}, {"print_level": 0, "sb": "yes", "tol": 1e-10})
    solved = problem.solve()
    stats = problem.stats()
    return solved.value(x), solved.value(problem.f), stats["iter_count"], stats


def test_ipopt_takes_exact_hessians(casadi, tmp_path):
    made = tanh_network()
    W, b, V = (numpy_helper.to_array(t) for t in made.graph.initializer)
    derivative_family(made, tmp_path / "f.onnx")
    f = casadi.GraphBuilder(str(tmp_path / "f.onnx")).create("f")
    x, least, iterations, stats = solution(casadi, f)
    assert stats["n_call_nlp_hess_l"] > 0
    s = casadi.SX.sym("x", 1, 2)
    by_hand = casadi.Function("g", [s], [(casadi.tanh(s @ W + b[None])) @ V])
    own_x, own_least, own_iterations, _ = solution(casadi, by_hand)
    np.testing.assert_allclose(x, own_x, rtol=1e-7)
    np.testing.assert_allclose(least, own_least, rtol=1e-9)
    assert iterations == own_iterations


def test_the_page_of_optimizers(casadi, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(tanh_network(), "model.onnx")
    quiet = {
        'solver("ipopt")': 'solver("ipopt", {"print_time": 0}, {"print_level": 0, "sb": "yes"})'
    }
    found = []
    for symbolic in ("", ', {"symbolic": True}'):  # CasADi differentiates the second itself
        names: dict = {}
        for code in code_of("solvers.md"):
            for old, new in (quiet | {'create("f")': f'create("f"{symbolic})'}).items():
                code = code.replace(old, new)
            exec(code, names)
        found.append(names["solution"].value(names["x"]))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_the_files_are_what_casadi_takes(casadi, tmp_path):
    derivative_family(tanh_network(), tmp_path / "f.onnx")
    (tmp_path / "fwd_adj_f.onnx").unlink()
    f = casadi.GraphBuilder(str(tmp_path / "f.onnx")).create("f")
    with pytest.raises(RuntimeError, match="Derivatives"):
        f.reverse(1).forward(1)


def test_dtypes_that_the_runtime_lacks():
    made = parse_model(
        "f (float[1,1,4] x) => (float[1,1,2] y) { h = Conv(x, w)  y = Identity(h) }",
        w=[[[1.0, 2.0, 3.0]]],
    )
    with pytest.raises(ValueError, match=naming("dtype='float64'", "Conv", "'h'")):
        derivative_family(made, dtype="float64")
    assert len(derivative_family(made, dtype="float32")) == 4
