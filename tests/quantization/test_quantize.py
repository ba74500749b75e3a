"""`quantize`, training of what it returns, and the integers that come out of it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import onnxgrad as og
from onnxgrad.quantization import quantize as quantize_module
from onnxgrad.quantization.quantize import calibration_feeds, integer_products_overflow
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.paths import ROOT
from tests.support.quantized_models import dynamic_model, static_model, weight_only_model
from tests.support.running import in_sweep, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients pass straight through"),
]
RNG = np.random.default_rng(0)
F = np.float32
IMAGES = RNG.standard_normal((96, 3, 8, 8)).astype(F)
LABELS = RNG.integers(0, 5, 96)
BATCHES = [{"x": IMAGES[i : i + 32]} for i in range(0, 96, 32)]
INTEGERS = {getattr(TensorProto, n) for n in "INT4 UINT4 INT8 UINT8 INT16 UINT16".split()}


@cache
def image_classifier(opset: int = 21, dtype: type = F) -> onnx.ModelProto:
    """Return a network with a convolution, a Gemm and a MatMul."""
    rng, kind = np.random.default_rng(8), {np.float16: "float16"}.get(dtype, "float")
    shapes = {"conv_weight": (4, 3, 3, 3), "fc_weight": (32, 36), "head_weight": (32, 5)}
    arrays = {n: 0.3 * rng.standard_normal(s) for n, s in shapes.items()}
    arrays |= {"conv_bias": rng.standard_normal(4), "fc_bias": rng.standard_normal(32)}
    text = f"""g ({kind}[N, 3, 8, 8] x) => ({kind}[N, 5] y) {{
        [Conv0] c = Conv<kernel_shape=[3, 3]>(x, conv_weight, conv_bias) [Relu1] r = Relu(c)
        [MaxPool2] p = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(r) [Flatten3] f = Flatten(p)
        [Gemm4] h = Gemm<transB=1>(f, fc_weight, fc_bias) [Relu5] t = Relu(h)
        [MatMul6] y = MatMul(t, head_weight) }}"""
    return parse_model(text, opset=opset, **{n: a.astype(dtype) for n, a in arrays.items()})


@cache
def quantized_classifier(form: str = "int8", opset: int = 21) -> onnx.ModelProto:
    """Return `image_classifier` as `quantize` makes it with the options of a form."""
    return og.quantize(image_classifier(opset), IMAGES, **FORMS[form])


WEIGHTS = {"conv_weight", "conv_bias", "fc_weight", "fc_bias", "head_weight"}


def unoptimized(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return the output of a session that fuses nothing."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def optimized_operators(model: onnx.ModelProto, folder) -> Counter:
    """Return how many nodes of each type onnxruntime runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options)
    return Counter(n.op_type for n in onnx.load(folder / "optimized.onnx").graph.node)


def float_names(model: onnx.ModelProto) -> set[str]:
    return {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}


def stored_integers(model: onnx.ModelProto) -> dict[str, int]:
    """Return the stored integers, without zero points: name and dtype."""
    weights = [t for t in model.graph.initializer if t.data_type in INTEGERS]
    return {t.name: t.data_type for t in weights if not t.name.endswith("zero_point")}


def static_classifier(folder, **options) -> onnx.ModelProto:
    """Return `image_classifier` as `quantize_static` writes it."""
    options = {"per_channel": True} | options
    return static_model(image_classifier(), folder, BATCHES, **options)


# -- quantize, and the integers that come out ------------------------------------------------------

FORMS = {
    "int8": {},
    "per tensor": {"per_channel": False},
    "uint8": {"weights": "uint8"},
    "int8 twice": {"activations": "int8"},
    "int4": {"weights": "int4"},
    "uint4": {"weights": "uint4", "per_channel": False},
    "uint16": {"activations": "uint16"},
    "percentile": {"calibration": "percentile"},
    "weights": {"activations": None},
    "weights of 4 bits": {"activations": None, "weights": "uint4"},
    "blocks": {"activations": None, "weights": "int4", "block_size": 16},
}
ORDINARY = ("int8", "int4", "blocks")
MOSTLY_IN_SWEEP = [form if form in ORDINARY else in_sweep(form) for form in FORMS]


@pytest.mark.parametrize("opset", [21, in_sweep(17)])
@pytest.mark.parametrize("form", MOSTLY_IN_SWEEP)
def test_round_trip(form, opset):
    """Without training, the file with integers computes what the one that trains does."""
    quantized = quantized_classifier(form, opset)
    assert float_names(quantized) >= WEIGHTS
    assert {t.name for t in og.trainable(quantized).trained} == WEIGHTS
    saved = og.Trainer(quantized, "cross_entropy").model
    products = {"fc_weight", "head_weight"}
    rounded = products if form == "blocks" else products | {"conv_weight"}
    assert float_names(saved).isdisjoint(rounded)
    kind = getattr(TensorProto, FORMS[form].get("weights", "int8").upper())
    stored = {n: k for n, k in stored_integers(saved).items() if k == kind}
    assert set(stored) == {f"{name}_quantized" for name in rounded}
    assert (unoptimized(quantized, IMAGES) == unoptimized(saved, IMAGES)).all()
    [found] = run(saved, x=IMAGES)
    assert (run(quantized, x=IMAGES)[0] == found).all()
    [exact] = run(image_classifier(), x=IMAGES)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.3 if "4" in form or form == "blocks" else 0.1)


