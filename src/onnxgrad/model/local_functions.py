"""Local functions: specialized for the attributes of each call, and inlined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import onnx_ir as ir
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, defs, inliner
from onnx_ir.passes.common import InlinePass

from onnxgrad.errors import ModelError, escaping, first_line, printable
from onnxgrad.graph.emit import Emit
from onnxgrad.model.constants import ConstantRef, normalize_domain
from onnxgrad.model.convert import declare_constant_types
from onnxgrad.model.opsets import WORKING_OPSET, upgrade_opset
from onnxgrad.model.rewrites import (
    compute_outputs_inside,
    copy_input_types_to_outputs,
    use_standard_domain,
)
from onnxgrad.model.scopes import rename_shadowing_values
from onnxgrad.model.traversal import all_nodes, model_graphs, model_nodes, subgraphs, walk_graphs
from onnxgrad.model.weights import constant_refs, lift_constants, replace_by_initializers
from onnxgrad.operators import OPERATORS

FunctionKey = tuple[str, str, str]  # domain, name, overload

_MARK = "onnxgrad.ref:"  # prefix of a Constant's tensor name: it stands for that initializer
_QUANTIZE = ("QuantizeLinear", "DequantizeLinear")
_FEW_BITS = frozenset(map(TensorProto.DataType.Value, ("INT4", "UINT4", "INT16", "UINT16")))
_FEW_BITS_OPSET = 21  # the first opset whose QuantizeLinear has these dtypes
_LARGE = 1024  # elements: larger tensors are not copied for every call


@escaping()
def inline_functions(proto: ModelProto, lifted: bool = False) -> ModelProto:
    """Return a copy of `proto` in which calls of its local functions are inlined.

    A constant of a function becomes one initializer, which all calls share. Calls of functions that
    have a rule are not inlined. In the copy, every subgraph returns results of nodes inside it,
    each once. With `lifted`, all constants are initializers of the main graph, named by
    `constant_refs`.

    Raises:
        ModelError: a function calls itself.
    """
    model = ModelProto()
    model.CopyFrom(proto)
    use_standard_domain(model)
    copy_input_types_to_outputs(model)
    refs = list(constant_refs(model))  # before constants are added below
    if lifted:
        lift_constants(model, refs)
    tensors = _replace_constants_by_marks(refs)
    names = {ref.name for ref in refs}
    if model.functions or any(True for node in model.graph.node for _ in subgraphs(node)):
        rename_shadowing_values(model, names)
        compute_outputs_inside(model, names)
    if model.functions:
        model.graph.initializer.extend(tensors)
        ruled = _specialize_functions(model)
        model = _raise_to_common_opset(model, ruled)
        try:
            model = inliner.inline_local_functions(model)
        except Exception as e:  # the inliner raises several undeclared types
            raise ModelError(f"onnx cannot inline local functions: {first_line(e)}") from e
        model.functions.extend(ruled)
        _share_inlined_constants(model)
        compute_outputs_inside(model, names)
    return model


def inline_ruled_calls(op: Emit, model: ir.Model) -> None:
    """Inline, in place, the calls of local functions that have a gradient rule.

    They are calls until their gradients are written.
    """
    if not model.functions:
        return
    before = set(model.graph)
    InlinePass()(model)
    declare_constant_types(model)
    for node in model.graph:
        for y in () if node in before else node.outputs:
            y.name = op.name(str(y.name))  # InlinePass may reuse a name of a subgraph


@escaping()
def raise_opset(proto: ModelProto) -> ModelProto:
    """Return `proto`, or a copy converted to the working opset if its opset is older.

    Raises:
        ModelError: `proto` cannot be converted.
    """
    target = _FEW_BITS_OPSET if _quantizes_to_few_bits(proto) else WORKING_OPSET
    version = max(
        (o.version for o in proto.opset_import if not normalize_domain(o.domain)), default=0
    )
    if version >= target:
        return proto
    model = inline_functions(proto)  # the converter drops functions
    version = _standard_opset(model) or 0
    if not version:  # a model of ai.onnx.ml only; its gradient needs ai.onnx
        model.opset_import.add(domain="", version=target)
    if not version or version >= target:
        return model
    if model.functions:
        ruled = ", ".join(printable(f.name) for f in model.functions)
        raise ModelError(
            f"opset {version} cannot be raised to {target} with local functions that have a "
            f"rule ({ruled}): export the model at opset {target} or newer"
        )
    return upgrade_opset(model, version, target)


def _quantizes_to_few_bits(proto: ModelProto) -> bool:
    """Return whether nodes of `com.microsoft` quantize to 16-bit or 4-bit integers, which opset 21
    adds.
    """
    nodes = [n for n in model_nodes(proto) if n.domain == "com.microsoft"]
    read = {x for n in nodes if n.op_type in _QUANTIZE for x in n.input}
    return bool(read) and any(
        t.name in read and t.data_type in _FEW_BITS
        for g in model_graphs(proto)
        for t in g.initializer
    )


# -- opsets ------------------------------------------------------------------------------------


def _standard_opset(holder: ModelProto | FunctionProto) -> int | None:
    return next((o.version for o in holder.opset_import if not o.domain), None)


def _raise_to_common_opset(model: ModelProto, ruled: Sequence[FunctionProto]) -> ModelProto:
    """Return `model` and convert its functions, all at the newest opset that any of them
    declares.
    """
    version, functions = _standard_opset(model), [*model.functions, *ruled]
    target = max(v for v in (version, *map(_standard_opset, functions)) if v is not None)
    for function in functions:
        _raise_function_opset(function, target)
    if version is None:
        model.opset_import.add(domain="", version=target)
    elif version < target:
        functions = list(model.functions)
        del model.functions[:]
        model = upgrade_opset(model, version, target)
        model.functions.extend(functions)
    return model


def _raise_function_opset(function: FunctionProto, target: int) -> None:
    """Convert a local function to opset `target`, in place."""
    version = _standard_opset(function)
    if version is None or version == target:
        return
    kinds = {node.op_type for node in all_nodes(function.node) if not node.domain}
    if any(_since_version(kind, version) != _since_version(kind, target) for kind in kinds):
        model = ModelProto(ir_version=10, opset_import=function.opset_import)
        model.graph.name = function.name
        model.graph.node.extend(function.node)
        for name in function.input:
            model.graph.input.add(name=name)
        for name in function.output:
            model.graph.output.add(name=name)
        model = upgrade_opset(model, version, target)
        del function.node[:]
        for tensor in model.graph.initializer:
            constant = function.node.add(op_type="Constant", output=[tensor.name])
            constant.attribute.add(name="value", type=AttributeProto.TENSOR, t=tensor)
        function.node.extend(model.graph.node)
    for entry in function.opset_import:
        if not entry.domain:
            entry.version = target


def _since_version(op_type: str, version: int) -> int | None:
    """Return the newest opset up to `version` that changed the operator; None if it did not
    exist.
    """
    exists = defs.has(op_type, version)
    return defs.get_schema(op_type, version).since_version if exists else None


# -- constants ---------------------------------------------------------------------------------


def _replace_constants_by_marks(refs: Iterable[ConstantRef]) -> list[TensorProto]:
    """Replace constants of local functions by marked placeholders; return the constants as
    initializers.
    """
    tensors = []
    for ref in refs:
        f, call = ref.function, ref.node
        if f is not None:
            key = f.domain, f.name
        elif call is not None and ref.attribute is not None:
            key = call.domain, call.op_type
        else:
            continue
        if _has_rule(key):
            continue
        tensor = TensorProto()
        tensor.CopyFrom(ref.read())
        tensor.name = ref.name
        tensors.append(tensor)
        _replace_constant_by_mark(ref)
    return tensors


def _replace_constant_by_mark(ref: ConstantRef) -> None:
    """Replace the constant by a Constant node whose tensor name is `_MARK` and the name of `ref`.

    Inlining copies that node for every call, and `_share_inlined_constants` then finds all copies.
    """
    mark = TensorProto()
    mark.CopyFrom(ref.read())
    mark.name = _MARK + ref.name
    if ref.attribute is not None:  # an attribute of a call, to which any node may refer
        ref.attribute.t.CopyFrom(mark)
        return
    if prod(mark.dims) > _LARGE:
        mark = TensorProto(name=mark.name, data_type=mark.data_type, dims=[0])
    node = ref.node
    if node is not None and node.op_type == "Constant":
        del node.attribute[:]
        node.attribute.add(name="value", type=AttributeProto.TENSOR, t=mark)
        return
    constant = NodeProto(op_type="Constant")
    constant.attribute.add(name="value", type=AttributeProto.TENSOR, t=mark)
    if node is None:  # an initializer of a subgraph
        constant.output.append(ref.remove_initializer())
    else:
        constant.output.append(f"{node.output[0]}.{ref.name}")
        ref.add_node_input(constant.output[0])
    ref.graph.node.insert(0, constant)


def _share_inlined_constants(model: ModelProto) -> None:
    """Replace the marked Constants of all inlined calls by initializers of the main graph."""
    marked = []
    for graph, node in walk_graphs(model.graph):
        if node is not None and node.op_type == "Constant" and node.attribute:
            tensor = node.attribute[0].t
            if tensor.name.startswith(_MARK):
                name = tensor.name.removeprefix(_MARK)
                ref = ConstantRef(name, tensor, False, graph, node, graph_name=node.output[0])
                marked.append(ref)
    replace_by_initializers(model, marked)


# -- attributes --------------------------------------------------------------------------------


def _specialize_functions(model: ModelProto) -> list[FunctionProto]:
    """Specialize functions for the attributes of each call, as the inliner ignores their defaults.

    Functions that have a rule are removed from `model` instead, with the functions that they call,
    and returned; their calls state every attribute.
    """
    functions: dict[FunctionKey, FunctionProto] = {
        (f.domain, f.name, f.overload): f for f in model.functions
    }
    bound: dict[tuple[FunctionKey, bytes], FunctionProto] = {}
    stack: list[FunctionKey] = []  # the functions that are being specialized, from the outermost

    def specialized_name(key: FunctionKey, attributes: dict[str, AttributeProto]) -> str:
        """Return the name of the function `key`, specialized for these values of its attributes."""
        serialized = b"".join(attributes[n].SerializeToString() for n in sorted(attributes))
        if (key, serialized) not in bound:
            if key in stack:
                raise ModelError(f"the local function {key[1]!r} of {key[0]!r} calls itself")
            stack.append(key)
            copy = FunctionProto()
            copy.CopyFrom(functions[key])
            _resolve_attributes(copy.node, attributes)
            for field in ("attribute", "attribute_proto", "overload", "value_info"):
                copy.ClearField(field)
            copy.name = f"{copy.name}.{len(bound)}"
            bound[key, serialized] = copy
            bind_calls(copy.node)
            stack.pop()
        return bound[key, serialized].name

    def bind_calls(nodes: Iterable[NodeProto]) -> None:
        """Let `nodes` call functions that are specialized for the attributes of each call."""
        for node in all_nodes(nodes):
            key = (node.domain, node.op_type, node.overload)
            if key not in functions:
                continue
            stated = {a.name: a for a in functions[key].attribute_proto}
            stated |= {a.name: a for a in node.attribute}
            attributes = list(stated.values())
            del node.attribute[:]
            if _has_rule(key[:2]):
                node.attribute.extend(attributes)
            else:
                node.op_type = specialized_name(key, stated)
                node.overload = ""

    bind_calls(model.graph.node)
    with_rule = _called_functions(functions, [key for key in functions if _has_rule(key[:2])])
    ruled = [f for key, f in functions.items() if key in with_rule]
    del model.functions[:]
    model.functions.extend(bound.values())
    return ruled


def _has_rule(key: tuple[str, str]) -> bool:
    """Return whether a function has a rule, or a lowering of a user: its calls are not inlined."""
    operator = OPERATORS.get(key)
    return operator is not None and bool(operator.rule or operator.of_user)


def _called_functions(
    functions: dict[FunctionKey, FunctionProto], keys: list[FunctionKey]
) -> set[FunctionKey]:
    """Return `keys`, and the keys of all functions that these functions call, at any depth."""
    reached = list(dict.fromkeys(keys))
    for key in reached:  # grows while it is read
        for node in all_nodes(functions[key].node):
            called = (node.domain, node.op_type, node.overload)
            if called in functions and called not in reached:
                reached.append(called)
    return set(reached)


def _resolve_attributes(nodes: Iterable[NodeProto], attributes: dict[str, AttributeProto]) -> None:
    """Replace references to function attributes by their values; remove those without a value."""
    for node in all_nodes(nodes):
        if not any(a.ref_attr_name for a in node.attribute):
            continue
        resolved = []
        for a in node.attribute:
            value = attributes.get(a.ref_attr_name) if a.ref_attr_name else a
            if value is not None:
                resolved.append(AttributeProto())
                resolved[-1].CopyFrom(value)
                resolved[-1].name = a.name
        del node.attribute[:]
        node.attribute.extend(resolved)
