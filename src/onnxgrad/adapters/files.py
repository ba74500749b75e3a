"""Adapters in files, in the folder that PEFT reads and writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays, save as save_arrays

from onnxgrad.adapters import session_files
from onnxgrad.adapters.config import CONFIG, config_of, options_of, read_config
from onnxgrad.adapters.dora import unfit
from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes
from onnxgrad.adapters.insertion import adopted, insert
from onnxgrad.adapters.names import module_names, tensor_names
from onnxgrad.adapters.slots import Slot
from onnxgrad.adapters.uses import CONV, EMBEDDING, LEFT, LINEAR, Target, Use, targets
from onnxgrad.errors import escaping, unknown
from onnxgrad.model.files import replacing
from onnxgrad.model.notes import ADAPTERS, HEAD, note_trained, read_adapters, read_note, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace
from onnxgrad.training.parameters.choice import matching_weights

if TYPE_CHECKING:
    from onnxgrad.training.trainer import Trainer

Arrays = dict[str, np.ndarray]
_SUFFIX = ".safetensors"
WEIGHTS = f"adapter_model{_SUFFIX}"
_PREFIX = "base_model.model."
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_[AB]"
    r"|lora_magnitude_vector)"
)


@escaping()
def save_adapter(
    model: ModelLike | Trainer, path: str | os.PathLike, weights: str | Iterable[str] = ()
) -> None:
    """Write the adapters of `model`, and its new head, to a folder, or to one file.

    A folder is in the form of PEFT: `adapter_model.safetensors` with the keys and shapes of PEFT,
    `base_model.model.<module>.lora_A.weight`, and `adapter_config.json`. PEFT loads it into the
    PyTorch model whose modules have these paths; a path is the name of the weight without
    ".weight", or what the exporter recorded for a weight whose name it chose.

    A path that ends in ".onnx_adapter" is the file that sessions of onnxruntime and
    onnxruntime-genai take for the base of `adapter_inputs`. It has the tensors as the model does,
    but for B, which is multiplied by alpha / rank.

    Args:
        model: model with adapters, serialized model or path; or a trainer, of which all that it
            trained is written.
        path: folder, created if missing; the two files in it are replaced. A path that ends in
            ".safetensors" is one file, with the settings in its metadata.
        weights: names and patterns of other tensors to write, such as "*norm*".

    Raises:
        ValueError: `model` has no adapters; adapters with `use_dora` in an ".onnx_adapter" file.
        ModelError: `model` cannot be read, or another tool modified the adapters.
        OSError: the folder or file is not writable.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> adapted = og.add_lora(model, "fc", rank=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     og.save_adapter(adapted, folder)
        ...     og.load_adapter(model, folder) == adapted
        True
    """
    target = Path(path)
    proto, notes, others = _trained_tensors(model, weights)
    if target.suffix == session_files.SUFFIX and not target.is_dir():
        return session_files.write(proto, notes, others, target)
    if not notes:
        raise ValueError("the model has no adapters to save: add_lora adds them")
    refs = {ref.name: ref for ref in constant_refs(proto)}
    head = _keys_of(proto, others)
    modules = dict.fromkeys(key.rpartition(".")[0] or key for key in head)
    config = json.dumps(config_of(notes, list(modules)), indent=2) + "\n"
    held = {
        _PREFIX + key: _storable(_swap_axes(form, refs[name].array()))
        for key, (name, form) in (_adapter_keys(notes) | head).items()
    }
    if target.suffix == _SUFFIX and not target.is_dir():
        with replacing(target) as temporary:
            temporary.write_bytes(save_arrays(held, metadata={"format": "pt", CONFIG: config}))
        return
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / WEIGHTS) as temporary:
        temporary.write_bytes(save_arrays(held, metadata={"format": "pt"}))
    with replacing(target / CONFIG) as temporary:
        temporary.write_text(config, encoding="utf-8")


def _trained_tensors(
    model: ModelLike | Trainer, weights: str | Iterable[str]
) -> tuple[ModelProto, list[dict[str, Any]], list[str]]:
    """Return the model, its adapters, and the names of other tensors that belong to them."""
    from onnxgrad.training.trainer import Trainer

    trained = model.trained if isinstance(model, Trainer) else []
    proto, _ = adopted(model.model if isinstance(model, Trainer) else model)
    notes = read_adapters(proto)
    own = {name for note in notes for name in note["tensors"]}
    others = [*read_note(proto, HEAD), *trained]
    if weights:
        others += matching_weights(proto, weights, "weight to save (weights=)")
    return proto, notes, [name for name in dict.fromkeys(others) if name not in own]


@escaping()
def load_adapter(model: ModelLike, path: str | os.PathLike) -> ModelProto:
    """Return `model` with the adapters in a folder or file that `save_adapter` or PEFT wrote.

    Adapters of `model` get the values of the file; a model without any gets adapters beside the
    weights of the modules that the file names. The tensors of a new head, which the file has as
    "modules_to_save", are replaced.

    Args:
        model: the model that was adapted, or one with its adapters; never modified.
        path: folder with `adapter_model.safetensors` and `adapter_config.json`; or the one file
            that `save_adapter` wrote, ".onnx_adapter" of any tool too. As that does not state
            alpha, adapters of a model without any get alpha = rank.

    Raises:
        FileNotFoundError: there are no adapters.
        ValueError: adapters of another kind than LoRA; a module that the model does not have, or a
            tensor of another shape.
        ModelError: `model` cannot be read.

    Examples:
        >>> import tempfile, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     og.save_adapter(og.add_lora(model, "fc", rank=1), folder)
        ...     print(og.trainable(og.load_adapter(model, folder)).trained)
        name              shape   dtype    trains  why
        fc.lora_A.weight  [1, 1]  float32  yes     an adapter
        fc.lora_B.weight  [1, 2]  float32  yes     an adapter
        2 of 2 float constants train: 3 of 3 numbers
    """
    source = Path(path)
    if source.suffix == session_files.SUFFIX and not source.is_dir():
        return session_files.load(model, source)
    config, arrays = read_config(source), _read_arrays(source)
    adapters = {m.group(0): m for key in arrays if (m := _KEY.fullmatch(key))}
    if not adapters:
        raise ValueError(f"{source} holds no LoRA adapter: its keys are {list(arrays)}")
    proto, slots = adopted(model)
    if not read_adapters(proto):
        modules: dict[str, dict[str, tuple]] = {m.group(1): {} for m in adapters.values()}
        for key, match in adapters.items():
            modules[match.group(1)][match.group(2)] = arrays[key].shape
        _add(proto, slots, modules, config)
    notes = read_adapters(proto)
    keys = _adapter_keys(notes)
    missing = "adapter in the file, which the model does not have:"
    values = _values_of(adapters, arrays, keys, missing)
    found = {key.removeprefix(_PREFIX) for key in adapters}
    if lacking := [key for key in keys if key not in found]:
        raise ValueError(f"{source} lacks the adapters {lacking} of the model")
    rest = [key for key in arrays if key not in adapters]
    if rest:
        values |= _other_values(proto, rest, arrays)
    _check_shapes(proto, values)
    _check_settings(notes, config)
    return replace(proto, {name: array for name, (_, array) in values.items()})


def _swap_axes(form: str, array: np.ndarray) -> np.ndarray:
    """Return a factor of an adapter in the layout of PEFT, or one of PEFT in that of the model."""
    if form in (LINEAR, EMBEDDING) and array.ndim > 1:
        return np.swapaxes(array, -1, -2)
    return array


def _adapter_keys(notes: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the tensor and the form of each adapter, by its key without the prefix."""
    keys = {}
    for note in notes:
        names = tensor_names(note["form"], note["use_dora"])
        for name, tensor in zip(names, note["tensors"], strict=True):
            keys[f"{note['module']}.{name}"] = tensor, note["form"]
    return keys


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
            key = name if name.endswith(".weight") else f"{modules[name]}.weight"
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
    modules: Mapping[str, dict[str, tuple]],
    config: dict,
) -> None:
    """Write adapters of the shapes that a file has beside the weights of its modules, in place."""
    every = targets(proto)
    names = {
        module: name
        for name, module in module_names(proto, every).items()
        if every[name].uses and not every[name].reason
    }
    order = {name: i for i, name in enumerate(every)}
    names = {module: names[_counterpart(module, names)] for module in modules}
    add, notes = Additions(proto), read_adapters(proto)
    for module in sorted(modules, key=lambda module: order[names[module]]):
        name, shapes = names[module], modules[module]
        target = every[name]
        use = target.uses[0]
        options = options_of(config, module, _rank_of(use, shapes))
        if options["use_dora"] and (reason := unfit(target)):
            raise ValueError(f"{name!r} cannot have the adapter of {module!r}: {reason}")
        if options["use_dora"] != (tensor_names(use.form, True)[-1] in shapes):
            raise ValueError(f"use_dora and the tensors of {module!r} in the file contradict")
        arrays = _zeros(module, shapes, target, options)
        notes.append(insert(add, name, module, target, arrays, options, slots.get(name)))
    write_note(proto, ADAPTERS, notes)