@pytest.mark.parametrize("form", MOSTLY_IN_SWEEP)
def test_training(form):
    """All weights move, and the loss falls; the file computes what `evaluate` says."""
    quantized = quantized_classifier(form)
    trainer = og.Trainer(quantized, "cross_entropy", learning_rate=0.01, metrics=["accuracy"])
    before = {n: a.copy() for n, a in trainer.state.weights.items()}
    trainer.fit(IMAGES, LABELS, epochs=8)
    assert trainer.history[-1]["loss"] < 0.8 * trainer.history[0]["loss"]
    assert all((a != before[n]).any() for n, a in trainer.state.weights.items())
    assert set(before) == WEIGHTS
    saved = trainer.model
    assert not float_names(saved) & ({"head_weight"})
    np.testing.assert_allclose(
        unoptimized(saved, IMAGES), trainer.predict(IMAGES), rtol=1e-4, atol=1e-4
    )


def test_kernels_size_and_integers_are_those_of_quantize_static(tmp_path):
    """A model that does not train comes out with the same integers and scales."""
    expected = static_classifier(tmp_path)
    trainer = og.Trainer(quantized_classifier(), "cross_entropy", learning_rate=0.003)
    tensors, compared = {t.name: t for t in expected.graph.initializer}, 0
    for tensor in trainer.model.graph.initializer:
        if "bias" not in tensor.name:
            found, stored = map(numpy_helper.to_array, (tensor, tensors[tensor.name]))
            np.testing.assert_array_equal(found, stored)
            compared += 1
    assert compared > 10
    kernels = optimized_operators(expected, tmp_path)
    assert kernels["QLinearConv"] == kernels["QGemm"] == kernels["QLinearMatMul"] == 1
    for saved in (trainer.model, trainer.fit(IMAGES, LABELS, epochs=2).model):
        assert optimized_operators(saved, tmp_path) == kernels
        assert saved.ByteSize() < 1.02 * expected.ByteSize()


def test_nothing_is_printed_or_logged(capfd):
    root = list(logging.getLogger().handlers)
    for opset in (13, 21):
        model = image_classifier(opset)
        og.quantize(model, IMAGES, weights="int4", calibration="entropy")
        og.quantize(model, activations=None, weights="int4", block_size=16)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == root


def test_products_that_overflow_are_those_of_processors_without_vnni():
    flags = Path("/proc/cpuinfo")
    if not flags.is_file() or "avx2" not in (words := flags.read_text().split()):
        pytest.skip("not a processor of x86 under Linux")
    knows = not {"avx_vnni", "avx512_vnni"}.isdisjoint(words)
    assert integer_products_overflow("uint8", "int8") == (not knows)
    assert not integer_products_overflow("uint8", "uint8")
    assert not integer_products_overflow("uint16", "int8")


