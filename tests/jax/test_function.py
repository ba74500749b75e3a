"""`onnxgrad.jax.function` beside the same mathematics in JAX, and beside `OnnxModule`."""

import logging
import re

import numpy as np
import onnx
import pytest

from tests.support.models import parse_model
from tests.support.running import in_sweep

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import onnxgrad.jax  # noqa: E402
from onnxgrad import ModelError  # noqa: E402
from onnxgrad.bridges.host_graph import HostGraph  # noqa: E402
from tests.support.errors import naming  # noqa: E402

RNG = np.random.default_rng(0)
MLP = """
    f (float[N,3] x) => (float[N,2] y) {
        h = MatMul(x, a)  s = Add(h, b)  t = Tanh(s)  y = Gemm<transB=1>(t, c, d)
    }"""
WEIGHTS = {
    "a": RNG.normal(size=(3, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
    "c": RNG.normal(size=(2, 4)).astype(np.float32),
    "d": RNG.normal(size=2).astype(np.float32),
}
X = RNG.normal(size=(5, 3)).astype(np.float32)
V = RNG.normal(size=(5, 3)).astype(np.float32)


def tanh_layer_model() -> onnx.ModelProto:
    return parse_model(MLP, **WEIGHTS)


def by_jax(params, x):
    """The model `tanh_layer_model`, written in JAX."""
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"].T + params["d"]


@pytest.fixture(scope="module")
def function_and_params():
    return onnxgrad.jax.function(tanh_layer_model())


def sum_of_squares(f):
    return lambda params, x: (f(params, x) ** 2).sum()


def assert_equal_trees(found, expected, tolerance=2e-6):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance * max(1, np.abs(b).max()))


TRANSFORMED = {  # of a function of params and one input
    "call": lambda f: f,
    "grad of weights": lambda f: jax.grad(sum_of_squares(f)),
    "grad of inputs": lambda f: jax.grad(sum_of_squares(f), argnums=1),
    "value and grad": lambda f: jax.value_and_grad(sum_of_squares(f), argnums=(0, 1)),
    "jvp of inputs": lambda f: lambda p, x: jax.jvp(lambda z: f(p, z), (x,), (V,)),
    "jvp of all": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, V)),
    "vmap": lambda f: lambda p, x: jax.vmap(lambda row: f(p, row[None])[0])(x),
    "vmap over another axis": lambda f: (
        lambda p, x: jax.vmap(lambda z: f(p, z), in_axes=2, out_axes=1)(
            jnp.stack([x, 2 * x], axis=2)
        )
    ),
    "gradients of rows": lambda f: (
        lambda p, x: jax.vmap(jax.grad(lambda row: sum_of_squares(f)(p, row[None])))(x)
    ),
    "gradients of weights by row": lambda f: (
        lambda p, x: jax.vmap(jax.grad(sum_of_squares(f)), in_axes=(None, 0))(p, x[:, None])
    ),
    "vmap over weights": lambda f: (
        lambda p, x: jax.vmap(f, in_axes=(0, None))(
            jax.tree.map(lambda w: jnp.stack([w, 2 * w]), p), x
        )
    ),
    "gradient penalty": lambda f: jax.grad(
        lambda p, x: (jax.grad(sum_of_squares(f), argnums=1)(p, x) ** 2).sum()
    ),
    "grad of grad": lambda f: (
        lambda p, x: jax.grad(lambda z: (jax.grad(sum_of_squares(f), argnums=1)(p, z) ** 2).sum())(
            x
        )
    ),
    "third order": lambda f: (
        lambda p, x: jax.grad(
            lambda z: jax.grad(lambda u: jax.grad(sum_of_squares(f), argnums=1)(p, u).sum())(
                z
            ).sum()
        )(x)
    ),
    "hvp": lambda f: (
        lambda p, x: jax.jvp(lambda z: jax.grad(sum_of_squares(f), argnums=1)(p, z), (x,), (V,))
    ),
    "grad of jvp": lambda f: (
        lambda p, x: jax.grad(lambda z: (jax.jvp(lambda u: f(p, u), (z,), (V,))[1] ** 2).sum())(x)
    ),
    "jacfwd": lambda f: lambda p, x: jax.jacfwd(lambda z: f(p, z))(x),
    "jacrev": lambda f: lambda p, x: jax.jacrev(lambda z: f(p, z))(x),
    "hessian": lambda f: (
        lambda p, x: jax.hessian(lambda row: sum_of_squares(f)(p, row[None]))(x[0])
    ),
    "scan": lambda f: (
        lambda p, x: jax.lax.scan(
            lambda carry, row: (carry + f(p, row[None])[0], carry), jnp.zeros(2), x
        )
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(sum_of_squares(f))),
}


