"""Folders of adapters as PEFT reads and writes them, and the same content in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays, save as save_arrays

from onnxgrad.adapters.config import CONFIG, peft_config, read_config
from onnxgrad.adapters.graph import (
    AdapterWriter,
    adapter_dtype,
    factor_shapes,
    peft_names,
    reason_without_dora,
)
from onnxgrad.adapters.insertion import adopt_adapters, insert_adapter, read_genai_family
from onnxgrad.adapters.places import AdapterPlace
from onnxgrad.adapters.torch_modules import (
    Adapter,
    join_tied_adapters,
    model_adapters,
    module_names,
    packed_columns,
    split_tied_adapters,
    tied_paths,
    torch_adapters,
    torch_path,
)
from onnxgrad.adapters.uses import EMBEDDING, LEFT, LINEAR, AdapterTarget, find_targets
from onnxgrad.errors import unknown
from onnxgrad.model.files import replacement_file
from onnxgrad.model.notes import (
    ADAPTERS,
    HEAD,
    read_adapters,
    read_metadata,
    record_trained,
    write_metadata,
)
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace_constants

Arrays = dict[str, np.ndarray]
# key in the file, form of the layer (`uses.LINEAR`...), array
FileTensor = tuple[str, str, np.ndarray]
_SUFFIX = ".safetensors"
WEIGHTS = f"adapter_model{_SUFFIX}"
_PREFIX = "base_model.model."
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_[AB]"
    r"|lora_magnitude_vector)"
)


def write_adapters(
    proto: ModelProto, notes: list[dict[str, Any]], others: list[str], target: Path
) -> None:
    """Write the adapters `notes`, and the tensors `others` as PEFT's `modules_to_save`, to a folder
    or a `.safetensors` file.
    """
    refs = {ref.name: ref for ref in constant_refs(proto)}
    targets = find_targets(proto)
    modules = {m: targets[name] for m, name in _weights_by_module(proto, targets, notes).items()}
    entries = split_tied_adapters(_peft_adapters(proto, notes), tied_paths(modules))
    columns, family = packed_columns(proto, modules), read_genai_family(proto)
    entries = torch_adapters(entries, modules, columns, family)
    head = _torch_keys_of_tensors(proto, others)
    saved = dict.fromkeys(key.rpartition(".")[0] or key for key in head)
    settings = [{**entry.options, "module": path} for path, entry in entries.items()]
    config = json.dumps(peft_config(settings, list(saved)), indent=2) + "\n"
    arrays = {f"{path}.{n}": x for path, entry in entries.items() for n, x in entry.tensors.items()}
    arrays |= {key: _array_for_peft(form, refs[name].array()) for key, (name, form) in head.items()}
    held = {}
    for key, array in arrays.items():
        array = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
        held[_PREFIX + key] = np.ascontiguousarray(array).reshape(array.shape)
    if target.suffix == _SUFFIX and not target.is_dir():
        with replacement_file(target) as temporary:
            temporary.write_bytes(save_arrays(held, metadata={"format": "pt", CONFIG: config}))
        return
    target.mkdir(parents=True, exist_ok=True)
    with replacement_file(target / WEIGHTS) as temporary:
        temporary.write_bytes(save_arrays(held, metadata={"format": "pt"}))
    with replacement_file(target / CONFIG) as temporary:
        temporary.write_text(config, encoding="utf-8")


def load_adapters(model: ModelLike, source: Path) -> ModelProto:
    """Return `model` with the adapters and other tensors that a folder or `.safetensors` file of
    PEFT holds.

    Raises:
        FileNotFoundError: the folder or file holds no adapters.
        ValueError: the adapters do not fit the model.
    """
    config, arrays = read_config(source), _read_safetensors(source)
    adapters = {m.group(0): m for key in arrays if (m := _KEY.fullmatch(key))}
    if not adapters:
        raise ValueError(
            f"{source} holds no adapter, only the keys {list(arrays)}: name a file or folder "
            "that save_adapter or PEFT wrote"
        )
    found: dict[str, Arrays] = {m.group(1): {} for m in adapters.values()}
    for key, match in adapters.items():
        found[match.group(1)][match.group(2)] = arrays[key]
    proto, places = adopt_adapters(model)
    targets, notes = find_targets(proto), read_adapters(proto)
    names, own = _weights_by_module(proto, targets, notes), {note["module"] for note in notes}
    weights = {
        module: targets[name]
        for module, name in names.items()
        if targets[name].uses and (module in own or not targets[name].reason)
    }
    forms = {m: target.uses[0].form for m, target in weights.items()}
    forms |= {note["module"]: note["form"] for note in notes}
    joined = join_tied_adapters(found, tied_paths(weights), forms)
    entries = model_adapters(joined, config, weights, packed_columns(proto, weights))
    if not notes:
        _insert_zero_adapters(proto, places, entries, targets, names)
    elif others := [module for module in entries if module not in own]:
        raise unknown("module of the adapter", others[0], sorted(own))
    notes = read_adapters(proto)
    if lacking := [note["module"] for note in notes if note["module"] not in entries]:
        raise ValueError(
            f"{source} lacks the adapters {lacking} of the model: load it into the model without "
            "adapters"
        )
    values: dict[str, FileTensor] = {}
    for note in notes:
        values |= _adapter_tensors_of_file(note, entries[note["module"]])
    rest = []
    for key in arrays:
        module, frozen, _ = key.removeprefix(_PREFIX).partition(".base_layer.")
        # PEFT may save the frozen weight, too
        if key not in adapters and not (frozen and module in found):
            rest.append(key)
    if rest:
        values |= _other_tensors_of_file(proto, rest, arrays)
    shapes = {ref.name: tuple(ref.read().dims) for ref in constant_refs(proto)}
    for name, (key, form, array) in values.items():
        needed = _array_for_peft(form, np.broadcast_to(0, shapes[name])).shape
        if array.shape != needed:
            raise ValueError(
                f"{key} has the shape {list(array.shape)}, and {name!r} of the model needs the "
                f"shape {list(needed)} in the file: load the adapter of this model"
            )
    return replace_constants(
        proto, {name: _array_for_peft(form, x) for name, (_, form, x) in values.items()}
    )


def _weights_by_module(
    proto: ModelProto, targets: Mapping[str, AdapterTarget], notes: list[dict[str, Any]]
) -> dict[str, str]:
    """Return `{PyTorch module path: weight name}` of a model and its adapters."""
    own = {name for note in notes for name in (note["weight"], *note["tensors"])}
    names = {m: name for name, m in module_names(proto, targets).items() if name not in own}
    return names | {note["module"]: note["weight"] for note in notes}


def _array_for_peft(form: str, array: np.ndarray) -> np.ndarray:
    """Return a factor of an adapter with its last two axes swapped, if PEFT stores factors of this
    kind of layer transposed; else the factor.
    """
    if form in (LINEAR, EMBEDDING) and array.ndim > 1:
        return np.swapaxes(array, -1, -2)
    return array


def _peft_adapters(proto: ModelProto, notes: list[dict[str, Any]]) -> dict[str, Adapter]:
    """Return `{module path: Adapter}` of the adapters `notes` of a model, with tensors in PEFT's
    layout.
    """
    refs = {ref.name: ref for ref in constant_refs(proto)}
    entries = {}
    for note in notes:
        names = peft_names(note["form"], note["use_dora"])
        tensors = {
            part: _array_for_peft(note["form"], refs[name].array())
            for part, name in zip(names, note["tensors"], strict=True)
        }
        entries[note["module"]] = Adapter(tensors, note, note.get("path", ""))
    return entries


def _torch_keys_of_tensors(proto: ModelProto, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return `{key in the PyTorch state dict: (tensor name in the model, layer form)}` for the
    tensors `names` of a model.
    """
    targets = find_targets(proto)
    modules = module_names(proto, targets)
    keys = {}
    for name in names:
        target = targets.get(name)
        form, key = LEFT, name
        if target is not None and target.uses and not target.reason:
            use = target.uses[0]
            path = torch_path(modules[name])
            own = name.endswith(".weight") and path == modules[name]
            key = name if own else f"{path}.weight"
            if use.form == LINEAR and use.perm == tuple(range(len(use.perm))):
                form = LINEAR  # (inputs, outputs) in the model, (outputs, inputs) in PyTorch
        keys[key] = name, form
    return keys


