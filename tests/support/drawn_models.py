"""Models that texts, graphs of Graphviz and pictures show."""

from __future__ import annotations

from itertools import pairwise

import onnx
from onnx import AttributeProto, TensorProto

from onnxgrad import DerivativeOptions, onnx_derivative
from tests.support.models import parse_model

# The loss of seed document 003, with true shapes.
SEED = """
<ir_version: 8, opset_import: ["": 14]>
g (float[N,2] x, float[N,1] label) => (float[1,1] loss)
<float[1,2] init = {0.5, -0.33333}, int64[1] init_2 = {1},
 float[11] long = {0,1,2,3,4,5,6,7,8,9,10}>
{
    out_mul_0 = Mul(x, x)
    out_mul_0_1 = Mul(out_mul_0, init)
    out_mul_0_2 = Mul(x, init)
    out_add_0 = Add(out_mul_0_2, out_mul_0_1)
    y = ReduceSum <keepdims = 1> (out_add_0, init_2)
    loss_diff = Sub(y, label)
    loss_diff_2 = Mul(loss_diff, loss_diff)
    loss = ReduceSum(loss_diff_2)
}
"""

BRANCHES = """
<ir_version: 8, opset_import: ["": 18, "own": 1]>
g (float[N] x, bool c) => (float[N] y)
{
    a = own.twice(x)
    y = If (c) <
        then_branch = t () => (float[N] p) {k = Constant <value = float[1] {3}> () p = Add(a, k)},
        else_branch = e () => (float[] q) {q = Identity(a)}
    >
}
<domain: "own", opset_import: ["": 18]>
twice (v) => (w) {w = Add(v, v)}
"""

ATTRIBUTES = """
<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
g (float[N,11] x) => (seq(float[N]) z, float y)
{
    s = ai.onnx.ml.Scaler <offset = [0.1], scale = [1.,1.,1.,1.,1.,1.,1.,1.,1.,1.,1.]> (x)
    r = LeakyRelu <alpha = 0.25> (s)
    z = SequenceConstruct (r, x)
    o = Constant <value = float[11] {0,1,2,3,4,5,6,7,8,9,10}> ()
    y = ReduceSum <noop_with_empty_axes = 0> (o)
}
"""

MLP = """<ir_version: 9, opset_import: ["": 20]>
    f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}>
    { h = MatMul(x, w) t = Tanh(h) s = Softplus(t) y = Mul(t, s) }"""

# names that mean something to Graphviz, to XML, or to a reader of numbers
ODD_NAMES = ['a"b', "a\\", "new\nline", "a<b>|{c}", "&lt;", "é 字"]
ODD_NAMES += ["node", "1", "a.b", "a_b", r"\N"]


def oddly_named_model() -> onnx.ModelProto:
    """Return a model whose values and nodes have the names of `ODD_NAMES`."""
    made = onnx.ModelProto(ir_version=8)
    made.opset_import.add(version=18)
    for x, y in pairwise(ODD_NAMES):
        made.graph.node.add(op_type="Exp", name=x, input=[x], output=[y])
    made.graph.input.add(name=ODD_NAMES[0]).type.tensor_type.elem_type = TensorProto.FLOAT
    made.graph.output.add(name=ODD_NAMES[-1])
    made.graph.node[0].attribute.add(name="t", s=b'"\\', type=AttributeProto.STRING)
    return made


def joint_gradient() -> onnx.ModelProto:
    """Return forward and backward pass of `MLP` in one graph, whose nodes name their primals."""
    flags = DerivativeOptions.KeepYieldOp
    return onnx_derivative(parse_model(MLP), options=flags, note_primal=True)
