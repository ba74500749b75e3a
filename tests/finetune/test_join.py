"""Backbones that are cut from a model, and models that are joined, against numpy."""

from itertools import product

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.finetune.heads import CLASSES
from onnxgrad.model import external
from onnxgrad.model.notes import HEAD, read_adapters, read_metadata
from tests.support.errors import naming
from tests.support.models import initializer_arrays, operator_names, parse_model
from tests.support.running import in_sweep, run, run_named

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=(4, 3)).astype(np.float32)
V = RNG.normal(size=(3, 2)).astype(np.float32)
B = RNG.normal(size=3).astype(np.float32)
IMAGES = RNG.normal(size=(2, 4, 3, 3)).astype(np.float32)
K = RNG.normal(size=(3, 4, 1, 1)).astype(np.float32)


def value_names(values):
    return [v.name for v in values]


def test_features():
    text = """f (float[N,4,H,W] x) => (float[N,3] y) {
        r = Relu(x) h = Conv(r, k, b) p = GlobalAveragePool(h) y = Flatten(p) }"""
    model = parse_model(text, k=K, b=B)
    for at in (None, "k", "r"):
        part = og.graph.features(model, at)
        onnx.checker.check_model(part, full_check=True)
        assert value_names(part.graph.output) == ["r"]
        np.testing.assert_array_equal(run(part, x=IMAGES)[0], np.maximum(IMAGES, 0))
        assert not part.graph.initializer
    assert value_names(og.graph.features(model, "h").graph.output) == ["h"]
    with pytest.raises(ValueError, match=r"Unknown .*'nothing'"):
        og.graph.features(model, "nothing")


def test_features_of_one_output():
    two = """f (float[N,4] x, float[N,4] z) => (float[N,3] y, float[N,3] q) {
        a = Relu(x) y = MatMul(a, w) c = Tanh(z) q = MatMul(c, w) }"""
    part = og.graph.features(parse_model(two, w=W), output="q")
    assert value_names(part.graph.input) == ["z"]
    np.testing.assert_allclose(run(part, z=X)[0], np.tanh(X), rtol=1e-6)


BODY = "body (float[N,4] x) => (float[N,3] h) { a = Relu(x) h = MatMul(a, w) }"
EXPECTED = np.maximum(X, 0) @ W


def test_attach_renames_what_clashes():
    """Equal names of weights, values and nodes in both models are different tensors."""
    head = parse_model(
        "head (float[N,3] h) => (float[N,2] a) { q = Tanh(h) x = Identity(q) a = MatMul(x, w) }",
        w=V,
    )
    body = parse_model(BODY, w=W)
    head.graph.node[0].name = body.graph.node[0].name = "node"
    copies = [m.SerializeToString() for m in (body, head)]
    joined = og.attach(body, head)
    assert copies == [m.SerializeToString() for m in (body, head)]
    onnx.checker.check_model(joined, full_check=True)
    assert (value_names(joined.graph.input), value_names(joined.graph.output)) == (["x"], ["a"])
    assert len({node.name for node in joined.graph.node if node.name}) == 2
    np.testing.assert_allclose(run(joined, x=X)[0], np.tanh(EXPECTED) @ V, rtol=1e-5)


@pytest.mark.parametrize(("opset", "ir_version"), [(9, 3), (13, 7), (21, 10)])
def test_attach_other_opsets(opset, ir_version):
    text = "head (float[N,3] s) => (float[N,3] p) { p = Softmax(s) }"
    head = parse_model(text, opset=opset, ir_version=ir_version)
    joined = og.attach(parse_model(BODY, w=W), head)
    assert joined.opset_import[0].version == max(opset, 18)
    e = np.exp(EXPECTED)
    np.testing.assert_allclose(run(joined, x=X)[0], e / e.sum(1, keepdims=True), rtol=1e-5)


def test_attach_local_functions():
    """Functions of one name in both models are two functions."""
    function = '<opset_import: ["": 18], domain: "local"> f (x) => (y) {{ y = {}(x) }}'
    body = parse_model(
        f"body (float[N,4] x) => (float[N,4] h) {{ h = local.f(x) }} {function.format('Exp')}"
    )
    head = parse_model(
        f"head (float[N,4] h) => (float[N,4] y) {{ y = local.f(h) }} {function.format('Neg')}"
    )
    np.testing.assert_allclose(run(og.attach(body, head), x=X)[0], -np.exp(X), rtol=1e-6)


