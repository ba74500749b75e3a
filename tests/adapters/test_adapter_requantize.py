"""Adapters beside quantized weights are merged by quantizing anew."""

from __future__ import annotations

import re
from copy import deepcopy

import numpy as np
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from onnxgrad.adapters.files import load_adapter, save_adapter
from onnxgrad.adapters.ia3 import add_ia3
from onnxgrad.adapters.lora import add_lora
from onnxgrad.adapters.merge import merge_lora
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import read
from onnxgrad.model.weights import replace
from onnxgrad.training.parameters.defaults import trainable
from tests.support.adapter_cases import arrays, parse, shaken, with_tensors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 48)).astype(np.float32)
ANEW = pytest.warns(UserWarning, match="quantized anew.*Evaluate the merged model")


def floats():
    """Return a network whose last block of rows is shorter than the others."""
    text = """f (float[N,48] x) => (float[N,8] y) {
        h = MatMul(x, w) t = Tanh(h) y = Gemm<transB = 1>(t, v, b) }"""
    tensors = {"w": (48, 32), "v": (8, 32), "b": (8,)}
    return with_tensors(parse(text), **tensors)


class Rows(CalibrationDataReader):
    def __init__(self):
        self.rest = iter([{"x": X}])

    def get_next(self):
        return next(self.rest, None)


def static(folder, **options):
    path = str(folder / "q.onnx")
    quantize_static(floats(), path, Rows(), activation_type=QuantType.QUInt8, **options)
    return path


def weight_only(bits, symmetric, form):
    config = DefaultWeightOnlyQuantConfig(
        block_size=32, is_symmetric=symmetric, quant_format=form, bits=bits,
        op_types_to_quantize=("MatMul",),
    )  # fmt: skip
    quantizer = MatMulNBitsQuantizer(floats(), algo_config=config)
    quantizer.process()
    return quantizer.model.model


def dynamic(folder, **options):
    path = str(folder / "q.onnx")
    quantize_dynamic(floats(), path, **options)
    return path


FORMS = {
    "int8": lambda d: static(d, weight_type=QuantType.QInt8),
    "7 bits": lambda d: static(d, weight_type=QuantType.QInt8, reduce_range=True),
    "int8 by column": lambda d: static(d, weight_type=QuantType.QInt8, per_channel=True),
    "uint8": lambda d: static(d, weight_type=QuantType.QUInt8),
    "QOperator": lambda d: static(
        d, weight_type=QuantType.QInt8, quant_format=QuantFormat.QOperator
    ),
    "dynamic": lambda d: dynamic(d),
    "dynamic, of 7 bits": lambda d: dynamic(d, reduce_range=True),
    "dynamic by column": lambda d: dynamic(d, per_channel=True),
    "dynamic, uint8": lambda d: dynamic(d, weight_type=QuantType.QUInt8),
    "dynamic, uint8 of 7 bits": lambda d: dynamic(
        d, weight_type=QuantType.QUInt8, per_channel=True, reduce_range=True
    ),
    "4 bits": lambda d: weight_only(4, True, QuantFormat.QOperator),
    "4 bits with zero points": lambda d: weight_only(4, False, QuantFormat.QOperator),
    "8 bits": lambda d: weight_only(8, True, QuantFormat.QOperator),
    "8 bits with zero points": lambda d: weight_only(8, False, QuantFormat.QOperator),
    "4 bits in blocks": lambda d: weight_only(4, True, QuantFormat.QDQ),
    "4 bits in blocks with zero points": lambda d: weight_only(4, False, QuantFormat.QDQ),
}


def forms_of(model):
    """Return the operators of a file, and the shapes and dtypes of its constants."""
    model = read(model)
    held = {name: (array.shape, array.dtype) for name, array in arrays(model).items()}
    return sorted(node.op_type for node in model.graph.node), held


