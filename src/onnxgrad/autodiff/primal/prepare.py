"""`prepare`: any model -> the working dialect, so that rules stay few and short.

The dialect: opset 18 or newer, no local functions, no tensor `Constant` nodes, no initializer that
is also an input, a symbol for every input axis without one. Operators without a rule are replaced
by a lowering, or by their function body in ONNX. `prepare` lists the steps in order;
`_rewrite_table` lists the rewrites of one visit of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedOpsetsPass

from onnxgrad.autodiff.primal.bodies import (
    BRANCHES,
    constant_as_initializer,
    inline_function_body,
    operators_with_body,
)
from onnxgrad.autodiff.primal.final_states import FINAL_STATES
from onnxgrad.errors import escaping, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer, infer_file, name_rows, record_scan_ranks
from onnxgrad.graph.precision import widen
from onnxgrad.graph.rewrite import ANY, GROUPS, Rewrite, Table, rewrite
from onnxgrad.graph.tidy import latest_replacement, tidy
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.graph.walk import Walk, fold_node
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import make_defaults_constants
from onnxgrad.model.local_functions import inline_functions, raise_opset
from onnxgrad.model.opsets import (
    WORKING_OPSET,
    means_same_at_opset,
    newest_opset,
    onnxruntime_runs_node,
    opset_has_node,
)
from onnxgrad.model.weights import feeds_settings_only
from onnxgrad.operators import OPERATORS, marks, operator_of
from onnxgrad.operators.shapes import dims, is_real, static
from onnxgrad.reporting import escape_loggers

escape_loggers("onnx_ir")  # names in the log of its passes are escaped, too


@escaping()
def prepare(
    proto: ModelProto,
    batch: str | None = None,
    outputs: Collection[str] | None = None,
    keep: Collection[str] = (),
    on_demand: bool = False,
    own: bool = False,
    keep_dropout: bool = False,
    exempt: Collection[str] | None = None,
    wide: Collection[str] | None = None,
    fill: Callable[[ir.Model], None] | None = None,
    defaults: bool = False,
) -> ir.Model:
    """Return a copy of `proto` in the working dialect, with inferred types and shapes.

    Args:
        proto: the model.
        batch: symbol for the first axis of every input that is not static, if the caller knows that
            they all have the same number of rows.
        outputs: names of the outputs to keep, in this order, with the nodes that they need; None:
            all.
        keep: names of node outputs that keep their names.
        on_demand: also lower the operators that the sweep lowers if they have a gradient.
        own: `proto` was written from a prepared model: the shapes that it states are true, and it
            is not run.
        keep_dropout: keep each Dropout without effect, so that training can switch it on.
        exempt: names of inputs whose first axis is not `batch`; neither is it then where inputs
            state different symbols. None: the first axis of all inputs is `batch`.
        wide: names of constants that keep 16 bits, where the prepared model computes in float32
            instead of 16 bits: see `widen`. None: it computes in the dtypes of the model.
        fill: replaces inputs of the model, of which types and shapes are inferred, by nodes.
        defaults: inputs with a default stay inputs, see `make_defaults_inputs`; else they become
            constants.
    """
    model = _convert_to_working_opset(proto)
    if defaults:
        make_defaults_inputs(model, proto, own)
    make_defaults_constants(model)
    _copy_repeated_outputs(model.graph)  # before `outputs` selects by name
    _rename_squeeze_axes(model.graph)
    if outputs is not None:  # before inference: nodes that no output needs may be unsupported
        model.graph.outputs[:] = values_by_name("output", outputs, model.graph.outputs)
        tidy(model)
    if wide is not None:  # before inference, which takes over the new types
        widen(model, wide)
    if batch is not None:
        name_rows(model.graph, batch, exempt)
    record_scan_ranks(all_nodes(model.graph))
    _pass_scalars_to_loops(model.graph)
    trusts_branches = outputs is not None  # a trainer checks the shapes that it feeds
    if own:
        walk = infer(model, trusts_branches)
    else:
        from onnxgrad.runtime.session import confirmed_by_run  # imports onnxruntime

        walk = infer_file(model, trusts_branches, confirmed_by_run(proto))
    if fill is not None:  # after inference of sizes, before lowerings drop an empty past
        fill(model)
    rewrite(model.graph, _rewrite_table(model, walk, on_demand, keep_dropout), keep=keep)
    RemoveUnusedOpsetsPass(process_functions=False)(model)
    _copy_replaceable_outputs(model)
    _lower_opset(model)  # last: operators of a newer opset have been rewritten
    return model


def _convert_to_working_opset(proto: ModelProto) -> ir.Model:
    """Return a copy of `proto` in the working opset, without local functions and Constant nodes.

    In the file, `inlined` makes all constants initializers, binds the attributes of functions,
    brings them to one opset and inlines them, and `raise_opset` converts the result. `to_ir` writes
    sparse tensors as dense ones.
    """
    model = to_ir(raise_opset(inline_functions(external.copy_without_data(proto), lifted=True)))
    external.restore_data_lazily(model, proto)
    # Constants that the conversion has added
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def _lower_opset(model: ir.Model) -> None:
    """Set the opset to the newest one in which all nodes are defined, and which onnxruntime
    loads.
    """
    own, nodes = model.opset_imports[""], all_nodes(model.graph)
    newest = min(own, newest_opset())
    if newest < own or not all(onnxruntime_runs_node(n, own) for n in nodes):
        fitting = (
            v
            for v in range(newest, WORKING_OPSET - 1, -1)
            if all(
                onnxruntime_runs_node(n, v)
                and opset_has_node(n, v)
                and means_same_at_opset(n, own, v)
                for n in nodes
            )
        )
        model.opset_imports[""] = next(fitting, own)


def values_by_name(kind: str, names: Iterable[str], values: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the values with these names; raise if a name is missing, called a `kind` in the
    message.
    """
    named = {str(v.name): v for v in reversed(list(values))}
    names = list(names)
    for name in names:
        if name not in named:
            raise unknown(kind, name, list(reversed(named)))
    return [named[name] for name in names]


