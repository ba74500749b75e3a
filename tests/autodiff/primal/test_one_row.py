"""Files whose batch is fixed: trained on larger ones, as the same network with a symbolic batch."""

import logging

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrad as og
from onnxgrad.autodiff.primal import free_rows as module
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.model.convert import convert_precision, to_proto
from onnxgrad.operators.shapes import dims
from tests.support.exports import export_module
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, run, session_of

torch = pytest.importorskip("torch")
nn = torch.nn

rng = np.random.default_rng(0)


class TokenAttention(nn.Module):
    """A convolution, tokens with one that is joined to each row, and an attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1)
        return self.head(self.attention(y)[:, 0])


class ZeroStateLSTM(nn.Module):
    """An LSTM whose initial state is zero, on a sequence that comes first."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 6, bidirectional=True, num_layers=2), nn.Linear(12, 4)

    def forward(self, x):
        y, _ = self.lstm(x.flatten(2).permute(2, 0, 1))
        return self.head(y[-1])


class Pyramid(nn.Module):
    """Maps of two sizes, one resized and joined with the other, in one list of places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        a = torch.relu(self.first(x))
        b = nn.functional.interpolate(torch.relu(self.second(a)), size=(6, 6))
        y = self.head(torch.cat([a, b], 1))
        return y.view(y.shape[0], 2, -1).transpose(1, 2).reshape(y.shape[0], -1)[:, :4]


class Squeezed(nn.Module):
    """A row that loses its axis, and gets it back."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(36, 5), nn.Linear(15, 4)

    def forward(self, x):
        y = torch.relu(self.inner(x.flatten(2).squeeze(0)))
        return self.head(y.unsqueeze(0).flatten(1)) if x.shape[0] == 1 else None


NETWORKS = [TokenAttention, ZeroStateLSTM, Pyramid]


AXES = {"x": {0: "n"}, "y": {0: "n"}}


def saved_network(network, path, dynamo=False, rows=1, **options):
    """Return the file of a network with a fixed batch, or with rows=None a symbolic one."""
    torch.manual_seed(0)
    net, x = network().eval(), torch.randn(rows or 2, 3, 6, 6)
    if not dynamo:
        options |= {"opset_version": 17, "input_names": ["x"], "output_names": ["y"]}
        options |= {"dynamic_axes": None if rows else AXES}
    onnx.save(export_module(net, (x,), dynamo=dynamo, **options), path)
    return str(path)


X = rng.normal(size=(20, 3, 6, 6)).astype(np.float32)
Y = rng.integers(0, 4, 20)


