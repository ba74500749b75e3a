"""`onnx_rename_names` and `onnx_rename_weights`: other names, the same results."""

from __future__ import annotations

import logging
import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrad import DerivativeOptions, ModelError, add_loss_output, onnx_derivative
from onnxgrad.graph import get_train_initializer, onnx_rename_names, onnx_rename_weights
from onnxgrad.losses.info import loss_info
from onnxgrad.plot import onnx_simple_text_plot
from tests.support.errors import naming
from tests.support.models import add_initializers, parse_model
from tests.support.running import run

# Captured names, names that shadow, the same names in both branches, a result called like an input
# is renamed to, a local function, a loop.
SCOPES = """<ir_version: 10, opset_import: ["": 18, "own": 1]>
    g (float[N,2] r0, bool c, int64 many) => (float[N,2] y, float[N,2] i0)
    <float[2] w = {2, 3}, int64[1] axes = {1}>
    {
        [first] h = Exp(r0)
        q = Mul(h, w)
        p = own.scaled(q)
        s = If (c) <
            then_branch = t () => (float[N,2] z) <float[2] k = {4, 5}> {
                q1 = Add(p, k)  [inner] z = Mul(q1, h) },
            else_branch = e () => (float[N,2] z) {
                k = Constant<value = float[2] {6.0, 7.0}>()  q1 = Sub(p, k)
                z = If (c) <
                    then_branch = tt () => (float[N,2] o) { o = Mul(q1, k) },
                    else_branch = te () => (float[N,2] o) { u = Neg(q1)  o = Add(u, w) }> }>
        a = Loop (many, , s) <body = b (int64 i, bool go, float[N,2] v)
            => (bool go_on, float[N,2] n) { go_on = Identity(go)  d = Mul(v, w)  n = Add(d, h) }>
        i0 = Identity(a)
        y = Clip(i0, , top)
    }
    <domain: "own", opset_import: ["": 18]>
    scaled (r1) => (w) { h = Constant<value = float {0.5}>()  m = Mul(r1, h)  w = Tanh(m) }
"""
FEED = {"r0": np.float32([[0.1, 0.2], [0.3, -0.4]]), "many": np.array(2)}


def scoped_model() -> onnx.ModelProto:
    made = onnx.parser.parse_model(SCOPES)
    add_initializers(made, {"top": 70.0})
    made.graph.value_info.add(name="h").type.CopyFrom(made.graph.output[0].type)
    made.graph.value_info.add(name="gone").type.CopyFrom(made.graph.input[1].type)
    for name in ("q", "gone"):
        annotation = made.graph.quantization_annotation.add(tensor_name=name)
        annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    return made


def assert_equal_results(a: onnx.ModelProto, b: onnx.ModelProto, **feed) -> None:
    for x, y in zip(run(a, **feed), run(b, **feed), strict=True):
        np.testing.assert_array_equal(x, y)


