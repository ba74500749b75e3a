"""Encoder-decoders in two files: join them for teacher forcing, and decode greedily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.finetune.attach import attach
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import detach_graphs, remove_node
from onnxgrad.graph.traversal import all_names
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.training.parameters.equal_constants import separate_merged, tie_copies

PREFIX = "decoder."  # put before the names of the decoder that the encoder has, too
STATES, _MASK, _DECODER_MASK = "encoder_hidden_states", "attention_mask", "encoder_attention_mask"
CACHED = "use_cache_branch"  # the input that chooses the branch of a merged decoder
_TOKENS = "decoder_input_ids"


def join_encoder_decoder(encoder: ModelLike, decoder: ModelLike) -> ModelProto:
    """Return one model of the two files of an encoder-decoder that optimum writes.

    It trains with teacher forcing: its inputs are the inputs of the encoder, such as `input_ids`
    and `attention_mask`, and `decoder_input_ids`, see `shift_right`; its output `logits` has the
    scores of the next token at each position. A weight that both files store, as the table of
    words, is one tensor: see `tie_copies`. `split_encoder_decoder` returns the files again.

    Args:
        encoder: `encoder_model.onnx`: model, serialized model or path; never modified. Its output
            `last_hidden_state`, or its only output, feeds the decoder.
        decoder: `decoder_model.onnx`: model, serialized model or path, with the inputs
            `encoder_hidden_states`, `input_ids` and maybe `encoder_attention_mask`; or
            `decoder_model_merged.onnx`, whose branch without a cache is taken.

    Raises:
        ValueError: inputs and outputs do not fit, or the decoder needs a cache.
        ModelError: a model cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     e (int64[N,S] input_ids) => (float[N,S,2] last_hidden_state)
        ...     <float[3,2] table = {1, 2, 3, 4, 5, 6}>
        ...     { last_hidden_state = Gather(table, input_ids) }''')
        >>> decoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     d (int64[N,T] input_ids, float[N,S,2] encoder_hidden_states)
        ...     => (float[N,T,2] logits)
        ...     <float[3,2] table = {1, 2, 3, 4, 5, 6}, int64[1] axis = {1}> {
        ...         h = Gather(table, input_ids)
        ...         m = ReduceMean(encoder_hidden_states, axis)  logits = Add(h, m) }''')
        >>> model = og.language.join_encoder_decoder(encoder, decoder)
        >>> [x.name for x in model.graph.input], [t.name for t in og.trainable(model).trained]
        (['input_ids', 'decoder_input_ids'], ['table'])
    """
    first, second = separate_merged(read(encoder)), separate_merged(without_cache(read(decoder)))
    mapping, rename = _encoder_decoder_connections(first, second)
    joined = attach(first, second, mapping, prefix=PREFIX, rename=rename)
    kept = [y.name for y in second.graph.output if not y.name.startswith("present.")]
    joined = select_model_inputs_outputs(joined, kept)
    return joined if read_adapters(joined) else tie_copies(joined)


def _encoder_decoder_connections(
    encoder: ModelProto, decoder: ModelProto
) -> tuple[dict[str, str] | None, dict[str, str]]:
    """Return which encoder output feeds which decoder input, and new names of decoder inputs.

    The result is {encoder output: decoder input} or None, and {decoder input: its new name}.

    Raises:
        ValueError: the decoder needs a cache.
    """
    sources, targets = names_without_default(encoder), names_without_default(decoder)
    if past := [name for name in targets if name.startswith("past")]:
        raise ValueError(
            f"the decoder has the inputs {past[:2]}, a cache: pass decoder_model.onnx, which has "
            "no cache"
        )
    outputs = _output_names(encoder)
    mapping = {name: name for name in outputs if name in targets}
    if not mapping and STATES in targets:
        mapping = {"last_hidden_state" if "last_hidden_state" in outputs else outputs[0]: STATES}
    others = [x for x in targets if x not in mapping.values()]
    rename = {x: f"decoder_{x}" for x in others if x in sources or x == "input_ids"}
    if _MASK in sources and _DECODER_MASK in targets:
        rename[_DECODER_MASK] = _MASK
    return mapping or None, rename


def _output_names(model: ModelProto) -> list[str]:
    return [y.name for y in model.graph.output]


def without_cache(decoder: ModelProto) -> ModelProto:
    """Return the cacheless branch of a merged decoder; other decoders are returned unchanged."""
    if CACHED not in names_without_default(decoder):
        return decoder
    model = to_ir(decoder)
    graph = model.graph
    caching = [n for n in graph if n.op_type == "If" and n.inputs[0] and n.inputs[0].name == CACHED]
    for node in caching:
        taken, left = (node.attributes[name].as_graph() for name in ("else_branch", "then_branch"))
        detach_graphs([left])
        with Emit(taken, all_names(graph)) as op:
            # these get the names of the If's outputs
            results = [op.Identity(y) for y in taken.outputs]
            for y in taken.outputs:
                y.name = op.name(str(y.name)) if y.producer() in set(taken) else y.name
        nodes, constants = list(taken), list(taken.initializers.values())
        taken.outputs.clear()
        taken.initializers.clear()
        taken.remove(nodes)
        for value in constants:
            graph.register_initializer(value)
        graph.insert_before(node, nodes)
        for y, new in zip(list(node.outputs), results, strict=True):
            name, y.name = y.name, None
            ir.convenience.replace_all_uses_with(y, new, replace_graph_outputs=True)
            new.name, new.type, new.shape = name, y.type, y.shape
        remove_node(node)
    graph.inputs[:] = [x for x in graph.inputs if x.uses() or x.const_value is not None]
    return to_proto(model)


def shift_right(labels: Any, start: int, pad: int = 0, ignore_index: int = -100) -> np.ndarray:
    """Return the tokens that a decoder reads while it learns labels, for teacher forcing.

    Args:
        labels: tokens (N, T), integers; `ignore_index` at padding.
        start: the first token of a decoder: `decoder_start_token_id` of its configuration.
        pad: the token in place of `ignore_index`: `pad_token_id` of the configuration.
        ignore_index: the label of tokens that do not count in the loss.

    Returns:
        int64 (N, T): `start`, and the labels without the last column.

    Raises:
        ValueError: labels that are no integers, or not (N, T).

    Examples:
        >>> import onnxgrad as og
        >>> og.language.shift_right([[5, 6, 1], [7, 1, -100]], start=0).tolist()
        [[0, 5, 6], [0, 7, 1]]
    """
    array = np.asarray(labels)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"labels have the shape {array.shape} and the dtype {array.dtype}: pass the integers "
            "of tokens, (N, T)"
        )
    first = np.full((len(array), 1), start)
    shifted = np.concatenate([first, array[:, :-1]], axis=1).astype(np.int64)
    return np.where(shifted == ignore_index, pad, shifted)


def greedy_decode(
    encoder: ModelLike,
    decoder: ModelLike,
    inputs: Any,
    *,
    start: int,
    end: int | None = None,
    pad: int = 0,
    max_new_tokens: int = 64,
) -> np.ndarray:
    """Return the tokens that an encoder-decoder writes, the most probable token at each step.

    No cache is used: for each token, the decoder runs on all tokens before it. `start`, `end` and
    `pad` are in the configuration of the model, as `decoder_start_token_id`, `eos_token_id` and
    `pad_token_id`; tokens that the configuration forces or suppresses have no effect here.

    Args:
        encoder: model, serialized model or path.
        decoder: `decoder_model.onnx` or `decoder_model_merged.onnx`: model, serialized model or
            path.
        inputs: tokens (N, S), with `pad` behind them; an array for the only input of the encoder,
            as features of sound; or all inputs of the encoder by name.
        start: the first token of a row.
        end: the token that ends a row, or None.
        pad: the token at padding, also behind `end` in the result.
        max_new_tokens: the largest number of tokens to write.

    Returns:
        int64 (N, T), without `start`; T is at most `max_new_tokens`.

    Raises:
        ValueError: inputs that the models do not have, or that they need.
        ModelError: a model cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> encoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     e (int64[N,S] input_ids) => (int64[N,S] last_hidden_state)
        ...     { last_hidden_state = Identity(input_ids) }''')
        >>> decoder = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     d (int64[N,T] input_ids, int64[N,S] encoder_hidden_states)
        ...     => (float[N,T,3] logits) <float[3,3] w = {0, 1, 0, 0, 0, 1, 1, 0, 0}>
        ...     { logits = Gather(w, input_ids) }''')
        >>> og.language.greedy_decode(encoder, decoder, [[1]], start=0, end=2).tolist()
        [[1, 2]]
    """
    first, second = read(encoder), without_cache(read(decoder))
    if not isinstance(inputs, Mapping):
        names, array = names_without_default(first), np.asarray(inputs)
        feed = {"input_ids": array, _MASK: array != pad}
        inputs = {n: feed[n] for n in feed if n in names} if len(names) > 1 else {names[0]: array}
    mapping, rename = _encoder_decoder_connections(first, second)
    fed = dict(mapping or {})
    encoded = Predictor(first, [*fed]).run(inputs)
    known = {**inputs, **dict(zip(fed.values(), encoded, strict=True))}
    outputs = _output_names(second)
    predictor = Predictor(second, ["logits"] if "logits" in outputs else outputs[:1])
    tokens = np.full((len(next(iter(inputs.values()))), 1), start, np.int64)
    done = np.zeros(len(tokens), bool)
    while tokens.shape[1] <= max_new_tokens and not done.all():
        given = {**known, _TOKENS: tokens}
        [scores] = predictor.run({x: given.get(rename.get(x, x)) for x in predictor.inputs})
        new = np.where(done, pad, scores[:, -1].argmax(axis=-1))
        tokens = np.concatenate([tokens, new[:, None]], axis=1)
        done |= new == end
    return tokens[:, 1:]
