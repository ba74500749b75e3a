"""Where a transformer looks: attention rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.errors import escaping, unknown
from onnxgrad.explain.user_inputs import Inputs, checked_feed, rows_of
from onnxgrad.graph.emit import garbage_kept
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.model.convert import to_proto
from onnxgrad.model.read import ModelLike, once, read
from onnxgrad.operators.shapes import rank
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session, work

_HEADS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}
_MOVES = frozenset(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Where"))


def attention_names(model: ModelLike) -> list[str]:
    """Return the names of the attention probabilities of a transformer, first layer first.

    They are the results of Softmax over the last axis, of three axes or more, that a MatMul or an
    Einsum takes as its first operand. Operators such as Attention are looked into.

    Args:
        model: model, serialized model or path; never modified.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,T,4] x) => (float[N,T,4] y)
        ...     { k = Transpose<perm=[0, 2, 1]>(x)  s = MatMul(x, k)
        ...       p = Softmax<axis=-1>(s)  y = MatMul(p, x) }''')
        >>> og.explain.attention_names(model)
        ['p']
    """
    with garbage_kept():
        return [str(p.name) for p in _probabilities(prepare(read(model)).graph)]


def attention_rollout(
    model: ModelLike,
    inputs: Inputs,
    names: Sequence[str] | None = None,
    *,
    heads: str = "mean",
) -> np.ndarray:
    """Return how much of each token reaches each other one through the attention of all layers.

    With A the probabilities of a layer, fused over its heads, it is the product of (A + I) / 2 over
    the layers, the last one on the left: I stands for the residual connection (Abnar & Zuidema
    2020, arXiv:2005.00928). No gradient is computed.

    Args:
        model, inputs: see `saliency`; `model` is no `ScoreFunction`.
        names: names of the attention probabilities, first layer first, of shape (rows, heads, T,
            T), (rows times heads, T, T) or (rows, T, T). None: `attention_names(model)`.
        heads: "mean", "max" or "min" over the heads; the rows of A are normalized again.

    Returns:
        float64 of shape (rows, T, T): element (i, j) is how much of token j is in what the last
        layer computes of token i. Rows sum to one.

    Raises:
        ValueError: no attention is found, an unknown name, or one of another shape, as that of an
            attention to other tokens.
        ModelError: `model` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,T,4] x) => (float[N,T,4] y)
        ...     { k = Transpose<perm=[0, 2, 1]>(x)  s = MatMul(x, k)
        ...       p = Softmax<axis=-1>(s)  y = MatMul(p, x) }''')
        >>> og.explain.attention_rollout(model, np.zeros((1, 2, 4), np.float32)).tolist()
        [[[0.75, 0.25], [0.25, 0.75]]]
    """
    if heads not in _HEADS:
        raise unknown("value of `heads`", heads, _HEADS)
    rollout = None
    for name, array, rows in _layers(model, inputs, names):
        a = _fuse_heads(name, array.astype(np.float64), rows, heads)
        if rollout is not None and a.shape != rollout.shape:
            raise ValueError(
                f"the attention {name!r} of shape {list(array.shape)} is not between the tokens of "
                "the layer before it: name in `names` the layers that follow each other"
            )
        a = (a / a.sum(axis=-1, keepdims=True) + np.eye(a.shape[-1])) / 2
        rollout = a if rollout is None else a @ rollout
    assert rollout is not None
    return rollout


def _layers(
    model: ModelLike, inputs: Inputs, names: Sequence[str] | None
) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yield the name and the probabilities of each layer, and the number of rows."""
    with garbage_kept():
        prepared = prepare(read(model), keep=() if names is None else names)
        graph = prepared.graph
        chosen = _probabilities(graph) if names is None else _values_called(graph, names)
        if not chosen:
            raise ValueError(
                "no attention is found: no Softmax over the last axis whose result a MatMul takes "
                "as its first operand; name the attention probabilities in `names`"
            )
        graph.outputs[:] = chosen
        tidy(prepared)
    used = {v for node in graph for v in reads(node)}
    feed = checked_feed(inputs, graph.inputs, [str(x.name) for x in graph.inputs if x in used])
    rows, _ = rows_of(feed, graph.inputs)
    with escaping():
        layers = session(to_proto(prepared), CPU, work(graph) * rows).run(None, feed)
    for p, array in zip(chosen, layers, strict=True):
        yield str(p.name), array, rows


def _probabilities(graph: ir.Graph) -> list[ir.Value]:
    """Return the results of Softmax by which a MatMul takes means, in the order of the graph."""
    needed = nodes_behind(graph.outputs)
    return [
        node.outputs[0]
        for node in graph
        if node.op_type == "Softmax" and not node.domain and node in needed and _weighs(node)
    ]


def _weighs(softmax: ir.Node) -> bool:
    n = rank(softmax.outputs[0])
    axis = softmax.attributes.get_int("axis", -1)
    if n is None or n < 3 or axis not in (-1, n - 1):
        return False
    waiting = [softmax.outputs[0]]
    while waiting:
        for node, operand in waiting.pop().uses():
            if node.op_type in ("MatMul", "Einsum") and operand == 0:
                return True
            if node.op_type in _MOVES:
                waiting += node.outputs
    return False


def _values_called(graph: ir.Graph, names: Sequence[str]) -> list[ir.Value]:
    values = {str(y.name): y for node in graph for y in node.outputs}
    for name in once("attention", names):
        if name not in values:
            found = [str(p.name) for p in _probabilities(graph)]
            raise unknown("attention", name, found or values)
    return [values[name] for name in names]


def _fuse_heads(name: str, p: np.ndarray, rows: int, heads: str) -> np.ndarray:
    """Return the probabilities of a layer without the axis of its heads, (rows, T, T)."""
    if p.ndim not in (3, 4) or p.shape[-1] != p.shape[-2] or len(p) % rows:
        raise ValueError(
            f"the attention {name!r} has the shape {list(p.shape)}, not (rows, heads, T, T): "
            "rollout needs attention of tokens to each other; name such layers in `names`"
        )
    if (p < 0).any() or not p.sum(axis=-1).all():
        raise ValueError(f"{name!r} holds no probabilities: name results of a Softmax in `names`")
    shaped = p.reshape(rows, -1, *p.shape[-2:])
    return np.asarray(_HEADS[heads](shaped, axis=1))
