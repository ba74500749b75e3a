"""The folder of adapters that PEFT reads and writes, and its tensors and settings in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays, save as save_arrays

from onnxgrad.adapters.config import CONFIG, config_of, read_config
from onnxgrad.adapters.dora import unfit
from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes
from onnxgrad.adapters.insertion import adopted, insert, read_family
from onnxgrad.adapters.names import module_names, tensor_names
from onnxgrad.adapters.slots import Slot
from onnxgrad.adapters.tied import join_tensors, separate_entries, tied_paths
from onnxgrad.adapters.torch_modules import Entry, packed_columns, to_model, to_torch, torch_path
from onnxgrad.adapters.uses import EMBEDDING, LEFT, LINEAR, Target, targets
from onnxgrad.errors import unknown
from onnxgrad.model.files import replacing
from onnxgrad.model.notes import ADAPTERS, HEAD, note_trained, read_adapters, read_note, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace

Arrays = dict[str, np.ndarray]
_SUFFIX = ".safetensors"
WEIGHTS = f"adapter_model{_SUFFIX}"
_PREFIX = "base_model.model."
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_[AB]"
    r"|lora_magnitude_vector)"
)


def write(proto: ModelProto, notes: list[dict[str, Any]], others: list[str], target: Path) -> None:
    """Write adapters, and other tensors as modules_to_save, to a folder or a file."""
    refs = {ref.name: ref for ref in constant_refs(proto)}
    every, family = targets(proto), read_family(proto)
    modules = {module: every[name] for module, name in _weights(proto, every, notes).items()}
    packed = packed_columns(proto, modules)
    entries = separate_entries(_entries(proto, notes), tied_paths(modules))
    entries = to_torch(entries, modules, packed, family)
    head = _keys_of(proto, others)
    saved = dict.fromkeys(key.rpartition(".")[0] or key for key in head)
    settings = [{**entry.options, "module": path} for path, entry in entries.items()]
    config = json.dumps(config_of(settings, list(saved)), indent=2) + "\n"
    arrays = {f"{path}.{n}": x for path, entry in entries.items() for n, x in entry.tensors.items()}
    arrays |= {key: _swap_axes(form, refs[name].array()) for key, (name, form) in head.items()}
    held = {_PREFIX + key: _storable(array) for key, array in arrays.items()}
    if target.suffix == _SUFFIX and not target.is_dir():
        with replacing(target) as temporary:
            temporary.write_bytes(save_arrays(held, metadata={"format": "pt", CONFIG: config}))
        return
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / WEIGHTS) as temporary:
        temporary.write_bytes(save_arrays(held, metadata={"format": "pt"}))
    with replacing(target / CONFIG) as temporary:
        temporary.write_text(config, encoding="utf-8")


def load(model: ModelLike, source: Path) -> ModelProto:
    """Return `model` with the adapters, and the other tensors, of a folder or file.

    Raises:
        FileNotFoundError: there are no adapters.
        ValueError: they do not fit the model.
    """
    config, arrays = read_config(source), _read_arrays(source)
    adapters = {m.group(0): m for key in arrays if (m := _KEY.fullmatch(key))}
    if not adapters:
        raise ValueError(f"{source} holds no adapter: its keys are {list(arrays)}")
    found: dict[str, Arrays] = {m.group(1): {} for m in adapters.values()}
    for key, match in adapters.items():
        found[match.group(1)][match.group(2)] = arrays[key]
    proto, slots = adopted(model)
    every, notes = targets(proto), read_adapters(proto)
    names, own = _weights(proto, every, notes), {note["module"] for note in notes}
    weights = {
        module: every[name]
        for module, name in names.items()
        if every[name].uses and (module in own or not every[name].reason)
    }
    forms = {m: target.uses[0].form for m, target in weights.items()}
    forms |= {note["module"]: note["form"] for note in notes}
    joined = join_tensors(found, tied_paths(weights), forms)
    entries = to_model(joined, config, weights, packed_columns(proto, weights))
    if not notes:
        _add(proto, slots, entries, every, names)
    elif others := [module for module in entries if module not in own]:
        raise unknown("module of the adapter", others[0], sorted(own))
    notes = read_adapters(proto)
    if lacking := [note["module"] for note in notes if note["module"] not in entries]:
        raise ValueError(f"{source} lacks the adapters {lacking} of the model")
    values: dict[str, tuple[str, np.ndarray]] = {}
    for note in notes:
        values |= _values(note, entries[note["module"]])
    rest = [key for key in arrays if key not in adapters and not _is_of_base(key, found)]
    if rest:
        values |= _other_values(proto, rest, arrays)
    _check_shapes(proto, values)
    return replace(proto, {name: array for name, (_, array) in values.items()})


def _weights(
    proto: ModelProto, every: Mapping[str, Target], notes: list[dict[str, Any]]
) -> dict[str, str]:
    """Return the weights of a model by their modules, which adapters may have named."""
    own = {name for note in notes for name in (note["weight"], *note["tensors"])}
    names = {m: name for name, m in module_names(proto, dict(every)).items() if name not in own}
    return names | {note["module"]: note["weight"] for note in notes}


def _swap_axes(form: str, array: np.ndarray) -> np.ndarray:
    """Return a factor of an adapter in the layout of PEFT, or one of PEFT in that of the model."""
    if form in (LINEAR, EMBEDDING) and array.ndim > 1:
        return np.swapaxes(array, -1, -2)
    return array


def _entries(proto: ModelProto, notes: list[dict[str, Any]]) -> dict[str, Entry]:
    """Return the adapters of a model in the layout of PEFT, by their modules."""
    refs = {ref.name: ref for ref in constant_refs(proto)}
    entries = {}
    for note in notes:
        names = tensor_names(note["form"], note["use_dora"])
        tensors = {
            part: _swap_axes(note["form"], refs[name].array())
            for part, name in zip(names, note["tensors"], strict=True)
        }
        entries[note["module"]] = Entry(tensors, note, note.get("path", ""))
    return entries


def _keys_of(proto: ModelProto, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the tensor and the form of each of the tensors, by its key in PyTorch."""
    every = targets(proto)
    modules = module_names(proto, every)
    keys = {}
    for name in names:
        target = every.get(name)
        form, key = LEFT, name
        if target is not None and target.uses and not target.reason:
            use = target.uses[0]
            path = torch_path(modules[name])
            own = name.endswith(".weight") and path == modules[name]
            key = name if own else f"{path}.weight"
            if use.form == LINEAR and use.perm == tuple(range(len(use.perm))):
                form = LINEAR  # (inputs, outputs), PyTorch has (outputs, inputs)
        keys[key] = name, form
    return keys


