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
from onnxgrad.model.constants import FLOATS, ConstantRef, Holder, scan, standard, subgraphs
from onnxgrad.model.normalize import own_names, own_results, rename_uses

__all__ = [
    "FLOATS",
    "ConstantRef",
    "constant_refs",
    "lift",
    "note_constants",
    "replace",
    "subgraphs",
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
_MOVES = frozenset("Cast Concat Gather Identity Reshape Slice Squeeze Unsqueeze".split())
_COMPUTES = frozenset("Add Ceil Div Floor Max Min Mul Neg Round Sub".split())  # sizes from others

METADATA = "onnxgrad.constants"  # names of initializers that are no weights, as JSON
SPARSE = "onnxgrad.sparse"  # names of initializers that were sparse, as JSON


def constant_refs(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield the constant tensors of `model` in graph order, each under a name of its own.

    Not among the default ones is what `note_constants` noted: the factors of a loss or a gradient;
    nor what decides sizes: the scales of a Resize, the ends of a Range.

    Branches may use one name twice; the later ones get a number, as does one whose name is that of
    a value computed elsewhere.
    """
    noted_names = noted(model)
    everything = list(scan(model))  # which keeps the graphs, thus their ids
    settings = _settings(model) if any(ref.default for ref in everything) else set()
    constants = {ref.name for ref in everything}
    taken = set(_computed(model.graph))
    for ref in everything:
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
    """Return the names that `note_constants` noted in `model`."""
    return _names_in(model, METADATA)


def note_constants(model: ir.Model, origin: ModelProto) -> None:
    """Note in `model`, made of `origin`, which float initializers are no weights of `origin`, and
    which of them are sparse there.
    """
    everything = list(constant_refs(origin))
    weights = {ref.name for ref in everything if ref.default}
    values = model.graph.initializers.items()
    ours = [n for n, v in values if v.dtype and v.dtype.is_floating_point() and n not in weights]
    sparse = [ref.name for ref in everything if ref.sparse]
    for key, names in ((METADATA, ours), (SPARSE, sparse)):
        if names:
            model.metadata_props[key] = json.dumps(names)


def stored(model: ModelProto, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return, for the sparse ones of the named tensors, which of their elements are stored."""
    sparse = _names_in(model, SPARSE)
    return {
        ref.name: ref.array() != 0 if ref.stored is None else ref.stored()
        for ref in constant_refs(model)
        if ref.name in names and (ref.sparse or ref.name in sparse)
    }


def _names_in(model: ModelProto, key: str) -> set[str]:
    return {name for e in model.metadata_props if e.key == key for name in json.loads(e.value)}


def replace(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of `model` in which the named tensors hold new values, and nothing else moved.

    Raises:
        ValueError: a name that the model does not have, or a value of another shape, or of a kind
            that the tensor cannot hold.
    """
    made = ModelProto()
    made.CopyFrom(model)
    found = {ref.name: ref for ref in constant_refs(made)}
    for name, value in values.items():
        if name not in found:
            raise unknown("constant", name, found)
        old, new = found[name].array(), np.asarray(value)
        if new.shape != old.shape:
            raise ValueError(f"{name!r} has shape {old.shape}, the new value {new.shape}")
        found[name].write(_converted(name, new, old.dtype))
    return made


def _converted(name: str, new: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `new` as `dtype`: floats are rounded, all else stays what it is."""
    if dtype.kind in "OUS":
        made, fits = new.astype(object), new.dtype.kind in "OUS"
    elif new.dtype.kind in "OUSc" and dtype.kind != "c":
        made, fits = new, False
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            made = new.astype(dtype)
        exact = dtype.kind in "iub"
        fits = np.array_equal(made, new) if exact else np.can_cast(new.dtype, dtype, "same_kind")
    if not fits:
        raise ValueError(f"{name!r} holds {dtype}, which the new value ({new.dtype}) does not fit")
    return made


def lift(model: ModelProto, everything: Iterable[ConstantRef] | None = None) -> None:
    """Turn every constant of the graphs of `model` into an initializer of the main graph, in place.

    The attributes of `ai.onnx.ml` operators become further inputs of the node, which is no valid
    node then: `prepare` lowers it. Constants of local functions are left to `inlined`. `everything`
    is what `constant_refs` yields; None: it is called.
    """
    everything = list(constant_refs(model) if everything is None else everything)
    for ref in everything:
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
    own_results(model, {ref.name for ref in everything})


def take_out(model: ModelProto, graph: Holder, node: NodeProto, name: str) -> None:
    """Remove the Constant `node` from `graph`, where an initializer called `name` takes over."""
    old = node.output[0]
    if graph is model.graph and old != name and any(y.name == old for y in graph.output):
        del node.attribute[:]  # outputs of the model keep their names
        node.op_type = "Identity"
        node.input.append(name)
        return
    graph.node.remove(node)
    rename_uses(graph, old, name)


def is_setting(value: ir.Value) -> bool:
    """Tell whether `value` only tells operators how to compute, as the scales of a Resize do."""
    moved = [value]
    for v in moved:  # which grows
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


_Key = tuple[int, str]  # the id of the graph that has a value, and its name there


def _settings(model: ModelProto) -> set[_Key]:
    """Return the operands that are no weights, in subgraphs and local functions too.

    Exporters put scales together of those of the batch, the channels and the plane, and multiply
    the lengths of axes by them.
    """
    settings: set[_Key] = set()
    for holder in (model.graph, *model.functions):
        _add_settings(holder, [], settings, set())
    return settings


def _add_settings(
    graph: Holder, around: list[tuple[int, set[str]]], settings: set[_Key], others: set[_Key]
) -> None:
    """Add the settings of `graph`, and to `others` what something else reads as well.

    `around` are the ids and names of the graphs whose values `graph` may capture.
    """
    if isinstance(graph, GraphProto):
        own, outputs = set(own_names(graph)), [y.name for y in graph.output]
    else:
        own = {*graph.input, *(y for node in graph.node for y in node.output)}
        outputs = list(graph.output)
    mine, outer = id(graph), around[::-1]

    def keys(names: Iterable[str]) -> list[_Key]:
        return [(mine if n in own else next((g for g, o in outer if n in o), 0), n) for n in names]

    others.update(keys(outputs))
    for node in reversed(graph.node):
        for inner in subgraphs(node):
            _add_settings(inner, [*around, (mine, own)], settings, others)
        results = settings.intersection(keys(node.output))
        moves = node.op_type in _MOVES and bool(results)
        computes = node.op_type in _COMPUTES and bool(results - others)
        for index, key in enumerate(keys(node.input)):
            sets = moves or computes or index in _settings_of(node)
            (settings if sets else others).add(key)


def _computed(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that are no constants, in branches too."""
    constants = {t.name for t in graph.initializer}
    yield from (x.name for x in graph.input if x.name not in constants)
    for node in graph.node:
        if node.op_type != "Constant":
            yield from node.output
        for inner in subgraphs(node):
            yield from _computed(inner)