def test_a_warning_where_products_overflow(monkeypatch):
    """On this processor or not: the kernel of the session is exchanged."""

    def saturating(*_, **options):
        return SimpleNamespace(run=lambda outputs, feed: [np.int32([[32767 * 32]])])

    monkeypatch.setattr(quantize_module, "load_session", saturating)
    integer_products_overflow.cache_clear()
    try:
        model = image_classifier()
        with pytest.warns(
            UserWarning, match=naming("weights='int8'", "reduce_range=True")
        ) as found:
            og.quantize(model, IMAGES)
        assert found[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            og.quantize(model, IMAGES, reduce_range=True)
            og.quantize(model, activations=None)
            og.quantize(model, IMAGES, activations="uint16")
    finally:
        integer_products_overflow.cache_clear()


def test_batch_normalization_becomes_a_part_of_convolutions(tmp_path):
    arrays = {n: RNG.uniform(0.5, 1.5, 4).astype(F) for n in "sbmv"}
    arrays |= {"w": RNG.standard_normal((4, 3, 3, 3)).astype(F)}
    text = """g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) {
        c = Conv<kernel_shape=[3, 3]>(x, w) d = BatchNormalization(c, s, b, m, v) y = Relu(d) }"""
    model = parse_model(text, opset=21, **arrays)
    quantized = og.quantize(model, IMAGES, reduce_range=True)
    assert len(og.trainable(quantized).trained) == 2
    saved = og.Trainer(quantized, "squared_error").model
    assert optimized_operators(saved, tmp_path)["QLinearConv"] == 1
    exact = run(model, x=IMAGES)[0]
    assert np.abs(run(saved, x=IMAGES)[0] - exact).max() < 0.03 * exact.max()


def test_an_opset_without_an_axis_is_raised():
    """As published files have it: onnxruntime would write what it does not load."""
    text = """g (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) {
        c = Conv<kernel_shape=[3, 3]>(x, w) y = Relu(c) }"""
    model = parse_model(text, opset=11, w=RNG.standard_normal((4, 3, 3, 3)).astype(F))
    quantized = og.quantize(model, IMAGES)
    saved = og.Trainer(quantized, "squared_error").model
    assert set(stored_integers(saved)) == {"w_quantized"}
    assert (unoptimized(quantized, IMAGES) == unoptimized(saved, IMAGES)).all()


MASKS = {
    "add": "n = Sub(one, c) p = Mul(n, fill) s = Add(d, p)",
    "where": "b = Cast<to=9>(c) s = Where(b, d, fill)",
    "where, add": "b = Cast<to=9>(c) p = Where(b, zero, fill) s = Add(d, p)",
    "scaled behind": "b = Cast<to=9>(c) t = Mul(d, two) v = Where(b, t, fill) s = Div(v, two)",
    "two sums": "n = Sub(one, c) p = Mul(n, fill) o = Add(p, bias) s = Add(d, o)",
    "stored": "g = Gather(table, m) u = Unsqueeze(g, axis) s = Add(d, u)",
}
IDS = np.random.default_rng(3).integers(0, 50, (64, 10))
PADDED = (np.arange(10) < np.random.default_rng(4).integers(2, 11, 64)[:, None]).astype(np.int64)


def masked_attention(how: str, fill: float, dtype: type = F) -> onnx.ModelProto:
    """Return a layer of attention over tokens that `m` masks; its nodes have no names."""
    rng = np.random.default_rng(2)
    kind = {np.float16: "float16"}.get(dtype, "float")
    arrays = {name: rng.standard_normal((16, 16)) / 8 for name in ("wq", "wk", "wv", "wo")}
    arrays |= {"e": rng.standard_normal((50, 16)), "fill": fill, "one": 1, "zero": 0, "two": 2}
    arrays |= {"bias": rng.standard_normal((10, 10)), "table": [fill, 0]}
    text = f"""g (int64[N, 10] i, int64[N, 10] m) => ({kind}[N, 10, 16] y) {{
        x = Gather(e, i) q = MatMul(x, wq) k = MatMul(x, wk) v0 = MatMul(x, wv)
        kt = Transpose<perm=[0, 2, 1]>(k) d = MatMul(q, kt) r = Unsqueeze(m, axis)
        c = Cast<to={getattr(TensorProto, kind.upper())}>(r) {MASKS[how]}
        w = Softmax(s) a = MatMul(w, v0) y = MatMul(a, wo) }}"""
    arrays = {n: np.asarray(a, dtype) for n, a in arrays.items()} | {"axis": np.array([1])}
    read = set(re.findall(r"\w+", text.partition("=>")[2]))
    return parse_model(text, opset=21, **{n: a for n, a in arrays.items() if n in read})


MASKED = [("add", np.finfo(F).min), ("where", -np.inf), ("two sums", -1e4)]
MORE = [(how, fill) for how in MASKS for fill in (-np.inf, np.finfo(F).min, -1e4, -100)]
MORE = [(h, f) for h, f in MORE if (h, f) not in MASKED and (f > -np.inf or "where" in h)]


@pytest.mark.parametrize(("how", "fill"), [*MASKED, *(in_sweep(*case) for case in MORE)])
def test_masks(how, fill, tmp_path, caplog):
    """Scores with masks stay floats, and products not; padding need not be in the rows seen."""
    model = masked_attention(how, fill)
    exact = run(model, i=IDS, m=PADDED)[0]
    with caplog.at_level(logging.INFO, "onnxgrad"):
        for mask in (PADDED, np.ones_like(PADDED)):
            quantized = og.quantize(model, {"i": IDS, "m": mask}, reduce_range=True)
            saved = og.Trainer(quantized, "squared_error").model
            found = run(saved, i=IDS, m=PADDED)[0]
            assert np.linalg.norm(found - exact) < 0.06 * np.linalg.norm(exact)
            kernels = optimized_operators(saved, tmp_path)
            assert kernels["QLinearMatMul"] == 6
            assert kernels["Softmax"] == 1
    assert "masks" in caplog.text
    assert "Softmax_1" in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "Where_1, Softmax_1"),
        ({"operators": ["MatMul", "Softmax"]}, "Softmax_1"),
        ({"exclude": "scores"}, "Where_1"),
    ],
)
def test_masked_nodes_that_would_become_integers_are_named(options, named, caplog):
    model = masked_attention("where", -np.inf)
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    softmax.name = "scores" if "exclude" in options else ""
    with caplog.at_level(logging.INFO, "onnxgrad"):
        og.quantize(model, {"i": IDS[:8], "m": PADDED[:8]}, **options)
    (message,) = [text for text in caplog.messages if "masks" in text]
    assert message.rpartition(": ")[2] == named


def test_scores_without_masks_become_integers(tmp_path):
    quantized = og.quantize(masked_attention("add", -5), {"i": IDS, "m": PADDED}, reduce_range=True)
    kernels = optimized_operators(og.Trainer(quantized, "squared_error").model, tmp_path)
    assert kernels["QLinearSoftmax"] == kernels["QLinearAdd"] == 1


OTHERS = {
    "entropy": {"calibration": "entropy"},
    "percentile": {"calibration": "percentile"},
    "uint16": {"activations": "uint16"},
    "float16": {},
}


@pytest.mark.parametrize("form", ["entropy", *map(in_sweep, [*OTHERS][1:])])
def test_masks_by_other_ranges(form):
    fill, dtype = (-65504, np.float16) if form == "float16" else (-np.inf, F)
    model = masked_attention("where", fill, dtype)
    exact = run(model, i=IDS, m=PADDED)[0].astype(F)
    saved = og.quantize(model, {"i": IDS, "m": PADDED}, reduce_range=True, **OTHERS[form])
    found = run(saved, i=IDS, m=PADDED)[0]
    assert np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


def test_infinite_values_of_other_nodes():
    """As of a padding in front of MaxPool."""
    text = """g (float[N, 3, 8, 8] x) => (float[N, 4, 5, 5] y) { p = Pad(x, pads, low)
        m = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(p)
        y = Conv<kernel_shape=[1, 1]>(m, w) }"""
    w = np.random.default_rng(5).standard_normal((4, 3, 1, 1)).astype(F)
    model = parse_model(text, opset=21, pads=[0, 0, 1, 1, 0, 0, 1, 1], low=F(-np.inf), w=w)
    exact = run(model, x=IMAGES)[0]
    found = run(og.quantize(model, IMAGES, reduce_range=True), x=IMAGES)[0]
    assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()


