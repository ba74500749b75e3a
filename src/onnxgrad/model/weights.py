"""The constant tensors of a model, wherever it stores them, each under a unique name.

They are initializers, dense or sparse, of the main graph or of subgraphs, `Constant` nodes there or
in local functions, and attributes of `ai.onnx.ml` operators. `constant_refs` lists them, `lift`
turns all into initializers of the main graph, and `replace` writes new values to where they are
stored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad.errors import unknown
from onnxgrad.graph.operators import ARITHMETIC, REORDERS, SELECTS
from onnxgrad.model.constants import FLOATS, ConstantRef, GraphLike, scan, standard
from onnxgrad.model.rewrites import own_results, rename_uses
from onnxgrad.model.traversal import own_names, subgraphs

__all__ = [
    "FLOATS",
    "ConstantRef",
    "constant_refs",
    "lift",
    "note_constants",
    "replace",
]

# operands that tell how to compute, or decide sizes: neither weights nor inputs by default
_SETTINGS = {
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "com.microsoft.GroupQueryAttention": (7, 8),  # tables of cosines and sines
    "com.microsoft.RotaryEmbedding": (2, 3),
}
_SCALES = frozenset("GroupQueryAttention Resize RotaryEmbedding Upsample".split())  # of inputs too

_MOVES = REORDERS | SELECTS

METADATA = "onnxgrad.constants"  # metadata: initializers that are no weights, names as JSON
SPARSE = "onnxgrad.sparse"  # metadata: initializers that were sparse, names as JSON


def constant_refs(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield references to the constants of `model` in graph order, each with a unique name.

    `default` is false for those that `note_constants` recorded (factors of a loss or a gradient)
    and for settings (the scales of a Resize, the ends of a Range).

    If several constants have the same name, as those of two branches may, the later ones get a
    numeric suffix; so does one that has the name of a computed value.
    """
    noted_names = noted(model)
    refs = list(scan(model))  # keeps the graphs alive, and so their ids unique
    settings = _settings(model) if any(ref.default for ref in refs) else set()
    constants = {ref.name for ref in refs}
    taken = set(_computed(model.graph))
    for ref in refs:
        name, i = ref.name, 0
        while name in taken or (i and name in constants):
            i += 1
            name = f"{ref.name}_{i}"
        taken.add(name)
        setting = (id(ref.graph), ref.graph_name) in settings
        ours = ref.graph is model.graph and not {name, ref.name}.isdisjoint(noted_names)
        ref.default = ref.default and not (ours or setting)
        ref.name = name
        yield ref


def noted(model: ModelProto) -> set[str]:
    """Return the names that `note_constants` recorded in `model`."""
    return _names_in(model, METADATA)


def note_constants(model: ir.Model, origin: ModelProto) -> None:
    """Record in the metadata of `model`, derived from `origin`, which initializers are no weights.

    These are the float initializers that are not weights of `origin`. Those that are sparse in
    `origin` are recorded too.
    """
    refs = list(constant_refs(origin))
    weights = {ref.name for ref in refs if ref.default}
    values = model.graph.initializers.items()
    ours = [n for n, v in values if v.dtype and v.dtype.is_floating_point() and n not in weights]
    sparse = [ref.name for ref in refs if ref.sparse]
    for key, names in ((METADATA, ours), (SPARSE, sparse)):
        if names:
            model.metadata_props[key] = json.dumps(names)


