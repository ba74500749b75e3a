"""Adapters in files, in the folder that PEFT reads and writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays, save as save_arrays

from onnxgrad.errors import escaping, unknown
from onnxgrad.finetune.adapter_config import CONFIG, config_of, options_of, read_config
from onnxgrad.finetune.adapter_graph import Additions, adapter_dtype
from onnxgrad.finetune.adapter_names import module_names
from onnxgrad.finetune.adapter_uses import CONV, EMBEDDING, LEFT, LINEAR, Target, Use, targets
from onnxgrad.finetune.dora import unfit
from onnxgrad.finetune.lora import insert, writable
from onnxgrad.model.files import replacing
from onnxgrad.model.notes import ADAPTERS, HEAD, read_adapters, read_note, write_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import constant_refs, replace

Arrays = dict[str, np.ndarray]
_SUFFIX = ".safetensors"
WEIGHTS = f"adapter_model{_SUFFIX}"
_PREFIX = "base_model.model."
_KEY = re.compile(
    r"(?:base_model\.model\.)?(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_[AB]"
    r"|lora_magnitude_vector)"
)


@escaping()
def save_adapter(model: ModelLike, path: str | os.PathLike) -> None:
    """Write the adapters of `model`, and its new head, to a folder, or to one file.

    A folder is in the form of PEFT: `adapter_model.safetensors` with the keys and shapes of PEFT,
    `base_model.model.<module>.lora_A.weight`, and `adapter_config.json`. PEFT loads it into the
    PyTorch model whose modules have these paths; a path is the name of the weight without
    ".weight", or what the exporter recorded for a weight whose name it chose.

    Args:
        model: model with adapters, serialized model or path.
        path: folder, created if missing; the two files in it are replaced. A path that ends in
            ".safetensors" is one file, with the settings in its metadata.

    Raises:
        ValueError: `model` has no adapters.
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
    proto, target = read(model), Path(path)
    notes = read_adapters(proto)
    if not notes:
        raise ValueError("the model has no adapters to save: add_lora adds them")
    refs = {ref.name: ref for ref in constant_refs(proto)}
    arrays = {
        _PREFIX + key: _in_peft(form, refs[name].array())
        for key, (name, form) in _adapter_keys(notes).items()
    }
    head = _head_keys(proto)
    for key, (name, form) in head.items():
        arrays[_PREFIX + key] = _in_peft(form, refs[name].array())
    modules = dict.fromkeys(key.rpartition(".")[0] or key for key in head)
    config = json.dumps(config_of(notes, list(modules)), indent=2) + "\n"
    held = {key: np.ascontiguousarray(_storable(a)).reshape(a.shape) for key, a in arrays.items()}
    if target.suffix == _SUFFIX and not target.is_dir():
        with replacing(target) as temporary:
            temporary.write_bytes(save_arrays(held, metadata={"format": "pt", CONFIG: config}))
        return
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / WEIGHTS) as temporary:
        temporary.write_bytes(save_arrays(held, metadata={"format": "pt"}))
    with replacing(target / CONFIG) as temporary:
        temporary.write_text(config, encoding="utf-8")


@escaping()
def load_adapter(model: ModelLike, path: str | os.PathLike) -> ModelProto:
    """Return `model` with the adapters in a folder or file that `save_adapter` or PEFT wrote.

    Adapters of `model` get the values of the file; a model without any gets adapters beside the
    weights of the modules that the file names. The tensors of a new head, which the file has as
    "modules_to_save", are replaced.

    Args:
        model: the model that was adapted, or one with its adapters; never modified.
        path: folder with `adapter_model.safetensors` and `adapter_config.json`, or the one file
            that `save_adapter` wrote.

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
    config, arrays = read_config(source), _read_arrays(source)
    adapters = {m.group(0): m for key in arrays if (m := _KEY.fullmatch(key))}
    if not adapters:
        raise ValueError(f"{source} holds no LoRA adapter: its keys are {list(arrays)}")
    proto = writable(model)
    if not read_adapters(proto):
        modules: dict[str, dict[str, tuple]] = {m.group(1): {} for m in adapters.values()}
        for key, match in adapters.items():
            modules[match.group(1)][match.group(2)] = arrays[key].shape
        _add(proto, modules, config)
    notes, values = read_adapters(proto), {}
    keys = _adapter_keys(notes)
    for key in adapters:
        plain = key.removeprefix(_PREFIX)
        if plain not in keys:
            raise unknown("adapter in the file, which the model does not have:", plain, keys)
        name, form = keys.pop(plain)
        values[name] = key, _in_peft(form, arrays[key])
    if keys:
        raise ValueError(f"{source} lacks the adapters {list(keys)} of the model")
    rest = [key for key in arrays if key not in adapters]
    if rest:
        values |= _head_values(proto, rest, arrays)
    _check_shapes(proto, values)
    _check_settings(notes, config)
    return replace(proto, {name: array for name, (_, array) in values.items()})


def _in_peft(form: str, array: np.ndarray) -> np.ndarray:
    """Return a factor of an adapter in the layout of PEFT, or one of PEFT in that of the model."""
    if form in (LINEAR, EMBEDDING) and array.ndim > 1:
        return np.swapaxes(array, -1, -2)
    return array


def _adapter_keys(notes: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the tensor and the form of each adapter, by its key without the prefix."""
    keys = {}
    for note in notes:
        names: tuple[str, ...] = ("lora_A.weight", "lora_B.weight")
        if note["form"] == EMBEDDING:
            names = ("lora_embedding_A", "lora_embedding_B")
        names += ("lora_magnitude_vector",) if note["use_dora"] else ()
        for name, tensor in zip(names, note["tensors"], strict=True):
            keys[f"{note['module']}.{name}"] = tensor, note["form"]
    return keys


