"""Caches of attention among the inputs and outputs of language models."""

from __future__ import annotations

import re

from onnx import ModelProto


def caches(proto: ModelProto) -> dict[str, str]:
    """Return, for each input that is a cache, the output that is its next value.

    Those are inputs with "past" in their name, and outputs that are called "present" instead, as
    `past_key_values.0.key` and `present.0.key`.
    """
    outputs = {y.name for y in proto.graph.output}
    pairs = {}
    for x in proto.graph.input:
        present = re.sub("past(_key_values)?", "present", x.name, count=1)
        if present != x.name and present in outputs:
            pairs[x.name] = present
    return pairs
