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
from onnxgrad.runtime import not_finite
from onnxgrad.runtime.not_finite import first_not_finite
from onnxgrad.training.callbacks.base import Control
from onnxgrad.training.callbacks.events import Callbacks
from onnxgrad.training.callbacks.nan_watch import NanWatch

INF = np.float32(np.inf)


def model(text: str, **constants) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> f {text}')
    tensors = (onnx.numpy_helper.from_array(a, name) for name, a in constants.items())
    proto.graph.initializer.extend(tensors)
    return proto


def test_all_is_well():
    assert (
        first_not_finite(
            model("(float[N] x) => (float[N] y) { y = Exp(x) }"), {"x": np.zeros(2, np.float32)}
        )
        is None
    )


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float", "float32"), ("double", "float64"), ("float16", "float16")]
)
def test_names_the_node_and_the_ranges_of_its_inputs(dtype, kind):
    proto = model(
        f"({dtype}[N] x, {dtype}[N] z) => ({dtype}[N] y, {dtype}[N] fine)"
        "{ a = Neg(x)  [the_one] b = Div(z, a)  c = Sub(b, b)  y = Sin(c)  fine = Neg(z) }"
    )
    feed = {"x": np.array([2, 0, -4], kind), "z": np.array([1, 2, 3], kind)}
    assert first_not_finite(proto, feed) == (
        "Div (node 'the_one', output 'b') gives infinity; its input 'z' is between 1 and 3; "
        "its input 'a' is between -2 and 4"
    )


def test_an_input_that_is_not_finite():
    proto = model("(float[N,2] x, float[2] w) => (float[N,2] y) { a = Mul(x, w)  y = Exp(a) }")
    x = np.float32([[1, 2], [3, np.nan]])
    text = first_not_finite(proto, {"x": x, "w": np.ones(2, np.float32)})
    assert text == "the input 'x' holds NaN, first at [1, 1]"
    text = first_not_finite(proto, {"x": np.abs(np.float32([[1, 2]])), "w": np.float32([1, INF])})
    assert text == "the input 'w' holds infinity, first at [1]"


MASKED = "(float[N] x) => (float[N] y) { [add] m = Add(x, mask)  [soft] s = Softmax(m) %s }"


def test_infinities_of_a_mask_are_no_fault():
    mask = np.float32([0, 0, -np.inf])
    proto = model(MASKED % "e = Exp(x)  y = Mul(s, e)", mask=mask)
    text = first_not_finite(proto, {"x": np.float32([1, 100, 1])})
    assert text.startswith("Exp (output 'e') gives infinity")
    proto = model(MASKED % "[here] l = Sqrt(x) p = Add(l, m) y = Softmax(p)", mask=mask)
    text = first_not_finite(proto, {"x": np.float32([1, -1, 1])})
    assert text.startswith("Sqrt (node 'here', output 'l') gives NaN")


def test_a_mask_that_leaves_nothing():
    proto = model(MASKED % "y = Neg(s)", mask=np.full(3, -INF))
    text = first_not_finite(proto, {"x": np.zeros(3, np.float32)})
    assert text == (
        "the constant 'mask' holds infinity, from which Softmax (node 'soft', output 's') "
        "computes NaN"
    )


def test_the_gradient_behind_a_where():
    proto = model(
        "(float[N] x) => (float[N] y) { c = Greater(x, zero)  r = Sqrt(x)  y = Where(c, r, zero) }",
        zero=np.zeros((), np.float32),
    )
    grad = onnx_derivative(proto)
    feed = {"x": np.float32([4, 0]), "zero": np.float32(0), "y_grad": np.ones(2, np.float32)}
    text = first_not_finite(grad, feed)
    assert text.startswith("Div (")  # 0.5 / sqrt(0), which zero is multiplied by
    assert "gives infinity" in text
    assert "its input 'r' is between 0 and 2" in text
    with pytest.raises(ValueError, match=r"feed lacks \['zero'\]"):
        first_not_finite(grad, {name: feed[name] for name in ("x", "y_grad")})


