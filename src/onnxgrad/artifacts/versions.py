"""Convert models to older opsets and IR versions, for older onnxruntimes."""

from __future__ import annotations

import onnx_ir as ir
from onnx import ModelProto, defs

from onnxgrad.autodiff.primal.bodies import inline_function_body
from onnxgrad.errors import ModelError, escaping
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.rewrite import rewrite
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.model.constants import normalize_domain
from onnxgrad.model.convert import is_non_tensor, to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.opsets import WORKING_OPSET, downgrade_opset, min_ir_version, opset_has_node
from onnxgrad.model.surgery import get_onnx_opset
from onnxgrad.model.traversal import model_nodes
from onnxgrad.model.weights import record_constants

_CHANGED = {"GroupNormalization": 21}  # {operator: the opset that changed its operands}


@escaping()
def convert_to_opset(model: ModelProto, target: int | None) -> ModelProto:
    """Return `model`, or a copy at the opset `target` if the model's opset is newer.

    Operators that are newer are replaced by the function bodies that ONNX has for them.

    Raises:
        ValueError: an opset before 18, in which no gradients are written.
        ModelError: the model cannot be converted.
    """
    if target is None:
        return model
    if isinstance(target, bool) or not isinstance(target, int) or target < WORKING_OPSET:
        raise ValueError(
            f"opset={target!r}: gradients need opset {WORKING_OPSET} or newer: pass a newer opset="
        )
    if get_onnx_opset(model) <= target:
        return model
    if model.functions:
        model = inline_functions(model)
    return downgrade_opset(_expand_newer_operators(model, target), target)


def _expand_newer_operators(model: ModelProto, target: int) -> ModelProto:
    """Return `model` with operators newer than opset `target` replaced by their function bodies.

    Raises:
        ModelError: a newer operator has no function body.
    """
    # models without newer operators are not converted by onnx_ir, which drops some fields
    standard_nodes = [n for n in model_nodes(model) if not normalize_domain(n.domain)]
    if all(n.op_type not in _CHANGED and defs.has(n.op_type, target) for n in standard_nodes):
        return model
    if lost := [y.name for y in model.graph.output if is_non_tensor(y)]:
        raise ModelError(
            f"opset={target}: the outputs {lost} are no tensors: remove them from the model"
        )
    new = to_ir(model)

    def body_of_newer_operator(op: Emit, node: ir.Node) -> list[ir.Value] | None:
        return inline_function_body(op, node) if _is_newer_operator(node, target) else None

    while True:
        infer(new)
        newer = [n for n in all_nodes(new.graph) if _is_newer_operator(n, target)]
        if not newer:
            # so that constants of the function bodies do not count as weights
            record_constants(new, model)
            return to_proto(new)
        if not rewrite(new.graph, {(n.domain, n.op_type): [body_of_newer_operator] for n in newer}):
            node = newer[0]
            raise ModelError(
                f"{node.op_type} (node {node.name!r}, output {node.outputs[0].name!r}) does not "
                f"exist in opset {target}: choose a newer opset, or export the model without it"
            )


def _is_newer_operator(node: ir.Node, target: int) -> bool:
    """Return whether opset `target` lacks the operator of `node`, or its operands' current form."""
    return not opset_has_node(node, target) or (
        not node.domain and target < _CHANGED.get(node.op_type, 0)
    )


def set_ir_version(model: ModelProto, version: int | None) -> ModelProto:
    """Set the IR version of `model`, in place, and return the model; None keeps the version.

    Raises:
        ValueError: the opsets of the model need a newer one.
    """
    if version is None:
        return model
    least = min_ir_version(list(model.opset_import))
    if isinstance(version, bool) or not isinstance(version, int) or version < least:
        opsets = {o.domain or "ai.onnx": o.version for o in model.opset_import}
        raise ValueError(
            f"ir_version={version!r}: the opsets {opsets} need IR version {least} or newer: pass "
            "that version, or an "
            "older opset="
        )
    model.ir_version = version
    return model