def test_attach_keeps_other_outputs_and_inputs():
    body = parse_model(
        """body (float[N,4] x, float[N,1] m) => (float[N,3] h, float[N,4] a) {
        z = Mul(x, m) a = Relu(z) h = MatMul(a, w) }""",
        w=W,
    )
    head = parse_model("""head (float[N,3] h, float[N,1] m, float[N,1] t) => (float[N,3] y) {
        s = Mul(h, m) y = Add(s, t) }""")
    joined = og.attach(body, head)
    assert value_names(joined.graph.input) == ["x", "m", "t"]
    assert value_names(joined.graph.output) == ["y", "a"]
    m, t = (RNG.normal(size=(6, 1)).astype(np.float32) for _ in range(2))
    results = run_named(joined, x=X, m=m, t=t)
    np.testing.assert_allclose(results["a"], np.maximum(X * m, 0), rtol=1e-6)
    np.testing.assert_allclose(results["y"], results["a"] @ W * m + t, rtol=1e-5, atol=1e-6)


def test_attach_keeps_the_adapters_of_both():
    """Also where their names are the same; merged, both are what each was by itself."""
    body = og.add_lora(parse_model(BODY, w=W), ["w"], rank=2)
    head = og.add_lora(
        parse_model("head (float[N,3] h) => (float[N,2] y) { y = MatMul(h, w) }", w=V), ["w"]
    )
    parts = []
    for part in (body, head):
        adapters = [name for a in read_adapters(part) for name in a["tensors"]]
        shapes = {t.name: tuple(t.dims) for t in part.graph.initializer}
        values = {name: RNG.normal(size=shapes[name]) for name in adapters}
        parts.append(og.graph.replace_initializers_into_onnx(part, values))
    joined = og.attach(*parts)
    trained = {t.name for t in og.trainable(joined).trained}
    assert len(trained) == 4
    assert trained == {name for a in read_adapters(joined) for name in a["tensors"]}
    [h] = run(parts[0], x=X)
    [expected] = run(parts[1], h=h)
    for model in (joined, og.merge_lora(joined)):
        np.testing.assert_allclose(run_named(model, x=X)["y"], expected, rtol=1e-4, atol=1e-4)


def test_attach_values_of_subgraphs():
    head = parse_model("""head (float[N,3] h, bool c) => (float[N,3] y) {
        y = If(c) <then_branch = g () => (float[N,3] r) { a = Neg(h) r = Exp(a) },
                   else_branch = k () => (float[N,3] s) { s = Identity(h) }> }""")
    joined = og.attach(parse_model(BODY, w=W), head)
    [y] = run(joined, x=X, c=np.array(True))
    np.testing.assert_allclose(y, np.exp(-EXPECTED), rtol=1e-5)


def test_attach_by_mapping():
    """Any value of the backbone may be named."""
    head = parse_model("head (float[N,4] t) => (float[N,4] y) { y = Tanh(t) }")
    joined = og.attach(parse_model(BODY, w=W), head, {"a": "t"})
    assert value_names(joined.graph.output) == ["y", "h"]
    np.testing.assert_allclose(run_named(joined, x=X)["y"], np.tanh(np.maximum(X, 0)), rtol=1e-5)


