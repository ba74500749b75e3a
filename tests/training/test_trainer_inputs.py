"""`Trainer` for the inputs and outputs that published files have: scalars, states, false shapes."""

from contextlib import nullcontext

import numpy as np
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run, run_named
from tests.support.trainings import ActAtStep, assert_close_arrays, stop_training

RNG = np.random.default_rng(0)

RECURRENT = """f (float[N,2] x, int64 rate, float[1,N,1] h) => (float[N,1] y, float[1,N,1] new) {
    a = MatMul(x, w)  b = Add(a, h)  r = Cast<to = 1>(rate)  c = Mul(b, r)
    new = Tanh(c)  axis = Constant<value = int64[1] {0}>()  y = Squeeze(new, axis) }"""
BEGUN = np.float32([[0.5], [-0.3]])


def recurrent_trainer(**options):
    """Return a trainer whose state goes on from batch to batch."""
    model = parse_model(RECURRENT, opset=20, w=BEGUN)
    return og.Trainer(model, {"y": "mse"}, carry={"h": "new"}, **options)


def rows_with_state():
    x, label = RNG.normal(size=(6, 2)).astype("f"), RNG.random((6, 1)).astype("f")
    return {"x": x, "rate": np.int64(2), "h": np.zeros((1, 6, 1), "f")}, label


def carried_loss(X, label, rows, w):
    """Return the loss, with the state carried from batch to batch."""
    h, errors = 0.0, []
    for i in range(0, 6, rows):
        h = np.tanh((X["x"][i : i + rows] @ w + h) * 2)
        errors.append((h - label[i : i + rows]) ** 2)
    return np.mean(errors)


def test_a_single_number_and_a_state_beside_the_rows():
    X, label = rows_with_state()
    trainer = recurrent_trainer()
    trainer.fit(X, label, epochs=3, batch_size=2, shuffle=False)
    loss = trainer.evaluate(X, label, batch_size=2)["loss"]
    assert loss == pytest.approx(carried_loss(X, label, 2, trainer.state.weights["w"]), rel=1e-5)
    assert trainer.predict(X, batch_size=2).shape == (6, 1)


class Sequences(og.data.Reader):
    """Sequences of different length, in an order that the seed decides."""

    sequences, count = True, 5

    def __init__(self):
        rng = np.random.default_rng(1)
        self.lengths = [2, 3]
        self.x = [rng.normal(size=(n, 2, 2)).astype("f") for n in self.lengths]
        self.y = [rng.random((n, 2, 1)).astype("f") for n in self.lengths]
        self.start = np.float32([[[0.5], [-0.5]]])

    def batches(self, size, seed, skip):
        order = [0, 1] if seed is None else np.random.default_rng(seed).permutation(2)
        parts = [(i, t) for i in order for t in range(self.lengths[i])]
        for number, (i, t) in enumerate(parts[skip:]):
            if t == 0 and number + skip > 0:
                yield None
            h = self.start if t == 0 else np.full((1, 2, 1), 9, "f")  # not read
            yield {"x": self.x[i][t], "rate": np.int64(2), "h": h}, self.y[i][t]


def trained_by_hand(data, orders, w, rate):
    """Return the weight after one step of gradient descent a batch; h is not differentiated."""
    torch = pytest.importorskip("torch")
    w, losses = torch.tensor(w, requires_grad=True), []
    for i in (i for order in orders for i in order):
        h = torch.tensor(data.start[0])
        for x, y in zip(torch.tensor(data.x[i]), torch.tensor(data.y[i]), strict=True):
            h = torch.tanh((x @ w + h.detach()) * 2)
            losses.append(((h - y) ** 2).mean())
            (slope,) = torch.autograd.grad(losses[-1], w)
            w = (w - rate * slope).detach().requires_grad_()
    return w.detach().numpy(), [float(loss.detach()) for loss in losses]


