"""Transforms of waveforms, against formulas in float64, scipy and librosa; text by scikit-learn."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxgrad as og
from onnxgrad.training.parameters.choice import default_weights
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run


def random_waveforms(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


RATES = [(44100, 16000), (16000, 44100), (8000, 16000), (48000, 16000), (3, 2), (5, 5)]


@pytest.mark.parametrize(("old", "new"), RATES)
def test_resampled_tones(old, new):
    """A tone below the cutoff stays that tone, one above the Nyquist frequency vanishes."""
    seconds = np.arange(2000) / old
    low = min(old, new) / 2
    result = og.data.resample(old, new)(np.sin(2 * np.pi * 0.3 * low * seconds)[None])[0]
    assert len(result) == -(-2000 * new // old)
    want = np.sin(2 * np.pi * 0.3 * low * np.arange(len(result)) / new)
    middle = slice(len(result) // 10, -len(result) // 10)
    np.testing.assert_allclose(result[middle], want[middle], atol=5e-3)
    if old > new:
        above = og.data.resample(old, new)(np.sin(2 * np.pi * 1.6 * low * seconds)[None])[0]
        assert np.abs(above[middle]).max() < 0.02


@pytest.mark.parametrize(("old", "new"), RATES)
def test_resampled_noise(old, new):
    """Each sample is a sum over all others, weighted by the windowed sinc at their distance."""
    x = random_waveforms(2, 300)
    cutoff = min(old, new) * 0.99
    distance = cutoff * (np.arange(300) / old - np.arange(-(-300 * new // old))[:, None] / new)
    window = np.where(np.abs(distance) < 6, np.cos(np.pi * distance / 12) ** 2, 0)
    want = x.astype(np.float64) @ (np.sinc(distance) * window * cutoff / old).T
    np.testing.assert_allclose(og.data.resample(old, new)(x), x if old == new else want, atol=2e-5)


def formula(x: np.ndarray, points, rate, n_fft, hop, power, center) -> np.ndarray:
    """Return mel spectrograms in float64 for band edges `points` in Hz, by numpy's rfft."""
    x = x.astype(np.float64)
    x = np.pad(x, [(0, 0), (n_fft // 2, n_fft // 2)], mode="reflect") if center else x
    starts = np.arange(0, x.shape[1] - n_fft + 1, hop)
    window = np.hanning(n_fft + 1)[:-1]
    frames = np.abs(np.fft.rfft(x[:, starts[:, None] + np.arange(n_fft)] * window)) ** power
    hertz = np.fft.rfftfreq(n_fft, 1 / rate)
    bank = [np.interp(hertz, points[i : i + 3], [0, 1, 0]) for i in range(len(points) - 2)]
    return np.moveaxis(frames @ np.array(bank).T, 1, 2)


ORDINARY = [(400, 2.0, True), (512, 1.0, False), (257, 2.0, False)]
OTHERS = [c for c in product((400, 512, 257), (1.0, 2.0), (True, False)) if c not in ORDINARY]


@pytest.mark.parametrize(("n_fft", "power", "center"), [*ORDINARY, *(in_sweep(*c) for c in OTHERS)])
def test_mel_spectrogram(n_fft, power, center):
    mels = np.linspace(2595 * np.log10(1 + 60 / 700), 2595 * np.log10(1 + 7000 / 700), 22)
    points = 700 * (10 ** (mels / 2595) - 1)
    x = random_waveforms(2, 3000)
    want = formula(x, points, 16000, n_fft, 160, power, center)
    options = {"f_min": 60, "f_max": 7000, "power": power, "center": center}
    transform = og.data.mel_spectrogram(16000, n_fft, 160, 20, log=None, **options)
    np.testing.assert_allclose(transform(x), want, rtol=1e-4, atol=1e-4)
    last = og.data.mel_spectrogram(16000, n_fft, 160, 20, frames_first=True, **options)
    np.testing.assert_allclose(last(x), np.log(want).swapaxes(1, 2), atol=1e-3)


def test_logarithms():
    x = random_waveforms(1, 800)
    plain = og.data.mel_spectrogram(8000, 256, 80, 10, log=None)(x).astype(np.float64)
    for log, want in [("log", np.log), ("log10", np.log10), ("db", lambda p: 10 * np.log10(p))]:
        np.testing.assert_allclose(
            og.data.mel_spectrogram(8000, 256, 80, 10, log=log)(x), want(plain), atol=1e-4
        )
    silent = og.data.mel_spectrogram(8000, 256, 80, 10, log="log10", floor=1e-5)(np.zeros((1, 800)))
    np.testing.assert_allclose(silent, -5, rtol=1e-6)


@pytest.mark.parametrize(
    ("scale", "norm"), [("htk", None), ("slaney", "slaney"), ("htk", "slaney")]
)
def test_against_librosa(scale, norm):
    librosa = pytest.importorskip("librosa")
    x = random_waveforms(1, 4000)
    want = librosa.feature.melspectrogram(
        y=x[0], sr=16000, n_fft=512, hop_length=160, win_length=400, n_mels=40, power=2.0,
        htk=scale == "htk", norm=norm, pad_mode="reflect", fmin=20, fmax=7600,
    )  # fmt: skip
    got = og.data.mel_spectrogram(
        16000, 512, 160, 40, win_length=400, mel_scale=scale, norm=norm, f_min=20, f_max=7600,
        log="db",
    )(x)[0]  # fmt: skip
    np.testing.assert_allclose(got, librosa.power_to_db(want, top_db=None), atol=1e-3)


def test_the_mel_scale_of_slaney():
    """Linear below 1000 Hz, 27 bands to 6400 Hz above; bands of area one (in Hz)."""
    filters = og.data.mel_spectrogram(
        16000, 16000, 160, 42, mel_scale="slaney", f_max=6400
    ).filters()
    peaks = filters.argmax(axis=1)
    mels = np.arange(1, 43) * (15 + 27) / 43
    want = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    np.testing.assert_allclose(peaks, want, atol=1)
    area = og.data.mel_spectrogram(16000, 16000, 160, 42, norm="slaney").filters().sum(axis=1)
    np.testing.assert_allclose(area, 1, rtol=1e-3)


def test_transforms_are_values():
    a, b = og.data.mel_spectrogram(16000), og.data.mel_spectrogram(16000)
    assert a == b
    assert a != og.data.mel_spectrogram(16000, n_mels=64)
    a(random_waveforms(1, 800))
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(a))(random_waveforms(1, 800)), b(random_waveforms(1, 800))
    )


def band_classifier(shape: str) -> onnx.ModelProto:
    """Return a classifier of spectrograms with 20 bands, which normalizes each band."""
    text = f"""g (float[{shape}] x) => (float[N,2] y)
        {{ s = Sub(x, mean)  d = Div(s, deviation)  c = Conv<pads=[1,1,1,1]>(d, w)  r = Relu(c)
          p = GlobalAveragePool(r)  f = Flatten(p)  y = MatMul(f, head) }}"""
    weights = {"w": random_waveforms(4, 1, 3, 3), "head": random_waveforms(4, 2)}
    return parse_model(
        text,
        **weights,
        mean=random_waveforms(20, 1) - 3,
        deviation=random_waveforms(20, 1) ** 2 + 1,
    )


def test_a_model_of_waveforms_trains_as_beside():
    """The spectrogram does not train, nor what normalizes it, and the file takes waveforms."""
    rates, mel = og.data.resample(12000, 8000), og.data.mel_spectrogram(8000, 256, 100, 20)
    raw = og.graph.preprocess(band_classifier("N,1,20,frames"), [rates, mel])
    onnx.checker.check_model(raw, full_check=True)
    assert (
        default_weights(raw) == default_weights(band_classifier("N,1,20,frames")) == ["w", "head"]
    )
    x, labels = random_waveforms(12, 3000), np.arange(12) % 2
    fed = mel(rates(x))[:, None]
    np.testing.assert_allclose(
        run(raw, waveform=x)[0],
        run(band_classifier("N,1,20,frames"), x=fed)[0],
        rtol=1e-4,
        atol=1e-4,
    )
    a = og.Trainer(raw, "cross_entropy", learning_rate=0.01).fit(x, labels, epochs=2, batch_size=4)
    b = og.Trainer(band_classifier("N,1,20,frames"), "cross_entropy", learning_rate=0.01)
    b.fit(fed, labels, epochs=2, batch_size=4)
    for name, weight in b.state.weights.items():
        np.testing.assert_allclose(a.state.weights[name], weight, rtol=1e-3, atol=1e-4)


def test_a_spectrogram_without_metadata_does_not_train(tmp_path):
    """onnxruntime's optimizer folds the waves, and drops what is stated of constants."""
    raw = og.graph.preprocess(
        band_classifier("N,1,20,frames"), [og.data.mel_spectrogram(8000, 256, 100, 20)]
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(raw.SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert (258, 1, 256) in [tuple(t.dims) for t in optimized.graph.initializer]
    trained = [t.shape for t in og.trainable(optimized) if t.trains]
    assert trained == [(4, 1, 3, 3), (4, 2)]


def test_integer_samples_and_other_dtypes():
    text = "g (double[1,T] x) => (double[1,T] y) { y = Identity(x) }"
    raw = og.graph.preprocess(parse_model(text), [og.data.resample(2, 1)], dtype="int16")
    samples = (random_waveforms(1, 100) * 3000).astype(np.int16)
    got = run(raw, waveform=samples)[0]
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, og.data.resample(2, 1)(samples / 32768), atol=1e-6)


class Standardized:
    """A transform of your own: each waveform gets mean 0 and deviation 1."""

    def write(self, op, x):
        with op:
            centered = x - op.ReduceMean(x, [1], keepdims=1)
            return centered / op.Sqrt(op.ReduceMean(centered * centered, [1], keepdims=1))


def test_a_transform_of_your_own():
    x = random_waveforms(2, 64) * 3 + 1
    text = "g (float[N,1,T] x) => (float[N,1,T] y) { y = Identity(x) }"
    (got,) = run(
        og.graph.preprocess(parse_model(text), [Standardized()], dtype="float32"), waveform=x
    )
    want = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
    np.testing.assert_allclose(got[:, 0], want, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: og.data.mel_spectrogram(8000, mel_scale="mel"), ["mel_scale 'mel'"]),
        (lambda: og.data.mel_spectrogram(8000, log="ln"), ["log 'ln'"]),
        (lambda: og.data.mel_spectrogram(8000, power=3), ["power=3"]),
        (lambda: og.data.mel_spectrogram(8000, f_max=5000), ["0 to 4000.0 Hz"]),
        (lambda: og.data.mel_spectrogram(8000, 256, win_length=300), ["win_length", "n_fft"]),
        (lambda: og.data.mel_spectrogram(8000, floor=0), ["floor=0"]),
        (lambda: og.data.resample(0, 8000), ["at least 1 Hz"]),
        (lambda: og.data.resample(44101, 16000), ["common divisor"]),
        (lambda: og.data.resample(2, 1)(np.zeros(5)), ["(N, samples)", "(5,)"]),
    ],
)
def test_refused_transforms_of_waveforms(make, named):
    with pytest.raises(ValueError, match=naming(*named)):
        make()


def test_unusual_transforms_of_waveforms_are_named():
    with pytest.warns(UserWarning, match=naming("mel bands", "no frequency")):
        og.data.mel_spectrogram(16000, 256, n_mels=128)
    model = parse_model("g (float[N,T] x) => (float[N,T] y) { y = Identity(x) }")
    with pytest.raises(ValueError, match="dtype 'int32'"):
        og.graph.preprocess(model, [og.data.resample(2, 1)], dtype="int32")
