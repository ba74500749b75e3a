"""The modules that wrote the nodes of a graph, as far as exporters note them.

PyTorch's TorchScript exporter and TensorFlow's write the path of the module into the name of the
node, `/encoder/layer.0/query/MatMul`. PyTorch's newer one writes it into the metadata of the node,
and beside it the parameters that the operator takes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"  # "['', 'encoder', 'encoder.query', 'linear_3']"
_NAMESPACE = "namespace"  # ": Net/encoder: Encoder/linear_3: aten.linear.default"
_FX_NODE = "pkg.torch.onnx.fx_node"  # "... args = (%x, %p_encoder_query_weight, ...)"

_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_FUSION = re.compile(r"\w*Fusion\w*")  # that onnxruntime's optimizer appends
# parts of names of TensorFlow that are operators, not layers
_OPERATOR = re.compile(
    r"""(ReadVariableOp|resource|BiasAdd|MatMul|BatchMatMul|(Depthwise)?Conv\dD\w*|Tensordot|[Ee]insum
    |batchnorm|FusedBatchNorm\w*|embedding_lookup|Gather\w*|[Rr]eshape|[Tt]ranspose|Const|Cast
    |Identity|Read|[Ee]xpand_?[Dd]ims|Squeeze|[Cc]oncat|[Mm]ul|[Aa]dd|AddV2|[Ss]ub)(_\d+)?""",
    re.VERBOSE,
)
_OWNED = re.compile(  # a name that says which layer owns the tensor, of TensorFlow or Paddle
    r"(?P<tf>.+/ReadVariableOp(_\d+)?(/resource)?)(:\d+)?|(?P<paddle>.+)\.[wb]_\d+(_deepcopy_\d+)?"
)


class ModuleNames:
    """The modules of nodes, and the parameters of these, by the metadata of all nodes.

    `names` are the readable names of constants: they show how the names of modules are written.
    """

    def __init__(self, metadata: Iterable[Mapping[str, str]], names: Iterable[str]) -> None:
        self._mangled = {_mangle(name): name for name in names}
        tails = (tail for name in self._mangled.values() for tail in _tails(name))
        self._tails = {_mangle(tail): tail for tail in tails}
        modules = {name.rpartition(".")[0] for name in self._mangled.values()}
        for entries in metadata:
            modules.update(_scopes(entries)[:-1])
        self._modules = {_mangle(m): m for m in sorted(modules, key=len) if m}

    def module(self, node: ir.Node) -> str:
        """Return the path of the module of `node`, such as "encoder.layer.0"; "" if unknown."""
        return module_of(node.name or "", node.metadata_props)

    def parameters(self, metadata: Mapping[str, str]) -> list[str]:
        """Return the names of the parameters that PyTorch notes for the operator of a node."""
        noted = re.findall(r"%p_(\w+)", metadata.get(_FX_NODE, ""))
        return [self._parameter(name) for name in dict.fromkeys(noted)]

    def _parameter(self, mangled: str) -> str:
        """Return the name of a parameter of which PyTorch replaced the dots by underscores."""
        mangled = _mangle(mangled)
        if mangled in self._mangled:
            return self._mangled[mangled]
        for i in range(len(mangled) - 1, 0, -1):
            if mangled[i] == "_" and mangled[:i] in self._modules:
                last = mangled[i + 1 :]
                return f"{self._modules[mangled[:i]]}.{self._tails.get(last, last)}"
        return mangled


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the path of the module of a node, by its name and metadata; "" if unknown."""
    if scopes := _scopes(metadata):
        return scopes[-2] if len(scopes) > 1 else ""
    return _dotted_path(_parts(name)[:-1]) if "/" in name else ""


def label(node: ir.Node) -> str:
    """Return the last part of the name of a node, which differs from those of its module."""
    parts = _parts(node.name or "")
    return parts[-1].removeprefix("node_") if parts else ""


def owner(name: str) -> str:
    """Return the layer that the name of a tensor of TensorFlow or Paddle states; "" for others."""
    match = _OWNED.fullmatch(name.partition(";")[0])
    if match is None:
        return ""
    return match["paddle"] or _dotted_path(_parts(match["tf"]))


def _scopes(metadata: Mapping[str, str]) -> list[str]:
    """Return the paths of the modules around a node, the outermost first, and its own name."""
    scopes = metadata.get(_SCOPES)
    try:
        if scopes is not None:
            return [str(scope) for scope in ast.literal_eval(scopes)]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []
    namespace = metadata.get(_NAMESPACE, "")
    return [entry.partition(":")[0].strip() for entry in namespace.split("/")] if namespace else []


def _parts(name: str) -> list[str]:
    """Return the parts of the name of a node; the last one is its own."""
    parts = [part for part in name.partition(";")[0].split("/") if part]
    while len(parts) > 1 and _FUSION.fullmatch(parts[-1]):
        parts.pop()
    while parts and _CALL.fullmatch(parts[0]):
        parts.pop(0)
    return parts


def _dotted_path(parts: list[str]) -> str:
    """Return parts as a path with dots, without operators at its end."""
    while parts and _OPERATOR.fullmatch(parts[-1]):
        parts = parts[:-1]
    # PyTorch repeats the name of a container in that of its members: "mlp/mlp.0"
    inner = [*parts[1:], ""][: len(parts)]
    return ".".join(p for p, q in zip(parts, inner, strict=True) if not q.startswith(f"{p}."))


def _tails(name: str) -> list[str]:
    """Return the ends of a path with dots: "b.c" and "c" for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, 0, -1)]


def _mangle(name: str) -> str:
    return re.sub(r"\W", "_", name).lower()
