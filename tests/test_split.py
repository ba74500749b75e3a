"""Steps whose batches are split between threads, against steps that run as a whole."""

import io
import json

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.training.run import selection
from onnxgrad.training.run.parts import Together
from onnxgrad.training.run.runner import Runner

RNG = np.random.default_rng(0)
X = RNG.normal(size=(31, 4))
LABEL = RNG.integers(0, 3, 31)


def numbers(*shape):
    return ", ".join(f"{v:.4f}" for v in RNG.normal(size=shape).ravel())


MLP = f"""
    <ir_version: 9, opset_import: ["": 20]>
    f (double[N,4] x) => (double[N,3] y, double[N,1] z)
    <double[4,6] w = {{{numbers(4, 6)}}}, double[6] b = {{{numbers(6)}}},
     double[6,3] v = {{{numbers(6, 3)}}}, double[6,1] u = {{{numbers(6, 1)}}}> {{
        a = MatMul(x, w)  c = Add(a, b)  h = Tanh(c)  y = MatMul(h, v)  z = MatMul(h, u) }}"""
ONE = MLP.replace(", double[N,1] z)", ")").replace("z = MatMul(h, u)", "")
MIXING = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,4] x) => (float[N,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}> {
        a = MatMul(x, w)  m = ReduceMax<keepdims = 1>(a)  y = Sub(a, m) }"""
DROPOUT = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,4] x) => (float[N,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}> {
        a = Dropout(x)  y = MatMul(a, w) }"""
NORMALIZED = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[N,4] x) => (float[N,4] y)
    <float[4] s = {1,1,1,1}, float[4] b = {0,0,0,0}, float[4] m = {0,0,0,0}, float[4] v = {1,1,1,1}>
    { y = BatchNormalization(x, s, b, m, v) }"""
SEQUENCES = f"""
    <ir_version: 9, opset_import: ["": 20]>
    f (int64[N,T] x) => (float[N,3] y)
    <float[9,3] table = {{{numbers(9, 3)}}}, int64[1] one = {{1}}> {{
        a = Gather(table, x)  y = ReduceMean<keepdims = 0>(a, one) }}"""


@pytest.fixture
def splitting(monkeypatch):
    """Split all batches that can be split; return the function that sets the number of threads."""
    monkeypatch.setattr(selection, "SPLIT_THREADS", 2)
    monkeypatch.setattr(selection, "SPLIT_WORK", 0)
    monkeypatch.setattr(selection, "SPLIT_WORK_PER_WEIGHT", 0)

    def into(parts):
        monkeypatch.setattr(selection, "threads", lambda work: parts)

    into(2)
    return into


def trainer(text=ONE, loss="cross_entropy", **arguments):
    model = onnx.parser.parse_model(text) if isinstance(text, str) else text
    return og.Trainer(model, loss, **arguments)


def runner(trained):
    return type(trained._loop.runner)


def both(splitting, parts, fit, **arguments):
    """Return the trainers of a training as a whole, and in parts."""
    trained = []
    for threads in (1, parts):
        splitting(threads)
        one = trainer(**arguments)
        fit(one)
        trained.append(one)
    whole, split = trained
    assert runner(whole) is Runner
    assert runner(split) is Together
    return whole, split


def assert_equal(whole, split, rtol):
    for name, expected in whole.state.weights.items():
        np.testing.assert_allclose(split.state.weights[name], expected, rtol, rtol)
    for a, b in zip(whole.history, split.history, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=rtol)


ARGUMENTS = {
    "sgd": {},
    "adam": {"optimizer": og.optimizers.adam(), "learning_rate": 0.01},
    "clipped": {"optimizer": og.optimizers.momentum(), "clip_norm": 0.05},
    "two outputs": {
        "text": MLP,
        "loss": {"y": "cross_entropy", "z": "mse"},
        "loss_weights": {"y": 1.0, "z": 0.3},
    },
    "classes": {"class_weight": {0: 1.0, 1: 5.0, 2: 0.1}},
}


@pytest.mark.parametrize("parts", [2, 3, 9])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_parts_train_as_the_whole(splitting, name, parts):
    arguments = ARGUMENTS[name]
    label = {"y": LABEL, "z": X[:, :1]} if "text" in arguments else LABEL

    def fit(one):  # batches of 7 rows, the last of 3
        one.fit(X, label, epochs=3, batch_size=7)

    assert_equal(*both(splitting, parts, fit, **arguments), rtol=1e-11)


def test_terms_that_do_not_count(splitting):
    """Parts have different numbers of terms: labels that are ignored, and weights of rows."""
    label, weight = LABEL.copy(), RNG.random(31)
    label[:12] = -100
    weight[20:] = 0

    def fit(one):
        one.fit(X, label, epochs=2, batch_size=15, sample_weight=weight, shuffle=False)

    assert_equal(*both(splitting, 2, fit), rtol=1e-11)


def exported(name):
    """Return a network of PyTorch as its exporter writes it, and an input of 8 rows."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.layer(self.words(x)).mean(1))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    images = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)
    )
    networks = {
        "encoder": (Encoder(), RNG.integers(0, 9, (8, 5))),
        "recurrent": (Recurrent(), RNG.normal(size=(8, 5, 4)).astype("f")),
        "images": (images, RNG.normal(size=(8, 2, 6, 6)).astype("f")),
    }
    network, x = networks[name]
    file = io.BytesIO()
    torch.onnx.export(
        network.train(), torch.from_numpy(x), file, dynamo=False, input_names=["x"],
        dynamic_axes={"x": {0: "N"}}, training=torch.onnx.TrainingMode.TRAINING,
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue()), x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["encoder", "recurrent", "images"])
def test_networks_of_pytorch_train_in_parts_as_the_whole(splitting, name):
    proto, x = exported(name)

    def fit(one):
        one.fit(x, LABEL[:8], epochs=4, batch_size=8)

    sgd = og.optimizers.sgd()  # Adam enlarges the rounding of gradients that are zero
    whole, split = both(splitting, 2, fit, text=proto, optimizer=sgd)
    assert_equal(whole, split, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (MIXING, {}),
        (NORMALIZED, {"batch_norm": "train", "loss": "mse"}),
        (DROPOUT, {"dropout": {"*": 0.5}}),
        (MIXING.replace("ReduceMax<keepdims = 1>(a)", "Identity(a)"), {"accumulate": 2}),
    ],
    ids=["rows that mix", "statistics of the batch", "dropout", "micro-batches"],
)
def test_others_run_as_a_whole(splitting, text, arguments):
    one = trainer(text, **arguments)
    label = X.astype("f") if arguments.get("loss") == "mse" else LABEL
    one.fit(X.astype("f"), label, batch_size=8)
    assert runner(one) is Runner