def _rename_squeeze_axes(graph: ir.Graph) -> None:
    """Rename the initializers `squeeze_axes...`, whose names onnxruntime uses for its own.

    It fails on a graph that has values of this name, if it fuses more of them.
    """
    op = Emit(graph)
    for value in list(graph.initializers.values()):
        if str(value.name).startswith("squeeze_axes"):
            value.name = op.name("axes_of_squeeze")


def _copy_repeated_outputs(graph: ir.Graph) -> None:
    """Copy an output that the graph lists several times, so that each has its own cotangent."""
    listed: set[ir.Value] = set()
    for i, y in enumerate(list(graph.outputs)):
        if y in listed:
            op = Emit(graph)
            copy = op.set_type_like(op.copy_of(y), y)
            copy.name, copy.meta[marks.LISTED_AS] = op.name(str(y.name)), y
            graph.outputs[i] = copy
        listed.add(y)


def original_output(y: ir.Value) -> ir.Value:
    """Return the output that `y` copies, if the model lists an output several times; else `y`."""
    return latest_replacement(y.meta.get(marks.LISTED_AS, y))


def _pass_scalars_to_loops(graph: ir.Graph) -> None:
    """Let the bodies of Loops take their iteration number and condition as scalars, in place.

    onnxruntime passes tensors of the declared shape, (1,) in files of PyTorch: their nodes get the
    scalar reshaped.
    """
    for node in all_nodes(graph):
        if (node.domain, node.op_type) != ("", "Loop"):
            continue
        body = node.attributes["body"].as_graph()
        for i, x in enumerate(body.inputs[:2]):
            if dims(x) == (1,):
                op = Emit(body, outer=Emit(graph))
                scalar = ir.Value(name=op.name(str(x.name)), type=x.type, shape=ir.Shape(()))
                body.inputs[i] = scalar
                with op.at(next(iter(body), None)):
                    reshaped = op.Reshape(scalar, [1])
                ir.convenience.replace_all_uses_with(x, reshaped, replace_graph_outputs=True)


