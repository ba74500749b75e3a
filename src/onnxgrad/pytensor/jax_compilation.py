"""Graphs in functions of PyTensor that are compiled to JAX, by the primitive of `onnxgrad.jax`.

PyTensor's module of conversions to JAX imports JAX and sets its precision, so that importing
`onnxgrad.pytensor` must not import it. PyTensor runs rewrites with the tag "jax" only where it
compiles to JAX, before it asks for conversions: such a rewrite adds the conversion of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from pytensor.compile.mode import optdb
from pytensor.graph.rewriting.basic import graph_rewriter

from onnxgrad.pytensor.model_op import GraphOp

_AFTER_ALL_OTHERS = 1000.0  # position among rewrites; they may insert the graphs of functions


@graph_rewriter
def add_conversion_to_jax(fgraph: Any) -> None:
    """Add the conversion of graphs to JAX, if a function that is compiled to JAX has a graph."""
    if any(isinstance(node.op, GraphOp) for node in fgraph.apply_nodes):
        _add_conversion()


@cache
def _add_conversion() -> None:
    """Add the conversion of graphs to JAX; the module has nothing of JAX before."""
    import jax.numpy as jnp
    from pytensor.link.jax.dispatch import jax_funcify

    from onnxgrad.jax.graph_call import CallableGraph, graph_call, jax_dtype

    @jax_funcify.register(GraphOp)
    def call_in_jax(op: GraphOp, **_: Any) -> Callable[..., Any]:
        """Return the function of arrays of JAX that runs the graph of an operation."""
        graph = CallableGraph(op.graph.passes.proto, op.graph.passes.recompute)

        dtypes = [jax_dtype(spec.dtype) for spec in graph.inputs]

        def call_graph(*values: Any) -> Any:
            arrays = map(jnp.asarray, values, dtypes)  # scalar constants are numbers of Python
            outputs = graph_call.bind(*arrays, graph=graph)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return call_graph


optdb.register("onnxgrad_to_jax", add_conversion_to_jax, "jax", position=_AFTER_ALL_OTHERS)
