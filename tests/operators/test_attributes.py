"""Attributes that a node does not state have the defaults of the schemas."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import AttributeProto, defs
from onnx.helper import get_attribute_value

from onnxgrad.operators.attributes import (
    default_attribute,
    float_attribute,
    int_attribute,
    ints_attribute,
    schemas_of_onnxruntime,
    string_attribute,
)
from tests.support.errors import naming

OLDEST_OPSET = 18  # of a prepared graph

READERS = {
    AttributeProto.INT: int_attribute,
    AttributeProto.INTS: lambda node, name: [*ints_attribute(node, name)],
    AttributeProto.FLOAT: float_attribute,
    AttributeProto.STRING: lambda node, name: string_attribute(node, name).encode(),
    AttributeProto.STRINGS: lambda node, name: [
        text.encode() for text in default_attribute(node.domain, node.op_type, name).as_strings()
    ],
}


def stated_default(attribute):
    """Return the default that an attribute of a schema of onnx states, None if it has none."""
    return get_attribute_value(attribute.default_value) if attribute.default_value.type else None


def test_a_node_of_onnx_without_an_attribute_has_the_default_of_its_schema():
    checked = 0
    for schema in defs.get_all_schemas():
        node = ir.Node(schema.domain, schema.name, [])
        for name, attribute in schema.attributes.items():
            expected = stated_default(attribute)
            if expected is None:
                with pytest.raises(KeyError, match=naming(f"{schema.name} lacks", f"'{name}'")):
                    default_attribute(schema.domain, schema.name, name)
            else:
                assert READERS[attribute.default_value.type](node, name) == expected
                checked += 1
    assert checked > 200


def test_no_default_has_changed_since_the_oldest_opset_of_a_prepared_graph():
    changed = set()
    for schema in defs.get_all_schemas_with_history():
        newest = defs.get_schema(schema.name, domain=schema.domain)
        if not schema.domain and schema.since_version < OLDEST_OPSET:
            schema = defs.get_schema(schema.name, OLDEST_OPSET)
        for name in schema.attributes.keys() & newest.attributes.keys():
            before, now = (stated_default(s.attributes[name]) for s in (schema, newest))
            if before != now:
                changed.add((schema.name, name, before, now))
    assert changed == {("GridSample", "mode", b"bilinear", b"linear")}


@pytest.mark.parametrize(
    ("op_type", "name", "expected"),
    [  # as ContribOperators.md of onnxruntime states them
        ("BiasSoftmax", "axis", 1),
        ("CDist", "metric", "sqeuclidean"),
        ("FusedMatMul", "alpha", 1.0),
        ("FusedMatMul", "transBatchA", 0),
        ("GroupNorm", "channels_last", 1),
        ("GroupQueryAttention", "local_window_size", -1),
        ("GroupQueryAttention", "smooth_softmax", -1),
        ("MatMulNBits", "bits", 4),
        ("QuickGelu", "alpha", float(np.float32(1.702))),
        ("SkipLayerNormalization", "epsilon", float(np.float32(1e-12))),
    ],
)
def test_a_node_of_onnxruntime_has_the_default_of_its_schema(op_type, name, expected):
    assert default_attribute("com.microsoft", op_type, name).value == expected


def test_every_default_of_onnxruntime_can_be_read():
    checked = 0
    for (domain, op_type), schema in schemas_of_onnxruntime().items():
        for name, attribute in schema.attributes.items():
            if domain == "com.microsoft" and attribute._default_value:
                expected = AttributeProto.FromString(attribute._default_value)
                node = ir.Node(domain, op_type, [])
                assert READERS[expected.type](node, name) == get_attribute_value(expected)
                checked += 1
    assert checked > 200


def test_what_a_node_states_goes_before_the_default():
    x = ir.Value(name="x")
    node = ir.node("Resize", [x], {"antialias": 1, "cubic_coeff_a": -0.5, "mode": "cubic"})
    assert int_attribute(node, "antialias") == 1
    assert float_attribute(node, "cubic_coeff_a") == -0.5
    assert string_attribute(node, "mode") == "cubic"
    assert string_attribute(node, "nearest_mode") == "round_prefer_floor"
    normalization = ir.node("MeanVarianceNormalization", [x], {"axes": [1]})
    assert list(ints_attribute(normalization, "axes")) == [1]


def test_an_operator_without_schema_has_no_default():
    with pytest.raises(KeyError, match=naming("Wave", "'axis'", "write it")):
        int_attribute(ir.Node("doc.unknown", "Wave", []), "axis")


def test_an_operator_of_a_user_has_the_defaults_of_its_namesake():
    assert int_attribute(ir.Node("doc.unknown", "Softmax", []), "axis") == -1
