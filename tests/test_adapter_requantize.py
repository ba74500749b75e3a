"""Adapters beside quantized weights are merged by quantizing anew."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
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

from adapter_cases import arrays, parse, shaken, with_tensors
from onnxgrad.adapters.files import load_adapter, save_adapter
from onnxgrad.adapters.lora import add_lora
from onnxgrad.adapters.merge import merge_lora
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import read
from onnxgrad.model.weights import replace
from onnxgrad.training.parameters.defaults import trainable

pytestmark = pytest.mark.usefixtures("one_thread")
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


FORMS = {
    "int8": lambda d: static(d, weight_type=QuantType.QInt8),
    "7 bits": lambda d: static(d, weight_type=QuantType.QInt8, reduce_range=True),
    "int8 by column": lambda d: static(d, weight_type=QuantType.QInt8, per_channel=True),
    "uint8": lambda d: static(d, weight_type=QuantType.QUInt8),
    "QOperator": lambda d: static(
        d, weight_type=QuantType.QInt8, quant_format=QuantFormat.QOperator
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
    """Run a model as its nodes say: fused products of integers saturate on some processors."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": X})[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_merged_model_is_as_close_as_the_quantized_one(form, tmp_path):
    adapted = add_lora(FORMS[form](tmp_path), "w*", rank=2)
    factors = {n: v for n, v in arrays(adapted).items() if ".lora_" in n}
    adapted = replace(
        adapted, {n: RNG.normal(size=v.shape).astype(np.float32) * 0.4 for n, v in factors.items()}
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


@pytest.mark.parametrize("form", ["int8", "QOperator", "4 bits", "4 bits in blocks"])
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


def test_what_has_no_scales_of_its_own_is_refused(tmp_path):
    quantize_dynamic(floats(), str(tmp_path / "q.onnx"))
    adapted = add_lora(str(tmp_path / "q.onnx"), "w*", rank=2)
    with pytest.raises(ValueError, match="quantizing anew"):
        merge_lora(adapted, requantize=True)
    with pytest.raises(ValueError, match="requantize=True"):
        merge_lora(adapted)