def _storable(array: np.ndarray) -> np.ndarray:
    array = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
    return np.ascontiguousarray(array).reshape(array.shape)


# -- loading -------------------------------------------------------------------------------------


def _read_arrays(source: Path) -> Arrays:
    path = source if source.is_file() else source / WEIGHTS
    if not path.is_file():
        other = " PEFT wrote it as .bin: save it with safe_serialization=True"
        hint = other if (source / "adapter_model.bin").exists() else ""
        raise FileNotFoundError(f"{source} has no {WEIGHTS}.{hint}")
    try:
        return dict(sorted(load_arrays(path.read_bytes()).items()))  # they come in any order
    except (SafetensorError, ValueError, KeyError) as e:
        raise ValueError(f"{path} is damaged, or holds a dtype that numpy lacks: {e}") from None


def _add(
    proto: ModelProto,
    slots: Mapping[str, Slot],
    entries: Mapping[str, Entry],
    every: Mapping[str, Target],
    modules: Mapping[str, str],
) -> None:
    """Write adapters of the shapes that a file has beside the weights of `modules`, in place."""
    order = {name: i for i, name in enumerate(every)}
    add, notes = Additions(proto), read_adapters(proto)
    for module in sorted(entries, key=lambda module: order[modules[module]]):
        name, entry = modules[module], entries[module]
        target, shapes = every[name], {part: x.shape for part, x in entry.tensors.items()}
        use, options = target.uses[0], entry.options
        if options["use_dora"] and (reason := unfit(target)):
            raise ValueError(f"{name!r} cannot have the adapter of {entry.path!r}: {reason}")
        if options["use_dora"] != (tensor_names(use.form, True)[-1] in shapes):
            raise ValueError(f"use_dora and the tensors of {entry.path!r} in the file contradict")
        arrays = _zeros(entry.path or module, shapes, target, options)
        note = insert(add, name, module, target, arrays, options, slots.get(name))
        if entry.path and entry.path != torch_path(module):
            note["path"] = entry.path
        notes.append(note)
    write_note(proto, ADAPTERS, notes)