@pytest.mark.parametrize("form", ["reader", "list", "generator"])
def test_states_begin_anew_with_each_sequence(form):
    data = Sequences()
    batches = list(data.batches(0, None, 0))
    given = {"reader": data, "list": batches, "generator": lambda: iter(batches)}[form]
    trainer = recurrent_trainer(optimizer="sgd", learning_rate=0.1)
    _, losses = trained_by_hand(data, [[0, 1]], BEGUN, 0.0)
    assert trainer.evaluate(given)["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    trainer.fit(given, epochs=2, shuffle=False)
    want, _ = trained_by_hand(data, [[0, 1]] * 2, BEGUN, 0.1)
    np.testing.assert_allclose(trainer.state.weights["w"], want, rtol=1e-5)
    assert trainer.state.step == 10


def test_sequences_are_shuffled_whole():
    data, found = Sequences(), {}
    results = {i: trained_by_hand(data, [[i, 1 - i]], BEGUN, 0.1)[0] for i in (0, 1)}
    for seed in range(6):
        trainer = recurrent_trainer(seed=seed, optimizer="sgd", learning_rate=0.1).fit(data)
        w = trainer.state.weights["w"]
        found[min(results, key=lambda i, w=w: np.abs(results[i] - w).max())] = w
    assert_close_arrays(found, results, rtol=1e-5)


def test_a_training_goes_on_between_sequences(tmp_path):
    """A checkpoint in the middle of an epoch is followed by the rest of it."""
    ways = [recurrent_trainer(optimizer="adam").fit(Sequences(), epochs=2)]
    for step in (1, 2, 3):
        folder = tmp_path / str(step)
        for stop in ([ActAtStep("step_end", step, stop_training)], []):
            callbacks = [*stop, og.Checkpoint(folder, every_steps=1)]
            trainer = recurrent_trainer(optimizer="adam", callbacks=callbacks)
            trainer.fit(Sequences(), epochs=2, resume=folder)
        assert trainer.state.step == 10
        ways.append(trainer)
    np.testing.assert_equal([one.state.weights for one in ways], [ways[0].state.weights] * 4)


def test_states_are_not_carried_through_shuffled_rows():
    X, label = rows_with_state()
    trainer = recurrent_trainer()
    with pytest.raises(ValueError, match="shuffle=False"):
        trainer.fit(X, label, batch_size=2)
    with pytest.raises(ValueError, match=naming("carry", "order")):
        trainer.fit(X, label, validation=0.5, shuffle=False)
    assert trainer.state.step == 0


TWO = "f (float[N,3] x) => (float[N,2] y, float[N,2] z) { y = MatMul(x, w)  z = Tanh(y) }"
W = np.float32([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])


@pytest.mark.parametrize("form", ["y", "X", "batches"])
def test_labels_have_the_name_of_their_output(form):
    x, y, z = (RNG.normal(size=(4, n)).astype("f") for n in (3, 2, 2))

    def trained(labels):
        trainer = og.Trainer(parse_model(TWO, w=W), {"y": "mse", "z": "mae"})
        data = {"y": (x, labels), "X": ({"x": x, **labels},), "batches": ([{"x": x, **labels}],)}
        trainer.fit(*data[form])
        assert trainer.predict(data[form][0])["z"].shape == (4, 2)
        return trainer.state.weights["w"]

    by_input = trained({"label_y": y, "label_z": z})
    np.testing.assert_array_equal(trained({"y": y, "z": z}), by_input)
    with pytest.raises(ValueError, match="'zz'"):
        trained({"y": y, "zz": z})


def false_model():
    text = "f (float[N,1,3] x) => (float[N] y) { a = MatMul(x, w)  b = Squeeze(a)  y = Tanh(b) }"
    return parse_model(text, opset=12, w=W)


@pytest.mark.parametrize("batched", [True, False])
def test_an_output_that_has_no_rows_though_it_states_them(batched):
    x, label = RNG.normal(size=(1, 1, 3)).astype("f"), np.float32([0.5, 0.1])
    axes = {} if batched else {"batch_axes": {"label": None}}
    trainer = og.Trainer(false_model(), "mse", optimizer="sgd", learning_rate=0.1, **axes)
    w = trainer.state.weights["w"].copy()
    trainer.fit([{"x": x, "label": label}] if batched else x, None if batched else label)
    y = np.tanh(x[0, 0] @ w)
    expected = w - 0.1 * np.outer(x, (y - label) * (1 - y**2))
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=1e-5)


def test_a_label_is_not_broadcast_to_a_prediction_of_another_length():
    trainer = og.Trainer(false_model(), "mse")
    with pytest.raises(Exception, match="reshape"):
        trainer.evaluate(np.ones((1, 1, 3), "f"), np.float32([0.5]))


def test_a_label_is_not_broadcast_along_a_length_that_the_model_computes():
    """The prediction has as many columns as x has positive elements."""
    text = """f (float[N,3] x) => (float[N,M] y) { a = MatMul(x, w)
        zero = Constant<value_ints = [0]>()  one = Constant<value_ints = [1]>()
        positive = Greater(x, nought)  c = Cast<to = 7>(positive)
        n = ReduceSum<keepdims = 0>(c)  e = Reshape(n, one)  y = Slice(a, zero, e, one) }"""
    trainer = og.Trainer(parse_model(text, w=W, nought=np.float32(0)), "mse")
    x = np.float32([[1, 1, -1]])
    assert trainer.predict(x).shape == (1, 2)
    wrong = naming("'label' must have shape (rows, 2), not (1, 1)", "'y' of shape (1, 2)")
    with pytest.raises(ValueError, match=wrong):
        trainer.evaluate(x, np.float32([[0.5]]))


