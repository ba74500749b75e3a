"""Adapters as inputs of one base: served by sessions of onnxruntime, and trained again."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrad as og
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.weights import replace_constants
from tests.support.adapter_cases import (
    NETWORKS,
    adapter_network,
    constant_arrays,
    random_feed,
    random_model,
    shaken,
    with_tensors,
)
from tests.support.errors import naming
from tests.support.models import parse_model


def unpacked_session(model):
    """Return a session that packs no constants, as products with inputs are not packed either."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # of optional inputs, it warns
    options.add_session_config_entry("session.disable_prepacking", "1")
    if any(node.op_type == "Conv" for node in model.graph.node):  # nor lays out kernels in blocks
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return ort.InferenceSession(model.SerializeToString(), options)


def first_output(model, data):
    return unpacked_session(model).run(None, data)[0]


def run_with(served, path, data):
    """Return the first output with an adapter, which must outlive the run: options do not."""
    adapter, options = ort.LoraAdapter(), ort.RunOptions()
    adapter.Load(str(path))
    options.add_active_adapter(adapter)
    return served.run(None, data, options)[0]


def fed_with(served, path, data):
    """Return the first output of a base whose inputs have no default: Python asks for these."""
    held = ort.AdapterFormat.read_adapter(str(path)).get_parameters()
    return served.run(None, data | {name: value.numpy() for name, value in held.items()})[0]


def peft_form(model, a_transposed=False, scale=1.0):
    """Return `x W + b + scale x A B` as other tools write it, where A and B are inputs."""
    text = """f (float[N,4] x, float[%s] lora_A, float[R,3] lora_B) => (float[N,3] y)
        <float s = {%f}> { h = MatMul(x, w) base = Add(h, b) %s
        n = MatMul(x, %s) l = MatMul(n, lora_B) m = Mul(l, s) y = Add(base, m) }"""
    flips = "t = Transpose(lora_A)" if a_transposed else ""
    filled = text % ("R,4" if a_transposed else "4,R", scale, flips, "t" if flips else "lora_A")
    return with_tensors(parse_model(filled), **constant_arrays(model))


def plain_model():
    text = "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, b) }"
    return random_model(text, w=(4, 3), b=(3,))


@pytest.mark.parametrize("name", NETWORKS)
def test_adapters_of_any_rank_on_one_base_equal_the_trained_models(name, tmp_path):
    model = adapter_network(name)
    data = random_feed(model)
    base = og.graph.adapter_inputs(og.add_lora(model, "w", rank=2))
    onnx.checker.check_model(base)
    served, plain = unpacked_session(base), first_output(model, data)
    np.testing.assert_array_equal(served.run(None, data)[0], plain)
    for rank, alpha in ((2, 3), (4, 5)):
        trained = shaken(og.add_lora(model, "w", rank=rank, alpha=alpha, dropout=0.1), seed=rank)
        path = tmp_path / f"{rank}.onnx_adapter"
        og.save_adapter(trained, path)
        result = run_with(served, path, data)
        expected = first_output(trained, data)
        np.testing.assert_array_equal(result, expected)
        assert np.abs(result - plain).max() > 0.01
    loaded, of_base = og.load_adapter(model, path), og.load_adapter(base, path)
    assert not {x.name for x in of_base.graph.input} & {*read_adapters(of_base)[0]["tensors"]}
    for other in (loaded, of_base):
        np.testing.assert_array_equal(first_output(other, data), expected)
    again = og.load_adapter(og.add_lora(model, "w", rank=rank, alpha=alpha), path)
    np.testing.assert_allclose(first_output(again, data), expected, rtol=1e-3, atol=1e-5)
    assert og.add_lora(base, "w", rank=2) == og.add_lora(model, "w", rank=2)


def test_a_base_serves_what_is_trained_on_it(tmp_path):
    """A head and a normalization train beside the adapters, and are in their file."""
    model = random_model(
        """f (float[N,4] x) => (float[N,2] y) {
            h = MatMul(x, w) n = LayerNormalization(h, norm) y = Gemm(n, v, b) }""",
        w=(4, 4), norm=(4,), v=(4, 2), b=(2,),
    )  # fmt: skip
    adapted = og.add_lora(og.replace_head(model, units=3), "w", rank=2)
    base = og.graph.adapter_inputs(adapted, weights="norm")
    assert og.graph.adapter_inputs(base) == base
    later = og.graph.adapter_inputs(og.graph.adapter_inputs(adapted), weights="norm")
    assert {x.name for x in later.graph.input} == {x.name for x in base.graph.input}
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 3, 32)
    names = [t.name for t in og.trainable(adapted).trained]
    assert len(names) == 4
    trainer = og.Trainer(adapted, "cross_entropy", train=[*names, "norm"], learning_rate=0.1)
    trainer.fit(X, y, epochs=2)
    path = tmp_path / "a.onnx_adapter"
    og.save_adapter(trainer, path)
    held = ort.AdapterFormat.read_adapter(str(path)).get_parameters()
    assert {*held} == {*names, "norm"} == {x.name for x in base.graph.input} - {"x"}
    data = {"x": X}
    served, expected = unpacked_session(base), first_output(trainer.model, data)
    np.testing.assert_array_equal(run_with(served, path, data), expected)
    np.testing.assert_array_equal(served.run(None, data)[0], first_output(adapted, data))
    og.save_adapter(trainer, tmp_path / "folder")
    for file in (path, tmp_path / "folder"):
        loaded = og.load_adapter(og.replace_head(model, units=3), file)
        np.testing.assert_array_equal(first_output(loaded, data), expected)
    assert {t.name for t in og.trainable(loaded).trained} == {*names, "norm"}


