"""Readable names of weights that exporters number, and choosing weights by names and patterns."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from onnxgrad.model import notes
from onnxgrad.training.parameters.aliases import aliases
from onnxgrad.training.parameters.choice import matching_weights
from tests.support.errors import naming
from tests.support.models import add_initializers, initializer_arrays, parse_model

RNG = np.random.default_rng(0)
TWO_LAYERS = """f (float[N, 3] x) => (float[N, 2] y) {
    a = MatMul(x, A) b = Add(a, B) c = Relu(b) d = Mul(c, half) e = MatMul(d, C) y = Add(e, D) }"""
SHAPES = {"A": (3, 4), "B": (4,), "C": (4, 2), "D": (2,), "half": ()}


def model_of_letters(text=TWO_LAYERS, nodes=(), names=None, shapes=SHAPES) -> onnx.ModelProto:
    """Return a model of random weights, with names of nodes, and of weights by their letters."""
    names, proto = names or {}, parse_model(text, opset=20)
    for node, name in zip(proto.graph.node, nodes, strict=False):
        node.name = name
    for node in proto.graph.node:
        node.input[:] = [names.get(x, x) for x in node.input]
    arrays = {k: np.full(s, 0.5) if k == "half" else RNG.normal(size=s) for k, s in shapes.items()}
    add_initializers(proto, {names.get(k, k): a.astype(np.float32) for k, a in arrays.items()})
    return proto


def torchscript_layers() -> onnx.ModelProto:
    """Return two layers as PyTorch's TorchScript exporter writes them."""
    nodes = "/enc/enc.0/MatMul /enc/enc.0/Add /Relu /enc/Mul /head/MatMul /head/Add".split()
    names = {"A": "onnx::MatMul_7", "B": "enc.0.bias", "C": "onnx::MatMul_8", "D": "head.bias"}
    return model_of_letters(nodes=nodes, names=names | {"half": "/enc/Constant_output_0"})


def trained_in_order(rows) -> list[str]:
    return [t.name for t in rows if t.trains]


