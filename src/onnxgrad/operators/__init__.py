"""All that is known of operators: one record for each, one file for each group of operators.

`records.py` has the record of an operator (traits, axes, shape, rule, lowering, ...) and the
decorators that register rules and lowerings. The other files declare their operators and write the
rules, with nodes that several files write (`rule_nodes.py`, `windows.py`); three lower an operator
to many nodes (`attention.py`, `linear_attention.py` in chunks of tokens, `recurrent.py` to Scans).
`user_rules.py` has the public `rule` and `lowering`. Records are read by `outputs.py` (types,
shapes and elements of results), `axes.py` (which axis of a result an axis of an operand becomes)
and `member_forms.py` (one node for all models of a `TrainerStack`); `marks.py` lists the keys of
`meta`.
"""

from importlib import import_module
from pkgutil import iter_modules

from onnxgrad.operators.records import (
    OPERATORS,
    ListedAxes,
    Operator,
    add_facts,
    made_by,
    names_with_trait,
    operator_of,
)

for _module in iter_modules(__path__):  # each file declares its operators
    import_module(f"{__name__}.{_module.name}")

ELEMENTWISE = names_with_trait("elementwise")
UNARY = names_with_trait("unary")
CHEAP = names_with_trait("cheap")
TRANSCENDENTAL = names_with_trait("transcendental")
VIEWS = names_with_trait("view")
REORDERS = names_with_trait("reorders")
SELECTS = names_with_trait("selects")
OF_SHAPES = names_with_trait("shape")
ARITHMETIC = names_with_trait("arithmetic")
RANDOM = names_with_trait("random")
INT64 = names_with_trait("int64")
RECURRENT = names_with_trait("recurrent")
WITH_SUBGRAPHS = names_with_trait("subgraphs")
# the elements of the operand, each once: in the same order or transposed, perhaps cast
SAME_ELEMENTS = (VIEWS - OF_SHAPES) | {"Cast", "Transpose"}
