"""Map adapters between PyTorch modules and weights of a model that renames, joins or ties them.

The builder of onnxruntime-genai calls `model.layers.0.self_attn.q_proj` of transformers
`model.layers.0.attn.q_proj.MatMul`, and joins the weights of q, k and v to `attn.qkv_proj.MatMul`.
It splits the `gate_up_proj` of Phi-3, whose network has a `qkv_proj`, too. Other tools keep the
modules of the network. An embedding and a last layer that share a weight have one adapter in the
model, and one for each module in PEFT.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.config import options_of_module
from onnxgrad.adapters.graph import column_lengths, peft_names, reason_without_dora
from onnxgrad.adapters.uses import CONV, EMBEDDING, LINEAR, AdapterTarget, attribute_values
from onnxgrad.errors import unknown
from onnxgrad.model.constants import ConstantRef
from onnxgrad.model.scopes import unquantized_name
from onnxgrad.model.traversal import all_nodes
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators import operator_of
from onnxgrad.reporting import frames_inside
from onnxgrad.training.parameters.aliases import aliases, module_of
from onnxgrad.training.parameters.choice import quantized_rows

Tensors = dict[str, np.ndarray]
Columns = dict[str, dict[str, slice]]  # {packed module: {part: slice of the weight's columns}}
Paths = dict[str, dict[str, str]]  # {module of a tied weight: {form of the layer: path in PyTorch}}

A, B, _LENGTHS = peft_names(LINEAR, use_dora=True)
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# families of onnxruntime-genai whose networks have them
_KEEPS_PACKED = ("phi3", "phi3v", "phi4mm")
_OWN_NAMES = {"phi": {"o_proj": "dense"}}
FAMILIES = (*_KEEPS_PACKED, *_OWN_NAMES)
_BUILDER = re.compile(r"(.+)\.MatMul(?:[._].*)?")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")


@dataclass
class Adapter:
    """The adapter of one PyTorch module: its tensors in PEFT's layout, its settings, and the path
    of the module.
    """

    tensors: Tensors
    options: dict[str, Any]
    path: str = ""


def module_names(proto: ModelProto, targets: Mapping[str, AdapterTarget]) -> dict[str, str]:
    """Return the module path of each weight, such as "encoder.layer.0.query".

    The path is the name of the weight, or its alias if an exporter numbered it, without ".weight";
    for integers, the name of the floats before quantization. Weights of one module keep their
    names.
    """
    aliased = aliases(proto)
    if any(target.quantized for target in targets.values()):
        aliased |= {row.name: row.alias for row in quantized_rows(proto) if row.alias}
    modules = {
        name: aliased.get(name, unquantized_name(name)).removesuffix(".weight") for name in targets
    }
    counts = Counter(modules.values())
    return {
        name: module if counts[module] == 1 else name.removesuffix(".weight")
        for name, module in modules.items()
    }


def torch_path(module: str, family: str = "") -> str:
    """Return the path in PyTorch of a module named by the model builder of onnxruntime-genai; other
    modules keep their path.

    The path has the names of the network of a `family`, such as "phi3", or else of Llama. Parts
    that the builder split have the path of the module of which they are a part.

    >>> torch_path("model.layers.0.attn.q_proj.MatMul")
    'model.layers.0.self_attn.q_proj'
    >>> torch_path("model.layers.0.mlp.up_proj.MatMul", "phi3")
    'model.layers.0.mlp.gate_up_proj'
    """
    match = _BUILDER.fullmatch(module)
    if not match:
        return module
    path = re.sub(r"(layers\.\d+)\.attn\.", r"\1.self_attn.", match[1])
    last = _last_name_of_path(path)
    wholes = [w for w, parts in _PACKED.items() if last in parts and family in _KEEPS_PACKED]
    return _sibling_path(path, wholes[0] if wholes else _OWN_NAMES.get(family, {}).get(last, last))


def packed_columns(proto: ModelProto, weights: Mapping[str, AdapterTarget]) -> Columns:
    """Return, for each module whose weight joins q, k and v or gate and up, the slices of columns
    of these parts.

    Args:
        proto: the model.
        weights: uses of the weights, by the names of their modules.
    """
    found: Columns = {}
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in all_nodes(proto.graph.node):
        for name in node.input if _is_columnwise(node) else node.input[:1]:
            readers[name].append(node)
    constants = {ref.graph_name: ref for ref in constant_refs(proto)}
    for module, target in weights.items():
        parts = (
            _PACKED.get(_last_name_of_path(torch_path(module)), ())
            if _BUILDER.fullmatch(module)
            else ()
        )
        if not parts or not target.uses or target.uses[0].form != LINEAR:
            continue
        shares = [1] * len(parts)
        if len(parts) == 3:
            shares = _widths_of_qkv(readers, constants, target.uses[0].node)
        if len(shares) == len(parts):
            edges = np.cumsum([0, *shares]) * _weight_column_count(target) // sum(shares)
            bounds = zip(parts, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
            found[module] = {part: slice(start, stop) for part, start, stop in bounds}
    return found


def _widths_of_qkv(
    readers: Mapping[str, list[NodeProto]], constants: Mapping[str, ConstantRef], product: NodeProto
) -> list[int]:
    """Return the relative widths of q, k and v in the result of `product`; [] if no node behind
    `product` states the widths.

    The Split or the attention that reads the product tells them; a bias and an adapter may be added
    in between.
    """
    waiting = list(readers[product.output[0]])
    for node in waiting:  # the loop appends to `waiting`
        options = attribute_values(node)
        if _is_columnwise(node):
            waiting += [n for n in readers[node.output[0]] if n not in waiting]
        elif "attention" in operator_of(node).traits and not any(node.input[1:3]):
            heads = options["num_heads"]
            return [heads, *[options.get("kv_num_heads") or heads] * 2]
        elif node.op_type == "Split":
            sizes = constants.get((*node.input, "")[1])
            return [1] * len(node.output) if sizes is None else sizes.array().tolist()
    return []


def _is_columnwise(node: NodeProto) -> bool:
    """Return whether a node computes each output column from the same column of its operands."""
    return "elementwise" in operator_of(node).traits


def model_adapters(
    found: Mapping[str, Tensors],
    config: Mapping[str, Any],
    modules: Mapping[str, AdapterTarget],
    columns: Columns,
) -> dict[str, Adapter]:
    """Return `{module path in the model: Adapter}` for the adapters `found` in a file of PEFT.

    The adapters of q, k and v become one whose rank is the sum of their ranks, if the model has one
    weight for them; the adapter of a packed module is cut, if the model has a weight for each part.

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
        places[_exporter_independent_name(name)].append((name, None))
        for part, columns_of_part in columns.get(name, {}).items():
            places[_sibling_path(_exporter_independent_name(name), part)].append(
                (name, columns_of_part)
            )
    entries: dict[str, Adapter] = {}
    pieces: dict[str, list[tuple[slice, Adapter]]] = defaultdict(list)
    for module, tensors in found.items():
        portable = _exporter_independent_name(module)
        ends = (m for m in modules if f".{m}".endswith(f".{module}") or module.endswith(f".{m}"))
        close, place = [module] if module in modules else list(ends), places.get(portable, [])
        parts = _PACKED.get(_last_name_of_path(portable), ())
        separate = [places.get(_sibling_path(portable, part), []) for part in parts]
        if not close and len(place) == 1 and place[0][1] is None:
            close = [place[0][0]]
        linear = {*tensors} in ({A, B}, {A, B, _LENGTHS})
        rank = _rank_of_peft_tensors(
            tensors, modules[close[0]].uses[0].form if len(close) == 1 else LINEAR
        )
        entry = Adapter(tensors, options_of_module(config, module, rank), module)
        if len(close) == 1:
            entries[close[0]] = entry
        elif not close and len(place) == 1 and place[0][1] is not None and linear:
            pieces[place[0][0]].append((place[0][1], entry))
        elif not close and parts and all(len(s) == 1 for s in separate) and linear:
            names = [s[0][0] for s in separate]
            widths = {name: _weight_column_count(modules[name]) for name in names}
            entries |= _split_adapter_by_columns(entry, _consecutive_column_slices(widths))
        else:
            raise unknown("module of the adapter", module, modules, close)
    for name, each in pieces.items():
        target = modules[name]
        base = None
        if not reason_without_dora(target):
            base = column_lengths(target.ref.array().transpose(target.uses[0].perm))
        entries[name] = _join_column_adapters(each, _weight_column_count(target), name, base)
    return entries