def test_forms_of_data():
    """All say the same, of which the first rows are looked at, and labels are not."""
    batches = [(IMAGES[i : i + 30], LABELS[i : i + 30]) for i in range(0, 96, 30)]
    forms = [IMAGES, {"x": IMAGES}, (IMAGES, LABELS), batches, lambda: iter(batches)]
    model = image_classifier()
    found = [og.quantize(model, data, rows=90).SerializeToString() for data in forms]
    assert len(set(found)) == 1
    assert og.quantize(model, IMAGES[:90]).SerializeToString() == found[0]
    read = []
    counted = lambda: (read.append(len(y)) or (x, y) for x, y in batches)  # noqa: E731
    assert og.quantize(model, counted, rows=60) == og.quantize(model, IMAGES[:60])
    assert 2 <= len(read) < 2 * len(batches)  # a thread may read ahead, but not all of it
    assert og.quantize(model, IMAGES, rows=4).SerializeToString() != found[0]


def test_several_inputs_of_different_kinds():
    pandas = pytest.importorskip("pandas")
    text = """g (float[N, 3] x, int64[N, 2] i) => (float[N, 4] y) {
        e = Gather(table, i) f = Flatten(e) a = MatMul(x, w) b = MatMul(f, v) y = Add(a, b) }"""
    shapes = {"table": (7, 5), "w": (3, 4), "v": (10, 4)}
    weights = {n: RNG.standard_normal(shape).astype(F) for n, shape in shapes.items()}
    model = parse_model(text, opset=21, **weights)
    x, i = RNG.standard_normal((50, 3)).astype(F), RNG.integers(0, 7, (50, 2))
    quantized = og.quantize(model, {"x": x, "i": i})
    assert {t.name for t in og.trainable(quantized).trained} == {"table", "w", "v"}
    columns = {f"x{k}": x[:, k] for k in range(3)} | {f"i{k}": i[:, k] for k in range(2)}
    table = pandas.DataFrame(columns)
    model_of_table = og.quantize(model, {"x": table[["x0", "x1", "x2"]], "i": table[["i0", "i1"]]})
    assert model_of_table == quantized
    trainer = og.Trainer(quantized, "squared_error", learning_rate=0.01)
    trainer.fit({"x": x, "i": i}, RNG.standard_normal((50, 4)).astype(F), epochs=2)
    assert not float_names(trainer.model) & {"table", "w", "v"}


def test_float16():
    x = IMAGES.astype(np.float16)
    quantized = og.quantize(image_classifier(dtype=np.float16), x)
    saved = og.Trainer(quantized, "cross_entropy").model
    # kernels read constant weights in another order
    np.testing.assert_allclose(unoptimized(quantized, x), unoptimized(saved, x), atol=0.2)
    assert len(stored_integers(saved)) == 3


def test_excluded_nodes_and_operators():
    for options, expected in (
        ({"exclude": "Conv*"}, {"fc_weight_quantized", "head_weight_quantized"}),
        ({"operators": "Conv"}, {"conv_weight_quantized"}),
    ):
        quantized = og.quantize(image_classifier(), IMAGES, **options)
        assert set(stored_integers(og.Trainer(quantized, "cross_entropy").model)) == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": "int3"}, ["int3", "int8"]),
        ({"activations": "int3"}, ["int3", "uint8"]),
        ({"calibration": "best"}, ["best", "minmax"]),
        ({"block_size": 16}, ["block_size=16", "activations=None"]),
        ({"block_size": 24, "activations": None}, ["block_size=24", "power of 2"]),
        ({"exclude": "Cnv0"}, ["Cnv0", "Conv0"]),
        ({"weights": "uint8", "activations": "int8"}, ["QuantType"]),
        ({"rows": 0}, ["rows"]),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=naming(*named)):
        og.quantize(image_classifier(), IMAGES, **options)


def test_wrong_models_and_data_are_named(tmp_path):
    with pytest.raises(ValueError, match=naming("data", "activations=None")):
        og.quantize(image_classifier())
    with pytest.raises(ValueError, match="'x'"):
        og.quantize(image_classifier(), IMAGES[:, :2])
    with pytest.raises(og.ModelError, match=naming("quantized already", "float model")):
        og.quantize(static_classifier(tmp_path), IMAGES)
    nothing = parse_model("g (float[N, 3] x) => (float[N, 3] y) { y = Sin(x) }")
    with pytest.raises(og.ModelError, match=naming("no weight", "MatMul")):
        og.quantize(nothing, np.ones((4, 3), F))


# -- what trains, and what is written -----------------------------------------------------------


def test_what_does_not_train_keeps_its_integers():
    quantized = quantized_classifier()
    before = {t.name: t for t in og.Trainer(quantized, "cross_entropy").model.graph.initializer}
    trainer = og.Trainer(quantized, "cross_entropy", train="head*", learning_rate=0.01)
    after = {t.name: t for t in trainer.fit(IMAGES, LABELS).model.graph.initializer}
    assert before.keys() == after.keys()
    assert {n for n in before if before[n] != after[n]} == {"head_weight_quantized"}


