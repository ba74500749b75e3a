"""Any model -> the working dialect, in which rules stay few and short.

The dialect: opset 18 to 26, no local functions, no tensor `Constant` nodes, no initializer that is
also an input, every unnamed input axis named; what has no rule is rewritten to what has one: by a
lowering, or by its function body in the specification.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from onnxgrad.autodiff.primal import function_bodies
from onnxgrad.autodiff.primal.local_functions import inlined, raise_opset
from onnxgrad.autodiff.primal.lowerings import LOWERINGS, ON_DEMAND
from onnxgrad.autodiff.rules import NON_DIFFERENTIABLE, RULES, SUBGRAPH_RULES
from onnxgrad.errors import escaping, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer, infer_behind, name_rows
from onnxgrad.graph.inference.loop_states import note_ranks
from onnxgrad.graph.inference.stated import complete_stated, forget_stated
from onnxgrad.graph.shapes import rank
from onnxgrad.graph.tidy import detach, tidy
from onnxgrad.model.convert import to_ir
from onnxgrad.model.opsets import NEWEST_OPSET, exists
from onnxgrad.reporting import escape_loggers

escape_loggers("onnx_ir")  # of its passes, too

_LISTED_AS = "onnxgrad.listed_as"


@escaping()
def prepare(
    proto: ModelProto,
    batch: str | None = None,
    output: str | None = None,
    keep: Collection[str] = (),
    on_demand: bool = False,
    own: bool = False,
) -> ir.Model:
    """Return `proto` in the working dialect, types and shapes filled in; `proto` stays as it is.

    With `batch`, the first axis of every input that is not of a fixed length gets that symbol:
    the caller knows that they all have the same number of rows. With `output`, only that output
    is kept, and what it needs. `keep` names results of nodes that keep their names.
    With `on_demand`, operators are lowered too that else wait until a gradient arrives. With `own`,
    `proto` was written from a prepared model: the shapes that it states are believed.
    """
    table = LOWERINGS | ON_DEMAND if on_demand else LOWERINGS
    model = to_ir(raise_opset(inlined(proto, lifted=True)))
    RemoveInitializersFromInputsPass()(model)
    _tell_apart(model.graph)
    if output is not None:
        kept = [y for y in model.graph.outputs if y.name == output]
        if not kept:
            raise unknown("output", output, [str(y.name) for y in model.graph.outputs])
        model.graph.outputs[:] = kept
        tidy(model)
    if batch is not None:
        name_rows(model.graph, batch)
    note_ranks(model.graph.all_nodes())
    stated = {} if own else forget_stated(model.graph)
    trust_branches = output is not None  # a loss needs to know, and trainers check what they feed
    infer(model, trust_branches)
    if complete_stated(model.graph, stated):
        infer(model, trust_branches)
    _lower(model, table, keep)
    while function_bodies.expand(
        model, [n for n in model.graph.all_nodes() if _has_no_other_way(model, n)]
    ):
        infer(model, trust_branches)
        _lower(model, table, keep)
    _drop_imports(model)
    _free_outputs(model)
    if all(exists(n, NEWEST_OPSET) for n in model.graph.all_nodes()):
        model.opset_imports[""] = min(model.opset_imports[""], NEWEST_OPSET)
    return model


def _tell_apart(graph: ir.Graph) -> None:
    """Let an output that is listed several times be several values: each has a cotangent."""
    listed: set[ir.Value] = set()
    for i, y in enumerate(list(graph.outputs)):
        if y in listed:
            op = Emit(graph)
            copy = op.set_type_like(op.copy_of(y), y)
            copy.name, copy.meta[_LISTED_AS] = op.name(str(y.name)), y
            graph.outputs[i] = copy
        listed.add(y)


def listed_as(y: ir.Value) -> ir.Value:
    """Return the output that the model lists several times, of which `y` may be a copy."""
    return y.meta.get(_LISTED_AS, y)


def _has_no_other_way(model: ir.Model, node: ir.Node) -> bool:
    """Tell whether `node` has neither rule nor lowering, or is too new for the runtime."""
    key = (node.domain, node.op_type)
    known = (
        key in RULES
        or key in NON_DIFFERENTIABLE
        or key in LOWERINGS
        or node.op_type in SUBGRAPH_RULES
    )
    return not known or not exists(node, min(model.opset_imports[""], NEWEST_OPSET))


def _free_outputs(model: ir.Model) -> None:
    """Let no output of a graph be the result of an operator that may be lowered later."""
    waiting = [n for n in model.graph.all_nodes() if (n.domain, n.op_type) in ON_DEMAND]
    given = [(n.graph, y) for n in waiting for y in n.outputs if y.is_graph_output()]
    main = Emit(model.graph) if given else None
    for graph, y in given:
        assert isinstance(graph, ir.Graph)
        op = Emit(graph, outer=main)
        result = op.set_type_like(op.copy_of(y), y)
        result.name, y.name = y.name, op.name(str(y.name))
        graph.outputs[list(graph.outputs).index(y)] = result


def _lower(model: ir.Model, table: Mapping, keep: Collection[str]) -> None:
    """Rewrite the operators of `table`, and fill in what is known of the shapes then.

    Inference stops at operators of other domains, and so it is carried on from one to the next.
    """
    waiting = [n for n in model.graph.all_nodes() if (n.domain, n.op_type) in table]
    stuck = False  # whether inputs of all that wait stay without a rank
    opset = model.opset_imports[""]
    while waiting:
        left, inferred = list[ir.Node](), set[ir.Node]()
        main = Emit(model.graph)
        emitters: dict[ir.Graph, Emit] = {model.graph: main}
        stops = any(node.domain or not exists(node, opset) for node in waiting)
        for node in waiting:
            if stops:
                infer_behind(node, opset, inferred)
            if node.domain and not stuck and rank(node.inputs[0]) is None:
                left.append(node)
                continue
            assert isinstance(node.graph, ir.Graph)
            op = emitters.setdefault(node.graph, Emit(node.graph, outer=main))
            with op.at(node):
                made = table[node.domain, node.op_type](op, node)
                if made is not None:
                    _replace(op, node, made, keep)
        stuck = len(left) == len(waiting)
        if stops or any(op.wrote for op in emitters.values()):
            infer(model)
        waiting = left


def _drop_imports(model: ir.Model) -> None:
    """Drop the domains of which no operator is left, or never was one: optimizers state many."""
    functions = model.functions.values()
    graphs = (model.graph, *(function.graph for function in functions))
    used = {n.domain for graph in graphs for n in ir.traversal.RecursiveGraphIterator(graph)}
    for domain in model.opset_imports.keys() - used - {f.domain for f in functions} - {""}:
        del model.opset_imports[domain]


def _replace(op: Emit, node: ir.Node, made: list[ir.Value], keep: Collection[str]) -> None:
    for old, new in zip(node.outputs, made, strict=True):
        if old in op.graph.outputs or old.name in keep:
            new = op.copy_of(new)
            new.name, old.name = old.name, None
            new.shape, new.type = old.shape or new.shape, old.type or new.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    detach(node)
    op.graph.remove(node, safe=True)
