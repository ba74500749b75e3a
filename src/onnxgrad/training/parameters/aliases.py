"""Readable names for the constants that exporters number, such as `onnx::MatMul_137`.

An alias is the path of the module that uses the constant, and the constant's role in it:
`encoder.layer.0.attention.self.query.weight`, as PyTorch's `named_parameters` has it. An exporter
that folds a weight into another one, or transposes it, drops its name; the alias is read from the
bias beside it, from the node and from the node's metadata.

PyTorch's TorchScript exporter and TensorFlow's write the path of the module into the name of the
node, `/encoder/layer.0/query/MatMul`. PyTorch's newer one writes it into the metadata of the node,
and beside it the parameters that the operator takes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.scopes import free_name, unquantized_name
from onnxgrad.operators import RECURRENT
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.flow import (
    MOVES,
    operand_role,
    producer_before_moves,
    reads_of_values,
    source_of,
)
from onnxgrad.training.parameters.roles import judge_constants
from onnxgrad.training.parameters.table import Tensor

_SCOPES = "pkg.torch.onnx.name_scopes"  # "['', 'encoder', 'encoder.query', 'linear_3']"
_NAMESPACE = "namespace"  # ": Net/encoder: Encoder/linear_3: aten.linear.default"
_FX_NODE = "pkg.torch.onnx.fx_node"  # "... args = (%x, %p_encoder_query_weight, ...)"

_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_FUSION = re.compile(r"\w*Fusion\w*")  # a part that onnxruntime's optimizer appends
# parts of TensorFlow's names that stand for operators, not for layers
_OPERATOR = re.compile(
    r"""(ReadVariableOp|resource|BiasAdd|MatMul|BatchMatMul|(Depthwise)?Conv\dD\w*|Tensordot|[Ee]insum
    |batchnorm|FusedBatchNorm\w*|embedding_lookup|Gather\w*|[Rr]eshape|[Tt]ranspose|Const|Cast
    |Identity|Read|[Ee]xpand_?[Dd]ims|Squeeze|[Cc]oncat|[Mm]ul|[Aa]dd|AddV2|[Ss]ub)(_\d+)?""",
    re.VERBOSE,
)
_OWNED = re.compile(  # a name of TensorFlow or Paddle that contains the layer of the tensor
    r"(?P<tf>.+/ReadVariableOp(_\d+)?(/resource)?)(:\d+)?|(?P<paddle>.+)\.[wb]_\d+(_deepcopy_\d+)?"
)


class ModuleNames:
    """Finds the modules of nodes, and the parameters that nodes read, in metadata that PyTorch
    writes.

    Args:
        metadata: the metadata of all nodes.
        names: the readable names of constants, which show how the names of modules are written.
    """

    def __init__(self, metadata: Iterable[Mapping[str, str]], names: Iterable[str]) -> None:
        self._mangled = {_name_as_identifier(name): name for name in names}
        tails = (tail for name in self._mangled.values() for tail in _path_tails(name))
        self._path_tails = {_name_as_identifier(tail): tail for tail in tails}
        modules = {name.rpartition(".")[0] for name in self._mangled.values()}
        for entries in metadata:
            modules.update(_module_scopes(entries)[:-1])
        self._modules = {_name_as_identifier(m): m for m in sorted(modules, key=len) if m}

    def module(self, node: ir.Node) -> str:
        """Return the dotted path of the module of `node`, as "encoder.layer.0"; "" if unknown."""
        return module_of(node.name or "", node.metadata_props)

    def parameter_names(self, metadata: Mapping[str, str]) -> list[str]:
        """Return the names of the parameters that a node reads, from the node's metadata."""
        noted = re.findall(r"%p_(\w+)", metadata.get(_FX_NODE, ""))
        return [self._dotted_parameter_name(name) for name in dict.fromkeys(noted)]

    def _dotted_parameter_name(self, mangled: str) -> str:
        """Return the name with dots, "encoder.query.weight", of the parameter
        "encoder_query_weight".
        """
        mangled = _name_as_identifier(mangled)
        if mangled in self._mangled:
            return self._mangled[mangled]
        for i in range(len(mangled) - 1, 0, -1):
            if mangled[i] == "_" and mangled[:i] in self._modules:
                last = mangled[i + 1 :]
                return f"{self._modules[mangled[:i]]}.{self._path_tails.get(last, last)}"
        return mangled


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the dotted path of the module of a node, from its name and metadata; "" if unknown."""
    if scopes := _module_scopes(metadata):
        return scopes[-2] if len(scopes) > 1 else ""
    return _dotted_path(_node_name_parts(name)[:-1]) if "/" in name else ""


def layer_in_name(name: str) -> str:
    """Return the layer that a tensor name of TensorFlow or Paddle contains; "" for other names."""
    match = _OWNED.fullmatch(name.partition(";")[0])
    if match is None:
        return ""
    return match["paddle"] or _dotted_path(_node_name_parts(match["tf"]))


def _module_scopes(metadata: Mapping[str, str]) -> list[str]:
    """Return the paths of the modules around a node, the outermost first, then the name of the
    node.

    They are read from the metadata of the node; [] if the metadata do not have them.
    """
    scopes = metadata.get(_SCOPES)
    try:
        if scopes is not None:
            return [str(scope) for scope in ast.literal_eval(scopes)]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
    namespace = metadata.get(_NAMESPACE, "")
    return [entry.partition(":")[0].strip() for entry in namespace.split("/")] if namespace else []


def _node_name_parts(name: str) -> list[str]:
    """Return the parts between slashes of a node name, without function calls and fusions."""
    parts = [part for part in name.partition(";")[0].split("/") if part]
    while len(parts) > 1 and _FUSION.fullmatch(parts[-1]):
        parts.pop()
    while parts and _CALL.fullmatch(parts[0]):
        parts.pop(0)
    return parts


def _dotted_path(parts: list[str]) -> str:
    """Join parts of a node name by dots, without operators such as MatMul at the end."""
    while parts and _OPERATOR.fullmatch(parts[-1]):
        parts = parts[:-1]
    # PyTorch repeats the name of a container in the names of its members: "mlp/mlp.0"
    inner = [*parts[1:], ""][: len(parts)]
    return ".".join(p for p, q in zip(parts, inner, strict=True) if not q.startswith(f"{p}."))


def _path_tails(name: str) -> list[str]:
    """Return the ends of a dotted path: "b.c" and "c" for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, 0, -1)]


