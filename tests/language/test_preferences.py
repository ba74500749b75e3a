"""Losses of preferences, as DPO, on the log-probabilities of texts, against PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnxgrad as og
from tests.support.errors import naming
from tests.support.models import parse_model
from tests.support.running import in_sweep, run_named

RNG = np.random.default_rng(0)
WORDS, SIZE, ROWS, LENGTH = 11, 6, 12, 7
SHAPES = {"table": (WORDS, SIZE), "inner": (SIZE, SIZE), "words": (SIZE, WORDS)}
IDS = RNG.integers(0, WORDS, (ROWS, 2, LENGTH))
MASK = np.ones_like(IDS)
MASK[:5, 1, 5:] = 0
LABELS = np.where((np.arange(LENGTH) < 2) | (MASK == 0), -100, IDS)
DATA = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
BETA = 0.3


def cumulative_model(dtype: str = "float") -> onnx.ModelProto:
    """Return a causal model: logits of sums over the tokens so far."""
    rng, numpy_dtype = np.random.default_rng(1), {"double": "f8", "float": "f4"}[dtype]
    weights = {n: rng.normal(scale=0.5, size=s).astype(numpy_dtype) for n, s in SHAPES.items()}
    text = f"""
        f (int64[N,T] input_ids, int64[N,T] attention_mask) => ({dtype}[N,T,{WORDS}] logits)
        <int64 along = {{1}}, int64[1] last = {{2}}> {{
            e = Gather(table, input_ids) c = CastLike(attention_mask, e) u = Unsqueeze(c, last)
            k = Mul(e, u) s = CumSum(k, along) a = MatMul(s, inner) h = Tanh(a)
            logits = MatMul(h, words) }}"""
    return parse_model(text, opset=20, **weights)


def dpo_loss(op, log_probs, reference):
    margin = op.MatMul(log_probs - reference, np.array([1, -1], log_probs.dtype.numpy()))
    return op.Log(1.0 + op.Exp(-BETA * margin))  # onnxruntime has no Softplus of float64


class PreferenceWitness:
    """The same model in PyTorch, in float64, and DPO as TRL writes it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.torch = pytest.importorskip("torch")
        arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        self.weights = {
            name: self.torch.tensor(arrays[name].astype(np.float64), requires_grad=True)
            for name in SHAPES
        }

    def log_probs(self, ids, mask, labels):
        torch = self.torch
        table, inner, words = self.weights.values()
        ids, mask, labels = (torch.tensor(x) for x in (ids, mask, labels))
        sums = (table[ids] * mask[..., None]).cumsum(-2)
        log_p = (torch.tanh(sums @ inner) @ words).log_softmax(-1)[..., :-1, :]
        labels = labels[..., 1:].clone()
        loss_mask = labels != -100
        labels[~loss_mask] = 0
        return (log_p.gather(-1, labels[..., None])[..., 0] * loss_mask).sum(-1)

    def loss(self, reference):
        """Return the loss, of chosen and rejected answers apart, as `DPOTrainer` computes it."""
        policy = self.log_probs(*DATA.values())
        pi = policy[:, 0] - policy[:, 1]
        ref = self.torch.tensor(reference[:, 0] - reference[:, 1])
        return -self.torch.nn.functional.logsigmoid(BETA * (pi - ref)).mean()


@pytest.mark.parametrize("alternatives", [None, 2])
def test_log_probs(alternatives):
    model = cumulative_model()
    made = og.language.sequence_log_probs(model, alternatives)
    onnx.checker.check_model(made, full_check=True)
    assert [x.name for x in made.graph.input] == list(DATA)
    assert [t.name for t in og.trainable(made).trained] == list(SHAPES)
    feed = DATA if alternatives else {k: v.reshape(-1, LENGTH) for k, v in DATA.items()}
    expected = PreferenceWitness(model).log_probs(*feed.values()).detach().numpy()
    [found] = run_named(made, feed).values()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [in_sweep("float"), "double"])
def test_dpo_and_its_gradient(dtype):
    model = cumulative_model(dtype)
    witness = PreferenceWitness(model)
    reference = RNG.normal(-15, 3, (ROWS, 2))
    expected = witness.loss(reference)
    expected.backward()
    tolerance = {"rtol": 1e-9} if dtype == "double" else {"rtol": 2e-4, "atol": 1e-6}
    reference = reference.astype({"double": "f8", "float": "f4"}[dtype])
    policy = og.language.sequence_log_probs(model, 2)
    for options in ({}, {"accumulate": 3}):
        trainer = og.Trainer(policy, dpo_loss, optimizer="sgd", learning_rate=1.0, **options)
        loss = trainer.evaluate(DATA, reference, batch_size=5)["loss"]
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
        before = og.graph.get_train_initializer(model)
        trainer.fit(DATA, reference, epochs=1, batch_size=ROWS)
        for name, weight in witness.weights.items():
            gradient = before[name][0] - trainer.state.weights[name]
            np.testing.assert_allclose(gradient, weight.grad.numpy(), **tolerance)