def _zeros(
    module: str, shapes: Mapping[str, tuple], target: Target, options: Mapping[str, Any]
) -> tuple[np.ndarray, ...]:
    """Return zeros in the shapes of the tensors of an adapter, as the model has them.

    Raises:
        ValueError: the shapes in the file are not those of an adapter of that weight.
    """
    use = target.uses[0]
    names = tensor_names(use.form, options["use_dora"])
    if set(shapes) != set(names):
        raise ValueError(
            f"the adapter of {module!r} has the tensors {sorted(shapes)}, but the weight in the "
            f"model needs {list(names)}"
        )
    dtype = adapter_dtype(use).numpy()
    p, q = (np.zeros(shape, dtype) for shape in factor_shapes(use, options["rank"]))
    for name, factor in zip(names, (q, p) if use.form == LEFT else (p, q), strict=False):
        wanted = _swap_axes(use.form, factor).shape
        if shapes[name] != wanted:
            raise ValueError(
                f"{_PREFIX}{module}.{name} has the shape {list(shapes[name])}; the weight "
                f"{target.ref.name!r} in the model needs {list(wanted)}"
            )
    return (p, q, np.zeros(use.shape[-1:], dtype)) if options["use_dora"] else (p, q)


def _values(note: Mapping[str, Any], entry: Entry) -> dict[str, tuple[str, np.ndarray]]:
    """Return the key and the value of each tensor of one adapter, by its name in the model.

    Raises:
        ValueError: the file has others, or their scaling is not that of the model.
    """
    names = tensor_names(note["form"], note["use_dora"])
    if {*names} != {*entry.tensors}:
        found = sorted(entry.tensors)
        raise ValueError(f"the adapter of {note['module']!r} has {list(names)}, the file {found}")
    keys = {n: f"{_PREFIX}{entry.path or note['module']}.{n}" for n in names}
    scaling = entry.options["scaling"]
    if abs(scaling - note["scaling"]) > 1e-9 * abs(scaling):
        raise ValueError(
            f"the adapter of {note['module']!r} is multiplied by {note['scaling']:g} in the "
            f"model, by {scaling:g} in the file (alpha / rank): load it into the model without "
            "adapters"
        )
    return {
        name: (keys[part], _swap_axes(note["form"], entry.tensors[part]))
        for part, name in zip(names, note["tensors"], strict=True)
    }


def _is_of_base(key: str, modules: Collection[str]) -> bool:
    """Return whether a tensor is a frozen weight, that PEFT saves beside adapters."""
    module, found, _ = key.removeprefix(_PREFIX).partition(".base_layer.")
    return bool(found) and module in modules


def _other_values(
    proto: ModelProto, rest: list[str], arrays: Arrays
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the values of tensors beside the adapters, and note in `proto` that they train."""
    head = read_note(proto, HEAD)
    names = [ref.name for ref in constant_refs(proto)]
    keys = _keys_of(proto, names) | {name: (name, LEFT) for name in names}
    keys |= _keys_of(proto, head)
    wanted = [key.removeprefix(_PREFIX) for key in rest]
    if missing := [key for key in wanted if key not in keys]:
        raise ValueError(
            f"the file has the tensors {wanted} beside its adapters, as of a new head, and the "
            f"model has no {missing[0]!r}: give it a head like that of the adapted model first "
            "(replace_head)"
        )
    note_trained(proto, [keys[key][0] for key in wanted])
    return _values_of(rest, arrays, keys, "tensor of the model")


def _values_of(
    found: Iterable[str], arrays: Arrays, keys: Mapping[str, tuple[str, str]], what: str
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the key and the value of the tensors that a file has, by their names in the model.

    Raises:
        ValueError: one is not in `keys`; messages call it `what`.
    """
    values = {}
    for key in found:
        plain = key.removeprefix(_PREFIX)
        if plain not in keys:
            raise unknown(what, plain, keys)
        name, form = keys[plain]
        values[name] = key, _swap_axes(form, arrays[key])
    return values


def _check_shapes(proto: ModelProto, values: Mapping[str, tuple[str, np.ndarray]]) -> None:
    shapes = {ref.name: tuple(ref.read().dims) for ref in constant_refs(proto)}
    for name, (key, array) in values.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"{key} has the shape {list(array.shape)}, and {name!r} in the model "
                f"{list(shapes[name])} (axes as in the model)"
            )
