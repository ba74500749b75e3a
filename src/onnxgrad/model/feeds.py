"""The inputs of a model: required inputs, caches, dtypes in a session, and random values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, ValueInfoProto

from onnxgrad.operators.shapes import dims, static

_SESSION_TYPES = {"float": ir.DataType.FLOAT, "double": ir.DataType.DOUBLE}


def inputs_without_default(model: ModelProto) -> list[Any]:
    """Return the inputs of a model that must be fed: the graph inputs of which no initializer has
    the name.
    """
    graph = model.graph
    stored = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [x for x in graph.input if x.name not in stored]


def names_without_default(model: ModelProto) -> list[str]:
    """Return the names of the inputs of a model that must be fed: see `inputs_without_default`."""
    return [x.name for x in inputs_without_default(model)]


def variable_defaults(model: ModelProto) -> set[str]:
    """Return the names of the inputs that have a default value and a declared axis whose length may
    vary.

    These inputs are data, as tensors of another length may be fed. Other inputs with a default may
    be weights, which some exporters list among the inputs.
    """
    if model.ir_version < 4:  # before IR version 4, a call cannot replace a default
        return set()
    given = set(names_without_default(model))
    optional = [x for x in model.graph.input if x.name not in given]
    return {x.name for x in optional if static(dims(ir.from_proto(x))) is None}


def make_defaults_constants(model: ir.Model) -> None:
    """Remove initializers from the inputs, in place: they become constants of their own shape."""
    for graph in model.graphs():
        for x in [x for x in graph.inputs if x.is_initializer()]:
            graph.inputs.remove(x)
            if x.const_value is not None:
                x.shape = ir.Shape(x.const_value.shape.numpy())


def caches_with_next_values(proto: ModelProto) -> dict[str, str]:
    """Return `{cache input: output that holds the next value of the cache}` of a language model.

    Exporters of language models name the caches of attention by "past" among the inputs and by
    "present" among the outputs, as `past_key_values.0.key` and `present.0.key`.
    """
    outputs = {y.name for y in proto.graph.output}
    pairs = {}
    for x in proto.graph.input:
        present = re.sub("past(_key_values)?", "present", x.name, count=1)
        if present != x.name and present in outputs:
            pairs[x.name] = present
    return pairs


def random_feed(
    inputs: Iterable[Any],
    batch: int = 10,
    empty_dimension: int = 1,
    random_state: int | np.random.Generator | None = None,
) -> dict[str, np.ndarray]:
    """Return random arrays for the inputs of a model, ready to be fed.

    Floats are standard normal. Integers are 0 or 1, so that they are valid labels, masks and
    indices; booleans are false or true, strings "0" or "1".

    Args:
        inputs: `model.graph.input`, or `session.get_inputs()` of an onnxruntime session.
        batch: length of a first axis that is not static, and of all axes with the same symbolic
            dimension.
        empty_dimension: length of any other axis that is not static.
        random_state: seed or generator; None draws a new seed.

    Returns:
        `{name: array}`, each array of the shape and dtype of its input.

    Raises:
        ValueError: an input that is no tensor.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x, int64[N] label) => (float[N,2] y) { y = Exp(x) }''')
        >>> feed = og.random_feed(model.graph.input, batch=4, random_state=0)
        >>> {name: (array.dtype.name, array.shape) for name, array in feed.items()}
        {'x': ('float32', (4, 2)), 'label': ('int64', (4,))}
    """
    rng = np.random.default_rng(random_state)
    described = [_name_type_shape(x) for x in inputs]
    sizes: dict[Any, int] = {shape[0]: batch for _, _, shape in described if shape}

    def axis_length(d: int | str | None, axis: int) -> int:
        if isinstance(d, int) and d >= 0:
            return d
        if axis == 0:
            return batch
        return sizes.get(d, empty_dimension) if isinstance(d, str) and d else empty_dimension

    return {
        name: _random_array(rng, dtype, [axis_length(d, axis) for axis, d in enumerate(shape)])
        for name, dtype, shape in described
    }


def _name_type_shape(x: Any) -> tuple[str, ir.DataType, list[int | str | None]]:
    """Return the name, dtype and shape of a model input, given as an object of onnx, onnx_ir or
    onnxruntime.
    """
    if isinstance(x, ValueInfoProto):
        if x.type.WhichOneof("value") != "tensor_type":
            raise ValueError(f"the input {x.name!r} is no tensor: pass the other inputs only")
        x = ir.from_proto(x)
    if isinstance(x, ir.Value):
        if x.dtype is None:
            raise ValueError(f"the input {x.name!r} has no declared type: declare its type")
        if not isinstance(x.type, ir.TensorType):
            raise ValueError(
                f"the input {x.name!r} is no tensor but {x.type}: pass the other inputs only"
            )
        shape = () if x.shape is None else x.shape
        return str(x.name), x.dtype, [d if isinstance(d, int) else d.value for d in shape]
    dtype = session_dtype(x.type)
    if dtype is None:
        raise ValueError(
            f"the input {x.name!r} is no tensor but {x.type}: pass the other inputs only"
        )
    return x.name, dtype, list(x.shape or ())


def session_dtype(kind: str) -> ir.DataType | None:
    """Return the onnx_ir dtype of the type text `kind` of onnxruntime, such as "tensor(float)";
    None if `kind` is no tensor type.
    """
    match = re.fullmatch(r"tensor\((\w+)\)", kind)
    return match and (_SESSION_TYPES.get(match[1]) or ir.DataType[match[1].upper()])


def _random_array(rng: np.random.Generator, dtype: ir.DataType, shape: list[int]) -> np.ndarray:
    """Return random values of a dtype: normal floats, or zeros and ones for other dtypes."""
    if dtype.is_floating_point():
        return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy())
    drawn = np.asarray(rng.integers(0, 2, shape))
    if dtype == ir.DataType.STRING:
        return drawn.astype(str).astype(object)
    return drawn.astype(dtype.numpy())