@pytest.mark.parametrize("parts", [2, 3])
def test_norms_of_gradients_are_those_of_the_whole(splitting, parts):
    def fit(one):
        one.fit(X, LABEL, batch_size=8)

    def with_norms(**more):
        return trainer(callbacks=[og.Norms()], **more)

    splitting(1)
    whole = with_norms()
    fit(whole)
    splitting(parts)
    split, silent = with_norms(), trainer()
    fit(split)
    fit(silent)
    assert (runner(whole), runner(split)) == (Runner, Together)
    assert set(split.gradient_norms) == set(split.trained)
    for name, norm in whole.gradient_norms.items():
        assert split.gradient_norms[name] == pytest.approx(norm, rel=1e-5)
    for name, w in silent.state.weights.items():
        np.testing.assert_array_equal(split.state.weights[name], w)


def test_calls_with_other_sizes_keep_the_sessions(splitting):
    one = trainer()
    one.partial_fit(X[:8], LABEL[:8], batch_size=8)
    running = one._loop.runner
    for rows in (5, 8, 2, 8):
        one.partial_fit(X[:rows], LABEL[:rows], batch_size=8)
        assert one._loop.runner is running
    assert isinstance(running, Together)


def test_other_lengths_run_in_one_part(splitting):
    """The proof is one for given lengths; batches of others give the same weights, too."""
    batches = [RNG.integers(0, 9, (8, n)) for n in (5, 5, 3, 5, 7)]

    def fit(one):
        for X in batches:
            one.partial_fit(X, LABEL[:8], batch_size=8)

    whole, split = both(splitting, 2, fit, text=SEQUENCES)
    assert_equal(whole, split, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing(splitting):
    one = trainer(loss="mse")
    label = RNG.random((31, 3))
    one.fit(X, label, batch_size=8)
    before = {name: w.copy() for name, w in one.state.weights.items()}
    label[9] = 1e300
    with pytest.raises(og.ConvergenceError):
        one.partial_fit(X, label, batch_size=31)
    assert runner(one) is Together
    for name, w in before.items():
        np.testing.assert_array_equal(one.state.weights[name], w)


def test_a_resumed_training_is_the_same(splitting, tmp_path):
    def weights(folder, epochs, **resume):
        callbacks = [og.Checkpoint(tmp_path / folder)]
        one = trainer(optimizer=og.optimizers.adam(), learning_rate=0.01, callbacks=callbacks)
        one.fit(X, LABEL, epochs=epochs, batch_size=7, **resume)
        assert runner(one) is Together
        return one.state.weights

    whole = weights("whole", 4)
    weights("broken off", 2)
    resumed = weights("broken off", 4, resume=tmp_path / "broken off")
    for name, expected in whole.items():
        np.testing.assert_array_equal(resumed[name], expected)


def test_a_recorder_profiles_the_step_as_a_whole(splitting, tmp_path):
    recorder = og.Recorder(tmp_path)
    split = trainer(callbacks=[recorder])
    split.fit(X, LABEL, batch_size=8)
    assert runner(split) is Together
    run = json.loads((tmp_path / "run.json").read_text())
    products = [row for row in run["operators"]["rows"] if row[0].endswith(("MatMul", "Gemm"))]
    assert sum(row[1] for row in products) == 5  # two forward, one for an input, two for weights
