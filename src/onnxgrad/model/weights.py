"""The constant tensors of a model, wherever it stores them, each under a unique name.

Constants are dense or sparse initializers of the main graph or of subgraphs, `Constant` nodes of
graphs or local functions, and attributes of `ai.onnx.ml` operators. `constant_refs` lists the
constants, `lift_constants` turns all constants into initializers of the main graph, and
`replace_constants` writes new values to where they are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx import GraphProto, ModelProto

from onnxgrad.errors import unknown
from onnxgrad.model.constants import FLOATS as FLOATS, ConstantRef, scan_constants
from onnxgrad.model.external import copy_without_elements, is_large_inline, lacks_elements, nbytes
from onnxgrad.model.feeds import variable_defaults
from onnxgrad.model.notes import CONSTANTS, SPARSE, read_metadata
from onnxgrad.model.rewrites import compute_outputs_inside
from onnxgrad.model.scopes import rename_values, unused_name
from onnxgrad.model.traversal import (
    GraphLike,
    all_graphs,
    declared_names,
    direct_value_names,
    subgraphs,
    walk_graphs,
)
from onnxgrad.operators import ARITHMETIC, REORDERS, SELECTS, operator_of

_MOVES = REORDERS | SELECTS
LARGE = 1 << 28  # bytes in total from which weights are large: memory should hold no copy
TENSOR_BYTES = 1 << 16  # least bytes of a weight whose elements are left out


def constant_refs(model: ModelProto) -> Iterator[ConstantRef]:
    """Yield references to the constants of `model` in graph order, each with a unique name.

    `default` is false for tensors that `record_constants` recorded (factors of a loss or a
    gradient), for settings (the scales of a Resize, the ends of a Range), and for inputs that have
    a default and an axis of any length.

    If several constants have the same name, as constants of two branches may, the later constants
    get a numeric suffix; so does a constant with the name of a computed value.
    """
    no_weights = recorded_constants(model) | variable_defaults(model)
    refs = list(scan_constants(model))  # the list keeps the graphs alive, and so their ids unique
    settings = _values_read_as_settings(model) if any(ref.default for ref in refs) else set()
    seen = _computed_value_names(model.graph)
    taken = seen | {ref.name for ref in refs}
    for ref in refs:
        name = unused_name(ref.name, taken) if ref.name in seen else ref.name
        seen.add(name)
        setting = (id(ref.graph), ref.graph_name) in settings
        ours = ref.graph is model.graph and not {name, ref.name}.isdisjoint(no_weights)
        ref.default = ref.default and not (ours or setting)
        ref.name = name
        yield ref


def recorded_constants(model: ModelProto) -> set[str]:
    """Return the names of the constants that the metadata of `model` say are no weights: see
    `record_constants`.
    """
    return set(read_metadata(model, CONSTANTS))


def record_constants(model: ir.Model, origin: ModelProto) -> None:
    """Write into the metadata of `model`, which was made from `origin`, which initializers are no
    weights.

    These are the float initializers that are not weights of `origin`. Initializers that are sparse
    in `origin` are recorded, too.
    """
    refs = list(constant_refs(origin))
    weights = {ref.name for ref in refs if ref.default}
    values = model.graph.initializers.items()
    ours = [n for n, v in values if v.dtype and v.dtype.is_floating_point() and n not in weights]
    sparse = [ref.name for ref in refs if ref.is_sparse]
    for key, names in ((CONSTANTS, ours), (SPARSE, sparse)):
        if names:
            model.metadata_props[key] = json.dumps(names)


def sparse_masks(model: ModelProto, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return `{name: boolean array of stored elements}` of the sparse tensors among `names`."""
    sparse = read_metadata(model, SPARSE)
    return {
        ref.name: ref.stored_mask() if ref.is_sparse else ref.array() != 0
        for ref in constant_refs(model)
        if ref.name in names and (ref.is_sparse or ref.name in sparse)
    }