def test_names_keep_their_scopes():
    made = scoped_model()
    before = made.SerializeToString()
    renamed = onnx_rename_names(made)
    assert made.SerializeToString() == before
    onnx.checker.check_model(renamed, full_check=True)
    for c in (True, False):
        assert_equal_results(renamed, made, c=np.array(c), **FEED)
    assert onnx_rename_names(renamed) == renamed
    assert (
        onnx_simple_text_plot(renamed, indent=False)
        == """\
opset: domain='' version=18
opset: domain='own' version=1
input: name='r0' type=dtype('float32') shape=('N', 2)
input: name='c' type=dtype('bool') shape=()
input: name='many' type=dtype('int64') shape=()
init: name='i1' type=dtype('float32') shape=(2,) -- array([2., 3.], dtype=float32)
init: name='i2' type=dtype('int64') shape=(1,) -- array([1])
init: name='i3' type=dtype('float32') shape=() -- array([70.], dtype=float32)
Exp(r0) -> r1
Mul(r1, i1) -> r2
own.scaled(r2) -> r3
If(c) -> r4
  then_branch:
    init: name='i4' type=dtype('float32') shape=(2,) -- array([4., 5.], dtype=float32)
    Add(r3, i4) -> r6
    Mul(r6, r1) -> r7
    output: name='r7' type=dtype('float32') shape=('N', 2)
  else_branch:
    Constant(value=[6.0, 7.0]) -> r8
    Sub(r3, r8) -> r9
    If(c) -> r10
      then_branch:
        Mul(r9, r8) -> r11
        output: name='r11' type=dtype('float32') shape=('N', 2)
      else_branch:
        Neg(r9) -> r12
        Add(r12, i1) -> r13
        output: name='r13' type=dtype('float32') shape=('N', 2)
    output: name='r10' type=dtype('float32') shape=('N', 2)
Loop(many, , r4) -> r5
  body:
    input: name='r14' type=dtype('int64') shape=()
    input: name='r15' type=dtype('bool') shape=()
    input: name='r16' type=dtype('float32') shape=('N', 2)
    Identity(r15) -> r17
    Mul(r16, i1) -> r18
    Add(r18, r1) -> r19
    output: name='r17' type=dtype('bool') shape=()
    output: name='r19' type=dtype('float32') shape=('N', 2)
Identity(r5) -> i0
Clip(i0, , i3) -> y
output: name='y' type=dtype('float32') shape=('N', 2)
output: name='i0' type=dtype('float32') shape=('N', 2)
function: own.scaled(r1)
  Constant(value=0.5) -> r0
  Mul(r1, r0) -> r2
  Tanh(r2) -> w
  return w"""
    )


SHARED = """g (float[N] x, bool c) => (float[N] y)
    <float[1] one = {1}, float[1] again = {1}> {
        [first] a = Exp(x)  %s [second] b = Exp(a)  d = LeakyRelu<alpha=0.5>(b)  u = Add(d, one)
        v = Mul(u, again)
        y = If (c) <then_branch = t () => (float[N] r) { r = Exp(v) },
                    else_branch = e () => (float[N] s) { s = LeakyRelu<alpha=0.25>(v) }> }"""


def test_names_by_type():
    """Equal operators and values have equal digests; what is added elsewhere changes no name."""
    made = parse_model(SHARED % "")
    renamed = onnx_rename_names(made, "type")
    onnx.checker.check_model(renamed, full_check=True)
    assert onnx_rename_names(renamed, strategy="type") == renamed
    x = np.float32([-1, 2])
    for c in (True, False):
        assert_equal_results(renamed, made, x=x, c=np.array(c))
    graph = renamed.graph
    first, second, leaky, add, mul, branch = graph.node
    assert re.fullmatch("r0_[0-9A-F]{2}", first.output[0])
    assert second.output[0] == f"{first.output[0]}_2"
    assert (first.name, second.name) == (n := f"n{first.output[0][2:]}", f"{n}_2")
    inner = branch.attribute[0].g.node[0].output[0], branch.attribute[1].g.node[0].output[0]
    assert inner[0] == f"{first.output[0]}_3"
    assert not inner[1].startswith(leaky.output[0])  # another alpha
    assert [t.name for t in graph.initializer] == [add.input[1], mul.input[1]]
    assert mul.input[1] == f"{add.input[1]}_2"
    assert [v.name for v in (*graph.input, *graph.output)] == ["x", "c", "y"]
    more = onnx_rename_names(parse_model(SHARED % "z = Tanh(x)"), "type").graph
    names = [y for node in more.node for y in node.output if node.op_type != "Tanh"]
    assert names == [y for node in graph.node for y in node.output]
    scoped = onnx_rename_names(scoped_model(), "type")
    for c in (True, False):
        assert_equal_results(scoped, scoped_model(), c=np.array(c), **FEED)


def test_a_strategy_that_is_not_known():
    with pytest.raises(ValueError, match=naming("'simpel'", "'simple'")):
        onnx_rename_names(scoped_model(), "simpel")