def _counterpart(module: str, modules: Collection[str]) -> str:
    """Return the module of the model for one of the file: another model may have been around one.

    Raises:
        ValueError: there is none, or several.
    """
    close = [m for m in modules if f".{m}".endswith(f".{module}") or module.endswith(f".{m}")]
    if module in modules:
        return module
    if len(close) != 1:
        raise unknown("module of the adapter", module, modules)
    return close[0]


def _rank_of(use: Use, shapes: Mapping[str, tuple]) -> int:
    """Return the rank that the first factor in a file has; 1 if it lacks one: see `_zeros`."""
    shape = shapes.get(tensor_names(use.form, False)[0]) or (1,)
    return shape[0] if use.form == CONV or len(shape) < 2 else shape[-2]


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


def _check_settings(notes: list[dict[str, Any]], config: dict[str, Any]) -> None:
    """Raise `ValueError` if the scaling of an adapter is not that of the file."""
    for note in notes:
        scaling = options_of(config, note["module"], note["rank"])["scaling"]
        if abs(scaling - note["scaling"]) > 1e-9 * abs(scaling):
            raise ValueError(
                f"the adapter of {note['module']!r} is multiplied by {note['scaling']:g} in the "
                f"model, by {scaling:g} in the file (alpha / rank): load it into the model without "
                "adapters"
            )


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
