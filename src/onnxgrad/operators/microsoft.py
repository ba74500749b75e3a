"""What the operators of com.microsoft share, which onnxruntime adds to ONNX.

onnx infers nothing of them. Their types follow from their schemas, which onnxruntime lists, and
their shapes from the records, by its documentation (ContribOperators.md). Shapes of operators
without a function, and lengths that no operand has, such as the length of a cache that grows, stay
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
from onnx import NodeProto, defs

from onnxgrad.operators.attributes import has_kernel, schemas_of_onnxruntime
from onnxgrad.operators.records import (
    DOMAIN_REMEDIES,
    Lowering,
    declare_operators,
    lowering,
    operator_of,
)
from onnxgrad.operators.shapes import Dim, Dims, dims

DOMAIN = "com.microsoft"

DTYPES: dict[str, ir.DataType] = {  # by the names of types in schemas
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(int32)": ir.DataType.INT32,
    "tensor(int64)": ir.DataType.INT64,
    "tensor(bool)": ir.DataType.BOOL,
    "tensor(string)": ir.DataType.STRING,
}
_QUANTIZED = re.compile(r"Q[A-Z]|.*Quant|.*NBits|.*Bnb4|.*FpQ4|.*Integer|NhwcMaxPool")


# -- types and shapes of outputs ------------------------------------------------------------------


def result_types(node: ir.Node) -> list[ir.TypeProtocol | None]:
    """Return the types of the outputs of a node by its schema, None where the operands do not
    determine it.

    An optional output whose type no operand has, as the statistics of a normalization, is float32.
    """
    schema = schemas_of_onnxruntime().get((node.domain, node.op_type))
    if schema is None:
        return []
    # the last operand may be variadic
    formal = [*schema.inputs, *schema.inputs[-1:] * len(node.inputs)]
    pairs = zip(formal, node.inputs, strict=False)
    by_name = {f.typeStr: x.type for f, x in reversed([*pairs]) if x is not None and x.type}
    found = []
    for i, y in enumerate(schema.outputs):
        allowed = {"tensor(float)"} if i and "tensor(float)" in y.types else y.types
        dtype = DTYPES.get(next(iter(allowed))) if len(allowed) == 1 else None
        found.append(by_name.get(y.typeStr) or (None if dtype is None else ir.TensorType(dtype)))
    return found


def result_shapes(node: ir.Node) -> list[Dims | None]:
    """Return the shapes of the first outputs of a node by its record; an empty list if they are
    unknown.
    """
    function = operator_of(node).shape
    if function is None:
        return []
    try:
        found = function(node.inputs, {a.name: a.value for a in node.attributes.values()})
    except (IndexError, ValueError, TypeError):  # invalid operands: the session will say why
        return []
    return found if isinstance(found, list) else [found]


def node_of_equal_shape(node: ir.Node) -> NodeProto | None:
    """Return a standard ONNX node whose result has the shape of the result of `node`; None if there
    is no such operator.
    """
    op_type, count = operator_of(node).shape_like
    if not op_type or bool(node.attributes.get_int("channels_last", 0)):
        return None
    proto, known = ir.to_proto(node), defs.get_schema(op_type).attributes
    attributes = [a for a in proto.attribute if a.name in known]
    proto.domain, proto.op_type = "", op_type
    del proto.input[count:], proto.attribute[:]
    proto.attribute.extend(attributes)
    return proto


# -- declarations of contrib operators, and functions for their shapes ----------------------------


# for operators of com.microsoft, the contrib operators of onnxruntime
declare_contrib = partial(declare_operators, domain=DOMAIN)


def contrib_lowering(names: str, traits: str = "", **fields: Any) -> Callable[[Lowering], Lowering]:
    """Declare operators of com.microsoft, and register the decorated function as their lowering."""
    declare_contrib(names, traits, **fields)
    return lowering(*names.split(), domain=DOMAIN)


def shape_of_first_twice(inputs: Sequence, _attributes: Mapping[str, Any]) -> list[Dims | None]:
    """Return the shape of the first operand, for each of two outputs."""
    return [dims(inputs[0])] * 2


def static_product(length: Dim, factor: Dim) -> Dim:
    """Return the product of two lengths, None if one is not static."""
    return length * factor if isinstance(length, int) and isinstance(factor, int) else None


def divide_length(length: Dim, parts: int) -> Dim:
    """Return the length of each of the equal parts of an axis, None if it is not static."""
    return length // parts if isinstance(length, int) else None


def has_output(node: ir.Node, index: int) -> bool:
    """Return whether `node` has the optional output `index`."""
    return index < len(node.outputs) and bool(node.outputs[index].name)


# -- operators without gradient -------------------------------------------------------------------


def default_remedy(node: ir.Node) -> str:
    """Return the advice to users about an operator of onnxruntime without gradient, by its name."""
    if _QUANTIZED.match(node.op_type):
        return "it computes with quantized numbers; use the model as it was before quantization"
    if not has_kernel(node.domain, node.op_type):
        return "the installed onnxruntime does not run it on a CPU; write it with operators of ONNX"
    level = "ORT_ENABLE_EXTENDED" if node.domain.endswith("nchwc") else "ORT_ENABLE_BASIC"
    return f"use the model as it was before optimization, or optimized at {level} at most"


DOMAIN_REMEDIES[DOMAIN] = default_remedy
declare_contrib(
    "Solve",
    fitted=(
        "is an operator that onnxruntime does not have, so that the model does not run: select "
        "outputs in front of it, or use another classifier than the GaussianProcessClassifier of "
        "scikit-learn"
    ),
)
