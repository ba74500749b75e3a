"""LoRA: low-rank adapters beside frozen weights, and their sum as a plain model."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np
from onnx import ModelProto

from onnxgrad.adapters import dora
from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes
from onnxgrad.adapters.insertion import Arrays, adopted, insert, writable
from onnxgrad.adapters.names import module_names
from onnxgrad.adapters.targets import chosen_targets
from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, Target, Use, targets
from onnxgrad.checks import check_count
from onnxgrad.errors import argument, escaping
from onnxgrad.model.notes import ADAPTERS, read_adapters, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.training.parameters.equal_constants import separate_merged, trains_merged


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
    """Return `model` with low-rank adapters beside the weights that the patterns name.

    Instead of `x W` it computes `x W + (alpha / rank) dropout(x) A B`, where A has `rank` columns
    (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"); A B of a convolution are
    one to `rank` channels and a pointwise one. A fresh adapter changes nothing. Trainers train the
    adapters, and a new head, by default; other tensors are constants.

    A weight that several nodes read has one adapter for all of them. Local functions are inlined.
    Inputs of the file for adapters (`adapter_inputs`, Olive) give place and names to these.

    Args:
        model: model, serialized model or path; never modified.
        patterns: names, and patterns as "*.query.weight", of factors of MatMul and Gemm, kernels
            of Conv and tables of Gather, also quantized; others that match are left out.
        rank: columns of A; for a convolution with groups a multiple of their number.
        alpha: A B is multiplied by alpha / rank.
        dropout: probability of [0, 1) with which a `Trainer` zeroes elements of the data that an
            adapter reads, in training only; not for embeddings.
        use_rslora: multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023).
        use_dora: also train the length of each column of W + (alpha / rank) A B (Liu et al. 2024).
        seed: of the initial values, which are distributed as PEFT's.

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
    options = _options(operator.index(rank), alpha, dropout, use_rslora, use_dora)
    proto, slots = adopted(model)
    adapted, every, chosen = _adaptable(proto, patterns, options)
    modules = module_names(adapted, every)
    add, notes = Additions(adapted), read_adapters(adapted)
    for name, target in chosen.items():
        arrays = _initial(target, options, [operator.index(seed), crc32(name.encode())])
        slot = slots.get(name)
        notes.append(insert(add, name, modules[name], target, arrays, options, slot))
    write_note(adapted, ADAPTERS, notes)
    return adapted


def _adaptable(
    proto: ModelProto, patterns: str | Iterable[str], options: dict[str, Any]
) -> tuple[ModelProto, dict[str, Target], dict[str, Target]]:
    """Return the model, its constants, and those that get adapters: of merged ones, each its own"""
    separated = writable(separate_merged(proto))
    every = targets(separated)
    chosen = chosen_targets(separated, every, patterns, options)
    if trains_merged(proto, separated, chosen):
        return separated, every, chosen
    every = targets(proto)
    return proto, every, {name: every[name] for name in chosen}


def _options(
    rank: int, alpha: float, dropout: float, use_rslora: bool, use_dora: bool
) -> dict[str, Any]:
    """Return the settings of an adapter as they are noted."""
    check_count("rank", rank)
    if not 0 <= dropout < 1:
        given = argument("add_lora.dropout", dropout)
        raise ValueError(f"{given}: give a probability of [0, 1)")
    return {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": float(dropout),
        "use_rslora": bool(use_rslora),
        "use_dora": bool(use_dora),
        "scaling": float(alpha / (math.sqrt(rank) if use_rslora else rank)),
    }


def _initial(target: Target, options: dict[str, Any], seed: list[int]) -> Arrays:
    """Return the initial tensors of an adapter: its factors, and the lengths for DoRA."""
    generator = np.random.default_rng(seed)
    use, rank = target.uses[0], options["rank"]
    dtype = adapter_dtype(use).numpy()
    arrays: Arrays = _factors(use, rank, generator)
    if options["use_dora"]:
        arrays += (dora.lengths(target.ref.array().transpose(use.perm)),)
    return tuple(array.astype(dtype) for array in arrays)


def _factors(use: Use, rank: int, generator: np.random.Generator) -> Arrays:
    """Return two factors whose product is zero."""
    p, q = (np.zeros(shape) for shape in factor_shapes(use, rank))
    if use.form == CONV:
        bound = 1 / math.sqrt(math.prod(use.shape[1:]))
        p = generator.uniform(-bound, bound, p.shape)
    elif use.form == EMBEDDING:
        q = generator.normal(size=q.shape)
    elif use.form == LEFT:
        q = generator.uniform(-1, 1, q.shape) / math.sqrt(use.shape[-1])
    else:
        p = generator.uniform(-1, 1, p.shape) / math.sqrt(use.shape[-2])
    return p, q
