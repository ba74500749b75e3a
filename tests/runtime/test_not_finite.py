"""Which node first computes NaN or infinity, and the callback that says so."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnxgrad as og
from onnxgrad import onnx_derivative
from onnxgrad.runtime import node_runs
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.training.callbacks.base import Callbacks, TrainingControl
from onnxgrad.training.callbacks.diagnostics import NanWatch
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep

INF = np.float32(np.inf)


def model_of_body(text: str, **constants) -> onnx.ModelProto:
    return parse_model(f"f {text}", opset=20, **constants)


def assert_message_names(text: str | None, *parts: str) -> None:
    assert re.search(naming(*parts), text or ""), (parts, text)


MASKED = "(float[N] x) => (float[N] y) { [add] m = Add(x, mask)  [soft] s = Softmax(m) %s }"
SCALED = "(float[N,2] x, float[2] w) => (float[N,2] y) { a = Mul(x, w)  y = Exp(a) }"
SEQUENCE = """(float[N] x, int64[1] i) => (float[N] y) { [here] a = Log(x)
    s = SequenceConstruct(x, a)  c = ConcatFromSequence <axis=0> (s)  y = Gather(c, i) }"""
IF = """(float[N] x, bool c) => (float[N] y) { z = Neg(x)  [it] y = If(c) <
    then_branch = a () => (float[M] t) { u = Mul(z, z)  [inner] t = Exp(u) },
    else_branch = b () => (float[M] t2) { v = Neg(x)  [inner] t2 = Log(v) }> }"""
LOOP = """(float[N] x, int64 n, bool c) => (float[N] y) { [it] y = Loop(n, c, x) <
    body = b (int64 i, bool ci, float[N] a) => (bool co, float[N] o) {
        co = Identity(ci)  [inner] o = Mul(a, a) }> }"""
SCAN = """(float[N] x, float[T,N] d) => (float[N] z) { [it] y = Scan(x, d) <num_scan_inputs = 1,
    scan_input_axes = [0], body = b (float[N] a, float[N] e) => (float[N] o) {
        [inner] u = Div(a, e)  o = Neg(u) }>  z = Neg(y) }"""
FIRST = {  # a model, its inputs, and what the message names; None where all is finite
    "finite": ("(float[N] x) => (float[N] y) { y = Exp(x) }", {"x": [0]}, None),
    "NaN in x": (SCALED, {"x": [[1, 2], [3, np.nan]], "w": [1, 1]}, "'x'|NaN|[1, 1]"),
    "infinity in w": (SCALED, {"x": [[1, 2]], "w": [1, INF]}, "'w'|infinity|[1]"),
    "infinities of a mask are no fault": (
        MASKED % "e = Exp(x)  y = Mul(s, e)", {"x": [1, 100, 1]}, "Exp (output 'e')|infinity",
    ),
    "nor where they are added": (
        MASKED % "[here] l = Sqrt(x) p = Add(l, m) y = Softmax(p)",
        {"x": [1, -1, 1]},
        "Sqrt (node 'here', output 'l')|NaN",
    ),
    "sequence": (
        SEQUENCE, {"x": [1, 0], "i": np.array([3])}, "Log (node 'here', output 'a')|infinity",
    ),
    "a finite element of it": (SEQUENCE, {"x": [1, 0], "i": np.array([2])}, None),
    "If": (IF, {"x": [100, 1], "c": np.array(True)}, "'y'|Exp (node 'inner', output 't')"),
    "else": (IF, {"x": [100, 1], "c": np.array(False)}, "'y'|Log (node 'inner', output 't2')"),
    "Loop": (  # 10 ** 2 ** 6 is more than float32 holds
        LOOP,
        {"x": [10, 1], "n": np.array(9), "c": np.array(True)},
        "Loop (node 'it', output 'y')|infinity",
    ),
    "Scan": (
        SCAN,
        {"x": [10, 1], "d": [[1, 1], [1, 0], [1, 1]]},
        "Scan (node 'it', output 'y')|infinity|'d' is between 0 and 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_first_value_that_is_not_finite(name):
    text, feed, parts = FIRST[name]
    constants = {"mask": np.float32([0, 0, -np.inf])} if "mask" in text else {}
    feed = {n: v if isinstance(v, np.ndarray) else np.float32(v) for n, v in feed.items()}
    message = first_not_finite(model_of_body(text, **constants), feed)
    if parts is None:
        assert message is None
    else:
        assert_message_names(message, *parts.split("|"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_names_the_node_and_the_ranges_of_its_inputs(dtype):
    kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    model = model_of_body(
        f"({kind}[N] x, {kind}[N] z) => ({kind}[N] y, {kind}[N] fine)"
        "{ a = Neg(x)  [the_one] b = Div(z, a)  c = Sub(b, b)  y = Sin(c)  fine = Neg(z) }"
    )
    feed = {"x": np.array([2, 0, -4], dtype), "z": np.array([1, 2, 3], dtype)}
    parts = ["Div (node 'the_one', output 'b')", "infinity", "'z' is between 1 and 3;"]
    assert_message_names(first_not_finite(model, feed), *parts, "'a' is between -2 and 4")


def test_a_mask_that_leaves_nothing():
    model = model_of_body(MASKED % "y = Neg(s)", mask=np.full(3, -INF))
    text = first_not_finite(model, {"x": np.zeros(3, np.float32)})
    assert_message_names(text, "'mask'", "infinity", "Softmax (node 'soft', output 's')", "NaN")


def test_the_gradient_behind_a_where():
    proto = model_of_body(
        "(float[N] x) => (float[N] y) { c = Greater(x, zero)  r = Sqrt(x)  y = Where(c, r, zero) }",
        zero=np.zeros((), np.float32),
    )
    grad = onnx_derivative(proto)
    feed = {"x": np.float32([4, 0]), "zero": np.float32(0), "y_grad": np.ones(2, np.float32)}
    text = first_not_finite(grad, feed)
    # 0.5 / sqrt(0), which zero is multiplied by
    assert_message_names(text, "Div (", "infinity", "'r' is between 0 and 2")
    with pytest.raises(ValueError, match=r"feed lacks \['zero'\]"):
        first_not_finite(grad, {name: feed[name] for name in ("x", "y_grad")})


def model_of_graph(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_runs, "PIECE_NODES", 3)


OPERATORS = {"Exp": 1, "Log": 1, "Sqrt": 1, "Neg": 1, "Tanh": 1, "Add": 2, "Mul": 2, "Div": 2}


@pytest.mark.parametrize("seed", [*range(8), *map(in_sweep, range(8, 30))])
def test_random_programs(seed, small_pieces):
    """By the values that onnx.reference computes, the node is at fault, and reaches an output."""
    rng = np.random.default_rng(seed)
    names, nodes = ["x0", "x1"], []
    for i in range(20):
        op = rng.choice(list(OPERATORS))
        inputs = [names[j] for j in rng.integers(max(0, len(names) - 6), len(names), OPERATORS[op])]
        nodes.append(helper.make_node(op, inputs, [f"v{i}"]))
        names.append(f"v{i}")
    outputs = names[-2:]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in names]
    proto, everything = (
        model_of_graph(helper.make_graph(nodes, "g", values[:2], outputs))
        for outputs in (values[-2:], values[2:])
    )
    feed = {n: rng.uniform(0.5, 3, 4).astype(np.float32) for n in names[:2]}
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(everything).run(None, feed)
    finite = dict.fromkeys(feed, True)
    finite |= {n: np.isfinite(v).all() for n, v in zip(names[2:], results, strict=True)}
    text = first_not_finite(proto, feed)
    assert (text is None) == all(finite[y] for y in outputs)
    if text is None:
        return
    at_fault = re.search(r"output '(\w+)'", text)[1]
    assert not finite[at_fault]
    by_output = {n.output[0]: n for n in nodes}
    assert all(finite[x] for x in by_output[at_fault].input)
    reached, stack = set(), [y for y in outputs if not finite[y]]
    while stack:
        name = stack.pop()
        reached.add(name)
        stack += [x for x in by_output[name].input if not finite[x]]
    assert at_fault in reached


def test_a_step_of_many_nodes():
    nodes = [helper.make_node("Sin", [f"v{i}"], [f"v{i + 1}"]) for i in range(1500)]
    nodes.insert(1200, helper.make_node("Log", ["v1190"], ["bad"], name="culprit"))
    nodes.append(helper.make_node("Add", ["v1500", "bad"], ["y"]))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("v0", "y"))
    model = model_of_graph(helper.make_graph(nodes, "g", [x], [y]))
    text = first_not_finite(model, {"v0": np.float32([-1, 1])})
    assert_message_names(text, "Log (node 'culprit', output 'bad')", "NaN")


# -- the callback ---------------------------------------------------------------------------------


def message_of_watch(failed_step) -> str:
    trainer = SimpleNamespace(failed_step=failed_step)
    return Callbacks([NanWatch()]).on_not_finite(trainer, None, TrainingControl())


def test_the_callback():
    proto = model_of_body("(float[N] x) => (float[N] y) { [grow] y = Exp(x) }")
    text = message_of_watch(lambda: (proto, {"x": np.float32([1, 200])}))
    assert_message_names(
        text, "Exp (node 'grow', output 'y')", "infinity", "'x' is between 1 and 200"
    )
    assert_message_names(message_of_watch(lambda: (proto, {"x": np.float32([1])})), "finite")
    assert message_of_watch(lambda: None) == ""


def test_an_error_while_looking_does_not_hide_the_loss():
    def fail():
        raise MemoryError("too large")

    assert_message_names(message_of_watch(fail), "too large")


# -- the errors and warnings of trainers ----------------------------------------------------------

X, Y = np.ones((48, 2), np.float32), np.ones((48, 2), np.float32)
X[[3, 41]] = 0
LINEAR = "(float[N,2] x) => (float[N,2] y) { %s }"
WEIGHT = {"w": np.float32([[1, 2], [3, 4]])}
NORMED = LINEAR % "n = ReduceL2<keepdims = 1>(x, ax)  [here] u = Div(x, n)  y = MatMul(u, w)"
FINE = slice(10, 20)
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)]
MEMBERS = {"loss": "mse", "members": 2, "learning_rate": [0.1, 0.01]}
OUTSIDE, INSIDE = og.compat.OrtGradientForwardBackwardOptimizer, og.compat.OrtGradientOptimizer
FAILING = {  # what is called, and the rows that are named
    "arrays": (lambda: mse_trainer().fit(X, Y, shuffle=False), "row 3;"),
    "another order": (lambda: mse_trainer().fit(X[30:], Y[30:]), "row 11;"),
    "micro-batches": (
        lambda: mse_trainer(accumulate=2).fit(X, Y, batch_size=48),
        "rows (3, 41|41, 3);",
    ),
    "a list": (lambda: mse_trainer().fit(BATCHES[1:]), "row 9 of batch 1;"),
    "an iterable": (lambda: mse_trainer().fit(lambda: iter(BATCHES[1:])), "row 9 of batch 1;"),
    "partial_fit": (lambda: mse_trainer().partial_fit(BATCHES), "row 3 of batch 0;"),
    "validation": (lambda: mse_trainer().fit(X[FINE], Y[FINE], validation=(X, Y)), "row 3;"),
    "validation in batches": (
        lambda: mse_trainer().fit(X[FINE], Y[FINE], validation=BATCHES),
        "row 3 of batch 0;",
    ),
    "a share": (lambda: mse_trainer(seed=1).fit(X[30:], Y[30:], validation=0.9), "row 11;"),
    "a loss outside": (lambda: outer_mse_trainer(batch_size=48).fit(X, Y), "rows"),
    "a loss outside, batches": (lambda: outer_mse_trainer().fit(BATCHES), "row 3 of batch 0;"),
    "a loss outside, validation": (
        lambda: outer_mse_trainer().fit(X[FINE], Y[FINE], X_val=X, y_val=Y),
        "rows 3, 41;",
    ),
    "a loss inside": (
        lambda: INSIDE(og.add_loss_output(normed_model()), ["w"], batch_size=48).fit(X, Y),
        "rows (3, 41|41, 3);",
    ),
    "a stack": (lambda: mse_stack().fit(X, Y, shuffle=False), "row 3;"),
}


def normed_model() -> onnx.ModelProto:
    """Return a model that divides each row by its norm: a row of zeros gives NaN."""
    return model_of_body(NORMED, ax=np.array([1]), **WEIGHT)


def mse_trainer(**options) -> og.Trainer:
    return og.Trainer(normed_model(), "mse", **options)


def mse_stack(**options) -> og.TrainerStack:
    return og.TrainerStack(normed_model(), **MEMBERS, **options)


def outer_mse_trainer(**options) -> og.compat.OrtGradientForwardBackwardOptimizer:
    return OUTSIDE(normed_model(), ["w"], **options)


@pytest.mark.parametrize("name", FAILING)
def test_an_error_names_the_node_of_the_file_and_the_rows(name):
    call, rows = FAILING[name]
    with pytest.raises(og.ConvergenceError) as caught:
        call()
    text = str(caught.value)
    assert re.search(rf"Div \(node 'here', output 'u'\) .*NaN in {rows}", text), text
    assert "Lower the" not in text


@pytest.mark.parametrize(
    ("make", "data", "rows", "number"),
    [
        (lambda: mse_trainer(metrics=["mse", "r2"]), (X, Y), "rows 3, 41;", 3),
        (mse_trainer, (BATCHES[1:],), "row 9 of batch 1;", 1),
        (lambda: mse_stack(metrics=["mae"]), (X, Y), "rows 3, 41;", 2),
    ],
)
def test_an_evaluation_names_the_rows(make, data, rows, number):
    with pytest.warns(UserWarning, match=rf"Div \(node 'here'.*NaN in {rows}"):
        results = make().evaluate(*data)
    assert all(np.isnan(value).all() for value in results.values())
    assert len(results) == number


def test_what_is_no_matter_of_the_file():
    """The loss, the gradient, and a rate that is too high; labels of which none counts."""
    linear = model_of_body(LINEAR % "y = MatMul(x, w)", **WEIGHT)
    log = og.Trainer(linear, lambda op, f, y: op.Log(f))
    with pytest.raises(og.ConvergenceError, match=naming("loss, Log", "infinity", "row 3;")):
        log.fit(X, Y, shuffle=False)
    with pytest.warns(UserWarning, match=naming("loss, Log", "infinity", "rows 3, 41")):
        log.evaluate(X, Y)
    root = model_of_body(LINEAR % "m = MatMul(x, w)  y = Sqrt(m)", **WEIGHT)
    with pytest.raises(og.ConvergenceError, match=naming("gradient", "Div", "infinity", "row 3")):
        og.Trainer(root, "mse").fit(X, Y, shuffle=False)
    high = og.Trainer(linear, "mse", optimizer="sgd", learning_rate=1e30)
    with pytest.raises(og.ConvergenceError, match=r"the loss, .*learning rate, 1e\+30"):
        high.fit(X[FINE], Y[FINE], epochs=3)
    ignored = og.Trainer(linear, "ce", loss_options={"ignore_index": 0})
    with pytest.warns(UserWarning, match="label"):
        ignored.evaluate(X, np.zeros(48, int))


HALF = """f (int64[N] ids) => (float16[N,3] y) {
    h = Gather(table, ids)  y = MatMul(h, w) }"""


def float16_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"table": (50, 4), "w": (4, 3)}
    return parse_model(
        HALF, opset=20, **{n: rng.normal(size=s).astype("f2") for n, s in shapes.items()}
    )


def test_weights_of_16_bits():
    ids = np.arange(25)
    message = naming("'table', 'w'", "float16", "precision='auto'")
    trainer = og.Trainer(float16_model(), "ce", optimizer="sgd", precision="file")
    with pytest.warns(UserWarning, match=message):
        trainer.partial_fit(ids, ids % 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.partial_fit(ids, ids % 3)
    with pytest.warns(UserWarning, match=message):
        OUTSIDE(float16_model(), learning_loss="cross_entropy", batch_size=5, max_iter=1).fit(
            ids, ids % 3
        )
    members = {"members": 2, "learning_rate": [0.1, 0.01], "optimizer": "sgd"}
    with pytest.warns(UserWarning, match=message):
        og.TrainerStack(float16_model(), loss="ce", precision="file", **members).fit(ids, ids % 3)
    adagrad = og.Trainer(float16_model(), "ce", optimizer="adagrad", precision="file")
    expected = naming("the update", "Div", "NaN", "precision='float32'")  # eps is zero in float16
    with (
        pytest.warns(UserWarning, match=message),
        pytest.raises(og.ConvergenceError, match=expected),
    ):
        adagrad.fit(ids, ids % 3)


@pytest.mark.parametrize("make", [mse_trainer, mse_stack])
def test_labels_of_which_none_counts(make):
    trainer = make(loss_options={"ignore_nan": True})
    rows = np.setdiff1d(np.arange(len(X)), [3, 41])
    missing = np.full_like(Y[rows], np.nan)
    with pytest.warns(UserWarning, match=naming("epoch 1", "nan", "label")):
        trainer.fit(X[rows], missing)
    if isinstance(trainer, og.Trainer):
        with pytest.raises(og.ConvergenceError, match=r"label counts: [^.]*$"):
            trainer.fit(X[rows], Y[rows], validation=(X[rows], missing))


# -- likely causes --------------------------------------------------------------------------------

PLAIN, UNIT = LINEAR % "y = MatMul(x, w)", {"w": np.float32([[1, 0], [0, 1]])}
RNG = np.random.default_rng(0)
SMALL, GOAL = (RNG.normal(size=(40, 2)).astype(np.float32) for _ in range(2))


def with_large_number(array, value):
    """Return a copy in which one number is `value`."""
    array = array.copy()
    array[7, 1] = value
    return array


def message_of_diverging(X, y, weight=None, rate=0.1, **more):
    trainer = og.Trainer(model_of_body(PLAIN, **UNIT), "mse", optimizer="sgd", learning_rate=rate)
    with pytest.raises(og.ConvergenceError) as caught:
        trainer.fit(X, y, sample_weight=weight, epochs=60, shuffle=False, **more)
    return str(caught.value)


def test_the_rate_is_named_where_the_data_are_small():
    text = message_of_diverging(SMALL, GOAL, rate=1e20)
    assert text.endswith("learning rate, 1e+20"), text


@pytest.mark.parametrize(
    ("value", "more"),
    [
        (3e3, {}),
        (1e12, {"validation": (SMALL, GOAL)}),
        (1e12, {"validation": 0.5}),
        *map(in_sweep, [1e12, 3e3, 3e3], [{}, {"validation": (SMALL, GOAL)}, {"validation": 0.5}]),
    ],
)
def test_a_number_that_is_large_is_named(value, more):
    """Also where another batch fails, or that of the validation data."""
    text = message_of_diverging(with_large_number(SMALL, value), GOAL, batch_size=4, **more)
    assert_message_names(text, "'x'", f"{value:.3g}")
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(with_large_number(SMALL, value), columns=["age", "income"])
    assert_message_names(message_of_diverging(table, GOAL, **more), "'income'", f"{value:.3g}")


def test_a_label_that_is_large_is_named():
    text = message_of_diverging(SMALL, with_large_number(GOAL, 1e25))
    assert_message_names(text, "'label'", "1e+25")


def test_weights_of_rows_that_are_large_are_named():
    weight = np.ones(40, np.float32)
    weight[7] = 3e38
    text = message_of_diverging(SMALL, GOAL, weight)
    assert_message_names(text, "sample_weight", "3e+38", "median 1")


def test_labels_that_do_not_count_hide_no_large_one():
    linear = og.Trainer(
        model_of_body(PLAIN, **UNIT), "mse", optimizer="sgd", loss_options={"ignore_nan": True}
    )
    goal = with_large_number(GOAL, 1e25)
    goal[3] = np.nan
    with pytest.raises(og.ConvergenceError, match=naming("'label'", "1e")):
        linear.fit(SMALL, goal, epochs=3)


def test_the_rates_of_a_stack_are_named():
    stack = og.TrainerStack(
        model_of_body(PLAIN, **UNIT), "mse", optimizer="sgd", learning_rate=[1e20, 1e25]
    )
    with pytest.raises(og.ConvergenceError, match=r"rate, 1e\+20 to 1e\+25"):
        stack.fit(SMALL, GOAL, epochs=9)
