"""Adapters beside quantized weights are merged by quantizing anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

import onnxgrad as og
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.weights import replace_constants
from tests.support.adapter_cases import constant_arrays, random_model, rename_constants, shaken
from tests.support.errors import naming
from tests.support.quantized_models import dynamic_model, static_model, weight_only_model
from tests.support.running import in_sweep

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 48)).astype(np.float32)
DATA = [{"x": X}]


def merge_anew(adapted: onnx.ModelProto) -> onnx.ModelProto:
    """Return the merged model, whose weights are quantized anew: a warning says so."""
    with pytest.warns(UserWarning, match=naming("quantized anew", "Evaluate")):
        merged = og.merge_lora(adapted, requantize=True)
    assert not read_adapters(merged)
    return merged


def gemm_model() -> onnx.ModelProto:
    """Return a network whose last block of rows is shorter than the others."""
    text = """f (float[N,48] x) => (float[N,8] y) {
        h = MatMul(x, w) t = Tanh(h) y = Gemm<transB = 1>(t, v, b) }"""
    return random_model(text, w=(48, 32), v=(8, 32), b=(8,))


# by name: the tool of onnxruntime, and its options
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("static", {"weight_type": "QInt8"}),
    "7 bits": ("static", {"weight_type": "QInt8", "reduce_range": True}),
    "int8 by column": ("static", {"weight_type": "QInt8", "per_channel": True}),
    "uint8": ("static", {"weight_type": "QUInt8"}),
    "QOperator": ("static", {"weight_type": "QInt8", "quant_format": "QOperator"}),
    "dynamic": ("dynamic", {}),
    "dynamic, of 7 bits": ("dynamic", {"reduce_range": True}),
    "dynamic by column": ("dynamic", {"per_channel": True}),
    "dynamic, uint8": ("dynamic", {"weight_type": "QUInt8"}),
    "dynamic, uint8 of 7 bits": (
        "dynamic", {"weight_type": "QUInt8", "per_channel": True, "reduce_range": True},
    ),
    "4 bits": ("few bits", {"bits": 4}),
    "4 bits with zero points": ("few bits", {"bits": 4, "is_symmetric": False}),
    "8 bits": ("few bits", {"bits": 8}),
    "8 bits with zero points": ("few bits", {"bits": 8, "is_symmetric": False}),
    "4 bits in blocks": ("few bits", {"bits": 4, "quant_format": "QDQ"}),
    "4 bits in blocks with zero points": (
        "few bits", {"bits": 4, "quant_format": "QDQ", "is_symmetric": False},
    ),
}  # fmt: skip
IN_SWEEP = ("7 bits", "dynamic, of 7 bits", "dynamic, uint8", "4 bits", "8 bits with zero points")
BY_FORM = pytest.mark.parametrize("form", [in_sweep(n) if n in IN_SWEEP else n for n in FORMS])


def quantized_model(model: onnx.ModelProto, tool: str, folder: Path, **options: Any):
    """Return a model as a tool of onnxruntime quantizes it."""
    if tool == "few bits":
        return weight_only_model(model, block_size=32, **{"is_symmetric": True} | options)
    if tool == "dynamic":
        return dynamic_model(model, folder, **options)
    return static_model(model, folder, DATA, **options)


@pytest.fixture(scope="module")
def model_of_form(tmp_path_factory) -> Callable[[str], onnx.ModelProto]:
    """Return a function that quantizes `gemm_model` once in a form."""
    made: dict[str, onnx.ModelProto] = {}

    def quantize_once(form: str) -> onnx.ModelProto:
        if form not in made:
            tool, options = FORMS[form]
            folder = tmp_path_factory.mktemp("quantized")
            made[form] = quantized_model(gemm_model(), tool, folder, **options)
        return made[form]

    return quantize_once


def stored_form(model):
    """Return the operators of a file, and the shapes and dtypes of its constants."""
    held = {name: (array.shape, array.dtype) for name, array in constant_arrays(model).items()}
    return sorted(node.op_type for node in model.graph.node), held


def exact_output(model, data=DATA[0]):
    """Run a model as its nodes say: products of integers saturate on some processors."""
    if any(node.op_type in ("MatMulInteger", "If") for node in model.graph.node):
        return ReferenceEvaluator(model).run(None, data)[0]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, data)[0]


def relative_error(plain, adapted, merged, data=DATA[0]) -> float:
    """Return how far the merged model is from the adapted one, of what the adapter changes."""
    before, expected, found = (exact_output(model, data) for model in (plain, adapted, merged))
    return np.abs(found - expected).mean() / np.abs(expected - before).mean()


def without_change(adapted):
    """Return a model whose adapters change nothing."""
    zeros = {n: np.zeros_like(v) for n, v in constant_arrays(adapted).items() if ".lora_" in n}
    return replace_constants(adapted, zeros)


@BY_FORM
def test_the_merged_model_is_as_close_as_the_quantized_one(form, model_of_form):
    adapted = og.add_lora(model_of_form(form), "w*", rank=2)
    rng, held = np.random.default_rng(1), constant_arrays(adapted)
    factors = {n: 0.4 * rng.normal(size=v.shape) for n, v in held.items() if ".lora_" in n}
    adapted = replace_constants(adapted, {n: v.astype(np.float32) for n, v in factors.items()})
    merged = merge_anew(adapted)
    assert stored_form(merged) == stored_form(model_of_form(form))
    limit = 0.25 if form.startswith("4") else 0.08
    assert relative_error(without_change(adapted), adapted, merged) < limit


def test_a_convolution_and_the_bias_beside_it(tmp_path):
    """onnxruntime computes in integers, with one scale for the product and the bias."""
    model = random_model(
        "f (float[N,3,8,8] x) => (float[N,4,8,8] y) { y = Conv<pads = [1,1,1,1]>(x, w, b) }",
        w=(4, 3, 3, 3), b=(4,),
    )  # fmt: skip
    images = RNG.normal(size=(4, 3, 8, 8)).astype(np.float32)
    options = {"per_channel": True, "weight_type": "QInt8"}
    quantized = static_model(model, tmp_path, [{"x": images}], **options)
    adapted = shaken(og.add_lora(quantized, "w*", rank=2))
    merged = merge_anew(adapted)

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
def test_quantized_weights_have_the_names_of_their_floats(form, model_of_form, tmp_path):
    """So the adapter of a float file is one of the quantized file, in both formats."""
    trained = shaken(og.add_lora(gemm_model(), "w", rank=2))
    quantized = model_of_form(form)
    row = next(t for t in og.trainable(quantized) if t.alias == "w")
    assert (row.trains, row.shape) == (False, constant_arrays(quantized)[row.name].shape)
    assert "quantized" in str(og.trainable(quantized)).splitlines()[-1]
    [note] = read_adapters(og.add_lora(quantized, "w", rank=2))
    assert note["tensors"] == ["w.lora_A.weight", "w.lora_B.weight"]
    for path in (tmp_path / "folder", tmp_path / "a.onnx_adapter"):
        og.save_adapter(trained, path)
        loaded = og.load_adapter(quantized, path)
        assert read_adapters(loaded)[0]["weight"] == row.name
        factor = constant_arrays(loaded)["w.lora_A.weight"]
        np.testing.assert_array_equal(factor, constant_arrays(trained)["w.lora_A.weight"])


@pytest.mark.parametrize("tool", ["dynamic", "static"])
def test_numbered_weights_have_the_names_of_their_modules(tool, tmp_path):
    """As PyTorch's exporter numbers what it transposes: only the node tells of the module."""
    model = random_model(
        """f (float[N,48] x) => (float[N,8] y) {
            [query] h = MatMul(x, w) t = Tanh(h) [value] y = MatMul(t, v) }""",
        w=(48, 32), v=(32, 8),
    )  # fmt: skip
    rename_constants(model, {"w": "onnx::MatMul_12", "v": "onnx::MatMul_13"})
    for node in model.graph.node:
        node.name = f"/layers.0/{node.name}/MatMul" if node.name else ""
    quantized = quantized_model(model, tool, tmp_path)
    aliases = {row.alias for row in og.trainable(quantized) if row.why.startswith("a quantized")}
    assert aliases == {"layers.0.query.weight", "layers.0.value.weight"}
    [note] = read_adapters(og.add_lora(quantized, "*query*", rank=2))
    assert note["module"] == "layers.0.query"
    assert read_adapters(og.add_lora(model, "*query*", rank=2))[0]["module"] == note["module"]


