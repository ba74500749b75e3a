"""Models that are broken are refused with one line; those that only look so are taken."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper

from onnxgrad import ModelError, add_loss_output, onnx_derivative, random_feed
from onnxgrad.compat import OrtGradientOptimizer
from onnxgrad.plot import onnx_simple_text_plot
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import run, session_of

PLAIN = "g (float[2] X) => (float[2] Y) <float[2] w = {1, 2}> { Y = Mul(X, w) }"
IF = "g (float[2] X, bool c) => (float[2] Y) { %s Y = If (c) <then_branch=%s, else_branch=%s> %s }"
ELSE = "e () => (float[2] q) { q = Neg(X) }"
LOOP = """g (float[2] X) => (float[2] Y) <int64 n = {2}, bool go = {1}> {
    Y = Loop (n, go, X) <body = b %s => %s { k = Identity(go) o = Add(X, X) }> }"""
SCAN = "g (float[2] X) => (float[2] Y) { Y = Scan <%s body = b %s => (float y) { y = Neg(x) }>(X) }"
FUNCTION = "g (float[2] X) => (float[2] Y) { Y = l.f %s } "


def local_model(text: str) -> ModelProto:
    """Return the model of a text that may call functions of the domain "l"."""
    return parse_model(text, domains={"l": 1})


def function(body: str) -> str:
    return f' <domain: "l", opset_import: ["": 18, "l": 1]> {body}'


BROKEN = {  # model, the message
    "g (float[2] X) => (float[2] Y) { Y = Neg(X) a = Neg(b) b = Neg(a) }": "'a' -> 'b' -> 'a'",
    "g (float[2] X) => (float[2] Y) { Y = Add(X, Y) }": "'Y' -> 'Y'",
    "g (float[2] X) => (float[2] Y) { Y = Add(X, gone) }": "Add .* reads 'gone'",
    "g (float[2] X) => (float[2] Y) { Y = Neg(X) t = Neg(gone) }": "Neg .* reads 'gone'",
    "g (float[2] X) => (float[2] Z) { Y = Neg(X) }": "output 'Z' of the graph is not computed",
    "g (float[2] X) => (float[2] Y) { t = Neg(X) t = Exp(X) Y = Abs(t) }": "Exp .* computes 't'",
    "g (float[2] X) => (float[2] Y) { X = Neg(X) Y = Abs(X) }": "computes 'X', which is the name",
    "g (float[2] X, float[2] X) => (float[2] Y) { Y = Neg(X) }": "input 'X' is declared twice",
    "g (float[2] X) => (float[2] Y) <float[2] w = {1, 2}, float[2] w = {1, 2}> { Y = Mul(X, w) }": (
        "initializer 'w' is declared twice"
    ),
    "g (float[2] X) => (float[2] Y) { Y = Add(X) }": "Add .*input size 1 .*min=2",
    "g (float[2] X) => (float[2] Y) { Y = Neg(X, X) }": "Neg .*input size 2 .*max=1",
    'g (float[2] X) => (float[2] Y) { Y = Add("", X) }': "Add .*'s input 0 .* empty",
    "g (float[2] X) => (float[2] Y) { Y = Cast(X) }": "Cast .*attribute 'to' is missing",
    "g (float[2] X) => (float[2] Y) { Y = Elu <alpha = 2> (X) }": "Elu .*alpha.*'FLOAT'.*'INT'",
    IF % ("", "t () => (float[2] z) { z = Exp(h) h = Neg(X) }", ELSE, ""): "sort the nodes",
    IF % ("", "t (float v) => (float[2] z) { z = Neg(X) }", ELSE, ""): "has 1 inputs.* requires 0",
    IF % ("", "t () => (float[2] z) { z = Neg(gone) }", ELSE, ""): "reads 'gone'",
    IF % ("", "t () => (float[2] z) { z = Neg(Y) }", ELSE, ""): "'Y' -> 'Y'",
    "g (float[2] X, bool c) => (float[2] Y) { Y = If (c) <then_branch = " + ELSE + "> }": (
        "If .*attribute 'else_branch' is missing"
    ),
    LOOP % ("(int64 i, bool c)", "(bool k, float[2] o)"): "body.* has 2 inputs.* requires 3",
    LOOP
    % ("(int64 i, bool c, float[2] x)", "(bool k)"): "body.* 1 outputs.* requires .* 2 outputs",
    SCAN % ("num_scan_inputs = 5,", "(float x)"): "has num_scan_inputs=5",
    SCAN % ("num_scan_inputs = 1,", "(float x, float z)"): "has 2 inputs.* requires 1",
    SCAN % ("", "(float x)"): "Scan .*attribute 'num_scan_inputs' is missing",
    FUNCTION % "(X)" + function("f (a) => (b) { b = l.f(a) }"): "without end: 'f' -> 'f'",
    FUNCTION % "(X)"
    + function("f (a) => (b) { b = l.h(a) }")
    + function("h (a) => (b) { b = l.f(a) }"): "'f' -> 'h' -> 'f'",
    FUNCTION % "(X, X)" + function("f (a) => (b) { b = Neg(a) }"): "2 inputs, and the function",
    FUNCTION % "(X)" + function("f <to> (a) => (b) { b = Cast <to: int = @to> (a) }"): (
        "l::f .* lacks the attribute 'to'"
    ),
    FUNCTION % "(X)" + function("f (a) => (b) { b = Neg(X) }"): "reads 'X'",
    FUNCTION % "(X)" + function("f (a) => (b) { b = Neg(c) c = Neg(a) }"): "sort the nodes",
}


@pytest.mark.parametrize(("text", "message"), BROKEN.items(), ids=BROKEN.values())
def test_broken_models_are_refused(text, message):
    model = local_model(text)
    for door in (onnx_derivative, onnx_simple_text_plot):
        with pytest.raises(ModelError, match=message) as caught:
            door(model)
        assert "\n" not in str(caught.value)
    if "declared twice" not in message:  # onnxruntime is the witness
        with pytest.raises(Exception, match=r"ONNXRuntimeError|Error"):
            session_of(model)


DAMAGE = {
    "initializer 'w' holds fewer data than its shape": lambda m, w: w.dims.__setitem__(0, 3),
    "initializer 'w' holds more data than its shape": lambda m, w: w.dims.__setitem__(0, 1),
    r"initializer 'w' has .* shape \[-2\]": lambda m, w: w.dims.__setitem__(0, -2),
    r"shape \[2, 1099511627776, 1099511627776\]": lambda m, w: w.dims.extend([1 << 40, 1 << 40]),
    "initializer 'w' has the data type 77": lambda m, w: setattr(w, "data_type", 77),
    "an initializer has no name, .*: name it, or remove it": lambda m, w: setattr(w, "name", ""),
    "opset 999 of the domain ''": lambda m, w: setattr(m.opset_import[0], "version", 999),
    "opset 0 of the domain ''": lambda m, w: setattr(m.opset_import[0], "version", 0),
    "opset -1 of the domain ''": lambda m, w: setattr(m.opset_import[0], "version", -1),
    "IR version is 999.*: export the model": lambda m, w: setattr(m, "ir_version", 999),
    "imports no opset: .* export the model again": lambda m, w: m.ClearField("opset_import"),
    "output 'Y'.*'op_type'": lambda m, w: m.graph.node[0].ClearField("op_type"),
    "Neg .*has no output: remove the node": lambda m, w: m.graph.node.add(
        op_type="Neg", input=["X"]
    ),
    "input 'X' has the unknown element type 99": lambda m, w: setattr(
        m.graph.input[0].type.tensor_type, "elem_type", 99
    ),
    r"computes 'a\\nb'|reads 'a\\nb'": lambda m, w: (
        setattr(w, "name", "c") or m.graph.node[0].input.__setitem__(1, "a\nb")
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_refused(message):
    model = local_model(PLAIN)
    DAMAGE[message](model, model.graph.initializer[0])
    with pytest.raises(ModelError, match=message) as caught:
        onnx_derivative(model)
    assert "\n" not in str(caught.value)


def sparse_product(indices: list, dims: list[int]) -> ModelProto:
    model = local_model(PLAIN)
    del model.graph.initializer[:]
    made = model.graph.sparse_initializer.add(dims=dims)
    made.values.CopyFrom(numpy_helper.from_array(np.float32([3]), "w"))
    made.indices.CopyFrom(numpy_helper.from_array(np.array(indices)))
    return model


@pytest.mark.parametrize(
    ("indices", "dims", "message"),
    [
        ([2], [2], r"'w' has an index outside of its shape \[2\]: correct the indices"),
        ([-1], [2], r"'w' has an index outside of its shape \[2\]: correct the indices"),
        ([0, 1], [2], r"'w' has .* indices of shape \[2\]: write values of shape"),
        ([0], [-2], r"'w' has the shape \[-2\], with a negative length: correct the shape"),
        ([0], [3 << 38], r"too many elements .*set_limits\(dense_elements=...\)"),
    ],
)
def test_sparse_constants(indices, dims, message):
    with pytest.raises(ModelError, match=message):
        onnx_derivative(sparse_product(indices, dims))
    onnx_derivative(sparse_product([1], [2]))


def test_unsorted_nodes_are_sorted():
    model = local_model("""g (float[2] X, bool c) => (float[2] Y) { Y = Exp(t)  t = If (c) <
        then_branch = t () => (float[2] z) { z = Neg(h) }, else_branch = e () => (float[2] q)
        { q = Abs(h) }>  h = Mul(X, X) }""")
    before = model.SerializeToString()
    feed = {"X": np.float32([1, 2]), "c": np.array(True)}
    gradient = onnx_derivative(model)
    assert model.SerializeToString() == before
    [found] = run(gradient, feed, Y_grad=np.ones(2, np.float32))
    x = feed["X"]
    np.testing.assert_allclose(found, -2 * x * np.exp(-x * x), rtol=1e-5)


def test_negative_lengths_are_unknown():
    model = parse_model(
        "g (float[N,M] X) => (float[N,1] Y) <float[3,1] W = {1, 2, 3}> { Y = MatMul(X, W) }",
        opset=11,
    )
    for d in (*model.graph.input[0].type.tensor_type.shape.dim,):
        d.dim_value = -1
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = -1
    before = model.SerializeToString()
    assert random_feed(model.graph.input, batch=5, empty_dimension=3)["X"].shape == (5, 3)
    assert "-1" not in onnx_simple_text_plot(model)
    trained = OrtGradientOptimizer(add_loss_output(model), max_iter=1, batch_size=10)
    trained.fit(np.ones((20, 3), np.float32), np.ones((20, 1), np.float32))
    assert model.SerializeToString() == before


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("declared", ["", "shape of unknown rank"])
def test_a_prediction_without_axes_has_a_loss(reduction, declared):
    text = "Y = ReduceMean <keepdims = 0> (t)" if not declared else "Y = Reshape(m, s)"
    inputs = "float[N,3] X, int64[K] s" if declared else "float[N,3] X"
    model = parse_model(f"""g ({inputs}) => (float Y) <float[3,1] W = {{1, 2, 3}}> {{
        t = MatMul(X, W)  m = ReduceMean <keepdims = 0> (t)  {text} }}""")
    if declared:
        model.graph.output[0].type.tensor_type.ClearField("shape")
    with_loss = add_loss_output(model, "squared_error", reduction=reduction)
    feed = {"X": np.ones((4, 3), np.float32), "label": np.array(2, np.float32)}
    if declared:
        feed["s"] = np.zeros(0, np.int64)
    loss, prediction = run(with_loss, feed)
    assert loss.shape == (1, 1)
    assert prediction.shape == ()
    assert loss.item() == 16


# -- at random ---------------------------------------------------------------------------------

SEEDS = [
    local_model(PLAIN),
    local_model(IF % ("h = Abs(X)", "t () => (float[2] z) { z = Mul(h, X) }", ELSE, "")),
    local_model(
        LOOP.replace("X) <body", "X) <body").replace("Add(X, X)", "Add(x, X)")
        % ("(int64 i, bool c, float[2] x)", "(bool k, float[2] o)")
    ),
    local_model(SCAN % ("num_scan_inputs = 1,", "(float x)")),
    local_model(
        FUNCTION % "<alpha = 2.0> (X)"
        + function("f <alpha> (a) => (b) { b = Elu <alpha: float = @alpha> (a) }")
    ),
    sparse_product([1], [2]),
    local_model("""g (float[N,4] X) => (float[N,2] Y)
        <float[4,2] w = {1,2,3,4,5,6,7,8}, int64[2] s = {-1, 2}>
        { t = Gemm <alpha = 0.5> (X, w)  r = Reshape(t, s)  u = Concat <axis = 0> (r, t)
          Y, z = Split <axis = 0, num_outputs = 2> (u) }"""),
    local_model("""g (float[2] X) => (float[2] Y) { e = SequenceEmpty()  f = SequenceInsert(e, X)
          k = Constant <value = float[2] {1, 2}> ()  y = SequenceConstruct(X, k)
          Y = ConcatFromSequence <axis = 0> (f) }"""),
]  # fmt: skip
REFUSED = (ValueError, NotImplementedError)  # ModelError and NoGradientRule are ones of these


def mutate(message, rng: random.Random) -> None:
    """Change one field, somewhere in a protobuf message, in place."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    repeated = hasattr(value, "extend")
    inner = list(value) if repeated else [value]
    if field.message_type and inner and rng.random() < 0.75:
        mutate(rng.choice(inner), rng)
    elif repeated and inner:
        i = rng.randrange(len(inner))
        kind = rng.randrange(3)
        if kind == 0:
            del value[i]
        elif kind == 1:
            value.extend([value[i]])
        elif not field.message_type:
            value[i] = other(inner[i], rng)
    elif field.message_type or rng.random() < 0.3:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, other(value, rng))