def stored(model: ModelProto, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return a mask of the stored elements for each of the named tensors that is sparse."""
    sparse = _names_in(model, SPARSE)
    return {
        ref.name: ref.array() != 0 if ref.stored is None else ref.stored()
        for ref in constant_refs(model)
        if ref.name in names and (ref.sparse or ref.name in sparse)
    }


def _names_in(model: ModelProto, key: str) -> set[str]:
    return {name for e in model.metadata_props if e.key == key for name in json.loads(e.value)}


def replace(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of `model` with new values for the named constants, else unchanged.

    Raises:
        ValueError: an unknown name, a value of another shape, or of a kind that the tensor cannot
            hold.
    """
    replaced = ModelProto()
    replaced.CopyFrom(model)
    refs = {ref.name: ref for ref in constant_refs(replaced)}
    for name, value in values.items():
        if name not in refs:
            raise unknown("constant", name, refs)
        old, new = refs[name].read(), np.asarray(value)
        if new.shape != tuple(old.dims):
            raise ValueError(f"{name!r} has shape {tuple(old.dims)}, the new value {new.shape}")
        refs[name].write(_converted(name, new, ir.DataType(old.data_type).numpy()))
    return replaced


def _converted(name: str, new: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `new` as `dtype`; floats are rounded, other values must not change."""
    if dtype.kind in "OUS":
        converted, fits = new.astype(object), new.dtype.kind in "OUS"
    elif new.dtype.kind in "OUSc" and dtype.kind != "c":
        converted, fits = new, False
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            converted = new.astype(dtype)
        if dtype.kind in "iub":
            fits = np.array_equal(converted, new)
        else:
            fits = np.can_cast(new.dtype, dtype, "same_kind")
    if not fits:
        raise ValueError(f"{name!r} holds {dtype}, which the new value ({new.dtype}) does not fit")
    return converted


def lift(model: ModelProto, refs: Iterable[ConstantRef] | None = None) -> None:
    """Turn every constant of the graphs of `model` into an initializer of the main graph, in place.

    The attributes of `ai.onnx.ml` operators become additional inputs of the node; the node is not
    valid then, and `prepare` lowers it. Constants of local functions are left to `inlined`. `refs`
    are those of `constant_refs`, which is called if they are None.
    """
    refs = list(constant_refs(model) if refs is None else refs)
    for ref in refs:
        if ref.function is not None or ref.attribute is not None:
            continue
        if ref.node is None and ref.graph is model.graph and not ref.sparse:
            continue
        tensor = TensorProto()
        tensor.CopyFrom(ref.read())
        tensor.name = ref.name
        if ref.node is None:
            rename_uses(ref.graph, ref.take_away(), ref.name)
        elif ref.node.op_type == "Constant":
            take_out(model, ref.graph, ref.node, ref.name)
        else:
            ref.as_operand(ref.name)
        model.graph.initializer.append(tensor)
    own_results(model, {ref.name for ref in refs})


def take_out(model: ModelProto, graph: GraphLike, node: NodeProto, name: str) -> None:
    """Replace the Constant `node` of `graph` by the initializer `name` of the main graph."""
    old = node.output[0]
    if graph is model.graph and old != name and any(y.name == old for y in graph.output):
        del node.attribute[:]  # outputs of the model keep their names
        node.op_type = "Identity"
        node.input.append(name)
        return
    graph.node.remove(node)
    rename_uses(graph, old, name)


def is_setting(value: ir.Value) -> bool:
    """Return whether `value` is only used for settings, such as the scales of a Resize."""
    moved = [value]
    for v in moved:  # which is appended to
        uses = list(v.uses())
        for node, index in uses:
            sets = index in _settings_of(node) and node.op_type in _SCALES
            if node.op_type in _MOVES and not sets:
                moved.extend(y for y in node.outputs if y not in moved)
            elif not sets:
                return False
        if not uses:
            return False
    return True


def _settings_of(node: NodeProto | ir.Node) -> tuple[int, ...]:
    domain = standard(node.domain)
    return _SETTINGS.get(f"{domain}.{node.op_type}" if domain else node.op_type, ())


_Key = tuple[int, str]  # the id of the graph that defines a value, and its name there


def _settings(model: ModelProto) -> set[_Key]:
    """Return the values that are only used for settings, in subgraphs and local functions too.

    This includes values that settings are computed from: exporters concatenate the scales of
    several axes, and multiply lengths by them.
    """
    settings: set[_Key] = set()
    for graph in (model.graph, *model.functions):
        _add_settings(graph, [], settings, set())
    return settings


def _add_settings(
    graph: GraphLike, outer: list[tuple[int, set[str]]], settings: set[_Key], others: set[_Key]
) -> None:
    """Add the settings of `graph` to `settings`, and the values that have other uses to `others`.

    `outer` has the ids and value names of the enclosing graphs.
    """
    if isinstance(graph, GraphProto):
        own, outputs = set(own_names(graph)), [y.name for y in graph.output]
    else:
        own = {*graph.input, *(y for node in graph.node for y in node.output)}
        outputs = list(graph.output)
    scopes = [*outer, (id(graph), own)]

    def keys(names: Iterable[str]) -> list[_Key]:
        if not outer:
            return [(id(graph) if n in own else 0, n) for n in names]
        return [(next((g for g, values in scopes[::-1] if n in values), 0), n) for n in names]

    others.update(keys(outputs))
    for node in reversed(graph.node):
        for inner in subgraphs(node):
            _add_settings(inner, scopes, settings, others)
        results = settings.intersection(keys(node.output))
        moves = node.op_type in _MOVES and bool(results)
        computes = node.op_type in ARITHMETIC and bool(results - others)
        for index, key in enumerate(keys(node.input)):
            sets = moves or computes or index in _settings_of(node)
            (settings if sets else others).add(key)


def _computed(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that are not constants, in subgraphs too."""
    constants = {t.name for t in graph.initializer}
    yield from (x.name for x in graph.input if x.name not in constants)
    for node in graph.node:
        if node.op_type != "Constant":
            yield from node.output
        for inner in subgraphs(node):
            yield from _computed(inner)