BODIES = {
    "If": (
        """(float[N] x, bool c) => (float[N] y) { z = Neg(x)  [it] y = If(c) <
            then_branch = a () => (float[M] t) { u = Mul(z, z)  [inner] t = Exp(u) },
            else_branch = b () => (float[M] t2) { t2 = Log(x) }> }""",
        {"x": np.float32([100, 1]), "c": np.array(True)},
        "inside of it, Exp (node 'inner', output 't') is the first",
    ),
    "else": (
        """(float[N] x, bool c) => (float[N] y) { [it] y = If(c) <
            then_branch = a () => (float[M] t) { t = Exp(x) },
            else_branch = b () => (float[M] t2) { u = Neg(x)  [inner] t2 = Log(u) }> }""",
        {"x": np.float32([100, 1]), "c": np.array(False)},
        "inside of it, Log (node 'inner', output 't2') is the first",
    ),
    "Loop": (
        """(float[N] x, int64 n, bool c) => (float[N] y) { [it] y = Loop(n, c, x) <
            body = b (int64 i, bool ci, float[N] a) => (bool co, float[N] o) {
                co = Identity(ci)  [inner] o = Mul(a, a) }> }""",
        {"x": np.float32([10, 1]), "n": np.array(9), "c": np.array(True)},
        "inside of it, Mul (node 'inner', output 'o') is the first, in iteration 6",
    ),  # 10 ** 2 ** 6 is more than float32 holds
    "Scan": (
        """(float[N] x, float[T,N] d) => (float[N] z) { [it] y = Scan(x, d) <num_scan_inputs = 1,
            scan_input_axes = [0], body = b (float[N] a, float[N] e) => (float[N] o) {
                [inner] u = Div(a, e)  o = Neg(u) }>  z = Neg(y) }""",
        {"x": np.float32([10, 1]), "d": np.float32([[1, 1], [1, 0], [1, 1]])},
        "inside of it, Div (node 'inner', output 'u') is the first, in iteration 2",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_inside_of_subgraphs(name):
    text, feed, expected = BODIES[name]
    assert re.fullmatch(
        rf"\w+ \(node 'it', output 'y'\) gives (NaN|infinity); {re.escape(expected)}",
        first_not_finite(model(text), feed),
    )


def test_through_a_sequence_and_integers():
    proto = model(
        """(float[N] x, int64[1] i) => (float[N] y) { [here] a = Log(x)
        s = SequenceConstruct(x, a)  c = ConcatFromSequence <axis=0> (s)  y = Gather(c, i) }"""
    )
    text = first_not_finite(proto, {"x": np.float32([1, 0]), "i": np.array([3])})
    assert text.startswith("Log (node 'here', output 'a') gives infinity")
    assert first_not_finite(proto, {"x": np.float32([1, 0]), "i": np.array([2])}) is None


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(not_finite, "_NODES", 3)


OPERATORS = {"Exp": 1, "Log": 1, "Sqrt": 1, "Neg": 1, "Tanh": 1, "Add": 2, "Mul": 2, "Div": 2}


@pytest.mark.parametrize("seed", range(30))
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
    graph = helper.make_graph(nodes, "g", values[:2], values[-2:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    feed = {n: rng.uniform(0.5, 3, 4).astype(np.float32) for n in names[:2]}
    everything = helper.make_model(
        helper.make_graph(nodes, "g", values[:2], values[2:]),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(everything).run(None, feed)
    finite = {
        n: np.isfinite(v).all() for n, v in zip(names[2:], results, strict=True)
    } | dict.fromkeys(feed, True)
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
    graph = helper.make_graph(nodes, "g", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    text = first_not_finite(proto, {"v0": np.float32([-1, 1])})
    assert text.startswith("Log (node 'culprit', output 'bad') gives NaN")


# -- the callback ---------------------------------------------------------------------------------


def ask(failed_step) -> str:
    trainer = SimpleNamespace(failed_step=failed_step)
    return Callbacks([NanWatch()]).on_not_finite(trainer, None, Control())


def test_the_callback():
    proto = model("(float[N] x) => (float[N] y) { [grow] y = Exp(x) }")
    text = ask(lambda: (proto, {"x": np.float32([1, 200])}))
    assert text == (
        "In this step, Exp (node 'grow', output 'y') gives infinity; its input 'x' is between 1 "
        "and 200"
    )
    assert "only finite values" in ask(lambda: (proto, {"x": np.float32([1])}))
    assert ask(lambda: None) == ""


def test_an_error_while_looking_does_not_hide_the_loss():
    def fail():
        raise MemoryError("too large")

    assert ask(fail) == "Looking for the node at fault failed: too large"


# -- the errors and warnings of trainers ----------------------------------------------------------

X, Y = np.ones((48, 2), np.float32), np.ones((48, 2), np.float32)
X[[3, 41]] = 0
LINEAR = "(float[N,2] x) => (float[N,2] y) { %s }"
WEIGHT = {"w": np.float32([[1, 2], [3, 4]])}
NORMED = model(
    LINEAR % "n = ReduceL2<keepdims = 1>(x, ax)  [here] u = Div(x, n)  y = MatMul(u, w)",
    ax=np.array([1]),
    **WEIGHT,
)
FINE = slice(10, 20)
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)]
MEMBERS = {"loss": "mse", "members": 2, "learning_rate": [0.1, 0.01]}
OUTSIDE, INSIDE = og.OrtGradientForwardBackwardOptimizer, og.OrtGradientOptimizer
FAILING = {  # what is called, and the rows that are named
    "arrays": (lambda: og.Trainer(NORMED, "mse").fit(X, Y, shuffle=False), "row 3;"),
    "another order": (lambda: og.Trainer(NORMED, "mse").fit(X[30:], Y[30:]), "row 11;"),
    "micro-batches": (
        lambda: og.Trainer(NORMED, "mse", accumulate=2).fit(X, Y, batch_size=48),
        "rows (3, 41|41, 3);",
    ),
    "a list": (lambda: og.Trainer(NORMED, "mse").fit(BATCHES[1:]), "row 9 of batch 1;"),
    "an iterable": (
        lambda: og.Trainer(NORMED, "mse").fit(lambda: iter(BATCHES[1:])),
        "row 9 of batch 1;",
    ),
    "partial_fit": (lambda: og.Trainer(NORMED, "mse").partial_fit(BATCHES), "row 3 of batch 0;"),
    "validation": (
        lambda: og.Trainer(NORMED, "mse").fit(X[FINE], Y[FINE], validation=(X, Y)),
        "row 3;",
    ),
    "validation in batches": (
        lambda: og.Trainer(NORMED, "mse").fit(X[FINE], Y[FINE], validation=BATCHES),
        "row 3 of batch 0;",
    ),
    "a share": (
        lambda: og.Trainer(NORMED, "mse", seed=1).fit(X[30:], Y[30:], validation=0.9),
        "row 11;",
    ),
    "a loss outside": (lambda: OUTSIDE(NORMED, ["w"], batch_size=48).fit(X, Y), "rows"),
    "a loss outside, batches": (lambda: OUTSIDE(NORMED, ["w"]).fit(BATCHES), "row 3 of batch 0;"),
    "a loss outside, validation": (
        lambda: OUTSIDE(NORMED, ["w"]).fit(X[FINE], Y[FINE], X_val=X, y_val=Y),
        "rows 3, 41;",
    ),
    "a loss inside": (
        lambda: INSIDE(og.add_loss_output(NORMED), ["w"], batch_size=48).fit(X, Y),
        "rows (3, 41|41, 3);",
    ),
    "a stack": (lambda: og.TrainerStack(NORMED, **MEMBERS).fit(X, Y, shuffle=False), "row 3;"),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_names_the_node_of_the_file_and_the_rows(name):
    call, rows = FAILING[name]
    with pytest.raises(og.ConvergenceError) as caught:
        call()
    text = str(caught.value)
    assert re.search(rf"Div \(node 'here', output 'u'\) gives NaN in {rows}", text), text
    assert "no matter of the learning rate" in text
    assert "Lower the" not in text


@pytest.mark.parametrize(
    ("trainer", "data", "rows", "number"),
    [
        (og.Trainer(NORMED, "mse", metrics=["mse", "r2"]), (X, Y), "rows 3, 41;", 3),
        (og.Trainer(NORMED, "mse"), (BATCHES[1:],), "row 9 of batch 1;", 1),
        (og.TrainerStack(NORMED, metrics=["mae"], **MEMBERS), (X, Y), "rows 3, 41;", 2),
    ],
)
def test_an_evaluation_names_the_rows(trainer, data, rows, number):
    with pytest.warns(UserWarning, match=rf"Div \(node 'here'.* gives NaN in {rows}"):
        results = trainer.evaluate(*data)
    assert all(np.isnan(value).all() for value in results.values())
    assert len(results) == number


def test_what_is_no_matter_of_the_file():
    """The loss, the gradient, and a rate that is too high; labels of which none counts."""
    linear = model(LINEAR % "y = MatMul(x, w)", **WEIGHT)
    log = og.Trainer(linear, lambda op, f, y: op.Log(f))
    with pytest.raises(og.ConvergenceError, match=r"In the loss, Log .* infinity in row 3;"):
        log.fit(X, Y, shuffle=False)
    with pytest.warns(UserWarning, match=r"in the loss, Log .* gives infinity in rows 3, 41"):
        log.evaluate(X, Y)
    root = model(LINEAR % "m = MatMul(x, w)  y = Sqrt(m)", **WEIGHT)
    expected = r"no matter of the learning rate.* In the gradient .* Div .* infinity in row 3"
    with pytest.raises(og.ConvergenceError, match=expected):
        og.Trainer(root, "mse").fit(X, Y, shuffle=False)
    high = og.Trainer(linear, "mse", optimizer="sgd", learning_rate=1e30)
    with pytest.raises(og.ConvergenceError, match=r"In the loss, .*Lower the learning rate"):
        high.fit(X[FINE], Y[FINE], epochs=3)
    ignored = og.Trainer(linear, "ce", loss_options={"ignore_index": 0})
    with pytest.warns(UserWarning, match="no label counts"):
        ignored.evaluate(X, np.zeros(48, int))


HALF = """<ir_version: 9, opset_import: ["": 20]> f (int64[N] ids) => (float16[N,3] y) {
    h = Gather(table, ids)  y = MatMul(h, w) }"""


def half(dtype="f2"):
    rng, proto = np.random.default_rng(0), onnx.parser.parse_model(HALF)
    for name, shape in (("table", (50, 4)), ("w", (4, 3))):
        array = rng.normal(size=shape).astype(dtype)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def test_weights_of_16_bits():
    ids = np.arange(25)
    message = r"'table', 'w' train in float16: .* precision='auto' keeps both in float32"
    trainer = og.Trainer(half(), "ce", optimizer="sgd", precision="file")
    with pytest.warns(UserWarning, match=message):
        trainer.partial_fit(ids, ids % 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.partial_fit(ids, ids % 3)
    with pytest.warns(UserWarning, match=message):
        OUTSIDE(half(), learning_loss="cross_entropy", batch_size=5, max_iter=1).fit(ids, ids % 3)
    members = {"members": 2, "learning_rate": [0.1, 0.01], "optimizer": "sgd"}
    with pytest.warns(UserWarning, match=message):
        og.TrainerStack(half(), loss="ce", precision="file", **members).fit(ids, ids % 3)
    adagrad = og.Trainer(
        half(), "ce", optimizer="adagrad", precision="file"
    )  # whose eps is zero in float16
    expected = r"no matter of the learning rate.* In the gradient or the update, .* Div .* NaN.*"
    with (
        pytest.warns(UserWarning, match=message),
        pytest.raises(og.ConvergenceError, match=expected + "precision='float32' does not"),
    ):
        adagrad.fit(ids, ids % 3)


@pytest.mark.parametrize(
    "trainer",
    [
        og.Trainer(NORMED, "mse", loss_options={"ignore_nan": True}),
        og.TrainerStack(NORMED, loss_options={"ignore_nan": True}, **MEMBERS),
    ],
)
def test_labels_of_which_none_counts(trainer):
    rows = np.setdiff1d(np.arange(len(X)), [3, 41])
    missing = np.full_like(Y[rows], np.nan)
    with pytest.warns(UserWarning, match="the loss of epoch 1 is nan: no label counts"):
        trainer.fit(X[rows], missing)
    if isinstance(trainer, og.Trainer):
        with pytest.raises(og.ConvergenceError, match=r"No label counts: [^.]*$"):
            trainer.fit(X[rows], Y[rows], validation=(X[rows], missing))


# -- likely causes --------------------------------------------------------------------------------

PLAIN = model(LINEAR % "y = MatMul(x, w)", w=np.float32([[1, 0], [0, 1]]))
RNG = np.random.default_rng(0)
SMALL, GOAL = (RNG.normal(size=(40, 2)).astype(np.float32) for _ in range(2))


def large(array, value):
    """Return a copy in which one number is `value`."""
    array = array.copy()
    array[7, 1] = value
    return array


def diverging(X, y, weight=None, rate=0.1, **more):
    trainer = og.Trainer(PLAIN, "mse", optimizer="sgd", learning_rate=rate)
    with pytest.raises(og.ConvergenceError) as caught:
        trainer.fit(X, y, sample_weight=weight, epochs=60, shuffle=False, **more)
    return str(caught.value)


def test_the_rate_is_named_where_the_data_are_small():
    text = diverging(SMALL, GOAL, rate=1e20)
    assert text.endswith(". Lower the learning rate, 1e+20"), text


@pytest.mark.parametrize("more", [{}, {"validation": (SMALL, GOAL)}, {"validation": 0.5}])
@pytest.mark.parametrize("value", [3e3, 1e12])
def test_a_number_that_is_large_is_named(value, more):
    """Also where another batch fails, or that of the validation data."""
    text = diverging(large(SMALL, value), GOAL, batch_size=4, **more)
    assert f"The input 'x' reaches {value:.3g}: scale the data, or lower the" in text
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(large(SMALL, value), columns=["age", "income"])
    assert f"The column 'income' reaches {value:.3g}: scale" in diverging(table, GOAL, **more)


def test_a_label_that_is_large_is_named():
    assert "The input 'label' reaches 1e+25" in diverging(SMALL, large(GOAL, 1e25))


def test_weights_of_rows_that_are_large_are_named():
    weight = np.ones(40, np.float32)
    weight[7] = 3e38
    text = diverging(SMALL, GOAL, weight)
    assert "no matter of the learning rate" in text
    assert "The largest sample_weight is 3e+38, and the median 1" in text


def test_labels_that_do_not_count_hide_no_large_one():
    linear = og.Trainer(PLAIN, "mse", optimizer="sgd", loss_options={"ignore_nan": True})
    goal = large(GOAL, 1e25)
    goal[3] = np.nan
    with pytest.raises(og.ConvergenceError, match="The input 'label' reaches 1e"):
        linear.fit(SMALL, goal, epochs=3)


def test_the_rates_of_a_stack_are_named():
    stack = og.TrainerStack(PLAIN, "mse", optimizer="sgd", learning_rate=[1e20, 1e25])
    with pytest.raises(og.ConvergenceError, match=r"Lower the learning rate, 1e\+20 to 1e\+25"):
        stack.fit(SMALL, GOAL, epochs=9)