# -- loading -------------------------------------------------------------------------------------


def _read_safetensors(source: Path) -> Arrays:
    """Return `{key: tensor}` read from a folder or a `.safetensors` file."""
    path = source if source.is_file() else source / WEIGHTS
    if not path.is_file():
        other = " PEFT wrote it as .bin: save it with safe_serialization=True"
        hint = other if (source / "adapter_model.bin").exists() else ""
        raise FileNotFoundError(f"{source} has no {WEIGHTS}: name a folder that has it.{hint}")
    try:
        # safetensors returns the keys in any order
        return dict(sorted(load_arrays(path.read_bytes()).items()))
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(
            f"{path} is damaged, or holds a dtype that numpy lacks: {e}. Save the adapter again"
        ) from None


def _insert_zero_adapters(
    proto: ModelProto,
    places: Mapping[str, AdapterPlace],
    entries: Mapping[str, Adapter],
    targets: Mapping[str, AdapterTarget],
    modules: Mapping[str, str],
) -> None:
    """Write adapters of zeros, of the ranks that a file states, beside the weights of the modules
    `entries`, in place.
    """
    order = {name: i for i, name in enumerate(targets)}
    writer, notes = AdapterWriter(proto), read_adapters(proto)
    for module in sorted(entries, key=lambda module: order[modules[module]]):
        name, entry = modules[module], entries[module]
        target, options = targets[name], entry.options
        use = target.uses[0]
        if options["use_dora"] and (reason := reason_without_dora(target)):
            raise ValueError(f"{name!r} cannot have the adapter of {entry.path!r}: {reason}")
        if options["use_dora"] != (peft_names(use.form, True)[-1] in entry.tensors):
            raise ValueError(
                f"the file is damaged, as use_dora does not fit the tensors of {entry.path!r}: "
                "save the adapter again"
            )
        shapes = [*factor_shapes(use, options["rank"]), use.shape[-1:]]
        zeros = [np.zeros(shape, adapter_dtype(use).numpy()) for shape in shapes]
        arrays = tuple(zeros if options["use_dora"] else zeros[:2])
        note = insert_adapter(writer, name, module, target, arrays, options, places.get(name))
        if entry.path and entry.path != torch_path(module):
            note["path"] = entry.path
        notes.append(note)
    write_metadata(proto, ADAPTERS, notes)


