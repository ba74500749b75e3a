"""The ranges of results that records declare, against results of onnxruntime."""

import numpy as np
import pytest
from onnx import defs

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.losses.value_range import value_range
from onnxgrad.operators import OPERATORS
from tests.support.models import parse_model
from tests.support.running import run

NAMES = sorted(name for (domain, name), one in OPERATORS.items() if one.value_range and not domain)
BODIES = {
    "Clip": ("y = Clip(OPERAND, half, two)", "y = Clip(OPERAND, , half)"),
    "MaxPool": ("y, i = MaxPool <kernel_shape = [2, 2], pads = [1, 1, 1, 1]>(OPERAND)",),
    "Resize": (
        "y = Resize(OPERAND, , scales)",
        'y = Resize <mode = "linear">(OPERAND, , scales)',
        'y = Resize <mode = "cubic">(OPERAND, , scales)',
    ),
    "Where": ("c = Less(x, z)  y = Where(c, OPERAND, b)",),
}
ONE_BOUND = ("Exp", "Log", "Relu", "Reciprocal", "Div")  # of some operands, or none


@pytest.mark.parametrize("name", NAMES)
def test_results_are_in_the_declared_range(name):
    """The operands are known to be between -1.5 and 2, or between 0.5 and 3."""
    schema, rng = defs.get_schema(name), np.random.default_rng(0)
    variadic = schema.inputs[-1].option == defs.OpSchema.FormalParameterOption.Variadic
    one = f"y = {name}(OPERAND)"
    bodies = BODIES.get(
        name, [one.replace(")", ", b)") if variadic or schema.min_input == 2 else one]
    )
    x, z = 4 * rng.normal(size=(2, 2, 3, 4, 4)).astype("f")
    known = 0
    for body in bodies:
        for operand in "ab":
            made = parse_model(
                f"""f (float[2,3,4,4] x, float[2,3,4,4] z) => (float[A,B,C,D] y) {{
                a = Clip(x, low, two)  b = Clip(z, half, three)
                {body.replace("OPERAND", operand)} }}""",
                output_shapes=False, low=-1.5, half=0.5, two=2.0, three=3.0,
                scales=np.float32([1, 1, 2, 2]),
            )  # fmt: skip
            low, high = value_range(prepare(made).graph.outputs[0])
            (y,) = run(made, x=x, z=z)
            assert low <= np.nanmin(y) + 1e-6
            assert np.nanmax(y) - 1e-6 <= high
            known += np.isfinite(low) or np.isfinite(high)
    assert known
