"""That no attribute of any operator with a gradient is left untested.

Every case that has an attribute value is checked in value and gradient in a test of its own; here
each value that the specification lists, and some value of each number, must have such a case.
"""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import defs

from onnxgrad.autodiff.primal.bodies import has_function_body
from onnxgrad.operators import OPERATORS, Operator
from tests.support import covered
from tests.support.paths import DOCS

FLAGS = set(
    """align_corners allowzero antialias causal ceil_mode count_include_pad exclude_outside
    exclusive fmod input_forget interleaved inverse is_causal keepdims largest layout
    linear_before_reset noop_with_empty_axes onesided
    reverse sorted storage_order training_mode transA transB unidirectional upper""".split()
)
AUTO_PAD = {"NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"}
WAYS = {"forward", "reverse", "bidirectional"}
SCATTERED, LOSS = {"none", "add", "mul", "max", "min"}, {"none", "sum", "mean"}
CHOICES = {
    ("AveragePool", "auto_pad"): AUTO_PAD,
    ("Conv", "auto_pad"): AUTO_PAD,
    ("ConvTranspose", "auto_pad"): AUTO_PAD,
    ("LpPool", "auto_pad"): AUTO_PAD,
    ("MaxPool", "auto_pad"): AUTO_PAD,
    ("ScatterElements", "reduction"): SCATTERED,
    ("ScatterND", "reduction"): SCATTERED,
    ("NegativeLogLikelihoodLoss", "reduction"): LOSS,
    ("SoftmaxCrossEntropyLoss", "reduction"): LOSS,
    ("Pad", "mode"): {"constant", "reflect", "edge", "wrap"},
    ("DepthToSpace", "mode"): {"DCR", "CRD"},
    ("TensorScatter", "mode"): {"linear", "circular"},
    ("Gelu", "approximate"): {"none", "tanh"},
    ("GridSample", "mode"): {"linear", "nearest", "cubic"},
    ("GridSample", "padding_mode"): {"zeros", "border", "reflection"},
    ("Resize", "mode"): {"nearest", "linear", "cubic"},
    ("Resize", "nearest_mode"): {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"},
    ("Resize", "keep_aspect_ratio_policy"): {"stretch", "not_larger", "not_smaller"},
    ("Resize", "coordinate_transformation_mode"): {
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
    },
    **{(name, "direction"): WAYS for name in ("RNN", "GRU", "LSTM")},
    ("RoiAlign", "mode"): {"avg", "max"},
    ("RoiAlign", "coordinate_transformation_mode"): {"half_pixel", "output_half_pixel"},
    ("Attention", "qk_matmul_output_mode"): {0, 1, 2, 3},
    ("LinearAttention", "update_rule"): {"linear", "gated", "delta", "gated_delta"},
    ("CausalConvWithState", "activation"): {"none", "silu", "swish"},
    ("SpaceToDepth", "mode"): {"DCR", "CRD"},
    ("Einsum", "equation"): {"ij,jk->ik", "ii->i"},  # any text
}
WITHOUT_EFFECT = {
    ("*", "seed"): "of the draw; the mask is the forward's",
    ("*", "stash_type"): "the precision of the forward",
    ("LinearAttention", "chunk_size"): "a hint",
    ("Cast", "saturate"): "of float8, which has no gradient",
    ("CastLike", "saturate"): "of float8, which has no gradient",
    ("Cast", "round_mode"): "of float8, which has no gradient",
    ("CastLike", "round_mode"): "of float8, which has no gradient",
}


def attributes_of_operators() -> list:
    """Return every attribute of every operator with a gradient."""
    made = []
    for schema in covered.newest_schemas():
        key = (schema.domain, schema.name)
        operator = OPERATORS.get(key, Operator())
        known = operator.rule or operator.lowering or has_function_body(schema)
        if not schema.domain and known and not operator.no_gradient:
            made += [(schema.name, a) for a in schema.attributes.values()]
    return made


def what_lacks(name: str, attribute: defs.OpSchema.Attribute, values: list) -> str:
    """Return which values of an attribute are in no case, or nothing."""
    wanted = CHOICES.get((name, attribute.name))
    if wanted is None and attribute.name in FLAGS:
        wanted = {0, 1}
    if wanted is None and attribute.type == defs.OpSchema.AttrType.STRING:
        return "its choices are not listed here"
    if wanted is not None:
        return ", ".join(map(str, wanted - set(values)))
    different = {json.dumps(v, default=str) for v in values}
    enough = len(different) > (0 if attribute.required else 1)
    return "" if enough else f"no other value than {different}"


def lacking_values(attributes: list, models: list) -> dict[tuple[str, str], str]:
    """Return which values of attributes no model has."""
    tested, lacking = covered.attribute_values(models), {}
    for name, attribute in attributes:
        if not {(name, attribute.name), ("*", attribute.name)} & WITHOUT_EFFECT.keys():
            lack = what_lacks(name, attribute, tested["", name][attribute.name])
            lacking |= {(name, attribute.name): lack} if lack else {}
    return lacking


def test_every_attribute_has_cases():
    """Cases that the onnx package ships are loaded of operators whose rows do not have all."""
    attributes, rows = attributes_of_operators(), covered.row_models()
    assert len(attributes) > 220
    names = {name for name, _ in lacking_values(attributes, rows)}
    shipped = covered.shipped_models(*sorted(names))
    assert lacking_values(attributes, [*rows, *shipped]) == {}


@pytest.mark.sweep
def test_page_of_operators_is_not_stale(monkeypatch):
    """If this fails, run `python docs/operators.py`."""
    page = (DOCS / "operators.md").read_text()
    if f"onnx {onnx.__version__}," not in page:
        pytest.skip("the page was written with another version of onnx")
    monkeypatch.syspath_prepend(str(DOCS))
    import operators

    assert operators.text() == page
