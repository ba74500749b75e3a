"""`prepare`: any model -> the working dialect, so that rules stay few and short.

The dialect: opset 18 or newer, no local functions, no tensor `Constant` nodes, no initializer that
is also an input, a symbol for every input axis without one. Operators without a rule are replaced
by a lowering, or by their function body in ONNX. `PASSES` lists what is done, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxgrad.autodiff.primal.branches import take_static_branches
from onnxgrad.autodiff.primal.defaults import close_defaults, open_defaults
from onnxgrad.autodiff.primal.final_states import read_final_states
from onnxgrad.autodiff.primal.function_bodies import function_body, initializer, operators_with_body
from onnxgrad.autodiff.primal.local_functions import inlined, raise_opset
from onnxgrad.errors import escaping, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.declarations import infer_file
from onnxgrad.graph.inference.infer import infer, name_rows, note_ranks
from onnxgrad.graph.inference.sizes import fold_sizes
from onnxgrad.graph.inference.walk import Walk
from onnxgrad.graph.precision import widen
from onnxgrad.graph.rewrite import ANY, Rewrite, Table, rewrite
from onnxgrad.graph.tidy import current, tidy
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model import external
from onnxgrad.model.convert import to_ir
from onnxgrad.model.opsets import WORKING_OPSET, exists, is_same, newest_opset, runs
from onnxgrad.operators import OPERATORS, marks, operator_of
from onnxgrad.operators.shapes import rank
from onnxgrad.reporting import escape_loggers
from onnxgrad.runtime.run_shapes import confirmed_by_run

escape_loggers("onnx_ir")  # of its passes, too


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
        own: `proto` was written from a prepared model: what it states is true, and it is not run.
        keep_dropout: keep each Dropout without effect, so that training can switch it on.
        exempt: names of inputs whose first axis is not `batch`; neither is it then where inputs
            state different symbols. None: it is that of all inputs.
        wide: compute in float32 what the model computes in 16 bits: see `widen`, which gets these
            names of constants. None: compute it as the model does.
        fill: replaces inputs of the model, of which types and shapes are inferred, by nodes.
        defaults: inputs with a default stay inputs, see `open_defaults`; else they are constants.
    """
    asked = _Asked(proto, batch, outputs, keep, on_demand, own, keep_dropout, exempt, wide, fill)
    model = _in_working_opset(proto)
    if defaults:
        open_defaults(model, proto, own)
    close_defaults(model)
    for apply in PASSES:
        apply(model, asked)
    return model


@dataclass
class _Asked:
    """The arguments of `prepare`, and the walk that infers shapes, from `_infer` on."""

    proto: ModelProto
    batch: str | None
    outputs: Collection[str] | None
    keep: Collection[str]
    on_demand: bool
    own: bool
    keep_dropout: bool
    exempt: Collection[str] | None
    wide: Collection[str] | None
    fill: Callable[[ir.Model], None] | None
    walk: Walk = field(init=False)

    @property
    def trusts_branches(self) -> bool:
        """Whether declared shapes behind an If are believed: trainers check what they feed."""
        return self.outputs is not None


def _in_working_opset(proto: ModelProto) -> ir.Model:
    """Return a copy without functions and Constants."""
    model = to_ir(raise_opset(inlined(external.without_data(proto), lifted=True)))
    external.with_data(model, proto)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)  # of a new opset
    return model


def _lower_opset(model: ir.Model, asked: _Asked) -> None:
    """Let the opset be the newest one that has all operators, and that the runtime loads."""
    own, nodes = model.opset_imports[""], all_nodes(model.graph)
    newest = min(own, newest_opset())
    if newest < own or not all(runs(n, own) for n in nodes):
        fitting = (
            v for v in range(newest, WORKING_OPSET - 1, -1)
            if all(runs(n, v) and exists(n, v) and is_same(n, own, v) for n in nodes)
        )  # fmt: skip
        model.opset_imports[""] = next(fitting, own)


def _select_outputs(model: ir.Model, asked: _Asked) -> None:
    """Keep the outputs that are asked for, in this order, and the nodes that they need."""
    if asked.outputs is None:
        return
    by_name = {str(y.name): y for y in reversed(model.graph.outputs)}
    for name in asked.outputs:
        if name not in by_name:
            raise unknown("output", name, [str(y.name) for y in model.graph.outputs])
    model.graph.outputs[:] = [by_name[name] for name in asked.outputs]
    tidy(model)


def _free_names(model: ir.Model, asked: _Asked) -> None:
    """Rename the axes that onnxruntime added when it fused Gather nodes into a Split.

    It fails on a graph that has values of this name, if it fuses more of them.
    """
    op = Emit(model.graph)
    for value in list(model.graph.initializers.values()):
        if str(value.name).startswith("squeeze_axes"):
            value.name = op.name("axes_of_squeeze")


def _separate_outputs(model: ir.Model, asked: _Asked) -> None:
    """Copy an output that the graph lists several times, so that each has its own cotangent."""
    graph = model.graph
    listed: set[ir.Value] = set()
    for i, y in enumerate(list(graph.outputs)):
        if y in listed:
            op = Emit(graph)
            copy = op.set_type_like(op.copy_of(y), y)
            copy.name, copy.meta[marks.LISTED_AS] = op.name(str(y.name)), y
            graph.outputs[i] = copy
        listed.add(y)


def listed_as(y: ir.Value) -> ir.Value:
    """Return the output of which `y` is a copy, if the model lists it several times; else `y`."""
    return current(y.meta.get(marks.LISTED_AS, y))


