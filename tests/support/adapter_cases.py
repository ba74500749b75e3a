"""Small models for the tests of adapters."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

from onnxgrad.model.notes import fine_tuned
from onnxgrad.model.weights import constant_refs, replace


def parse(text: str, opset: int = 20, ir_version: int = 9) -> onnx.ModelProto:
    imports = f'"": {opset}, "com.microsoft": 1, "local": 1'
    return parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]> {text}")


def with_tensors(model: onnx.ModelProto, seed: int = 0, **tensors) -> onnx.ModelProto:
    """Return `model` with initializers: arrays, or random ones of a shape."""
    rng = np.random.default_rng(seed)
    for name, value in tensors.items():
        array = rng.normal(size=value) if isinstance(value, tuple) else value
        array = array.astype(np.float32) if isinstance(value, tuple) else array
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {ref.name: ref.array() for ref in constant_refs(model)}


def shaken(model: onnx.ModelProto, seed: int = 1) -> onnx.ModelProto:
    """Return `model` with random values in all tensors that are fine-tuned."""
    rng, values = np.random.default_rng(seed), arrays(model)
    new = {name: rng.normal(size=values[name].shape) * 0.5 for name in fine_tuned(model)}
    return replace(model, {n: a.astype(values[n].dtype) for n, a in new.items()})


_LINEAR = "(float[2,5,4] x) => (float[2,5,3] y)"
_MATRIX = "(float[2,4] x) => (float[2,3] y)"


def networks() -> dict[str, onnx.ModelProto]:
    """Return models with a weight "w", each used in another form."""
    half = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float16)
    return {
        "matmul": with_tensors(parse(f"f {_LINEAR} {{ y = MatMul(x, w) }}"), w=(4, 3)),
        "vector": with_tensors(parse("f (float[4] x) => (float[3] y) { y = MatMul(x, w) }"), w=(4, 3)),
        "batched": with_tensors(parse(f"f {_LINEAR} {{ y = MatMul(x, w) }}"), w=(2, 4, 3)),
        "left": with_tensors(
            parse("f (float[2,4,5] x) => (float[2,3,5] y) { y = MatMul(w, x) }"), w=(3, 4)
        ),
        "gemm": with_tensors(
            parse(f"f {_MATRIX} {{ y = Gemm<transB = 1, alpha = 0.5, beta = 2.0>(x, w, b) }}"),
            w=(3, 4), b=(3,),
        ),
        "gemm of transposed data": with_tensors(
            parse("f (float[4,2] x) => (float[2,3] y) { y = Gemm<transA = 1>(x, w) }"), w=(4, 3)
        ),
        "gemm on the left": with_tensors(
            parse("f (float[2,4] x) => (float[3,2] y) { y = Gemm<transA = 1, transB = 1>(w, x) }"),
            w=(4, 3),
        ),
        "fused matmul": with_tensors(
            parse(f"f {_LINEAR} {{ y = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, w) }}"),
            w=(3, 4),
        ),
        "behind transpose, cast and identity": with_tensors(
            parse(f"""f {_LINEAR} {{
                t = Transpose<perm = [1, 0]>(w) c = Cast<to = 1>(t) i = Identity(c)
                y = MatMul(x, i) }}"""),
            w=half.T.copy(),
        ),
        "half precision": with_tensors(
            parse("f (float16[2,5,4] x) => (float16[2,5,3] y) { y = MatMul(x, w) }"), w=half
        ),
        "constant node": parse(f"""f {_MATRIX} {{
            w = Constant<value = float[4,3] {{1, 0, -1, 2, 0, 1, 1, -2, 1, 0, 1, 2}}>() y = MatMul(x, w) }}"""),
        "conv 1": with_tensors(
            parse("f (float[2,4,9] x) => (float[2,6,M] y) { y = Conv<dilations = [2], pads = [1, 2]>(x, w, b) }"),
            w=(6, 4, 3), b=(6,),
        ),
        "conv 2": with_tensors(
            parse('f (float[2,4,9,8] x) => (float[2,6,M,N] y) { y = Conv<strides = [2, 1], auto_pad = "SAME_UPPER">(x, w) }'),
            w=(6, 4, 3, 2),
        ),
        "conv 3 in groups": with_tensors(
            parse("f (float[2,4,5,5,5] x) => (float[2,6,3,4,5] y) { y = Conv<group = 2>(x, w) }"),
            w=(6, 2, 3, 2, 1),
        ),
        "embedding": with_tensors(
            parse("f (int64[2,5] x) => (float[2,5,3] y) { y = Gather(w, x) }"), w=(4, 3)
        ),
        "tied": with_tensors(
            parse("""f (int64[2,5] x) => (float[2,5,4] y) {
                e = Gather(w, x) h = Tanh(e) t = Transpose<perm = [1, 0]>(w) y = MatMul(h, t) }"""),
            w=(4, 3),
        ),
        "twice": with_tensors(
            parse("f (float[2,3] x) => (float[2,3] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, w) }"),
            w=(3, 3),
        ),
        "in a branch": with_tensors(
            parse("""f (float[2,3] x) => (float[2,3] y) {
                s = ReduceSum<keepdims = 0>(x) z = Constant<value = float {0.0}>() c = Greater(s, z)
                y = If(c) <then_branch = t () => (float[2,3] a) { a = MatMul(x, w) },
                           else_branch = e () => (float[2,3] b) { n = Neg(x) b = MatMul(n, w) }> }"""),
            w=(3, 3),
        ),
        "in a function": with_tensors(
            parse("""f (float[2,4] x) => (float[2,3] y) { y = local.linear(x, w) }
                <domain: "local", opset_import: ["": 20]> linear (a, b) => (c) { c = MatMul(a, b) }"""),
            w=(4, 3),
        ),
        "old": with_tensors(
            parse("f (float[2,4] x, float[4,3] w) => (float[2,3] y) { y = MatMul(x, w) }", 8, 3),
            w=(4, 3),
        ),
    }  # fmt: skip


def feed(model: onnx.ModelProto, seed: int = 2) -> dict[str, np.ndarray]:
    """Return random data for the input "x"."""
    rng, kind = np.random.default_rng(seed), model.graph.input[0].type.tensor_type
    shape = [d.dim_value for d in kind.shape.dim]
    if kind.elem_type == onnx.TensorProto.INT64:
        return {"x": rng.integers(0, 4, shape)}
    return {
        "x": rng.normal(size=shape).astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    }
