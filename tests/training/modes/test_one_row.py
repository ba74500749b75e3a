"""Files whose batch is fixed: trained on larger ones, as the same network with a symbolic batch."""

import logging

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.autodiff.primal import free_rows as module
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.shapes import dims
from onnxgrad.model.convert import in_precision

torch = pytest.importorskip("torch")
nn = torch.nn

rng = np.random.default_rng(0)


class Attention(nn.Module):
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


class Recurrent(nn.Module):
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


NETWORKS = [Attention, Recurrent, Pyramid]


def exported(network, path, dynamo, rows=1):
    """Return the file of a network with a fixed batch, or with rows=None a symbolic one."""
    x = torch.randn(rows or 2, 3, 6, 6)
    if dynamo:
        shapes = None if rows else ({0: torch.export.Dim("n", min=1, max=1000)},)
        program = torch.onnx.export(network, (x,), dynamo=True, dynamic_shapes=shapes)
        program.save(str(path))
    else:
        axes = None if rows else {"x": {0: "n"}, "y": {0: "n"}}
        torch.onnx.export(
            network, (x,), str(path), dynamo=False, opset_version=17, input_names=["x"],
            output_names=["y"], dynamic_axes=axes,
        )  # fmt: skip
    return str(path)


def weights(trainer):
    return trainer.state.weights