PROBABILITY = {
    "If": """c = Constant<value = bool {1}>() e = Identity(c)
        y = If(e) <then_branch = g () => (float[N,1] p) { p = Sigmoid(a) },
                   else_branch = k () => (float[N,1] q) { n = Neg(a)  q = Sigmoid(n) }>""",
    "Scan": """y = Scan<num_scan_inputs = 1, body = g (float[1] s) => (float[1] p)
        { p = Sigmoid(s) }>(a)""",
    "Loop": """n = Constant<value = int64 {1}>() e = Constant<value = bool {1}>() p0 = Sigmoid(a)
        y = Loop<body = g (int64 i, bool d, float[N,1] s) => (bool o, float[N,1] p)
        { o = Identity(d)  p = Sigmoid(a) }>(n, e, p0)""",
}  # fmt: skip


@pytest.mark.parametrize("operator", PROBABILITY)
def test_a_probability_of_a_subgraph_is_not_taken_as_a_score(operator):
    text = f"f (float[N,2] x) => (float[N,1] y) {{ a = MatMul(x, w) {PROBABILITY[operator]} }}"
    model = parse_model(text, opset=20, w=[[-3.0], [1.0]])
    x, label = RNG.normal(size=(5, 2)).astype("f"), np.float32([[0], [1], [1], [0], [1]])
    p = 1 / (1 + np.exp(-x @ np.float32([[-3.0], [1.0]])))
    loss = -np.mean(label * np.log(p) + (1 - label) * np.log(1 - p))
    assert og.Trainer(model, "bce").evaluate(x, label)["loss"] == pytest.approx(loss, rel=1e-5)


# -- branches for two lengths, and a state whose rows are on axis 1 -------------------------------

DETECTOR = """
    f (float[batch,samples] x, float[2,STATES,4] state, int64 rate)
        => (float[batch,1] y, float[2,STATES,4] new)
    <int64 high = {16000}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}> {
        is_high = Equal(rate, high)
        h = If (is_high) <
            then_branch = a () => (p) { p = MatMul(x, w) },
            else_branch = b () => (r) {
                q = Slice(x, one, two, one)  s = Slice(x, two, high_end, one)
                t = Squeeze(s, one)  k = Unsqueeze(t, one)  l = Mul(k, w_low)  r = Add(l, q) }>
        before = Slice(state, zero, one, zero)
        flat = Squeeze(before, zero)
        old = MatMul(flat, u)
        sum = Add(h, old)
        now = Tanh(sum)
        score = MatMul(now, v)
        y = Sigmoid(score)
        kept = Unsqueeze(now, zero)
        new = Concat <axis = 0> (kept, before)
    }"""


def detector_model(states="batch"):
    draw = np.random.default_rng(1)
    shapes = {"w": (5, 4), "w_low": (1, 4), "u": (4, 4), "v": (4, 1)}
    weights = {name: draw.normal(size=shape).astype("f") for name, shape in shapes.items()}
    text = DETECTOR.replace("STATES", states)
    return parse_model(text, opset=20, **weights, high_end=np.array([99]))


def sounds_with_state():
    x, state = RNG.normal(size=(10, 5)).astype("f"), RNG.normal(size=(2, 10, 4)).astype("f")
    label = RNG.integers(0, 2, (10, 1)).astype("f")
    cuts = [slice(0, 4), slice(4, 8), slice(8, 10)]
    rate = np.array(16000)
    pairs = [({"x": x[c], "state": state[:, c], "rate": rate}, label[c]) for c in cuts]
    return ({"x": x, "state": state, "rate": rate}, label), pairs


def detected(model, data, **options):
    """Return the weights and the losses after an epoch."""
    trainer = og.Trainer(model, {"y": "bce"}, learning_rate=0.1, **options)
    trainer.fit(data, batch_size=4, shuffle=False, validation=data)
    return trainer.state.weights, trainer.history[0]


@pytest.mark.parametrize(
    ("states", "accumulate"),
    [
        ("batch", 2),
        ("?", 1),
        *(in_sweep(*case) for case in (("batch", 1), ("?", 2), ("rows", 1), ("rows", 2))),
    ],
)
def test_arrays_train_as_batches_where_a_branch_takes_other_lengths(accumulate, states):
    arrays, pairs = sounds_with_state()
    dicts = [X | {"label": label} for X, label in pairs]
    axes = {} if states == "batch" else {"batch_axes": {"state": 1}}
    made = [
        detected(detector_model(states), data, accumulate=accumulate, **axes)
        for data in (arrays, pairs, dicts, lambda: iter(pairs))
    ]
    assert len(made[0][0]) == 3
    for weights, entry in made[1:]:
        assert_close_arrays(weights, made[0][0], rtol=1e-5, atol=1e-7)
        assert entry == pytest.approx(made[0][1], rel=1e-5)


