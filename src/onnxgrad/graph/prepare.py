"""Any model -> the working dialect, in which rules stay few and short.

The dialect: opset 18 or newer, no local functions, no tensor `Constant` nodes, no initializer that
is also an input, every unnamed input axis named, `ai.onnx.ml` linear operators as arithmetic.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import ModelProto, inliner, version_converter
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from onnxgrad.errors import ModelError, unknown
from onnxgrad.graph import lowering, shapes, weights
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.read import to_ir
from onnxgrad.graph.tidy import tidy

WORKING_OPSET = 18


def prepare(proto: ModelProto, batch: str | None = None, output: str | None = None) -> ir.Model:
    """Return `proto` in the working dialect, types and shapes filled in; `proto` stays as it is.

    With `batch`, the first axis of every input that is not of a fixed length gets that symbol:
    the caller knows that they all have the same number of rows. With `output`, only that output
    is kept, and what it needs.
    """
    made = _inlined(proto)
    weights.lift(made)
    model = to_ir(raise_opset(made))
    RemoveInitializersFromInputsPass()(model)
    if output is not None:
        kept = [y for y in model.graph.outputs if y.name == output]
        if not kept:
            raise unknown("output", output, [str(y.name) for y in model.graph.outputs])
        model.graph.outputs[:] = kept
        tidy(model)
    if batch is not None:
        shapes.name_rows(model.graph, batch)
    shapes.infer(model)
    if _lower(model):
        shapes.infer(model)
    return model


def to_proto(model: ir.Model) -> ModelProto:
    """Return `model` as a `ModelProto` of the lowest IR version that its opsets allow."""
    imports = [onnx.OperatorSetIdProto(domain=d, version=v) for d, v in model.opset_imports.items()]
    model.ir_version = max(8, min(model.ir_version, 13), min_ir_version(imports))
    return ir.to_proto(model)


def min_ir_version(imports: list[onnx.OperatorSetIdProto]) -> int:
    """Return the first IR version that knows these opsets."""
    return onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)  # noqa: TID251


def _inlined(proto: ModelProto) -> ModelProto:
    """Return a copy of `proto` with the nodes of its local functions in place of their calls."""
    if proto.functions:
        return inliner.inline_local_functions(proto, convert_version=True)
    made = ModelProto()
    made.CopyFrom(proto)
    return made


def raise_opset(proto: ModelProto) -> ModelProto:
    """Return `proto`, or where its opset is below the working one, a copy at that."""
    version = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if version >= WORKING_OPSET:
        return proto
    made = _inlined(proto)  # the converter drops functions
    if not version:  # only ai.onnx.ml so far: the gradient will need the standard operators
        made.opset_import.add(domain="", version=WORKING_OPSET)
        return made
    made.ir_version = max(made.ir_version, 8)
    try:
        return version_converter.convert_version(made, WORKING_OPSET)
    except Exception as e:  # the converter raises several undeclared types
        raise ModelError(f"opset {version} cannot be raised to {WORKING_OPSET}: {e}") from e


def _lower(model: ir.Model) -> bool:
    """Rewrite the operators of `lowering.LOWERINGS`; tell whether nodes were written."""
    found = [n for n in model.graph if (n.domain, n.op_type) in lowering.LOWERINGS]
    op = Emit(model.graph)
    with op:
        for node in found:
            op.before = node
            made = lowering.LOWERINGS[node.domain, node.op_type](op, node)
            if made is not None:
                _replace(model.graph, op, node, made)
    return op.wrote


def _replace(graph: ir.Graph, op: Emit, node: ir.Node, made: list[ir.Value]) -> None:
    for old, new in zip(node.outputs, made, strict=True):
        if old in graph.outputs:
            new = op.emit("Identity", [new], {}, fresh=True)
            new.name, old.name = old.name, None
            new.shape, new.dtype = old.shape, old.dtype
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
