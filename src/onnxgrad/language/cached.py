"""A language model in an ordinary session, a token at a time, with its caches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import ModelError
from onnxgrad.graph.infer import infer
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.feeds import caches_with_next_values
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.training.filled import BRANCH, MASK, POSITIONS, cache_sizes, grow_caches


class Cached:
    """Scores of the next token, for tokens that come one after another.

    Args:
        model: inputs `input_ids`, and where it has them `attention_mask`, `position_ids` and
            caches, called "past" with an output called "present" instead; its first output, or
            `logits`, is (rows, tokens, vocabulary).
        names: of the inputs, where the model calls them otherwise.

    Raises:
        ModelError: an input that is none of these, or a cache of unknown size.
    """

    def __init__(self, model: ModelProto, names: Mapping[str, str]) -> None:
        graph = to_ir(model)
        if grow_caches(graph.graph):
            model = to_proto(graph)
        infer(graph)
        inputs = {str(x.name): x for x in graph.graph.inputs}
        outputs = {str(y.name): y for y in graph.graph.outputs}
        self._caches = caches_with_next_values(model)  # the output that follows each
        self._empty = {name: _empty_cache(inputs[name]) for name in self._caches}
        own = ("input_ids", MASK, POSITIONS, BRANCH)
        self._names = {names.get(n, n): n for n in own if names.get(n, n) in inputs}
        scores = "logits" if "logits" in outputs else next(iter(outputs))
        self._predictor = Predictor(model, [scores, *self._caches.values()])
        known = {*self._names, *self._caches}
        if unknown := [name for name in self._predictor.inputs if name not in known]:
            raise ModelError(
                f"generation feeds tokens, masks, positions and caches, and the model has the "
                f"inputs {unknown}, too"
            )
        self.begin()

    def begin(self) -> None:
        """Forget all tokens."""
        self._held, self._tokens = dict(self._empty), []  # type: tuple[dict, list[int]]

    def scores(self, tokens: list[int]) -> np.ndarray:
        """Return the scores (V,) of the token behind those so far and `tokens`."""
        self._tokens += tokens
        new = tokens if self._caches else self._tokens
        total, first = len(self._tokens), len(self._tokens) - len(new)
        given = {
            "input_ids": [new],
            MASK: np.ones((1, total)),
            POSITIONS: [np.arange(first, total)],
            BRANCH: [first > 0],
        }
        feeds = {name: given[n] for name, n in self._names.items()}
        scores, *held = self._predictor.run(feeds | self._held)
        self._held = dict(zip(self._caches, held, strict=True))
        return scores[0, -1]


def _empty_cache(x: ir.Value) -> np.ndarray:
    """Return a cache of no token."""
    heads, size = cache_sizes(x)
    if heads is None or size is None or x.dtype is None:
        raise ModelError(f"the sizes of the cache {x.name!r} are not known: {dims(x)}")
    return np.zeros([*[2] * (rank(x) == 5), 1, heads, 0, size], x.dtype.numpy())