@pytest.mark.parametrize("states", ["rows", "?"])
def test_an_axis_that_may_be_that_of_the_rows_is_asked_for(states):
    arrays, pairs = sounds_with_state()
    parts = ["axis 1", "'state'", "batch_axes={'state': 1}"]
    with pytest.raises(ValueError, match=naming("(2, 10, 4)", *parts)):
        detected(detector_model(states), arrays)
    with pytest.raises(ValueError, match=naming("(2, 4, 4)", *parts)):
        detected(detector_model(states), pairs, accumulate=2)
    whole = og.Trainer(detector_model(states), {"y": "bce"}).evaluate(*arrays)["loss"]
    known = og.Trainer(detector_model(), {"y": "bce"}).evaluate(*arrays, batch_size=3)["loss"]
    assert whole == pytest.approx(known, rel=1e-5)  # one batch: nothing is cut
    assert detected(detector_model(states), pairs)[1]["step"] == 3


# -- labels that are NaN, and weights of single labels --------------------------------------------

LENGTHS = {"N": (40,), "N,T": (40, 5), "T,N": (5, 40)}
CUTS = (slice(0, 24), slice(24, 40))


def matrix_model(axes="N"):
    text = f"f (float[{axes},2] x) => (float[{axes},3] y) {{ y = MatMul(x, w) }}"
    return parse_model(text, opset=20, w=np.arange(1, 7, dtype="f").reshape(2, 3))


def some_rows(array, rows, axis):
    return array[(slice(None),) * axis + (rows,)]


def train_weighted_mean(x, y, weight, loss, axis):
    """Return the weights after two epochs of the weighted mean, and the loss of all rows then."""
    torch = pytest.importorskip("torch")
    w = torch.tensor(np.arange(1, 7, dtype="f").reshape(2, 3), requires_grad=True)
    kept = ~np.isnan(y) if y.dtype.kind == "f" else np.ones(y.shape, bool)

    def mean(rows):
        f, t, k, own = (torch.tensor(some_rows(a, rows, axis)) for a in (x, y, kept, weight))
        losses = loss(torch, f @ w, torch.where(k, t, 0))
        own = own.expand(t.shape) * k
        if losses.shape != t.shape:  # without the label of the first position
            own = own[:, 1:]
        return (losses * own).sum() / own.sum()

    for _ in range(2):
        for rows in CUTS:
            (g,) = torch.autograd.grad(mean(rows), w)
            w = (w - 0.1 * g).detach().requires_grad_()
    return w.detach().numpy(), mean(slice(None)).item()


def squared_terms(torch, f, y):
    return (f - y) ** 2


def entropy(torch, f, y):
    return torch.nn.functional.cross_entropy(f.movedim(-1, 1), y, reduction="none")


def shifted_entropy(torch, f, y):
    return torch.nn.functional.cross_entropy(f[:, :-1].movedim(-1, 1), y[:, 1:], reduction="none")


CASES = {  # axes, loss, its witness, options
    "rows": ("N", "mse", squared_terms, {}),
    "an object": ("N", og.compat.ElasticLearningLoss(0, 1), squared_terms, {}),
    "a function": ("N", lambda op, f, y: (f - y) * (f - y), squared_terms, {}),
    "steps": ("N,T", "mse", squared_terms, {}),
    "steps first": ("T,N", "mse", squared_terms, {"batch_axes": {"x": 1}}),
    "missing": ("N", "mse", squared_terms, {"loss_options": {"ignore_nan": True}}),
    "missing steps": ("N,T", "mse", squared_terms, {"loss_options": {"ignore_nan": True}}),
    "classes": ("N,T", "ce", entropy, {}),
    "next classes": ("N,T", "ce", shifted_entropy, {"loss_options": {"shift": True}}),
}


def cut_batches(*arrays, axis=0):
    return [tuple(some_rows(a, rows, min(axis, a.ndim - 1)) for a in arrays) for rows in CUTS]


FORMS = {
    "arrays": lambda x, y, w, axis: (x, y, w),
    "a list": lambda x, y, w, axis: (cut_batches(x, y, w, axis=axis),),
    "a function": lambda x, y, w, axis: (lambda: iter(cut_batches(x, y, w, axis=axis)),),
    "dicts": lambda x, y, w, axis: (
        [
            dict(zip(("x", "label", "weight"), batch, strict=True))
            for batch in cut_batches(x, y, w, axis=axis)
        ],
    ),
}


