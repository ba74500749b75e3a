"""New names for the values and nodes of a model, each unique in the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from hashlib import sha256
from itertools import chain, count

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad.errors import ModelError, unknown
from onnxgrad.model.constants import ConstantRef
from onnxgrad.model.notes import rename_in_metadata
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.scopes import Choose, rename_in_graph, rename_values, unused_name
from onnxgrad.model.traversal import GraphLike, declared_names, value_names, walk_graphs
from onnxgrad.model.weights import constant_refs
from onnxgrad.reporting import logger, logging_level, reporting

_PREFIXES = {"input": "r", "initializer": "i", "result": "r", "node": "n"}


def onnx_rename_names(onx: ModelLike, strategy: str = "simple", verbose: int = 0) -> ModelProto:
    """Return `onx` with short names: results `r0, r1...`, initializers `i0...`, nodes `n0...`.

    The inputs and outputs of the model and of its local functions keep their names. Unnamed nodes
    stay unnamed.

    Args:
        onx: model, serialized model or path; never modified.
        strategy: "simple" counts. "type" uses a digest of the operator and its attributes, or of
            the values of an initializer, in place of the number, shortened while it is unique:
            `r0_4F` (0 for the first output of the node), `i_A3`, `n_4F`; equal ones get a numeric
            suffix, `r0_4F_2`. Such names do not change when other operators are added.
        verbose: 1 reports the number of new names through `logging`, to stderr where it is not
            configured; 2 every name.

    Raises:
        ValueError: an unknown strategy.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y)
        ...     <float[2] scale = {2.0, 3.0}> { scaled = Mul(x, scale)  y = Exp(scaled) }''')
        >>> for node in og.graph.onnx_rename_names(model).graph.node:
        ...     print(node.op_type, node.input, "->", node.output)
        Mul ['x', 'i0'] -> ['r0']
        Exp ['r0'] -> ['y']
    """
    if strategy not in _STRATEGIES:
        raise unknown("strategy", strategy, _STRATEGIES)
    naming = _STRATEGIES[strategy]
    model = _copy_to_rename(onx)
    renamed: list[tuple[str, str]] = []
    for graph in (model.graph, *model.functions):
        kept = declared_names((*graph.input, *graph.output))
        new_names = rename_in_graph(graph, naming(graph, kept, renamed), kept)
        if graph is model.graph:
            rename_in_metadata(model, new_names)
    if verbose:
        with reporting(logging_level(verbose)):
            for old, new in renamed:
                logger.debug("%s is renamed to %s", old, new)
            logger.info("%d names changed", len(renamed))
    return model


def onnx_rename_weights(onx: ModelLike) -> ModelProto:
    """Return `onx` with its weights named `I0_<name>, I1_<name>...`, in graph order.

    Their alphabetical order is then the order of the graph: the numbers are padded with zeros to
    the same length. Weights are the tensors that `get_train_initializer` lists. Attributes of
    nodes and outputs of local functions keep their names. An output of the model that is a weight
    keeps its name, too: an `Identity` node copies the weight to it.

    Args:
        onx: model, serialized model or path; never modified.

    Raises:
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> list(og.graph.get_train_initializer(og.graph.onnx_rename_weights(model)))
        ['I0_w']
    """
    model = _copy_to_rename(onx)
    weights = [ref for ref in constant_refs(model) if ref.default and not _keeps_name(ref)]
    taken, digits = set(value_names(model.graph)), len(str(len(weights) - 1))
    chosen = {}
    for i, ref in enumerate(weights):
        name = f"I{i:0{digits}d}_{ref.name}"
        new = unused_name(name, taken) if name in taken else name
        chosen[id(ref.graph), ref.graph_name] = new  # `weights` keeps the graphs alive
    rename_in_metadata(model, rename_values(model.graph, chosen))
    for function in model.functions:
        rename_values(function, chosen)
    return model


def _copy_to_rename(onx: ModelLike) -> ModelProto:
    """Return a copy of the model `onx`; raise `ModelError` if it has names that must not change."""
    model = deepcopy(read(onx))
    if model.training_info:
        raise ModelError(
            "names in the training_info of a model cannot be changed: remove the training_info"
        )
    return model


def _keeps_name(ref: ConstantRef) -> bool:
    """Return whether `onnx_rename_weights` leaves the name of a weight, as the weight is an
    attribute or an output of a local function.
    """
    ml = ref.node is not None and ref.node.domain == "ai.onnx.ml"
    returned = ref.function is not None and ref.graph_name in ref.function.output
    return ml or returned or ref.attribute is not None


def _number_namer(graph: GraphLike, kept: Iterable[str], renamed: list[tuple[str, str]]) -> Choose:
    """Return a function that gives values and nodes numbered names such as "r0" (strategy "simple"
    of `onnx_rename_names`).

    The function adds pairs of old and new name to `renamed`, and chooses no name of `kept`.
    """
    numbers = {prefix: count() for prefix in _PREFIXES.values()}
    taken = set(kept)

    def choose_number(graph: GraphLike, kind: str, old: str) -> str:
        prefix = _PREFIXES[kind]
        name = next(n for i in numbers[prefix] if (n := f"{prefix}{i}") not in taken)
        renamed.append((old, name))
        return name

    return choose_number


def _digest_namer(graph: GraphLike, kept: Iterable[str], renamed: list[tuple[str, str]]) -> Choose:
    """Return a function that names values and nodes by hashes of their contents (strategy "type" of
    `onnx_rename_names`): see `_number_namer`.
    """
    described = {  # the dict's values hold the graphs, which stay alive, so that ids are unique
        (id(g), *key): (g, *entry)
        for g, node in walk_graphs(graph)
        for key, entry in _hashes_of_node_and_results(g, node)
    }
    taken = dict.fromkeys(kept, "")  # name -> digest

    def choose_digest(graph: GraphLike, kind: str, old: str) -> str:
        _, prefix, digest = described.get((id(graph), kind, old), (graph, _PREFIXES[kind], "0" * 8))
        names = (f"{prefix}_{digest[:length]}" for length in range(2, len(digest) + 1, 2))
        base = next(name for name in names if taken.get(name, digest) == digest)
        numbered = (f"{base}_{i}" for i in count(2))
        name = next(name for name in chain([base], numbered) if name not in taken)
        taken[name] = digest
        renamed.append((old, name))
        return name

    return choose_digest


def _hashes_of_node_and_results(
    graph: GraphLike, node: NodeProto | None
) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield ((kind, name), (prefix of the new name, hash)) for a node and each of its results.

    Without `node`, the pairs are for the initializers of `graph`.
    """
    if node is not None:
        operator = NodeProto(domain=node.domain, op_type=node.op_type)
        graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)  # subgraphs contain names
        operator.attribute.extend(a for a in node.attribute if a.type not in graphs)
        digest = _hex_digest(operator)
        yield ("node", node.name), ("n", digest)
        for i, name in enumerate(node.output):
            yield ("result", name), (f"r{i}", digest)
    elif isinstance(graph, GraphProto):
        for tensor in (*graph.initializer, *(s.values for s in graph.sparse_initializer)):
            values = deepcopy(tensor)
            # the elements in files are not read
            for field in ("name", "doc_string", "external_data"):
                values.ClearField(field)
            yield ("initializer", tensor.name), ("i", _hex_digest(values))


def _hex_digest(content: TensorProto | NodeProto) -> str:
    """Return the SHA-256 hash of a serialized tensor or node, in hexadecimal capitals."""
    return sha256(content.SerializeToString(deterministic=True)).hexdigest().upper()


_STRATEGIES = {"simple": _number_namer, "type": _digest_namer}
