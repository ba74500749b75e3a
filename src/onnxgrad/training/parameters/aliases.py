"""Readable names for the constants that exporters number, such as `onnx::MatMul_137`.

An alias is the path of the module that uses the constant, and the constant's role in it:
`encoder.layer.0.attention.self.query.weight`, as PyTorch's `named_parameters` has it. An exporter
that folds a weight into another one, or transposes it, drops its name; the bias beside it, the node
and the node's metadata keep what the alias is read from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.scopes import name_of_floats
from onnxgrad.operators import RECURRENT
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.module_names import ModuleNames, label, owner
from onnxgrad.training.parameters.operands import (
    MOVES,
    domain,
    letter,
    maker_of,
    readers,
    source_of,
)
from onnxgrad.training.parameters.table import Tensor
from onnxgrad.training.parameters.verdicts import judge

_SUFFIX = re.compile(r"(_transposed|_merged|_weight_merged|_token_\d+|_ort\w*)+$")  # onnxruntime's
_NUMBERED = re.compile(
    r"""onnx::\w+ | (.*/)?const_fold_opt__\d+ | \w+__\d+(_\w+)? | .+;.+ | p2o\..+
    | (.*/)(ReadVariableOp|resource|Reshape|[Tt]ranspose|Const|Cast|ExpandDims|Squeeze|Identity
      |[Cc]oncat|Mul|mul|Add|AddV2|add|Sub|sub|Rsqrt|Read)(_\d+)?(:\d+)? | .+\.weight_bias
    | (t|permute|transpose|reshape|flatten|cat|stack|flip|contiguous|einsum|matmul|mm|repeat|exp
      |clone|convert_element_type|split|getitem|sigmoid|tanh|softplus|linalg_\w+)(_\d+)*""",
    re.VERBOSE,
)
_RECURRENT = {1: "weight_ih", 2: "weight_hh", 3: "bias", 5: "h0", 6: "c0", 7: "weight_p"}
_BY_LETTER = dict.fromkeys("ftps", "weight") | dict.fromkeys("bom", "bias")
_BY_OPERATOR = dict.fromkeys(("Mul", "Div"), "weight") | dict.fromkeys(("Add", "Sub"), "bias")
_OTHER = "parameter"
_ONLY_MOVES = MOVES - {"Gather"}  # which looks up rows of a table
_NAMED = frozenset("fbst")  # operands of a node that is a layer by itself


def aliases(proto: ModelProto) -> dict[str, str]:
    """Return the aliases of the constants that have one, `{name: alias}`.

    A constant has an alias if it plays the role of a weight, its own name is numbered, and the file
    tells more. Aliases are unique, and none is the name of a constant.
    """
    return read_aliases(*judge(proto))


def read_aliases(graph: ir.Graph, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return the aliases of the float constants of `graph`, see `aliases`."""
    numbered = [row for row in rows if row.trains and not readable(row.name)]
    reader = _Reader(graph, rows) if numbered else None
    taken = {row.name for row in rows}
    return _unique({row.name: reader.read(row) for row in numbered if reader}, taken)


