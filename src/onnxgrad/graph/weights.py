"""The trainable tensors of a model, wherever it keeps them, under one name each.

They sit in initializers, in `Constant` nodes (inside branches too) and in attributes of
`ai.onnx.ml` operators. `sites` finds them, `lift` turns all into initializers of the main
graph for the engine, `replace` writes new values back to where they came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    numpy_helper,
)

from onnxgrad.errors import unknown
from onnxgrad.graph import external

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# operator -> {attribute: is it trained when no weight is named}
ML_COEFFICIENTS = {
    "LinearRegressor": {"coefficients": True, "intercepts": True},
    "LinearClassifier": {"coefficients": True, "intercepts": True},
    "Scaler": {"offset": False, "scale": False},
    "Imputer": {"imputed_value_floats": False},
    "SVMRegressor": {"coefficients": True, "rho": True, "support_vectors": False},
    "SVMClassifier": {
        "coefficients": True,
        "rho": True,
        "support_vectors": False,
        "prob_a": True,
        "prob_b": True,
    },
}

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
_MOVES = frozenset("Cast Concat Gather Identity Reshape Slice Squeeze Unsqueeze".split())
_COMPUTES = frozenset("Add Ceil Div Floor Max Min Mul Neg Round Sub".split())  # sizes from others

METADATA = "onnxgrad.constants"  # names of initializers that are no weights, as JSON

# the fields of a tensor that hold or point to its elements
_STORAGE = (
    "float_data", "double_data", "int32_data", "int64_data", "uint64_data", "string_data",
    "raw_data", "external_data", "data_location",
)  # fmt: skip

_CONSTANT_ATTRIBUTES = ("value", "value_float", "value_floats", "value_int", "value_ints")


@dataclass
class Site:
    """Where one constant tensor is kept."""

    name: str
    read: Callable[[], TensorProto]
    write: Callable[[np.ndarray], None]
    default: bool  # among the weights of `onnx_derivative` when none is named
    graph: GraphProto
    node: NodeProto | None = None  # the Constant or ai.onnx.ml node; None for an initializer
    place: int = 0  # for ai.onnx.ml: the input of the node that takes it once it is lifted

    def array(self) -> np.ndarray:
        """Return the tensor's current value, which is not to be written to."""
        return external.array(self.read())


def sites(model: ModelProto) -> Iterator[Site]:
    """Yield the constant tensors of `model` in graph order, each under a name of its own.

    Not among the default ones is what `note_constants` noted: the factors of a loss or a gradient;
    nor what decides sizes: the scales of a Resize, the ends of a Range.

    Branches may use one name twice; the later ones get a number, as does one whose name is that of
    a value computed elsewhere.
    """
    ours = noted(model) | _settings(model.graph)
    found = list(_graph_sites(model.graph))
    constants = {site.name for site in found}
    computed = set(_computed(model.graph))
    given: set[str] = set()
    for site in found:
        name, i = site.name, 0
        while name in given or name in computed or (i and name in constants):
            i += 1
            name = f"{site.name}_{i}"
        given.add(name)
        site.default = site.default and ours.isdisjoint((name, site.name))
        site.name = name
        yield site


def noted(model: ModelProto) -> set[str]:
    """Return the names that `note_constants` noted in `model`."""
    return {n for e in model.metadata_props if e.key == METADATA for n in json.loads(e.value)}


def note_constants(model: ir.Model, origin: ModelProto) -> None:
    """Note in `model`, made of `origin`, which float initializers are no weights of `origin`."""
    weights = {site.name for site in sites(origin) if site.default}
    values = model.graph.initializers.items()
    ours = [n for n, v in values if v.dtype and v.dtype.is_floating_point() and n not in weights]
    if ours:
        model.metadata_props[METADATA] = json.dumps(ours)


