"""Write adapters beside all layers that read a weight, and record them in the model's metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.adapters.config import adapter_options
from onnxgrad.adapters.graph import (
    AdapterWriter,
    adapter_dtype,
    peft_names,
    scale_factor_b,
    write_dora_layer,
    write_product,
)
from onnxgrad.adapters.places import AdapterPlace, remove_found_adapters, transpose_pair
from onnxgrad.adapters.torch_modules import FAMILIES, module_names
from onnxgrad.adapters.uses import LEFT, AdapterTarget, WeightUse, find_targets
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.notes import ADAPTERS, read_adapters, read_metadata, write_metadata
from onnxgrad.model.read import ModelLike, read

Arrays = tuple[np.ndarray, ...]
_FAMILY = "onnxgrad.genai_family"  # key of the metadata: a list of one family name


def copy_inlined(model: ModelLike) -> ModelProto:
    """Return a copy of `model` whose local functions are inlined."""
    proto = read(model)
    return inline_functions(proto) if proto.functions else deepcopy(proto)


def adopt_adapters(model: ModelLike) -> tuple[ModelProto, dict[str, AdapterPlace]]:
    """Return a copy of `model` without inputs for adapters, and `{weight name: AdapterPlace}` of
    the removed inputs.

    Adapters of another tool that have values in the file are written as adapters of this package.
    """
    proto = copy_inlined(model)
    places = remove_found_adapters(proto)
    _record_genai_family(proto, model)
    held = {name: place for name, place in places.items() if place.values}
    if not held:
        return proto, places
    targets, notes = find_targets(proto), read_adapters(proto)
    modules, writer = module_names(proto, targets), AdapterWriter(proto)
    for name, place in held.items():
        assert place.values is not None
        target, dtype = targets[name], adapter_dtype(targets[name].uses[0]).numpy()
        arrays = tuple(v.astype(dtype) for v in transpose_pair(place.values, place.layout))
        options = adapter_options(arrays[0].shape[-1], scaling=place.layout["scale"])
        notes.append(insert_adapter(writer, name, modules[name], target, arrays, options, place))
    write_metadata(proto, ADAPTERS, notes)
    return proto, places


def _record_genai_family(proto: ModelProto, model: ModelLike) -> None:
    """Write the network family of onnxruntime-genai ("phi3") into the metadata of `proto`, if
    modules of the family have other names than in Llama.

    `genai_config.json` in the folder of a path `model` states the family, which the file does not.
    """
    if not isinstance(model, (str, os.PathLike)):
        return
    try:
        config = json.loads(Path(model).with_name("genai_config.json").read_text(encoding="utf-8"))
        family = config["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if family in FAMILIES:
        write_metadata(proto, _FAMILY, [family])


def read_genai_family(proto: ModelProto) -> str:
    """Return the network family, such as "phi3", that the metadata of a model record; "" if they
    record none.
    """
    return next(iter(read_metadata(proto, _FAMILY)), "")


def insert_adapter(
    writer: AdapterWriter,
    name: str,
    module: str,
    target: AdapterTarget,
    arrays: Arrays,
    options: Mapping[str, Any],
    place: AdapterPlace | None = None,
) -> dict[str, Any]:
    """Write an adapter beside all layers that read one weight; return the dict that describes the
    adapter in the metadata.

    Args:
        writer: writes into the model.
        name: the weight.
        module: path of the module of the weight, from which PEFT's names of the tensors follow.
        target: the uses of the weight.
        arrays: the factors P and Q, and for DoRA the lengths of the columns.
        options: the settings, see `adapter_options`.
        place: where the file had an adapter for the weight: it gives the names of the tensors.
    """
    target = place.target_at_sum(target) if place else target
    first = target.uses[0]
    uses = target.uses if options["use_dora"] else list(map(writer.use_at_bias_add, target.uses))
    # factor A multiplies the data
    order = (1, 0) if first.form == LEFT else (0, 1, 2)[: len(arrays)]
    parts = peft_names(first.form, options["use_dora"])
    names = (
        list(place.tensors) if place else [writer.free_name(f"{module}.{part}") for part in parts]
    )
    values = {i: writer.add_tensor(n, arrays[i]) for i, n in zip(order, names, strict=True)}
    note: dict[str, Any] = {
        "form": first.form,
        "weight": name,
        "module": module,
        "tensors": names,
        "perm": list(first.perm),
        "group": first.group,
        "quantized": target.quantized,
        **options,
    }
    if place is not None and place.inputs and place.layout:
        note["inputs"] = place.layout
    factors = tuple(values[i] for i in range(len(arrays)))
    note["uses"] = [_write_adapter_at_layer(writer, use, first, factors, options) for use in uses]
    return note


def _write_adapter_at_layer(
    writer: AdapterWriter,
    use: WeightUse,
    first: WeightUse,
    factors: tuple[ir.Value, ...],
    options: Mapping[str, Any],
) -> dict[str, str]:
    """Write an adapter beside one layer; return the names of its values that merging and training
    need.

    "base" is the output without adapter, "dropout" the output of a Dropout, "norm" the lengths of
    the columns in DoRA.
    """
    noted = {"dropout": "", "norm": ""}

    def write_adapter(base: ir.Value) -> ir.Value:
        x, noted["dropout"] = writer.adapter_data(use, dropout=bool(options["dropout"]))
        p, q = scale_factor_b(writer, first.form, (factors[0], factors[1]), options["scaling"])
        if options["use_dora"]:
            data, triple = (x, bool(noted["dropout"])), (p, q, factors[2])
            result, noted["norm"] = write_dora_layer(writer, use, base, data, triple)
            return result
        if use.perm != first.perm:  # a tied weight, which this use reads transposed
            p, q = writer.op.mT(q), writer.op.mT(p)
        change = write_product(writer, use, x, (p, q))
        return writer.emit("Add", base, writer.cast(change, use.dtype))

    return {"base": writer.insert_after(use, write_adapter), **noted}
