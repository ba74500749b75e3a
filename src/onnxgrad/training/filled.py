"""Inputs of language models that follow from the tokens: empty caches, masks and positions.

Nodes of the objective compute them, as transformers does, unless the data have them: a cache holds
no keys, a mask is one for every token, and positions count the tokens of a row that the mask keeps.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.emit import Emit
from onnxgrad.model.feeds import caches_with_next_values
from onnxgrad.operators.microsoft import result_shapes
from onnxgrad.operators.shapes import Dim, dims, rank

_TOKENS = ("input_ids", "inputs_embeds")  # (rows, tokens, ...)
MASK, POSITIONS, BRANCH = "attention_mask", "position_ids", "use_cache_branch"
_PAST = {4: 2, 5: 3}  # the axis of the past by rank: (rows, heads, past, size), or (2, ...) of both


def computable_inputs(proto: ModelProto, language: bool = False) -> frozenset[str]:
    """Return the names of the inputs that nodes can compute from the tokens.

    They are caches with a past of symbolic length, and masks and positions in a model with caches,
    or in a model that is known to be a `language` model. Empty if no input has tokens.
    """
    inputs = {x.name: x for x in proto.graph.input}
    if not inputs.keys() & {*_TOKENS}:
        return frozenset()
    axes = {name: list(x.type.tensor_type.shape.dim) for name, x in inputs.items()}
    pasts = {
        name: axes[name][past]
        for name in caches_with_next_values(proto)
        if (past := _PAST.get(len(axes[name])))
    }
    grow = {name for name, past in pasts.items() if not past.HasField("dim_value")}
    if not grow and not language:
        return frozenset()
    beside = {MASK, POSITIONS, BRANCH} & inputs.keys()
    return frozenset(grow | {n for n in beside if n == BRANCH or len(axes[n]) == 2})


def is_key_value_cache(name: str) -> bool:
    """Return whether the input `name`, one of `computable_inputs`, holds cached keys or values."""
    return name not in (MASK, POSITIONS, BRANCH)


def compute_inputs(model: ir.Model, names: Collection[str]) -> None:
    """Replace the inputs `names`, some of `computable_inputs`, by nodes that compute them, in
    place.

    The types and shapes of the graph must be inferred before. A cache that a node reads stays an
    input if no shape tells its size.
    """
    graph = model.graph
    inputs = {str(x.name): x for x in graph.inputs}
    tokens = next((inputs[name] for name in _TOKENS if name in inputs), None)
    if tokens is None or (rank(tokens) or 0) < 2:
        return
    if any(map(is_key_value_cache, names)):
        remove_cache_windows(graph)
    op = Emit(graph)
    with op.at(next(iter(graph), None)):
        for name in names & inputs.keys():
            x = inputs[name]
            y = _input_from_tokens(op, x, tokens, inputs.get(MASK) if MASK not in names else None)
            if y is not None:
                ir.convenience.replace_all_uses_with(x, y, replace_graph_outputs=True)
            if not x.uses() and not x.is_graph_output():
                graph.inputs.remove(x)
    mask = inputs.get(MASK)
    # without a past, the mask covers the tokens of this call only
    if mask in graph.inputs and rank(mask) == 2 and any(map(is_key_value_cache, names)):
        mask.shape = ir.Shape((dims(tokens) or ())[:2])  # type: ignore[union-attr]


def remove_cache_windows(graph: ir.Graph) -> bool:
    """Let the caches of sliding-window attention keep the keys of all tokens, in place.

    Return whether a node changed. The attention reads the same keys. A cache of the last keys only
    would have a fixed length, and could not be empty.
    """
    nodes = [node for node in graph.all_nodes() if node.op_type == "GroupQueryAttention"]
    removed = [node.attributes.pop("sliding_window_cache", None) for node in nodes]
    return any(attribute is not None for attribute in removed)


def _input_from_tokens(
    op: Emit, x: ir.Value, tokens: ir.Value, mask: ir.Value | None
) -> ir.Value | None:
    """Return the value that nodes compute for the input `x` from `tokens`.

    None for a cache of unknown size. `mask` is the attention mask if the data have it, else None.
    """
    assert x.dtype is not None
    rows, length = op.dim(tokens, 0), op.dim(tokens, 1)
    if x.name == BRANCH:
        return op.const(np.zeros(1, bool))
    if is_key_value_cache(str(x.name)):
        heads, size = cache_sizes(x)
        if heads is None or size is None:
            return None
        lengths = [rows, heads, 0, size]
        value = ir.tensor(np.zeros(1, x.dtype.numpy()))
        empty = [2, *lengths] if rank(x) == 5 else lengths
        y = op.ConstantOfShape(op.const(op.vector(*empty)), value=value)
        y.type, first = x.type, (dims(tokens) or (None,))[:1]
        y.shape = ir.Shape([*[2] * (rank(x) == 5), *first, heads, 0, size])
        return y
    shape = (dims(tokens) or (None, None))[:2]
    if x.name == MASK:
        y = op.Expand(op.const(1, x.dtype), op.vector(rows, length))
    elif mask is None:
        y = op.Cast(op.Expand(op.arange(length), op.vector(rows, length)), to=x.dtype)
    else:
        kept = op.CumSum(op.Cast(mask, to=ir.DataType.INT64), np.int64(1)) - 1
        y = op.Cast(op.Max(kept, np.int64(0)), to=x.dtype)
    y.type, y.shape = x.type, ir.Shape(shape)
    return y


def cache_sizes(x: ir.Value) -> tuple[int | None, int | None]:
    """Return the count of attention heads and the size of a head in the key/value cache `x`.

    They are read from the shapes of the cache, of the nodes that read it, and of tensors joined
    with it; None where no shape tells the number.
    """
    found: list[list[Dim]] = [[*(dims(x) or ())]]
    # `widen` adds such casts
    casts = [use.node.outputs[0] for use in x.uses() if use.node.op_type == "Cast"]
    for node in {use.node for value in (x, *casts) for use in value.uses()}:
        beside = node.inputs if node.op_type == "Concat" else ()
        shapes = (*map(dims, node.outputs), *map(dims, beside), *result_shapes(node))
        found += [[*shape] for shape in shapes if shape]
    alike = [shape for shape in found if len(shape) == rank(x)]
    heads, size = (next((s[i] for s in alike if isinstance(s[i], int)), None) for i in (-3, -1))
    return heads, size  # type: ignore[return-value]
