"""Facts of operators against the schemas of onnx and onnxruntime: a wrong name would be silent."""

from collections.abc import Iterator

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
def test_facts_fit_the_schemas():
    wrong = {key: found for key in DECLARED if (found := [*misfits(key)])}
    assert not wrong
    assert len(DECLARED) > 200


def misfits(key: tuple[str, str]) -> Iterator[str]:
    """Yield which facts of an operator its schema contradicts."""
    operator, schema = OPERATORS[key], newest_schema(*key)
    if schema is None:
        if key[1] not in WITHOUT_SCHEMA:
            yield "no schema"
        return
    operands, variadic = len(schema.inputs), any(x.option.name == "Variadic" for x in schema.inputs)
    if len(operator.roles) > operands and not variadic:
        yield f"roles of {len(operator.roles)} of {operands} operands"
    if set(operator.roles) - set("xafbsorqtphmwckeilv"):
        yield f"unknown roles in {operator.roles!r}"
    if operator.naming is not None:
        attribute, operand, _ = operator.naming
        if attribute not in schema.attributes and not 0 < (operand or 0) < operands:
            yield f"axes named by {attribute!r}, operand {operand}"
    for trait, dtype in (("int64", "tensor(int64)"), ("boolean", "tensor(bool)")):
        if trait in operator.traits and set(schema.outputs[0].types) != {dtype}:
            yield f"{trait} of {schema.outputs[0].types}"
