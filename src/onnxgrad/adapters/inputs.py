"""`adapter_inputs`: a base whose adapters are optional inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.adapters.graph import Additions, adapter_dtype, factor_shapes, remove
from onnxgrad.adapters.insertion import adopted, insert, plain_options, writable
from onnxgrad.adapters.session_files import refuse_dora
from onnxgrad.adapters.slots import Slot
from onnxgrad.adapters.uses import CONV, LEFT, Target, targets
from onnxgrad.errors import escaping, named
from onnxgrad.model.notes import ADAPTERS, HEAD, INPUTS, read_adapters, read_note, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, take_out
from onnxgrad.training.parameters.choice import matching_weights


@escaping()
def adapter_inputs(model: ModelLike, weights: str | Iterable[str] = ()) -> ModelProto:
    """Return the base of `model`, with its adapters as optional inputs of any rank.

    The two tensors of each adapter are inputs of their names with a default of rank 0, so that the
    base computes what the model without adapters does. A session takes other values by an
    `.onnx_adapter` file that `save_adapter` wrote, `ort.LoraAdapter` and
    `RunOptions.add_active_adapter`, or onnxruntime-genai's `Adapters`: several adapters, of any
    rank and alpha, for one base. B in such a file is multiplied by alpha / rank already.

    The tensors of a new head, and `weights`, are inputs too. Their default is their value in
    `model`: pass the adapted model before its training for the untrained head as the default.

    Of a base already, as Olive writes it, inputs without a default get one that changes nothing.

    Args:
        model: model with adapters, trained or not, or a base; serialized model or path; never
            modified.
        weights: names and patterns of other tensors that adapters replace, such as "*norm*".

    Raises:
        ValueError: the model has no adapters and `weights` names none; adapters with `use_dora`.
        ModelError: `model` cannot be read, or another tool modified the adapters.

    Examples:
        >>> import numpy as np, onnx, onnxruntime, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,1] x) => (float[N,2] y)
        ...     <float[1,2] fc = {1.0, 2.0}> { y = MatMul(x, fc) }''')
        >>> base = og.graph.adapter_inputs(og.add_lora(model, "fc", rank=1))
        >>> [x.name for x in base.graph.input]
        ['x', 'fc.lora_A.weight', 'fc.lora_B.weight']
        >>> session = onnxruntime.InferenceSession(base.SerializeToString())
        >>> session.run(None, {"x": np.float32([[1]])})[0].tolist()
        [[1.0, 2.0]]
    """
    proto, slots = adopted(model)
    notes = read_adapters(proto)
    if slots and not notes:
        proto = _with_defaults(model, targets(proto), slots)
        _make_inputs(proto, _chosen(proto, weights))
        return proto
    tensors = [name for note in notes for name in note["tensors"]]
    chosen = [name for name in _chosen(proto, weights) if name not in tensors]
    if not tensors and not chosen:
        raise ValueError(f"the model has no adapters: {named('add_lora')} adds them")
    _check_served(notes)
    remove(proto, [use["base"] for note in notes for use in note["uses"]], tensors)
    write_note(proto, ADAPTERS, [])
    every, add = targets(proto), Additions(proto)
    write_note(proto, INPUTS, [_write(add, note, every[note["weight"]]) for note in notes])
    _make_inputs(proto, chosen)
    return proto


def _chosen(proto: ModelProto, weights: str | Iterable[str]) -> list[str]:
    """Return the tensors of a new head, and those that the patterns name."""
    named_ones = (
        matching_weights(proto, weights, "weight for an input (weights=)") if weights else ()
    )
    return list(dict.fromkeys([*read_note(proto, HEAD), *named_ones]))


def _with_defaults(
    model: ModelLike, every: Mapping[str, Target], slots: Mapping[str, Slot]
) -> ModelProto:
    """Return a base whose inputs for adapters all have a default, zeros, of rank 0 if they can."""
    proto = writable(model)
    held = {tensor.name for tensor in proto.graph.initializer}
    sizes = {x.name: x.type.tensor_type.shape.dim for x in proto.graph.input}
    for name, slot in slots.items():
        if held.issuperset(slot.tensors):
            continue
        flips = slot.layout["transposed"]
        a = sizes[slot.tensors[0]]
        rank = a[-2 if flips[0] else -1].dim_value if len(a) > 1 else 0  # 0: of any rank
        shapes = factor_shapes(every[name].uses[0], rank)
        for i, tensor in enumerate(slot.tensors):
            if tensor not in held:
                dtype = ir.DataType(slot.layout["dtypes"][i])
                zeros = np.zeros(shapes[i][::-1] if flips[i] else shapes[i], dtype.numpy())
                proto.graph.initializer.append(ir.to_proto(ir.tensor(zeros, dtype, name=tensor)))
    return proto


def _check_served(notes: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if one of the adapters cannot be an input."""
    for note in notes:
        refuse_dora(note)
        if "inputs" in note:
            raise ValueError(
                f"{note['tensors'][0]!r} was an input of the file that was adapted: that file is "
                "the base"
            )


def _write(add: Additions, note: dict[str, Any], target: Target) -> dict[str, Any]:
    """Write one adapter whose tensors are inputs; return the note about it."""
    use = target.uses[0]
    # onnxruntime 1.31 computes other numbers where an empty product is on the left
    rank = use.group if use.form == CONV else int(use.form == LEFT)
    dtype = adapter_dtype(use)
    arrays = tuple(np.zeros(shape, dtype.numpy()) for shape in factor_shapes(use, rank))
    slot = Slot((note["tensors"][0], note["tensors"][1]))
    new = insert(add, note["weight"], note["module"], target, arrays, plain_options(rank), slot)
    names = slot.tensors[::-1] if use.form == LEFT else slot.tensors
    axes = (0, 1) if use.form == CONV else (-1, -2)  # those of the rank
    for name, array, axis in zip(names, arrays, axes, strict=True):
        shape: list[int | str] = list(array.shape)
        shape[axis] = f"{note['module']}.rank"
        if use.form == CONV and use.group > 1 and axis == 1:
            shape[axis] = f"{note['module']}.rank_of_group"
        add_input(add.model, name, dtype, shape)
    return new


def _make_inputs(proto: ModelProto, names: Iterable[str]) -> None:
    """Turn constants of a model into inputs that have a default, in place."""
    wanted = set(names)
    refs = [ref for ref in constant_refs(proto) if ref.name in wanted]
    moved = [r for r in refs if r.node is not None or r.graph is not proto.graph or r.sparse]
    for ref in moved:
        tensor = proto.graph.initializer.add()
        tensor.CopyFrom(ref.read())
        tensor.name = ref.name
    take_out(proto, moved)
    inputs = {x.name for x in proto.graph.input}
    for tensor in proto.graph.initializer:
        if tensor.name in wanted - inputs:
            add_input(proto, tensor.name, ir.DataType(tensor.data_type), list(tensor.dims))
    proto.ir_version = max(proto.ir_version, 4)


def add_input(proto: ModelProto, name: str, dtype: ir.DataType, shape: list[int | str]) -> None:
    """Declare an initializer of a model as an input, in place."""
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    proto.graph.input.append(ir.to_proto(value))