@pytest.mark.parametrize(("a_transposed", "scale"), [(False, 1.0), (True, 0.5)])
def test_inputs_of_other_tools_train_and_are_served(a_transposed, scale, tmp_path):
    base = peft_form(plain_model(), a_transposed, scale)
    adapted = og.add_lora(base, "w", rank=2, alpha=3)
    assert [x.name for x in adapted.graph.input] == ["x"]
    assert read_adapters(adapted)[0]["tensors"] == ["lora_A", "lora_B"]
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 3, 32)
    trainer = og.Trainer(adapted, "cross_entropy", learning_rate=0.1).fit(X, y, epochs=2)
    assert {*trainer.state.weights} == {"lora_A", "lora_B"}
    path = tmp_path / "a.onnx_adapter"
    og.save_adapter(trainer, path)
    data = {"x": X}
    expected = first_output(trainer.model, data)
    result = fed_with(unpacked_session(base), path, data)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    loaded = og.load_adapter(base, path)
    np.testing.assert_allclose(first_output(loaded, data), expected, rtol=1e-5, atol=1e-6)
    merged = first_output(og.merge_lora(loaded), data)
    np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=naming("'lora_A'", "base")):
        og.graph.adapter_inputs(loaded)
    with_defaults = og.graph.adapter_inputs(base, weights="b")
    assert [x.name for x in with_defaults.graph.input] == ["x", "lora_A", "lora_B", "b"]
    served = unpacked_session(with_defaults)
    np.testing.assert_array_equal(served.run(None, data)[0], first_output(plain_model(), data))
    np.testing.assert_array_equal(run_with(served, path, data), result)
    assert og.graph.adapter_inputs(with_defaults, weights="b") == with_defaults
    again = og.load_adapter(with_defaults, path)
    np.testing.assert_array_equal(
        constant_arrays(again)["lora_A"], constant_arrays(loaded)["lora_A"]
    )


def test_inputs_of_one_rank_get_zeros_of_it():
    base = peft_form(plain_model())
    for x, sizes in zip(base.graph.input[1:], ([4, 2], [2, 3]), strict=True):
        x.CopyFrom(onnx.helper.make_tensor_value_info(x.name, 1, sizes))
    with_defaults = og.graph.adapter_inputs(base)
    shapes = {n: a.shape for n, a in constant_arrays(with_defaults).items() if "lora" in n}
    assert shapes == {"lora_A": (4, 2), "lora_B": (2, 3)}
    data = {"x": np.ones((2, 4), np.float32)}
    expected = first_output(plain_model(), data)
    np.testing.assert_array_equal(first_output(with_defaults, data), expected)


def test_adapters_that_another_tool_stored_as_constants_are_adapters(tmp_path):
    model = peft_form(plain_model())
    data = {"x": np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)}
    del model.graph.input[1:]
    with_tensors(model, seed=3, **{"lora_A": (4, 2), "lora_B": (2, 3)})
    expected = first_output(model, data)
    og.save_adapter(model, tmp_path / "a.onnx_adapter")
    served = unpacked_session(og.graph.adapter_inputs(model))
    result = run_with(served, tmp_path / "a.onnx_adapter", data)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    np.testing.assert_array_equal(served.run(None, data)[0], first_output(plain_model(), data))
    merged = first_output(og.merge_lora(model), data)
    np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=1e-5)


def test_products_behind_a_sum_of_data_are_no_adapters():
    text = """f (float[N,4] x, float[N,3] r, float[4,2] a, float[2,3] b) => (float[N,3] y) {
        h = MatMul(x, w) s = Add(h, r) n = MatMul(x, a) l = MatMul(n, b) y = Add(s, l) }"""
    other = og.add_lora(random_model(text, w=(4, 3)), "w")
    assert [x.name for x in other.graph.input] == ["x", "r", "a", "b"]


def test_products_of_other_data_are_no_adapters():
    text = """f (float[N,4] x, float[4,2] a, float[2,3] b) => (float[N,3] y) {
        h = MatMul(x, w) z = Tanh(x) n = MatMul(z, a) l = MatMul(n, b) y = Add(h, l) }"""
    other = og.add_lora(random_model(text, w=(4, 3)), "w")
    assert [x.name for x in other.graph.input] == ["x", "a", "b"]


