"""Adapters by the modules of PyTorch, where the tool that wrote the file renamed or packed these.

The builder of onnxruntime-genai calls `model.layers.0.self_attn.q_proj` of transformers
`model.layers.0.attn.q_proj.MatMul`, and joins the weights of q, k and v to `attn.qkv_proj.MatMul`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.config import options_of
from onnxgrad.adapters.names import FACTORS, tensor_names
from onnxgrad.adapters.uses import CONV, LINEAR, Target, Use, attributes
from onnxgrad.errors import unknown
from onnxgrad.model.traversal import all_nodes

Tensors = dict[str, np.ndarray]
Columns = dict[str, dict[str, slice]]  # those of the parts of a packed module, by its name

A, B = tensor_names(LINEAR, use_dora=False)
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BUILDER = re.compile(r"(.+)\.MatMul(?:[._].*)?")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
_ATTENTION = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention")


@dataclass
class Entry:
    """The adapter of one module in the layout of PEFT, its settings, and its path in PyTorch."""

    tensors: Tensors
    options: dict[str, Any]
    path: str = ""


def torch_path(module: str) -> str:
    """Return the path in PyTorch of a module of the model: itself, unless genai's builder named it.

    >>> torch_path("model.layers.0.attn.q_proj.MatMul")
    'model.layers.0.self_attn.q_proj'
    """
    match = _BUILDER.fullmatch(module)
    return re.sub(r"(layers\.\d+)\.attn\.", r"\1.self_attn.", match[1]) if match else module


def packed_columns(proto: ModelProto, weights: Mapping[str, Target]) -> Columns:
    """Return the columns of q, k and v, or of gate and up, in weights that hold them side by side.

    Args:
        proto: the model.
        weights: uses of the weights, by the names of their modules.
    """
    found: Columns = {}
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in all_nodes(proto.graph.node):
        for name in node.input[:1] if node.op_type != "Add" else node.input:
            readers[name].append(node)
    for module, target in weights.items():
        parts = _PACKED.get(torch_path(module).rpartition(".")[2], ())
        if not parts or target.reason or not target.uses or target.uses[0].form != LINEAR:
            continue
        use = target.uses[0]
        total, shares = use.shape[-1], [1] * len(parts)
        if len(parts) == 3:
            attention = _attention(readers, use.node.output[0])
            if attention is None:
                continue
            options = attributes(attention)
            heads = options["num_heads"]
            shares = [heads, *[options.get("kv_num_heads") or heads] * 2]
        edges = np.cumsum([0, *shares]) * total // sum(shares)
        bounds = zip(parts, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        found[module] = {part: slice(start, stop) for part, start, stop in bounds}
    return found


def _attention(readers: Mapping[str, list[NodeProto]], name: str) -> NodeProto | None:
    """Return the attention that reads `name` as its packed q, k and v, or behind an adapter."""
    for node in readers[name]:
        if node.op_type in ("Add", "Mul"):
            return _attention(readers, node.output[0])
        if node.op_type in _ATTENTION and not any(node.input[1:3]):
            return node
    return None


def to_model(
    found: Mapping[str, Tensors],
    config: Mapping[str, Any],
    modules: Mapping[str, Target],
    columns: Columns,
) -> dict[str, Entry]:
    """Return the adapters in a file by the modules of the model.

    Those of q, k and v become one with all of their ranks, if the model has one weight for them;
    that of a packed module is cut, if the model has a weight for each part.

    Args:
        found: tensors of the adapters in the file, by their modules.
        config: the settings in the file.
        modules: modules of the model, and the uses of their weights.
        columns: see `packed_columns`.

    Raises:
        ValueError: the model lacks a module.
    """
    places: dict[str, list[tuple[str, slice | None]]] = defaultdict(list)
    for name in modules:
        places[_key(name)].append((name, None))
        for part, columns_of_part in columns.get(name, {}).items():
            places[_sibling(_key(name), part)].append((name, columns_of_part))
    entries: dict[str, Entry] = {}
    pieces: dict[str, list[tuple[slice, Entry]]] = defaultdict(list)
    for module, tensors in found.items():
        close, place = _close(module, modules), places.get(_key(module), [])
        parts = _PACKED.get(_key(module).rpartition(".")[2], ())
        separate = [places.get(_sibling(_key(module), part), []) for part in parts]
        if not close and len(place) == 1 and place[0][1] is None:
            close = [place[0][0]]
        linear = {*tensors} in ({A, B}, {FACTORS})
        rank = _rank_of(tensors, modules[close[0]].uses[0] if len(close) == 1 else None)
        entry = Entry(tensors, options_of(config, module, rank), module)
        if len(close) == 1:
            entries[close[0]] = entry
        elif not close and len(place) == 1 and place[0][1] is not None and linear:
            pieces[place[0][0]].append((place[0][1], entry))
        elif not close and parts and all(len(s) == 1 for s in separate) and linear:
            names = [s[0][0] for s in separate]
            edges = np.cumsum([_width(modules[name]) for name in names])[:-1]
            last = B if B in tensors else FACTORS
            for name, rows in zip(names, np.split(tensors[last], edges), strict=True):
                entries[name] = Entry(tensors | {last: rows}, entry.options)
        else:
            raise unknown("module of the adapter", module, modules, close)
    joined = {name: _joined(p, _width(modules[name])) for name, p in pieces.items()}
    return entries | joined


def _joined(pieces: list[tuple[slice, Entry]], total: int) -> Entry:
    """Return one adapter that is several, each for some of the columns of a weight."""
    pieces = sorted(pieces, key=lambda piece: piece[0].start)
    if FACTORS in pieces[0][1].tensors:
        factors = np.ones((total, 1), pieces[0][1].tensors[FACTORS].dtype)
        for rows, entry in pieces:
            factors[rows] = entry.tensors[FACTORS]
        return Entry({FACTORS: factors}, pieces[0][1].options)
    scalings = [entry.options["scaling"] for _, entry in pieces]
    scaling = scalings[0] if len(set(scalings)) == 1 else 1.0
    ranks = [len(entry.tensors[A]) for _, entry in pieces]
    b = np.zeros((total, sum(ranks)), pieces[0][1].tensors[B].dtype)
    for (rows, entry), last in zip(pieces, np.cumsum(ranks).tolist(), strict=True):
        factor = entry.tensors[B] * b.dtype.type(entry.options["scaling"] / scaling)
        b[rows, last - factor.shape[1] : last] = factor
    options = pieces[0][1].options | {
        "rank": sum(ranks),
        "alpha": scaling * sum(ranks),
        "use_rslora": False,
        "scaling": scaling,
    }
    return Entry({A: np.concatenate([entry.tensors[A] for _, entry in pieces]), B: b}, options)


def to_torch(entries: Mapping[str, Entry], columns: Columns) -> dict[str, Entry]:
    """Return adapters by their modules in PyTorch: one of packed weights is one of each part.

    A part has the rows of A that its columns of B use.
    """
    result: dict[str, Entry] = {}
    for module, entry in entries.items():
        path = entry.path or torch_path(module)
        if module in columns and FACTORS in entry.tensors and not entry.options["feedforward"]:
            for part, rows in columns[module].items():
                factors = entry.tensors[FACTORS][rows]
                if np.any(factors != 1):
                    result[_sibling(path, part)] = Entry({FACTORS: factors}, entry.options)
            continue
        if module not in columns or {*entry.tensors} != {A, B}:
            result[path] = entry
            continue
        a, b = entry.tensors[A], entry.tensors[B]
        for part, rows in columns[module].items():
            used = b[rows].any(0) if b.any() else np.ones(len(a), bool)
            options = dict(entry.options)
            if 0 < used.sum() < len(a):
                rank, scaling = int(used.sum()), options["scaling"]
                options |= {"rank": rank, "alpha": scaling * rank, "use_rslora": False}
            if used.any():
                tensors = {A: a[used], B: b[rows][:, used]}
                result[_sibling(path, part)] = Entry(tensors, options)
    return result


def _width(target: Target) -> int:
    return target.uses[0].shape[-1]


def _rank_of(tensors: Tensors, use: Use | None) -> int:
    """Return the rank that the first factor in a file has; 1 if it lacks one."""
    form = use.form if use else LINEAR
    a = tensors.get(tensor_names(form, use_dora=False)[0])
    shape = (1,) if a is None else a.shape
    return shape[0] if form == CONV or len(shape) < 2 else shape[-2]


def _close(module: str, modules: Collection[str]) -> list[str]:
    """Return the modules of the model for one of a file: another model may have been around one."""
    if module in modules:
        return [module]
    return [m for m in modules if f".{m}".endswith(f".{module}") or module.endswith(f".{m}")]


def _key(module: str) -> str:
    """Return what a module and its counterpart of another tool have in common.

    >>> _key("base.layers.3.self_attn.dense")
    '3.attn.o_proj'
    """
    path = torch_path(module)
    match = _LAYER.fullmatch(path)
    if not match:
        return path.rpartition(".")[2]
    rest = re.sub(r"^(self_attn|self_attention|attention)\.", "attn.", match[2])
    return f"{match[1]}.{re.sub(r'^attn.(dense|out_proj)$', 'attn.o_proj', rest)}"


def _sibling(path: str, name: str) -> str:
    """Return `path` with another last part."""
    return ".".join([*path.split(".")[:-1], name])
