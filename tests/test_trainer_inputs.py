"""`Trainer` for the inputs and outputs that published files have: scalars, states, false shapes."""

import numpy as np
import onnx
import pytest

import onnxgrad as og

pytestmark = pytest.mark.usefixtures("one_thread")
RNG = np.random.default_rng(0)

RECURRENT = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x, int64 rate, float[1,N,1] h) => (float[N,1] y, float[1,N,1] new)
    <float[2,1] w = {0.5, -0.3}> {
        a = MatMul(x, w)  b = Add(a, h)  r = Cast<to = 1>(rate)  c = Mul(b, r)
        new = Tanh(c)  axis = Constant<value = int64[1] {0}>()  y = Squeeze(new, axis)
    }"""


def stream():
    x, label = RNG.normal(size=(6, 2)).astype("f"), RNG.random((6, 1)).astype("f")
    return {"x": x, "rate": np.int64(2), "h": np.zeros((1, 6, 1), "f")}, label


def by_hand(X, label, rows, w):
    """Return the loss, with the state carried from batch to batch."""
    h, errors = 0.0, []
    for i in range(0, 6, rows):
        h = np.tanh((X["x"][i : i + rows] @ w + h) * 2)
        errors.append((h - label[i : i + rows]) ** 2)
    return np.mean(errors)


def test_a_single_number_and_a_state_beside_the_rows():
    X, label = stream()
    trainer = og.Trainer(onnx.parser.parse_model(RECURRENT), {"y": "mse"}, carry={"h": "new"})
    trainer.fit(X, label, epochs=3, batch_size=2, shuffle=False)
    loss = trainer.evaluate(X, label, batch_size=2)["loss"]
    assert loss == pytest.approx(by_hand(X, label, 2, trainer.state.weights["w"]), rel=1e-5)
    assert trainer.predict(X, batch_size=2).shape == (6, 1)


def test_states_are_not_carried_through_shuffled_rows():
    X, label = stream()
    trainer = og.Trainer(onnx.parser.parse_model(RECURRENT), {"y": "mse"}, carry={"h": "new"})
    with pytest.raises(ValueError, match="shuffle=False"):
        trainer.fit(X, label, batch_size=2)
    assert trainer.state.step == 0


TWO = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,3] x) => (float[N,2] y, float[N,2] z)
    <float[3,2] w = {0.1,0.2,0.3,0.4,0.5,0.6}> { y = MatMul(x, w)  z = Tanh(y) }"""


@pytest.mark.parametrize("form", ["y", "X", "batches"])
def test_labels_have_the_name_of_their_output(form):
    x, y, z = (RNG.normal(size=(4, n)).astype("f") for n in (3, 2, 2))

    def trained(labels):
        trainer = og.Trainer(onnx.parser.parse_model(TWO), {"y": "mse", "z": "mae"})
        data = {"y": (x, labels), "X": ({"x": x, **labels},), "batches": ([{"x": x, **labels}],)}
        trainer.fit(*data[form])
        assert trainer.predict(data[form][0])["z"].shape == (4, 2)
        return trainer.state.weights["w"]

    by_input = trained({"label_y": y, "label_z": z})
    np.testing.assert_array_equal(trained({"y": y, "z": z}), by_input)
    with pytest.raises(ValueError, match="'zz'"):
        trained({"y": y, "zz": z})


FALSE = """
    <ir_version: 8, opset_import: ["": 12]>
    f (float[N,1,3] x) => (float[N] y) <float[3,2] w = {0.1,0.2,0.3,0.4,0.5,0.6}>
    { a = MatMul(x, w)  b = Squeeze(a)  y = Tanh(b) }"""


