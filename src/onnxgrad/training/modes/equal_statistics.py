"""Running statistics that an exporter merged with other tensors of equal values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxgrad.model.constants import standard
from onnxgrad.model.scopes import free_name
from onnxgrad.model.traversal import names, nodes_of

_OPERANDS = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_STATISTICS = (3, 4)


def separate_statistics(proto: ModelProto) -> ModelProto:
    """Return `proto` with one tensor for each running statistic, where exporters merged several.

    Exporters of PyTorch store tensors of equal values once. In a network that was never trained,
    that merges the running variance (1, 1, ...) with the weight of the same layer, and both with
    tensors of other layers, so that none can change alone. Each layer then gets a copy of the
    merged tensor, under the name that an Identity gives it in the file, or one like
    "bn.running_mean". A layer that the network applies twice becomes two if its statistics were
    merged with its weights: the file does not tell them apart. A model in which no statistics are
    merged is returned itself.
    """
    merged = _merged_statistics(proto)
    if not merged:
        return proto
    model = ModelProto()
    model.CopyFrom(proto)
    tensors = {t.name: t for t in model.graph.initializer}
    for name, root in initializer_aliases(model).items():
        if root in merged:
            node = next(n for n in model.graph.node if name in n.output)
            model.graph.node.remove(node)
            add_copy(model.graph.initializer, tensors[root], name)
    taken = set(names(model.graph))
    users = _readers_but_copies(model)
    for node in filter(_is_batch_norm, model.graph.node):
        for operand, word in _OPERANDS.items():
            name = node.input[operand]
            if name not in merged or _keeps_tensor(users[name], node, operand):
                continue
            layer, weight, _ = node.input[1].rpartition(".weight")
            stem = layer if weight and operand > 1 else node.name or node.output[0]
            node.input[operand] = new = free_name(f"{stem}.{word}", taken)
            add_copy(model.graph.initializer, tensors[name], new)
    return model


Readers = dict[str, list[tuple[NodeProto, int]]]


def _is_batch_norm(node: NodeProto) -> bool:
    return not standard(node.domain) and node.op_type == "BatchNormalization"


def initializer_aliases(model: ModelProto) -> dict[str, str]:
    """Return the initializer that each Identity of the main graph copies, by the copy's name."""
    sources = {t.name: t.name for t in model.graph.initializer}
    outputs = {y.name for y in model.graph.output}
    aliases = {}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in sources:
            root = sources[node.output[0]] = sources[node.input[0]]
            if node.output[0] not in outputs:
                aliases[node.output[0]] = root
    return aliases


def readers_of(nodes: Iterable[NodeProto]) -> Readers:
    """Return the nodes that read each value, and as which operand."""
    readers: Readers = defaultdict(list)
    for node in nodes:
        for index, name in enumerate(node.input):
            readers[name].append((node, index))
    return readers


def add_copy(entries: Any, entry: TensorProto | ValueInfoProto, name: str) -> None:
    """Add a copy of an entry of a graph to `entries`, such as its initializers, with a new name."""
    copy = entries.add()
    copy.CopyFrom(entry)
    copy.name = name


def _readers_but_copies(model: ModelProto) -> Readers:
    """Return the readers of each value, without Identity nodes."""
    return readers_of(node for node in nodes_of(model) if node.op_type != "Identity")


def _merged_statistics(model: ModelProto) -> set[str]:
    """Return the initializers that are statistics and more, or whose alias is a statistic."""
    aliases = initializer_aliases(model)
    roles: dict[str, set[int]] = defaultdict(set)
    statistics: set[str] = set()
    for name, uses in _readers_but_copies(model).items():
        own = {_statistic_role(*use) for use in uses}
        roles[aliases.get(name, name)] |= own
        if not own.isdisjoint(_STATISTICS):
            statistics.add(name)
    merged = {aliases[name] for name in statistics if name in aliases}
    several = {name for name, own in roles.items() if len(own) > 1 and own & {*_STATISTICS}}
    return merged | several.intersection(tensor.name for tensor in model.graph.initializer)


def _statistic_role(node: NodeProto, operand: int) -> int:
    """Return the index of an operand of BatchNormalization; 0 for other nodes."""
    return operand if _is_batch_norm(node) else 0


def _keeps_tensor(users: list[tuple[NodeProto, int]], node: NodeProto, operand: int) -> bool:
    """Return whether this operand of a BatchNormalization keeps a tensor that was merged.

    Other nodes keep it, else the first weight or bias; else the statistics that share it do, if
    they are all means or all variances, as in a layer that is applied twice.
    """
    roles = {_statistic_role(*use) for use in users}
    if 0 in roles:
        return False
    if not roles - set(_STATISTICS):
        return operand == min(roles)
    first = next(use for use in users if use[1] not in _STATISTICS)
    return first[1] == operand and first[0].output[0] == node.output[0]
