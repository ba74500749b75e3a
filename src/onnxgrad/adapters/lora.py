"""LoRA: low-rank adapters beside frozen weights, and their sum as a plain model."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.adapters import dora
from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes, product, remove
from onnxgrad.adapters.names import module_names, tensor_names
from onnxgrad.adapters.targets import chosen_targets
from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, Target, Use, targets
from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.errors import ModelError, argument, escaping, named
from onnxgrad.model.notes import ADAPTERS, HEAD, read_adapters, write_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import constant_refs
from onnxgrad.training.parameters.equal_constants import separate_merged, trains_merged

Arrays = tuple[np.ndarray, ...]


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

    Args:
        model: model, serialized model or path; never modified.
        patterns: names, and patterns as "*.query.weight", of factors of MatMul and Gemm, kernels
            of Conv and tables of Gather, also quantized ones. Other tensors that match, and those
            of a new head, are left out.
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
    adapted, every, chosen = _adaptable(writable(model), patterns, options)
    modules = module_names(adapted, every)
    add, notes = Additions(adapted), read_adapters(adapted)
    for name, target in chosen.items():
        generator = np.random.default_rng([operator.index(seed), crc32(name.encode())])
        arrays = _initial(target, options, generator)
        notes.append(insert(add, name, modules[name], target, arrays, options))
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
    if rank < 1:
        raise ValueError(f"{argument('rank', rank)}: an adapter needs at least 1")
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


def writable(model: ModelLike) -> ModelProto:
    """Return a copy of `model` without local functions."""
    proto = read(model)
    return inlined(proto) if proto.functions else deepcopy(proto)


def _initial(target: Target, options: dict[str, Any], generator: np.random.Generator) -> Arrays:
    """Return the initial tensors of an adapter: its factors, and the lengths for DoRA."""
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


def insert(
    add: Additions,
    name: str,
    module: str,
    target: Target,
    arrays: Arrays,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Write the adapter of one weight beside all its uses; return the note about it."""
    first = target.uses[0]
    order = (1, 0) if first.form == LEFT else (0, 1, 2)[: len(arrays)]  # A reads the data
    parts = tensor_names(first.form, options["use_dora"])
    names = [add.name(f"{module}.{part}") for part in parts]
    values = {i: add.tensor(n, arrays[i]) for i, n in zip(order, names, strict=True)}
    note: dict[str, Any] = {
        "kind": "lora",
        "form": first.form,
        "weight": name,
        "module": module,
        "tensors": names,
        "perm": list(first.perm),
        "group": first.group,
        "quantized": target.quantized,
        **options,
    }
    factors = tuple(values[i] for i in range(len(arrays)))
    note["uses"] = [_write_use(add, use, first, factors, options) for use in target.uses]
    return note


def _write_use(
    add: Additions, use: Use, first: Use, factors: tuple[ir.Value, ...], options: dict[str, Any]
) -> dict[str, str]:
    """Write the adapter beside one use; return the names of its values that others need."""
    noted = {"dropout": "", "norm": ""}

    def write(base: ir.Value) -> ir.Value:
        x, noted["dropout"] = add.data(use, dropout=bool(options["dropout"]))
        p, q, *magnitude = factors
        if magnitude:
            data, scaling = (x, bool(noted["dropout"])), options["scaling"]
            triple = (p, q, magnitude[0])
            result, noted["norm"] = dora.write(add, use, base, data, triple, scaling)
            return result
        if use.perm != first.perm:  # tied: this use reads the transposed weight
            p, q = add.op.mT(q), add.op.mT(p)
        change = product(add, use, x, (p, q), options["scaling"] * use.factor)
        return add.emit("Add", base, add.cast(change, use.dtype))

    return {"base": add.beside(use, write), **noted}


@escaping()
def merge_lora(model: ModelLike) -> ModelProto:
    """Return the plain model that computes what `model` with its adapters does.

    Each adapter is added to its weight, in float64 and then rounded to the dtype of the weight. The
    nodes are those that the model had before the adapters; nothing tells any more that it was
    fine-tuned.

    Args:
        model: model with adapters, serialized model or path; never modified.

    Raises:
        ValueError: `model` has no adapters, or has them beside quantized weights.
        ModelError: `model` cannot be read, or another tool modified the adapters.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> og.merge_lora(og.add_lora(model, "fc", rank=1)) == model
        True
    """
    merged = deepcopy(read(model))
    notes = read_adapters(merged)
    if not notes:
        raise ValueError(f"the model has no adapters to merge: {named('add_lora')} adds them")
    if quantized := [note["weight"] for note in notes if note["quantized"]]:
        raise ValueError(
            f"the adapters of {quantized} cannot be merged: these weights are quantized, and "
            "cannot hold the sum. Use the model as it is, or load the adapter into the float model "
            "(load_adapter), merge there, and quantize the result"
        )
    refs = {ref.name: ref for ref in constant_refs(merged)}
    for note in notes:
        if note["weight"] not in refs:
            raise ModelError(
                f"the adapted weight {note['weight']!r} is not in the model: a tool renamed or "
                "removed it. Merge adapters before other tools modify the file"
            )
        ref = refs[note["weight"]]
        old = ref.array()
        pair = [refs[name].array().astype(np.float64) for name in note["tensors"]]
        used = old.astype(np.float64).transpose(note["perm"]) + _change(note, pair)
        if note["use_dora"]:
            used *= pair[2] / dora.lengths(used)
        new = used.transpose(np.argsort(note["perm"])).astype(old.dtype)
        if not np.array_equal(new, old):
            ref.write(new)
    bases = [use["base"] for note in notes for use in note["uses"]]
    remove(merged, bases, [n for note in notes for n in note["tensors"]])
    write_note(merged, ADAPTERS, [])
    write_note(merged, HEAD, [])
    return merged


def _change(note: dict[str, Any], pair: Sequence[np.ndarray]) -> np.ndarray:
    """Return what an adapter adds to its weight, with the axes as in the node that reads it."""
    a, b = pair[:2]
    if note["form"] == LEFT:
        return note["scaling"] * (b @ a)
    if note["form"] != CONV:
        return note["scaling"] * (a @ b)
    groups = range(note["group"])
    parts = zip(np.split(a, len(groups)), np.split(b, len(groups)), strict=True)
    change = [q.reshape(q.shape[:2]) @ p.reshape(len(p), -1) for p, q in parts]
    return note["scaling"] * np.concatenate(change).reshape(len(b), *a.shape[1:])
