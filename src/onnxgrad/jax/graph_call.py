"""The call of a graph as two JAX primitives, with rules for `jit`, `jvp`, `grad` and `vmap`.

`graph_call` computes the outputs of a graph by onnxruntime. Its rule for `jvp` calls the forward
pass, which also returns the tensors that the backward pass reads, and `graph_tangent`, which is
linear in the tangents: its transpose is the call of the backward pass, again a `graph_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from onnx import ModelProto

from onnxgrad.autodiff.row_proofs import (
    BATCH_SYMBOL,
    UnprovenRows,
    assumed_lengths,
    walk_rows,
)
from onnxgrad.bridges.host_graph import HostGraph, Shapes
from onnxgrad.bridges.passes import ModelPasses, PassModels, build_once
from onnxgrad.data.arrays import shape_text
from onnxgrad.errors import printable_lines
from onnxgrad.operators.shapes import dims
from onnxgrad.reporting import warn_once

RowAxes = tuple[list[int | None], list[int]]  # of the inputs, and of the outputs


class CallableGraph(HostGraph):
    """A graph that JAX calls; calls of one `CallableGraph` are the same operation for JAX.

    Raises:
        ValueError: a float input has 64 bits, which JAX has only if `jax_enable_x64` is set.
    """

    def __init__(self, proto: ModelProto, recompute: str) -> None:
        super().__init__(proto, recompute)
        floats = [spec for spec in self.inputs if np.issubdtype(spec.dtype, np.floating)]
        if wide := [spec.name for spec in floats if jax_dtype(spec.dtype) != spec.dtype]:
            raise ValueError(
                f"{wide[0]!r} is float64, which JAX has only after "
                "jax.config.update('jax_enable_x64', True)"
            )
        self._row_axes: dict[str, RowAxes | None] = {}
        self.jitted = jax.jit(partial(graph_call.bind, graph=self))

    def passes_for(self, needed: tuple[bool, ...], shapes: Shapes) -> ModelPasses:
        """Return the passes whose saved tensors have static shapes, as JAX demands.

        A Loop saves as many states as it has iterations: its backward pass computes them again.
        """
        models = self.passes.pass_models(needed)
        inferred = self.derived_graph("forward", models.forward).inferred_shapes(shapes)
        saves_static = all(inferred[i] is not None for i in models.saved)
        return self.passes if saves_static else self._recomputing_passes

    @cached_property
    def _recomputing_passes(self) -> ModelPasses:
        """The passes that save the inputs only."""
        return ModelPasses(self.passes.proto, "all")

    def row_axes(self) -> RowAxes | None:
        """Return the row axes of the inputs and of the outputs; None if rows are not independent.

        An input without rows, such as a weight, has None. A warning names the node that mixes the
        rows.
        """
        return build_once(self._row_axes, "", self._find_row_axes)

    def _find_row_axes(self) -> RowAxes | None:
        firsts = [spec.shape[0] for spec in self.inputs if spec.shape]
        symbol = next((d for d in firsts if isinstance(d, str)), None)
        if symbol is None:
            first = self.inputs[0]
            warn_once(
                "vmap runs the model once for each element, as the number of rows is fixed: "
                f"{first.name!r} has the shape {shape_text(first.shape or ())}"
            )
            return None
        axes = {
            spec.name: list(spec.shape).index(symbol)
            if spec.shape and list(spec.shape).count(symbol) == 1
            else None
            for spec in self.inputs
        }
        model = ir.from_proto(self.passes.proto)
        lengths = assumed_lengths(model.graph.inputs)
        try:
            walk = walk_rows(model, axes, lengths, model.graph.outputs)
            states = [walk.states.get(y) for y in model.graph.outputs]
            for y, state in zip(model.graph.outputs, states, strict=True):
                whole = state is not None and (dims(y) or ())[state.axis : state.axis + 1]
                if not walk.has_rows(y) or whole != (BATCH_SYMBOL,):
                    raise UnprovenRows(f"output {y.name!r} does not have one row for each row")
        except UnprovenRows as e:
            warn_once(
                f"vmap runs the model once for each element, as its rows are not independent: {e}"
            )
            return None
        return [axes[spec.name] for spec in self.inputs], [s.axis for s in states if s is not None]


def jax_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of an array in JAX: it has no 64 bits unless `jax_enable_x64` is set."""
    return jax.dtypes.canonicalize_dtype(dtype)