def test_rows_of_a_dynamic_file(tmp_path):
    """Its table stays in integers up to the rows, which DequantizeLinear scales."""
    model = random_model(
        """f (int64[N,5] x) => (float[N,5,4] y) {
            e = Gather(w, x) t = Tanh(e) y = MatMul(t, v) }""",
        w=(12, 16), v=(16, 4),
    )  # fmt: skip
    quantized = dynamic_model(model, tmp_path)
    adapted = shaken(og.add_lora(quantized, ["w", "v"], rank=2))
    merged = merge_anew(adapted)
    ids = {"x": np.random.default_rng(0).integers(0, 12, (8, 5))}
    assert stored_form(merged) == stored_form(quantized)
    assert relative_error(without_change(adapted), adapted, merged, ids) < 0.08


def test_a_weight_of_two_branches_with_the_same_names(tmp_path):
    model = random_model(
        """f (float[N,48] x, bool c) => (float[N,8] y) {
            h = MatMul(x, w)
            y = If(c) <
                then_branch = a () => (float[N,8] z) { u = Tanh(h) z = MatMul(u, v) },
                else_branch = b () => (float[N,8] z) { u = Relu(h) z = MatMul(u, v) }> }""",
        w=(48, 32), v=(32, 8),
    )  # fmt: skip
    quantized = dynamic_model(model, tmp_path, extra_options={"EnableSubgraph": True})
    adapted = shaken(og.add_lora(quantized, "v", rank=2))
    merged = merge_anew(adapted)
    for c in np.array([True, False]):
        data = {"x": X, "c": c}
        assert relative_error(without_change(adapted), adapted, merged, data) < 0.08