QUICK = {"value and grad", "vmap", "gradients of rows", "gradient penalty", "jvp of inputs", "hvp"}


@pytest.mark.parametrize("jit", [True, in_sweep(False)])
@pytest.mark.parametrize("name", [n if n in QUICK else in_sweep(n) for n in TRANSFORMED])
def test_transformations(name, jit, function_and_params):
    apply, params = function_and_params
    transform = TRANSFORMED[name]
    found = transform(apply)
    expected = transform(by_jax)(params, X)
    assert_equal_trees((jax.jit(found) if jit else found)(params, X), expected)


def test_vmap_over_rows_is_one_call(function_and_params, monkeypatch):
    apply, params = function_and_params
    calls, run = [], HostGraph.run_into

    def counted(self, arrays, places):
        calls.append(arrays[0].shape)
        return run(self, arrays, places)

    monkeypatch.setattr(HostGraph, "run_into", counted)
    jax.block_until_ready(jax.vmap(lambda row: apply(params, row[None]))(X))
    assert calls == [(5, 3)]
    by_row = jax.vmap(jax.grad(lambda row: apply(params, row[None]).sum()))
    calls.clear()
    jax.block_until_ready(by_row(X))
    assert len(calls) == 2  # the forward and the backward pass, of all rows


def test_rows_that_depend_on_each_other_are_computed_apart(caplog):
    model = parse_model("f (float[N,3] x) => (float[N,3] y) { y = Softmax<axis=0>(x) }")
    apply, params = onnxgrad.jax.function(model)
    blocks = jnp.stack([X, 2 * X, -X])
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        found = jax.vmap(lambda x: apply(params, x))(blocks)
    assert re.search(naming("vmap", "Softmax"), caplog.text)
    np.testing.assert_allclose(found, jax.nn.softmax(blocks, axis=1), rtol=1e-5)


# -- networks, beside OnnxModule --------------------------------------------------------------

