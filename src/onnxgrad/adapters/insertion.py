"""An adapter is written beside all uses of a weight."""

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

from onnxgrad.adapters import dora
from onnxgrad.adapters.graph import Additions, adapter_dtype, product, scaled
from onnxgrad.adapters.names import module_names, tensor_names
from onnxgrad.adapters.slots import Slot, taken_slots
from onnxgrad.adapters.torch_modules import FAMILIES
from onnxgrad.adapters.uses import LEFT, Target, Use, targets
from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.model.notes import ADAPTERS, read_adapters, read_note, write_note
from onnxgrad.model.read import ModelLike, read

Arrays = tuple[np.ndarray, ...]
_FAMILY = "onnxgrad.genai_family"  # a list of one name


def writable(model: ModelLike) -> ModelProto:
    """Return a copy of `model` without local functions."""
    proto = read(model)
    return inlined(proto) if proto.functions else deepcopy(proto)


def adopted(model: ModelLike) -> tuple[ModelProto, dict[str, Slot]]:
    """Return a copy of `model` without inputs for adapters, and these by the weight.

    Adapters that another tool wrote, and which have values, are those of the copy.
    """
    proto, slots = taken_slots(writable(model))
    _note_family(proto, model)
    held = {name: slot for name, slot in slots.items() if slot.values}
    if not held:
        return proto, slots
    every, notes = targets(proto), read_adapters(proto)
    modules, add = module_names(proto, every), Additions(proto)
    for name, slot in held.items():
        assert slot.values is not None
        dtype, scale = adapter_dtype(every[name].uses[0]).numpy(), slot.layout["scale"]
        flips = zip(slot.values, slot.layout["transposed"], strict=True)
        arrays = tuple((v.T if flip else v).astype(dtype) for v, flip in flips)
        options = plain_options(arrays[0].shape[-1], scale)
        notes.append(insert(add, name, modules[name], every[name], arrays, options, slot))
    write_note(proto, ADAPTERS, notes)
    return proto, slots


def _note_family(proto: ModelProto, model: ModelLike) -> None:
    """Note of a path in a folder of genai the family of the network, if its modules have own names.

    What the folder says is not in the file.
    """
    if not isinstance(model, (str, os.PathLike)):
        return
    try:
        config = json.loads(Path(model).with_name("genai_config.json").read_text(encoding="utf-8"))
        family = config["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if family in FAMILIES:
        write_note(proto, _FAMILY, [family])


def read_family(proto: ModelProto) -> str:
    """Return the noted family of the network that a model was built of, or ""."""
    return next(iter(read_note(proto, _FAMILY)), "")


def plain_options(rank: int, scaling: float = 1.0) -> dict[str, Any]:
    """Return the settings of an adapter of which only the product is known."""
    return {
        "rank": rank,
        "alpha": scaling * rank,
        "dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "scaling": scaling,
    }


def insert(
    add: Additions,
    name: str,
    module: str,
    target: Target,
    arrays: Arrays,
    options: Mapping[str, Any],
    slot: Slot | None = None,
) -> dict[str, Any]:
    """Write the adapter of one weight beside all its uses; return the note about it.

    Its tensors are called after the module, as PEFT does, or as the inputs of `slot`.
    """
    target = slot.place(target) if slot else target
    first = target.uses[0]
    uses = target.uses if options["use_dora"] else list(map(add.behind_bias, target.uses))
    order = (1, 0) if first.form == LEFT else (0, 1, 2)[: len(arrays)]  # A reads the data
    parts = tensor_names(first.form, options["use_dora"])
    names = list(slot.tensors) if slot else [add.name(f"{module}.{part}") for part in parts]
    values = {i: add.tensor(n, arrays[i]) for i, n in zip(order, names, strict=True)}
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
    if slot is not None and slot.inputs and slot.layout:
        note["inputs"] = slot.layout
    factors = tuple(values[i] for i in range(len(arrays)))
    note["uses"] = [_write_use(add, use, first, factors, options) for use in uses]
    return note


def _write_use(
    add: Additions, use: Use, first: Use, factors: tuple[ir.Value, ...], options: Mapping[str, Any]
) -> dict[str, str]:
    """Write the adapter beside one use; return the names of its values that others need."""
    noted = {"dropout": "", "norm": ""}

    def write(base: ir.Value) -> ir.Value:
        x, noted["dropout"] = add.data(use, dropout=bool(options["dropout"]))
        p, q = scaled(add, first.form, (factors[0], factors[1]), options["scaling"])
        if options["use_dora"]:
            data, triple = (x, bool(noted["dropout"])), (p, q, factors[2])
            result, noted["norm"] = dora.write(add, use, base, data, triple)
            return result
        if use.perm != first.perm:  # tied: this use reads the transposed weight
            p, q = add.op.mT(q), add.op.mT(p)
        change = product(add, use, x, (p, q))
        return add.emit("Add", base, add.cast(change, use.dtype))

    return {"base": add.beside(use, write), **noted}
