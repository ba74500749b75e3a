"""`tasks.sound` against PyTorch, a plain reference of alarms, and the runtime chunk by chunk."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.data import sounds as sound_files
from onnxgrad.tasks import sound_events
from onnxgrad.tasks.sound import Sound
from tests.support.sound_files import RATE, folder_of_tones, random_sound, write_wave

# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4])
def test_waves_are_read(tmp_path, width):
    x = random_sound(1000, 2)
    path = write_wave(tmp_path / "a.wav", x, width=width)
    np.testing.assert_allclose(og.read_wave(path, RATE), x.mean(axis=1), atol=4e-5)
    part = og.read_wave(path, RATE, 0.1, 0.2)
    np.testing.assert_array_equal(part, og.read_wave(path, RATE)[400:800])
    slow = og.read_wave(path, RATE // 2)
    np.testing.assert_array_equal(
        slow, og.resample(RATE, RATE // 2)(og.read_wave(path, RATE)[None])[0]
    )
    assert sound_files.length_of(path, RATE // 2) == len(slow)


def test_files_that_are_no_waves(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF, but no more")
    try:
        import soundfile  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"a\.wav.*pip install 'onnxgrad\[sound\]'"):
            og.read_wave(tmp_path / "a.wav", RATE)
    else:
        with pytest.raises(ValueError, match=r"a\.wav"):
            og.read_wave(tmp_path / "a.wav", RATE)
    path = write_wave(tmp_path / "b.wav", random_sound(100))
    with pytest.raises(ValueError, match=r"b\.wav.*no samples from 3"):
        og.read_wave(path, RATE, 3)


def test_soundfile_reads_what_wave_does_not(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    x = random_sound(1000)
    soundfile.write(tmp_path / "a.flac", x, RATE)
    np.testing.assert_allclose(og.read_wave(tmp_path / "a.flac", RATE, 0.1), x[400:], atol=1e-4)


def test_lists(tmp_path):
    write_wave(tmp_path / "a.wav", random_sound(RATE))
    rows = [("a.wav", "beep", 0.25, 0.5), ("a.wav", "", "", "")]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label", "start", "end"), *rows])
    lines = [{"file": "a.wav", "label": "beep", "start": 0.25, "end": 0.5}]
    lines += [{"file": "a.wav", "label": ""}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    clips = sound_files.list_clips(tmp_path / "list.csv")
    assert clips == sound_files.list_clips(tmp_path / "list.jsonl")
    assert clips[0] == sound_files.Clip(tmp_path / "a.wav", "beep", 0.25, 0.5)
    assert clips[1] == sound_files.Clip(tmp_path / "a.wav", "", 0.0, None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("b.wav,x,,", r"list\.csv', row 1: there is no file .*b\.wav"),
        ("a.wav,x,late,", "row 1: .*late.*in seconds"),
        ("a.wav,x,2,1", "end=1.0 is before 2.0"),
    ],
)
def test_lists_that_are_wrong(tmp_path, row, message):
    write_wave(tmp_path / "a.wav", random_sound(RATE))
    (tmp_path / "list.csv").write_text(f"file,label,start,end\n{row}\n")
    with pytest.raises(ValueError, match=message):
        sound_files.list_clips(tmp_path / "list.csv")


def test_folders_that_are_wrong(tmp_path):
    with pytest.raises(ValueError, match="has no sound"):
        sound_files.list_clips(tmp_path)
    write_wave(tmp_path / "a.wav", random_sound(100))
    with pytest.raises(ValueError, match=r"a\.wav' is in no folder"):
        sound_files.list_clips(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        sound_files.list_clips(tmp_path / "c")


def test_augmentation_is_what_it_says(tmp_path):
    """The ratio of powers is within `snr`, the gain within `gain`, and the shift exact."""
    x, other = random_sound(4000, scale=0.2), np.float32(random_sound(700, seed=3))
    for seed in range(20):
        add = sound_files.Augment(RATE, noise=[other], snr=(5, 10))
        added = add(x, np.random.default_rng(seed)) - x
        ratio = 10 * np.log10(np.mean(x**2) / np.mean(added**2))
        assert 4.7 < ratio < 10.3  # the noise is cut, which changes its power a little
        louder = sound_files.Augment(RATE, gain=6)(x, np.random.default_rng(seed)) / x
        assert np.ptp(louder) < 1e-4
        assert abs(20 * np.log10(louder[0])) < 6
        moved = sound_files.Augment(RATE, shift=0.01).moved(np.random.default_rng(seed))
        assert abs(moved) <= 40
        np.testing.assert_array_equal(
            sound_files.fitted(x, 2000, moved), np.float32(x[1000 - moved : 3000 - moved])
        )
    assert sound_files.Augment(RATE, 1, 6, [other])(x, None) is x


def test_clips_are_drawn_by_seed_and_row(tmp_path):
    root = folder_of_tones(tmp_path / "data")
    options = {"rate": RATE, "shift": 0.05, "gain": 3, "noise": root / "background"}
    reader = Sound(linear(2000, 3), root, **options).data
    plain = Sound(linear(2000, 3), root, rate=RATE).data
    X, y = reader.take(np.array([3, 8]), 5)
    again, _ = reader.take(np.array([8]), 5)
    np.testing.assert_array_equal(X["x"][1:], again["x"])
    assert y.tolist() == [0, 1]
    assert np.abs(X["x"] - reader.take(np.array([3, 8]), 6)[0]["x"]).max() > 0.01
    np.testing.assert_array_equal(
        reader.take(np.array([3, 8]), None)[0]["x"], plain.take(np.array([3, 8]), 1)[0]["x"]
    )
    assert reader.subset(np.array([8])).labels.tolist() == [1]
    assert reader.describe() == Sound(linear(2000, 3), root, **options).data.describe()


# -- models ---------------------------------------------------------------------------------------


def linear(samples, units, end="Identity", shape=None):
    """Return a model of one layer."""
    w = random_sound(samples, units, seed=4, scale=samples**-0.5)
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        f (float[{shape or f"N,{samples}"}] x) => (float[N,{units}] y) {{
        a = MatMul(x, w)  y = {end}(a) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(w), "w"))
    return model


def test_classes(tmp_path):
    root = folder_of_tones(tmp_path / "data", 2)
    assert Sound(linear(2000, 3), root, rate=RATE).classes == ["background", "high", "low"]
    replaced = Sound(linear(2000, 5), root, rate=RATE)
    assert replaced.model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
    assert Sound(replaced.model, rate=RATE).classes == ["background", "high", "low"]
    task = Sound(linear(2000, 1, "Sigmoid"), root, rate=RATE, word="high")
    assert task.data.labels.tolist() == [[0], [0], [1], [1], [0], [0]]
    assert task.loss == "binary_cross_entropy"
    assert Sound(task.trainer().model, rate=RATE).word == "high"
    trained = Sound(linear(2000, 3), root, rate=RATE).trainer().model
    assert Sound(trained, rate=RATE).classes == ["background", "high", "low"]
    with pytest.raises(ValueError, match="word='hi' is the label of no clip"):
        Sound(linear(2000, 1), root, rate=RATE, word="hi")
    with pytest.raises(ValueError, match=r"0\.wav' has the label 'high'"):
        Sound(linear(2000, 2), root, rate=RATE, classes=["background", "low"])
    with pytest.raises(ValueError, match="pass seconds="):
        Sound(linear(2000, 3, shape="N,T"), root, rate=RATE)
    with pytest.raises(ValueError, match="takes 2000"):
        Sound(linear(2000, 3), root, rate=RATE, seconds=1)


@pytest.mark.parametrize("shape", ["N,8,T", "N,T,8", "N,1,8,T", "N,1,T,8", "N,T,8,1"])
def test_spectrograms_have_the_layout_of_the_input(shape):
    mel = og.mel_spectrogram(RATE, 256, 100, 8)
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        f (float[{shape}] x) => (float[N,1] y) {{ y = Flatten(x) }}""")
    form = Sound(model, rate=RATE, seconds=0.5, front=mel, word="a").form
    waves = np.float32(random_sound(3, 2000))
    found = form.inputs(waves)["x"]
    want = mel(waves) if shape.index("8") < shape.index("T") else mel(waves).swapaxes(1, 2)
    assert found.ndim == len(shape.split(","))
    np.testing.assert_array_equal(found.reshape(want.shape), want)
    with pytest.raises(ValueError, match="what front returns"):
        Sound(
            model, rate=RATE, seconds=0.5, front=og.mel_spectrogram(RATE, 256, 100, 9), word="a"
        ).form.inputs(waves)