def integer_aliases(proto: ModelProto, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return the aliases of quantized weights: what their floats were called.

    If an exporter numbered these, it is read from the file as the alias of floats is.
    """
    floats = {row.name: name_of_floats(row.name) for row in rows}
    numbered = [row for row in rows if not readable(floats[row.name])]
    aliases = {name: base for name, base in floats.items() if base != name}
    if not numbered:
        return aliases
    graph, judged = judge(proto)
    reader, taken = _Reader(graph, judged), {row.name for row in (*judged, *rows)}
    read = {row.name: reader.read(row, quantized=True) for row in numbered}
    return aliases | _unique(read, taken)


def _unique(bases: Mapping[str, str], taken: set[str]) -> dict[str, str]:
    """Return aliases that are not in `taken`, with a suffix where they are; "" is none."""
    result: dict[str, str] = {}
    for name, base in bases.items():
        alias, i = base, 0
        while alias in taken:
            i += 1
            alias = f"{base}_{i}"
        if alias:
            result[name] = alias
            taken.add(alias)
    return result


def readable(name: str) -> bool:
    """Return whether `name` was chosen by a person, and not numbered by a program."""
    name = _SUFFIX.sub("", name)
    return not (evidence.is_generated(name) or _NUMBERED.fullmatch(name) or owner(name))


class _Reader:
    """Reads the names of weights from what is around them in `graph`."""

    def __init__(self, graph: ir.Graph, rows: Sequence[Tensor]) -> None:
        self.sizes = {row.name: row.size for row in rows if readable(row.name)}
        self.modules = ModuleNames((n.metadata_props for n in all_nodes(graph)), self.sizes)
        self.values = graph.initializers
        self.layers: dict[tuple[str, str], list[ir.Node]] = {}  # recurrent nodes of a module
        for node in all_nodes(graph):
            if _is_recurrent(node):
                self.layers.setdefault((self.modules.module(node), node.op_type), []).append(node)

    def read(self, row: Tensor, quantized: bool = False) -> str:
        """Return the alias of a constant, which need not be unique yet; "" if there is none.

        That of `quantized` integers is a weight, whatever operator reads them.
        """
        moves = _ONLY_MOVES | {"DequantizeLinear"} if quantized else _ONLY_MOVES
        uses = readers([self.values[row.name]], moves)
        use = next(((n, i) for n, i in uses if n.op_type not in moves), None)
        if use is None:
            return ""
        node, index = use
        role = "weight" if quantized else self._role(node, index, row.shape)
        beside = self._from_beside(node, role)
        noted = self.modules.parameters(node.metadata_props)
        noted = [] if _is_recurrent(node) else noted  # there, of all gates
        fitting = [p for p in noted if fits(p, role)]
        missing = [p for p in fitting if p not in self.sizes]
        copied = [p for p in fitting if self.sizes.get(p) == row.size]
        if beside and (not missing or beside in missing):
            return beside
        if len(missing or copied) == 1:
            return (missing or copied)[0]
        module = owner(row.name) or self.modules.module(node)
        if not module and letter(node, index) in _NAMED:
            module = label(node)
        return f"{module}.{role}" if module else ""

    def _role(self, node: ir.Node, index: int, shape: tuple[int, ...]) -> str:
        if _is_recurrent(node):
            module = self.modules.module(node)
            layer = self.layers[module, node.op_type].index(node) if module else 0
            role = _RECURRENT.get(index, _OTHER)
            return role if index > 3 else f"{role}_l{layer}"
        role = _BY_LETTER.get(letter(node, index), _OTHER)
        if role == _OTHER and domain(node) == "":
            role = _BY_OPERATOR.get(node.op_type, _OTHER)
            if role == "bias" and sum(n != 1 for n in shape) > 1:
                return _OTHER  # a table of positions
        return role

    def _from_beside(self, node: ir.Node, role: str) -> str:
        """Return the name that the weight or bias of the same layer implies; "" without one.

        Exporters store equal tensors once. TorchScript's copies one by an Identity for each, which
        has its name; otherwise, a tensor that several modules read tells nothing.
        """
        if role not in ("weight", "bias"):
            return ""
        other = "bias" if role == "weight" else "weight"
        for neighbor, value in _beside(node, role):
            source = source_of(value)
            maker = value.producer()
            copied = maker is not None and maker.op_type == "Identity" and readable(str(value.name))
            own = value.name if copied or value.name in self.sizes else source.name
            module, last = str(own).rpartition(".")[::2]
            if not module or other not in last or source.name not in self.sizes:
                continue
            sharing = [] if copied else [n for n, _ in readers([source]) if n.op_type not in MOVES]
            modules = {self.modules.module(n) for n in (node, neighbor, *sharing)} - {""}
            if len(modules) < 2:
                return f"{module}.{last.replace(other, role)}"
        return ""


def fits(parameter: str, role: str) -> bool:
    """Return whether the last part of the name of a parameter is that of the role."""
    is_bias = "bias" in parameter.rpartition(".")[2]
    return role == _OTHER or is_bias == (role == "bias")


def _beside(node: ir.Node, role: str) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield the bias beside the weight of a layer, or the weight beside its bias.

    It is an operand of `node`, or of the sum behind a product, or of the product before a sum.
    """
    neighbors, letters = [node], "b" if role == "weight" else "f"
    if role == "bias":
        neighbors += [n for x in node.inputs if x is not None and (n := maker_of(x)) is not None]
    elif not _letters(node).isdisjoint("fq"):
        through = MOVES | {"Mul"} if node.op_type.endswith("Integer") else MOVES  # by its scale
        users = (n for n, _ in readers(node.outputs, through) if n.op_type not in through)
        neighbors += [n for n in users if _letters(n).isdisjoint("fq")]
    for neighbor in neighbors:
        adds = role == "weight" and neighbor.op_type == "Add" and domain(neighbor) == ""
        for i, x in enumerate(neighbor.inputs):
            if x is not None and maker_of(x) is None and (adds or letter(neighbor, i) in letters):
                yield neighbor, x


def _letters(node: ir.Node) -> set[str]:
    return {letter(node, i) for i in range(len(node.inputs))}


def _is_recurrent(node: ir.Node) -> bool:
    return domain(node) == "" and node.op_type in RECURRENT