def _rewrite_table(model: ir.Model, walk: Walk, on_demand: bool, keep_dropout: bool) -> Table:
    """Return `{operator: rewrites}`, in the order in which one visit of a node applies them.

    Its results are inferred, and read as constants if static lengths decide them; an If that always
    takes one branch gives way to it, what reads the last output of a recurrent layer reads its
    final state, and an operator without a rule gives way to its lowering or its body in ONNX. What
    takes its place is visited next, before the nodes that read it.

    Lowerings on demand are among them if asked for, or if no type of a result is known without
    them.
    """
    untyped = {operator_of(n) for n in all_nodes(model.graph) if n.outputs[0].type is None}
    table: dict[tuple[str, str], list[Rewrite]] = {
        (domain, ANY): [walk.infer_next, partial(fold_node, walk)] for domain in model.opset_imports
    }
    for key, functions in (*GROUPS[BRANCHES].items(), *GROUPS[FINAL_STATES].items()):
        table[key] = [*functions]
    for key, one in OPERATORS.items():
        if one.lowering is not None and (on_demand or not one.on_demand or one in untyped):
            table.setdefault(key, []).append(one.lowering)
    if keep_dropout and not OPERATORS["", "Dropout"].of_user:
        del table["", "Dropout"]
    for key in operators_with_body():
        table.setdefault(key, []).append(_inline_body_if_needed)
    table.setdefault(("", "Constant"), [constant_as_initializer])
    return table


def _inline_body_if_needed(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Write the function body of a node without rule or lowering, or too new for onnxruntime; else
    None.
    """
    newest = newest_opset()
    covered = operator_of(node).is_covered and (op.opset <= newest or opset_has_node(node, newest))
    return None if covered else inline_function_body(op, node)


def _copy_replaceable_outputs(model: ir.Model) -> None:
    """Copy graph outputs of nodes that are replaced later, so that each output keeps its name.

    These are operators that are lowered on demand, and calls of functions that have a rule.
    """
    replaced = [
        n for n in all_nodes(model.graph)
        if operator_of(n).on_demand or n.op_identifier() in model.functions
    ]  # fmt: skip
    outputs = [(n.graph, y) for n in replaced for y in n.outputs if y.is_graph_output()]
    main = Emit(model.graph) if outputs else None
    for graph, y in outputs:
        assert isinstance(graph, ir.Graph)
        op = Emit(graph, outer=main)
        result = op.set_type_like(op.copy_of(y), y)
        result.name, y.name = y.name, op.name(str(y.name))
        graph.outputs[list(graph.outputs).index(y)] = result


# -- inputs with a default: initializers among the inputs, in whose place arrays can be fed --------
#
# `make_defaults_inputs` makes them plain inputs, of which no pass and no rule reads the elements;
# `restore_defaults` gives them back their elements and their shapes.


def make_defaults_inputs(model: ir.Model, origin: ModelProto, own: bool) -> None:
    """Turn inputs with a default, an initializer, into plain inputs, in place: nothing reads their
    default then.

    Before IR version 4, all initializers were among the inputs, and could not be fed. Where a file
    still lists all of them, weights too, integers and settings remain constants, as rules read
    them, unless it is a prepared one.
    """
    if origin.ir_version < 4:
        return
    optional = [x for x in model.graph.inputs if x.is_initializer()]
    stored = len(origin.graph.initializer) + len(origin.graph.sparse_initializer)
    sized = [x for x in optional if static(dims(x)) is not None]
    constants = {x for x in sized if not is_real(x) or feeds_settings_only(x)}
    if own or len(optional) < stored or len(constants) == len(sized):
        constants = set()
    for x in optional:
        if x in constants:
            continue
        assert x.const_value is not None
        x.meta[marks.INPUT_DEFAULT] = x.const_value, x.shape
        pairs = zip(dims(x) or (), x.const_value.shape, strict=False)
        x.shape = ir.Shape([d if d == length else None for d, length in pairs])
        del model.graph.initializers[str(x.name)]
        x.const_value = None


def has_default(x: ir.Value) -> bool:
    """Return whether `x` is an input with a default: an initializer that users may replace by
    feeding.
    """
    return marks.INPUT_DEFAULT in x.meta


def is_weight_input(x: ir.Value) -> bool:
    """Return whether `x` is an input with a default, and the file declares a static shape for
    it.
    """
    if not has_default(x):
        return False
    _, stated = x.meta[marks.INPUT_DEFAULT]
    return static(dims(ir.Value(shape=stated))) is not None


def restore_defaults(graph: ir.Graph) -> None:
    """Give the inputs with a default their initializers and declared shapes back, in place."""
    for x in filter(has_default, graph.inputs):
        x.const_value, x.shape = x.meta.pop(marks.INPUT_DEFAULT)
        graph.initializers.add(x)