def run(model):
    """Run a model as its nodes say: products of integers saturate on some processors."""
    if any(node.op_type == "MatMulInteger" for node in model.graph.node):
        return ReferenceEvaluator(model).run(None, {"x": X})[0]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": X})[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_merged_model_is_as_close_as_the_quantized_one(form, tmp_path):
    adapted = add_lora(FORMS[form](tmp_path), "w*", rank=2)
    rng, factors = (
        np.random.default_rng(1),
        {n: v for n, v in arrays(adapted).items() if ".lora_" in n},
    )
    adapted = replace(
        adapted, {n: rng.normal(size=v.shape).astype(np.float32) * 0.4 for n, v in factors.items()}
    )
    with ANEW:
        merged = merge_lora(adapted, requantize=True)
    assert not read_adapters(merged)
    assert forms_of(merged) == forms_of(FORMS[form](tmp_path))
    plain = run(without_change(adapted))
    expected, result = run(adapted), run(merged)
    change = np.abs(expected - plain).mean()
    bits = 4 if form.startswith("4") else 8
    assert np.abs(result - expected).mean() < change * (0.25 if bits == 4 else 0.08)


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_merged_with_the_bias(form, tmp_path):
    """Those of the output of a layer multiply its bias, too."""
    patterns = ["w*"] if form == "QOperator" else ["w*", "v*"]  # whose QGemm gets no adapter
    most = 1 if form == "QOperator" else 2  # whose results are clipped where they were before
    adapted = add_ia3(FORMS[form](tmp_path), patterns)
    rng, held = np.random.default_rng(1), arrays(adapted)
    factors = {
        name: rng.uniform(0.2, most, array.shape).astype(np.float32)
        for name, array in held.items()
        if ".ia3_l" in name
    }
    assert len(factors) == len(patterns)
    changed = replace(adapted, factors)
    with ANEW:
        merged = merge_lora(changed, requantize=True)
    assert not read_adapters(merged)
    assert forms_of(merged) == forms_of(FORMS[form](tmp_path))
    plain, expected, result = (run(m) for m in (adapted, changed, merged))
    error = np.abs(result - expected).mean() / np.abs(expected - plain).mean()
    one_scale = form.startswith(("int8", "uint8", "7 bits", "dynamic")) and "by" not in form
    limit = 0.15 if one_scale else 0.12 if form.startswith("4") else 0.05
    assert error < (0.25 if form == "QOperator" else limit)  # whose result is of 8 bits, too


def without_change(adapted):
    zeros = {n: np.zeros_like(v) for n, v in arrays(adapted).items() if ".lora_" in n}
    return replace(adapted, zeros)


