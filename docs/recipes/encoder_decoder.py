"""
Train T5 from its two files
===========================

Optimum writes an encoder-decoder as ``encoder_model.onnx`` and ``decoder_model.onnx``, and, with a
cache, further files. A small T5 in this form is trained as one model, and written into both again.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

import onnxgrad as og

torch.manual_seed(0)
sizes = {"vocab_size": 30, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
config = T5Config(**sizes, decoder_start_token_id=0, attn_implementation="eager")
net = T5ForConditionalGeneration(config).eval()
ids, states = torch.ones(2, 3).long(), torch.ones(2, 3, 32)
encoder = (lambda ids, mask: net.encoder(ids, mask)[0]), (ids, ids)
decoder = (lambda mask, ids, x: net(None, mask, ids, None, (x,))[0]), (ids, ids, states)
S, T = ({0: "rows", 1: f"{part}_sequence_length"} for part in ("encoder", "decoder"))
axes = (
    {"input_ids": S, "attention_mask": S, "last_hidden_state": S},
    {"encoder_attention_mask": S, "input_ids": T, "encoder_hidden_states": S, "logits": T},
)
files = ["encoder_model.onnx", "decoder_model.onnx"]
for (forward, args), lengths, file in zip((encoder, decoder), axes, files, strict=True):
    part = torch.nn.Module()
    part.net, part.forward = net, forward
    names = {"input_names": [*lengths][:-1], "output_names": [*lengths][-1:]}
    torch.onnx.export(part.eval(), args, file, dynamo=False, dynamic_axes=lengths, **names)

# %%
# 50 rows of tokens, and what to write for them: each token behind those before it, and 1 at the
# end; -100 has no loss. The table of words, which both files store, is one tensor.

rows = np.random.default_rng(0).permuted(np.tile(np.arange(3, 30), (50, 1)), axis=1)
X, labels = rows[:, :6], rows[:, 6:11]
labels[:, 4], labels[:10, 3:] = 1, [1, -100]
shifted = og.language.shift_right(labels, 0)
data = {"input_ids": X, "attention_mask": X > 0, "decoder_input_ids": shifted}
model = og.language.join_encoder_decoder(*files)
trainer = og.Trainer(model, {"logits": "cross_entropy"}, learning_rate=og.schedules.cosine(0.01))
trainer.fit(data, labels, epochs=120, batch_size=10)

# %%
# Each file gets its weights; pass those with a cache, too, if there are any.

trained = og.language.split_encoder_decoder(trainer.model, *files)
written = og.language.greedy_decode(*trained, X, start=0, end=1, max_new_tokens=8)
assert (written[:, :5] == np.maximum(labels, 0)).all(1).mean() > 0.9
before = og.language.greedy_decode(*files, X, start=0, end=1, max_new_tokens=8)
theirs = net.generate(torch.tensor(X), max_new_tokens=8, do_sample=False).numpy()[:, 1:]
np.testing.assert_array_equal(before, theirs)
print(written[:3], before[:3], sep="\n")
plt.semilogy([entry["loss"] for entry in trainer.history])
plt.show()
