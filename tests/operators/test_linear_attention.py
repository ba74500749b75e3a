"""LinearAttention in chunks: outputs and gradients against a loop over the tokens in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxgrad import DerivativeOptions, NoGradientRule, check_gradient, onnx_derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import to_proto
from tests.support.errors import naming
from tests.support.models import operator_names
from tests.support.running import in_sweep, run, run_named

pytestmark = pytest.mark.newest  # opset 27

RULES = ("linear", "gated", "delta", "gated_delta")
SIZE, VALUE = 3, 2  # of a key, and of a value
FILLED = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad


@dataclass(frozen=True)
class Case:
    """A node of LinearAttention: how many tokens it has, and which operands."""

    rule: str
    tokens: int
    heads: tuple[int, int] = (4, 2)  # of queries, and of keys
    past: bool = True
    per_dimension: bool = False
    one_rate: bool = False
    attributes: str = ""
    dynamic: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the operands that the node has, in their order."""
        rows, heads, shared = (2, self.tokens), *self.heads
        shapes = {
            "q": (*rows, heads * SIZE),
            "k": (*rows, shared * SIZE),
            "v": (*rows, shared * VALUE),
        }
        if self.past:
            shapes["s"] = (2, shared, SIZE, VALUE)
        if "gated" in self.rule:
            shapes["g"] = (*rows, shared * SIZE if self.per_dimension else shared)
        if "delta" in self.rule:
            shapes["b"] = (*rows, 1 if self.one_rate else shared)
        return shapes

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return operands, with a decay that is 0.5 in the mean, and some that grow."""
        rng = np.random.default_rng(seed)
        feed = {n: rng.standard_normal(shape) for n, shape in self.shapes().items()}
        feed["k"] /= SIZE**0.5
        if "g" in feed:
            feed["g"] = 0.7 * feed["g"] - 0.5
        if "b" in feed:
            feed["b"] = 1 / (1 + np.exp(-feed["b"]))
        return feed

    def model(self, dtype: str = "double", state: str = "") -> onnx.ModelProto:
        """Return the node as a model; `state` is the dtype of the state, if it is another one."""
        shapes = self.shapes()
        free = {n: ["N", "T" if n != "s" else s[1], *s[2:]] for n, s in shapes.items()}
        known = {n: ", ".join(map(str, s)) for n, s in (free if self.dynamic else shapes).items()}
        types = {n: state or dtype if n == "s" else dtype for n in shapes}
        inputs = ", ".join(f"{types[n]}[{known[n]}] {n}" for n in shapes)
        operands = ", ".join(n if n in shapes else "" for n in "qkvsgb").rstrip(", ")
        made = onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 27]> f ({inputs}) =>
            ({dtype} y, {types.get("s", dtype)} z) {{ y, z = LinearAttention<
            q_num_heads={self.heads[0]}, kv_num_heads={self.heads[1]}, update_rule="{self.rule}"
            {self.attributes}>({operands}) }}"""
        )
        for y in made.graph.output:
            y.type.tensor_type.ClearField("shape")
        return made


