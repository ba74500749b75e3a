"""All that is known of operators: one record for each, one file for each family.

`records.py` has the record: traits, named axes, shapes, elements of short vectors, roles of
operands, rule, lowering, form for members. A file of a family declares its operators and writes
their rules (`registry.py`), with nodes that several families write (`rule_nodes.py`,
`windows.py`); `user_rules.py` has the public `rule` and `lowering`. Records are read by
`outputs.py` (types, shapes and elements of results), `axes.py` (where an axis stands in a result)
and `member_forms.py`; `marks.py` lists the keys of `meta`.
"""

from onnxgrad.operators import (
    attention,
    convolutions,
    elementwise,
    generators,
    indexing,
    layouts,
    losses,
    microsoft,
    microsoft_attention,
    microsoft_grouped,
    microsoft_norms,
    microsoft_products,
    microsoft_quantized,
    ml,
    normalizations,
    pooling,
    products,
    quantization,
    recurrent,
    reductions,
    regions,
    resize,
    sampling,
    sequences,
    spectral,
)
from onnxgrad.operators.records import (
    OPERATORS,
    Naming,
    Operator,
    add_facts,
    made_by,
    names_with_trait,
    operator_of,
)

ELEMENTWISE = names_with_trait("elementwise")
UNARY = names_with_trait("unary")
CHEAP = names_with_trait("cheap")
TRANSCENDENTAL = names_with_trait("transcendental")
VIEWS = names_with_trait("view")
REORDERS = names_with_trait("reorders")
SELECTS = names_with_trait("selects")
PACKS = names_with_trait("packs")
OF_SHAPES = names_with_trait("shape")
ARITHMETIC = names_with_trait("arithmetic")
RANDOM = names_with_trait("random")
BOOLEAN = names_with_trait("boolean")
INT64 = names_with_trait("int64")
RECURRENT = names_with_trait("recurrent")
WITH_SUBGRAPHS = names_with_trait("subgraphs")
# each element of the operand once, in their order or transposed, and cast at most
SAME_ELEMENTS = (VIEWS - OF_SHAPES) | {"Cast", "Transpose"}