# -- the call of a graph ------------------------------------------------------------------------

graph_call = Primitive("onnx_graph_call")
graph_call.multiple_results = True


@graph_call.def_impl
def _run_jitted_call(*arrays: Any, graph: CallableGraph) -> list[jax.Array]:
    return graph.jitted(*arrays)


@graph_call.def_abstract_eval
def _abstract_outputs(*avals: Any, graph: CallableGraph) -> list[jax.core.ShapedArray]:
    shapes = graph.output_shapes(tuple(tuple(aval.shape) for aval in avals))
    return [
        jax.core.ShapedArray(shape, jax_dtype(spec.dtype))
        for shape, spec in zip(shapes, graph.outputs, strict=True)
    ]


def _call_on_host(*arrays: Any, graph: CallableGraph) -> list[jax.Array]:
    """Return the outputs of a graph, computed by a callback on the memory of JAX."""

    def callback(_: Any, places: Any, *buffers: Any) -> None:
        try:
            graph.run_into([*map(np.asarray, buffers)], [*map(np.asarray, places)])
        except Exception as e:
            raise RuntimeError(printable_lines(e)) from None

    graph.open_session(tuple(a.shape for a in arrays))  # an operator without kernel is an error now
    results = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        for aval in _abstract_outputs(*arrays, graph=graph)
    ]
    return buffer_callback(callback, results)(*arrays)


def _refuse_platform(*_: Any, **__: Any) -> list[jax.Array]:
    raise NotImplementedError(
        "onnxgrad.jax computes on the CPU: call it under jax.default_device(jax.devices('cpu')[0])"
    )


mlir.register_lowering(graph_call, mlir.lower_fun(_refuse_platform, multiple_results=True))
mlir.register_lowering(
    graph_call, mlir.lower_fun(_call_on_host, multiple_results=True), platform="cpu"
)


def _call_tangents(
    primals: Sequence[Any], tangents: Sequence[Any], *, graph: CallableGraph
) -> tuple[list[Any], list[Any]]:
    """Return the outputs, and their tangents as a linear function of the tangents of the inputs."""
    needed = tuple(not isinstance(t, ad.Zero) for t in tangents)
    passes = graph.passes_for(needed, tuple(jax.typeof(x).shape for x in primals))
    models = passes.pass_models(needed)
    forward = graph.derived_graph("forward", models.forward)
    results = graph_call.bind(*primals, graph=forward)
    outputs = results[: len(graph.outputs)]
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outputs]
    if models.backward is None:
        return outputs, zeros
    found = graph_tangent.bind(
        *primals,
        *(results[i] for i in models.saved),
        *(tangents[i] for i in models.indices),
        graph=graph,
        passes=passes,
        needed=needed,
    )
    for i, tangent in zip(graph.passes.float_outputs, found, strict=True):
        zeros[i] = tangent
    return outputs, zeros


ad.primitive_jvps[graph_call] = _call_tangents