@pytest.mark.parametrize(
    ("per", "accumulate"),
    [("label", 2), *(in_sweep(*case) for case in (("row", 1), ("row", 2), ("label", 1)))],
)
@pytest.mark.parametrize("name", CASES)
def test_weights_of_labels_in_all_forms_of_data(name, per, accumulate):
    text, loss, witness, options = CASES[name]
    rng, shape, axis = np.random.default_rng(0), LENGTHS[text], int(text == "T,N")
    x = rng.normal(size=(*shape, 2)).astype("f")
    y = rng.normal(size=(*shape, 3)).astype("f")
    if loss == "ce":
        y = rng.integers(0, 3, shape)
    elif "loss_options" in options:
        y[rng.random(y.shape) < 0.3] = np.nan
        y[3] = np.nan
    own = rng.random(40).astype("f") if per == "row" else rng.random(y.shape).astype("f")
    own[3] = 0
    full = own if per == "label" else own.reshape([40 if i == axis else 1 for i in range(y.ndim)])
    expected, mean = train_weighted_mean(x, y, full, witness, axis)
    compared = 0
    for form, build in FORMS.items():
        data = build(x, y, own, axis)
        fit = dict(zip(("X", "y", "sample_weight"), data, strict=False))
        trainer = og.Trainer(
            matrix_model(text), loss,
            optimizer="sgd", learning_rate=0.1, accumulate=accumulate, **options,
        )  # fmt: skip
        held_out = data if form == "arrays" else data[0]
        trainer.fit(**fit, epochs=2, batch_size=24, shuffle=False, validation=held_out)
        np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=2e-5, err_msg=form)
        assert trainer.evaluate(**fit)["loss"] == pytest.approx(mean, rel=2e-5), form
        assert trainer.history[-1]["validation_loss"] == pytest.approx(mean, rel=2e-5), form
        compared += 1
    assert compared == len(FORMS)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (np.ones((40, 2)), {}, r"\(40, 3\)"),
        (np.ones((40, 3)), {"loss": "dice"}, r"\(rows,\), not \(40, 3\)"),
        (np.full((40, 3), np.nan), {}, "sample_weight.* NaN"),
    ],
)
def test_weights_that_do_not_fit(weight, options, message):
    x, y = np.ones((40, 2), "f"), np.ones((40, 3), "f")
    trainer = og.Trainer(matrix_model(), **{"loss": "mse"} | options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(x, y, sample_weight=weight)
    with pytest.raises(ValueError, match=message):
        trainer.fit([(x, y, weight)])


TWO_INPUTS = """f (float[{0}] p, float[{0}] q) => (float[{0}] y) {{
    s = Add(p, q)  r = Relu(s)  y = Gemm(r, w) }}"""


@pytest.mark.parametrize(
    ("dims", "lengths", "parts"),
    [
        ("N,2", [(4, 2), (3, 2)], ["'q' has length 3", "axis 0", "'p'", "4", "rows", "symbols"]),
        ("N,T", [(4, 2), (4, 3)], ["'q' has length 3", "axis 1", "'p'", "2", "as 'T'"]),
    ],
)
def test_axes_of_one_symbol_have_one_length(dims, lengths, parts):
    trainer = og.Trainer(parse_model(TWO_INPUTS.format(dims), w=np.ones((2, 2), "f")), "mse")
    batch = dict(zip("pq", (np.ones(shape, "f") for shape in lengths), strict=True))
    with pytest.raises(ValueError, match=naming("batch 0", *parts)):
        trainer.evaluate([batch | {"label": np.ones((4, 2), "f")}])


def test_a_column_that_no_input_takes_is_named():
    pandas = pytest.importorskip("pandas")
    model = parse_model(TWO_INPUTS.format("N,1"), w=np.ones((1, 1), "f"))
    trainer, y = og.Trainer(model, "mse", train="w"), np.ones((2, 1), "f")
    table = pandas.DataFrame({"p": [1.0, 2.0], "q": [3.0, 4.0]})
    assert trainer.evaluate(table, y)["loss"] == pytest.approx((3.0**2 + 5.0**2) / 2)
    with pytest.raises(ValueError, match=naming("columns ['r', 't']")):
        trainer.evaluate(table.assign(r=0.0, t=0.0), y)


def test_labels_that_are_nan_are_refused_with_the_remedy():
    x, y = np.ones((8, 2), "f"), np.ones((8, 3), "f")
    y[5, 1] = np.nan
    trainer = og.Trainer(matrix_model(), "mse")
    with pytest.raises(ValueError, match=naming("1 of 8 rows: 5", "ignore_nan=True")):
        trainer.fit(x, y)


def test_metrics_leave_out_what_the_loss_leaves_out():
    rng = np.random.default_rng(0)
    x, y, weight = (rng.normal(size=(40, n)).astype("f") for n in (2, 3, 3))
    y[rng.random((40, 3)) < 0.4], weight = np.nan, abs(weight)
    names = ["mse", "mae", "rmse", "mape", "r2"]
    model, options = matrix_model(), {"ignore_nan": True}
    trainer = og.Trainer(model, "mse", loss_options=options, metrics=names)
    results = trainer.evaluate(x, y, sample_weight=weight, batch_size=16)
    error = trainer.predict(x) - y
    kept = ~np.isnan(y)
    w = np.where(kept, weight, 0)
    squares = (w * np.where(kept, error, 0) ** 2).sum(0)
    center = np.nansum(w * y, axis=0) / w.sum(0)
    assert results["mse"] == pytest.approx(results["loss"])
    assert results["mse"] == pytest.approx(squares.sum() / w.sum())
    assert results["mae"] == pytest.approx((w * abs(error))[kept].sum() / w.sum())
    assert results["mape"] == pytest.approx((w * abs(error / y))[kept].sum() / w.sum())
    assert results["rmse"] == pytest.approx(np.sqrt(squares / w.sum(0)).mean())
    spread = np.nansum(w * (y - center) ** 2, axis=0)
    assert results["r2"] == pytest.approx((1 - squares / spread).mean(), rel=1e-5)


# -- rows on axis 1, as recurrent networks have them ----------------------------------------------

TIME_MAJOR = """f (float[FIRST,SECOND,2] x) => (float[OUT] y) {
    t = Tanh(x)  m = ReduceMean<keepdims = 0>(t, zero)  n = MatMul(NODE, w)  y = Identity(n) }"""
CALLED = {"called batch": ("time", "batch", {}), "stated": ("T", "N", {"x": 1})}


def time_major(called: str, whole: bool):
    """Return a model that predicts each time step, or the whole; and axes of its rows."""
    first, second, axes = CALLED[called]
    out = f"{second},3" if whole else f"{first},{second},3"
    text = TIME_MAJOR.replace("FIRST", first).replace("SECOND", second).replace("OUT", out)
    own = {} if not axes else {"batch_axes": axes | {"label": 0 if whole else 1}}
    weights = {"w": [[1.0, -1.0, 0.5], [0.0, 2.0, 1.0]], "zero": np.array([0])}
    return parse_model(text.replace("NODE", "m" if whole else "t"), opset=20, **weights), own


@pytest.mark.parametrize(
    ("called", "whole", "loss"),
    [
        ("called batch", True, "squared_error"),
        ("stated", False, "squared_error"),
        ("called batch", False, "cross_entropy"),
        in_sweep("stated", True, "squared_error"),
        in_sweep("called batch", False, "squared_error"),
        *(in_sweep("stated", whole, "cross_entropy") for whole in (True, False)),
        in_sweep("called batch", True, "cross_entropy"),
    ],
)
def test_rows_on_axis_1(called, whole, loss):
    model, axes = time_major(called, whole)
    regression = loss == "squared_error"
    x = RNG.normal(size=(4, 12, 2)).astype("f")
    shape = (12,) if whole else (4, 12)
    y = RNG.normal(size=(*shape, 3)).astype("f") if regression else RNG.integers(0, 3, shape)
    weight = RNG.uniform(1, 2, y.shape).astype("f")
    cuts = [slice(0, 5), slice(5, 10), slice(10, 12)]
    rows = (lambda a, c: a[c]) if whole else (lambda a, c: a[:, c])
    batches = [(x[:, c], rows(y, c), rows(weight, c)) for c in cuts]
    metrics = ["mae", "r2"] if regression else ["accuracy", "f1_macro"]

    def trained(*data, **options):
        trainer = og.Trainer(
            model,
            loss,
            loss_options={} if regression else {"axis": -1},
            optimizer="sgd",
            learning_rate=0.1,
            metrics=metrics,
            **axes,
        )
        return trainer.fit(*data, batch_size=5, shuffle=False, validation=batches, **options)

    one, other = trained(x, y, sample_weight=weight), trained(batches)
    np.testing.assert_allclose(one.state.weights["w"], other.state.weights["w"], rtol=1e-5)
    assert one.state.step == other.state.step == 3
    prediction = run(one.model, {"x": x})[0]
    np.testing.assert_allclose(one.predict(x, batch_size=5), prediction, rtol=1e-5)
    found = one.evaluate(x, y, sample_weight=weight, batch_size=5)
    assert found == pytest.approx(one.evaluate(batches))
    assert found == pytest.approx(one.evaluate(x, y, sample_weight=weight))
    if regression:
        error = np.average(np.abs(prediction - y), weights=weight)
        assert found["mae"] == pytest.approx(error, rel=1e-5)
    else:
        right = np.average(prediction.argmax(-1) == y, weights=weight)
        assert found["accuracy"] == pytest.approx(right)
    assert {f"validation_{name}" for name in found} < one.history[0].keys()
    stack = og.TrainerStack(model, loss, learning_rate=[0.1, 0.2], metrics=metrics, **axes)
    if regression:
        stack.fit(x, y, batch_size=5)
        assert stack.evaluate(x, y, batch_size=5)["mae"] == pytest.approx(
            [np.abs(p - y).mean() for p in stack.predict(x, batch_size=5)], rel=1e-5
        )


ONE = "float[1,3] x"
STATES = "float[batch,3] x, float[1,1] h"


@pytest.mark.parametrize(
    ("inputs", "output", "body", "expected"),
    [
        (STATES, "float[batch] y", "a = Add(x, h)  m = MatMul(a, w)  y = Reshape(m, s)", "rows"),
        (ONE, "float[4] y", "m = MatMul(x, w)  y = Squeeze(m, z)", "rows"),
        in_sweep(ONE, "float[4] y", "m = MatMul(x, w)  y = Reshape(m, s)", "rows"),
        in_sweep(ONE, "float y", "m = MatMul(x, w)  y = ReduceMean<keepdims=0>(m)", "means"),
        in_sweep(ONE, "float[2,2] y", "m = MatMul(x, w)  y = Reshape(m, q)", "squares"),
    ],
)
def test_outputs_of_one_row_without_its_axis(inputs, output, body, expected):
    """A file of one row that returns numbers without the axis of rows has them in each row."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 3)).astype("f"), rng.normal(size=(3, 4)).astype("f")
    constants = {"s": np.int64([4]), "z": np.int64([0]), "q": np.int64([2, 2])}
    made = parse_model(f"f ({inputs}) => ({output}) {{ {body} }}", w=w, **constants)
    feed = {"x": x, "h": np.zeros((6, 1), np.float32)} if "h" in inputs else {"x": x}
    found = {"rows": x @ w, "means": (x @ w).mean(1), "squares": (x @ w).reshape(6, 2, 2)}[expected]
    label = np.ones_like(found)
    trainer = og.Trainer(made, "mse", learning_rate=0.0)
    np.testing.assert_allclose(trainer.predict(feed), found, rtol=1e-5)
    loss = pytest.approx(((found - 1) ** 2).mean(), rel=1e-5)
    assert trainer.evaluate(feed, label)["loss"] == loss
    assert trainer.fit(feed, label, epochs=1, batch_size=3).history[-1]["loss"] == loss


def test_numbers_of_classes_for_a_loss_of_numbers():
    made = parse_model("f (float[N,3] x) => (float[N,4] y) { y = MatMul(x, w) }", w=np.ones((3, 4)))
    x = np.ones((6, 3))
    with pytest.raises(ValueError, match=naming("'label'", "(rows, 4)", "'cross_entropy'")):
        og.Trainer(made, "mse").fit(x, np.arange(6) % 4)


def model_of_computed_width(width=3):
    """Return a model of some scores, whose number its graph computes."""
    return parse_model(
        """f (float[N,4] x) => (float[N,W] y) { scores = MatMul(x, w)  found = NonZero(chosen)
        numbers = Squeeze(found, zero)  y = Gather <axis=1>(scores, numbers) }""",
        w=RNG.standard_normal((4, 4)).astype("f"), chosen=np.float32(np.arange(4) < width),
        zero=np.int64([0]),
    )  # fmt: skip


FEATURES, WIDE = RNG.standard_normal((8, 4)).astype("f"), np.zeros((8, 2), np.float32)
FITTING = np.zeros((8, 3), np.float32)
MISFIT = naming("'label' must have shape (rows, 3), not (4, 2)", "'y' of shape (4, 3)", "pass")


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, in_sweep({"recompute": "all"})])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_labels_that_do_not_fit_a_computed_width(options, width):
    """onnxruntime names a node of the loss; the error names the label and the prediction."""
    trainer = og.Trainer(model_of_computed_width(), "mse", **options)
    before = trainer.evaluate(FEATURES, FITTING)["loss"]
    label = np.zeros((8, width), np.float32)
    wrong = naming("'label'", f"(rows, 3), not (4, {width})", "'y' of shape (4, 3)", "pass labels")
    warned = (
        pytest.warns(match=naming("accumulate=2")) if "accumulate" in options else nullcontext()
    )
    with warned, pytest.raises(ValueError, match=wrong):
        trainer.fit(FEATURES, label, epochs=2, batch_size=4)
    with pytest.raises(ValueError, match=wrong):
        trainer.evaluate(FEATURES, label, batch_size=4)
    assert trainer.evaluate(FEATURES, FITTING)["loss"] == before


def test_a_single_score_is_not_compared_with_several_labels():
    """It would be broadcast, and the loss a number that looks right."""
    model = model_of_computed_width(1)
    wrong = naming("'label'", "(rows, 1), not (8, 3)", "'y' of shape (8, 1)")
    trainer = og.Trainer(model, "mse")
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match=wrong):
            call(FEATURES, FITTING, batch_size=8)
    inside = og.add_loss_output(model)
    with pytest.raises(Exception, match="Reshape"):
        run_named(inside, {"x": FEATURES, "label": FITTING})
    column = FITTING[:, :1]
    total = run_named(inside, {"x": FEATURES, "label": column})["loss"].item()
    assert total == pytest.approx(8 * trainer.evaluate(FEATURES, column)["loss"], rel=1e-5)


def test_validation_labels_that_do_not_fit_a_computed_width():
    for metrics in ([], ["mae"]):
        trainer = og.Trainer(model_of_computed_width(), "mse", metrics=metrics)
        with pytest.raises(ValueError, match=MISFIT):
            trainer.fit(FEATURES, FITTING, batch_size=4, validation=(FEATURES, WIDE))


def test_a_stack_whose_labels_do_not_fit_a_computed_width():
    stack = og.TrainerStack(model_of_computed_width(), "mse", learning_rate=[0.1, 0.2])
    for call in (stack.fit, stack.evaluate):
        with pytest.raises(ValueError, match=MISFIT):
            call(FEATURES, WIDE, batch_size=4)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0]])
def test_classes_beyond_a_computed_number_of_them(weights):
    trainer = og.Trainer(model_of_computed_width(), "cross_entropy", class_weight=weights)
    labels = np.arange(8) % 4
    wrong = naming("'label' holds labels outside 0..2", "'y' of shape (8, 3)", "pass labels")
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match=wrong):
            call(FEATURES, labels, batch_size=8)


def test_a_model_that_fails_itself_keeps_its_error():
    made = parse_model(
        """f (float[N,4] x) => (float[N,W] y) {
        found = NonZero(x)  shape = Shape(found)  few = Reshape(x, shape)  y = MatMul(few, w) }""",
        w=np.ones((8, 3), np.float32),
    )
    with pytest.raises(Exception, match=naming("Reshape")) as raised:
        og.Trainer(made, "mse").evaluate(FEATURES, FITTING)
    assert raised.value.__cause__ is None


CLASSIFIER = "f (float[N,3] x) => (float[N,2] y) { y = MatMul(x, w) }"
OF_ONE_FORM = [
    (RNG.normal(size=(4, 3)).astype("f"), RNG.integers(0, 2, 4), RNG.random(4).astype("f"))
    for _ in range(6)
]


def replaced(batch: int, part: int, row: int, value: float) -> list[tuple]:
    """Return the batches with another value in one row of an array of one of them."""
    changed = [tuple(a.copy() for a in arrays) for arrays in OF_ONE_FORM]
    changed[batch][part][row] = value
    return changed


def one_buffer(batches):
    """Yield batches in the same arrays, which are written anew each time."""
    buffer = tuple(a.copy() for a in batches[0])
    for arrays in batches:
        for old, new in zip(buffer, arrays, strict=True):
            old[...] = new
        yield buffer


FORMS_OF_BATCHES = {
    "lists": lambda batches: [list(b) for b in batches],
    "dicts": lambda batches: [dict(zip(("x", "label", "weight"), b, strict=True)) for b in batches],
    "one buffer": lambda batches: lambda: one_buffer(batches),
}


@pytest.mark.parametrize("form", FORMS_OF_BATCHES)
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [(0, np.nan, "NaN"), (1, 7, "label"), (2, -1.0, "sample_weight")],
)
def test_values_of_later_batches_are_checked(form, part, value, message):
    """Batches of the form of the first one are checked together; an error names one of them."""
    model = parse_model(CLASSIFIER, w=np.ones((3, 2), np.float32))
    trainer = og.Trainer(model, "cross_entropy")
    with pytest.raises(ValueError, match=naming("batch 4", message, "2")):
        trainer.fit(FORMS_OF_BATCHES[form](replaced(4, part, 2, value)))


@pytest.mark.parametrize("form", FORMS_OF_BATCHES)
def test_batches_of_changing_form_train_as_arrays(form):
    """The last batches are shorter, and their data and labels have other dtypes."""
    short = [tuple(a[:2] for a in OF_ONE_FORM[0])]
    short.append((short[0][0].astype(float), short[0][1].astype(np.int32), short[0][2]))
    if form == "one buffer":
        short = []
    model = parse_model(CLASSIFIER, w=np.ones((3, 2), np.float32))
    given = og.Trainer(model, "cross_entropy", learning_rate=0.1)
    given.fit(FORMS_OF_BATCHES[form](OF_ONE_FORM + short))
    steps = og.Trainer(model, "cross_entropy", learning_rate=0.1)
    for x, label, weight in OF_ONE_FORM + short:
        steps.partial_fit(x, label, sample_weight=weight, batch_size=len(x), shuffle=False)
    np.testing.assert_allclose(given.state.weights["w"], steps.state.weights["w"], rtol=1e-6)
