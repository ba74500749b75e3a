"""
Train preferences: DPO
======================

Of two answers to a prompt, people prefer one. DPO (Rafailov et al. 2023, arXiv:2305.18290) trains a
language model on such pairs: the log-probability of the chosen answer shall rise above that of the
rejected one, by more than in the frozen model from which the training starts. The loss of a pair is
-log sigmoid(beta (chosen - rejected - the same of the frozen model)).
"""

import matplotlib.pyplot as plt
import numpy as np
import onnx

import onnxgrad as og

rng = np.random.default_rng(0)
base = onnx.parser.parse_model("""
    <ir_version: 9, opset_import: ["": 20]>
    language_model (int64[N,T] input_ids) => (float[N,T,20] logits) <int64 along = {1}> {
        e = Gather(table, input_ids)  s = CumSum(e, along)
        a = MatMul(s, inner)  h = Tanh(a)  logits = MatMul(h, words) }
""")
for name, shape in {"table": (20, 16), "inner": (16, 32), "words": (32, 20)}.items():
    values = rng.normal(scale=0.5, size=shape).astype(np.float32)
    base.graph.initializer.append(onnx.numpy_helper.from_array(values, name))

# %%
# A row is a prompt of three tokens with both answers, the chosen one first. The labels are the
# tokens, and -100 in the prompt. Here, answers of even tokens are preferred.

prompt = np.repeat(rng.integers(0, 20, (200, 1, 3)), 2, axis=1)
answers = rng.integers(0, 10, (200, 2, 4)) * 2 + [[[0], [1]]]
ids = np.concatenate([prompt, answers], axis=2)
data = {"input_ids": ids, "labels": np.where(np.arange(7) < 3, -100, ids)}

# %%
# The policy is the model with adapters, and these change nothing before they are trained: so its
# first predictions are those of the frozen model, and go into the training as labels.


def dpo(op, log_probs, reference, beta=0.1):
    """Write the loss of each pair, from the log-probabilities (N, 2)."""
    return op.Softplus(-beta * op.MatMul(log_probs - reference, np.float32([1, -1])))


adapted = og.add_lora(base, ["inner", "words"], rank=4)
policy = og.language.sequence_log_probs(adapted, alternatives=2)
trainer = og.Trainer(policy, dpo, learning_rate=0.01)
reference = trainer.predict(data)
np.testing.assert_allclose(trainer.evaluate(data, reference)["loss"], np.log(2), rtol=1e-5)
trainer.fit(data, reference, epochs=20, batch_size=20)
gained = (trainer.predict(data) - reference) @ [1, -1]
print("chosen gained on rejected in", np.mean(gained > 0), "of the pairs")
assert np.mean(gained > 0) > 0.95
og.save_adapter(trainer.model, "preferred")
tuned = og.load_adapter(base, "preferred")  # a language model, as the base
plt.hist(gained, 30)
plt.show()