def _join_column_adapters(
    pieces: list[tuple[slice, Adapter]], total: int, module: str, base: np.ndarray | None = None
) -> Adapter:
    """Join adapters of column slices of a weight to one adapter of the whole weight of `module`.

    Its rank is the sum of their ranks, or the rank of the A that all share. Columns without an
    adapter keep their lengths in `base`, the lengths of all columns of the weight.

    Raises:
        ValueError: some columns have no lengths.
    """
    pieces = sorted(pieces, key=lambda piece: piece[0].start)
    (_, first), entries = pieces[0], [entry for _, entry in pieces]
    covered = sum(rows.stop - rows.start for rows, _ in pieces) == total
    if _LENGTHS in first.tensors and base is None and not covered:
        raise ValueError(
            f"the file has DoRA adapters for some columns of {module!r} only, and the lengths of "
            f"the other columns are unknown: train an adapter for each part of {module!r}"
        )
    scalings = [entry.options["scaling"] for entry in entries]
    scaling = scalings[0] if len(set(scalings)) == 1 else 1.0
    factors_a = [entry.tensors[A] for entry in entries]
    shared = scaling == scalings[0] and all(np.array_equal(a, factors_a[0]) for a in factors_a)
    factors_a = factors_a[:1] if shared else factors_a
    rank = sum(map(len, factors_a))
    b, begin = np.zeros((total, rank), first.tensors[B].dtype), 0
    for rows, entry in pieces:
        factor = entry.tensors[B] * b.dtype.type(entry.options["scaling"] / scaling)
        b[rows, begin : begin + factor.shape[1]] = factor
        begin += 0 if shared else factor.shape[1]
    options = {"rank": rank, "alpha": scaling * rank, "use_rslora": False, "scaling": scaling}
    options = first.options if shared else first.options | options
    tensors = {A: np.concatenate(factors_a), B: b}
    if _LENGTHS in first.tensors:
        tensors[_LENGTHS] = np.ones(total, b.dtype) if base is None else base.astype(b.dtype)
        for rows, entry in pieces:
            tensors[_LENGTHS][rows] = entry.tensors[_LENGTHS]
    return Adapter(tensors, options)