def test_nodes_and_what_is_said_of_values():
    made = onnx_rename_names(scoped_model()).graph
    assert made.node[0].name == "n0"
    assert [n.name for n in made.node[3].attribute[0].g.node] == ["", "n1"]
    assert [v.name for v in made.value_info] == ["r1"]  # and none that a new name would fit
    [annotation] = made.quantization_annotation
    assert annotation.tensor_name == "r2"
    assert annotation.quant_parameter_tensor_names[0].value == "i1"


def test_a_branch_that_names_its_output_like_the_input():
    """The specification forbids it, exporters did it."""
    made = parse_model("""g (float[N] x, bool c) => (float[N] y) { h = Exp(x)  y = If (c) <
            then_branch = t () => (float[N] x) { k = Abs(h)  x = Neg(k) },
            else_branch = e () => (float[N] y) { y = Identity(h) }> }""")
    renamed = onnx_rename_names(made)
    onnx.checker.check_model(renamed, full_check=True)
    x = np.float32([-1, 2])
    for c, expected in ((True, -np.exp(x)), (False, np.exp(x))):
        np.testing.assert_allclose(run(renamed, x=x, c=np.array(c))[0], expected, rtol=1e-6)


def test_weights_stay_weights():
    """The constants of a loss are no weights, whatever they are called."""
    text = "g (float[N,2] x) => (float[N,2] f) { a = Mul(x, w)  f = Exp(a) }"
    loss = add_loss_output(parse_model(text, w=[2.0, 3.0]), "elastic", output_index="a")
    assert list(get_train_initializer(loss)) == ["w"]
    renamed = onnx_rename_names(loss)
    assert list(get_train_initializer(renamed)) == ["i0"]
    assert loss_info(renamed).prediction == "a"
    assert list(get_train_initializer(onnx_rename_weights(loss))) == ["I0_w"]
    options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
    gradient = onnx_derivative(loss, options=options)
    x, label = np.float32([[1, 2], [3, 4]]), np.float32([[0, 1], [2, 3]])
    assert_equal_results(
        onnx_rename_names(gradient), gradient, x=x, label=label, w=np.float32([1, 2])
    )
    loss.graph.output.pop()  # the prediction is no output any more
    renamed = onnx_rename_names(loss)
    assert loss_info(renamed).prediction in {y for n in renamed.graph.node for y in n.output}