def _call_with_batch_axis(
    arrays: Sequence[Any], axes: Sequence[int | None], *, graph: CallableGraph
) -> tuple[list[Any], list[int]]:
    """Return the outputs for one more axis: as more rows of one call, else by a loop."""
    [size] = {a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None}
    found = graph.row_axes()
    if found is None:
        return _call_for_each_element(arrays, axes, graph)
    mapped = zip(graph.inputs, found[0], axes, strict=True)
    if whole := [x.name for x, row, axis in mapped if row is None and axis is not None]:
        warn_once(f"vmap runs the model once for each element, as it maps {whole[0]!r}, not rows")
        return _call_for_each_element(arrays, axes, graph)
    rowed, row_of_output = found
    joined = []
    for a, axis, row in zip(arrays, axes, rowed, strict=True):
        if row is not None:
            a = jnp.broadcast_to(jnp.expand_dims(a, 0), (size, *a.shape)) if axis is None else a
            a = jnp.moveaxis(a, axis or 0, row)
            a = a.reshape(*a.shape[:row], -1, *a.shape[row + 2 :])
        joined.append(a)
    results = graph_call.bind(*joined, graph=graph)
    split = [
        y.reshape(*y.shape[:row], size, y.shape[row] // size, *y.shape[row + 1 :])
        for y, row in zip(results, row_of_output, strict=True)
    ]
    return split, row_of_output


def _call_for_each_element(
    arrays: Sequence[Any], axes: Sequence[int | None], graph: CallableGraph
) -> tuple[list[Any], list[int]]:
    """Return the outputs for one more axis, by a call for each index of this axis."""
    moved = [
        jnp.moveaxis(a, axis, 0) for a, axis in zip(arrays, axes, strict=True) if axis is not None
    ]

    def call_at(parts: list[Any]) -> list[Any]:
        rest = iter(parts)
        full = [a if axis is None else next(rest) for a, axis in zip(arrays, axes, strict=True)]
        return graph_call.bind(*full, graph=graph)

    results = jax.lax.map(call_at, moved)
    return results, [0] * len(results)


batching.primitive_batchers[graph_call] = _call_with_batch_axis

# -- the tangents of a call ---------------------------------------------------------------------

graph_tangent = Primitive("onnx_graph_tangent")
graph_tangent.multiple_results = True


def _split_tangent_operands(
    values: Sequence[Any], models: PassModels, graph: CallableGraph
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the operands of `graph_tangent`: inputs, saved tensors, and tangents of inputs."""
    count, saved = len(graph.inputs), len(models.saved)
    return (
        list(values[:count]),
        list(values[count : count + saved]),
        list(values[count + saved :]),
    )


def _tangent_by_call(
    *values: Any, graph: CallableGraph, passes: ModelPasses, needed: tuple[bool, ...]
) -> list[Any]:
    """Return the tangents of the float outputs, by the model of tangents."""
    models = passes.pass_models(needed)
    inputs, _, tangents = _split_tangent_operands(values, models, graph)
    model = passes.tangent_model(models.names)
    results = graph_call.bind(*inputs, *tangents, graph=graph.derived_graph("tangent", model))
    return results[len(graph.outputs) :]


graph_tangent.def_impl(_tangent_by_call)
mlir.register_lowering(graph_tangent, mlir.lower_fun(_tangent_by_call, multiple_results=True))


@graph_tangent.def_abstract_eval
def _abstract_tangents(
    *avals: Any, graph: CallableGraph, passes: ModelPasses, needed: tuple[bool, ...]
) -> list[jax.core.ShapedArray]:
    del passes, needed
    outputs = _abstract_outputs(*avals[: len(graph.inputs)], graph=graph)
    return [outputs[i] for i in graph.passes.float_outputs]


def _tangents_of_tangents(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    graph: CallableGraph,
    passes: ModelPasses,
    needed: tuple[bool, ...],
) -> tuple[list[Any], list[Any]]:
    """Return the tangents, and their tangents: the model of tangents is a graph, too."""
    models = passes.pass_models(needed)
    inputs, _, directions = _split_tangent_operands(primals, models, graph)
    of_inputs, _, of_directions = _split_tangent_operands(tangents, models, graph)
    model = passes.tangent_model(models.names)
    outputs, found = _call_tangents(
        [*inputs, *directions],
        [*of_inputs, *of_directions],
        graph=graph.derived_graph("tangent", model),
    )
    return outputs[len(graph.outputs) :], found[len(graph.outputs) :]


ad.primitive_jvps[graph_tangent] = _tangents_of_tangents


def _cotangents_of_tangents(
    cotangents: Sequence[Any],
    *values: Any,
    graph: CallableGraph,
    passes: ModelPasses,
    needed: tuple[bool, ...],
) -> list[Any]:
    """Return the cotangents of the tangents, by the backward pass."""
    models = passes.pass_models(needed)
    assert models.backward is not None
    inputs, saved, _ = _split_tangent_operands(values, models, graph)
    readable = [*inputs, *saved, *map(ad.instantiate_zeros, cotangents)]
    gradients = graph_call.bind(
        *(readable[i] for i in models.reads), graph=graph.derived_graph("backward", models.backward)
    )
    return [None] * (len(inputs) + len(saved)) + list(gradients)


ad.primitive_transposes[graph_tangent] = _cotangents_of_tangents


def _tangent_with_batch_axis(
    values: Sequence[Any], axes: Sequence[int | None], **options: Any
) -> tuple[list[Any], list[int]]:
    """Return the tangents for one more axis, by the call of the model of tangents."""
    call = partial(_tangent_by_call, **options)
    results = jax.vmap(call, in_axes=tuple(axes))(*values)
    return results, [0] * len(results)


batching.primitive_batchers[graph_tangent] = _tangent_with_batch_axis
