"""The loss of language models: its value and gradients are those of the plain formula."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxgrad as og
from onnxgrad.operators.shapes import dims
from onnxgrad.training.data import as_dataset
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.run.row_parts import is_sum_over_rows
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
    assert_step,
    causal_model,
    divide_logits,
    step_gradients,
    torch_loss_and_gradients,
)
from tests.support.combinations import parametrize_chosen
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

pytest.importorskip("torch")


CHUNKS = ("whole", "positions", "words")  # how the logits are divided
SGD = {"optimizer": "sgd", "learning_rate": 1.0, "train": "*"}


def causal_trainer(proto, **options) -> og.Trainer:
    return og.Trainer(proto, "causal_lm", **SGD | options)


@pytest.fixture(params=["positions", "words", in_sweep("whole")])
def logit_chunks(request, monkeypatch):
    """Divide the logits; 16 positions are the smallest chunk."""
    divide_logits(monkeypatch, request.param)


CHOSEN = [*((head, "words") for head in HEADS), ("tied", "positions"), ("flat", "whole")]


@parametrize_chosen("head chunks", CHOSEN, HEADS, CHUNKS)
def test_loss_and_gradients(head, chunks, monkeypatch):
    divide_logits(monkeypatch, chunks)
    found = step_gradients(causal_trainer(causal_model(head)), IDS, LABELS)
    assert_step(found, *torch_loss_and_gradients(head, LABELS))


@pytest.mark.parametrize("head", ["plain", "tied", "bias", "softcap", "flat"])
def test_blocks_of_words(head, monkeypatch):
    """No node has the logits of all words, and no Scan carries the gradient of the matrix."""
    divide_logits(monkeypatch, "words")
    trainer = og.Trainer(causal_model(head, "float"), "causal_lm", train="*")
    recipe = Recipe.for_data(trainer._job, trainer.state, as_dataset(IDS, LABELS))
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
    assert_step(step_gradients(causal_trainer(causal_model("bias")), IDS), loss, gradients)
    proto, integers = causal_model("bias"), onnx.TensorProto.INT64
    for values, name in ((proto.graph.input, "attention_mask"), (proto.graph.output, "kept")):
        values.append(onnx.helper.make_tensor_value_info(name, integers, ["N", "T"]))
    proto.graph.node.add(op_type="Identity", input=["attention_mask"], output=["kept"])
    X = {"input_ids": IDS, "attention_mask": MASK}
    kept = np.where(MASK == 1, IDS, -100)
    found = step_gradients(causal_trainer(proto), X)
    assert_step(found, *torch_loss_and_gradients("bias", kept))
    found = step_gradients(causal_trainer(proto), {"input_ids": IDS})
    assert_step(found, loss, gradients)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, TOKENS)])
def test_weights(shape, logit_chunks):
    weight = RNG.random(shape)
    wide = weight if len(shape) == 2 else weight[:, None]
    found = step_gradients(causal_trainer(causal_model("bias")), IDS, LABELS, weight)
    assert_step(found, *torch_loss_and_gradients("bias", LABELS, wide))


def test_ignored(logit_chunks):
    trainer = causal_trainer(causal_model("plain"), loss_options={"ignore_index": 5})
    found = step_gradients(trainer, IDS, np.where(LABELS == -100, 5, LABELS))
    labels = np.where((LABELS == -100) | (LABELS == 5), -100, LABELS)
    assert_step(found, *torch_loss_and_gradients("plain", labels))
    none = np.full_like(IDS, -100)
    trainer = og.Trainer(causal_model("plain"), "causal_lm", train="*", optimizer="sgd")
    before = trainer.state.weights["head"].copy()
    with pytest.warns(UserWarning, match="label"):
        trainer.fit(IDS, none)
    np.testing.assert_array_equal(trainer.state.weights["head"], before)


def test_accumulated_is_one_batch(logit_chunks):
    """The mean is over the labels of all micro-batches, which have different numbers of them."""
    _, found = step_gradients(causal_trainer(causal_model("bias"), accumulate=2), IDS, LABELS)
    _, gradients = torch_loss_and_gradients("bias", LABELS)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-9, atol=1e-9)


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
    recipe = Recipe.for_data(trainer._job, trainer.state, as_dataset(IDS, LABELS))
    step = recipe.step(recipe.objective())
    wide = [
        y.name
        for node in step.model.graph
        for y in node.outputs
        if y.shape is not None and len(y.shape) == 3 and y.shape[-1] == WORDS
    ]
    assert not wide
    assert any(node.op_type == "Scan" for node in step.model.graph)


def test_rows_are_divided(logit_chunks):
    """Processes prove, by the plain formula, that the gradients of their rows add up."""
    trainer = og.Trainer(causal_model("softcap"), "causal_lm", train="*")
    objective = Recipe.for_data(trainer._job, trainer.state, as_dataset(IDS, LABELS)).objective()
    names = ("input_ids", "label")
    assert is_sum_over_rows(objective, dict.fromkeys(names, 0), dict.fromkeys(names, IDS.shape))


def test_refused():
    head, options = HEAD.astype(np.float32), {"opset": 21, "ir_version": 9}
    last = f"""g (int64[N, T] input_ids) => (float[N, 1, {WORDS}] logits)
        <int64[1] last = {{-1}}> {{ rows = Gather(table, input_ids) h = Gather<axis = 1>(rows, last)
            logits = MatMul(h, head) }}"""
    last = parse_model(last, **options, table=TABLE.astype(np.float32), head=head)
    text = f"""g (float[N, T, {WIDTH}] x) => (float[N, T, {WORDS}] logits) {{
        logits = MatMul(x, head) }}"""
    other, plain = parse_model(text, **options, head=head), causal_model("plain")
    for proto, data, parts in (
        (last, [IDS], ["last position", "prune_lm_head"]),
        (plain, [IDS, LABELS[:, :-1]], ["length 6", "axis 1", "length 7"]),
        (plain, [IDS, IDS + WORDS], ["outside 0..31"]),
        (other, [np.ones((2, 3, WIDTH), np.float32)], ["'input_ids'", "pass y"]),
    ):
        with pytest.raises(ValueError, match=naming(*parts)):
            og.Trainer(proto, "causal_lm", train="*").fit(*data)


def test_a_cache_that_the_logits_do_not_read_is_not_asked_for():
    text = """f (int64[N,T] input_ids, float[N,2,P,S] past_0)
        => (float[N,T,3] logits, float[N,2,P,S] present_0) <float[3,3] table = {1,2,3,4,5,6,7,8,9}>
        { logits = Gather(table, input_ids)  present_0 = Identity(past_0) }"""
    model = parse_model(text, opset=20)
    trainer = og.Trainer(model, "causal_lm").fit({"input_ids": np.array([[0, 1, 2]])})
    assert trainer.state.step == 1