def replace_constants(model: ModelProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a copy of `model` with new values for the constants in `values`, `{name: array}`.

    Raises:
        ValueError: an unknown name, or a value whose shape or dtype the constant cannot have.
    """
    # protobuf frees the memory of a replaced field only with its message
    replaced = copy_without_elements(model, lambda tensor: tensor.name in values)
    refs = {ref.name: ref for ref in constant_refs(replaced)}
    for name, value in values.items():
        if name not in refs:
            raise unknown("constant", name, refs)
        old, new = refs[name].read(), np.asarray(value)
        if new.shape != tuple(old.dims):
            raise ValueError(
                f"the constant {name!r} has the shape {tuple(old.dims)}, and its new value "
                f"has the shape {new.shape}: pass an array of the shape of the constant"
            )
        refs[name].write(_convert_to_dtype(name, new, ir.DataType(old.data_type).numpy()))
    return replaced


def _convert_to_dtype(name: str, new: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array `new` converted to `dtype`; floats may be rounded, values of other dtypes
    must not change.

    Raises:
        ValueError: a value does not fit `dtype`; the message names the constant `name`.
    """
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
        kind = "strings" if dtype.kind in "OUS" else dtype
        raise ValueError(
            f"the constant {name!r} holds {kind}, which the new value ({new.dtype}) does not fit: "
            f"pass {kind}"
        )
    return converted


def lift_constants(model: ModelProto, refs: Collection[ConstantRef]) -> None:
    """Turn every constant of the graphs of `model` into an initializer of the main graph, in place.

    The attributes of `ai.onnx.ml` operators become additional inputs of the node, which is not
    valid then: `prepare` writes it with other operators. Constants of local functions stay, as
    `inlined` brings them into the main graph. `refs` are the result of `constant_refs`.
    """
    moved = []
    for ref in refs:
        is_lifted = ref.node is None and ref.graph is model.graph and not ref.is_sparse
        if ref.function is None and ref.attribute is None and not is_lifted:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(ref.read())
            tensor.name = ref.name
            moved.append(ref)
    replace_by_initializers(model, moved)
    compute_outputs_inside(model, {ref.name for ref in refs})


def replace_by_initializers(model: ModelProto, refs: Collection[ConstantRef]) -> None:
    """Let nodes read, in place of the constants `refs`, the initializers of the main graph that
    have the same names.

    The constants are removed; an attribute of an `ai.onnx.ml` node becomes another input of it.
    """
    named = (ref for ref in refs if not ref.operand)
    rename_values(model.graph, {(id(ref.graph), ref.graph_name): ref.name for ref in named})
    for ref in refs:
        if ref.operand:
            ref.add_node_input(ref.name)
        elif ref.node is None:
            ref.graph_name = ref.name
            ref.remove_initializer()
    removed = {id(ref.node) for ref in refs if not ref.operand}
    for graph in list(all_graphs(model.graph)):
        # `remove` would compare the node with all nodes before it
        for i in reversed(range(len(graph.node))):
            if id(graph.node[i]) in removed:
                del graph.node[i]


def feeds_settings_only(value: ir.Value) -> bool:
    """Return whether all nodes that read `value` read it as a setting: an operand that configures
    the operator, such as the scales of a Resize.
    """
    moved = [value]
    for v in moved:  # the loop appends to `moved`
        uses = list(v.uses())
        for node, index in uses:
            operator = operator_of(node)
            sets = index in operator.settings and "real_settings" in operator.traits
            if node.op_type in _MOVES and not sets:
                moved.extend(y for y in node.outputs if y not in moved)
            elif not sets:
                return False
        if not uses:
            return False
    return True


_ValueKey = tuple[int, str]  # the id of the graph that defines a value, and its name there


def _values_read_as_settings(model: ModelProto) -> set[_ValueKey]:
    """Return the values of a model, local functions included, that nodes read only as settings such
    as the scales of a Resize.

    This includes values that settings are computed from: exporters concatenate the scales of
    several axes, and multiply lengths by them.
    """
    settings: set[_ValueKey] = set()
    for graph in (model.graph, *model.functions):
        _collect_setting_values(graph, lambda name: (0, name), settings, set())
    return settings


def _collect_setting_values(
    graph: GraphLike,
    outer: Callable[[str], _ValueKey],
    settings: set[_ValueKey],
    others: set[_ValueKey],
) -> None:
    """Add the values of `graph` that nodes read only as settings to `settings`, and all other
    values that nodes read to `others`.

    `outer` returns the value of the enclosing graphs that a name stands for.
    """
    own = {name: (id(graph), name) for name in direct_value_names(graph)}

    def key_in_scope(name: str) -> _ValueKey:
        return own.get(name) or outer(name)

    others.update(map(key_in_scope, declared_names(graph.output)))
    for node in reversed(graph.node):
        for inner in subgraphs(node):
            _collect_setting_values(inner, key_in_scope, settings, others)
        results = settings.intersection(map(key_in_scope, node.output)) if settings else set()
        moves = bool(results) and node.op_type in _MOVES
        computes = bool(results) and node.op_type in ARITHMETIC and bool(results - others)
        indices = operator_of(node).settings
        for index, key in enumerate(map(key_in_scope, node.input)):
            sets = moves or computes or index in indices
            (settings if sets else others).add(key)


def _computed_value_names(graph: GraphProto) -> set[str]:
    """Return the names of all values of a graph and its subgraphs that are no constants."""
    computed: set[str] = set()
    for inner, node in walk_graphs(graph):
        if node is None:
            assert isinstance(inner, GraphProto)
            computed.update({x.name for x in inner.input} - {t.name for t in inner.initializer})
        elif node.op_type != "Constant":
            computed.update(node.output)
    return computed


# -- weights whose elements are kept elsewhere -----------------------------------------------------


def without_large_weights(model: ModelProto, names: Collection[str] | None = None) -> ModelProto:
    """Return a copy of `model` without the elements of its weights if these are large in total, or
    else `model` itself.

    `names` are the initializers that may lose their elements; None: all. Elements in external files
    stay there. The copy declares the same shapes and types.
    """
    chosen = {
        t.name
        for t in model.graph.initializer
        if (names is None or t.name in names) and is_large_inline(t, TENSOR_BYTES)
    }
    if sum(nbytes(t) for t in model.graph.initializer if t.name in chosen) <= LARGE:
        return model
    return copy_without_elements(model, lambda tensor: tensor.name in chosen)


def fill_weights(model: ModelProto, arrays: Mapping[str, np.ndarray]) -> ModelProto:
    """Return `model` with the elements from `arrays`, `{name: array}`, in the initializers that
    lack their elements.
    """
    names = empty_weight_names(model)
    return replace_constants(model, {name: arrays[name] for name in names}) if names else model


def empty_weight_names(model: ModelProto) -> set[str]:
    """Return the names of the initializers of `model` that lack their elements."""
    return {t.name for t in model.graph.initializer if lacks_elements(t)}


def read_weights_lazily(values: Iterable[ir.Value], read: Callable[[str], np.ndarray]) -> None:
    """Give the initializers `values` elements that `read(name)` returns when they are first needed,
    in place.
    """
    for value in values:
        name, dtype, shape = str(value.name), value.dtype, value.shape
        if dtype is not None and shape is not None:
            elements = partial(lambda name: ir.tensor(read(name)), name)
            value.const_value = ir.LazyTensor(elements, dtype, shape, name=name)