def exported(module, args, **options):
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    program = torch.onnx.export(module.eval(), args, dynamo=True, verbose=False, **options)
    return program.model_proto


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
    mel = og.mel_spectrogram(RATE, 256, 100, 12)
    model = exported(net, (torch.zeros(2, 1, 12, 21),), input_names=["x"], output_names=["y"],
                     dynamic_shapes=[{0: torch.export.Dim("N")}])  # fmt: skip
    task = Sound(model, root, rate=RATE, seconds=0.5, front=mel)
    trainer = task.trainer(optimizer="sgd", learning_rate=0.05, class_weight=[1.0, 2.0, 3.0])
    X, y = task.data.take(np.arange(12), None)
    waves = np.stack([og.read_wave(clip.file, RATE) for clip in task.data.clips])
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


def gru():
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

    rows, module = torch.export.Dim("N"), Listener()
    return module, exported(
        module,
        (torch.zeros(2, 48), torch.zeros(1, 2, 5)),
        input_names=["x", "state"],
        output_names=["y", "new"],
        dynamic_shapes=[{0: rows}, {1: rows}],
    )


def streams(root: Path, lengths=(400, 370, 290, 200), windows=40) -> Path:
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


def by_torch(module, path, groups, rate):
    """Train by truncated backpropagation through time: one window a step, files side by side."""
    torch = pytest.importorskip("torch")
    files, losses = [og.read_wave(path.parent / f"{i}.wav", RATE) for i in range(4)], []
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