def _head_keys(proto: ModelProto) -> dict[str, tuple[str, str]]:
    """Return the tensor and the form of each tensor of the new head, by its key in PyTorch."""
    head = read_note(proto, HEAD)
    if not head:
        return {}
    every = targets(proto)
    modules = module_names(proto, every)
    keys = {}
    for name in head:
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
    return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


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


def _add(proto: ModelProto, modules: Mapping[str, dict[str, tuple]], config: dict) -> None:
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
        name = names[module]
        shapes = dict(modules[module])
        magnitude = shapes.pop("lora_magnitude_vector", None)
        pair = _zeros(module, shapes, every[name])
        rank = pair[0].shape[0] if every[name].uses[0].form == CONV else pair[0].shape[-1]
        options = options_of(config, module, rank)
        if options["use_dora"]:
            if reason := unfit(every[name]):
                raise ValueError(f"{name!r} cannot have the adapter of {module!r}: {reason}")
            pair += (np.zeros(every[name].uses[0].shape[-1:], pair[0].dtype),)
        if options["use_dora"] != (magnitude is not None):
            raise ValueError(f"use_dora and the tensors of {module!r} in the file contradict")
        notes.append(insert(add, name, module, every[name], pair, options))
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


def _zeros(module: str, shapes: dict[str, tuple], target: Target) -> tuple[np.ndarray, ...]:
    """Return zeros in the shapes of the factors of an adapter, as the model has them.

    Raises:
        ValueError: the shapes in the file are not those of an adapter of that weight.
    """
    use: Use = target.uses[0]
    embeds = use.form == EMBEDDING
    names = (
        ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A.weight", "lora_B.weight")
    )
    if set(shapes) != set(names):
        raise ValueError(
            f"the adapter of {module!r} has the tensors {sorted(shapes)}, but the weight in the "
            f"model needs {list(names)}"
        )
    a, b = shapes[names[0]], shapes[names[1]]
    rank = a[0] if (a and use.form == CONV) or len(a) < 2 else a[-2]
    expected = _peft_shapes(use, rank)
    for name, shape, wanted in zip(names, (a, b), expected, strict=True):
        if shape != wanted:
            raise ValueError(
                f"{_PREFIX}{module}.{name} has the shape {list(shape)}; the weight "
                f"{target.ref.name!r} in the model needs {list(wanted)}"
            )
    dtype = adapter_dtype(use).numpy()
    first, second = (_in_peft(use.form, np.zeros(shape, dtype)) for shape in expected)
    return (second, first) if use.form == LEFT else (first, second)


def _peft_shapes(use: Use, rank: int) -> tuple[tuple, tuple]:
    shape = use.shape
    if use.form == CONV:
        ones = tuple(1 for _ in shape[2:])
        return (rank, *shape[1:]), (shape[0], rank // use.group, *ones)
    batch, (rows, columns) = shape[:-2], shape[-2:]
    if use.form == LEFT:
        rows, columns = columns, rows
    return (*batch, rank, rows), (*batch, columns, rank)


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


def _head_values(
    proto: ModelProto, rest: list[str], arrays: Arrays
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the values of the tensors of a new head, and note in `proto` that it has one."""
    keys = _head_keys(proto)
    if not keys:
        names = [ref.name for ref in constant_refs(proto)]
        wanted = [key.removeprefix(_PREFIX) for key in rest]
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(
                f"the file has a new head, {wanted}, and the model has no tensor {missing[0]!r}: "
                "give it a head like that of the adapted model first (replace_head)"
            )
        write_note(proto, HEAD, wanted)
        keys = _head_keys(proto)
    values = {}
    for key in rest:
        plain = key.removeprefix(_PREFIX)
        if plain not in keys:
            raise unknown("tensor in the file, which is none of the new head:", plain, keys)
        name, form = keys[plain]
        values[name] = key, _in_peft(form, arrays[key])
    return values


def _check_shapes(proto: ModelProto, values: Mapping[str, tuple[str, np.ndarray]]) -> None:
    shapes = {ref.name: tuple(ref.read().dims) for ref in constant_refs(proto)}
    for name, (key, array) in values.items():
        if array.shape != shapes[name]:
            raise ValueError(
                f"{key} has the shape {list(array.shape)}, and {name!r} in the model "
                f"{list(shapes[name])} (axes as in the model)"
            )
