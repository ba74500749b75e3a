"""Facts of operators against the schemas of onnx and onnxruntime: a wrong name would be silent."""

import pytest
from onnx import defs

from onnxgrad.operators import OPERATORS
from onnxgrad.operators.attributes import schemas_of_onnxruntime

# in files of com.microsoft, where onnxruntime has them without a domain
WITHOUT_SCHEMA = {"LayerNormalization", "SimplifiedLayerNormalization"}
DECLARED = sorted(
    key for key, one in OPERATORS.items()
    if key[0] in ("", "com.microsoft") and (one.traits or one.shape or one.roles or one.naming)
)  # fmt: skip


def newest_schema(domain, name):
    """Return the newest schema of an operator, None if neither onnx nor onnxruntime has any."""
    if defs.has(name, domain):
        return defs.get_schema(name, domain=domain)
    return schemas_of_onnxruntime().get((domain, name))


@pytest.mark.newest
@pytest.mark.parametrize("key", DECLARED, ids=":".join)
def test_facts_fit_the_schema(key):
    operator, schema = OPERATORS[key], newest_schema(*key)
    if schema is None:
        assert key[1] in WITHOUT_SCHEMA
        return
    operands, variadic = len(schema.inputs), any(x.option.name == "Variadic" for x in schema.inputs)
    assert len(operator.roles) <= operands or variadic
    assert set(operator.roles) <= set("xafbsorqtphmwck")
    if operator.naming is not None:
        attribute, operand, _ = operator.naming
        named = attribute in schema.attributes
        assert named if operand is None else named or 0 < operand < operands
    for trait, dtype in (("int64", "tensor(int64)"), ("boolean", "tensor(bool)")):
        if trait in operator.traits:
            assert set(schema.outputs[0].types) == {dtype}
