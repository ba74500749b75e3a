"""The loss of language models: its value and gradients are those of the plain formula."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.graph.shapes import dims
from onnxgrad.training.data import as_dataset
from onnxgrad.training.recipe import Facts, Recipe
from onnxgrad.training.run.row_parts import splits
from tests.support.causal_lm_cases import (
    HEAD,
    HEADS,
    IDS,
    LABELS,
    MASK,
    RNG,
    ROWS,
    TABLE,
    TOKENS,
    WIDTH,
    WORDS,
    causal_model,
    divide_logits,
    torch_loss_and_gradients,
)
from tests.support.running import run_named

pytest.importorskip("torch")


def stepped(proto, X, y=None, weight=None, **options):
    """Return the loss of an evaluation and a step, and the gradients by a step of SGD."""
    trainer = og.Trainer(
        proto, "causal_lm", optimizer="sgd", learning_rate=1.0, train="*", **options
    )
    before = {name: array.copy() for name, array in trainer.state.weights.items()}
    evaluated = trainer.evaluate(X, y, sample_weight=weight)["loss"]
    trainer.fit(X, y, sample_weight=weight, shuffle=False, batch_size=ROWS)
    gradients = {name: before[name] - w for name, w in trainer.state.weights.items()}
    return evaluated, trainer.history[-1]["loss"], gradients


def check(found, loss, gradients, rtol=1e-9):
    evaluated, trained, by_name = found
    np.testing.assert_allclose([evaluated, trained], loss, rtol=rtol)
    assert by_name
    for name, gradient in by_name.items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=rtol, atol=rtol)


@pytest.fixture(params=["whole", "positions", "words"])
def chunks(request, monkeypatch):
    """How the logits are divided; 16 positions are the smallest chunk."""
    divide_logits(monkeypatch, request.param)


@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients(head, chunks):
    check(stepped(causal_model(head), IDS, LABELS), *torch_loss_and_gradients(head, LABELS))


@pytest.mark.parametrize("head", ["plain", "tied", "bias", "softcap", "flat"])
def test_blocks_of_words(head, monkeypatch):
    """No node has the logits of all words, and no Scan carries the gradient of the matrix."""
    divide_logits(monkeypatch, "words")
    trainer = og.Trainer(causal_model(head, "float"), "causal_lm", train="*")
    recipe = Recipe(trainer, Facts.of(trainer, as_dataset(IDS, LABELS)))
    graph = recipe.step(recipe.objective()).model.graph
    scans = [node for node in graph if node.op_type == "Scan"]
    bodies = [node.attributes["body"].as_graph() for node in scans]
    shapes = [dims(y) for body in bodies for node in body for y in node.outputs]
    assert sum((shape or ())[-1:] == (8,) and len(shape) == 2 for shape in shapes) > 9
    assert not any(WORDS in (shape or ()) for shape in shapes)
    assert not any(WORDS in (dims(x) or ()) for body in bodies for x in body.inputs)


def test_without_labels():
    """The tokens are the labels, but for those that the mask leaves out."""
    loss, gradients = torch_loss_and_gradients("bias", IDS)
    check(stepped(causal_model("bias"), IDS), loss, gradients)
    proto = causal_model("bias")
    proto.graph.input.append(
        onnx.helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, ["N", "T"])
    )
    kept = onnx.helper.make_node("Identity", ["attention_mask"], ["kept"])
    proto.graph.node.append(kept)
    proto.graph.output.append(
        onnx.helper.make_tensor_value_info("kept", onnx.TensorProto.INT64, ["N", "T"])
    )
    X = {"input_ids": IDS, "attention_mask": MASK}
    check(stepped(proto, X), *torch_loss_and_gradients("bias", np.where(MASK == 1, IDS, -100)))
    check(stepped(proto, {"input_ids": IDS}), loss, gradients)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, TOKENS)])
def test_weights(shape, chunks):
    weight = RNG.random(shape)
    wide = weight if len(shape) == 2 else weight[:, None]
    check(
        stepped(causal_model("bias"), IDS, LABELS, weight),
        *torch_loss_and_gradients("bias", LABELS, wide),
    )


def test_ignored(chunks):
    found = stepped(
        causal_model("plain"),
        IDS,
        np.where(LABELS == -100, 5, LABELS),
        loss_options={"ignore_index": 5},
    )
    labels = np.where((LABELS == -100) | (LABELS == 5), -100, LABELS)
    check(found, *torch_loss_and_gradients("plain", labels))
    none = np.full_like(IDS, -100)
    trainer = og.Trainer(causal_model("plain"), "causal_lm", train="*", optimizer="sgd")
    before = trainer.state.weights["head"].copy()
    trainer.fit(IDS, none)
    np.testing.assert_array_equal(trainer.state.weights["head"], before)


def test_accumulated_is_one_batch(chunks):
    """The mean is over the labels of all micro-batches, which have different numbers of them."""
    trainer = og.Trainer(
        causal_model("bias"),
        "causal_lm",
        optimizer="sgd",
        learning_rate=1.0,
        train="*",
        accumulate=2,
    )
    before = {name: array.copy() for name, array in trainer.state.weights.items()}
    trainer.fit(IDS, LABELS, shuffle=False, batch_size=ROWS)
    loss, gradients = torch_loss_and_gradients("bias", LABELS)
    assert trainer.history[-1]["loss"] == pytest.approx(loss, rel=1e-9)
    for name, w in trainer.state.weights.items():
        np.testing.assert_allclose(before[name] - w, gradients[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("head", ["softcap", "tied"])
def test_stack(head):
    """Each member of a stack trains as a trainer of its own."""
    rates = [0.5, 0.1]
    stack = og.TrainerStack(
        causal_model(head), "causal_lm", optimizer="sgd", learning_rate=rates, train="*"
    )
    stack.fit(IDS, LABELS, epochs=2, batch_size=2, shuffle=False)
    for k, rate in enumerate(rates):
        one = og.Trainer(
            causal_model(head), "causal_lm", optimizer="sgd", learning_rate=rate, train="*"
        )
        one.fit(IDS, LABELS, epochs=2, batch_size=2, shuffle=False)
        for name, w in one.state.weights.items():
            np.testing.assert_allclose(stack.state.weights[name][k], w, rtol=1e-9, atol=1e-12)
    losses = stack.evaluate(IDS, LABELS)["loss"]
    assert losses.shape == (2,)


def test_same_as_the_formula_in_a_file():
    """`add_loss_output` writes the plain formula, for other trainers."""
    proto = og.add_loss_output(causal_model("bias"), "causal_lm", reduction="mean")
    loss = run_named(proto, {"input_ids": IDS, "label": LABELS})["loss"].item()  # by rows
    mean = loss * ROWS / (LABELS[:, 1:] != -100).sum()
    assert mean == pytest.approx(torch_loss_and_gradients("bias", LABELS)[0], rel=1e-9)


def test_logits_are_not_written():
    """No node of the step, and none of an evaluation, has logits of all positions."""
    trainer = og.Trainer(causal_model("bias"), "causal_lm", train="*")
    recipe = Recipe(trainer, Facts.of(trainer, as_dataset(IDS, LABELS)))
    step = recipe.step(recipe.objective())
    wide = [
        y.name
        for node in step.model.graph
        for y in node.outputs
        if y.shape is not None and len(y.shape) == 3 and y.shape[-1] == WORDS
    ]
    assert not wide
    assert any(node.op_type == "Scan" for node in step.model.graph)


def test_rows_are_divided(chunks):
    """Processes prove, by the plain formula, that the gradients of their rows add up."""
    trainer = og.Trainer(causal_model("softcap"), "causal_lm", train="*")
    objective = Recipe(trainer, Facts.of(trainer, as_dataset(IDS, LABELS))).objective()
    names = ("input_ids", "label")
    assert splits(objective, dict.fromkeys(names, 0), dict.fromkeys(names, IDS.shape))


def test_refused():
    proto = causal_model("plain")
    last = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 21]>
        g (int64[N, T] input_ids) => (float[N, 1, {WORDS}] logits)
        <int64[1] last = {{-1}}> {{ rows = Gather(table, input_ids) h = Gather<axis = 1>(rows, last)
            logits = MatMul(h, head) }}""")
    for name, array in (("table", TABLE), ("head", HEAD)):
        last.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    with pytest.raises(ValueError, match=r"of the last position only.*prune_lm_head"):
        og.Trainer(last, "causal_lm", train="*").fit(IDS)
    with pytest.raises(ValueError, match=r"length 6 along axis 1.* has length 7"):
        og.Trainer(proto, "causal_lm", train="*").fit(IDS, LABELS[:, :-1])
    with pytest.raises(ValueError, match=r"outside 0\.\.31"):
        og.Trainer(proto, "causal_lm", train="*").fit(IDS, IDS + WORDS)
    other = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 21]>
        g (float[N, T, {WIDTH}] x) => (float[N, T, {WORDS}] logits) {{
            logits = MatMul(x, head) }}""")
    other.graph.initializer.append(onnx.numpy_helper.from_array(HEAD.astype(np.float32), "head"))
    with pytest.raises(ValueError, match="'input_ids', which is no input of the model: pass y"):
        og.Trainer(other, "causal_lm", train="*").fit(np.ones((2, 3, WIDTH), np.float32))


def test_a_cache_that_the_logits_do_not_read_is_not_asked_for():
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 20]>
        f (int64[N,T] input_ids, float[N,2,P,S] past_0)
        => (float[N,T,3] logits, float[N,2,P,S] present_0) <float[3,3] table = {1,2,3,4,5,6,7,8,9}>
        { logits = Gather(table, input_ids)  present_0 = Identity(past_0) }"""
    )
    trainer = og.Trainer(model, "causal_lm").fit({"input_ids": np.array([[0, 1, 2]])})
    assert trainer.state.step == 1