def test_attach_inputs_of_one_name_that_are_two():
    """An encoder and a decoder both read token ids, of other lengths."""
    table = RNG.normal(size=(5, 2)).astype(np.float32)
    encoder = parse_model(
        "e (int64[batch,source] ids) => (float[batch,source,2] hidden) { hidden = Gather(t, ids) }",
        t=table,
    )
    decoder = parse_model(
        """d (int64[rows,target] ids, float[rows,source,2] hidden) => (float[rows,target,2] y) {
        e = Gather(t, ids) m = ReduceMean<keepdims=1>(hidden, one) y = Add(e, m) }""",
        t=table,
        one=np.array([1]),
    )
    with pytest.raises(ValueError, match=r"'ids'.*\['batch', 'source'\].*'target'.*rename="):
        og.attach(encoder, decoder)
    joined = og.attach(encoder, decoder, rename={"ids": "decoder_ids"})
    assert value_names(joined.graph.input) == ["ids", "decoder_ids"]
    shape = joined.graph.input[1].type.tensor_type.shape
    assert [d.dim_param for d in shape.dim] == ["batch", "target"]
    source, target = RNG.integers(0, 5, (3, 4)), RNG.integers(0, 5, (3, 2))
    [y] = run(joined, ids=source, decoder_ids=target)
    np.testing.assert_allclose(y, table[target] + table[source].mean(1, keepdims=True), rtol=1e-5)
    one = og.attach(encoder, decoder, rename={"ids": "ids"})
    assert value_names(one.graph.input) == ["ids"]
    [y] = run(one, ids=source)
    np.testing.assert_allclose(y, table[source] + table[source].mean(1, keepdims=True), rtol=1e-5)
    same = parse_model("d (float[b,s,2] hidden, int64[b,s] ids) => (int64[b,s] y) { y = Neg(ids) }")
    assert value_names(og.attach(encoder, same).graph.input) == [
        "ids"
    ]  # its symbols are those of hidden
    for rename, message in (
        ({"hidden": "z"}, "mapping feeds"),
        ({"e": "z"}, "Unknown input of the head .*'e'"),
        ({"ids": "e"}, "choose another name"),
    ):
        with pytest.raises(ValueError, match=message):
            og.attach(encoder, decoder, rename=rename)
    masked = parse_model(
        "d (float[b,s,2] hidden, bool[b] p, bool[b] q) => (bool[b] y) { y = And(p, q) }"
    )
    with pytest.raises(ValueError, match=naming("rename=", "same name", "choose")):
        og.attach(encoder, masked, rename={"p": "r", "q": "r"})


def test_attach_inputs_of_one_name_whose_lengths_are_not_stated(caplog):
    encoder = parse_model("e (int64[b,s] ids) => (float[b,s] h) { h = Cast<to=1>(ids) }")
    decoder = (
        "d (int64[{}] ids, float[b,s] h) => (float[b,s] y) {{ c = Cast<to=1>(ids) y = Add(h, c) }}"
    )
    unnamed = parse_model("d (int64[?] ids, int64[?] h) => (int64[?] y) { y = Add(h, ids) }")
    with pytest.raises(
        ValueError, match=r"'ids'.*\['b', 's'\] and \['b', 7\].*rename=\{'ids': 'ids'\}"
    ):
        og.attach(encoder, parse_model(decoder.format("b,7")))
    with caplog.at_level("WARNING", "onnxgrad"):
        assert value_names(og.attach(encoder, parse_model(decoder.format("b,s"))).graph.input) == [
            "ids"
        ]
        assert not caplog.text
        assert value_names(og.attach(encoder, parse_model(decoder.format("b,?"))).graph.input) == [
            "ids"
        ]
        og.attach(parse_model("e (int64[?] ids) => (int64[?] h) { h = Neg(ids) }"), unnamed)
    assert ["'ids'" in record.getMessage() for record in caplog.records] == [True, True]
    caplog.clear()
    og.attach(encoder, parse_model(decoder.format("b,?")), rename={"ids": "ids"})
    assert not caplog.text


