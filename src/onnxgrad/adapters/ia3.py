"""(IA)3: trained factors of the outputs of layers, or of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto

from onnxgrad.adapters.graph import Additions, adapter_dtype
from onnxgrad.adapters.insertion import adopted
from onnxgrad.adapters.names import FACTORS, module_names
from onnxgrad.adapters.targets import chosen_targets
from onnxgrad.adapters.uses import CONV, LINEAR, Target, Use, targets
from onnxgrad.errors import ModelError, escaping, printable
from onnxgrad.model.constants import ConstantRef
from onnxgrad.model.notes import ADAPTERS, read_adapters, write_note
from onnxgrad.model.read import ModelLike
from onnxgrad.model.traversal import all_nodes, graphs_of, keep_only
from onnxgrad.model.weights import constant_refs

_PATTERNS = {"rank": 0, "use_dora": False}  # what `chosen_targets` asks of options


@escaping()
def add_ia3(
    model: ModelLike, patterns: str | Iterable[str], feedforward: str | Iterable[str] = ()
) -> ModelProto:
    """Return `model` with factors of the outputs of layers, one for each feature, that train.

    Instead of `x W + b` a layer computes `l (x W + b)`, and `(l x) W + b` if `feedforward` names
    it, with l = 1 at first (Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better
    and Cheaper than In-Context Learning"): there keys, values, and the second layers of the
    feed-forward networks. Trainers train the factors, and a new head, by default. `merge_lora`,
    `save_adapter` and `adapter_inputs` take them like other adapters.

    Args:
        model: model, serialized model or path; never modified.
        patterns: names, and patterns as "*.key.weight", of factors of MatMul and Gemm, and kernels
            of Conv, also quantized ones.
        feedforward: the same, of layers whose inputs get the factors.

    Raises:
        ValueError: a pattern that matches nothing that can have factors; a layer named in both.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,3] x) => (float[N,2] y)
        ...     <float[3,2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = MatMul(x, w) }''')
        >>> adapted = og.add_ia3(model, "w")
        >>> [(t.name, list(t.dims)) for t in adapted.graph.initializer]
        [('w', [3, 2]), ('w.ia3_l', [2])]
        >>> og.merge_lora(adapted) == model
        True
    """
    proto, _ = adopted(model)
    every = targets(proto)
    modules = module_names(proto, every)
    chosen: dict[str, bool] = {}
    for before, wanted in ((False, patterns), (True, feedforward)):
        listed = [wanted] if isinstance(wanted, str) else list(wanted)
        found = chosen_targets(proto, every, listed, _PATTERNS) if listed else {}
        if twice := [name for name in found if name in chosen]:
            raise ValueError(f"{printable(twice[0])!r} gets factors of its output and of its input")
        chosen |= dict.fromkeys(found, before)
    add, notes = Additions(proto), read_adapters(proto)
    for name in (name for name in every if name in chosen):
        notes.append(insert(add, name, modules[name], every[name], chosen[name]))
    write_note(proto, ADAPTERS, notes)
    return proto


def insert(add: Additions, name: str, module: str, target: Target, before: bool) -> dict[str, Any]:
    """Write the factors of one layer at all its uses, each 1; return the note about them.

    Raises:
        ValueError: a use that cannot have them.
    """
    first = target.uses[0]
    bias = ""
    for use in target.uses:
        flat = use.form == LINEAR and len(use.shape) == 2 and not use.flips
        if not (flat or use.form == CONV) or use.perm != first.perm:
            raise ValueError(
                f"{printable(name)!r} is no matrix by which MatMul or Gemm multiplies data, and no "
                "kernel of a Conv: it cannot have factors of (IA)3"
            )
        if before and use.x not in use.node.input:
            raise ValueError(
                f"the data of {printable(name)!r} are quantized: factors of its input are not "
                "possible, those of its output are"
            )
    tensor = add.name(f"{module}.{FACTORS}")
    dtype = adapter_dtype(first)
    value = add.tensor(tensor, np.ones(_shape(first, before), dtype.numpy()))
    uses = []
    for use in target.uses:
        if before:
            uses.append({"scaled": _scale_input(add, use, value)})
            continue
        node, found = _with_bias(add, use)
        if found and bias not in ("", found):
            raise ValueError(f"the uses of {printable(name)!r} have several biases")
        bias = found or bias
        uses.append({"base": add.beside(_moved(use, node), _scaler(add, use, value))})
    return {
        "kind": "ia3",
        "form": first.form,
        "weight": name,
        "module": module,
        "tensors": [tensor],
        "perm": list(first.perm),
        "group": first.group,
        "quantized": target.quantized,
        "use_dora": False,
        "dropout": 0.0,
        "feedforward": before,
        "bias": bias,
        "uses": uses,
    }


def _shape(use: Use, before: bool) -> tuple[int, ...]:
    """Return the shape of the factors: that of the features, and 1 for each axis of an image."""
    if use.form != CONV:
        return (use.shape[0 if before else 1],)
    count = use.shape[1] * use.group if before else use.shape[0]
    return (count, *(1 for _ in use.shape[2:]))


def _scaler(add: Additions, use: Use, factors: ir.Value) -> Any:
    return lambda base: add.emit("Mul", base, add.cast(factors, use.dtype))


def _moved(use: Use, node: NodeProto) -> Use:
    return Use(use.graph, node, use.form, use.x, use.perm, use.shape, use.dtype)


def _with_bias(add: Additions, use: Use) -> tuple[NodeProto, str]:
    """Return the last node of a layer, and its bias: of a node, or of a sum behind it."""
    node, names = use.node, {ref.graph_name for ref in constant_refs(add.model)}
    if node.op_type in ("Gemm", "Conv") and any(node.input[2:]):
        return node, node.input[2]
    readers = [n for n in all_nodes(use.graph.node) if node.output[0] in n.input]
    if len(readers) == 1 and readers[0].op_type == "Add" and readers[0] in use.graph.node:
        others = [name for name in readers[0].input if name != node.output[0]]
        if others and others[0] in names:
            return readers[0], others[0]
    return node, ""


def _scale_input(add: Additions, use: Use, factors: ir.Value) -> str:
    """Multiply the data that a node reads; return the name of the product."""
    with add.op:
        cast = add.cast(factors, use.dtype)
        scaled = add.emit("Mul", add.value(use.x, use.dtype), cast)
    scaled.name = add.name(f"{use.x}.{FACTORS}")
    written = [n for n in (cast.producer(), scaled.producer()) if n is not None]
    position = next(i for i, n in enumerate(use.graph.node) if n == use.node)
    use.node.input[list(use.node.input).index(use.x)] = scaled.name
    for node in reversed(written):
        proto = ir.to_proto(node)
        proto.ClearField("name")
        use.graph.node.insert(position, proto)
    return str(scaled.name)


# -- merging -------------------------------------------------------------------------------------


def scaled(note: Mapping[str, Any], factors: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return a weight times its factors, with the axes as in the node that reads it."""
    if note["form"] != CONV:
        return weight * (factors.reshape(-1, 1) if note["feedforward"] else factors)
    axes = tuple(range(1, weight.ndim - 1))
    if not note["feedforward"]:
        return weight * np.expand_dims(factors.reshape(-1, 1), axes)
    groups = factors.reshape(note["group"], -1)
    rows = np.repeat(groups, len(weight) // len(groups), axis=0)
    return weight * rows.reshape(*rows.shape, *(1 for _ in weight.shape[2:]))


def merge_bias(
    note: Mapping[str, Any],
    refs: Mapping[str, ConstantRef],
    proto: ModelProto,
    factors: np.ndarray,
) -> None:
    """Multiply the bias of a layer by factors of its output, in place, if it has one.

    That of a quantized weight is rounded with it, see `requantize`.

    Raises:
        ValueError: other nodes read the bias, or it is no constant.
    """
    nodes = list(all_nodes(proto.graph.node))
    maker = next((node for node in nodes if note["bias"] in node.output), None)
    rounded = maker is not None and maker.op_type == "DequantizeLinear" and note["quantized"]
    if not note["bias"] or rounded:
        return
    readers = sum(list(node.input).count(note["bias"]) for node in nodes)
    bias = next((r for r in refs.values() if r.graph_name == note["bias"]), None)
    ends = [(factors.size,)] if note["form"] == LINEAR else [(factors.size,), (1,)]
    if bias is None or readers > len(note["uses"]) or bias.array().shape[-1:] not in ends:
        raise ValueError(
            f"the factors of {printable(note['weight'])!r} cannot be merged: its bias "
            f"{printable(note['bias'])!r} is read by others, or is no constant of its features"
        )
    old = bias.array()
    new = (old * factors.reshape(factors.shape if old.ndim > 1 else -1)).astype(old.dtype)
    if not np.array_equal(new, old):
        bias.write(new)


def remove_scaled(proto: ModelProto, notes: Iterable[Mapping[str, Any]]) -> None:
    """Remove the nodes that multiply the inputs of layers, and their factors, in place.

    Raises:
        ModelError: another tool modified them.
    """
    for note in notes:
        for use in note["uses"]:
            for graph in graphs_of(proto) if "scaled" in use else ():
                _remove_product(graph, use["scaled"])
        if any("scaled" in use for use in note["uses"]):
            [name] = note["tensors"]
            nodes = list(all_nodes(proto.graph.node))
            if any(name in node.input for node in nodes):
                raise ModelError(
                    f"the factors {printable(name)!r} are not used as add_ia3 wrote it: a tool "
                    "modified the file. Merge adapters before other tools modify it"
                )
            _drop(proto, name)


def _drop(proto: ModelProto, name: str) -> None:
    for entries in (proto.graph.initializer, proto.graph.input):
        keep_only(entries, lambda entry: entry.name != name)


def _remove_product(graph: Any, scaled: str) -> None:
    """Remove the node that computes `scaled`, and a Cast of its factors, if the graph has it."""
    product = next((n for n in graph.node if scaled in n.output), None)
    if product is None:
        return
    x, factors = product.input
    for node in all_nodes(graph.node):
        for i, name in enumerate(node.input):
            if name == scaled:
                node.input[i] = x
    graph.node.remove(product)
    cast = next((n for n in graph.node if factors in n.output), None)
    if cast is not None and not any(factors in n.input for n in all_nodes(graph.node)):
        graph.node.remove(cast)