@pytest.mark.parametrize(("side", "groups"), [(2, [[3, 2], [0, 1]]), (1, [[3], [2], [0], [1]])])
def test_states_train_as_in_pytorch(tmp_path, side, groups):
    path = streams(tmp_path)
    module, model = gru()
    task = Sound(model, path, files=side, **GRU)
    trainer = task.trainer(optimizer="sgd", learning_rate=0.5)
    want = by_torch(module, path, groups, 0.0)
    assert trainer.evaluate(task.data)["loss"] == pytest.approx(want, rel=1e-5)
    trainer.fit(task.data, epochs=2, shuffle=False)
    for _ in range(2):
        by_torch(module, path, groups, 0.5)
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
    path = streams(tmp_path)
    _, model = gru()
    task = Sound(model, path, files=2, **GRU)
    trainer = task.trainer(optimizer="adam", learning_rate=0.01).fit(task.data, epochs=3)
    trainer.save(tmp_path / "out.onnx")
    session = ort.InferenceSession(str(tmp_path / "out.onnx"))
    files = [path.parent / f"{i}.wav" for i in range(4)]
    found = task.predict(trainer, files, threshold=0.3)
    for file, heard in zip(files, found, strict=True):
        x = og.read_wave(file, RATE)
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
    assert [n.op_type for n in trainer.model.graph.node] == [n.op_type for n in model.graph.node]


ALONG = """
    <ir_version: 9, opset_import: ["": 20]>
    f (float[T,40] x, float[1,1,3] h, float[1,1,3] c, int64 sr)
      => (float[T] p, float[1,1,3] hn, float[1,1,3] cn) {
        axis = Constant <value = int64[1] {1}>()  both = Constant <value = int64[2] {1, 2}>()
        s = Unsqueeze(x, axis)
        y, hn, cn = LSTM <hidden_size = 3> (s, W, R, , , h, c)
        o = MatMul(y, v)  q = Squeeze(o, axes)  a = Cast <to = 1> (sr)  z = Mul(q, a)
        p = Sigmoid(z) }"""


def along():
    """Return an LSTM over windows, which are the rows of a batch."""
    model = onnx.parser.parse_model(ALONG)
    for name, shape in {"W": (1, 12, 40), "R": (1, 12, 3), "v": (3, 1)}.items():
        array = np.float32(random_sound(*shape, seed=len(shape), scale=0.3))
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64([1, 2, 3]), "axes"))
    return model


def test_windows_of_one_file_as_rows(tmp_path):
    """A model whose states have no rows gets consecutive windows, and any number at once."""
    path = streams(tmp_path)
    options = {"rate": RATE, "carry": {"h": "hn", "c": "cn"}, "constants": {"sr": 2}}
    losses, scores = [], []
    for files in (3, 100):
        task = Sound(along(), path, word="beep", files=files, **options)
        trainer = task.trainer(optimizer="sgd", learning_rate=0.1)
        losses.append(trainer.evaluate(task.data)["loss"])
        trainer.fit(task.data, epochs=1)
        scores.append(task.predict(trainer, path.parent)[0].scores)
        assert task.data.count == {3: 4 + 4 + 3 + 2, 100: 4}[files]  # of 10, 10, 8 and 5 windows
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert np.abs(scores[0] - scores[1]).max() > 0


# -- results --------------------------------------------------------------------------------------


def test_predictions_of_clips(tmp_path):
    """Scores are those of the runtime; long files have windows, short ones are in the middle."""
    root = folder_of_tones(tmp_path / "data")
    task = Sound(linear(2000, 3), root, rate=RATE)
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


def test_events_are_written(tmp_path):
    task = Sound(linear(4, 1, "Sigmoid"), rate=4, word="beep")
    scores = np.array([0.1, 0.9, 0.8, 0.2, 0.7, 0.1, 0.1, 0.6])[:, None]
    seconds = (np.arange(8.0), 1.0, 1.0), ["beep"], "background"
    heard = sound_events.hear(scores, *seconds, 0.5, 0.0)
    assert heard.events == [(1, 3, "beep", 0.9), (4, 5, "beep", 0.7), (7, 8, "beep", 0.6)]
    held = sound_events.hear(scores, *seconds, 0.5, 1.0)
    assert [event[:2] for event in held.events] == [(1, 5), (7, 8)]
    assert sound_events.hear(scores, *seconds, 0.95, 1.0).label is None
    files = task.write(["a/x.wav", "b/x.wav"], [heard, held], tmp_path / "out")
    assert [f.name for f in files] == ["events.csv", "x.txt", "x-2.txt"]
    assert files[1].read_text().splitlines()[0] == "1.000000\t3.000000\tbeep"
    rows = list(csv.DictReader(files[0].open()))
    assert len(rows) == 5
    assert rows[3] == {
        "file": "b/x.wav",
        "start": "1.0",
        "end": "5.0",
        "label": "beep",
        "score": "0.9",
    }