def test_a_trainer_goes_on_with_floats(tmp_path):
    """`fit` twice, a checkpoint, and `partial_fit` know nothing of the integers in the file."""
    quantized = quantized_classifier()

    def trainer(**options):
        return og.Trainer(quantized, "cross_entropy", learning_rate=0.003, **options)

    once = trainer().fit(IMAGES, LABELS, epochs=2)
    before = {n: a.copy() for n, a in once.state.weights.items()}
    first = once.model
    assert once.model == first
    assert all((a == before[n]).all() for n, a in once.state.weights.items())
    checkpoint = og.Checkpoint(tmp_path / "runs")
    trainer(callbacks=[checkpoint]).fit(IMAGES, LABELS, epochs=1)
    on = trainer(callbacks=[checkpoint]).fit(IMAGES, LABELS, epochs=2, resume=tmp_path / "runs")
    assert on.model == first
    assert once.fit(IMAGES, LABELS, epochs=1).model != first


@pytest.mark.parametrize("form", MOSTLY_IN_SWEEP)
def test_going_on_from_a_file_with_integers(form):
    """Named, they train as floats; not named, they stay; the names are those of before."""
    first = og.Trainer(quantized_classifier(form), "cross_entropy").model
    assert not {t.name for t in og.trainable(first).trained} & {"head_weight", "fc_weight"}
    train = ["head_weight", "fc_*"]
    assert {t.name for t in og.trainable(first, train=train).trained} == {
        "head_weight", "fc_weight", "fc_bias"
    }  # fmt: skip
    trainer = og.Trainer(first, "cross_entropy", train=train, learning_rate=0.01)
    held = {t.name: t for t in first.graph.initializer}
    same = {t.name: t for t in trainer.model.graph.initializer}
    assert held == same
    trainer.fit(IMAGES, LABELS, epochs=3)
    after = {t.name: t for t in trainer.model.graph.initializer}
    moved = {n for n in held if held[n] != after[n]}
    assert moved == {"fc_bias", "fc_weight_quantized", "head_weight_quantized"}
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    frozen = og.Trainer(first, "cross_entropy", train="*", freeze="head*")
    assert "head_weight" not in frozen.trained
    assert "fc_weight" in frozen.trained


def test_a_file_of_quantize_static_trains_if_weights_are_named(tmp_path):
    """Its biases are integers, too; named, they become floats, which onnxruntime rounds again."""
    expected = static_classifier(tmp_path)
    names = ["fc_bias", "fc_weight", "head_weight_quantized"]
    trainer = og.Trainer(expected, "cross_entropy", train=names, learning_rate=0.01)
    assert set(trainer.trained) == {"fc_bias", "fc_weight", "head_weight"}
    found, exact = run(trainer.model, x=IMAGES)[0], run(expected, x=IMAGES)[0]
    assert (found == exact).mean() > 0.99
    assert optimized_operators(trainer.model, tmp_path) == optimized_operators(expected, tmp_path)
    trainer.fit(IMAGES, LABELS, epochs=3)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]


def test_a_file_with_other_names_and_moved_weights():
    """As exporters write quantization-aware training: constants, transposed behind the rounding."""
    w = RNG.standard_normal((6, 4)).astype(F)
    text = """g (float[N, 4] x) => (float[N, 6] y) { t = Transpose<perm=[1, 0]>(w)
        q = QuantizeLinear<axis=1>(t, s, z) d = DequantizeLinear<axis=1>(q, s, z)
        y = MatMul(x, d) }"""
    scale = np.abs(w).max(1) / 127
    model = parse_model(text, opset=21, w=w, s=scale, z=np.zeros(6, np.int8))
    x = RNG.standard_normal((30, 4)).astype(F)
    trainer = og.Trainer(model, "squared_error", learning_rate=0.01)
    assert trainer.trained == ["w"]
    saved = trainer.fit(x, x @ np.ones((4, 6), F)).model
    assert {t.name for t in saved.graph.initializer} == {"q", "s", "z"}
    assert operator_names(saved) == ["DequantizeLinear", "MatMul"]
    np.testing.assert_allclose(unoptimized(saved, x), trainer.predict(x), rtol=1e-5, atol=1e-5)


def test_weights_in_subgraphs():
    text = """g (float[N, 3] x) => (float[N, 3] y) { c = Constant<value = bool {1}>()
        y = If(c) <then_branch = t () => (p) { q = QuantizeLinear(w, s, z)
            d = DequantizeLinear(q, s, z) p = MatMul(x, d) },
            else_branch = e () => (r) { r = Identity(x) }> }"""
    model = parse_model(text, opset=21, w=np.eye(3, dtype=F), s=F(0.01), z=np.int8(0))
    x = RNG.standard_normal((8, 3)).astype(F)
    trainer = og.Trainer(model, "squared_error", train="w", learning_rate=0.1).fit(x, 2 * x)
    assert "w" not in float_names(trainer.model)
    np.testing.assert_allclose(unoptimized(trainer.model, x), trainer.predict(x), rtol=1e-6)


def test_large_weights_are_folded_too(monkeypatch, tmp_path):
    """Those whose elements a trainer keeps outside of the model."""
    from onnxgrad.model import weights as model_weights

    text = "g (float[N, 128] x) => (float[N, 160] y) { y = MatMul(x, w) }"  # w has 80 KiB
    model = parse_model(text, opset=21, w=RNG.standard_normal((128, 160)).astype(F))
    x, labels = RNG.standard_normal((8, 128)).astype(F), RNG.integers(0, 160, 8)
    quantized = og.quantize(model, x)
    expected = og.Trainer(quantized, "cross_entropy", train_ranges=True).model
    monkeypatch.setattr(model_weights, "LARGE", 0)
    trainer = og.Trainer(quantized, "cross_entropy", train_ranges=True)
    assert trainer._job.digest is not None
    trainer.fit(x, labels)
    trainer.save(tmp_path / "saved.onnx")
    saved = onnx.load(tmp_path / "saved.onnx")
    np.testing.assert_allclose(unoptimized(saved, x), trainer.predict(x), rtol=1e-4, atol=1e-4)
    assert float_names(saved) == float_names(expected)
    assert stored_integers(saved) == stored_integers(expected)