TOKENS = np.int64([[1, 2, 0], [3, 1, 1]])
IMAGES = RNG.normal(size=(2, 2, 6, 6)).astype(np.float32)
SERIES = RNG.normal(size=(4, 2, 3)).astype(np.float32)
NETWORKS = {
    "embedding": (
        """f (int64[N,T] ids) => (float[N,2] y) {
            e = Gather(table, ids)
            m = ReduceMean<keepdims=0>(e, one)
            y = MatMul(m, w)
        }""",
        {"table": RNG.normal(size=(4, 3)), "w": RNG.normal(size=(3, 2)), "one": np.int64([1])},
        [TOKENS],
    ),
    "convolution": (
        """f (float[N,2,6,6] x) => (float[N,12] y) {
            h = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)
            n = BatchNormalization(h, s, o, mean, var)
            p = MaxPool<kernel_shape=[3,3], strides=[3,3]>(n)
            r = Relu(p)
            y = Flatten(r)
        }""",
        {
            "w": RNG.normal(size=(3, 2, 3, 3)),
            "b": RNG.normal(size=3),
            "s": 1 + RNG.random(3),
            "o": RNG.normal(size=3),
            "mean": RNG.normal(size=3),
            "var": 1 + RNG.random(3),
        },
        [IMAGES],
    ),
    "lstm": (
        """f (float[T,N,3] x) => (float[T,1,N,2] y) {
            y, state = LSTM<hidden_size=2>(x, w, r, b)
        }""",
        {
            "w": RNG.normal(size=(1, 8, 3)),
            "r": RNG.normal(size=(1, 8, 2)),
            "b": RNG.normal(size=(1, 16)),
        },
        [SERIES],
    ),
    "attention": (
        """f (float[N,T,4] x, bool[N,T] mask) => (float[N,T,4] y) {
            q = MatMul(x, wq)  k = MatMul(x, wk)  v = MatMul(x, wv)
            kt = Transpose<perm=[0,2,1]>(k)
            scores = MatMul(q, kt)
            axis = Constant<value_ints=[1]>()
            m = Unsqueeze(mask, axis)
            low = Constant<value_float=-1e9>()
            masked = Where(m, scores, low)
            p = Softmax(masked)
            h = MatMul(p, v)
            s = Add(h, x)
            y = LayerNormalization(s, gain, shift)
        }""",
        {
            "wq": RNG.normal(size=(4, 4)),
            "wk": RNG.normal(size=(4, 4)),
            "wv": RNG.normal(size=(4, 4)),
            "gain": 1 + RNG.random(4),
            "shift": RNG.normal(size=4),
        },
        [
            RNG.normal(size=(2, 3, 4)).astype(np.float32),
            np.array([[True, True, False], [True, True, True]]),
        ],
    ),
    "branch": (
        """f (float[N,3] x, bool flag) => (float[N,3] y) {
            z = Mul(x, w)
            y = If(flag) <
                then_branch = a () => (float[N,3] p) { p = Exp(z) },
                else_branch = b () => (float[N,3] q) { q = Sin(z) }
            >
        }""",
        {"w": RNG.normal(size=3)},
        [X, np.array(True)],
    ),
    "top values": (
        """f (float[N,3] x) => (float[N,2] y, int64[N,2] places) {
            z = Mul(x, w)
            two = Constant<value_ints=[2]>()
            y, places = TopK(z, two)
        }""",
        {"w": RNG.normal(size=3)},
        [X],
    ),
}


def jax_network(name: str) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    text, arrays, inputs = NETWORKS[name]
    floats = {n: a if a.dtype == np.int64 else a.astype(np.float32) for n, a in arrays.items()}
    return parse_model(text, **floats), inputs


def test_a_loop_whose_count_is_an_input():
    """The states of its iterations, as many as the input says, are computed again."""
    model = parse_model(
        """f (float[N] x, int64 count) => (float[N] y) {
            go = Constant<value = bool {1}>()
            y = Loop(count, go, x) <body = b (int64 i, bool c, float[N] h) => (bool k, float[N] z) {
                k = Identity(c)  s = Sin(h)  z = Mul(s, w)
            }>
        }""",
        w=np.float32([2.0]),
    )
    apply, params = onnxgrad.jax.function(model, trainable=["w"])

    def three(params, x):
        for _ in range(3):
            x = jnp.sin(x) * params["w"]
        return x

    for transform in (TRANSFORMED["value and grad"], TRANSFORMED["grad of grad"]):
        found = transform(lambda p, x: apply(p, x, jnp.int32(3)))
        assert_equal_trees(jax.jit(found)(params, X[0]), transform(three)(params, X[0]))