def test_preferences_are_learned_by_adapters(tmp_path):
    """The margin of the chosen answers rises; the adapters fit the language model."""
    model = cumulative_model()
    policy = og.language.sequence_log_probs(og.add_lora(model, ["inner", "words"], rank=4), 2)
    trainer = og.Trainer(policy, dpo_loss, learning_rate=0.1)
    assert all(".lora_" in name for name in trainer.trained)
    reference = trainer.predict(DATA)
    np.testing.assert_allclose(
        reference, PreferenceWitness(model).log_probs(*DATA.values()).detach().numpy(), rtol=1e-4
    )
    np.testing.assert_allclose(trainer.evaluate(DATA, reference)["loss"], np.log(2), rtol=1e-6)
    trainer.fit(DATA, reference, epochs=20, batch_size=4)
    trained = trainer.predict(DATA)
    gained = (trained - reference) @ [1, -1]
    assert (gained > 0.5).all()
    assert trainer.history[-1]["loss"] < 0.4
    og.save_adapter(trainer.model, tmp_path / "adapter")
    tuned = og.load_adapter(model, tmp_path / "adapter")
    assert [y.name for y in tuned.graph.output] == ["logits"]
    [found] = run_named(og.language.sequence_log_probs(tuned, 2), DATA).values()
    np.testing.assert_allclose(found, trained, rtol=1e-4, atol=1e-4)


def test_caches_are_empty():
    """A decoder of optimum with a cache is run without one."""
    model = cumulative_model()
    past = onnx.helper.make_tensor_value_info(
        "past_key_values.0.key", onnx.TensorProto.FLOAT, ["N", 1, "past", SIZE]
    )
    model.graph.input.append(past)
    one = numpy_helper.from_array(np.array([1]), "one")
    model.graph.initializer.append(one)
    extra = onnx.parser.parse_graph(f"""
        g (float[N,1,past,{SIZE}] p, float[N,T,{SIZE}] k, int64[1] one)
        => (float[N,1,all,{SIZE}] r) {{ w = Unsqueeze(k, one) r = Concat<axis=2>(p, w) }}""")
    names = {"p": past.name, "r": "present.0.key"}
    for node in extra.node:
        node.input[:] = [names.get(x, x) for x in node.input]
        node.output[:] = [names.get(x, x) for x in node.output]
        model.graph.node.append(node)
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(
            "present.0.key", onnx.TensorProto.FLOAT, ["N", 1, "all", SIZE]
        )
    )
    made = og.language.sequence_log_probs(model, 2)
    assert [x.name for x in made.graph.input] == list(DATA)
    expected = run_named(og.language.sequence_log_probs(cumulative_model(), 2), DATA)
    np.testing.assert_array_equal(run_named(made, DATA)["log_probs"], expected["log_probs"])


def test_models_that_are_refused():
    model = cumulative_model()
    matrix = parse_model("f (float[N,2] x) => (float[N,2] y) { y = Tanh(x) }")
    with pytest.raises(ValueError, match=r"\(rows, tokens, vocabulary\)"):
        og.language.sequence_log_probs(matrix)
    with pytest.raises(ValueError, match="'labels' already"):
        og.language.sequence_log_probs(og.language.sequence_log_probs(model), output="logits")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(ValueError, match=naming("'input_ids'", "(1, 'T')", "any length")):
        og.language.sequence_log_probs(model, 2)


@pytest.mark.sweep
def test_a_model_of_genai(genai_folder):
    """Grouped queries, a cache and positions; texts of other lengths; against transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(genai_folder.parent / "hf").eval()
    ids = torch.tensor(RNG.integers(3, 100, (4, 2, 6)))
    mask = torch.ones_like(ids)
    mask[:, 1, 4:] = 0
    labels = torch.where(mask == 1, ids, -100)
    with torch.no_grad():
        logits = net(ids.reshape(8, 6), attention_mask=mask.reshape(8, 6)).logits
    log_p = logits.log_softmax(-1)[:, :-1].gather(-1, ids.reshape(8, 6)[:, 1:, None])[..., 0]
    expected = (log_p * mask.reshape(8, 6)[:, 1:]).sum(-1).reshape(4, 2)
    model = og.add_lora(genai_folder / "model.onnx", "*proj*", rank=4)
    policy = og.language.sequence_log_probs(model, 2)
    data = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    data = {name: x.numpy() for name, x in data.items()}
    trainer = og.Trainer(policy, dpo_loss, learning_rate=0.01)
    reference = trainer.predict(data)
    np.testing.assert_allclose(reference, expected.numpy(), rtol=1e-4)
    trainer.fit(data, reference, epochs=20, batch_size=2)
    assert ((trainer.predict(data) - reference) @ [1, -1] > 1).all()