def test_a_convolution_and_the_bias_beside_it(tmp_path):
    """onnxruntime computes in integers, with one scale for the product and the bias."""
    model = with_tensors(
        parse("f (float[N,3,8,8] x) => (float[N,4,8,8] y) { y = Conv<pads = [1,1,1,1]>(x, w, b) }"),
        w=(4, 3, 3, 3), b=(4,),
    )  # fmt: skip
    images = RNG.normal(size=(4, 3, 8, 8)).astype(np.float32)

    class Images(Rows):
        def __init__(self):
            self.rest = iter([{"x": images}])

    path = str(tmp_path / "q.onnx")
    quantize_static(model, path, Images(), per_channel=True, weight_type=QuantType.QInt8)
    adapted = shaken(add_lora(path, "w*", rank=2))
    with ANEW:
        merged = merge_lora(adapted, requantize=True)

    def result(model, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        session = ort.InferenceSession(model.SerializeToString(), options)
        return session.run(None, {"x": images})[0]

    plain = result(merged, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    np.testing.assert_allclose(result(merged), plain, atol=0.02 * np.abs(plain).max())
    expected = result(adapted)
    assert np.abs(plain - expected).mean() < 0.03 * np.abs(expected).mean()


@pytest.mark.parametrize("form", ["int8", "QOperator", "dynamic", "4 bits", "4 bits in blocks"])
def test_quantized_weights_have_the_names_of_their_floats(form, tmp_path):
    """So the adapter of a float file is one of the quantized file, in both formats."""
    trained = shaken(add_lora(floats(), "w", rank=2))
    quantized = FORMS[form](tmp_path)
    row = next(t for t in trainable(quantized) if t.alias == "w")
    assert (row.trains, row.shape) == (False, arrays(read(quantized))[row.name].shape)
    assert str(trainable(quantized)).endswith("quantized weights stay")
    [note] = read_adapters(add_lora(quantized, "w", rank=2))
    assert note["tensors"] == ["w.lora_A.weight", "w.lora_B.weight"]
    for path in (tmp_path / "folder", tmp_path / "a.onnx_adapter"):
        save_adapter(trained, path)
        loaded = load_adapter(quantized, path)
        assert read_adapters(loaded)[0]["weight"] == row.name
        factor = arrays(loaded)["w.lora_A.weight"]
        np.testing.assert_array_equal(factor, arrays(trained)["w.lora_A.weight"])


@pytest.mark.parametrize("form", [dynamic, static])
def test_numbered_weights_have_the_names_of_their_modules(form, tmp_path, monkeypatch):
    """As PyTorch's exporter numbers what it transposes: only the node tells of the module."""
    model = with_tensors(
        parse("""f (float[N,48] x) => (float[N,8] y) {
            [query] h = MatMul(x, w) t = Tanh(h) [value] y = MatMul(t, v) }"""),
        w=(48, 32), v=(32, 8),
    )  # fmt: skip
    for name, new in {"w": "onnx::MatMul_12", "v": "onnx::MatMul_13"}.items():
        next(t for t in model.graph.initializer if t.name == name).name = new
        for node in model.graph.node:
            node.input[:] = [new if x == name else x for x in node.input]
            node.name = {"query": "/layers.0/query/MatMul", "value": "/layers.0/value/MatMul"}.get(
                node.name, node.name
            )
    monkeypatch.setattr(f"{__name__}.floats", lambda: deepcopy(model))
    path = form(tmp_path)
    aliases = {row.alias for row in trainable(path) if row.why.startswith("a quantized")}
    assert aliases == {"layers.0.query.weight", "layers.0.value.weight"}
    [note] = read_adapters(add_lora(path, "*query*", rank=2))
    assert note["module"] == "layers.0.query"
    assert read_adapters(add_lora(model, "*query*", rank=2))[0]["module"] == note["module"]


def test_rows_of_a_dynamic_file(tmp_path):
    """Its table stays in integers up to the rows, which DequantizeLinear scales."""
    model = with_tensors(
        parse("""f (int64[N,5] x) => (float[N,5,4] y) {
            e = Gather(w, x) t = Tanh(e) y = MatMul(t, v) }"""),
        w=(12, 16), v=(16, 4),
    )  # fmt: skip
    quantize_dynamic(model, str(tmp_path / "q.onnx"))
    adapted = shaken(add_lora(str(tmp_path / "q.onnx"), ["w", "v"], rank=2))
    with ANEW:
        merged = merge_lora(adapted, requantize=True)
    ids = {"x": np.random.default_rng(0).integers(0, 12, (8, 5))}
    assert forms_of(merged) == forms_of(str(tmp_path / "q.onnx"))
    plain, expected, result = (
        ReferenceEvaluator(m).run(None, ids)[0] for m in (without_change(adapted), adapted, merged)
    )
    assert np.abs(result - expected).mean() < 0.08 * np.abs(expected - plain).mean()


def test_a_weight_of_two_branches_with_the_same_names(tmp_path):
    model = with_tensors(
        parse("""f (float[N,48] x, bool c) => (float[N,8] y) {
            h = MatMul(x, w)
            y = If(c) <
                then_branch = a () => (float[N,8] z) { u = Tanh(h) z = MatMul(u, v) },
                else_branch = b () => (float[N,8] z) { u = Relu(h) z = MatMul(u, v) }> }"""),
        w=(48, 32), v=(32, 8),
    )  # fmt: skip
    path = str(tmp_path / "q.onnx")
    quantize_dynamic(model, path, extra_options={"EnableSubgraph": True})
    adapted = shaken(add_lora(path, "v", rank=2))
    with ANEW:
        merged = merge_lora(adapted, requantize=True)
    for c in np.array([True, False]):
        plain, expected, result = (
            ReferenceEvaluator(m).run(None, {"x": X, "c": c})[0]
            for m in (without_change(adapted), adapted, merged)
        )
        assert np.abs(result - expected).mean() < 0.08 * np.abs(expected - plain).mean()


@pytest.mark.parametrize("form", [dynamic, static])
def test_constants_that_weights_share_stay_those_of_the_others(form, tmp_path):
    """onnxruntime stores equal scalars once in the files that it optimizes."""
    model = read(form(tmp_path, weight_type=QuantType.QUInt8))
    held = arrays(model)
    for node in model.graph.node:
        shared = [re.sub("^v(_Transposed)?_(scale|zero_point)$", r"w_\2", x) for x in node.input]
        node.input[:] = shared
    assert sum("w_scale" in node.input for node in model.graph.node) == 2
    adapted = shaken(add_lora(model, "w", rank=2))
    with ANEW:
        merged = merge_lora(adapted, requantize=True)
    plain, expected, result = (run(m) for m in (without_change(adapted), adapted, merged))
    assert np.abs(result - expected).mean() < 0.08 * np.abs(expected - plain).mean()
    for name in ("w_scale", "w_zero_point"):
        np.testing.assert_array_equal(arrays(merged)[name], held[name])


def test_what_has_no_scales_of_its_own_is_refused(tmp_path):
    model = with_tensors(
        parse("""f (float[N,3] x) => (float[N,2] y) {
            c = Cast<to = 1>(q) w = Mul(c, s) y = MatMul(x, w) }"""),
        q=np.array([[1, -2], [3, 4], [-5, 6]], np.int8), s=np.float32([0.1]),
    )  # fmt: skip
    adapted = add_lora(model, "q", rank=2)
    with pytest.raises(ValueError, match="quantizing anew"):
        merge_lora(adapted, requantize=True)
    with pytest.raises(ValueError, match="requantize=True"):
        merge_lora(adapted)


def test_scales_of_several_steps_get_no_adapter():
    """An adapter between the two scales would be multiplied by the second one."""
    model = with_tensors(
        parse("""f (float[N,3] x) => (float[N,2] y) {
            a, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(a, q, z) c = Cast<to = 1>(i)
            d = Mul(c, s) y = Mul(d, t) }"""),
        q=np.array([[1, -2], [3, 4], [-5, 6]], np.int8), t=np.float32([0.1]),
    )  # fmt: skip
    with pytest.raises(ValueError, match="factors of their own"):
        add_lora(model, "q", rank=2)
