"""Models without the elements of large weights, which a trainer keeps elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.model.external import holds_inline, is_empty, nbytes, without_elements
from onnxgrad.model.weights import replace

LARGE = 1 << 28  # bytes of weights that are large, so that memory should hold no copy of them
TENSOR_BYTES = 1 << 16  # least bytes of a weight whose elements are left out


def without_large_weights(model: ModelProto, names: Collection[str] | None = None) -> ModelProto:
    """Return `model`, or if its weights are large a copy without their elements.

    `names` are the initializers that may lose their elements; None: all. Elements in external files
    stay there. The copy declares the same shapes and types.
    """
    chosen = {
        t.name
        for t in model.graph.initializer
        if (names is None or t.name in names) and holds_inline(t, TENSOR_BYTES)
    }
    if sum(nbytes(t) for t in model.graph.initializer if t.name in chosen) <= LARGE:
        return model
    return without_elements(model, lambda tensor: tensor.name in chosen)


def fill_weights(model: ModelProto, arrays: Mapping[str, np.ndarray]) -> ModelProto:
    """Return `model` with the elements, in `arrays`, that `without_large_weights` left out."""
    names = empty_names(model)
    return replace(model, {name: arrays[name] for name in names}) if names else model


def empty_names(model: ModelProto) -> set[str]:
    """Return the names of the initializers that lack their elements."""
    return {t.name for t in model.graph.initializer if is_empty(t)}


def read_elsewhere(values: Iterable[ir.Value], read: Callable[[str], np.ndarray]) -> None:
    """Let `read` give initializers the elements that `without_large_weights` left out, lazily."""
    for value in values:
        name, dtype, shape = str(value.name), value.dtype, value.shape
        if dtype is not None and shape is not None:
            elements = partial(lambda name: ir.tensor(read(name)), name)
            value.const_value = ir.LazyTensor(elements, dtype, shape, name=name)