def leading_output(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_module_for_pytorch(name):
    torch = pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    model, inputs = jax_network(name)
    module = OnnxModule(model)
    tensors = [torch.tensor(x, requires_grad=x.dtype == np.float32) for x in inputs]
    leading_output(module(*tensors)).pow(2).sum().backward()
    apply, params = onnxgrad.jax.function(model)
    real = [i for i, x in enumerate(inputs) if x.dtype == np.float32]

    def loss(params, *xs):
        given = dict(zip(real, xs, strict=True))
        outputs = apply(params, *(given.get(i, x) for i, x in enumerate(inputs)))
        return (leading_output(outputs) ** 2).sum()

    argnums = tuple(range(len(real) + 1))
    found = jax.jit(jax.grad(loss, argnums))(params, *(inputs[i] for i in real))
    named = {n: module.get_parameter(key).grad for n, key in module.weight_names.items()}
    assert set(found[0]) == set(named)
    for weight, gradient in found[0].items():
        np.testing.assert_allclose(gradient, named[weight], rtol=1e-4, atol=1e-5)
    for i, gradient in zip(real, found[1:], strict=True):
        np.testing.assert_allclose(gradient, tensors[i].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_vmap_over_blocks_of_rows(name):
    model, inputs = jax_network(name)
    apply, params = onnxgrad.jax.function(model)
    axis = 1 if name == "lstm" else 0
    twice = [
        x if x.ndim == 0 else np.stack([x, x[::-1] if x.dtype == bool else x + 0]) for x in inputs
    ]
    axes = [None if x.ndim == 0 else 0 for x in inputs]
    found = jax.vmap(lambda *xs: leading_output(apply(params, *xs)), axes)(*twice)
    assert found.shape[0] == 2
    assert found.shape[1 + axis if name != "lstm" else 3] == inputs[0].shape[axis]
    for i in range(2):
        alone = apply(
            params, *(x if x.ndim == 0 else t[i] for x, t in zip(inputs, twice, strict=True))
        )
        np.testing.assert_allclose(found[i], leading_output(alone), rtol=1e-5, atol=1e-6)


# -- dtypes -----------------------------------------------------------------------------------


def test_weights_in_float64_give_a_graph_in_float64(function_and_params):
    apply, params = function_and_params
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(w, jnp.float64) for name, w in params.items()}
        x = jnp.asarray(X, jnp.float64)
        found = jax.grad(sum_of_squares(apply))(wide, x)
        expected = jax.grad(sum_of_squares(by_jax))(wide, x)
        assert found["a"].dtype == jnp.float64
        assert_equal_trees(found, expected, 1e-13)
        with pytest.raises(ValueError, match=naming("'x'", "float64", "float32", "astype")):
            apply(wide, jnp.asarray(X, jnp.float32))


def test_a_file_in_float64_needs_64_bits():
    model = parse_model("f (double[N] x) => (double[N] y) { y = Exp(x) }")
    with pytest.raises(ValueError, match=naming("'x'", "jax_enable_x64")):
        onnxgrad.jax.function(model)
    with jax.enable_x64(True):
        apply, params = onnxgrad.jax.function(model)
        slope = jax.grad(lambda x: apply(params, x).sum())(jnp.zeros(2, jnp.float64))
        assert slope.dtype == jnp.float64
        assert slope.tolist() == [1, 1]


def test_weights_in_half_precision(function_and_params):
    apply, params = function_and_params
    half = {name: w.astype(jnp.float16) for name, w in params.items()}
    found = apply(half, jnp.float16(X))
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, by_jax(params, X), rtol=0.02, atol=0.02)


def test_a_dtype_without_kernels_is_refused(function_and_params):
    apply, params = function_and_params
    small = {name: w.astype(jnp.bfloat16) for name, w in params.items()}
    with pytest.raises(RuntimeError, match=naming("dtypes", "Tanh")):
        apply(small, jnp.bfloat16(X))


def test_integers_beyond_32_bits_are_refused():
    apply, params = onnxgrad.jax.function(
        parse_model("f (int64[N] x) => (int64[N] y) { y = Mul(x, x) }")
    )
    assert apply(params, jnp.arange(3)).tolist() == [0, 1, 4]
    with pytest.raises(Exception, match=naming("'y'", "int32", "jax_enable_x64")):
        jax.block_until_ready(apply(params, jnp.array([2**20])))


# -- shapes, errors, files ----------------------------------------------------------------------


def test_shapes_are_inferred_without_a_run(function_and_params, monkeypatch):
    apply, params = function_and_params
    monkeypatch.setattr(HostGraph, "open_session", None)  # no run
    assert jax.eval_shape(apply, params, jax.ShapeDtypeStruct((7, 3), "float32")).shape == (7, 2)


def test_a_shape_that_depends_on_values_is_refused():
    model = parse_model("f (float[N] x) => (int64[1,M] y) { y = NonZero(x) }")
    apply, params = onnxgrad.jax.function(model)
    assert apply(params, jnp.ones(3)).tolist() == [[0, 1, 2]]
    with pytest.raises(Exception, match=naming("'y'", "shape", "values")):
        jax.block_until_ready(apply(params, jnp.array([1.0, 0, 1])))


