"""`adapter_inputs`: a base model for inference whose adapters are optional inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.adapters.config import adapter_options
from onnxgrad.adapters.graph import AdapterWriter, adapter_dtype, factor_shapes, remove_adapters
from onnxgrad.adapters.insertion import adopt_adapters, copy_inlined, insert_adapter
from onnxgrad.adapters.places import AdapterPlace
from onnxgrad.adapters.session_files import refuse_dora
from onnxgrad.adapters.uses import CONV, LEFT, AdapterTarget, find_targets
from onnxgrad.errors import escaping, named
from onnxgrad.model.notes import (
    ADAPTERS,
    HEAD,
    INPUTS,
    read_adapters,
    read_metadata,
    write_metadata,
)
from onnxgrad.model.read import ModelLike
from onnxgrad.model.weights import constant_refs, replace_by_initializers
from onnxgrad.training.parameters.choice import matching_weights


@escaping()
def adapter_inputs(model: ModelLike, weights: str | Iterable[str] = ()) -> ModelProto:
    """Return the base model of `model`, which takes adapters of any rank as optional inputs.

    The two tensors of each adapter are inputs of their names with a default of rank 0, so that the
    base returns the results of the model without adapters. A session takes other values by an
    `.onnx_adapter` file that `save_adapter` wrote, `ort.LoraAdapter` and
    `RunOptions.add_active_adapter`, or onnxruntime-genai's `Adapters`: several adapters, of any
    rank and alpha, for one base. B in such a file is multiplied by alpha / rank already.

    The tensors of a new head, and `weights`, are inputs too. Their default is their value in
    `model`: pass the adapted model before its training for the untrained head as the default.

    If `model` is a base already, as Olive writes it, its inputs without a default get zeros.

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
    proto, places = adopt_adapters(model)
    notes = read_adapters(proto)
    if places and not notes:
        proto = _add_zero_defaults(model, find_targets(proto), places)
        _turn_constants_into_inputs(proto, _tensors_to_feed(proto, weights))
        return proto
    tensors = [name for note in notes for name in note["tensors"]]
    chosen = [name for name in _tensors_to_feed(proto, weights) if name not in tensors]
    if not tensors and not chosen:
        raise ValueError(f"the model has no adapters: add some by {named('add_lora')}")
    for note in notes:
        refuse_dora(note)
        if "inputs" in note:
            raise ValueError(
                f"{note['tensors'][0]!r} is an input of the file to which the adapter was added: "
                "use that file as the base"
            )
    remove_adapters(proto, [use["base"] for note in notes for use in note["uses"]], tensors)
    write_metadata(proto, ADAPTERS, [])
    targets, writer = find_targets(proto), AdapterWriter(proto)
    inputs = [_insert_adapter_inputs(writer, note, targets[note["weight"]]) for note in notes]
    write_metadata(proto, INPUTS, inputs)
    _turn_constants_into_inputs(proto, chosen)
    return proto


def _tensors_to_feed(proto: ModelProto, weights: str | Iterable[str]) -> list[str]:
    """Return the names of the tensors that become inputs besides adapters: a new head's tensors,
    and tensors that match `weights`.
    """
    kind = "weight for an input (weights=)"
    matched = matching_weights(proto, weights, kind) if weights else ()
    return list(dict.fromkeys([*read_metadata(proto, HEAD), *matched]))


def _add_zero_defaults(
    model: ModelLike, targets: Mapping[str, AdapterTarget], places: Mapping[str, AdapterPlace]
) -> ModelProto:
    """Return a copy of `model`, whose adapters are inputs, with zeros as the default value of these
    inputs.

    Zeros have rank 0 where the declared shape of the input leaves the rank open.
    """
    proto = copy_inlined(model)
    held = {tensor.name for tensor in proto.graph.initializer}
    sizes = {x.name: x.type.tensor_type.shape.dim for x in proto.graph.input}
    for name, place in places.items():
        if held.issuperset(place.tensors):
            continue
        flips = place.layout["transposed"]
        a = sizes[place.tensors[0]]
        # 0: the input takes any rank
        rank = a[-2 if flips[0] else -1].dim_value if len(a) > 1 else 0
        shapes = factor_shapes(targets[name].uses[0], rank)
        for i, tensor in enumerate(place.tensors):
            if tensor not in held:
                dtype = ir.DataType(place.layout["dtypes"][i])
                zeros = np.zeros(shapes[i][::-1] if flips[i] else shapes[i], dtype.numpy())
                proto.graph.initializer.append(ir.to_proto(ir.tensor(zeros, dtype, name=tensor)))
    return proto


def _insert_adapter_inputs(
    writer: AdapterWriter, note: dict[str, Any], target: AdapterTarget
) -> dict[str, Any]:
    """Write the adapter that the metadata dict `note` describes again, with its tensors as inputs;
    return its new metadata dict.
    """
    use = target.uses[0]
    # onnxruntime 1.31 computes other numbers where an empty factor is on the left
    rank = use.group if use.form == CONV else int(use.form == LEFT)
    dtype = adapter_dtype(use)
    arrays = tuple(np.zeros(shape, dtype.numpy()) for shape in factor_shapes(use, rank))
    place = AdapterPlace((note["tensors"][0], note["tensors"][1]))
    name, module, options = note["weight"], note["module"], adapter_options(rank, scaling=1.0)
    new = insert_adapter(writer, name, module, target, arrays, options, place)
    names = place.tensors[::-1] if use.form == LEFT else place.tensors
    axes = (0, 1) if use.form == CONV else (-1, -2)  # the axis of the rank in each factor
    for tensor, array, axis in zip(names, arrays, axes, strict=True):
        shape: list[int | str] = list(array.shape)
        shape[axis] = f"{module}.rank"
        if use.form == CONV and use.group > 1 and axis == 1:
            shape[axis] = f"{module}.rank_of_group"
        writer.model.graph.input.append(ir.to_proto(ir.val(tensor, dtype, shape)))
    return new


def _turn_constants_into_inputs(proto: ModelProto, names: Iterable[str]) -> None:
    """Turn the constants called `names` into optional inputs, whose default values are the
    constants, in place.
    """
    wanted = set(names)
    refs = [ref for ref in constant_refs(proto) if ref.name in wanted]
    moved = [r for r in refs if r.node is not None or r.graph is not proto.graph or r.is_sparse]
    for ref in moved:
        tensor = proto.graph.initializer.add()
        tensor.CopyFrom(ref.read())
        tensor.name = ref.name
    replace_by_initializers(proto, moved)
    inputs = {x.name for x in proto.graph.input}
    for tensor in proto.graph.initializer:
        if tensor.name in wanted - inputs:
            value = ir.val(tensor.name, ir.DataType(tensor.data_type), list(tensor.dims))
            proto.graph.input.append(ir.to_proto(value))
    proto.ir_version = max(proto.ir_version, 4)