def _name_as_identifier(name: str) -> str:
    """Return a name in lower case with underscores in place of dots and other characters."""
    return re.sub(r"\W", "_", name).lower()


# -- aliases ---------------------------------------------------------------------------------------

# suffixes that onnxruntime's optimizer appends
_SUFFIX = re.compile(r"(_transposed|_merged|_weight_merged|_token_\d+|_ort\w*)+$")
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
PARAMETERS_OF_ARITHMETIC = dict.fromkeys(("Mul", "Div"), "weight")
PARAMETERS_OF_ARITHMETIC |= dict.fromkeys(("Add", "Sub"), "bias")
_OTHER = "parameter"
_ONLY_MOVES = MOVES - {"Gather"}  # Gather looks up rows of a table
_LAYER_OPERANDS = frozenset("fbst")  # roles of operands of a node that is a layer by itself


def aliases(proto: ModelProto) -> dict[str, str]:
    """Return readable names (aliases) for constants with numbered names, `{name: alias}`.

    A constant has an alias if it has the role of a weight, an exporter numbered its name, and the
    file tells its name in the module. Aliases are unique, and differ from the names of constants.
    """
    return read_aliases(*judge_constants(proto))


def read_aliases(graph: ir.Graph, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return the aliases of the weights of `graph` with numbered names, see `aliases`."""
    numbered = [row for row in rows if row.trains and not is_readable(row.name)]
    if not numbered:
        return {}
    read = _AliasReader(graph, rows).read
    return _unique_aliases({row.name: read(row) for row in numbered}, {row.name for row in rows})


def integer_aliases(proto: ModelProto, rows: Sequence[Tensor]) -> dict[str, str]:
    """Return the aliases of quantized weights, `{name: alias}`: the names before quantization.

    If an exporter numbered that name, too, the alias is read from the nodes, as for float weights.
    """
    floats = {row.name: unquantized_name(row.name) for row in rows}
    numbered = [row for row in rows if not is_readable(floats[row.name])]
    aliases = {name: base for name, base in floats.items() if base != name}
    if not numbered:
        return aliases
    graph, judged = judge_constants(proto)
    reader, taken = _AliasReader(graph, judged), {row.name for row in (*judged, *rows)}
    read = {row.name: reader.read(row, quantized=True) for row in numbered}
    return aliases | _unique_aliases(read, taken)


def _unique_aliases(bases: Mapping[str, str], taken: set[str]) -> dict[str, str]:
    """Return unique aliases by constant; an alias in `taken` gets a suffix, "" is left out."""
    return {name: free_name(base, taken) for name, base in bases.items() if base}


def is_readable(name: str) -> bool:
    """Return whether a person, not an exporter that numbers names, chose the name of a constant."""
    name = _SUFFIX.sub("", name)
    return not (evidence.is_generated(name) or _NUMBERED.fullmatch(name) or layer_in_name(name))


class _AliasReader:
    """Reads the aliases of weights from nearby nodes of `graph`."""

    def __init__(self, graph: ir.Graph, rows: Sequence[Tensor]) -> None:
        self.sizes = {row.name: row.size for row in rows if is_readable(row.name)}
        self.modules = ModuleNames((n.metadata_props for n in all_nodes(graph)), self.sizes)
        self.values = graph.initializers
        self.layers: dict[tuple[str, str], list[ir.Node]] = {}  # recurrent nodes of a module
        for node in all_nodes(graph):
            if _is_recurrent(node):
                self.layers.setdefault((self.modules.module(node), node.op_type), []).append(node)

    def read(self, row: Tensor, quantized: bool = False) -> str:
        """Return an alias for a constant, not always a unique alias; "" if the file has no name.

        A `quantized` weight has the role "weight", whatever operator reads it.
        """
        moves = _ONLY_MOVES | {"DequantizeLinear"} if quantized else _ONLY_MOVES
        uses = reads_of_values([self.values[row.name]], moves)
        use = next(((n, i) for n, i in uses if n.op_type not in moves), None)
        if use is None:
            return ""
        node, index = use
        role = "weight" if quantized else self._parameter_role(node, index, row.shape)
        beside = self._name_from_sibling(node, role)
        noted = self.modules.parameter_names(node.metadata_props)
        noted = [] if _is_recurrent(node) else noted  # parameters of all gates
        fitting = [p for p in noted if fits_role(p, role)]
        missing = [p for p in fitting if p not in self.sizes]
        copied = [p for p in fitting if self.sizes.get(p) == row.size]
        if beside and (not missing or beside in missing):
            return beside
        if len(missing or copied) == 1:
            return (missing or copied)[0]
        module = layer_in_name(row.name) or self.modules.module(node)
        if not module and operand_role(node, index) in _LAYER_OPERANDS:
            module = (_node_name_parts(node.name or "") or [""])[-1].removeprefix("node_")
        return f"{module}.{role}" if module else ""

    def _parameter_role(self, node: ir.Node, index: int, shape: tuple[int, ...]) -> str:
        """Return the last part of PyTorch's name for an operand, such as "weight" or "bias_l0"."""
        if _is_recurrent(node):
            module = self.modules.module(node)
            layer = self.layers[module, node.op_type].index(node) if module else 0
            role = _RECURRENT.get(index, _OTHER)
            return role if index > 3 else f"{role}_l{layer}"
        role = _BY_LETTER.get(operand_role(node, index), _OTHER)
        if role == _OTHER and not normalize_domain(node.domain):
            role = PARAMETERS_OF_ARITHMETIC.get(node.op_type, _OTHER)
            if role == "bias" and sum(n != 1 for n in shape) > 1:
                return _OTHER  # a table of positions
        return role

    def _name_from_sibling(self, node: ir.Node, role: str) -> str:
        """Derive the name of a weight from the bias of its layer, or of a bias from the weight.

        "" if the layer has none. Exporters store equal tensors once. TorchScript's exporter writes
        an Identity, with the name of the parameter, for each equal tensor; without an Identity, a
        tensor that several modules read has no name of one module.
        """
        if role not in ("weight", "bias"):
            return ""
        other = "bias" if role == "weight" else "weight"
        for neighbor, value in _sibling_operands(node, role):
            source = source_of(value)
            maker = value.producer()
            copied = (
                maker is not None and maker.op_type == "Identity" and is_readable(str(value.name))
            )
            own = value.name if copied or value.name in self.sizes else source.name
            module, last = str(own).rpartition(".")[::2]
            if not module or other not in last or source.name not in self.sizes:
                continue
            sharing = (
                []
                if copied
                else [n for n, _ in reads_of_values([source]) if n.op_type not in MOVES]
            )
            modules = {self.modules.module(n) for n in (node, neighbor, *sharing)} - {""}
            if len(modules) < 2:
                return f"{module}.{last.replace(other, role)}"
        return ""


def fits_role(parameter: str, role: str) -> bool:
    """Return whether a parameter name can have `role`: a bias has "bias" in its last part."""
    is_bias = "bias" in parameter.rpartition(".")[2]
    return role == _OTHER or is_bias == (role == "bias")


def _sibling_operands(node: ir.Node, role: str) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield (node, operand) for each bias of the layer of a weight, or each weight for a bias.

    `node` reads the known parameter, whose `role` is "weight" or "bias". The operand is read by
    `node`, by the sum behind a product, or by the product before a sum.
    """
    neighbors, letters = [node], "b" if role == "weight" else "f"
    if role == "bias":
        neighbors += [
            n for x in node.inputs if x is not None and (n := producer_before_moves(x)) is not None
        ]
    elif not _operand_roles(node).isdisjoint("fq"):
        # behind a product of integers, a Mul multiplies by the scale
        through = MOVES | {"Mul"} if node.op_type.endswith("Integer") else MOVES
        users = (n for n, _ in reads_of_values(node.outputs, through) if n.op_type not in through)
        neighbors += [n for n in users if _operand_roles(n).isdisjoint("fq")]
    for neighbor in neighbors:
        adds = (
            role == "weight" and neighbor.op_type == "Add" and not normalize_domain(neighbor.domain)
        )
        for i, x in enumerate(neighbor.inputs):
            if (
                x is not None
                and producer_before_moves(x) is None
                and (adds or operand_role(neighbor, i) in letters)
            ):
                yield neighbor, x


def _operand_roles(node: ir.Node) -> set[str]:
    """Return the set of the roles of all operands of a node, as "f" for a factor."""
    return {operand_role(node, i) for i in range(len(node.inputs))}


def _is_recurrent(node: ir.Node) -> bool:
    """Return whether `node` is an RNN, GRU or LSTM of ONNX."""
    return not normalize_domain(node.domain) and node.op_type in RECURRENT