def test_a_file_of_one_row_takes_any_number():
    text = MLP.replace("[N,", "[1,")
    apply, params = onnxgrad.jax.function(parse_model(text, **WEIGHTS))
    np.testing.assert_allclose(apply(params, X), by_jax(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: ({k: v for k, v in p.items() if k != "b"}, X), ("params", "'b'")),
        (lambda p: (p | {"bias": p["b"]}, X), ("'bias'", "'b'")),
        (lambda p: (p, X, X), ("1 inputs", "not 2")),
        (lambda p: (p, X[0]), ("'x'", "rank")),
        (lambda p: (p, X[:, :2]), ("'x'", "axis 1")),
        (lambda p: (p | {"b": p["b"][:2]}, X), ("'b'", "axis 0")),
        (lambda p: (p, np.int32(X)), ("'x'", "float32", "astype")),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_bad_arguments_are_named(change, words, jit, function_and_params):
    apply, params = function_and_params
    with pytest.raises(ValueError, match=naming(*words)):
        (jax.jit(apply) if jit else apply)(*change(params))


def test_lengths_that_must_be_the_same():
    model = parse_model("f (float[N] x, float[N] z) => (float[N] y) { y = Add(x, z) }")
    apply, params = onnxgrad.jax.function(model)
    with pytest.raises(ValueError, match=naming("'N'", "'x'", "'z'")):
        apply(params, jnp.ones(1), jnp.ones(3))


def test_random_nodes():
    """Gradients of all orders are of one draw: for y = exp(r x), y times y'' is y' squared."""
    model = parse_model("""f (float[N] x) => (float[N] y) {
        r = RandomUniformLike<dtype=1>(x)
        s = Mul(x, r)
        y = Exp(s)
    }""")
    apply, params = onnxgrad.jax.function(model)

    def value(x):
        y = apply(params, x).sum()
        return y, y

    def slope(x):
        gradient, y = jax.grad(value, has_aux=True)(x)
        return gradient.sum(), (gradient, y)

    for _ in range(3):
        second, (first, y) = jax.grad(slope, has_aux=True)(jnp.ones(1))
        np.testing.assert_allclose(first, y * jnp.log(y), rtol=1e-5)
        np.testing.assert_allclose(second * y, first**2, rtol=1e-5)
    with pytest.raises(RuntimeError, match=naming("RandomUniformLike", "tangents")):
        jax.jvp(lambda x: apply(params, x), (jnp.ones(1),), (jnp.ones(1),))


def test_bad_files(tmp_path):
    with pytest.raises(ModelError, match=r"missing\.onnx"):
        onnxgrad.jax.function(tmp_path / "missing.onnx")
    with pytest.raises(ValueError, match=naming("'weight'", "'a'")):
        onnxgrad.jax.function(tanh_layer_model(), trainable=["weight"])
    with pytest.raises(ValueError, match=naming("recompute", "'cheap'")):
        onnxgrad.jax.function(tanh_layer_model(), recompute="some")


def test_chosen_weights():
    assert set(onnxgrad.jax.function(tanh_layer_model(), trainable=["a", "b"])[1]) == {"a", "b"}
    assert set(onnxgrad.jax.function(tanh_layer_model(), freeze=["a"])[1]) == {"b", "c", "d"}


def test_the_trained_file_comes_back(tmp_path):
    optax = pytest.importorskip("optax")
    apply, params = onnxgrad.jax.function(tanh_layer_model())
    target = np.float32(X[:, :2] - X[:, 1:])
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(params, state):
        loss, gradient = jax.value_and_grad(
            lambda params: ((apply(params, X) - target) ** 2).mean()
        )(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(150):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.02 * losses[0]
    saved = apply.to_onnx(params, tmp_path / "trained.onnx")
    session = onnxgrad.jax.function(tmp_path / "trained.onnx")
    np.testing.assert_allclose(session[0](session[1], X), by_jax(params, X), rtol=1e-5, atol=1e-6)
    assert list(saved.graph.node) == list(tanh_layer_model().graph.node)
    assert "4 weights" in repr(apply)
