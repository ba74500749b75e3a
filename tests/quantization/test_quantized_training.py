"""Training beside quantized layers: their gradient is that of PyTorch's fake quantization."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import operator_names, parse_model
from tests.support.quantized_models import dynamic_model, few_bit_operands, static_model
from tests.support.running import run, run_named

RNG = np.random.default_rng(0)
F = np.float32
THROUGH = "straight through"


# -- files that onnxruntime quantizes ------------------------------------------------------------

IMAGES = RNG.standard_normal((64, 3, 8, 8)).astype(F)
LABELS = RNG.integers(0, 5, 64)


def scaled_classifier() -> onnx.ModelProto:
    """Return a network whose head, and the gain of its data, train in front of quantized layers."""
    arrays = {
        "w": 0.3 * RNG.standard_normal((4, 3, 3, 3)),
        "b": RNG.standard_normal(4),
        "v": 0.3 * RNG.standard_normal((36, 8)),
        "head": 0.3 * RNG.standard_normal((8, 5)),
        "gain": np.full((3, 1, 1), 1.1),
    }
    text = """g (float[N, 3, 8, 8] x) => (float[N, 5] y) { a = Mul(x, gain)
        c = Conv<kernel_shape=[3, 3]>(a, w, b) r = Relu(c)
        p = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(r) f = Flatten(p)
        h = MatMul(f, v) t = Tanh(h) [head] y = MatMul(t, head) }"""
    return parse_model(text, opset=17, **{n: a.astype(F) for n, a in arrays.items()})


@pytest.fixture(scope="module")
def quantized_files(tmp_path_factory) -> dict[str, onnx.ModelProto]:
    """The network in floats, and as onnxruntime quantizes all of it but the head."""
    folder, model = tmp_path_factory.mktemp("quantized"), scaled_classifier()
    kinds = ["Conv", "MatMul", "Relu", "MaxPool"]
    options = {"nodes_to_exclude": ["head"], "op_types_to_quantize": kinds}
    made = {"float": model, "dynamic": dynamic_model(model, folder, **options)}
    for name in ("QDQ", "QOperator"):
        form = {"activation_type": "QInt8", "quant_format": name, "per_channel": True}
        made[name] = static_model(model, folder, [{"x": IMAGES}], **form, **options)
    return made


FORMS = ["QDQ", "QOperator", "dynamic"]


@pytest.mark.parametrize("form", FORMS)
def test_gradient_is_close_to_that_of_the_float_model(quantized_files, form):
    found, expected = [], []
    for model, results in ((quantized_files[form], found), (quantized_files["float"], expected)):
        trainer = og.Trainer(model, "squared_error", train=["gain", "head"])
        target = np.full((64, 5), 2, F)
        step = trainer.step_models(IMAGES, target)[0]
        feed = {"x": IMAGES, "label": target} | trainer.state.weights
        gradient = run_named(step, feed)
        results += [gradient["gain_grad"].ravel(), gradient["head_grad"].ravel()]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("form", FORMS)
def test_training_in_front_of_quantized_layers(quantized_files, form):
    model = quantized_files[form]
    trainer = og.Trainer(model, "cross_entropy", train=["gain", "head"], learning_rate=0.02)
    with pytest.warns(UserWarning, match=rf"{THROUGH}.* \d quantized layers .*Quantize"):
        trainer.fit(IMAGES, LABELS, epochs=5)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    before, after = ({t.name: t for t in m.graph.initializer} for m in (model, trainer.model))
    assert {n for n in before if before[n] != after[n]} == {"gain", "head"}
    assert operator_names(trainer.model) == operator_names(model)
    loss = trainer.evaluate(IMAGES, LABELS)["loss"]
    logits = run(trainer.model, x=IMAGES)[0].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    assert loss == pytest.approx(-logits[np.arange(64), LABELS].mean(), rel=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_needs_no_gradient_through_what_is_in_front(quantized_files, form):
    trainer = og.Trainer(quantized_files[form], "cross_entropy", train="head")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(IMAGES, LABELS, epochs=2)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    step = trainer.step_models(IMAGES, LABELS)[0]
    kinds, primal = operator_names(step), operator_names(quantized_files[form])
    for quantized in ("QuantizeLinear", "QLinearConv", "ConvInteger", "Conv"):
        assert kinds.count(quantized) == primal.count(quantized)


def test_accumulation_passes_through_too(quantized_files):
    trainer = og.Trainer(quantized_files["QDQ"], "cross_entropy", train="gain", accumulate=2)
    with pytest.warns(UserWarning, match=THROUGH):
        trainer.fit(IMAGES, LABELS, batch_size=16)


# -- what does not train -------------------------------------------------------------------------


def test_default_weights_in_front_of_quantized_layers_are_refused():
    """A user who names none may not know that most of them are quantized and stay."""
    text = """g (float[N, 3] x) => (float[N, 3] y) { a = MatMul(x, w)
        q = QuantizeLinear(a, s, z) y = DequantizeLinear(q, s, z) }"""
    model = parse_model(text, opset=21, w=np.eye(3, dtype=F), s=F(0.1), z=np.int8(0))
    x = np.ones((4, 3), F)
    with pytest.raises(og.NoGradientRule, match=naming("quantized", "train=")):
        og.Trainer(model, "squared_error").fit(x, x)
    with pytest.warns(UserWarning, match=f"{THROUGH}.* 1 quantized layer "):
        og.Trainer(model, "squared_error", train="w").fit(x, x)


def test_plain_gradient_is_refused(quantized_files):
    """Rounding has no gradient: only training passes through it, and says so."""
    with pytest.raises(og.NoGradientRule, match=naming("QuantizeLinear", "quantized")):
        og.onnx_derivative(quantized_files["QDQ"], weights=["gain"])


def test_quantized_weight_is_an_error(quantized_files):
    name = next(
        t.name for t in quantized_files["QDQ"].graph.initializer if t.data_type == 3 and t.dims
    )
    with pytest.raises(ValueError, match=naming(repr(name), "int8", "quantized", "add_lora")):
        og.Trainer(quantized_files["QDQ"], "cross_entropy", train=[name])


# -- adapters beside weights that stay ------------------------------------------------------------

S = {"s": F(0.05), "z": np.uint8(120), "t": F(0.097), "o": np.uint8(100)}
PRODUCTS = {
    "few bits": "b = com.microsoft.MatMulNBits<K=32, N=16, bits=4, block_size=16>(h, w, scales)",
    "dequantized": "d = DequantizeLinear(w, ws) b = MatMul(h, d)",
    "QDQ": """q = QuantizeLinear(h, s, z) e = DequantizeLinear(q, s, z) d = DequantizeLinear(w, ws)
        c = MatMul(e, d) p = QuantizeLinear(c, t, o) b = DequantizeLinear(p, t, o)""",
    "QOperator": """q = QuantizeLinear(h, s, z) p = QLinearMatMul(q, s, z, w, ws, wz, t, o)
        b = DequantizeLinear(p, t, o)""",
    "dynamic": """q, a, c = DynamicQuantizeLinear(h) i = MatMulInteger(q, w, c, wz)
        f = Cast<to=1>(i) r = Mul(a, ws) b = Mul(f, r)""",
}


def product_model(form: str, parts: str, **arrays) -> onnx.ModelProto:
    """Return a product of a gained x and a quantized weight, b, with nodes behind it."""
    weight = RNG.integers(-127, 128, (32, 16)).astype(np.int8)
    operands = (
        few_bit_operands(4, 32, 16) if form == "few bits" else {"w": weight, "ws": F(0.005)} | S
    )
    tensors = operands | {"gain": np.ones(32, F), "wz": np.int8(0)} | arrays
    text = f"g (float[N, 32] x) => (float[N, 16] y) {{ h = Mul(x, gain) {PRODUCTS[form]} {parts} }}"
    return parse_model(text, opset=21, **tensors)


@pytest.mark.parametrize("form", ["few bits", "dequantized", "QOperator"])
def test_adapters_written_by_hand(form):
    """QLoRA: two small factors beside a quantized weight learn what it lacks."""
    x = RNG.standard_normal((256, 32)).astype(F)
    change = RNG.standard_normal((32, 2)) @ RNG.standard_normal((2, 16))
    A, B = (0.3 * RNG.standard_normal((32, 4))).astype(F), np.zeros((4, 16), F)
    model = product_model(form, "l = MatMul(h, A) m = MatMul(l, B) y = Add(b, m)", A=A, B=B)
    target = run_named(model, x=x)["y"] + (x @ change).astype(F)
    trainer = og.Trainer(model, "squared_error", train=["A", "B"], learning_rate=0.03)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no gradient goes through the quantized layer
        trainer.fit(x, target, epochs=60, batch_size=64)
    assert trainer.history[-1]["loss"] < 0.01 * trainer.history[0]["loss"]
    for old, new in zip(model.graph.initializer, trainer.model.graph.initializer, strict=True):
        assert (old == new) == (old.name not in ("A", "B"))


@pytest.mark.parametrize("form", PRODUCTS)
def test_adapters_of_add_lora(form):
    """The adapter is beside the data and the result in floats; the first one changes nothing."""
    model = product_model(form, "y = Tanh(b)")
    x, y = (RNG.standard_normal((256, n)).astype(F) for n in (32, 16))
    adapted = og.add_lora(model, "w", rank=4)
    # onnxruntime no longer fuses MatMul and QuantizeLinear: some may be rounded to the other side
    same = run(adapted, x=x)[0] == run(model, x=x)[0]
    assert same.mean() > (0.99 if form == "QDQ" else 0.9999)
    with pytest.raises(ValueError, match=naming("'w'", "quantized", "requantize=True")):
        og.merge_lora(adapted)
    trainer = og.Trainer(adapted, "squared_error", train="*lora_*", learning_rate=0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(x, np.tanh(y), epochs=6)
    assert trainer.history[-1]["loss"] < 0.95 * trainer.history[0]["loss"]
    kept = {t.name: t for t in model.graph.initializer}
    after = {t.name: t for t in trainer.model.graph.initializer}
    assert all(after[name] == tensor for name, tensor in kept.items())