REFUSED = {
    "other shape": ("(float[N,2] h) => (float[N,2] y)", None, r"shape \[.*3\].*\[.*2\]"),
    "other dtype": ("(double[N,3] h) => (double[N,3] y)", None, "holds FLOAT.*DOUBLE"),
    "no name": ("(float[N,3] s, float[N,3] t) => (float[N,3] y)", None, "pass mapping"),
    "unknown value": ("(float[N,3] h) => (float[N,3] y)", {"g": "h"}, "Unknown output .*'g'"),
    "unknown input": ("(float[N,3] h) => (float[N,3] y)", {"h": "g"}, "Unknown input .*'g'"),
    "an input twice": ("(float[N,3] h) => (float[N,3] y)", {"h": "h", "a": "h"}, "'h'.* twice"),
    "inputs that differ": ("(float[N,3] h, int64[N] x) => (float[N,3] y)", None, "'x'.*rename="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_attach_refuses(name):
    signature, mapping, message = REFUSED[name]
    first = signature[1:].split()[1].strip(",)")
    head = parse_model(f"head {signature} {{ y = Identity({first}) }}")
    with pytest.raises((ValueError, og.ModelError), match=message):
        og.attach(parse_model(BODY, w=W), head, mapping)


def test_a_head_that_is_attached_trains():
    """A backbone that is cut, and a head of one's own, train as one model."""
    model = parse_model(
        "f (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Softmax(h) }", w=W
    )
    body = og.graph.features(og.replace_head(model, 3), "h")
    head = parse_model(
        "head (float[N,3] h) => (float[N,2] p) { s = MatMul(h, v) p = Softmax(s) }", v=V
    )
    joined = og.attach(body, head)
    assert read_metadata(joined, HEAD) == ["head.weight"]
    labels = (X[:, 0] > 0).astype(np.int64)
    trainer = og.Trainer(joined, "cross_entropy", train=["v"], learning_rate=0.1)
    trainer.fit(X, labels, epochs=30)
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]


POOLS = ("mean", "masked", "first", "image", None)
BY_OPSET = [*((pool, 20) for pool in POOLS), ("mean", 11), ("masked", 13)]
MORE_OPSETS = [c for c in product(POOLS, (11, 13)) if c not in BY_OPSET]


@pytest.mark.parametrize(("pool", "opset"), [*BY_OPSET, *(in_sweep(*c) for c in MORE_OPSETS)])
def test_add_head(pool, opset):
    """A layer behind a value of any shape, in the symbols of the backbone."""
    shape = {"image": "4,H,W", None: "4"}.get(pool, "T,4")
    body = parse_model(
        f"f (float[B,{shape}] x, int64[B,T] m) => (float[B,{shape}] y) {{ y = Tanh(x) }}"
    )
    body.opset_import[0].version = opset
    name = "mean" if pool == "masked" else pool
    mask = "m" if pool == "masked" else None
    joined = og.add_head(body, 5, pool=name, mask=mask, activation="softmax", seed=3)
    onnx.checker.check_model(joined, full_check=True)
    [y] = joined.graph.output
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["B", 5]
    sizes = {"image": (2, 4, 3, 3), None: (2, 4)}.get(pool, (2, 3, 4))
    feed = {"x": RNG.normal(size=sizes).astype(np.float32), "m": np.int64([[1, 1, 0], [0, 0, 0]])}
    t, counted = np.tanh(feed["x"]), feed["m"][..., None]
    pooled = {
        "mean": lambda: t.mean(1),
        "masked": lambda: (t * counted).sum(1) / np.maximum(counted.sum(1), 1),
        "first": lambda: t[:, 0],
        "image": lambda: t.mean((2, 3)),
        None: lambda: t,
    }[pool]()
    w = initializer_arrays(joined)["head.weight"]
    e = np.exp(pooled @ w)
    [p] = run(joined, **{x.name: feed[x.name] for x in joined.graph.input})
    np.testing.assert_allclose(p, e / e.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("pool", "opset"), [(None, 13), ("mean", 20), in_sweep(None, 20), in_sweep("mean", 13)]
)
def test_add_head_of_cosines(pool, opset):
    axes = "B,T,4" if pool else "B,4"
    body = parse_model(f"f (float[{axes}] x) => (float[{axes}] y) {{ y = Tanh(x) }}")
    body.opset_import[0].version = opset
    joined = og.add_head(body, 5, pool=pool, cosine=True, seed=3)
    onnx.checker.check_model(joined, full_check=True)
    [y] = joined.graph.output
    assert (y.name, read_metadata(joined, HEAD)) == ("cosines", ["head.weight"])
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["B", 5]
    x = RNG.normal(size=(3, 2, 4) if pool else (3, 4)).astype(np.float32)
    t = np.tanh(x).mean(1) if pool else np.tanh(x)
    w = initializer_arrays(joined)["head.weight"]
    expected = t @ w / np.linalg.norm(t, axis=1)[:, None] / np.linalg.norm(w, axis=0)
    np.testing.assert_allclose(run(joined, x=x)[0], expected, rtol=1e-5)
    trainer = og.Trainer(joined, "arcface", learning_rate=0.01).fit(x, [0, 1, 2], epochs=2)
    assert list(trainer.state.weights) == ["head.weight"]


@pytest.mark.parametrize("mask", [None, "m"])
def test_pool_without_a_layer(mask):
    body = parse_model("f (float[B,T,4] x, int64[B,T] m) => (float[B,T,4] y) { y = Tanh(x) }")
    joined = og.add_head(body, None, pool="mean", mask=mask)
    onnx.checker.check_model(joined, full_check=True)
    [y] = joined.graph.output
    assert y.name == "features"
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == ["B", 4]
    feed = {"x": RNG.normal(size=(2, 3, 4)).astype(np.float32), "m": np.int64([[1, 0, 0]] * 2)}
    expected = np.tanh(feed["x"])[:, 0] if mask else np.tanh(feed["x"]).mean(1)
    found = run(joined, **{x.name: feed[x.name] for x in joined.graph.input})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_add_head_refuses():
    body = parse_model("f (float[B,T,4] x) => (float[B,T,4] y) { y = Tanh(x) }")
    for arguments, message in (
        ({"units": None}, "units=None.*pool"),
        ({"units": None, "pool": "mean", "cosine": True}, "units=None.*pass pool= alone"),
        ({"units": None, "pool": "mean", "activation": "softmax"}, "units=None.*activation"),
        ({"units": 3, "cosine": True, "activation": "softmax"}, "cosine=True.*activation"),
    ):
        with pytest.raises(ValueError, match=message):
            og.add_head(body, **arguments)


def test_add_head_is_not_put_on_probabilities():
    body = parse_model("f (float[N,2] x) => (float[N,2] p) { p = Softmax(x) }")
    with pytest.raises(ValueError, match="'p' holds probabilities: replace_head"):
        og.add_head(body, 5)
    assert og.add_head(body, 5, at="p").graph.output[0].name == "logits"


def test_add_head_names_the_features_in_front_of_predictions():
    text = "f (float[N,2] x) => ({}[N{}] y) {{ r = Relu(x) h = MatMul(r, w) y = {}(h) }}"
    for dtype, rest, last, holds in (
        ("int64", "", "ArgMax<axis=1, keepdims=0>", "integers"),
        ("float", ",3", "Softmax", "probabilities"),
    ):
        body = parse_model(text.format(dtype, rest, last), w=np.ones((2, 3), np.float32))
        with pytest.raises(ValueError, match=naming("'y'", holds, "replace_head", "at='r'")):
            og.add_head(body, 5)


def test_add_head_of_classes():
    """Behind a value in the middle; what only other outputs need is removed."""
    body = parse_model(
        "f (double[N,2] x, double[N,2] z) => (double[N,2] y, double[N,2] u) "
        "{ h = Tanh(x) y = Exp(h) u = Exp(z) }"
    )
    head = og.add_head(body, ["a", "b"], at="h", name="top")
    assert read_metadata(head, HEAD) == ["top.weight", "top.bias"]
    assert read_metadata(head, CLASSES) == ["a", "b"]
    assert operator_names(head) == ["Tanh", "MatMul", "Add"]
    assert [x.name for x in head.graph.input] == ["x"]
    assert run(head, x=np.ones((3, 2)))[0].dtype == np.float64
    for arguments, message in (
        ({}, r"has the outputs \['y', 'u'\]: name the features with at="),
        ({"at": "g"}, "Unknown value"),
        ({"at": "h", "pool": "max"}, "Unknown pool"),
        ({"at": "h", "pool": "image"}, "pool='image' needs 4 axes"),
        ({"at": "h", "mask": "m"}, "mask='m' .*pass pool='mean'"),
        ({"at": "h", "activation": "same"}, "Unknown activation"),
        ({"at": "h", "activation": "tanh"}, "Unknown activation"),
    ):
        with pytest.raises(ValueError, match=message):
            og.add_head(body, 2, **arguments)


def test_tensors_in_files_stay_there(tmp_path, monkeypatch):
    """Of a model beyond 1 GB, only the new tensors are in memory."""
    model = parse_model(
        BODY.replace("h = MatMul", "g = MatMul(a, big) h = MatMul").replace("(a, w)", "(g, w)"),
        w=W,
        big=np.eye(4, dtype=np.float32),
    )
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0)
    monkeypatch.setattr(external, "IN_MODEL", 0)
    monkeypatch.setattr(external, "SMALL", 0)
    changed = og.replace_head(path, 5)
    stored = {t.name: t.data_location for t in changed.graph.initializer}
    assert stored == {"big": onnx.TensorProto.EXTERNAL, "head.weight": onnx.TensorProto.DEFAULT}
    w = numpy_helper.to_array(changed.graph.initializer[-1])
    og.save(changed, tmp_path / "new.onnx")
    [y] = run(tmp_path / "new.onnx", x=X)
    np.testing.assert_allclose(y, np.maximum(X, 0) @ w, rtol=1e-5)
    head = parse_model("head (float[N,5] h) => (float[N,5] y) { y = Neg(h) }")
    joined = og.attach(og.graph.features(tmp_path / "new.onnx", "h"), head)
    assert {t.name for t in joined.graph.initializer if t.data_location} == {"big", "head.weight"}