X = rng.normal(size=(20, 3, 6, 6)).astype(np.float32)
Y = rng.integers(0, 4, 20)


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_it_trains_as_with_a_symbolic_batch(network, dynamo, tmp_path, caplog):
    net = network().eval()
    fixed = exported(net, tmp_path / "fixed.onnx", dynamo)
    symbolic = exported(net, tmp_path / "symbolic.onnx", False, None)
    arguments = {"optimizer": "adam", "learning_rate": 0.01, "train": ["head*"]}
    both = [og.Trainer(file, "cross_entropy", **arguments) for file in (fixed, symbolic)]
    with caplog.at_level(logging.WARNING, "onnxgrad"):
        both[0].fit(X, Y, epochs=2, batch_size=8, validation=(X[:5], Y[:5]))
    assert "one row" in caplog.text
    both[1].fit(X, Y, epochs=2, batch_size=8, validation=(X[:5], Y[:5]))
    for name, w in weights(both[0]).items():
        np.testing.assert_allclose(w, weights(both[1])[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(*(t.predict(X) for t in both), rtol=1e-4, atol=1e-5)
    assert both[0].history[-1]["validation_loss"] == pytest.approx(
        both[1].history[-1]["validation_loss"], rel=1e-4
    )
    out = both[0].model
    assert out.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert [n.op_type for n in out.graph.node] == [n.op_type for n in onnx.load(fixed).graph.node]
    session = ort.InferenceSession(out.SerializeToString())
    one = session.run(None, {session.get_inputs()[0].name: X[3:4]})[0]
    np.testing.assert_allclose(one, both[0].predict(X)[3:4], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def both_files(tmp_path_factory):
    """The files of one network with its normalization, of one row and of any number."""
    net, folder = Attention().eval(), tmp_path_factory.mktemp("files")
    for name, axes in (("one", None), ("any", {"x": {0: "n"}, "y": {0: "n"}})):
        torch.onnx.export(
            net, (torch.randn(2 if axes else 1, 3, 6, 6),), str(folder / name), dynamo=False,
            opset_version=17, input_names=["x"], output_names=["y"], dynamic_axes=axes,
            training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False,
        )  # fmt: skip
    return str(folder / "one"), str(folder / "any")


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_norm": "train"},
        {"accumulate": 4, "batch_norm": "train"},
        {"dropout": {"*Relu*": 0.2}},
        {"mix": og.mixup()},
        {"recompute": "all"},
        {"class_weight": "balanced", "clip_norm": 0.1},
        {"optimizer": og.ema(og.adam(), 0.9)},
        {"learning_rate": [0.05, 0.1]},
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
    start = weights(kind(both_files[0], "cross_entropy", **given))
    states = [{**t.state.weights, **t.state.buffers} for t in trained]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_allclose(array, states[1][name], rtol=1e-4, atol=1e-6)
    assert any(abs(w - start[n]).max() > 1e-4 for n, w in weights(trained[0]).items())


def test_16_bits(both_files):
    half = [in_precision(onnx.load(file), ir.DataType.FLOAT16) for file in both_files]
    arguments = {"train": ["head*"], "learning_rate": 0.01}
    one, any_number = (
        og.Trainer(model, "cross_entropy", **arguments).fit(X.astype(np.float16), Y, batch_size=8)
        for model in half
    )
    assert one.state.step == 3
    for name, w in weights(one).items():
        np.testing.assert_allclose(w, weights(any_number)[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_training_is_the_same_bit_for_bit(both_files, tmp_path):
    def trainer(*callbacks):
        return og.Trainer(both_files[0], "cross_entropy", train=["head*"], callbacks=callbacks)

    whole = trainer().fit(X, Y, epochs=2, batch_size=8)
    trainer(og.Checkpoint(tmp_path)).fit(X, Y, epochs=1, batch_size=8)
    resumed = trainer(og.Checkpoint(tmp_path)).fit(X, Y, epochs=2, batch_size=8, resume=tmp_path)
    for name, w in weights(whole).items():
        np.testing.assert_array_equal(weights(resumed)[name], w)


def test_a_row_that_is_squeezed(tmp_path):
    net = Squeezed()
    fixed = exported(net, tmp_path / "fixed.onnx", False)
    freed = free_rows(prepare(onnx.load(fixed)), "rows", {})
    assert freed is not None
    assert dims(freed.graph.outputs[0]) == ("rows", 4)
    predicted = og.Trainer(fixed, "cross_entropy").predict(X, batch_size=6)
    expected = [net(torch.tensor(x[None])).detach().numpy()[0] for x in X]
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)


def test_all_weights_train_as_one_row_at_a_time_would(tmp_path):
    net = Attention().eval()
    fixed = exported(net, tmp_path / "fixed.onnx", False)
    trainer = og.Trainer(fixed, "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(X[:6], Y[:6], batch_size=6, shuffle=False)
    before = {
        r.name: w for r in og.trainable(fixed) if (w := weights(trainer).get(r.name)) is not None
    }
    total = dict.fromkeys(before, 0.0)
    for i in range(6):
        one = og.Trainer(fixed, "cross_entropy", optimizer="sgd", learning_rate=0.1)
        start = {name: np.array(w) for name, w in weights(one).items()}
        one.fit(X[i : i + 1], Y[i : i + 1], batch_size=1)
        for name in total:
            total[name] = total[name] + (weights(one)[name] - start[name]) / 6
    for name, change in total.items():
        np.testing.assert_allclose(before[name] - start[name], change, rtol=1e-3, atol=2e-6)


MIXED = """<ir_version: 9, opset_import: ["": 20]>
    f (float[ROWS,3] x) => (float[ROWS,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        s = Softmax <axis = 0> (x)  t = Add(s, x)  y = MatMul(t, w) }"""
MIXED_X, MIXED_Y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12)


def mixing(rows=1):
    """Return a model that normalizes over its rows."""
    return onnx.parser.parse_model(MIXED.replace("ROWS", str(rows)))


def by_torch(rows, size, epochs=3, lr=0.1):
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


@pytest.mark.parametrize(("rows", "size"), [(1, 6), (1, 12), (2, 4), (3, 12), (1, 5)])
def test_rows_that_are_not_independent_are_accumulated(rows, size):
    trainer = og.Trainer(mixing(rows), "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(MIXED_X, MIXED_Y, epochs=3, batch_size=size, shuffle=False)
    np.testing.assert_allclose(weights(trainer)["w"], by_torch(rows, size), rtol=1e-5)
    assert trainer.predict(MIXED_X, batch_size=7).shape == (12, 2)


def test_by_a_loader_and_in_a_stack():
    data = torch.utils.data.TensorDataset(torch.tensor(MIXED_X), torch.tensor(MIXED_Y))
    loader = torch.utils.data.DataLoader(data, batch_size=6)
    trainer = og.Trainer(mixing(), "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.fit(loader, epochs=3, validation=loader)
    np.testing.assert_allclose(weights(trainer)["w"], by_torch(1, 6), rtol=1e-5)
    whole = trainer.evaluate(MIXED_X, MIXED_Y)["loss"]
    assert trainer.evaluate(loader)["loss"] == pytest.approx(whole, rel=1e-6)
    stack = og.TrainerStack(mixing(), "cross_entropy", optimizer="sgd", learning_rate=[0.1, 0.2])
    stack.fit(MIXED_X, MIXED_Y, epochs=3, batch_size=6, shuffle=False)
    for k, rate in enumerate((0.1, 0.2)):
        expected = by_torch(1, 6, lr=rate)
        np.testing.assert_allclose(stack.state.weights["w"][k], expected, rtol=1e-5)


def test_calls_of_partial_fit_may_have_other_numbers_of_rows():
    trainer = og.Trainer(mixing(), "cross_entropy", optimizer="sgd", learning_rate=0.1)
    trainer.partial_fit(MIXED_X[:1], MIXED_Y[:1])
    trainer.partial_fit(MIXED_X[:3], MIXED_Y[:3])
    assert trainer.state.step == 2


STREAM = """<ir_version: 9, opset_import: ["": 20]>
    f (float[1,3] x, float[LAYERS,1,2] state) => (float[1,2] y, float[LAYERS,1,2] next)
    <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2,2] u = {0.1, 0.2, 0.3, 0.4},
    int64[1] layers = {0}> {
        last = ReduceMean <keepdims = 0> (state, layers)
        a = MatMul(x, w)  b = MatMul(last, u)  c = Add(a, b)  y = Tanh(c)
        z = Unsqueeze(y, layers)  next = Add(z, state) }"""


@pytest.mark.parametrize("layers", [1, 2])
def test_states_keep_their_rows_on_another_axis(layers):
    proto = onnx.parser.parse_model(STREAM.replace("LAYERS", str(layers)))
    freed = free_rows(prepare(proto), "rows", {})
    assert freed is not None
    assert [dims(x) for x in freed.graph.inputs] == [("rows", 3), (layers, "rows", 2)]


def test_a_carried_state_goes_from_row_to_row_by_default():
    proto = onnx.parser.parse_model(STREAM.replace("LAYERS", "2"))
    data = {"x": MIXED_X, "state": np.zeros((2, 12, 2), np.float32)}
    labels = rng.normal(size=(12, 2)).astype(np.float32)
    trainer = og.Trainer(proto, {"y": "mse"}, carry={"state": "next"}, batch_axes={"state": 1})
    trainer.fit(data, labels, shuffle=False)
    assert trainer.state.step == 12
    session, state, rows = ort.InferenceSession(proto.SerializeToString()), data["state"][:, :1], []
    start = og.Trainer(proto, {"y": "mse"}, carry={"state": "next"}, batch_axes={"state": 1})
    for x in MIXED_X:
        y, state = session.run(None, {"x": x[None], "state": state})
        rows.append(y[0])
    np.testing.assert_allclose(start.predict(data), rows, rtol=1e-5)


def test_the_search_gives_up(monkeypatch):
    monkeypatch.setattr(module, "_STEPS", 0)
    assert free_rows(prepare(mixing()), "rows", {}) is None


def test_a_model_of_no_row_stays():
    symbolic = onnx.parser.parse_model(MIXED.replace("ROWS", "N"))
    assert free_rows(prepare(symbolic), "rows", {}) is None
