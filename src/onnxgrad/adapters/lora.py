"""`add_lora`: low-rank adapters beside the frozen weights that patterns choose."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from zlib import crc32

import numpy as np
from onnx import ModelProto

from onnxgrad.adapters.config import adapter_options
from onnxgrad.adapters.graph import (
    AdapterWriter,
    adapter_dtype,
    column_lengths,
    factor_shapes,
    reason_without_dora,
)
from onnxgrad.adapters.insertion import Arrays, adopt_adapters, copy_inlined, insert_adapter
from onnxgrad.adapters.torch_modules import module_names
from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, AdapterTarget, find_targets
from onnxgrad.checks import check_count
from onnxgrad.errors import argument, escaping, join_first, printable
from onnxgrad.model.notes import ADAPTERS, HEAD, read_adapters, read_metadata, write_metadata
from onnxgrad.model.read import ModelLike
from onnxgrad.model.scopes import unquantized_name
from onnxgrad.reporting import frames_inside, logger
from onnxgrad.training.parameters.choice import matching_weights, quantized_rows
from onnxgrad.training.parameters.equal_constants import separate_merged, shares_tensors

_LISTED = 4  # most reasons in a message


@escaping()
def add_lora(
    model: ModelLike,
    patterns: str | Iterable[str],
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    *,
    use_rslora: bool = False,
    use_dora: bool = False,
    seed: int = 0,
) -> ModelProto:
    """Return `model` with low-rank adapters beside the weights that the patterns match.

    Instead of `x W` it computes `x W + (alpha / rank) dropout(x) A B`, where A has `rank` columns
    (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"); A B of a convolution are
    one to `rank` channels and a pointwise one. A fresh adapter changes nothing. Trainers train the
    adapters, and a new head, by default; other tensors are constants.

    A weight that several nodes read has one adapter for all of them. Local functions are inlined.
    If the file has inputs for adapters (`adapter_inputs`, Olive), the adapters get their names and
    take their places.

    Args:
        model: model, serialized model or path; never modified.
        patterns: names, and patterns as "*.query.weight", of factors of MatMul and Gemm, kernels
            of Conv and tables of Gather, also quantized; other constants that match are left out.
        rank: columns of A; for a convolution with groups a multiple of their number.
        alpha: A B is multiplied by alpha / rank.
        dropout: probability of [0, 1) with which a `Trainer` zeroes elements of the data that an
            adapter reads, in training only; not for embeddings.
        use_rslora: multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023).
        use_dora: also train the length of each column of W + (alpha / rank) A B (Liu et al. 2024).
        seed: of the initial values, which are distributed as in PEFT.

    Raises:
        ValueError: a pattern that matches nothing that can have an adapter; an invalid number.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,2] y)
        ...     <float[3,2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = MatMul(x, w) }''')
        >>> adapted = og.add_lora(model, "w", rank=2)
        >>> [(t.name, list(t.dims)) for t in adapted.graph.initializer]
        [('w', [3, 2]), ('w.lora_A.weight', [3, 2]), ('w.lora_B.weight', [2, 2])]
        >>> [node.op_type for node in og.merge_lora(adapted).graph.node]
        ['MatMul']
    """
    check_count("rank", rank)
    if not 0 <= dropout < 1:
        given = argument("add_lora.dropout", dropout)
        raise ValueError(f"{given}: give a probability of [0, 1)")
    options = adapter_options(
        operator.index(rank), alpha, dropout=dropout, use_rslora=use_rslora, use_dora=use_dora
    )
    proto, places = adopt_adapters(model)
    separated = copy_inlined(separate_merged(proto))
    targets = find_targets(separated)
    chosen = _matching_constants(separated, targets, patterns, options)
    if shares_tensors(proto, separated, chosen):
        proto = separated  # an exporter had merged equal weights, which are separate here
    else:
        targets = find_targets(proto)
    modules = module_names(proto, targets)
    writer, notes = AdapterWriter(proto), read_adapters(proto)
    for name in chosen:
        arrays = _fresh_adapter(targets[name], options, operator.index(seed), name)
        note = insert_adapter(
            writer, name, modules[name], targets[name], arrays, options, places.get(name)
        )
        notes.append(note)
    write_metadata(proto, ADAPTERS, notes)
    return proto


def _fresh_adapter(target: AdapterTarget, options: dict[str, Any], seed: int, name: str) -> Arrays:
    """Return the initial tensors of an adapter: two factors whose product is 0, and for DoRA the
    column lengths of the weight.
    """
    generator = np.random.default_rng([seed, crc32(name.encode())])
    use = target.uses[0]
    dtype = adapter_dtype(use).numpy()
    p, q = (np.zeros(shape) for shape in factor_shapes(use, options["rank"]))
    if use.form == CONV:
        bound = 1 / math.sqrt(math.prod(use.shape[1:]))
        p = generator.uniform(-bound, bound, p.shape)
    elif use.form == EMBEDDING:
        q = generator.normal(size=q.shape)
    elif use.form == LEFT:
        q = generator.uniform(-1, 1, q.shape) / math.sqrt(use.shape[-1])
    else:
        p = generator.uniform(-1, 1, p.shape) / math.sqrt(use.shape[-2])
    arrays: Arrays = (p, q)
    if options["use_dora"]:
        arrays += (column_lengths(target.ref.array().transpose(use.perm)),)
    return tuple(array.astype(dtype) for array in arrays)


def _matching_constants(
    proto: ModelProto,
    targets: dict[str, AdapterTarget],
    patterns: str | Iterable[str],
    options: Mapping[str, Any],
) -> list[str]:
    """Return the names of constants that match patterns and can have an adapter, in graph order.

    Raises:
        ValueError: a pattern matches nothing, or nothing that can have an adapter.
    """
    reasons = _reasons_without_adapter(proto, targets, options)
    quantized = [name for name, target in targets.items() if target.quantized]
    aliases = {row.name: row.alias for row in quantized_rows(proto)} if quantized else {}
    own = {name for note in read_adapters(proto) for name in note["tensors"]}
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {n for n in quantized if _matches_any_name(pattern, n, aliases.get(n, ""))}
        try:
            matched |= set(matching_weights(proto, [pattern], "weight for an adapter")) - own
        except ValueError:
            if not matched:
                raise
        possible = {name for name in matched if name not in reasons}
        if not possible:
            told = [
                f"{printable(n)!r}: {reasons[n]}" for n in targets if n in matched & set(reasons)
            ]
            kinds = "name weights of MatMul, Gemm, Conv or Gather that are no adapters"
            raise ValueError(
                f"no weight that {pattern!r} matches can have an adapter: "
                f"{join_first(told, _LISTED, '; ') or kinds}"
            )
        chosen |= possible
        for name in sorted(matched & set(reasons)):
            logger.info("no adapter for %s: %s", printable(name), reasons[name])
        missed = [n for n in targets if n in matched and n in reasons and targets[n].missed]
        if missed:
            listed = [f"{printable(n)!r}: {reasons[n]}" for n in missed]
            warnings.warn(
                f"layers that {pattern!r} matches get no adapter: "
                f"{join_first(listed, _LISTED, '; ')}",
                stacklevel=frames_inside() + 1,
            )
    if not chosen:
        raise ValueError("patterns is empty: name the weights that shall get an adapter")
    return [name for name in targets if name in chosen]


def _matches_any_name(pattern: str, *names: str) -> bool:
    """Return whether `pattern` matches one of `names`, or one of the names that float weights had
    before quantization.
    """
    names = (*names, *map(unquantized_name, names))
    return any(n == pattern or fnmatchcase(n, pattern) for n in names if n)


def _reasons_without_adapter(
    proto: ModelProto, targets: dict[str, AdapterTarget], options: Mapping[str, Any]
) -> dict[str, str]:
    """Return `{name: reason}` for the constants in `targets` that cannot have an adapter."""
    reasons = {name: target.reason for name, target in targets.items() if target.reason}
    for name, target in targets.items():
        group = target.uses[0].group if target.uses else 1
        if name in reasons:
            continue
        if options["rank"] % group:
            reasons[name] = (
                f"it has {group} groups, and {argument('rank', options['rank'])} is no multiple"
            )
        elif options["use_dora"] and (reason := reason_without_dora(target)):
            reasons[name] = reason
    for name in read_metadata(proto, HEAD):
        reasons[name] = "it belongs to the new head, which trains as a whole"
    for note in read_adapters(proto):
        reasons[note["weight"]] = "it has an adapter already"
        reasons |= dict.fromkeys(note["tensors"], "it belongs to an adapter")
    return reasons
