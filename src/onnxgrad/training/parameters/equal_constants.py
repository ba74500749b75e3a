"""Separate parameters that an exporter stored as one tensor, and tie weights that it stored twice.

Running statistics that share a tensor with other tensors of equal values are separated, too.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxgrad.errors import join_first, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.model import external
from onnxgrad.model.constants import FLOATS, normalize_domain
from onnxgrad.model.convert import to_ir, to_proto_and_free
from onnxgrad.model.notes import read_adapters
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.scopes import free_name
from onnxgrad.model.traversal import all_nodes, keep_only, model_nodes, value_names
from onnxgrad.model.weights import constant_refs, lift_constants
from onnxgrad.operators import RECURRENT
from onnxgrad.reporting import frames_inside
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.aliases import (
    PARAMETERS_OF_ARITHMETIC,
    ModuleNames,
    fits_role,
    is_readable,
    module_of,
)
from onnxgrad.training.parameters.flow import MOVES, operand_role, reads_of_values
from onnxgrad.training.parameters.roles import judge_constants
from onnxgrad.training.parameters.table import LISTED, Tensor

_WORDS = dict.fromkeys("ftps", "weight") | dict.fromkeys("bo", "bias")
_FIXED = "constant"  # the key of a constant that is no parameter, such as a fixed initial state


def separate_merged(model: ModelLike) -> ModelProto:
    """Return `model` with one tensor for each parameter, also for equal parameters stored once.

    Exporters store equal tensors once. In a network that was never trained, that makes one tensor
    of the scales (1, 1, ...) of all normalizations of a size, of the zero biases, of equal copies
    of a layer, and of running statistics beside them. These are several parameters where the file
    says so: by an Identity for each (PyTorch's TorchScript exporter), by the metadata of the nodes
    (its newer one), or, if all elements are one number, by being operands of different layers.
    Parameters that the network shares stay shared: a module that is applied twice, an embedding
    that is tied to the last layer. Trainers do this by themselves, if they train merged parameters.

    Args:
        model: model, serialized model or path; never modified.

    Returns:
        A model that computes the same; `model` itself, as read, if nothing was merged. A new tensor
        has the name of the parameter where the file tells it.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model(\'\'\'
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,2] y)
        ...     <float[2] one = {1.0, 1.0}> { b_weight = Identity(one)
        ...     h = LayerNormalization(x, one) y = LayerNormalization(h, b_weight) }\'\'\')
        >>> [tensor.name for tensor in og.graph.separate_merged(model).graph.initializer]
        ['one', 'b_weight']
    """
    proto = read(model)
    separated = separate_statistics(proto)
    merged = _MergedParameters(separated, proto)
    groups = {
        name: parts for name in merged.reads if len(parts := merged.uses_by_parameter(name)) > 1
    }
    if not groups:
        return separated
    adapters = {name for adapter in read_adapters(proto) for name in adapter["tensors"]}
    # an adapter stays one tensor for all nodes that read it
    trains = {row.name for row in judge_constants(separated)[1].trained} - adapters
    groups = {name: parts for name, parts in groups.items() if name in trains}
    return _copy_with_separate_parameters(separated, merged, groups) if groups else separated


def shares_tensors(proto: ModelProto, separated: ModelProto, trained: Collection[str]) -> bool:
    """Return whether `proto` stores a trained weight and another parameter as one tensor.

    Warn of trained weights that are new tensors in `separated`, the model with one tensor for each
    parameter.
    """
    copies = _names_of_added_initializers(proto, separated)
    if new := [name for name in copies if name in trained]:
        separate = (
            "here each is a separate tensor, as onnxgrad.graph.separate_merged(model) writes them"
        )
        _warn_of_merged_names(new, separate)
    if new or not copies:
        return bool(new)
    stored = {t.name for t in proto.graph.initializer}
    models = proto, separated
    before, after = (Counter(x for node in model_nodes(m) for x in node.input) for m in models)
    return any(name in stored and before[name] != after[name] for name in trained)


def warn_of_merged_parameters(proto: ModelProto) -> None:
    """Warn of parameters that `proto` stores as one tensor, and that therefore stay equal in
    training.
    """
    if copies := _names_of_added_initializers(proto, separate_merged(proto)):
        remedy = "pass onnxgrad.graph.separate_merged(model) to train each"
        _warn_of_merged_names(copies, f"they train as one: {remedy}")


def _names_of_added_initializers(proto: ModelProto, separated: ModelProto) -> list[str]:
    """Return the names of the initializers of `separated` that `proto` lacks."""
    stored = {t.name for t in proto.graph.initializer}
    return [t.name for t in separated.graph.initializer if t.name not in stored]


def _warn_of_merged_names(names: list[str], text: str) -> None:
    """Warn of parameters that an exporter stored as one tensor; `text` says what happens."""
    shown = join_first([repr(printable(name)) for name in names], LISTED)
    stored = f"{shown}: the exporter stored parameters with equal values once"
    warnings.warn(f"{stored}; {text}", stacklevel=frames_inside() + 1)


@dataclass(frozen=True)
class _TensorRead:
    """An operand of a node that reads a tensor, and the parameter that the operand is.

    - `node`, `index`: the node that reads the tensor, and the index of the operand.
    - `alias`: the Identity output by which the node reads the tensor; "" without an Identity.
    - `role`: the letter of `operand_role`, "a" for arithmetic.
    - `key`: a text that is equal for all uses of one parameter.
    - `certain`: whether names in the file decide the key.
    - `name`: the name of the parameter; "" if unknown.
    """

    node: NodeProto
    index: int
    alias: str
    role: str
    key: str
    certain: bool = False
    name: str = ""


class _MergedParameters:
    """Finds the parameters that an exporter stored as one initializer, by the nodes that read it.

    `reads` has a list of (node, index of the operand, alias or "") for each such initializer.
    """

    def __init__(self, proto: ModelProto, file: ModelProto) -> None:
        self.tensors = {t.name: t for t in proto.graph.initializer if t.data_type in FLOATS}
        self.stored = file.graph.initializer
        self.from_torch = proto.producer_name == "pytorch"
        aliases = self.aliases = initializer_aliases(proto)
        self.aliased = self.from_torch and any(not evidence.is_generated(name) for name in aliases)
        self.functions = {
            (f.domain, f.name, f.overload): (f.input, readers_of(all_nodes(f.node)))
            for f in proto.functions
        }
        self.nodes = list(all_nodes(proto.graph.node))
        self.readers = readers_of(self.nodes)
        self.makers = {y: n for n in self.nodes for y in n.output}
        reads: dict[str, list[tuple[NodeProto, int, str]]] = defaultdict(list)
        for name in (*self.tensors, *aliases):
            root = aliases.get(name, name)
            for node, index in self.readers[name] if root in self.tensors else ():
                if node.op_type != "Identity" or node.output[0] not in aliases:
                    reads[root].append((node, index, name if root != name else ""))
        self.reads = {name: uses for name, uses in reads.items() if len(uses) > 1}
        nodes = self.nodes if self.reads else ()
        known = [name for name in (*self.tensors, *aliases) if nodes and is_readable(name)]
        self.modules = ModuleNames(map(_metadata_entries, nodes), known)
        self.owners = {path for name in known for path in _path_prefixes(name)}
        self.paths = {
            p for n in nodes for p in _path_prefixes(module_of(n.name, _metadata_entries(n)))
        }
        self.calls = Counter(map(self._path_without_call_numbers, self.paths))

    def uses_by_parameter(self, name: str) -> list[list[_TensorRead]]:
        """Return the reads of the tensor `name`, a list for each parameter stored as this tensor.

        The parameter of the first list keeps the tensor.
        """
        uses = [self._tensor_read(name, *read) for read in self.reads[name]]
        if len({use.key for use in uses}) == 1:
            return [uses]
        tied = {"f", "t"} <= {use.role for use in uses}  # an embedding and a layer
        doubtful = tied or not all(use.certain for use in uses)
        if doubtful and not self._is_uniform_and_unique(name):
            uses = [u if u.certain and not tied else replace(u, key=name) for u in uses]
        groups: dict[str, list[_TensorRead]] = {}
        for use in sorted(uses, key=lambda use: (use.name != name, use.alias != "")):
            groups.setdefault(use.key, []).append(use)
        return list(groups.values())

    def _operand_role(self, node: NodeProto, index: int, readers: ReadersByValue) -> str:
        """Return the role of an operand, looking through moves, such as Reshape, and into
        functions.

        The role is a letter of `operand_role`, or "a" for an operand of arithmetic.
        """
        inputs, inner = self.functions.get((node.domain, node.op_type, node.overload), ((), {}))
        if index < len(inputs):
            uses = inner[inputs[index]]
            return self._operand_role(*uses[0], inner) if uses else ""
        if node.op_type in MOVES and index == 0 and (uses := readers[node.output[0]]):
            return self._operand_role(*uses[0], readers)
        return "a" if node.op_type in PARAMETERS_OF_ARITHMETIC else operand_role(node, index)

    def _tensor_read(self, tensor: str, node: NodeProto, index: int, alias: str) -> _TensorRead:
        """Return the read of a tensor as operand `index` of `node`, with a key of the parameter."""
        role, metadata = self._operand_role(node, index, self.readers), _metadata_entries(node)
        word = _WORDS.get(role, "")
        if role == "a":
            word = PARAMETERS_OF_ARITHMETIC.get(node.op_type, "bias")
        noted = self.modules.parameter_names(metadata)
        fitting = [p for p in noted if fits_role(p, word)] or noted
        named, has_features = alias or tensor, sum(n > 1 for n in self.tensors[tensor].dims) == 1
        use = partial(_TensorRead, node, index, alias, role)
        if len(fitting) == 1:
            return use(fitting[0], True, fitting[0])
        if is_readable(named) and (self.aliased or alias):
            return use(named, self.aliased, named)
        if not word or (role == "a" and not has_features):
            return use(_FIXED)
        # a recurrent node has several parameters with one role
        several = not self.from_torch or node.op_type in RECURRENT
        module = "" if several else module_of(node.name, metadata)
        base = self._path_without_call_numbers(module)
        clear = bool(module) and self.calls[base] == 1
        layer = "" if clear else self._layer_key(node, role, tensor)
        name = f"{module or node.name or node.output[0]}.{word}"
        return use(f"{base}:{role}:{layer}", self.aliased and clear, name)

    def _path_without_call_numbers(self, path: str) -> str:
        """Return the path of a module without the numbers of calls: "norm" for "norm_1".

        A number stays if a tensor has this path in its name.
        """
        parts: list[str] = []
        for part in path.split("."):
            base, own = re.sub(r"_\d+$", "", part), ".".join([*parts, part]) in self.owners
            again = not own and ".".join([*parts, base]) in self.paths
            parts.append(base if again else part)
        return ".".join(parts)

    def _is_uniform_and_unique(self, name: str) -> bool:
        """Return whether all elements of a tensor are one number, and no other stored tensor equals
        it.

        A network that was never trained has such tensors.
        """
        tensor, array = self.tensors[name], external.tensor_to_array(self.tensors[name])
        if not evidence.is_constant_array(array):
            return False
        likes = [t for t in self.stored if (t.data_type, t.dims) == (tensor.data_type, tensor.dims)]
        return sum(np.array_equal(external.tensor_to_array(t), array) for t in likes) < 2

    def _layer_key(self, node: NodeProto, role: str, tensor: str) -> str:
        """Return a text that identifies the layer of `node`: the names of the nearest weights.

        For a bias, these are the weights of the product to which the bias is added; for other
        nodes, the weights of the next products. Without such weights, the text is the name of the
        first output of `node`.
        """
        near = [node, *(self.makers[x] for x in node.input if x in self.makers)]
        for nodes in (near if role in "ab" else [], self._nearest_products_after(node)):
            weights = sorted({x for n in nodes for x in self._factor_names(n)} - {tensor})
            if weights:
                return " ".join(weights)
        return node.output[0]

    def _factor_names(self, node: NodeProto) -> Iterator[str]:
        """Yield the names of the tensors by which a matrix product or convolution multiplies.

        Nodes that move a tensor, and Identity nodes, may stand between the tensor and `node`.
        """
        for i, x in enumerate(node.input):
            if operand_role(node, i) == "f":
                while (maker := self.makers.get(x)) is not None and maker.op_type in MOVES:
                    x = maker.input[0]
                if (root := self.aliases.get(x, x)) in self.tensors:
                    yield root

    def _nearest_products_after(self, node: NodeProto) -> list[NodeProto]:
        """Return the nearest products with weights behind `node`."""
        found, waiting = [], [node]
        for n in waiting:  # the loop appends to it
            for user, _ in (use for y in n.output for use in self.readers[y]):
                scaled = any(operand_role(user, i) == "s" for i in range(len(user.input)))
                if any(self._factor_names(user)):
                    found.append(user)
                elif not scaled and sum(x in self.makers for x in user.input) < 2:
                    waiting += [user] if all(user is not w for w in waiting) else []
        return found


def _copy_with_separate_parameters(
    proto: ModelProto, merged: _MergedParameters, groups: dict[str, list[list[_TensorRead]]]
) -> ModelProto:
    """Return a copy of `proto` with one tensor for each parameter in `groups`.

    `groups` has the lists of `_MergedParameters.uses_by_parameter`, by the name of the old tensor.
    """
    model = deepcopy(proto)
    copied = all_nodes(model.graph.node)
    ours = {id(a): b for a, b in zip(merged.nodes, copied, strict=True)}
    tensors = {t.name: t for t in model.graph.initializer}
    stated = {v.name: v for v in model.graph.value_info}
    taken = set(value_names(model.graph))
    replaced: set[str] = set()  # aliases that become tensors
    for original, part in ((name, part) for name, parts in groups.items() for part in parts[1:]):
        name = part[0].alias
        if name and all(any(node is use.node for use in part) for node, _ in merged.readers[name]):
            replaced.add(name)
        else:
            name = free_name(part[0].name or f"{original}.{_FIXED}", taken)
        for use in part:
            ours[id(use.node)].input[use.index] = name
        add_copy(model.graph.initializer, tensors[original], name)
        if original in stated and part[0].key != _FIXED:
            add_copy(model.graph.value_info, stated[original], name)
    keep_only(model.graph.node, lambda node: replaced.isdisjoint(node.output))
    return model


def _path_prefixes(name: str) -> list[str]:
    """Return "a", "a.b" and "a.b.c" for "a.b.c"."""
    return [name[: dot.start()] for dot in re.finditer(r"\.|$", name)]


def _metadata_entries(node: NodeProto) -> dict[str, str]:
    """Return the metadata of a node as a dict."""
    return {entry.key: entry.value for entry in node.metadata_props}


# -- weights that an exporter stored twice ---------------------------------------------------------


def tie_copies(model: ModelLike) -> ModelProto:
    """Return `model` with one tensor for each weight that its exporter stored several times.

    Such weights are copies of the table of an embedding, maybe transposed: in a decoder beside
    its encoder, or the weight of the last layer of a language model. `trainable` lists them as
    copies. Copies become different when each trains by itself; in the result they are one weight,
    with the sum of the gradients, as in the network that was exported. The opposite is
    `separate_merged`.

    Args:
        model: model, serialized model or path; never modified.

    Returns:
        A model that computes the same; `model` itself, as read, if it has no copies. Where a copy
        is transposed, a Transpose computes it, once when a session is made.

    Raises:
        ValueError: the model has adapters, perhaps beside a copy of a weight: call `tie_copies`
            before `add_lora`.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (int64[N] x) => (float[N,3] y)
        ...     <float[3,2] table = {1, 2, 3, 4, 5, 6}, float[2,3] last = {1, 3, 5, 2, 4, 6}>
        ...     { h = Gather(table, x) y = MatMul(h, last) }''')
        >>> tied = og.graph.tie_copies(model)
        >>> [tensor.name for tensor in tied.graph.initializer]
        ['table']
        >>> [node.op_type for node in tied.graph.node]
        ['Transpose', 'Gather', 'MatMul']
    """
    proto = read(model)
    graph, rows = judge_constants(proto)
    originals = copies_of_tables(proto, graph, rows)
    if not originals:
        return proto
    if read_adapters(proto):
        raise ValueError(
            "the model has adapters, perhaps beside a copied weight: use tie_copies before add_lora"
        )
    tied = deepcopy(proto)
    concerned = {*originals, *originals.values()}
    refs = [ref for ref in constant_refs(tied) if ref.name in concerned]
    arrays = {ref.name: ref.array() for ref in refs}
    lift_constants(tied, refs)
    made = to_ir(tied)
    values = made.graph.initializers
    op = Emit(made.graph)
    with op.at(next(iter(made.graph))):
        for name, table in originals.items():
            same = np.array_equal(arrays[name], arrays[table])
            new = values[table] if same else op.Transpose(values[table], perm=[1, 0])
            ir.convenience.replace_all_uses_with(values[name], new, replace_graph_outputs=True)
            made.graph.inputs[:] = [x for x in made.graph.inputs if x is not values[name]]
            del values[name]
    return to_proto_and_free(made)


def copies_of_tables(proto: ModelProto, graph: ir.Graph, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return the weights that copy an embedding's table, `{name of copy: name of table}`.

    A copy is a table or a factor with the numbers of the table, maybe transposed, as the last layer
    of a language model. Two layers may be equal for other reasons, such as how they were
    initialized, but not an embedding and a layer.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for row in rows:
        if row.trains and len(row.shape) == 2 and min(row.shape) > 1:
            groups.setdefault((row.dtype, *sorted(row.shape)), []).append(row)
    originals: dict[str, str] = {}
    for group in groups.values():
        values = {row.name: graph.initializers[row.name] for row in group}
        roles = {name: _roles_of_readers(value) for name, value in values.items() if len(group) > 1}
        tables = [name for name, letters in roles.items() if "t" in letters]
        others = [name for name, letters in roles.items() if letters & {"t", "f"}]
        if not tables or len(others) < 2:
            continue
        arrays = {ref.name: ref.array() for ref in constant_refs(proto) if ref.name in roles}
        for table, other in product(tables, others):
            new = other != table and originals.keys().isdisjoint((other, table))
            if new and _are_equal_or_transposed(arrays[table], arrays[other]):
                originals[other] = table
    return originals


def _are_equal_or_transposed(table: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two matrices, or a matrix and the transpose of the other, are equal."""
    if (table == table[0, 0]).all():
        return False  # matrices of one number may be equal by chance
    return any(
        np.array_equal(table[0], matrix[0]) and np.array_equal(table, matrix)
        for matrix in (other, other.T)
    )


def _roles_of_readers(value: ir.Value) -> set[str]:
    """Return the roles of all operands that read `value`, or the result of a move such as
    Transpose.
    """
    uses = reads_of_values([value], MOVES - {"Gather"})  # Gather looks up rows of a table
    return {operand_role(node, index) for node, index in uses}


# operands of BatchNormalization
_OPERANDS = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_STATISTICS = (3, 4)


def separate_statistics(proto: ModelProto) -> ModelProto:
    """Return `proto` with one tensor for each running statistic that shares a tensor.

    Exporters of PyTorch store tensors of equal values once. In a network that was never trained,
    that merges the running variance (1, 1, ...) with the weight of the same layer, and both with
    tensors of other layers, so that none can change alone. Each layer then gets a copy of the
    merged tensor, under the name that an Identity gives it in the file, or one like
    "bn.running_mean". A layer that the network applies twice becomes two if its statistics were
    merged with its weights: the file does not tell them apart. A model in which no statistics are
    merged is returned itself.
    """
    aliases = initializer_aliases(proto)
    merged = _running_statistics_with_other_reads(proto, aliases)
    if not merged:
        return proto
    model = deepcopy(proto)
    tensors = {t.name: t for t in model.graph.initializer}
    replaced = {name: root for name, root in aliases.items() if root in merged}
    keep_only(model.graph.node, lambda node: replaced.keys().isdisjoint(node.output))
    for name, root in replaced.items():
        add_copy(model.graph.initializer, tensors[root], name)
    taken = set(value_names(model.graph))
    users = _readers_except_identity(model)
    for node in filter(_is_batch_norm, model.graph.node):
        for operand, word in _OPERANDS.items():
            name = node.input[operand]
            if name not in merged or _keeps_shared_tensor(users[name], node, operand):
                continue
            layer, weight, _ = node.input[1].rpartition(".weight")
            stem = layer if weight and operand > 1 else node.name or node.output[0]
            node.input[operand] = new = free_name(f"{stem}.{word}", taken)
            add_copy(model.graph.initializer, tensors[name], new)
    return model


ReadersByValue = dict[str, list[tuple[NodeProto, int]]]


def _is_batch_norm(node: NodeProto) -> bool:
    """Return whether `node` is a BatchNormalization of ONNX."""
    return not normalize_domain(node.domain) and node.op_type == "BatchNormalization"


def initializer_aliases(model: ModelProto) -> dict[str, str]:
    """Return the initializer that each Identity of the main graph copies, by the output's name."""
    sources = {t.name: t.name for t in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in sources:
            sources[node.output[0]] = sources[node.input[0]]
    others = {y.name for y in (*model.graph.initializer, *model.graph.output)}
    return {name: root for name, root in sources.items() if name not in others}


def readers_of(nodes: Iterable[NodeProto]) -> ReadersByValue:
    """Return the nodes that read each value, `{value name: [(node, operand index), ...]}`."""
    readers: ReadersByValue = defaultdict(list)
    for node in nodes:
        for index, name in enumerate(node.input):
            readers[name].append((node, index))
    return readers


def add_copy(entries: Any, entry: TensorProto | ValueInfoProto, name: str) -> None:
    """Append a copy of `entry`, renamed to `name`, to a repeated field, as `initializer`."""
    copy = entries.add()
    copy.CopyFrom(entry)
    copy.name = name


def _readers_except_identity(model: ModelProto) -> ReadersByValue:
    """Return the nodes other than Identity that read each value, as `readers_of` does."""
    return readers_of(node for node in model_nodes(model) if node.op_type != "Identity")


def _running_statistics_with_other_reads(model: ModelProto, aliases: Mapping[str, str]) -> set[str]:
    """Return the initializers that are read both as a running statistic and as another operand.

    An initializer is also returned if an Identity copies it for a running statistic.
    """
    roles: dict[str, set[int]] = {t.name: set() for t in model.graph.initializer}
    copied: set[str] = set()
    for name, uses in _readers_except_identity(model).items():
        own, root = _batch_norm_operand_indices(uses), aliases.get(name, name)
        if root in roles:
            roles[root] |= own
            copied |= {root} if root != name and not own.isdisjoint(_STATISTICS) else set()
    return copied | {n for n, own in roles.items() if len(own) > 1 and own & {*_STATISTICS}}


def _batch_norm_operand_indices(uses: Iterable[tuple[NodeProto, int]]) -> set[int]:
    """Return the operand indices of reads by BatchNormalization, and 0 for reads by other nodes."""
    return {operand if _is_batch_norm(node) else 0 for node, operand in uses}


def _keeps_shared_tensor(users: list[tuple[NodeProto, int]], node: NodeProto, operand: int) -> bool:
    """Return whether operand `operand` of `node` keeps the tensor that `users` share, without a
    copy.

    Nodes other than BatchNormalization keep the tensor; without such nodes, the first weight or
    bias keeps it; without weights and biases, the statistics do, all means or all variances, as in
    a layer that is applied twice.
    """
    roles = _batch_norm_operand_indices(users)
    if 0 in roles:
        return False
    if not roles - set(_STATISTICS):
        return operand == min(roles)
    first = next(use for use in users if use[1] not in _STATISTICS)
    return first[1] == operand and first[0].output[0] == node.output[0]