@pytest.mark.parametrize("dynamo", [False, in_sweep(True)])
@pytest.mark.parametrize("network", NETWORKS)
def test_it_trains_as_with_a_symbolic_batch(network, dynamo, tmp_path, caplog):
    fixed = saved_network(network, tmp_path / "fixed.onnx", dynamo)
    symbolic = saved_network(network, tmp_path / "symbolic.onnx", rows=None)
    arguments = {"optimizer": "adam", "learning_rate": 0.01, "train": ["head*"]}
    both = [og.Trainer(file, "cross_entropy", **arguments) for file in (fixed, symbolic)]
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        both[0].fit(X, Y, epochs=2, batch_size=8, validation=(X[:5], Y[:5]))
    assert "one row" in caplog.text
    both[1].fit(X, Y, epochs=2, batch_size=8, validation=(X[:5], Y[:5]))
    for name, w in both[0].state.weights.items():
        np.testing.assert_allclose(w, both[1].state.weights[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(*(t.predict(X) for t in both), rtol=1e-4, atol=1e-5)
    assert both[0].history[-1]["validation_loss"] == pytest.approx(
        both[1].history[-1]["validation_loss"], rel=1e-4
    )
    out = both[0].model
    assert out.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert operator_names(out) == operator_names(onnx.load(fixed))
    one = run(out, {out.graph.input[0].name: X[3:4]})[0]
    np.testing.assert_allclose(one, both[0].predict(X)[3:4], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def both_files(tmp_path_factory):
    """The files of one network with its normalization, of one row and of any number."""
    folder, options = tmp_path_factory.mktemp("files"), {"do_constant_folding": False}
    options |= {"training": torch.onnx.TrainingMode.PRESERVE}
    return [
        saved_network(TokenAttention, folder / name, rows=rows, **options)
        for name, rows in (("one", 1), ("any", None))
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate": 4, "batch_norm": "train"},
        {"learning_rate": [0.05, 0.1]},
        in_sweep(
            {
                "mix": og.losses.mixup(),
                "dropout": {"*Relu*": 0.2},
                "optimizer": og.optimizers.ema(og.optimizers.adam(), 0.9),
            }
        ),
        in_sweep({"batch_norm": "train"}),
        in_sweep({"recompute": "all"}),
        in_sweep({"class_weight": "balanced", "clip_norm": 0.1}),
    ],
    ids=str,
)
def test_other_arguments_go_with_it(both_files, arguments):
    given = {"optimizer": "sgd", "learning_rate": 0.05} | arguments
    kind = og.TrainerStack if isinstance(given["learning_rate"], list) else og.Trainer
    weight = np.linspace(0, 1, 20)
    trained = [
        kind(file, "cross_entropy", **given).fit(
            X, Y, epochs=2, batch_size=8, sample_weight=None if "class_weight" in given else weight
        )
        for file in both_files
    ]
    start = kind(both_files[0], "cross_entropy", **given).state.weights
    states = [{**t.state.weights, **t.state.buffers} for t in trained]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_allclose(array, states[1][name], rtol=1e-4, atol=1e-6)
    assert any(abs(w - start[n]).max() > 1e-4 for n, w in trained[0].state.weights.items())


def test_16_bits(both_files):
    half = [convert_precision(onnx.load(file), ir.DataType.FLOAT16) for file in both_files]
    arguments = {"train": ["head*"], "learning_rate": 0.01}
    one, any_number = (
        og.Trainer(model, "cross_entropy", **arguments).fit(X.astype(np.float16), Y, batch_size=8)
        for model in half
    )
    assert one.state.step == 3
    for name, w in one.state.weights.items():
        np.testing.assert_allclose(w, any_number.state.weights[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_training_is_the_same_bit_for_bit(both_files, tmp_path):
    def trainer(*callbacks):
        return og.Trainer(both_files[0], "cross_entropy", train=["head*"], callbacks=callbacks)

    whole = trainer().fit(X, Y, epochs=2, batch_size=8)
    trainer(og.Checkpoint(tmp_path)).fit(X, Y, epochs=1, batch_size=8)
    resumed = trainer(og.Checkpoint(tmp_path)).fit(X, Y, epochs=2, batch_size=8, resume=tmp_path)
    for name, w in whole.state.weights.items():
        np.testing.assert_array_equal(resumed.state.weights[name], w)


def test_a_row_that_is_squeezed(tmp_path):
    fixed = saved_network(Squeezed, tmp_path / "fixed.onnx")
    freed = free_rows(prepare(onnx.load(fixed)), "rows", {})
    assert freed is not None
    assert dims(freed.graph.outputs[0]) == ("rows", 4)
    predicted = og.Trainer(fixed, "cross_entropy").predict(X, batch_size=6)
    for x, row in zip(X, predicted, strict=True):
        expected = run(fixed, {onnx.load(fixed).graph.input[0].name: x[None]})[0][0]
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


def test_all_weights_train_as_one_row_at_a_time_would(tmp_path):
    fixed = saved_network(TokenAttention, tmp_path / "fixed.onnx")
    trainer = og.Trainer(fixed, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(X[:3], Y[:3], batch_size=3, shuffle=False)
    before = {
        r.name: w
        for r in og.trainable(fixed)
        if (w := trainer.state.weights.get(r.name)) is not None
    }
    total = dict.fromkeys(before, 0.0)
    for i in range(3):
        one = og.Trainer(fixed, "cross_entropy", optimizer="sgd", learning_rate=0.1)
        start = {name: np.array(w) for name, w in one.state.weights.items()}
        one.fit(X[i : i + 1], Y[i : i + 1], batch_size=1)
        for name in total:
            total[name] = total[name] + (one.state.weights[name] - start[name]) / 3
    for name, change in total.items():
        np.testing.assert_allclose(before[name] - start[name], change, rtol=1e-3, atol=2e-6)


MIXED = """f (float[ROWS,3] x) => (float[ROWS,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        s = Softmax <axis = 0> (x)  t = Add(s, x)  y = MatMul(t, w) }"""
MIXED_X, MIXED_Y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12)


def row_mixing_model(rows=1):
    """Return a model that normalizes over its rows."""
    return parse_model(MIXED.replace("ROWS", str(rows)))


def weights_by_torch(rows, size, epochs=3, lr=0.1):
    w = torch.tensor([[1.0, 2], [3, 4], [5, 6]], requires_grad=True)
    optimizer = torch.optim.SGD([w], lr)
    for _ in range(epochs):
        for start in range(0, 12, size):
            optimizer.zero_grad()
            x = torch.tensor(MIXED_X[start : start + size])
            parts = [p + p.softmax(0) for p in x.split(rows)]
            labels = torch.tensor(MIXED_Y[start : start + size])
            nn.functional.cross_entropy(torch.cat(parts) @ w, labels).backward()
            optimizer.step()
    return w.detach().numpy()


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 6), (3, 12), (1, 5), in_sweep(1, 12), in_sweep(2, 4)]
)
def test_rows_that_are_not_independent_are_accumulated(rows, size):
    trainer = og.Trainer(
        row_mixing_model(rows), "cross_entropy", optimizer="sgd", learning_rate=0.1
    )
    trainer.fit(MIXED_X, MIXED_Y, epochs=3, batch_size=size, shuffle=False)
    np.testing.assert_allclose(trainer.state.weights["w"], weights_by_torch(rows, size), rtol=1e-5)
    assert trainer.predict(MIXED_X, batch_size=7).shape == (12, 2)


def test_by_a_loader_and_in_a_stack():
    data = torch.utils.data.TensorDataset(torch.tensor(MIXED_X), torch.tensor(MIXED_Y))
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    trainer = og.Trainer(row_mixing_model(), "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(loader, epochs=3, validation=loader)
    np.testing.assert_allclose(trainer.state.weights["w"], weights_by_torch(1, 6), rtol=1e-5)
    whole = trainer.evaluate(MIXED_X, MIXED_Y)["loss"]
    assert trainer.evaluate(loader)["loss"] == pytest.approx(whole, rel=1e-6)
    stack = og.TrainerStack(
        row_mixing_model(), "cross_entropy", optimizer="sgd", learning_rate=[0.1, 0.2]
    )
    stack.fit(MIXED_X, MIXED_Y, epochs=3, batch_size=6, shuffle=False)
    for k, rate in enumerate((0.1, 0.2)):
        expected = weights_by_torch(1, 6, lr=rate)
        np.testing.assert_allclose(stack.state.weights["w"][k], expected, rtol=1e-5)


def test_calls_of_partial_fit_may_have_other_numbers_of_rows():
    trainer = og.Trainer(row_mixing_model(), "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.partial_fit(MIXED_X[:1], MIXED_Y[:1])
    trainer.partial_fit(MIXED_X[:3], MIXED_Y[:3])
    assert trainer.state.step == 2


STREAM = """f (float[1,3] x, float[LAYERS,1,2] state) => (float[1,2] y, float[LAYERS,1,2] next)
    <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2,2] u = {0.1, 0.2, 0.3, 0.4},
    int64[1] layers = {0}> {
        last = ReduceMean <keepdims = 0> (state, layers)
        a = MatMul(x, w)  b = MatMul(last, u)  c = Add(a, b)  y = Tanh(c)
        z = Unsqueeze(y, layers)  next = Add(z, state) }"""


@pytest.mark.parametrize("layers", [1, 2])
def test_states_keep_their_rows_on_another_axis(layers):
    proto = parse_model(STREAM.replace("LAYERS", str(layers)))
    freed = free_rows(prepare(proto), "rows", {})
    assert freed is not None
    assert [dims(x) for x in freed.graph.inputs] == [("rows", 3), (layers, "rows", 2)]


def test_a_carried_state_goes_from_row_to_row_by_default():
    proto = parse_model(STREAM.replace("LAYERS", "2"))
    data = {"x": MIXED_X, "state": np.zeros((2, 12, 2), np.float32)}
    labels = rng.normal(size=(12, 2)).astype(np.float32)
    trainer = og.Trainer(proto, {"y": "mse"}, carry={"state": "next"}, batch_axes={"state": 1})
    trainer.fit(data, labels, shuffle=False)
    assert trainer.state.step == 12
    session, state, rows = session_of(proto), data["state"][:, :1], []
    start = og.Trainer(proto, {"y": "mse"}, carry={"state": "next"}, batch_axes={"state": 1})
    for x in MIXED_X:
        y, state = session.run(None, {"x": x[None], "state": state})
        rows.append(y[0])
    np.testing.assert_allclose(start.predict(data), rows, rtol=1e-5)


RESHAPED = """f (float[1,12] x) => (float[1,12] y) { a = Reshape(x, front)
        b = Transpose <perm = [1, 0, 2]> (a)  c = Reshape(b, mixed)  d = Neg(c)
        e = Reshape(d, again)  g = Transpose <perm = [1, 0, 2]> (e)  y = Reshape(g, flat) }"""


@pytest.mark.parametrize(
    ("axes", "mixed", "is_proven"),
    [
        ((4, 3), (2, 1, 6), True), ((6, 2), (3, 4), True), ((6, 2), (2, 3, 1, 2), True),
        ((6, 2), (12,), True), ((4, 3), (6, 1, 2), False), ((6, 2), (4, 3, 1), False),
    ],
)  # fmt: skip
def test_rows_are_followed_through_a_reshape_that_keeps_them_together(axes, mixed, is_proven):
    before, behind = axes
    shapes = {"front": (0, before, behind), "mixed": mixed, "again": (before, 1, behind)}
    shapes = {name: np.array(shape) for name, shape in shapes.items()} | {"flat": np.array([0, -1])}
    proto = parse_model(RESHAPED, **shapes)
    freed = free_rows(prepare(proto), "rows", {})
    assert freed is not None
    added = "Unsqueeze" in [node.op_type for node in freed.graph]  # an axis in front
    assert added != is_proven
    x = rng.normal(size=(5, 12)).astype(np.float32)
    np.testing.assert_array_equal(run(to_proto(freed), x=x)[0], -x)


def test_the_search_gives_up(monkeypatch):
    monkeypatch.setattr(module, "VISITS_PER_NODE", 0)
    assert free_rows(prepare(row_mixing_model(2)), "rows", {}, 2) is None


def test_a_model_of_no_row_stays():
    symbolic = parse_model(MIXED.replace("ROWS", "N"))
    assert free_rows(prepare(symbolic), "rows", {}) is None


def test_many_inputs_of_one_row():
    """Each has several axes of length 1: there are 2^40 choices, and the first holds."""
    names = [f"x{i}" for i in range(40)]
    inputs, sums = ", ".join(f"float[1,1,2] {x}" for x in names), ", ".join(names)
    proto = parse_model(f"f ({inputs}) => (float[1,1,2] y) {{ y = Sum({sums}) }}")
    freed = free_rows(prepare(proto), "rows", {})
    assert freed is not None
    assert [x.shape[0].value for x in freed.graph.inputs] == ["rows"] * 40