def test_inputs_with_defaults_and_constants_as_outputs():
    made = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 9]>
        g (float[N,2] x, float[2] v) => (float[N,2] y, float[2] u) { y = Mul(x, v) }""")
    add_initializers(made, {name: [4.0, 5.0] for name in "vu"})
    assert onnx_rename_names(made) == made
    renamed = onnx_rename_weights(made)
    assert [x.name for x in renamed.graph.input] == ["x", "I0_v"]
    assert [y.name for y in renamed.graph.output] == ["y", "u"]
    assert list(get_train_initializer(renamed)) == ["I0_v", "I1_u"]
    assert_equal_results(renamed, made, x=np.float32([[1, 2]]))


def test_sequences_sparse_tensors_and_no_names():
    made = parse_model("""g (float[N,2] x) => (float[N,2] p, float[2] d) {
            p = Softmax(x)  _ = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(p)  d = Neg(sparse)
        }""")
    made.graph.node[1].output[0] = "maps"
    maps = made.graph.output.add(name="maps").type.sequence_type.elem_type.map_type
    maps.key_type = onnx.TensorProto.INT64
    maps.value_type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    values = numpy_helper.from_array(np.float32([3]), "sparse")
    places = numpy_helper.from_array(np.int64([1]), "places")
    made.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [2]))
    renamed = onnx_rename_names(made)
    assert renamed.graph.sparse_initializer[0].values.name == renamed.graph.node[2].input[0] == "i0"
    x = np.float32([[1, 2]])
    assert run(renamed, x=x)[2] == run(made, x=x)[2]


def test_a_path_with_external_data(tmp_path):
    made = scoped_model()
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    assert_equal_results(
        onnx_rename_names(tmp_path / "m.onnx"), scoped_model(), c=np.array(True), **FEED
    )


def test_what_cannot_be_renamed():
    made = scoped_model()
    made.graph.node[1].input[1] = "nowhere"
    with pytest.raises(ModelError, match=naming("Mul", "reads 'nowhere'")):
        onnx_rename_names(made)
    made = scoped_model()
    made.training_info.add()
    with pytest.raises(ModelError, match=naming("training_info", "remove the")):
        onnx_rename_names(made)


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 1), (2, 28)])
def test_verbose(caplog, verbose, lines):
    caplog.set_level(logging.WARNING, "onnxgrad")
    caplog.handler.setLevel(logging.NOTSET)
    onnx_rename_names(scoped_model(), verbose=verbose)
    assert len(caplog.records) == lines


WEIGHTS = """g (float[N,2] x, bool c) => (float[N,2] y, float[2] w)
    <float[2] w = {2, 3}, float[2] coef = {1, 2}, int64[1] axes = {1}>
    {
        [w] a = Mul(x, w)
        coef1 = Constant<value = float[2] {4.0, 5.0}>()
        half = Constant<value = float {0.5}>()
        b = Mul(a, coef1)
        l = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0]>(b)
        s = Mul(l, half)
        d = Mul(s, coef)
        y = If (c) <
            then_branch = t () => (float[2] w2) { w2 = Constant<value = float[2] {6.0, 7.0}>() },
            else_branch = e () => (float[N,2] z) {
                k = Constant<value = float[2] {6.0, 7.0}>()  z = Add(d, k) }>
    }"""


def test_weights_in_graph_order():
    made = parse_model(WEIGHTS)
    before = made.SerializeToString()
    renamed = onnx_rename_weights(made)
    assert made.SerializeToString() == before
    onnx.checker.check_model(renamed, full_check=True)
    expected = ["I0_w", "I1_coef", "I2_coef1", "l.coefficients", "I3_w2", "I4_k"]
    found = get_train_initializer(renamed)
    assert list(found) == expected
    for (a, _), (b, _) in zip(found.values(), get_train_initializer(made).values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert renamed.graph.node[0].name == "w"  # a node, not a weight
    assert [y.name for y in renamed.graph.output] == ["y", "w"]
    assert [t.name for t in renamed.graph.initializer][2] == "axes"
    for c in (True, False):
        assert_equal_results(renamed, made, x=np.float32([[1, 2]]), c=np.array(c))


def test_more_than_ten_weights_and_taken_names():
    made = parse_model("""g (float[N] I00_w) => (float[N] y) { y = Sum(I00_w, w) }""")
    names = ["w", *(f"w{i}" for i in range(10))]
    add_initializers(made, {name: [i + 1.0] for i, name in enumerate(names)})
    renamed = onnx_rename_weights(made)
    found = list(get_train_initializer(renamed))
    assert found == sorted(found)
    assert found == ["I00_w_1", *(f"I{i + 1:02d}_w{i}" for i in range(10))]
    assert_equal_results(renamed, made, I00_w=np.float32([1]))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Stochastic Optimizer")
def test_scikit_learn():
    pytest.importorskip("sklearn")
    skl2onnx = pytest.importorskip("skl2onnx")
    from sklearn.neural_network import MLPClassifier

    X = np.random.default_rng(0).random((30, 3), dtype=np.float32)
    fitted = MLPClassifier((4,), max_iter=5, random_state=0).fit(X, X[:, 0] > 0.5)
    made = skl2onnx.to_onnx(fitted, X[:1], target_opset=15)
    renamed = onnx_rename_weights(made)
    names = ["I0_coefficient", "I1_intercepts", "I2_coefficient1", "I3_intercepts1"]
    assert [*get_train_initializer(renamed)][:4] == names
    for other in (renamed, onnx_rename_names(made)):
        old, new = run(made, X=X), run(other, X=X)
        assert new[1] == old[1]
        np.testing.assert_array_equal(new[0], old[0])