def replace(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of `model` in which the named tensors hold new values, and nothing else moved.

    Raises:
        ValueError: a name that the model does not have, or a value of another shape, or of a kind
            that the tensor cannot hold.
    """
    made = ModelProto()
    made.CopyFrom(model)
    found = {site.name: site for site in sites(made)}
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


def lift(model: ModelProto) -> None:
    """Turn every constant of `model` into an initializer of the main graph, in place.

    The attributes of `ai.onnx.ml` operators become further inputs of the node, which is no valid
    node then: `prepare` lowers it.
    """
    for site in list(sites(model)):
        if site.node is None and site.graph is model.graph:
            continue
        old = site.read()
        tensor = TensorProto()
        tensor.CopyFrom(old)
        tensor.name = site.name
        if site.node is None:
            _rename_uses(site.graph, old.name, site.name)
            site.graph.initializer.remove(old)
        elif site.node.op_type == "Constant":
            _take_out(model, site, site.node)
        else:
            missing = site.place + 1 - len(site.node.input)
            site.node.input.extend([""] * missing)
            site.node.input[site.place] = site.name
        model.graph.initializer.append(tensor)


def densify(graph: GraphProto) -> None:
    """Turn the sparse constants of `graph` into dense ones, in place, in branches too."""
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_dense(sparse, sparse.values.name))
    graph.ClearField("sparse_initializer")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.SPARSE_TENSOR:
                attribute.name, attribute.type = "value", AttributeProto.TENSOR
                attribute.t.CopyFrom(_dense(attribute.sparse_tensor, node.output[0]))
                attribute.ClearField("sparse_tensor")
        for inner in subgraphs(node):
            densify(inner)


def _dense(sparse: SparseTensorProto, name: str) -> TensorProto:
    """Return the dense tensor: places are flat, or have one number for each axis."""
    values, places = (numpy_helper.to_array(t) for t in (sparse.values, sparse.indices))
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        dense.ravel()[places] = values
    else:
        dense[tuple(places.T)] = values
    return numpy_helper.from_array(dense, name)


def _take_out(model: ModelProto, site: Site, node: NodeProto) -> None:
    old = node.output[0]
    escaping = [o for o in site.graph.output if o.name == old and site.graph is not model.graph]
    _rename_uses(site.graph, old, site.name)
    if not escaping:
        site.graph.node.remove(node)
        return
    for output in escaping:  # a branch must compute what it returns
        output.name = node.output[0] = f"{site.name}.out"
    del node.attribute[:]
    node.op_type = "Identity"
    node.input.append(site.name)


def _rename_uses(graph: GraphProto, old: str, new: str) -> None:
    if old == new:
        return
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for inner in subgraphs(node):
            _rename_uses(inner, old, new)


def names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that `graph` gives, in branches too."""
    yield from (x.name for x in (*graph.input, *graph.initializer))
    yield from (s.values.name for s in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output
        for inner in subgraphs(node):
            yield from names(inner)


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that `node` holds as attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def is_setting(value: ir.Value) -> bool:
    """Tell whether `value` only tells operators how to compute, as the scales of a Resize do."""
    uses = list(value.uses())
    return bool(uses) and all(
        index in _settings_of(node)
        or (node.op_type in _MOVES and all(map(is_setting, node.outputs)))
        for node, index in uses
    )


def _settings_of(node: NodeProto | ir.Node) -> tuple[int, ...]:
    domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
    return _SETTINGS.get(domain + node.op_type, ())


def _settings(graph: GraphProto) -> set[str]:
    """Return the names of operands that are no weights, in branches too.

    Exporters put scales together of those of the batch, the channels and the plane, and multiply
    the lengths of axes by them.
    """
    settings: set[str] = set()
    _add_settings(graph, settings, set())
    return settings - {""}


def _add_settings(graph: GraphProto, settings: set[str], others: set[str]) -> None:
    """Add the names of settings, and to `others` those that something else reads as well."""
    others.update(y.name for y in graph.output)
    for node in reversed(graph.node):
        for inner in subgraphs(node):
            _add_settings(inner, settings, others)
        results = settings.intersection(node.output)
        moves = node.op_type in _MOVES and bool(results)
        computes = node.op_type in _COMPUTES and bool(results - others)
        for place, name in enumerate(node.input):
            sets = moves or computes or place in _settings_of(node)
            (settings if sets else others).add(name)


def _computed(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values that are no constants, in branches too."""
    constants = {t.name for t in graph.initializer}
    yield from (x.name for x in graph.input if x.name not in constants)
    for node in graph.node:
        if node.op_type != "Constant":
            yield from node.output
        for inner in subgraphs(node):
            yield from _computed(inner)


def _graph_sites(graph: GraphProto) -> Iterator[Site]:
    for tensor in graph.initializer:
        yield _tensor_site(tensor, tensor.name, graph, None, tensor.data_type in FLOATS)
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            yield from _constant_sites(node, graph)
        elif node.domain == "ai.onnx.ml":
            yield from _ml_sites(node, graph)
        for inner in subgraphs(node):
            yield from _graph_sites(inner)


def _tensor_site(
    tensor: TensorProto, name: str, graph: GraphProto, node: NodeProto | None, default: bool
) -> Site:
    def write(array: np.ndarray) -> None:
        made = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape))
        made.ClearField("dims")
        for field in _STORAGE:
            tensor.ClearField(field)
        tensor.MergeFrom(made)

    return Site(name, lambda: tensor, write, default, graph, node)


def _constant_sites(node: NodeProto, graph: GraphProto) -> Iterator[Site]:
    attribute = next((a for a in node.attribute if a.name in _CONSTANT_ATTRIBUTES), None)
    if attribute is None:
        return
    if attribute.name == "value":
        t = attribute.t
        several = t.data_type in FLOATS and int(np.prod(t.dims)) > 1
        yield _tensor_site(t, node.output[0], graph, node, several)
    else:
        shape = None if attribute.name.endswith("s") else ()
        default = attribute.name == "value_floats" and len(attribute.floats) > 1
        yield _attribute_site(attribute, node.output[0], graph, node, default, shape)


def _ml_sites(node: NodeProto, graph: GraphProto) -> Iterator[Site]:
    for place, (name, trained) in enumerate(ML_COEFFICIENTS.get(node.op_type, {}).items(), 1):
        attribute = next((a for a in node.attribute if a.name == name and a.floats), None)
        if attribute is not None:
            full = f"{node.name or node.output[0]}.{name}"
            site = _attribute_site(attribute, full, graph, node, trained, None)
            site.place = place
            yield site


def _attribute_site(
    attribute: AttributeProto,
    name: str,
    graph: GraphProto,
    node: NodeProto,
    default: bool,
    shape: tuple[int, ...] | None,
) -> Site:
    field = {"FLOAT": "f", "FLOATS": "floats", "INT": "i", "INTS": "ints"}[
        AttributeProto.AttributeType.Name(attribute.type)
    ]
    dtype = np.float32 if field.startswith("f") else np.int64

    def read() -> TensorProto:
        array = np.asarray(getattr(attribute, field), dtype=dtype)
        return numpy_helper.from_array(array if shape is None else array.reshape(shape), name)

    def write(array: np.ndarray) -> None:
        if shape is None:
            getattr(attribute, field)[:] = array.ravel().tolist()
        else:
            setattr(attribute, field, array.item())

    return Site(name, read, write, default, graph, node)