def torch_adapters(
    entries: Mapping[str, Adapter],
    modules: Mapping[str, AdapterTarget],
    columns: Columns,
    family: str = "",
) -> dict[str, Adapter]:
    """Return `{module path in PyTorch: Adapter}` for the adapters `entries` of a model.

    The adapter of a weight that the builder joined becomes an adapter of each part, with the rows
    of A that the part's columns of B use. The adapters of weights that the builder split become the
    adapter of their module.

    Args:
        entries: the adapters, by their modules in the model.
        modules: modules of the model, and the uses of their weights.
        columns: see `packed_columns`.
        family: see `torch_path`.

    Raises:
        ValueError: PyTorch has no such adapter, or it is unknown where the parts end.
    """
    result: dict[str, Adapter] = {}
    split: dict[str, dict[str, Adapter]] = defaultdict(dict)
    for module, entry in entries.items():
        path, own = entry.path or torch_path(module, family), torch_path(module)
        kept = entry.path or family in _KEEPS_PACKED or not _BUILDER.fullmatch(module)
        if _last_name_of_path(own) in _PACKED.get(_last_name_of_path(path), ()):
            split[path][_last_name_of_path(own)] = entry
        elif kept or _last_name_of_path(path) not in _PACKED:
            result[path] = entry
        elif module in columns:
            result |= {
                _sibling_path(path, n): e
                for n, e in _split_adapter_by_columns(entry, columns[module]).items()
            }
        else:
            raise ValueError(
                f"no Split or attention that reads the product of {module!r} tells where q, k and "
                "v end in it, and PEFT has an adapter for each of them: save it as .onnx_adapter"
            )
    widths = {
        torch_path(m): _weight_column_count(target) for m, target in modules.items() if target.uses
    }
    for path, found in split.items():
        part_widths = {
            part: widths[_sibling_path(path, part)] for part in _PACKED[_last_name_of_path(path)]
        }
        places = _consecutive_column_slices(part_widths)
        pieces = [(places[part], entry) for part, entry in found.items()]
        result[path] = _join_column_adapters(pieces, sum(part_widths.values()), path)
    return result


def _consecutive_column_slices(widths: Mapping[str, int]) -> dict[str, slice]:
    """Return `{name: slice of columns}` of consecutive column blocks, given their widths `{name:
    width}`.
    """
    ends = np.cumsum([*widths.values()]).tolist()
    return {n: slice(end - w, end) for (n, w), end in zip(widths.items(), ends, strict=True)}


def _split_adapter_by_columns(entry: Adapter, columns: Mapping[str, slice]) -> dict[str, Adapter]:
    """Split the adapter of a joined weight by its columns; return `{name: Adapter}` of the parts
    whose adapter is not zero.

    If B is zero everywhere, as before training, each part gets an adapter.
    """
    tensors, options = entry.tensors, entry.options
    a, b, result = tensors[A], tensors[B], {}
    for part, rows in columns.items():
        used = np.asarray(b[rows].any(0)) if b.any() else np.ones(len(a), bool)
        if not used.any() and _LENGTHS not in tensors:
            continue
        used[:1] |= not used.any()  # the lengths of the part have trained: it keeps rank 1
        rank, scaling = int(used.sum()), options["scaling"]
        fewer = {"rank": rank, "alpha": scaling * rank, "use_rslora": False}
        own = {n: x[rows] for n, x in tensors.items() if n == _LENGTHS}
        result[part] = Adapter(
            {A: a[used], B: b[rows][:, used], **own},
            options if rank == len(a) else options | fewer,
            entry.path,
        )
    return result


