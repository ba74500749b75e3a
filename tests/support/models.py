"""Models for tests: of a text in the language of `onnx.parser`, with the weights that it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import numpy_helper

_VERSIONS = {"ai.onnx.ml": 3, "com.microsoft": 1, "local": 1}  # of the domains that texts may name


def parse_model(
    text: str,
    *,
    opset: int = 18,
    ir_version: int | None = None,
    domains: dict[str, int] | None = None,
    output_shapes: bool = True,
    **weights: ArrayLike,
) -> onnx.ModelProto:
    """Return the model of `text`, whose initializers are `weights`.

    A text without a header `<ir_version: ...>` gets one: `opset`, its IR version, the domains of
    `_VERSIONS` that it names, and `domains`. Lists and Python floats become float32;
    arrays keep their dtype. With `output_shapes=False`, outputs are of unknown rank.
    """
    if not text.lstrip().startswith("<"):
        imports = {
            name: v for name, v in _VERSIONS.items() if f"{name}." in text or f'"{name}"' in text
        }
        imports = {"": opset} | imports | (domains or {})
        listed = ", ".join(f'"{name}": {version}' for name, version in imports.items())
        text = f"<ir_version: {ir_version or _ir_version(opset)}, opset_import: [{listed}]> {text}"
    model = onnx.parser.parse_model(text)
    add_initializers(model, weights)
    if not output_shapes:
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
    return model


def add_initializers(model: onnx.ModelProto, arrays: dict[str, Any]) -> None:
    """Add arrays to the initializers of a model; Python floats and lists of them are float32."""
    for name, value in arrays.items():
        array = np.asarray(value)
        if not isinstance(value, np.ndarray | np.generic) and array.dtype == np.float64:
            array = array.astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))


def _ir_version(opset: int) -> int:
    """Return the IR version of the onnx release that brought an opset."""
    return onnx.helper.OP_SET_ID_VERSION_MAP.get(("ai.onnx", opset), onnx.IR_VERSION)


def operator_names(model: onnx.ModelProto) -> list[str]:
    """Return the operators of the main graph, in the order of its nodes."""
    return [node.op_type for node in model.graph.node]


def initializer_arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the initializers of the main graph by name."""
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