def test_outputs_that_are_no_probabilities():
    task = Sound(linear(4, 1), rate=4, word="beep", activation="none")
    with pytest.raises(ValueError, match="no probabilities"):
        task.predict(task.model, [np.float32([30, 30, 30, 30]), -np.float32([30, 30, 30, 30])])
    with pytest.raises(ValueError, match="'0' has the shape"):
        task.predict(task.model, [np.zeros((2, 2), np.float32)])


def alarms_by_loop(scores, labels, seconds, threshold, hold):
    """Count as a person would, window by window."""
    false, events, missed, quiet = 0, 0, 0, 0
    for s, y in zip(scores, labels, strict=True):
        last = -1e9  # seconds
        for t, (value, label) in enumerate(zip(s, y, strict=True)):
            quiet += label == 0
            if value >= threshold and t * seconds - last > hold - 1e-6:
                last = t * seconds
                false += label == 0
        t = 0
        while t < len(y):
            end = t
            while end < len(y) and y[end]:
                end += 1
            if end > t:
                events += 1
                missed += max(s[t:end]) < threshold
            t = end + 1
    return false / (quiet * seconds / 3600), missed / events


@pytest.mark.parametrize("seed", range(50))
def test_alarms_are_those_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, rng.integers(1, 5))
    scores = [rng.random(n).round(rng.integers(1, 4)) for n in lengths]
    labels = [(rng.random(n) < 0.3).astype(int) for n in lengths]
    labels[0][:1], labels[-1][-1:] = 1, 0
    if len(lengths) == 1 and lengths[0] == 1:
        scores, labels = [np.array([0.2, 0.6])], [np.array([0, 1])]
    seconds, hold = float(rng.choice([0.08, 0.5])), float(rng.choice([0.0, 0.5, 1.0]))
    curve = og.false_alarms(scores, labels, seconds, hold=hold)
    assert len(curve.thresholds) == len(np.unique(np.concatenate(scores)))
    for threshold, per_hour, missed in zip(*curve, strict=True):
        want = alarms_by_loop(scores, labels, seconds, threshold, hold)
        np.testing.assert_allclose((per_hour, missed), want, rtol=1e-9, atol=1e-12)
    best = curve.at(missed=0.2)[1]
    assert best == min(f for f, m in zip(curve.per_hour, curve.missed, strict=True) if m <= 0.2)


def test_alarms_that_cannot_be_counted():
    with pytest.raises(ValueError, match="both must occur"):
        og.false_alarms([0.1, 0.2], [0, 0], 1)
    with pytest.raises(ValueError, match="different numbers"):
        og.false_alarms([0.1, 0.2], [0, 1, 0], 1)
    with pytest.raises(ValueError, match="pass more"):
        og.false_alarms([0.1, 0.2], [0, 1], 1, thresholds=[0.5]).at(0.5)


def test_false_alarms_are_a_metric(tmp_path):
    """In batches, at the threshold by which a share of the words is missed."""
    root = folder_of_tones(tmp_path / "data")
    task = Sound(linear(2000, 1, "Sigmoid"), root, rate=RATE, word="high")
    found = task.trainer().evaluate(task.data, batch_size=4)
    scores = task.trainer().predict(task.data)
    want = og.false_alarms(list(scores), list(task.data.labels), 0.5).at(0.05)[1]
    assert found["false_alarms_per_hour"] == want
    assert 0 <= want <= 7200


# -- published files ------------------------------------------------------------------------------


@pytest.mark.real
def test_silero_trains_as_a_stream(tmp_path):
    if not os.environ.get("ONNXGRAD_MODELS"):
        pytest.skip("ONNXGRAD_MODELS=download takes it from its wheel")
    from published import fetched

    path = streams(tmp_path, (8000, 7000))
    options = {"rate": 16000, "seconds": 0.032, "context": 64, "word": "beep", "files": 2}
    task = Sound(fetched("silero-vad"), path, carry={"state": "stateN"}, **options)
    trainer = task.trainer(optimizer="adam", learning_rate=1e-4)
    before = trainer.evaluate(task.data)["loss"]
    trainer.fit(task.data, epochs=3)
    assert trainer.evaluate(task.data)["loss"] < before
