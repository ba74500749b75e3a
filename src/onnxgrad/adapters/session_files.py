"""Files `.onnx_adapter`, which sessions of onnxruntime read as adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.adapters.config import adapter_options
from onnxgrad.adapters.graph import AdapterWriter, adapter_dtype, factor_shapes, peft_names
from onnxgrad.adapters.insertion import adopt_adapters, insert_adapter
from onnxgrad.adapters.places import AdapterPlace, transpose_pair
from onnxgrad.adapters.torch_modules import module_names
from onnxgrad.adapters.uses import CONV, LEFT, find_targets
from onnxgrad.errors import unknown
from onnxgrad.model.files import replacement_file
from onnxgrad.model.notes import ADAPTERS, read_adapters, record_trained, write_metadata
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace_constants

SUFFIX = ".onnx_adapter"
Arrays = dict[str, np.ndarray]


def write_adapter_file(
    proto: ModelProto, notes: Iterable[dict[str, Any]], others: list[str], to: Path
) -> None:
    """Write the adapters `notes` and the tensors `others` to an `.onnx_adapter` file, under the
    names of the inputs of the base model.
    """
    arrays = {ref.name: ref.array() for ref in constant_refs(proto)}
    values: Arrays = {}
    for note in notes:
        refuse_dora(note)
        a, b = note["tensors"]
        layout = note.get("inputs", {"scale": 1.0})
        scaling = arrays[b].dtype.type(note["scaling"] / layout["scale"])
        pair = transpose_pair((arrays[a], arrays[b] * scaling), layout)
        dtypes = [ir.DataType(code).numpy() for code in layout.get("dtypes", ())]
        values |= {
            name: array.astype(dtypes[i]) if dtypes else array
            for i, (name, array) in enumerate(zip((a, b), pair, strict=True))
        }
    values |= {name: arrays[name] for name in others}
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(
        {
            name: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.ascontiguousarray(array), ir.DataType.from_numpy(array.dtype).value
            )
            for name, array in values.items()
        }
    )
    with replacement_file(to) as temporary:
        adapter.export_adapter(str(temporary))


def refuse_dora(note: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a DoRA adapter, which cannot be an input of a base model."""
    if note["use_dora"]:
        raise ValueError(
            f"the adapter of {note['weight']!r} has use_dora: it needs the lengths of the columns "
            "of the weight, so that it cannot be an input of the base model. Merge it (merge_lora)"
        )


def read_adapter_file(source: Path) -> Arrays:
    """Return `{name: array}` of the tensors in an `.onnx_adapter` file.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged.
    """
    if not source.is_file():
        raise FileNotFoundError(f"{source} does not exist: name an .onnx_adapter file")
    try:
        parameters = ort.AdapterFormat.read_adapter(str(source)).get_parameters()
        return {name: np.array(value.numpy()) for name, value in sorted(parameters.items())}
    except RuntimeError as e:
        raise ValueError(
            f"{source} is no .onnx_adapter file, or is damaged: {e}. Save the adapter again"
        ) from None


def load_adapter_file(model: ModelLike, source: Path) -> ModelProto:
    """Return `model` with the adapters and other tensors that an `.onnx_adapter` file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the adapters belong to another model.
    """
    arrays = read_adapter_file(source)
    proto, places = adopt_adapters(model)
    if not read_adapters(proto):
        _insert_zero_adapters(proto, places, arrays, source)
    notes = read_adapters(proto)
    values: Arrays = {}
    for note in notes:
        values |= _adapter_factor_arrays(note, arrays, source)
    rest = [name for name in arrays if name not in values]
    names = [ref.name for ref in constant_refs(proto)]
    for name in rest:
        if name not in names:
            kind = f"tensor in {source}, which is an adapter of another model:"
            raise unknown(kind, name, [*values, *names])
    record_trained(proto, rest)
    return replace_constants(proto, values | {name: arrays[name] for name in rest})


def _insert_zero_adapters(
    proto: ModelProto, places: Mapping[str, AdapterPlace], arrays: Arrays, source: Path
) -> None:
    """Write adapters of zeros, of the ranks in the file `source`, beside the weights that the file
    has adapters for, in place.
    """
    targets = find_targets(proto)
    modules, writer = module_names(proto, targets), AdapterWriter(proto)
    notes: list[dict[str, Any]] = []
    for name, target in targets.items():
        if target.reason or not target.uses:
            continue
        use = target.uses[0]
        a, b = (f"{modules[name]}.{part}" for part in peft_names(use.form, use_dora=False))
        place = places.get(name, AdapterPlace((a, b)))
        if not arrays.keys() >= {*place.tensors}:
            continue
        pair = transpose_pair((arrays[tensor] for tensor in place.tensors), place.layout)
        rank = pair[0].shape[0 if use.form == CONV else -2 if use.form == LEFT else -1]
        factors = pair[::-1] if use.form == LEFT else pair
        for shape, array in zip(factor_shapes(use, rank), factors, strict=True):
            if shape != array.shape:
                raise ValueError(
                    f"{source} is an adapter of another model: a factor of {place.tensors[0]!r} "
                    f"and {place.tensors[1]!r} has the shape {list(array.shape)}, {name!r} needs "
                    f"{list(shape)}"
                )
        zeros = tuple(np.zeros(x.shape, adapter_dtype(use).numpy()) for x in factors)
        options = adapter_options(rank, scaling=place.layout.get("scale", 1.0))
        notes.append(insert_adapter(writer, name, modules[name], target, zeros, options, place))
    write_metadata(proto, ADAPTERS, notes)


def _adapter_factor_arrays(note: Mapping[str, Any], arrays: Arrays, source: Path) -> Arrays:
    """Return `{name: array}` of the two factors of the adapter `note`, from the tensors `arrays` of
    a file.

    Raises:
        ValueError: the file lacks one of them.
    """
    if missing := [name for name in note["tensors"] if name not in arrays]:
        raise ValueError(
            f"{source} lacks the adapter {missing[0]!r} of the model: load it into the model "
            "without adapters"
        )
    layout = note.get("inputs", {"scale": 1.0})
    a, b = transpose_pair((arrays[name] for name in note["tensors"]), layout)
    factor = b.dtype.type(layout["scale"] / note["scaling"])
    return dict(zip(note["tensors"], (a, b * factor), strict=True))