def _widen(model: ir.Model, asked: _Asked) -> None:
    """Compute in float32 what the model computes in 16 bits, if that is asked for."""
    if asked.wide is not None:
        widen(model, asked.wide)


def _name_rows(model: ir.Model, asked: _Asked) -> None:
    """Give the rows of all inputs one symbol, which inference carries on."""
    if asked.batch is not None:
        name_rows(model.graph, asked.batch, asked.exempt)


def _infer(model: ir.Model, asked: _Asked) -> None:
    """Infer the types and shapes that all following passes read."""
    note_ranks(all_nodes(model.graph))
    if asked.own:
        asked.walk = infer(model, asked.trusts_branches)
    else:
        asked.walk = infer_file(model, asked.trusts_branches, confirmed_by_run(asked.proto))


def _fill_inputs(model: ir.Model, asked: _Asked) -> None:
    """Compute inputs by nodes that the caller writes."""
    if asked.fill is not None:
        asked.fill(model)
        infer(model, asked.trusts_branches, walk=asked.walk)


def _take_branches(model: ir.Model, asked: _Asked) -> None:
    """Replace each If that always takes one branch: the other may not fit the shapes."""
    while take_static_branches(model, asked.walk, asked.keep):
        infer(model, asked.trusts_branches, walk=asked.walk)


def _read_final_states(model: ir.Model, asked: _Asked) -> None:
    """Read the last output of a recurrent layer from its final state."""
    if read_final_states(model):
        infer(model, asked.trusts_branches, walk=asked.walk)


def _rewrite_operators(model: ir.Model, asked: _Asked) -> None:
    """Replace operators without a rule, by their lowerings or by their bodies in ONNX."""
    table, walk = _lowerings(model, asked), asked.walk
    while _lower(model, table, asked) or take_static_branches(model, walk, asked.keep):
        infer(model, asked.trusts_branches, walk=walk)


def _fold_sizes(model: ir.Model, asked: _Asked) -> None:
    """Write what is computed from static lengths as constants, which rules can read."""
    fold_sizes(model.graph, asked.walk)


def _lowerings(model: ir.Model, asked: _Asked) -> Table:
    """Return the lowerings, and the function bodies, to apply before the sweep.

    Those on demand are among them if asked for, or if no type of a result is known without them.
    """
    untyped = {operator_of(n) for n in all_nodes(model.graph) if n.outputs[0].type is None}
    table: dict[tuple[str, str], list[Rewrite]] = {
        key: [one.lowering] for key, one in OPERATORS.items()
        if one.lowering is not None and (asked.on_demand or not one.on_demand or one in untyped)
    }  # fmt: skip
    if asked.keep_dropout and not OPERATORS["", "Dropout"].of_user:
        del table["", "Dropout"]
    for key in operators_with_body():
        table[key] = [*table.get(key, ()), _missing_body]
    table.setdefault(("", "Constant"), [initializer])
    return table


def _missing_body(op: Emit, node: ir.Node) -> list[ir.Value] | None:
    """Write the function body of a node that nothing covers, or that is too new for the runtime."""
    newest = newest_opset()
    covered = operator_of(node).is_covered and (op.opset <= newest or exists(node, newest))
    return None if covered else function_body(op, node)


def _free_outputs(model: ir.Model, asked: _Asked) -> None:
    """Copy graph outputs of nodes that may be replaced later, with their results.

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


def _lower(model: ir.Model, table: Table, asked: _Asked) -> bool:
    """Apply lowerings to a fixed point; return whether nodes are new.

    onnx's inference stops at operators of other domains, and so nodes are inferred one by one on
    the way. One of another domain waits while the rank of its first input is unknown, unless no
    other can be lowered.
    """

    def waiting(function: Rewrite) -> Rewrite:
        return lambda op, node: None if rank(node.inputs[0]) is None else function(op, node)

    before = set(all_nodes(model.graph))
    if not any((node.domain, node.op_type) in table for node in before):
        return False
    inferring = {(domain, ANY): [asked.walk.infer_next] for domain in model.opset_imports}
    foreign = {key: list(map(waiting, table[key])) for key in table if key[0]}
    while any(
        rewrite(model.graph, one, keep=asked.keep)
        for one in ({**inferring, **table, **foreign}, {**inferring, **table})
    ):
        pass
    return any(node not in before for node in all_nodes(model.graph))


def _drop_imports(model: ir.Model, asked: _Asked) -> None:
    """Remove the opset imports of domains that no node uses."""
    functions = model.functions.values()
    graphs = (model.graph, *(function.graph for function in functions))
    used = {n.domain for graph in graphs for n in all_nodes(graph)}
    for domain in model.opset_imports.keys() - used - {f.domain for f in functions} - {""}:
        del model.opset_imports[domain]


# in this order; `_in_working_opset` goes before, as it makes what they are applied to
PASSES: tuple[Callable[[ir.Model, _Asked], None], ...] = (
    _separate_outputs,  # before one of two of the same name is selected
    _free_names,
    _select_outputs,  # before inference: what no output needs may be what nothing covers
    _widen,  # before inference, which then knows the new types everywhere
    _name_rows,
    _infer,
    _fill_inputs,  # of sizes that are inferred, and before lowerings, which drop an empty past
    _take_branches,  # before lowerings, which would refuse what never runs
    _read_final_states,
    _rewrite_operators,
    _fold_sizes,  # behind lowerings, which write sizes as exporters do
    _drop_imports,
    _free_outputs,
    _lower_opset,  # last, when operators of a newer opset have been rewritten
)