def _adapter_tensors_of_file(note: Mapping[str, Any], entry: Adapter) -> dict[str, FileTensor]:
    """Return `{tensor name in the model: tensor of the file}` of one adapter.

    Raises:
        ValueError: the file has other tensors for the module, or another scaling.
    """
    names = peft_names(note["form"], note["use_dora"])
    if {*names} != {*entry.tensors}:
        raise ValueError(
            f"the adapter of {entry.path or note['module']!r} has the tensors "
            f"{sorted(entry.tensors)} in the file, and {list(names)} in the model: load it into "
            "the model without adapters"
        )
    keys = {n: f"{_PREFIX}{entry.path or note['module']}.{n}" for n in names}
    scaling = entry.options["scaling"]
    if abs(scaling - note["scaling"]) > 1e-9 * abs(scaling):
        raise ValueError(
            f"the adapter of {note['module']!r} is multiplied by {note['scaling']:g} in the "
            f"model, by {scaling:g} in the file (alpha / rank): load it into the model without "
            "adapters"
        )
    return {
        name: (keys[part], note["form"], entry.tensors[part])
        for part, name in zip(names, note["tensors"], strict=True)
    }


def _other_tensors_of_file(
    proto: ModelProto, rest: list[str], arrays: Arrays
) -> dict[str, FileTensor]:
    """Return `{tensor name in the model: tensor of the file}` for the keys `rest`, which belong to
    no adapter.

    The metadata of `proto` record that these tensors train.
    """
    names = [ref.name for ref in constant_refs(proto)]
    keys = _torch_keys_of_tensors(proto, names) | {name: (name, LEFT) for name in names}
    keys |= _torch_keys_of_tensors(proto, read_metadata(proto, HEAD))
    wanted = [key.removeprefix(_PREFIX) for key in rest]
    if missing := [key for key in wanted if key not in keys]:
        raise ValueError(
            f"the file has the tensors {wanted} beside its adapters, as of a new head, and the "
            f"model has no {missing[0]!r}: give the model the head of the adapted model first "
            "(replace_head)"
        )
    record_trained(proto, [keys[key][0] for key in wanted])
    found = [(key, *keys[plain]) for key, plain in zip(rest, wanted, strict=True)]
    return {name: (key, form, arrays[key]) for key, name, form in found}