@pytest.mark.parametrize("batched", [True, False])
def test_an_output_that_has_no_rows_though_it_states_them(batched):
    x, label = RNG.normal(size=(1, 1, 3)).astype("f"), np.float32([0.5, 0.1])
    axes = {} if batched else {"batch_axes": {"label": None}}
    trainer = og.Trainer(
        onnx.parser.parse_model(FALSE), "mse", optimizer="sgd", learning_rate=0.1, **axes
    )
    w = trainer.state.weights["w"].copy()
    trainer.fit([{"x": x, "label": label}] if batched else x, None if batched else label)
    y = np.tanh(x[0, 0] @ w)
    expected = w - 0.1 * np.outer(x, (y - label) * (1 - y**2))
    np.testing.assert_allclose(trainer.state.weights["w"], expected, rtol=1e-5)


def test_a_label_is_not_broadcast_to_a_prediction_of_another_length():
    trainer = og.Trainer(onnx.parser.parse_model(FALSE), "mse")
    with pytest.raises(Exception, match="cannot be reshaped"):
        trainer.evaluate(np.ones((1, 1, 3), "f"), np.float32([0.5]))


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
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)
        <float[2,1] w = {{-3.0, 1.0}}> {{ a = MatMul(x, w) {PROBABILITY[operator]} }}""")
    x, label = RNG.normal(size=(5, 2)).astype("f"), np.float32([[0], [1], [1], [0], [1]])
    p = 1 / (1 + np.exp(-x @ np.float32([[-3.0], [1.0]])))
    loss = -np.mean(label * np.log(p) + (1 - label) * np.log(1 - p))
    assert og.Trainer(model, "bce").evaluate(x, label)["loss"] == pytest.approx(loss, rel=1e-5)


# -- branches for two lengths, and a state whose rows are on axis 1 -------------------------------

DETECTOR = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[ROWS,SAMPLES] x, float[2,STATES,4] state, int64 rate)
        => (float[ROWS,1] y, float[2,STATES,4] new)
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


def detector(rows="batch", samples="samples", states="batch"):
    text = DETECTOR.replace("ROWS", rows).replace("SAMPLES", samples).replace("STATES", states)
    model = onnx.parser.parse_model(text)
    draw = np.random.default_rng(1)
    for name, shape in {"w": (5, 4), "w_low": (1, 4), "u": (4, 4), "v": (4, 1)}.items():
        array = draw.normal(size=shape).astype("f")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    end = onnx.numpy_helper.from_array(np.array([99]), "high_end")
    model.graph.initializer.append(end)
    return model


def heard():
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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("states", ["batch", "rows", "?"])
def test_arrays_train_as_batches_where_a_branch_takes_other_lengths(accumulate, states):
    arrays, pairs = heard()
    dicts = [X | {"label": label} for X, label in pairs]
    axes = {} if states == "batch" else {"batch_axes": {"state": 1}}
    made = [
        detected(detector(states=states), data, accumulate=accumulate, **axes)
        for data in (arrays, pairs, dicts, lambda: iter(pairs))
    ]
    assert len(made[0][0]) == 3
    for weights, entry in made[1:]:
        for name, w in made[0][0].items():
            np.testing.assert_allclose(weights[name], w, rtol=1e-5, atol=1e-7)
        assert entry == pytest.approx(made[0][1], rel=1e-5)


@pytest.mark.parametrize("states", ["rows", "?"])
def test_an_axis_that_may_be_that_of_the_rows_is_asked_for(states):
    arrays, pairs = heard()
    message = r"axis 1 of 'state' \(2, {}, 4\) is as long as .* batch_axes={{'state': 1}}"
    with pytest.raises(ValueError, match=message.format(10)):
        detected(detector(states=states), arrays)
    with pytest.raises(ValueError, match=message.format(4)):
        detected(detector(states=states), pairs, accumulate=2)
    whole = og.Trainer(detector(states=states), {"y": "bce"}).evaluate(*arrays)["loss"]
    known = og.Trainer(detector(), {"y": "bce"}).evaluate(*arrays, batch_size=3)["loss"]
    assert whole == pytest.approx(known, rel=1e-5)  # one batch: nothing is cut
    assert detected(detector(states=states), pairs)[1]["step"] == 3