def test_adapters_need_the_file_with_integers():
    quantized = quantized_classifier()
    with pytest.raises(ValueError, match=naming("QuantizeLinear", "integers", "Trainer")):
        og.add_lora(quantized, "head*")
    adapted = og.add_lora(og.Trainer(quantized, "cross_entropy").model, "head*", rank=1)
    assert {t.name for t in og.trainable(adapted).trained} == {
        "head_weight.lora_A.weight", "head_weight.lora_B.weight"
    }  # fmt: skip


@pytest.mark.sweep
def test_stack():
    quantized = quantized_classifier()
    arguments = {"optimizer": "sgd", "train_ranges": True}
    stack = og.TrainerStack(quantized, "cross_entropy", learning_rate=[0.01, 0.1], **arguments)
    stack.fit(IMAGES, LABELS, epochs=2, batch_size=96)
    assert sum(name.endswith(".change") for name in stack.trained) == 7
    one = og.Trainer(quantized, "cross_entropy", learning_rate=0.1, **arguments)
    one.fit(IMAGES, LABELS, epochs=2, batch_size=96)
    for name, array in one.state.weights.items():
        np.testing.assert_allclose(stack.state.weights[name][1], array, atol=1e-3)
    assert stored_integers(stack.model(1)) == stored_integers(one.model)


# -- gradients, and learned ranges ----------------------------------------------------------------


def learned_step_rounding(torch, v, scale, low, high, g=1.0):
    """Quantize as in Esser et al. 2020, section 2 and appendix A.

    What is rounded to a limit is not clipped, as in the fake quantization of PyTorch.
    """
    s = scale * g + (scale * (1 - g)).detach()
    v = v / s
    integer = torch.round(v).detach()
    inside = (integer >= low) & (integer <= high)
    return torch.where(inside, v + integer - v.detach(), integer.clamp(low, high)) * s


DOMAINS = {"standard": ("", 21), "microsoft": ("com.microsoft.", 20)}
KINDS = {"per tensor": (F(0.06), ""), "per channel": (F([0.04, 0.05, 0.06]), "<axis=1>")}
KINDS["blocks"] = (RNG.uniform(0.04, 0.07, (2, 3)).astype(F), "<axis=0, block_size=16>")
DATA = RNG.uniform(-0.2, 1, (40, 20)).astype(F)


def two_roundings(domain: str, kind: str, bits: str, w: np.ndarray) -> onnx.ModelProto:
    """Return x w, x rounded to uint8 and w to few bits."""
    prefix, opset = DOMAINS[domain]
    scale, attributes = KINDS[kind]
    low = 8 if bits.startswith("u") else 0
    zeros = onnx.helper.make_tensor(
        "wz", getattr(TensorProto, bits.upper()), scale.shape, [low] * scale.size
    )
    text = f"""g (float[N, 20] x) => (float[N, 3] y) {{
        xq = {prefix}QuantizeLinear(x, xs, xz) xd = {prefix}DequantizeLinear(xq, xs, xz)
        wq = {prefix}QuantizeLinear{attributes}(w, ws, wz)
        wd = {prefix}DequantizeLinear{attributes}(wq, ws, wz) y = MatMul(xd, wd) }}"""
    model = parse_model(text, opset=opset, w=w, xs=F(0.005), xz=np.uint8(0), ws=scale)
    model.graph.initializer.append(zeros)
    return model


ROUNDINGS = [
    ("standard", "per tensor", "int4"),
    ("standard", "blocks", "int4"),
    ("microsoft", "per channel", "int4"),
    in_sweep("standard", "per channel", "int4"),
    in_sweep("microsoft", "per tensor", "int4"),  # of blocks, it has none in older files
    *(in_sweep("standard", kind, "uint4") for kind in KINDS),
    *(in_sweep("microsoft", kind, "uint4") for kind in ("per tensor", "per channel")),
]