def test_what_is_no_adapter_of_the_model_is_refused(tmp_path):
    plain, path = plain_model(), tmp_path / "a.onnx_adapter"
    og.save_adapter(og.add_lora(plain, "w", rank=2), path)
    wide = random_model("f (float[N,5] x) => (float[N,3] y) { y = MatMul(x, w) }", w=(5, 3))
    other = random_model("f (float[N,4] x) => (float[N,3] y) { y = MatMul(x, v) }", v=(4, 3))
    for model, named in (
        (wide, ["another model", "[4, 2]", "'w' needs [5, 2]"]),
        (other, ["another model", "'w.lora_A.weight'"]),
        (og.add_lora(other, "v"), ["lacks", "'v.lora_A.weight'"]),
        (og.add_lora(plain, "w", rank=3), ["'w.lora_A.weight'", "(4, 3)", "(4, 2)"]),
    ):
        with pytest.raises(ValueError, match=naming(*named)) as error:
            og.load_adapter(model, path)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match=naming("b.onnx_adapter", "not exist")):
        og.load_adapter(plain, tmp_path / "b.onnx_adapter")
    (tmp_path / "c.onnx_adapter").write_bytes(b"broken")
    with pytest.raises(ValueError, match=naming("c.onnx_adapter", "damaged", "Save")):
        og.load_adapter(plain, tmp_path / "c.onnx_adapter")
    with pytest.raises(ValueError, match=naming("no adapters", "add_lora")):
        og.graph.adapter_inputs(plain)
    dora = og.add_lora(plain, "w", use_dora=True)
    for call in (lambda: og.graph.adapter_inputs(dora), lambda: og.save_adapter(dora, path)):
        with pytest.raises(ValueError, match=naming("'w'", "use_dora", "merge_lora")):
            call()
    assert og.load_adapter(plain, path)  # the failed call left it as it was


def test_a_base_trains_only_with_an_adapter():
    base = og.graph.adapter_inputs(og.add_lora(plain_model(), "w", rank=2))
    why = {t.name: t.why for t in og.trainable(base)}
    assert "no elements" in why["w.lora_A.weight"]
    with pytest.raises(ValueError, match=naming("inputs", "add_lora")):
        og.Trainer(base, "cross_entropy")


@pytest.mark.parametrize("shape", ["N", "N,7"])
def test_a_base_of_fused_layers_is_the_file_without_adapters(shape):
    """A session makes a Gemm of MatMul and Add, or of Add and Gelu a BiasGelu, by the rank."""
    text = """f (float[SHAPE,600] x) => (float[SHAPE,64] y)
        <float s = {1.4142135}, float i = {1.0}> {
        t = Tanh(x) h = MatMul(t, w) z = Add(h, b)
        d = Div(z, s) e = Erf(d) p = Add(e, i) y = Mul(z, p) }"""
    model = random_model(text.replace("SHAPE", shape), w=(600, 64), b=(64,))
    size = (40, 7, 600) if "7" in shape else (40, 600)
    data = {"x": np.random.default_rng(3).normal(size=size).astype(np.float32)}
    base = og.graph.adapter_inputs(og.add_lora(model, "w"))
    expected, result = (
        ort.InferenceSession(m.SerializeToString()).run(None, data)[0] for m in (model, base)
    )
    np.testing.assert_array_equal(result, expected)


def test_half_precision_inputs_of_another_tool(tmp_path):
    half = constant_arrays(plain_model())["w"].astype(np.float16)
    inputs = "float16[N,4] x, float16[4,R] lora_A, float16[R,3] lora_B"
    base = parse_model(f"""f ({inputs}) => (float16[N,3] y) {{
        h = MatMul(x, w) n = MatMul(x, lora_A) l = MatMul(n, lora_B) y = Add(h, l) }}""")
    with_tensors(base, w=half)
    trained = shaken(og.add_lora(base, "w", rank=2))
    og.save_adapter(trained, tmp_path / "a.onnx_adapter")
    X = {"x": np.random.default_rng(1).normal(size=(5, 4)).astype(np.float16)}
    result = fed_with(unpacked_session(base), tmp_path / "a.onnx_adapter", X)
    np.testing.assert_allclose(result, first_output(trained, X), rtol=0.01, atol=0.02)


def test_values_in_the_file_are_those_of_the_session():
    adapted = og.add_lora(plain_model(), "w", rank=2)
    new = {n: np.ones_like(v) for n, v in constant_arrays(adapted).items() if "lora" in n}
    base = og.graph.adapter_inputs(replace_constants(adapted, new))
    assert [list(t.dims) for t in base.graph.initializer if "lora" in t.name] == [[4, 0], [0, 3]]
