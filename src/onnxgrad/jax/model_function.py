"""`function`: an ONNX model as a function of JAX, with its weights as a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.partition import RECOMPUTE
from onnxgrad.bridges.function_model import FunctionModel
from onnxgrad.bridges.host_graph import GraphTensor
from onnxgrad.bridges.passes import build_once
from onnxgrad.checks import check_choice
from onnxgrad.errors import not_installed, unknown
from onnxgrad.model.read import ModelLike
from onnxgrad.model.write import save

try:
    import jax
    import jax.numpy as jnp
except ImportError as e:
    raise not_installed("onnxgrad.jax", "jax", "jax") from e

from onnxgrad.jax.graph_call import CallableGraph, graph_call, jax_dtype

Params = Mapping[str, Any]


def function(
    model: ModelLike,
    trainable: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] = (),
    recompute: str = "cheap",
) -> tuple[ModelFunction, dict[str, jax.Array]]:
    """Return an ONNX model as a function of JAX, and its weights as a flat dict of arrays.

    `apply(params, *inputs)` returns the output, or a tuple of outputs. It works inside `jit`,
    `grad`, `value_and_grad`, `jvp`, `vmap`, and their compositions to any order; onnxruntime
    computes on the CPU. `vmap` over rows is one call with more rows, if the rows are proven to be
    independent and the weights are not mapped; else a warning says that the model runs once for
    each element.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names and patterns of `fnmatch`, as "fc*", of the constants in `params`;
            patterns choose among weights. None: the weights that `onnxgrad.trainable` selects.
        freeze: names and patterns of weights that stay constants, though `trainable` selects them.
        recompute: which operators a backward pass computes again to save memory: "none", "cheap"
            or "all"; see `partition`.

    Returns:
        The function, a `ModelFunction`, and the weights of the file by name.

    Raises:
        ValueError: a name or pattern that matches no weight, an unknown `recompute`, an input of
            a type that JAX lacks, a model without outputs of numbers, or a model in float64 while
            `jax_enable_x64` is not set.
        ModelError: `model` cannot be read.
        ImportError: JAX is not installed.

    Examples:
        >>> import jax, onnx, onnxgrad.jax
        >>> apply, params = onnxgrad.jax.function(onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }'''))
        >>> x = jax.numpy.array([[1.0, 2.0]])
        >>> jax.grad(lambda params: apply(params, x).sum())(params)["w"].tolist()
        [1.0, 2.0]
    """
    check_choice("recompute", recompute, RECOMPUTE)
    source = FunctionModel(model, trainable, freeze)
    apply = ModelFunction(source, recompute)
    params = {name: jnp.asarray(array) for name, array in source.weight_arrays().items()}
    return apply, params


class ModelFunction:
    """The function `apply(params, *inputs)` of an ONNX model, made by `function`.

    Attributes:
        input_names: names of the inputs, in order.
        output_names: names of the outputs, in order.
        weight_names: names of the weights, the keys of `params`.
    """

    def __init__(self, source: FunctionModel, recompute: str) -> None:
        self._source, self._recompute = source, recompute
        self.weight_names, self.output_names = source.weight_names, source.output_names
        graph = CallableGraph(source.forward_model, recompute)
        count = len(graph.inputs) - len(self.weight_names)
        self.input_names = [spec.name for spec in graph.inputs[:count]]
        specs = [*graph.inputs[count:], *graph.inputs[:count]]
        floats = [spec for spec in specs if jnp.issubdtype(spec.dtype, jnp.floating)]
        self._dtype = floats[0].dtype if floats else np.dtype("float32")
        self._graphs: dict[np.dtype, CallableGraph] = {self._dtype: graph}

    def __call__(self, params: Params, *inputs: Any) -> Any:
        """Return the output of the model, or a tuple of outputs if there are several.

        Args:
            params: the weights by name; all in one float dtype, in which the graph computes, or in
                the dtypes of the file.
            *inputs: arrays in the order of `input_names`.

        Raises:
            ValueError: weights or inputs missing or unknown, or of another dtype or shape.
            RuntimeError: onnxruntime fails, or has no kernel for an operator in this dtype.
        """
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"the model takes {len(self.input_names)} inputs {self.input_names}, "
                f"not {len(inputs)}"
            )
        weights = self._ordered_weights(params)
        arrays = [*map(_as_jax_array, inputs)]
        graph = self._graph_for_dtypes([*weights, *arrays])
        count = len(arrays)
        specs = [("input", spec) for spec in graph.inputs[:count]]
        specs += [("weight", spec) for spec in graph.inputs[count:]]
        pairs = zip(specs, [*arrays, *weights], strict=True)
        outputs = graph_call.bind(
            *(_cast_to_graph_dtype(*spec, x) for spec, x in pairs), graph=graph
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def to_onnx(self, params: Params, path: str | PathLike | None = None) -> ModelProto:
        """Return the ONNX model with the weights of `params`, otherwise unchanged.

        Args:
            params: the weights by name.
            path: file to which the model is saved as well, by `onnxgrad.save`.
        """
        arrays = map(np.asarray, self._ordered_weights(params))
        model = self._source.with_weights(dict(zip(self.weight_names, arrays, strict=True)))
        if path is not None:
            save(model, path)
        return model

    def __repr__(self) -> str:
        weights = f"{len(self.weight_names)} weights"
        return f"ModelFunction({self.input_names} -> {self.output_names}, {weights})"

    def _ordered_weights(self, params: Params) -> list[jax.Array]:
        """Return the weights in the order of `weight_names`."""
        for name in params:
            if name not in self.weight_names:
                raise unknown("weight", name, self.weight_names)
        if missing := [name for name in self.weight_names if name not in params]:
            raise ValueError(f"params lacks the weights {missing}: pass an array for each")
        return [_as_jax_array(params[name]) for name in self.weight_names]

    def _graph_for_dtypes(self, arrays: Sequence[jax.Array]) -> CallableGraph:
        """Return the graph that computes in the dtype of the weights, else of the inputs."""
        dtypes = {a.dtype for a in arrays[: len(self.weight_names)] or arrays}
        floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        # a file of several dtypes, or of integers only, computes as it was written
        dtype = floats[0] if len(floats) == 1 else self._dtype

        def build_graph() -> CallableGraph:
            proto = self._source.in_precision(ir.DataType.from_numpy(dtype))
            return CallableGraph(proto, self._recompute)

        return build_once(self._graphs, dtype, build_graph)


def _as_jax_array(x: Any) -> jax.Array:
    """Return an array of JAX; `jnp.asarray` takes 0.1 ms for one that is traced already."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _cast_to_graph_dtype(kind: str, spec: GraphTensor, array: jax.Array) -> jax.Array:
    """Return an input or a weight in the dtype of the graph; refuse a conversion of floats."""
    wanted = jax_dtype(spec.dtype)
    if array.dtype == wanted:
        return array
    integers = jnp.issubdtype(array.dtype, jnp.integer) and jnp.issubdtype(wanted, jnp.integer)
    if integers and jnp.can_cast(array.dtype, wanted):
        return array.astype(wanted)
    raise ValueError(
        f"{kind} {spec.name!r} takes {wanted}, not {array.dtype}: convert it with .astype, or "
        "convert all weights and inputs"
    )
