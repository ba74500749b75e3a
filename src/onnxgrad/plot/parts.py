"""Names, attributes and types of nodes and values as text, for all pictures of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod

import onnx_ir as ir
from onnx import AttributeProto, GraphProto, NodeProto, TypeProto, ValueInfoProto, numpy_helper

from onnxgrad.model.constants import normalize_domain
from onnxgrad.training.parameters.aliases import module_of

MOST_ELEMENTS = 10  # elements: longer constants show their type and shape only
_PLAIN = (
    AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.INT, AttributeProto.INTS,
    AttributeProto.STRING, AttributeProto.STRINGS,
)  # fmt: skip


def operator_name(node: NodeProto) -> str:
    """Return a node's operator type, with the domain if it is not ai.onnx."""
    return f"{node.domain}.{node.op_type}" if normalize_domain(node.domain) else node.op_type


def node_metadata(node: NodeProto) -> dict[str, str]:
    """Return the metadata of a node."""
    return {entry.key: entry.value for entry in node.metadata_props}


def module_path(node: NodeProto) -> str:
    """Return the path of the module that a node belongs to, "" outside of modules."""
    return module_of(node.name, node_metadata(node))


def operator_count_texts(counts: Mapping[str, int]) -> list[str]:
    """Return a text such as "2 Relu" for each operator and its count, the most frequent first."""
    return [f"{n} {op}" if n > 1 else op for op, n in Counter(counts).most_common()]


def attribute_texts(node: NodeProto) -> list[str]:
    """Return the attributes of a node that are not graphs, each as `name=value`."""
    graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return [attribute_text(a) for a in node.attribute if a.type not in graphs]


def named_subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Yield (name of the attribute, graph) for the subgraphs of a node."""
    for a in node.attribute:
        yield from ((a.name, g) for g in ([a.g] if a.type == AttributeProto.GRAPH else a.graphs))


def attribute_text(attribute: AttributeProto) -> str:
    """Return an attribute that is not a graph as `name=value`; long values are left out."""
    if attribute.ref_attr_name:
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    if attribute.type == AttributeProto.TENSOR:
        if prod(attribute.t.dims) <= MOST_ELEMENTS:
            return f"{attribute.name}={numpy_helper.to_array(attribute.t).tolist()}"
        return f"{attribute.name}={tensor_type_text(attribute.t.data_type, attribute.t.dims)}"
    if attribute.type not in _PLAIN:
        kind = AttributeProto.AttributeType.Name(attribute.type)
        return f"{attribute.name}={kind.lower()}"
    value = ir.serde.deserialize_attribute(attribute).value
    if not isinstance(value, (list, tuple)):
        return f"{attribute.name}={_format_number(value)}"
    shown = (
        f"{len(value)} values"
        if len(value) > MOST_ELEMENTS
        else ", ".join(map(_format_number, value))
    )
    return f"{attribute.name}=[{shown}]"


def _format_number(value) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def declared_type_text(
    value: ValueInfoProto, of_tensor: Callable[[int, list[int | str] | None], str]
) -> str:
    """Return a value's declared type as text, by `of_tensor` if it is a tensor; "" if unknown."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return kind.removesuffix("_type") if kind else ""
    return of_tensor(value.type.tensor_type.elem_type, declared_shape(value.type.tensor_type))


def declared_shape(tensor: TypeProto.Tensor) -> list[int | str] | None:
    """Return the declared shape of a tensor type; None if no shape is declared."""
    if not tensor.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim
    ]


def tensor_type_text(data_type: int, dims: Iterable[int | str] | None) -> str:
    """Return the text of a dtype and a shape, as `onnx_simple_text_plot` shows them."""
    return f"type=dtype({dtype_name(data_type)!r}) shape={'?' if dims is None else tuple(dims)}"


def dtype_name(data_type: int) -> str:
    """Return the numpy name of an ONNX element type, such as "float32"."""
    name = ir.DataType(data_type).name.lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
