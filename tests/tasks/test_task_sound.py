"""`tasks.sound` against PyTorch, a plain reference of alarms, and the runtime chunk by chunk."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest

import onnxgrad as og
from onnxgrad.tasks.sound import Sound
from tests.support.errors import naming
from tests.support.exports import export_module
from tests.support.models import operator_names, parse_model
from tests.support.running import in_sweep, session_of
from tests.support.sound_files import RATE, folder_of_tones, random_sound, write_wave


def test_clips_are_drawn_by_seed_and_row(tmp_path):
    root = folder_of_tones(tmp_path / "data")
    options = {"rate": RATE, "shift": 0.05, "gain": 3, "noise": root / "background"}
    reader = Sound(one_layer_model(2000, 3), root, **options).data
    plain = Sound(one_layer_model(2000, 3), root, rate=RATE).data
    X, y = reader.take(np.array([3, 8]), 5)
    again, _ = reader.take(np.array([8]), 5)
    np.testing.assert_array_equal(X["x"][1:], again["x"])
    assert y.tolist() == [0, 1]
    assert np.abs(X["x"] - reader.take(np.array([3, 8]), 6)[0]["x"]).max() > 0.01
    np.testing.assert_array_equal(
        reader.take(np.array([3, 8]), None)[0]["x"], plain.take(np.array([3, 8]), 1)[0]["x"]
    )
    assert reader.subset(np.array([8])).labels.tolist() == [1]
    assert reader.describe() == Sound(one_layer_model(2000, 3), root, **options).data.describe()


# -- models ---------------------------------------------------------------------------------------


def one_layer_model(samples, units, end="Identity", shape=None):
    """Return a model of one layer."""
    w = random_sound(samples, units, seed=4, scale=samples**-0.5)
    text = f"""f (float[{shape or f"N,{samples}"}] x) => (float[N,{units}] y) {{
        a = MatMul(x, w)  y = {end}(a) }}"""
    return parse_model(text, opset=20, w=np.float32(w))


def test_classes(tmp_path):
    root = folder_of_tones(tmp_path / "data", 2)
    assert Sound(one_layer_model(2000, 3), root, rate=RATE).classes == ["background", "high", "low"]
    replaced = Sound(one_layer_model(2000, 5), root, rate=RATE)
    assert replaced.model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
    assert Sound(replaced.model, rate=RATE).classes == ["background", "high", "low"]
    task = Sound(one_layer_model(2000, 1, "Sigmoid"), root, rate=RATE, word="high")
    assert task.data.labels.tolist() == [[0], [0], [1], [1], [0], [0]]
    assert task.loss == "binary_cross_entropy"
    again = Sound(task.trainer().model)
    assert (again.word, again.form.rate) == ("high", RATE)
    trained = Sound(one_layer_model(2000, 3), root, rate=RATE).trainer().model
    assert Sound(trained, rate=RATE).classes == ["background", "high", "low"]
    with pytest.raises(ValueError, match="word='hi'"):
        Sound(one_layer_model(2000, 1), root, rate=RATE, word="hi")
    with pytest.raises(ValueError, match=naming("0.wav", "'high'")):
        Sound(one_layer_model(2000, 2), root, rate=RATE, classes=["background", "low"])
    with pytest.raises(ValueError, match=naming("'x'", "seconds=")):
        Sound(one_layer_model(2000, 3, shape="N,T"), root, rate=RATE)
    with pytest.raises(ValueError, match=naming("seconds=1", "takes 2000")):
        Sound(one_layer_model(2000, 3), root, rate=RATE, seconds=1)


@pytest.mark.parametrize("shape", ["N,8,T", "N,T,8", "N,1,8,T", "N,1,T,8", "N,T,8,1"])
def test_spectrograms_have_the_layout_of_the_input(shape):
    mel = og.data.mel_spectrogram(RATE, 256, 100, 8)
    text = f"f (float[{shape}] x) => (float[N,1] y) {{ y = Flatten(x) }}"
    model = parse_model(text, opset=20)
    form = Sound(model, rate=RATE, seconds=0.5, front=mel, word="a").form
    waves = np.float32(random_sound(3, 2000))
    found = form.model_inputs(waves)["x"]
    want = mel(waves) if shape.index("8") < shape.index("T") else mel(waves).swapaxes(1, 2)
    assert found.ndim == len(shape.split(","))
    np.testing.assert_array_equal(found.reshape(want.shape), want)
    other = og.data.mel_spectrogram(RATE, 256, 100, 9)
    form = Sound(model, rate=RATE, seconds=0.5, front=other, word="a").form
    with pytest.raises(ValueError, match=naming("input 'x'", "front=")):
        form.model_inputs(waves)


def test_a_small_network_trains_as_in_pytorch(tmp_path):
    """Loss and gradient of a CNN on log-mel spectrograms, and the weights after two epochs."""
    torch = pytest.importorskip("torch")
    root = folder_of_tones(tmp_path / "data", 4)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 3),
    )
    mel = og.data.mel_spectrogram(RATE, 256, 100, 12)
    model = export_module(
        net,
        (torch.zeros(2, 1, 12, 21),),
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
    )
    task = Sound(model, root, rate=RATE, seconds=0.5, front=mel)
    trainer = task.trainer(optimizer="sgd", learning_rate=0.05, class_weight=[1.0, 2.0, 3.0])
    X, y = task.data.take(np.arange(12), None)
    waves = np.stack([og.data.read_wave(clip.file, RATE) for clip in task.data.clips])
    seconds = torch.tensor(waves).double()
    window = torch.hann_window(256, dtype=torch.float64)
    spectrum = torch.stft(seconds, 256, 100, window=window, return_complex=True).abs() ** 2
    filters = torch.tensor(mel.filters())
    x = torch.log((filters @ spectrum).clamp(min=1e-10)).float()[:, None]
    np.testing.assert_allclose(X["x"], x, atol=2e-3)  # in float32 where the energy is lowest
    x, labels = torch.tensor(X["x"]), torch.tensor(y)
    cost = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))
    loss = cost(net(x), labels)
    loss.backward()
    before = {n: a.copy() for n, a in trainer.state.weights.items()}
    assert trainer.evaluate(task.data)["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    trainer.fit(task.data, epochs=1, batch_size=12, shuffle=False)
    compared = 0
    for name, p in net.named_parameters():
        gradient = (before[name] - trainer.state.weights[name]) / 0.05
        np.testing.assert_allclose(gradient, p.grad, atol=1e-5 * float(p.grad.abs().max()) + 2e-6)
        compared += 1
    assert compared == 4


def gru_and_model():
    """Return a GRU cell on windows, with its state, as a module and as a file."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)

    class Listener(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.cell = torch.nn.Linear(48, 6), torch.nn.GRUCell(6, 5)
            self.out = torch.nn.Linear(5, 1)

        def forward(self, x, state):
            h = self.cell(torch.tanh(self.inner(x)), state[0])
            return torch.sigmoid(self.out(h)), h[None]

    rows, module = {0: "N"}, Listener()
    model = export_module(
        module,
        (torch.zeros(2, 48), torch.zeros(1, 2, 5)),
        input_names=["x", "state"],
        output_names=["y", "new"],
        dynamic_axes={"x": rows, "y": rows, "state": {1: "N"}, "new": {1: "N"}},
    )
    return module, model


def write_streams(root: Path, lengths=(400, 370, 290, 200), windows=40) -> Path:
    """Write files of windows of 40 samples in which some seconds are labeled."""
    lines = ["file,label,start,end"]
    for i, n in enumerate(lengths):
        x = random_sound(n, seed=i, scale=0.05)
        first, last = 60 + 13 * i, 130 + 13 * i
        x[first:last] += 0.4 * np.sin(np.arange(last - first))
        write_wave(root / f"{i}.wav", x)
        lines.append(f"{i}.wav,beep,{first / RATE},{last / RATE}")
    (root / "list.csv").write_text("\n".join(lines))
    return root / "list.csv"


GRU = {"rate": RATE, "carry": {"state": "new"}, "context": 8, "word": "beep"}


def train_in_torch(module, path, groups, rate):
    """Train by truncated backpropagation through time: one window a step, files side by side."""
    torch = pytest.importorskip("torch")
    files, losses = [og.data.read_wave(path.parent / f"{i}.wav", RATE) for i in range(4)], []
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    for group in groups:
        counts = [-(-len(files[i]) // 40) for i in group]
        state = torch.zeros(1, len(group), 5)
        for t in range(max(counts)):
            x, y, w = (np.zeros((len(group), n), np.float32) for n in (48, 1, 1))
            for row, i in enumerate(group):
                at = min(t, counts[row] - 1)  # a file that is over has no weight
                part = np.pad(files[i], (8, 40))[40 * at :][:48]
                x[row, : len(part)] = part
                middle = np.clip(np.array([60, 130]) + 13 * i, 40 * at, 40 * at + 40)
                y[row], w[row] = middle[1] - middle[0] >= 20, t < counts[row]
            p, state = module(torch.tensor(x), state.detach())
            loss = (
                torch.nn.functional.binary_cross_entropy(
                    p, torch.tensor(y), torch.tensor(w), reduction="sum"
                )
                / w.sum()
            )
            losses.append((float(loss.detach()), w.sum()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    values, counts = np.array(losses).T
    return np.average(values, weights=counts)


@pytest.mark.parametrize(
    ("side", "groups"), [(2, [[3, 2], [0, 1]]), in_sweep(1, [[3], [2], [0], [1]])]
)
def test_states_train_as_in_pytorch(tmp_path, side, groups):
    path = write_streams(tmp_path)
    module, model = gru_and_model()
    task = Sound(model, path, files=side, **GRU)
    trainer = task.trainer(optimizer="sgd", learning_rate=0.5)
    want = train_in_torch(module, path, groups, 0.0)
    assert trainer.evaluate(task.data)["loss"] == pytest.approx(want, rel=1e-5)
    trainer.fit(task.data, epochs=2, shuffle=False)
    for _ in range(2):
        train_in_torch(module, path, groups, 0.5)
    compared = 0
    for name, p in module.named_parameters():
        found = trainer.state.weights.get(name)
        if found is None:
            continue
        np.testing.assert_allclose(found, p.detach(), atol=1e-5)
        compared += 1
    assert compared >= 4
    assert trainer.state.step == 2 * task.data.count
    weighted = task.trainer(class_weight={0: 1.0, 1: 4.0})
    weighted.fit(task.data, epochs=1)  # in another order of files
    assert weighted.evaluate(task.data)["loss"] != trainer.evaluate(task.data)["loss"]


def test_a_stream_is_heard_as_chunk_by_chunk(tmp_path):
    """The file that comes out, in the runtime with its states, says what `predict` says."""
    path = write_streams(tmp_path)
    _, model = gru_and_model()
    task = Sound(model, path, files=2, **GRU)
    trainer = task.trainer(optimizer="adam", learning_rate=0.01).fit(task.data, epochs=3)
    trainer.save(tmp_path / "out.onnx")
    session = session_of(str(tmp_path / "out.onnx"))
    files = [path.parent / f"{i}.wav" for i in range(4)]
    found = task.predict(trainer, files, threshold=0.3)
    for file, heard in zip(files, found, strict=True):
        x = og.data.read_wave(file, RATE)
        state, before = np.zeros((1, 1, 5), np.float32), np.zeros(8, np.float32)
        for at, score in enumerate(heard.scores):
            chunk = np.zeros(40, np.float32)
            part = x[40 * at :][:40]
            chunk[: len(part)] = part
            feed = {"x": np.concatenate([before, chunk])[None], "state": state}
            y, state = session.run(["y", "new"], feed)
            before = chunk[-8:]
            np.testing.assert_array_equal(y[0], score)
        assert len(heard.scores) == -(-len(x) // 40)
    assert operator_names(trainer.model) == operator_names(model)


ALONG = """f (float[T,40] x, float[1,1,3] h, float[1,1,3] c, int64 sr)
      => (float[T] p, float[1,1,3] hn, float[1,1,3] cn) {
        axis = Constant <value = int64[1] {1}>()  both = Constant <value = int64[2] {1, 2}>()
        s = Unsqueeze(x, axis)
        y, hn, cn = LSTM <hidden_size = 3> (s, W, R, , , h, c)
        o = MatMul(y, v)  q = Squeeze(o, axes)  a = Cast <to = 1> (sr)  z = Mul(q, a)
        p = Sigmoid(z) }"""


def lstm_over_windows():
    """Return an LSTM over windows, which are the rows of a batch."""
    shapes = {"W": (1, 12, 40), "R": (1, 12, 3), "v": (3, 1)}
    weights = {
        name: np.float32(random_sound(*shape, seed=len(shape), scale=0.3))
        for name, shape in shapes.items()
    }
    return parse_model(ALONG, opset=20, axes=np.int64([1, 2, 3]), **weights)


def test_windows_of_one_file_as_rows(tmp_path):
    """A model whose states have no rows gets consecutive windows, and any number at once."""
    path = write_streams(tmp_path)
    options = {"rate": RATE, "carry": {"h": "hn", "c": "cn"}, "constants": {"sr": 2}}
    losses, scores = [], []
    for files in (3, 100):
        task = Sound(lstm_over_windows(), path, word="beep", files=files, **options)
        trainer = task.trainer(optimizer="sgd", learning_rate=0.1)
        losses.append(trainer.evaluate(task.data)["loss"])
        trainer.fit(task.data, epochs=1)
        scores.append(task.predict(trainer, path.parent)[0].scores)
        assert task.data.count == {3: 4 + 4 + 3 + 2, 100: 4}[files]  # of 10, 10, 8 and 5 windows
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert np.abs(scores[0] - scores[1]).max() > 0


def test_a_window_has_the_class_of_half_of_it(tmp_path):
    """The background is the first class, and of windows without a label."""
    write_wave(tmp_path / "a.wav", random_sound(200, scale=0.05))
    lines = ["file,label,start,end"]
    for label, first, last in (("beep", 20, 80), ("background", 80, 120), ("click", 120, 179)):
        lines.append(f"a.wav,{label},{first / RATE},{last / RATE}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    text = """f (float[N,40] x, float[1,N,1] state) => (float[N,3] y, float[1,N,1] new) {
        y = MatMul(x, w)  new = Identity(state) }"""
    model = parse_model(text, opset=20, w=np.zeros((40, 3), np.float32))
    task = Sound(model, tmp_path / "list.csv", rate=RATE, carry={"state": "new"})
    assert task.classes == ["background", "beep", "click"]
    labels = [int(y[0]) for _, y, _ in task.data.batches(1, None, 0)]
    assert labels == [1, 1, 0, 2, 0]


# -- results --------------------------------------------------------------------------------------


def test_predictions_of_clips(tmp_path):
    """Scores are those of the runtime; long files have windows, short ones are in the middle."""
    root = folder_of_tones(tmp_path / "data")
    task = Sound(one_layer_model(2000, 3), root, rate=RATE)
    trainer = task.trainer(optimizer="adam", learning_rate=0.01).fit(task.data, epochs=5)
    files = [clip.file for clip in task.data.clips]
    found = task.predict(trainer, files)
    logits = trainer.predict(task.data)
    want = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.concatenate([h.scores for h in found]), want, atol=1e-6)
    assert [h.label for h in found] == [task.classes[k] for k in want.argmax(axis=1)]
    x = np.float32(random_sound(5000))
    (long,) = task.predict(trainer, [x], hop=0.25)
    assert long.times.tolist() == [0, 0.25, 0.5, 0.75]
    assert task.predict(trainer, [x[:4100]])[0].times.tolist() == [0, 0.5, 0.525]  # to the end
    (second,) = task.predict(trainer, [x[1000:3000]])
    np.testing.assert_allclose(long.scores[1], second.scores[0], atol=1e-6)
    (short,) = task.predict(trainer, [x[:1000]])
    (padded,) = task.predict(trainer, [np.pad(x[:1000], 500)])
    np.testing.assert_array_equal(short.scores, padded.scores)
    (short,) = task.predict(trainer, [x[:1999]])
    (padded,) = task.predict(trainer, [np.pad(x[:1999], (1, 0))])
    np.testing.assert_array_equal(short.scores, padded.scores)


def test_events_are_written(tmp_path):
    first = np.float32([[1], [0], [0], [0]])  # of the four samples of a second
    model = parse_model("f (float[N,4] x) => (float[N,1] y) { y = MatMul(x, w) }", w=first)
    task = Sound(model, rate=4, word="beep", activation="none")
    scores = np.float32([0.125, 0.875, 0.75, 0.25, 0.625, 0.125, 0.125, 0.5625])

    def hear(**options):
        [heard] = task.predict(task.model, [np.repeat(scores, 4)], **options)
        return heard

    heard, held = hear(threshold=0.5), hear(threshold=0.5, hold=1.0)
    assert heard.events == [(1, 3, "beep", 0.875), (4, 5, "beep", 0.625), (7, 8, "beep", 0.5625)]
    assert [event[:2] for event in held.events] == [(1, 5), (7, 8)]
    assert hear(threshold=0.95, hold=1.0).label is None
    files = task.write(["a/x.wav", "b/x.wav"], [heard, held], tmp_path / "out")
    assert [f.name for f in files] == ["events.csv", "x.txt", "x-2.txt"]
    assert files[1].read_text().splitlines()[0] == "1.000000\t3.000000\tbeep"
    rows = list(csv.DictReader(files[0].open()))
    assert len(rows) == 5
    assert list(rows[3]) == ["file", "start", "end", "label", "score"]
    assert list(rows[3].values()) == ["b/x.wav", "1.0", "5.0", "beep", "0.875"]


def test_outputs_that_are_no_probabilities():
    task = Sound(one_layer_model(4, 1), rate=4, word="beep", activation="none")
    with pytest.raises(ValueError, match=naming("no probabilities", "activation=")):
        task.predict(task.model, [np.float32([30, 30, 30, 30]), -np.float32([30, 30, 30, 30])])
    with pytest.raises(ValueError, match=naming("'0'", "shape")):
        task.predict(task.model, [np.zeros((2, 2), np.float32)])


def test_probabilities_of_branches_are_recognized():
    captured = "then_branch = a () => (float[N,1] u) { u = Identity(p) }"
    made = parse_model(f"""f (float[N,4] x) => (float[N,1] y) {{ s = MatMul(x, w)  p = Sigmoid(s)
        y = If (t) <{captured}, else_branch = b () => (float[N,1] v) {{ v = Mul(p, p) }}> }}""",
        w=np.ones((4, 1), np.float32), t=np.array(True))  # fmt: skip
    wave = np.float32([-1, 0, 0, 0, -2, 0, 0, 0])
    [heard] = Sound(made, rate=4, word="beep").predict(made, [wave])
    [scores] = session_of(made).run(None, {"x": wave.reshape(2, 4)})
    np.testing.assert_array_equal(heard.scores, scores)


def test_false_alarms_are_a_metric(tmp_path):
    """In batches, at the threshold by which a share of the words is missed."""
    root = folder_of_tones(tmp_path / "data")
    task = Sound(one_layer_model(2000, 1, "Sigmoid"), root, rate=RATE, word="high")
    found = task.trainer().evaluate(task.data, batch_size=4)
    scores = task.trainer().predict(task.data)
    want = og.metrics.false_alarms(list(scores), list(task.data.labels), 0.5).at(0.05)[1]
    assert found["false_alarms_per_hour"] == want
    assert 0 <= want <= 7200


# -- published files ------------------------------------------------------------------------------


@pytest.mark.real
def test_silero_trains_as_a_stream(tmp_path):
    if not os.environ.get("ONNXGRAD_MODELS"):
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    from published import fetched

    path = write_streams(tmp_path, (8000, 7000))
    options = {"rate": 16000, "seconds": 0.032, "context": 64, "word": "beep", "files": 2}
    task = Sound(fetched("silero-vad"), path, carry={"state": "stateN"}, **options)
    trainer = task.trainer(optimizer="adam", learning_rate=1e-4)
    before = trainer.evaluate(task.data)["loss"]
    trainer.fit(task.data, epochs=3)
    assert trainer.evaluate(task.data)["loss"] < before