@pytest.mark.parametrize("tool", ["dynamic", "static"])
def test_constants_that_weights_share_stay_those_of_the_others(tool, tmp_path):
    """onnxruntime stores equal scalars once in the files that it optimizes."""
    model = quantized_model(gemm_model(), tool, tmp_path, weight_type="QUInt8")
    held = constant_arrays(model)
    for node in model.graph.node:
        shared = [re.sub("^v(_Transposed)?_(scale|zero_point)$", r"w_\2", x) for x in node.input]
        node.input[:] = shared
    assert sum("w_scale" in node.input for node in model.graph.node) == 2
    adapted = shaken(og.add_lora(model, "w", rank=2))
    merged = merge_anew(adapted)
    assert relative_error(without_change(adapted), adapted, merged) < 0.08
    for name in ("w_scale", "w_zero_point"):
        np.testing.assert_array_equal(constant_arrays(merged)[name], held[name])


INTEGERS = np.array([[1, -2], [3, 4], [-5, 6]], np.int8)


def test_what_has_no_scales_of_its_own_is_refused():
    text = "f (float[N,3] x) => (float[N,2] y) { c = Cast<to=1>(q) w = Mul(c, s) y = MatMul(x, w) }"
    adapted = og.add_lora(random_model(text, q=INTEGERS, s=np.float32([0.1])), "q", rank=2)
    with pytest.raises(ValueError, match=naming("'q'", "quantizing anew", "float model")):
        og.merge_lora(adapted, requantize=True)
    with pytest.raises(ValueError, match="requantize=True"):
        og.merge_lora(adapted)


def test_scales_of_several_steps_get_no_adapter():
    """An adapter between the two scales would be multiplied by the second one."""
    text = """f (float[N,3] x) => (float[N,2] y) {
        a, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(a, q, z) c = Cast<to = 1>(i)
        d = Mul(c, s) y = Mul(d, t) }"""
    with pytest.raises(ValueError, match=naming("'q'", "two nodes")):
        og.add_lora(random_model(text, q=INTEGERS, t=np.float32([0.1])), "q", rank=2)