def _weight_column_count(target: AdapterTarget) -> int:
    return target.uses[0].shape[-1]


def _rank_of_peft_tensors(tensors: Tensors, form: str) -> int:
    """Return the rank of an adapter from its tensors in PEFT's layout; 1 if A is missing."""
    a = tensors.get(peft_names(form, use_dora=False)[0])
    shape = (1,) if a is None else a.shape
    return shape[0] if form == CONV or len(shape) < 2 else shape[-2]


def _exporter_independent_name(module: str) -> str:
    """Return the layer index and the last names of a module path, such as "3.attn.o_proj", which
    all exporters have in common.

    >>> _exporter_independent_name("base.layers.3.self_attn.dense")
    '3.attn.o_proj'
    """
    path = torch_path(module)
    match = _LAYER.fullmatch(path)
    if not match:
        return _last_name_of_path(path)
    rest = re.sub(r"^(self_attn|self_attention|attention)\.", "attn.", match[2])
    return f"{match[1]}.{re.sub(r'^attn.(dense|out_proj)$', 'attn.o_proj', rest)}"


def _last_name_of_path(path: str) -> str:
    """Return the last name of a module path, "q_proj" of "self_attn.q_proj"."""
    return path.rpartition(".")[2]


def _sibling_path(path: str, name: str) -> str:
    """Return the module path `path` with `name` in place of its last name."""
    return ".".join([*path.split(".")[:-1], name])


# -- weights that an embedding and a last layer share ---------------------------------------------


def tied_paths(modules: Mapping[str, AdapterTarget]) -> Paths:
    """Return the PyTorch paths of embedding and last layer for each weight that both share,
    `{module: {form: path}}`.
    """
    found: Paths = {}
    for module, target in modules.items():
        paths = {}
        for use in target.uses:
            metadata = {entry.key: entry.value for entry in use.node.metadata_props}
            paths[use.form] = module_of(use.node.name, metadata)
        if {*paths} == {EMBEDDING, LINEAR} and all(paths.values()):
            found[module] = paths
    return found


def split_tied_adapters(entries: Mapping[str, Adapter], tied: Paths) -> dict[str, Adapter]:
    """Return the adapters by PyTorch module; modules that share a tied weight each get a copy of
    its adapter.
    """
    result: dict[str, Adapter] = {}
    for module, entry in entries.items():
        for form, path in tied.get(module, {}).items():
            result[path] = replace(
                entry, tensors=_factors_in_peft_layout(entry.tensors, form), path=path
            )
        if module not in tied:
            result[module] = entry
    return result


def join_tied_adapters(
    found: Mapping[str, Tensors], tied: Paths, forms: Mapping[str, str]
) -> dict[str, Tensors]:
    """Return the adapter tensors `found` in a file by module of the model; PyTorch modules that
    share a weight become one module.

    Raises:
        ValueError: modules that share a weight have unequal adapters.
    """
    result = dict(found)
    for module, paths in tied.items():
        given = {path: result.pop(path) for path in paths.values() if path in result}
        if not given:
            continue
        each = [_factors_in_peft_layout(tensors, forms[module]) for tensors in given.values()]
        if any(not np.array_equal(each[0][n], x[n]) for x in each for n in each[0]):
            raise ValueError(
                f"{list(given)} share a weight in the model, and have different adapters in the "
                "file: a shared weight takes one adapter. Export a model in which the weights are "
                "not shared"
            )
        if len(given) < len(paths):
            warnings.warn(
                f"the adapter of {next(iter(given))!r} acts at {sorted(paths.values())} in the "
                "model, which share a weight; PEFT has it in one of these",
                stacklevel=frames_inside() + 1,
            )
        result[module] = each[0]
    return result


def _factors_in_peft_layout(tensors: Tensors, form: str) -> Tensors:
    """Return the factors of an adapter in the layout that PEFT has for layers of the kind `form`, a
    linear layer or an embedding.
    """
    names = peft_names(form, use_dora=False)
    other = peft_names(EMBEDDING if form == LINEAR else LINEAR, use_dora=False)
    if {*tensors} != {*other}:
        return tensors
    return dict(zip(names, (tensors[name].T for name in other[::-1]), strict=True))
