"""A tokenizer, a chat, and a language model of a few weights, for tests of texts."""

from __future__ import annotations

import numpy as np
import onnx
from language_models import SENTENCES, bpe

from onnxgrad.language.chat import ChatTemplate
from onnxgrad.language.tokenizer import Tokenizer
from tests.support.models import parse_model

IM = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHAT = [
    {"role": "user", "content": "what is the cat"},
    {"role": "assistant", "content": "the cat sat"},
    {"role": "user", "content": " and the dog <b>&'\" "},
    {"role": "assistant", "content": "jumps over\nit"},
]
MODEL = """
    <ir_version: 9, opset_import: ["": 20]>
    f (int64[N,T] input_ids, int64[N,T] attention_mask) => (float[N,T,%d] logits)
    { m = Cast<to=1>(attention_mask)  two = Constant<value_ints=[-1]>()
      u = Unsqueeze(m, two)  e = Gather(w, input_ids)  f = Mul(e, u)  logits = MatMul(f, v) }"""


def bpe_tokenizer(template: str | None = None) -> Tokenizer:
    """Return a tokenizer with the tokens <s>, </s> and <pad>, and a template for chats."""
    special = {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}
    return Tokenizer(bpe(), special, template and ChatTemplate(template, special))


def token_model(size: int = 8) -> onnx.ModelProto:
    """Return a model whose logits at a token depend on this token alone."""
    rng = np.random.default_rng(0)
    words = bpe_tokenizer().size
    shapes = {"w": (words, size), "v": (size, words)}
    weights = {n: rng.normal(size=s).astype(np.float32) / size for n, s in shapes.items()}
    return parse_model(MODEL % words, **weights)


def text_beginnings(count: int = 23) -> list[str]:
    """Return texts of growing length: the beginnings of four sentences."""
    return [SENTENCES[i % 4][: 3 + i] for i in range(count)]
