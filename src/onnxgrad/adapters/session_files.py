"""`.onnx_adapter`: the file of adapters that sessions of onnxruntime read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes
from onnxgrad.adapters.insertion import adopted, insert, plain_options
from onnxgrad.adapters.names import module_names, tensor_names
from onnxgrad.adapters.slots import Slot
from onnxgrad.adapters.uses import CONV, LEFT, Use, targets
from onnxgrad.errors import unknown
from onnxgrad.model.files import replacing
from onnxgrad.model.notes import ADAPTERS, note_trained, read_adapters, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace

SUFFIX = ".onnx_adapter"
Arrays = dict[str, np.ndarray]


def write(proto: ModelProto, notes: Iterable[dict[str, Any]], others: list[str], to: Path) -> None:
    """Write adapters and other tensors as the inputs of their base take them."""
    arrays = {ref.name: ref.array() for ref in constant_refs(proto)}
    values: Arrays = {}
    for note in notes:
        refuse_dora(note)
        a, b = note["tensors"]
        layout = note.get("inputs", {"scale": 1.0})
        pair = arrays[a], arrays[b] * arrays[b].dtype.type(note["scaling"] / layout["scale"])
        if "dtypes" in layout:
            dtypes = [ir.DataType(code).numpy() for code in layout["dtypes"]]
            flips = zip(pair, dtypes, layout["transposed"], strict=True)
            pair = tuple((v.T if flip else v).astype(dtype) for v, dtype, flip in flips)
        values |= dict(zip((a, b), pair, strict=True))
    values |= {name: arrays[name] for name in others}
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({name: _ortvalue(array) for name, array in values.items()})
    with replacing(to) as temporary:
        adapter.export_adapter(str(temporary))


def refuse_dora(note: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an adapter that cannot be the input of a base."""
    if note["use_dora"]:
        raise ValueError(
            f"the adapter of {note['weight']!r} has use_dora: it needs the lengths of the columns "
            "of the weight, so that it cannot be the input of a base. Merge it (merge_lora)"
        )


def _ortvalue(array: np.ndarray) -> ort.OrtValue:
    code = ir.DataType.from_numpy(array.dtype).value
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), code)


def read_arrays(source: Path) -> Arrays:
    """Return the tensors of a file of adapters, by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    if not source.is_file():
        raise FileNotFoundError(f"{source} holds no adapter: there is no such file")
    try:
        parameters = ort.AdapterFormat.read_adapter(str(source)).get_parameters()
        return {name: np.array(value.numpy()) for name, value in sorted(parameters.items())}
    except RuntimeError as e:
        raise ValueError(f"{source} is no file of adapters, or is damaged: {e}") from None


def load(model: ModelLike, source: Path) -> ModelProto:
    """Return `model` with the adapters, and the other tensors, of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the adapters are those of another model.
    """
    arrays = read_arrays(source)
    proto, slots = adopted(model)
    if not read_adapters(proto):
        _add(proto, slots, arrays, source)
    notes = read_adapters(proto)
    values: Arrays = {}
    for note in notes:
        values |= _factors(note, arrays, source)
    rest = [name for name in arrays if name not in values]
    names = [ref.name for ref in constant_refs(proto)]
    for name in rest:
        if name not in names:
            kind = f"tensor in {source}, which is an adapter of another model:"
            raise unknown(kind, name, [*values, *names])
    note_trained(proto, rest)
    return replace(proto, values | {name: arrays[name] for name in rest})


def _add(proto: ModelProto, slots: Mapping[str, Slot], arrays: Arrays, source: Path) -> None:
    """Write adapters of the shapes that the file has beside the weights that it names, in place."""
    every = targets(proto)
    modules, add = module_names(proto, every), Additions(proto)
    notes: list[dict[str, Any]] = []
    for name, target in every.items():
        if target.reason or not target.uses:
            continue
        use, slot = target.uses[0], slots.get(name)
        pair = slot.tensors if slot else named_after(modules[name], use)
        if not arrays.keys() >= {*pair}:
            continue
        flips = slot.layout.get("transposed", (False, False)) if slot else (False, False)
        a, b = (arrays[n].T if flip else arrays[n] for n, flip in zip(pair, flips, strict=True))
        rank = _rank(use, a)
        found = (b, a) if use.form == LEFT else (a, b)
        for shape, array in zip(factor_shapes(use, rank), found, strict=True):
            if shape != array.shape:
                raise ValueError(
                    f"{source} is an adapter of another model: a factor of {pair[0]!r} and "
                    f"{pair[1]!r} has the shape {list(array.shape)}, {name!r} needs {list(shape)}"
                )
        zeros = tuple(np.zeros(x.shape, adapter_dtype(use).numpy()) for x in found)
        scale = slot.layout.get("scale", 1.0) if slot else 1.0
        slot = slot or Slot((pair[0], pair[1]))
        options = plain_options(rank, scale)
        notes.append(insert(add, name, modules[name], target, zeros, options, slot))
    write_note(proto, ADAPTERS, notes)


def named_after(module: str, use: Use) -> tuple[str, ...]:
    """Return the names of the tensors of the adapter of a module."""
    return tuple(f"{module}.{part}" for part in tensor_names(use.form, use_dora=False))


def _rank(use: Use, a: np.ndarray) -> int:
    return a.shape[0] if use.form == CONV else a.shape[-2 if use.form == LEFT else -1]


def _factors(note: Mapping[str, Any], arrays: Arrays, source: Path) -> Arrays:
    """Return the values of the tensors of one adapter.

    Raises:
        ValueError: the file lacks them.
    """
    if missing := [name for name in note["tensors"] if name not in arrays]:
        raise ValueError(f"{source} lacks the adapter {missing[0]!r} of the model")
    a, b = note["tensors"]
    layout = note.get("inputs", {"transposed": (False, False), "scale": 1.0})
    flip_a, flip_b = layout["transposed"]
    factor = layout["scale"] / note["scaling"]
    return {
        a: arrays[a].T if flip_a else arrays[a],
        b: (arrays[b].T if flip_b else arrays[b]) * arrays[b].dtype.type(factor),
    }