@pytest.mark.parametrize(("domain", "kind", "bits"), ROUNDINGS)
def test_learned_ranges(domain, kind, bits):
    """Five steps are those of learned step size quantization in PyTorch."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    w, target = rng.uniform(-0.5, 0.5, (20, 3)).astype(F), rng.standard_normal((40, 3)).astype(F)
    model = two_roundings(domain, kind, bits, w)
    rate = 0.003
    trainer = og.Trainer(
        model, "squared_error", optimizer="sgd", learning_rate=rate, train_ranges=True
    )
    assert set(trainer.trained) == {"w", "xs.change", "ws.change"}
    trainer.fit(DATA, target, epochs=5, batch_size=40)

    scale = KINDS[kind][0]
    weight, first = torch.tensor(w), {"xs": torch.tensor(F(0.005)), "ws": torch.tensor(scale)}
    change = {name: torch.zeros_like(s) for name, s in first.items()}
    factors = {"xs": (20 * 255) ** -0.5, "ws": (60 // scale.size * 7) ** -0.5}
    for _ in range(5):
        now = {n: s * (1 + torch.nn.functional.elu(change[n])) for n, s in first.items()}
        leaves = {n: s.detach().requires_grad_() for n, s in now.items()}
        v = weight.detach().requires_grad_()
        wide = leaves["ws"]
        if kind == "blocks":
            wide = wide.repeat_interleave(16, 0)[:20]
        a = learned_step_rounding(torch, torch.tensor(DATA), leaves["xs"], 0, 255, factors["xs"])
        b = learned_step_rounding(torch, v, wide, -8, 7, factors["ws"])
        torch.nn.functional.mse_loss(a @ b, torch.tensor(target)).backward()
        weight = weight - rate * v.grad
        change = {n: c - rate * leaves[n].grad / first[n] for n, c in change.items()}
    after = {"w": weight, **{f"{n}.change": c for n, c in change.items()}}
    for name, expected in after.items():
        found, expected = trainer.state.weights[name], expected.numpy()
        moved = np.abs(expected - (w if name == "w" else 0)).max()
        assert moved > 1e-4
        np.testing.assert_allclose(found, expected, atol=0.02 * moved)

    saved = {t.name: t for t in trainer.model.graph.initializer}
    learned = {n: (s * (1 + torch.nn.functional.elu(change[n]))).numpy() for n, s in first.items()}
    for name, expected in learned.items():
        np.testing.assert_allclose(numpy_helper.to_array(saved[name]), expected, rtol=0.01)
    assert "w" not in saved
    np.testing.assert_allclose(
        unoptimized(trainer.model, DATA), trainer.predict(DATA), rtol=1e-4, atol=1e-5
    )


def test_ranges_stay_positive():
    """Even where a step would take them below zero, or the optimizer is Adam at a high rate."""
    model = two_roundings("standard", "per tensor", "int4", np.zeros((20, 3), F))
    for optimizer, rate in (("sgd", 1e3), ("adam", 5.0)):
        trainer = og.Trainer(
            model, "squared_error", train="xs", optimizer=optimizer, learning_rate=rate,
            train_ranges=True,
        )  # fmt: skip
        changes = {n: a for n, a in trainer.state.weights.items() if n.endswith(".change")}
        trainer.state.weights.update({n: np.full_like(a, -1e4) for n, a in changes.items()})
        saved = {t.name: t for t in trainer.model.graph.initializer}
        for name, first in (("xs", 0.005), ("ws", 0.06)):
            assert numpy_helper.to_array(saved[name]) == pytest.approx(first / 1024)


def test_ranges_of_an_activation_are_those_of_a_row():
    """The number of rows of a batch does not change the gradient, but the mean over them."""
    w = RNG.uniform(-0.5, 0.5, (20, 3)).astype(F)
    model = two_roundings("standard", "per tensor", "int4", w)
    found = []
    for data in (DATA, np.concatenate([DATA, DATA])):
        trainer = og.Trainer(
            model, "squared_error", optimizer="sgd", learning_rate=0.003, train_ranges=True
        )
        trainer.fit(data, np.ones((len(data), 3), F), batch_size=len(data))
        found.append(trainer.state.weights)
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-6)


def test_calibration_cuts_rows_along_their_axes():
    model = parse_model(
        """f (float[N,2] x, float[2,N,3] state, float[4] bias) => (float[N,3] y)
        { m = ReduceMean<keepdims=0>(state, zero)  h = MatMul(x, w)  y = Add(h, m) }""",
        w=np.ones((2, 3), F), zero=np.array([0]),
    )  # fmt: skip
    data = {"x": RNG.normal(size=(6, 2)), "state": RNG.normal(size=(2, 6, 3)), "bias": np.ones(4)}
    data = {name: array.astype(F) for name, array in data.items()}
    found = list(
        calibration_feeds(model, [(data,)], 6, 4)
    )  # one batch, of which four rows are wanted
    found += calibration_feeds(model, data, 3, 6)
    for batch, rows in zip(found, [slice(0, 4), slice(0, 3), slice(3, 6)], strict=True):
        np.testing.assert_array_equal(batch["x"], data["x"][rows])
        np.testing.assert_array_equal(batch["state"], data["state"][:, rows])
        np.testing.assert_array_equal(batch["bias"], data["bias"])


def test_frozen_ranges():
    quantized = quantized_classifier()
    trainer = og.Trainer(quantized, "cross_entropy", freeze="*_scale", train_ranges=False)
    assert set(trainer.trained) == WEIGHTS
    trainer = og.Trainer(quantized, "cross_entropy", freeze="*weight_scale", train_ranges=True)
    changes = {n for n in trainer.trained if n.endswith(".change")}
    assert len(changes) == 4
    assert not any("weight" in n for n in changes)
    with pytest.raises(ValueError, match=naming("train_ranges=True", "freeze=")):
        og.Trainer(quantized, "cross_entropy", freeze="*_scale", train_ranges=True)
    with pytest.raises(ValueError, match=naming("train_ranges=True", "quantize")):
        og.Trainer(image_classifier(), "cross_entropy", train_ranges=True)


@pytest.mark.sweep
def test_a_training_with_ranges_is_resumed(tmp_path):
    quantized = quantized_classifier()

    def trainer():
        return og.Trainer(
            quantized, "cross_entropy", train_ranges=True, accumulate=2,
            callbacks=[og.Checkpoint(tmp_path / "runs")],
        )  # fmt: skip

    expected = trainer().fit(IMAGES, LABELS, epochs=2).model
    shutil.rmtree(tmp_path / "runs")
    trainer().fit(IMAGES, LABELS, epochs=1)
    assert trainer().fit(IMAGES, LABELS, epochs=2, resume=tmp_path / "runs").model == expected


def test_a_bias_beside_weights_that_are_next_to_nothing():
    """onnxruntime clips it to 32 bits, in steps of the weight."""
    quantized = deepcopy(quantized_classifier())
    for tensor in quantized.graph.initializer:
        if tensor.name in ("conv_weight", "conv_weight_scale"):
            array = numpy_helper.to_array(tensor).copy()
            array[1] = 1e-9 * array[1]
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    trainer = og.Trainer(quantized, "cross_entropy")
    expected = unoptimized(quantized, IMAGES)
    error = np.abs(run(trainer.model, x=IMAGES)[0] - expected).max()
    assert error < 0.1 * np.abs(expected).max()
    assert np.abs(unoptimized(trainer.model, IMAGES) - expected).max() < 1e-6


# -- other forms come back as they are ------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["QOperator", in_sweep("QDQ"), "dynamic", "few bits", in_sweep("few bits QDQ")]
)
def test_other_forms_come_back_as_they_are(form, tmp_path):
    """What is float trains, by name; no integer changes, and no node."""
    model, options = deepcopy(image_classifier()), {"nodes_to_exclude": ["MatMul6"]}
    if form == "dynamic":
        quantized = dynamic_model(model, tmp_path, **options)
    elif form.startswith("few bits"):
        wide = onnx.helper.make_node("MatMul", ["t", "v"], ["u"], name="wide")
        model.graph.node.insert(6, wide)
        model.graph.node[7].input[0] = "u"
        v = 0.3 * RNG.standard_normal((32, 32)).astype(F)
        model.graph.initializer.append(numpy_helper.from_array(v, "v"))
        kind = "QDQ" if "QDQ" in form else "QOperator"
        quantized = weight_only_model(model, block_size=16, quant_format=kind, **options)
    else:
        quantized = static_classifier(tmp_path, quant_format=form, **options)
    train = ["head_weight"] if "bits" not in form else ["head_weight", "fc_bias"]
    trainer = og.Trainer(quantized, "cross_entropy", train=train, learning_rate=0.01)
    trainer.fit(IMAGES, LABELS, epochs=3)
    trainer.save(tmp_path / "saved.onnx")
    saved = onnx.load(tmp_path / "saved.onnx")
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    assert operator_names(saved) == operator_names(quantized)
    before = {t.name: t for t in quantized.graph.initializer}
    after = {t.name: t for t in saved.graph.initializer}
    assert before.keys() == after.keys()
    assert {n for n in before if before[n] != after[n]} == set(train)
    np.testing.assert_allclose(
        run(saved, x=IMAGES)[0], trainer.predict(IMAGES), rtol=0.05, atol=0.05
    )


# -- large models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"calibration": "percentile"}, {"calibration": "entropy"}, {"activations": None}],
    ids=str,
)
def test_weights_in_a_file_give_the_same(options, monkeypatch):
    """Ranges differ by rounding: the session that finds them does not pack the weights."""
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 32), "b": (32,), "v": (32, 8)}
    model = parse_model(
        """f (float[N,64] x) => (float[N,8] y) {
            h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }""",
        **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()},
    )
    data = None if "activations" in options else rng.normal(size=(50, 64)).astype(np.float32)
    plain = og.quantize(model, data, **options)
    monkeypatch.setattr(quantize_module, "IN_MEMORY", 0)
    large = og.quantize(model, data, **options)
    assert large.graph.node == plain.graph.node
    pairs = zip(plain.graph.initializer, large.graph.initializer, strict=True)
    for before, after in pairs:
        assert after.name == before.name
        assert not after.external_data
        expected, array = numpy_helper.to_array(before), numpy_helper.to_array(after)
        if before.name in shapes or expected.dtype != F:
            np.testing.assert_array_equal(array, expected)
        else:
            np.testing.assert_allclose(array, expected, rtol=1e-5)


MEMORY = """
    import importlib
    from pathlib import Path
    import numpy as np, onnx, onnxruntime.quantization, sys
    import onnxgrad as og
    from tests.support.models import parse_model

    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    importlib.import_module("onnxgrad.quantization.quantize").IN_MEMORY = 1 << 20
    path, units, layers, kind = Path(sys.argv[1]) / "model.onnx", 1024, 12, sys.argv[2]
    given = {"activations": None} if sys.argv[3:] else {}
    nodes = " ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(layers))
    rng = np.random.default_rng(0)
    onnx.save(
        parse_model(
            f"g (float[N,{units}] h0) => (float[N,{units}] h{layers}) {{ {nodes} }}",
            **{f"w{i}": rng.random((units, units), np.float32) / 512 for i in range(layers)},
        ),
        path, save_as_external_data=kind == "external",
    )
    X = rng.random((8, units), np.float32)
    og.quantize(parse_model("f (float[N,2] x) => (float[N,2] y) { y = MatMul(x, w) }",
                            w=np.ones((2, 2), np.float32)), X[:, :2])
    path = onnx.load(path) if kind == "proto" else path
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    og.quantize(path, None if given else X, **given)
    print((status("VmHWM") - before) / (4 * layers * units**2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "arguments", ["external", "inline", "proto", "external weights", "inline weights"], ids=str
)
def test_large_weights_are_in_memory_once(arguments, tmp_path):
    """Beside a given model, onnxruntime's quantizer holds the floats, and the integers, which are a
    quarter of them; then the result holds the floats.
    """
    code = [textwrap.dedent(MEMORY), str(tmp_path), *arguments.split()]
    command = [sys.executable, "-W", "ignore", "-c", *code]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not made.returncode, made.stderr
    assert float(made.stdout) < 1.6