KERAS = [
    "StatefulPartitionedCall/net/dense/MatMul", "StatefulPartitionedCall/net/dense/BiasAdd",
    "relu", "half", "net/dense_1/Tensordot/MatMul", "net/dense_1/BiasAdd",
]  # fmt: skip
READ = "StatefulPartitionedCall/net/dense/{}/ReadVariableOp:0"
FORMS = {
    "TorchScript": (
        ["/a/MatMul", "/a/Add", "/Relu", "/Mul", "/b/b.1/fc/MatMul", "/b/b.1/fc/Add"],
        {"A": "onnx::MatMul_1", "B": "a.bias", "C": "onnx::MatMul_2", "D": "onnx::Add_3"},
        {"A": "a.weight", "C": "b.1.fc.weight", "D": "b.1.fc.bias"},
    ),
    "a path without a module that a method of another one called": (
        ["/a/MatMul", "/a/Add", "/Relu", "/Mul", "/proj/MatMul", "/proj/Add"],
        {"A": "onnx::MatMul_1", "B": "x.a.bias", "C": "onnx::MatMul_2", "D": "x.attn.proj.bias"},
        {"A": "x.a.weight", "C": "x.attn.proj.weight"},
    ),
    "optimized by onnxruntime": (
        ["/a/MatMul/MatMulAddFusion", "/a/Add_token_3", "", "", "/b/MatMul", "/b/Add"],
        {"A": "onnx::MatMul_1_transposed", "B": "onnx::Add_2_token_7", "C": "val_3_merged"},
        {"A": "a.weight", "B": "a.bias", "C": "b.weight"},
    ),
    "old PyTorch, numbers": (
        ["MatMul_0", "Add_1", "Relu_2", "Mul_3", "MatMul_4", "Add_5"],
        {"A": "12", "B": "fc1.bias", "C": "13", "D": "14"},
        {"A": "fc1.weight", "C": "MatMul_4.weight"},
    ),
    "Keras": (
        KERAS,
        {"A": READ.format("MatMul"), "B": READ.format("BiasAdd"), "C": "const_fold_opt__77"},
        {"A": "net.dense.weight", "B": "net.dense.bias", "C": "net.dense_1.weight"},
    ),
    "Paddle": (
        ["p2o.MatMul.0", "p2o.Add.0", "p2o.Relu.0", "p2o.Mul.0", "p2o.MatMul.1", "p2o.Add.1"],
        {"A": "linear_0.w_0", "B": "linear_0.b_0", "C": "linear_1.w_0", "D": "linear_1.b_0"},
        {"A": "linear_0.weight", "B": "linear_0.bias",
         "C": "linear_1.weight", "D": "linear_1.bias"},
    ),
    "readable names": (["/a/MatMul"], {"A": "a.weight", "C": "head/kernel:0"}, {}),
    "nodes without names": ([], {"A": "onnx::MatMul_1", "C": "val_2"}, {}),
    "taken by another tensor": (
        ["/a/MatMul", "/a/Add", "/Relu", "/Mul", "/a/MatMul_1", "/a/Add_1"],
        {"A": "onnx::MatMul_1", "B": "a.weight", "C": "onnx::MatMul_2"},
        {"A": "a.weight_1", "C": "a.weight_2"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_exporters(form):
    nodes, names, expected = FORMS[form]
    assert aliases(model_of_letters(nodes=nodes, names=names)) == {
        names[k]: v for k, v in expected.items()
    }


@pytest.mark.parametrize("copied", [False, True])
def test_a_bias_that_was_stored_once_for_several_layers(copied):
    """TorchScript's copies have names; a bias that layers share names neither of them."""
    text = """f (float[N,3] x) => (float[N,3] y) { k = Identity(B) a = MatMul(x, A) b = Add(a, B)
        c = MatMul(b, C) y = Add(c, k) }"""
    names = {"A": "onnx::MatMul_1", "B": "m.q.bias", "C": "onnx::MatMul_2"}
    nodes = ["Identity_1", "/q/MatMul", "/q/Add", "/k/MatMul", "/k/Add"]
    shapes = {"A": (3, 3), "B": (3,), "C": (3, 3)}
    proto = model_of_letters(text, nodes, names, shapes)
    proto.graph.node[0].output[0] = proto.graph.node[4].input[1] = "m.k.bias"
    if not copied:
        del proto.graph.node[0]
        proto.graph.node[3].input[1] = "m.q.bias"
    second = "m.k.weight" if copied else "k.weight"
    assert aliases(proto) == {"onnx::MatMul_1": "q.weight", "onnx::MatMul_2": second}


def test_metadata_of_the_exporter():
    proto = model_of_letters(
        names={"A": "val_1", "B": "val_2", "C": "val_3", "D": "block.mlp.fc_2.bias"}
    )
    calls = {
        0: ("['', 'block', 'block.attn', 'linear']", "%p_block_attn_in_proj_weight"),
        4: ("['', 'block', 'linear_1']", "%p_block_mlp_fc_2_weight, %p_block_mlp_fc_2_bias"),
    }
    for i, (scopes, parameters) in calls.items():
        note = f"%y : call_function[target=aten.linear](args = (%x, {parameters}))"
        proto.graph.node[i].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
        proto.graph.node[i].metadata_props.add(key="pkg.torch.onnx.fx_node", value=note)
    space = ": Net/block: Block/block.attn: Attention/linear: aten.linear"
    proto.graph.node[1].metadata_props.add(key="namespace", value=space)
    assert aliases(proto) == {
        "val_1": "block.attn.in_proj_weight",
        "val_2": "block.attn.bias",
        "val_3": "block.mlp.fc_2.weight",
    }


def test_patterns_choose_among_weights():
    proto = torchscript_layers()
    half = "/enc/Constant_output_0"
    assert trained_in_order(og.trainable(proto, "*enc*")) == ["onnx::MatMul_7", "enc.0.bias"]
    assert trained_in_order(og.trainable(proto, ["*enc*", half], freeze="*bias")) == [
        "onnx::MatMul_7", half,
    ]  # fmt: skip
    assert trained_in_order(og.trainable(proto, "*Constant*")) == [half]
    assert matching_weights(proto, ["head.weight", "enc.*"], "x") == [
        "onnx::MatMul_7", "enc.0.bias", "onnx::MatMul_8",
    ]  # fmt: skip


def test_a_name_counts_before_an_alias():
    names = {"A": "onnx::MatMul_7", "B": "a.bias", "C": "a[0]", "D": "a0"}
    proto = model_of_letters(nodes=["/a/MatMul", "/a/Add"], names=names)
    assert matching_weights(proto, "a[0]", "x") == ["a[0]"]  # not the pattern
    assert matching_weights(proto, "a[.]weight", "x") == ["onnx::MatMul_7"]


def test_why_follows_from_the_arguments():
    rows = og.trainable(torchscript_layers(), train=["head.*", "*weight"], freeze="head.bias")
    why = {t.alias or t.name: t.why for t in rows}
    assert why["head.weight"].startswith("named by train='head.*'; factor of MatMul")
    assert why["enc.0.weight"].startswith("named by train='*weight'")
    assert why["head.bias"].startswith("frozen by freeze='head.bias'")
    assert why["enc.0.bias"].startswith("not named by train=; bias behind")
    assert why["/enc/Constant_output_0"].startswith("a single number")
    assert rows.trained + rows.frozen != rows
    assert {t.name for t in rows.trained} == {"onnx::MatMul_7", "onnx::MatMul_8"}
    head = og.trainable(torchscript_layers(), pattern="head.*")
    assert [t.name for t in head] == ["onnx::MatMul_8", "head.bias"]
    lines = str(head[:1]).splitlines()
    assert lines[0].split() == ["name", "alias", "shape", "dtype", "trains", "why"]
    assert lines[1].split()[:2] == ["onnx::MatMul_8", "head.weight"]
    assert lines[-1] == "1 of 1 float constants train: 8 of 8 numbers"


def test_long_names_are_shortened():
    proto = model_of_letters(names={"A": "first" + "x" * 300 + "last"})
    assert max(map(len, str(og.trainable(proto)).splitlines())) < 300
    assert "firstx" in str(og.trainable(proto))
    assert "xlast " in str(og.trainable(proto))


@pytest.mark.parametrize(
    ("pattern", "close"), [("*hed*", "head.weight"), ("enc.0.weigt", "enc.0.weight"), ("Head", "")]
)
@pytest.mark.parametrize("argument", ["train", "freeze", "pattern"])
def test_an_unmatched_pattern_lists_close_names(argument, pattern, close):
    with pytest.raises(ValueError, match=rf"{argument}=.*{close}") as error:
        og.trainable(torchscript_layers(), **{argument: pattern})
    assert repr(pattern) in str(error.value)


def test_every_trainer_takes_patterns_and_aliases():
    proto = torchscript_layers()
    expected = ["onnx::MatMul_8", "head.bias"]
    x = RNG.normal(size=(20, 3)).astype(np.float32)
    y = RNG.normal(size=(20, 2)).astype(np.float32)
    before = initializer_arrays(proto)

    def moved(result):
        after = initializer_arrays(result)
        return [n for n in before if not np.array_equal(before[n], after[n])]

    trainer = og.Trainer(proto, "squared_error", train="*", freeze=["enc.*"])
    assert trainer.trained == expected
    assert moved(trainer.fit(x, y).model) == expected
    outside = og.compat.OrtGradientForwardBackwardOptimizer(proto, ["head.*"], max_iter=1).fit(x, y)
    assert moved(outside.get_trained_onnx()) == expected
    with_loss = og.add_loss_output(proto)
    inside = og.compat.OrtGradientOptimizer(with_loss, ["head.bias", "*.weight"], max_iter=1).fit(
        x, y
    )
    assert [*inside.trained_coef_] == ["head.bias", "onnx::MatMul_7", "onnx::MatMul_8"]
    passes = og.compat.OrtGradientForwardBackward(proto, ["head.weight", "enc.0.bias"])
    assert passes.weights_to_train == ["onnx::MatMul_8", "enc.0.bias"]
    with pytest.raises(ValueError, match=naming("'hed.weight'", "'head.weight'")):
        og.compat.OrtGradientOptimizer(with_loss, ["hed.weight"]).fit(x, y)
    with pytest.raises(ValueError, match=naming("'head.*'", "'*'", "not frozen")):
        og.Trainer(proto, "squared_error", train="head.*", freeze="*")


def test_module_takes_patterns_and_aliases():
    pytest.importorskip("torch")
    from onnxgrad.torch import OnnxModule

    chosen = OnnxModule(torchscript_layers(), trainable=["head.*", "enc.0.weight"], freeze="*bias")
    assert [*chosen.weight_names] == ["onnx::MatMul_8", "onnx::MatMul_7"]
    with pytest.raises(ValueError, match=naming("freeze=", "'head.weight'")):
        OnnxModule(torchscript_layers(), freeze="hed.*")


def test_adapters_train_by_default_and_the_head_beside_them():
    proto = torchscript_layers()
    notes.write_metadata(proto, notes.HEAD, ["head.bias"])
    assert trained_in_order(og.trainable(proto)) == trained_in_order(
        og.trainable(torchscript_layers())
    )
    notes.write_metadata(proto, notes.ADAPTERS, [{"tensors": ["enc.0.bias"]}])
    rows = og.trainable(proto)
    assert trained_in_order(rows) == ["enc.0.bias", "head.bias"]
    why = {t.name: t.why for t in rows}
    assert why["enc.0.bias"] == "an adapter"
    assert why["head.bias"] == "the new head beside adapters"
    assert why["onnx::MatMul_7"].startswith("frozen: the model has adapters")
    assert og.Trainer(proto, "squared_error").trained == ["enc.0.bias", "head.bias"]
    both = og.Trainer(proto, "squared_error", train="*weight").trained
    assert both == ["onnx::MatMul_7", "onnx::MatMul_8"]


@pytest.mark.parametrize("transposed", [False, True])
def test_copies_of_an_embedding_are_named(transposed):
    head = "t = Transpose(D) y = MatMul(b, t)" if not transposed else "y = MatMul(b, D)"
    text = f"f (int64[N] x) => (float[N, 5] y) {{ a = Gather(E, x) b = MatMul(a, A) {head} }}"
    shapes = {"E": (5, 3), "A": (3, 3), "D": (3, 5) if transposed else (5, 3)}
    names = {"E": "embed.weight", "D": "onnx::MatMul_9", "A": "A"}
    proto = model_of_letters(text, ["", "", "/lm_head/MatMul"] if transposed else [], names, shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.Trainer(proto, "squared_error")  # the numbers differ
    table, *_, last = proto.graph.initializer
    array = numpy_helper.to_array(table)
    last.CopyFrom(numpy_helper.from_array(array.T.copy() if transposed else array, last.name))
    [copy] = [t for t in og.trainable(proto) if t.copy_of]
    assert (copy.name, copy.copy_of) == ("onnx::MatMul_9", "embed.weight")
    for train in (None, "*", "embed*"):
        with pytest.warns(UserWarning, match=naming("MatMul_9", "'embed.weight'", "tie_copies")):
            og.Trainer(proto, "squared_error", train=train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.Trainer(proto, "squared_error", freeze=["embed.weight", "onnx::MatMul_9"])
        tied = og.Trainer(
            og.graph.tie_copies(proto), "squared_error", learning_rate=0.1, optimizer="sgd"
        )
    with pytest.warns(UserWarning, match="tie_copies"):
        apart = og.Trainer(proto, "squared_error", learning_rate=0.1, optimizer="sgd")
    X, y = np.arange(5), np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)
    assert tied.trained == ["embed.weight", "A"]
    np.testing.assert_array_equal(tied.predict(X), apart.predict(X))
    moved = [trainer.fit(X, y, epochs=1, batch_size=5).state.weights for trainer in (tied, apart)]
    last_copy = moved[1]["onnx::MatMul_9"]
    other = last_copy.T if transposed else last_copy
    expected = moved[1]["embed.weight"] + other - array  # both steps
    np.testing.assert_allclose(moved[0]["embed.weight"], expected, rtol=1e-5, atol=1e-6)
    ones = numpy_helper.from_array(np.ones(array.shape, np.float32), "embed.weight")
    table.CopyFrom(ones)
    last.CopyFrom(numpy_helper.from_array(np.ones(tuple(last.dims), np.float32), last.name))
    assert not [t for t in og.trainable(proto) if t.copy_of]


def test_an_adapter_of_a_tied_embedding_is_one_in_training():
    """It begins with zeros, which are no parameters that an exporter merged."""
    text = """f (int64[N] x) => (float[N, 5] y) {
        a = Gather(E, x) t = Transpose(E) y = MatMul(a, t) }"""
    proto = model_of_letters(text, [], {"E": "embed.weight"}, {"E": (5, 3)})
    adapted = og.add_lora(proto, "embed.weight", rank=2)
    X, y = np.arange(5), np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)
    trainer = og.Trainer(adapted, "squared_error", learning_rate=0.05)
    trainer.fit(X, y, epochs=3, batch_size=5)
    trained = trainer.model
    assert [t.name for t in trained.graph.initializer] == [
        t.name for t in adapted.graph.initializer
    ]
    merged = og.Trainer(og.merge_lora(trained), "squared_error").predict(X)
    np.testing.assert_allclose(merged, trainer.predict(X), rtol=1e-4, atol=1e-5)
    assert not np.allclose(merged, og.Trainer(proto, "squared_error").predict(X))