def loop_over_tokens(case: Case, feed: dict, scale: float) -> tuple:
    """Return y and the last state as tensors of PyTorch, token by token, as ONNX defines them."""
    torch = pytest.importorskip("torch")
    heads, shared = case.heads
    apart = {
        n: x if n == "s" else x.unflatten(-1, (1 if x.shape[-1] == 1 else shared, -1))
        for n, x in feed.items()
        if n != "q"
    }
    queries, outputs = feed["q"].unflatten(-1, (shared, heads // shared, SIZE)), []
    state = apart.get("s", torch.zeros(2, shared, SIZE, VALUE, dtype=feed["q"].dtype))
    for t in range(case.tokens):
        k, u = apart["k"][:, t], apart["v"][:, t]
        if "g" in apart:
            state = state * apart["g"][:, t].exp().unsqueeze(-1)
        if "b" in apart:
            u = apart["b"][:, t] * (u - torch.einsum("nhkv,nhk->nhv", state, k))
        state = state + torch.einsum("nhk,nhv->nhkv", k, u)
        outputs.append(scale * torch.einsum("nhgk,nhkv->nhgv", queries[:, t], state))
    return torch.stack(outputs, 1).flatten(2), state


def assert_as_loop(case: Case, scale: float = SIZE**-0.5, feed: dict | None = None) -> None:
    """Compare outputs, and the gradients of all operands for drawn cotangents, in float64."""
    torch = pytest.importorskip("torch")
    feed = feed or case.draw()
    given = {n: torch.tensor(x, requires_grad=True) for n, x in feed.items()}
    results = dict(zip("yz", loop_over_tokens(case, given, scale), strict=True))
    rng = np.random.default_rng(1)
    cotangents = {n: rng.standard_normal(x.shape) for n, x in results.items()}
    total = sum((x * torch.tensor(cotangents[n])).sum() for n, x in results.items())
    expected = dict(zip(given, torch.autograd.grad(total, [*given.values()]), strict=True))
    made = onnx_derivative(case.model(), options=DerivativeOptions.KeepOutputs)
    found = run_named(made, feed | {f"{n}_grad": x for n, x in cotangents.items()})
    for name, x in results.items():
        np.testing.assert_allclose(found[name], x.detach(), rtol=1e-9, atol=1e-10)
    for name, x in expected.items():
        np.testing.assert_allclose(
            found[f"{name}_grad"], x, rtol=1e-8, atol=1e-9, err_msg=f"of {name}"
        )


# -- outputs and gradients -------------------------------------------------------------------------

CASES = [
    Case("linear", 70),
    Case("linear", 33, past=False, heads=(2, 2), dynamic=True),
    Case("gated", 70, dynamic=True),
    Case("gated", 19, per_dimension=True, heads=(2, 2)),
    Case("delta", 70, dynamic=True, one_rate=True),
    Case("delta", 33, past=False, heads=(3, 1)),
    Case("gated_delta", 65, heads=(2, 2)),
    Case("gated_delta", 19, per_dimension=True, dynamic=True),
    Case("gated_delta", 5, past=False),
    Case("gated_delta", 1),
    Case("gated_delta", 1, past=False, per_dimension=True, dynamic=True),
]
ALL = [
    Case(rule, tokens, past=past, per_dimension=per_dimension, dynamic=dynamic)
    for rule in RULES
    for per_dimension in ((False, True) if "gated" in rule else (False,))
    for tokens in (1, 8, 9, 32, 64, 71)
    for past in (False, True)
    for dynamic in (False, True)
]


@pytest.mark.parametrize("case", [*CASES, *(in_sweep(case) for case in ALL)], ids=repr)
def test_outputs_and_gradients(case):
    assert_as_loop(case)


@pytest.mark.parametrize("chunk_size", [1, 7, in_sweep(2), in_sweep(16), 1000])
@pytest.mark.parametrize("rule", [in_sweep("gated"), "gated_delta"])
def test_chunk_size_and_scale(rule, chunk_size):
    case = Case(rule, 37, attributes=f", chunk_size={chunk_size}, scale=0.75")
    assert_as_loop(case, scale=0.75)


@pytest.mark.parametrize("case", [Case("gated", 5), Case("gated_delta", 9, per_dimension=True)])
def test_second_order(case):
    report = check_gradient(case.model("float"), feed=case.draw(), order=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("past", [True, in_sweep(False)])
@pytest.mark.parametrize("rule", RULES)
def test_outputs_of_the_reference(rule, past):
    case = Case(rule, 41, past=past, per_dimension=rule == "gated")
    feed = {n: x.astype(np.float32) for n, x in case.draw().items()}
    model = case.model("float")
    expected = ReferenceEvaluator(model).run(None, feed)
    found = run(to_proto(prepare(model)), feed)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtypes", [("float16", ""), ("float16", "float"), ("float", "float16")])
def test_half_precision(dtypes):
    case = Case("gated_delta", 41)
    model, feed = case.model(*dtypes), case.draw()
    types = {x.name: x.type.tensor_type.elem_type for x in model.graph.input}
    feed = {n: x.astype(onnx.helper.tensor_dtype_to_np_dtype(types[n])) for n, x in feed.items()}
    expected = ReferenceEvaluator(model).run(None, feed)
    made = onnx_derivative(model, options=FILLED)
    found = run_named(made, feed)
    for name, x in zip("yz", expected, strict=True):
        assert found[name].dtype == x.dtype
        np.testing.assert_allclose(found[name], x, rtol=3e-3, atol=3e-3)
    for name, x in feed.items():
        assert found[f"{name}_grad"].dtype == x.dtype
        assert np.isfinite(found[f"{name}_grad"]).all()


# -- what chunks may lose --------------------------------------------------------------------------


def test_decays_of_any_size():
    """Behind a decay that forgets all, later decays keep their digits; others let a state grow."""
    for per_dimension in (False, True):
        case = Case("gated_delta", 40, per_dimension=per_dimension)
        feed = case.draw()
        feed["g"][:, [3, 20, 21]] = -1e9
        feed["g"][:, 35:] = 3.0
        assert_as_loop(case, feed=feed)
        found = run(to_proto(prepare(case.model())), feed)
        feed["g"][:, [3, 20, 21]] = -np.inf
        made = run_named(onnx_derivative(case.model(), options=FILLED), feed)
        for name, x in zip("yz", found, strict=True):
            np.testing.assert_allclose(made[name], x)
        assert all(np.isfinite(x).all() for x in made.values())


def test_keys_that_are_alike():
    """The powers of L have numbers of 1e8 for equal keys, and the inverse none above 1."""
    case = Case("delta", 96, heads=(1, 1))
    feed = case.draw()
    feed["k"][:] = SIZE**-0.5
    feed["b"][:] = 0.99
    assert_as_loop(case, feed=feed)
    exact = run(to_proto(prepare(case.model())), feed)
    single = run(
        to_proto(prepare(case.model("float"))), {n: x.astype(np.float32) for n, x in feed.items()}
    )
    for a, b in zip(single, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# -- the graph -------------------------------------------------------------------------------------


def test_one_chunk_needs_no_scan():
    for case, scans in (
        (Case("gated_delta", 32), 0),
        (Case("gated_delta", 33), 1),
        (Case("gated", 8, per_dimension=True), 0),
        (Case("linear", 8, dynamic=True), 1),
    ):
        assert operator_names(to_proto(prepare(case.model()))).count("Scan") == scans


def test_no_tokens():
    case = Case("gated_delta", 0, dynamic=True)
    made, feed = onnx_derivative(case.model(), options=FILLED), case.draw()
    found = run_named(made, feed)
    assert found["y"].shape == (2, 0, 4 * VALUE)
    np.testing.assert_array_equal(found["z"], feed["s"])
    np.testing.assert_array_equal(found["s_grad"], np.ones_like(feed["s"]))


def test_decay_that_is_missing():
    model = Case("linear", 3).model()
    model.graph.node[0].attribute[-1].s = b"gated"
    with pytest.raises(NoGradientRule, match=naming("LinearAttention")):
        onnx_derivative(model)