def other(value, rng: random.Random):
    if isinstance(value, str):
        return rng.choice(["", "X", "Y", "t", "h", "b", "Neg", "Concat", "a\nb"])
    if isinstance(value, bytes):
        return value[: rng.randrange(len(value) + 1)]
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, float("nan"), 1e30])
    return rng.choice([-1, 0, 1, 2, 3, 7, 9, 77])


def derive_or_refuse(model) -> None:
    """Let a model have a gradient, or be refused with one line."""
    message = ""
    try:
        onnx_derivative(model)
    except REFUSED as e:
        message = str(e)
    assert "\n" not in message


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_models_damaged_at_random(seed):
    rng = random.Random(seed)
    for _ in range(60):
        model = ModelProto()
        model.CopyFrom(SEEDS[seed])
        for _ in range(rng.choice([1, 1, 2, 3])):
            with contextlib.suppress(ValueError, TypeError):  # an enumerator that does not exist
                mutate(model, rng)
        derive_or_refuse(model)
    data = SEEDS[seed].SerializeToString()
    for _ in range(40):
        i = rng.randrange(len(data))
        changed = data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :]
        derive_or_refuse(changed)


@pytest.mark.parametrize("name", ["to", ""])
def test_attributes_twice_or_without_a_name_are_refused(name):
    model = parse_model("g (float[2] X) => (float[2] Y) { Y = Cast <to = 1> (X) }")
    attribute = model.graph.node[0].attribute.add()
    attribute.CopyFrom(model.graph.node[0].attribute[0])
    attribute.name = name
    with pytest.raises(ModelError, match=naming("Cast", "attribute")):
        onnx_derivative(model)
