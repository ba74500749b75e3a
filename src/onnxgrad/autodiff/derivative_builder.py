"""A model to which sweeps are added, and loops over sweeps, for higher derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import (
    choose_inputs,
    make_inputs_constants,
    make_weights_inputs,
    path_ends_text,
    require_equal_lengths,
    warn_of_dropped_outputs,
)
from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.primal.prepare import has_default, prepare, restore_defaults, values_by_name
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import drop_unused, latest_replacement, take_apart_after, tidy
from onnxgrad.graph.traversal import nodes_after, subgraphs
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_proto
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.surgery import replace_maps_by_tensors
from onnxgrad.operators import operator_of
from onnxgrad.operators.attributes import int_attribute
from onnxgrad.operators.shapes import dims, is_real, rank
from onnxgrad.reporting import logger

Result = tuple[str, ir.Value]  # the name of an output, and the value
Derivatives = Mapping[ir.Value, ir.Value]  # {value: its derivative or cotangent}


class Builder:
    """The graph of a prepared model, its outputs, and the values to differentiate with respect to.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights, which become inputs; None: all that the outputs depend on.
        inputs: names of inputs; None: all floats that the outputs depend on.
        outputs: names of the float outputs to keep and differentiate; None: keep all outputs, and
            differentiate the floats.
        rows: whether the chosen inputs have the same number of rows, even if their first axes have
            different symbols.
        own: `model` was written from a prepared one: the shapes that it states are true.

    Attributes:
        wrt: the chosen inputs, then the weights.
        inputs: the chosen inputs.
        kept: the outputs of the model, which precede the derivatives.
        differentiated: the outputs among `kept` that are differentiated.
        dummies: `{input: output of its shape}`, inputs that `finish` removes. Outputs may depend on
            their shapes, and on none of their values.
    """

    def __init__(
        self,
        model: ModelLike,
        weights: Sequence[str] | None,
        inputs: Sequence[str] | None,
        outputs: Sequence[str] | None = None,
        rows: bool = False,
        own: bool = False,
    ) -> None:
        self.origin, maps = replace_maps_by_tensors(read(model))
        self.model = prepare(self.origin, own=own, defaults=True)
        chosen = self._inputs_to_differentiate(inputs, rows)
        if rows and len({shape[0] for x in chosen if (shape := dims(x))}) > 1:
            names = {str(d) for x in self.model.graph.inputs for d in dims(x) or ()}
            symbol = next(s for s in ("rows", "rows_of_inputs") if s not in names)
            self.model = prepare(self.origin, batch=symbol, defaults=True)
            chosen = self._inputs_to_differentiate(inputs, rows)
        self.graph = self.model.graph
        take_apart_after(self, self.graph)
        self._original_inputs = list(self.graph.inputs)
        self._keep_outputs(None if outputs is None else [maps.get(y, y) for y in outputs])
        self.inputs, chosen_weights = chosen, make_weights_inputs(self.origin, self.graph, weights)
        self.wrt = [*chosen, *chosen_weights]
        require_unique_names("input or weight", [str(x.name) for x in self.wrt])
        by_default = [chosen if inputs is None else (), chosen_weights if weights is None else ()]
        self._by_default = [x for values in by_default for x in values]
        self.kept = list(self.graph.outputs)
        self.differentiated = [y for y in self.kept if is_real(y)]
        self.op = Emit(self.graph)
        self.dummies: dict[ir.Value, ir.Value] = {}

    def _inputs_to_differentiate(self, names: Sequence[str] | None, rows: bool) -> list[ir.Value]:
        """Return the inputs to differentiate w.r.t.: the inputs called `names`, or by default
        all floats.
        """
        chosen = choose_inputs(self.model.graph, names)
        return [x for x in chosen if names is not None or not rows or not has_default(x)]

    def _keep_outputs(self, outputs: Sequence[str] | None) -> None:
        """Keep only the outputs of these names, which must be floats; None keeps all tensors."""
        if outputs is None:
            warn_of_dropped_outputs(self.origin)
            return
        chosen = values_by_name(
            "output", require_unique_names("output", outputs), self.graph.outputs
        )
        for y in chosen:
            if not is_real(y):
                raise ValueError(f"output {y.name!r} holds {y.dtype}: name float outputs only")
        self.graph.outputs[:] = chosen

    def add_input_like(self, x: ir.Value, suffix: str) -> ir.Value:
        """Return a new input `<x>_<suffix>` of the shape and dtype of `x`."""
        new = ir.Value(name=self.op.name(f"{x.name}_{suffix}"), type=x.type, shape=x.shape)
        self.graph.inputs.append(new)
        return new

    def add_cotangents(self, ones: bool = False) -> dict[ir.Value, ir.Value]:
        """Return `{y: its cotangent}` for all differentiated outputs: a new input `<y>_grad`, or
        ones.
        """
        if ones:
            return {y: self.op.ones_like(y) for y in self.differentiated}
        return {y: self.add_input_like(y, "grad") for y in self.differentiated}

    def release_name(self, name: str) -> None:
        """Reserve `name` for a new input: rename the node output or initializer that has this
        name.
        """
        existing = ir.convenience.create_value_mapping(self.graph).get(name)
        if existing is not None:
            existing.name = self.op.name(name)
        self.op.name(name)

    def write_gradients(self, cotangents: Derivatives) -> dict[ir.Value, ir.Value]:
        """Write the gradients of the chosen inputs and weights; return `{input or weight:
        gradient}`.
        """
        gradients = sweep(self.op, cotangents, self.wrt)
        self.drop_unreached(gradients)
        return gradients

    def derivative_or_zeros(self, derivatives: Derivatives, x: ir.Value) -> ir.Value:
        """Return the derivative of `x` from `derivatives`, or zeros of the type and shape of
        `x`.
        """
        v = derivatives[x] if x in derivatives else self.op.zeros_like(x)
        return self.op.set_type_like(v, x)

    def drop_unreached(self, reached: Iterable[ir.Value]) -> None:
        """Drop from `wrt` the inputs and weights that no caller named and that are not in
        `reached`; raise if `reached` is empty.
        """
        reached = set(reached)
        if not reached:
            raise ValueError(
                f"no differentiable path from any of {[x.name for x in self.wrt]} to any of "
                f"{[y.name for y in self.kept]}: every derivative is zero. "
                f"{path_ends_text(self.graph, self.wrt, self.kept)}"
            )
        unreached = [x for x in self._by_default if x not in reached]
        make_inputs_constants(self.graph, [w for w in unreached if w not in self.inputs])
        self.wrt = [x for x in self.wrt if x not in unreached]

    def build_with_derivatives(
        self, suffix: str, values: Sequence[ir.Value], derivatives: Derivatives
    ) -> ModelProto:
        """Return the model that also returns `<x>_<suffix>`, the derivative of each x in `values`.

        The derivative of an x that `derivatives` lacks is zero.
        """
        named = [(f"{x.name}_{suffix}", self.derivative_or_zeros(derivatives, x)) for x in values]
        return self.build_model(named)

    def build_model(self, results: Sequence[Result]) -> ModelProto:
        """Return the model whose outputs are the kept outputs, then `results`, pairs of a name and
        a value.
        """
        protected = {*self.graph.inputs, *self.kept}
        derivatives = [self.op.name_output(v, name, v, protected) for name, v in results]
        self.graph.outputs[:] = [*self.kept, *derivatives]
        finish(self.model)
        self.kept = list(map(latest_replacement, self.kept))
        self.differentiated = list(map(latest_replacement, self.differentiated))
        for dummy, y in self.dummies.items():
            self._replace_dummy_input(dummy, y)
        if self.dummies:
            tidy(self.model)
        require_equal_lengths(self.graph, self._original_inputs, {})
        restore_defaults(self.graph)
        constants.record_constants(self.model, self.origin)
        logger.info("finished: %d nodes", self.graph.num_nodes())
        return to_proto(self.model)

    def _replace_dummy_input(self, dummy: ir.Value, y: ir.Value) -> None:
        """Replace the input `dummy`, of which nodes read only the shape, by `y` of the same shape.

        Subgraphs may capture it without using its values, which cannot be seen from outside: they
        get NaN in the shape of `y`, so that a use would show.
        """
        op = Emit(self.graph)
        shape_nodes, in_subgraph = _nodes_reading_shape(self.graph, dummy)
        with op.at(next(iter(self.graph))):  # these nodes read only inputs
            for node in shape_nodes:
                if node.op_type == "Shape" and node.inputs[0] is not dummy:
                    self._compute_shape_from_inputs(op, node)
        if in_subgraph:
            nodes, source = list(self.graph), y.producer()
            with op.at(nodes[0 if source is None else nodes.index(source) + 1]):
                y = op.set_type_like(op.Expand(op.const(np.nan, y.dtype), op.shape_of(y)), y)
        ir.convenience.replace_all_uses_with(dummy, y)
        self.graph.inputs.remove(dummy)

    def _compute_shape_from_inputs(self, op: Emit, node: ir.Node) -> None:
        """Let a Shape node's result be computed from shapes of inputs, if these have all its
        symbols.

        The tensor whose shape it returns need not be computed then.
        """
        inputs = [x for x in self.graph.inputs if x not in self.dummies]
        axes = {d: (x, i) for x in inputs for i, d in enumerate(dims(x) or ())}
        start, end = int_attribute(node, "start"), node.attributes.get_int("end", None)
        shape = dims(node.inputs[0])
        wanted = (None,) if shape is None else shape[start:end]
        if all(isinstance(d, int) or (d and d in axes) for d in wanted):
            lengths = (d if isinstance(d, int) else op.dim(*axes[d]) for d in wanted)
            replacement = op.const(op.vector(*lengths))
            ir.convenience.replace_all_uses_with(node.outputs[0], replacement)

    # -- loops over unit vectors --------------------------------------------------------------

    def map_unit_vectors(
        self, like: ir.Value, write: Callable[[ir.Value], Derivatives], batched: bool, axis: int
    ) -> dict[ir.Value, ir.Value]:
        """Return `write(v)` for all unit vectors v shaped like `like`, stacked along a new `axis`.

        The unit vectors have the shape of `like`; with `batched`, each has a one at the same index
        of every row. `map_indices` writes the loop.
        """
        count = self.op.numel(like, int(batched))  # elements of `like`, or of its rows
        return self.map_indices(
            count, lambda i: write(self._unit_vector(like, count, i, batched)), axis
        )

    def map_indices(
        self, count: int | ir.Value, write: Callable[[ir.Value], Derivatives], axis: int = 0
    ) -> dict[ir.Value, ir.Value]:
        """Return `write(i)` for all indices i = 0 ... count-1, stacked along a new `axis`.

        `write` takes the index, an int64 scalar, and is called once. The nodes that depend on the
        index become the body of a `Scan`; all others stay outside, and are computed once.
        """
        op = self.op
        kind = ir.TensorType(ir.DataType.INT64)
        index = ir.Value(name=op.name("index"), type=kind, shape=ir.Shape([]))
        with op:
            written = write(index)
            results = dict(written)
            for x in results:
                if rank(x) is None:  # a Scan stacks only values of known rank
                    results[x] = op.Reshape(written[x], [-1])
                    results[x].shape = ir.Shape([None])
            nodes = nodes_after(self.graph, [index])
            self.graph.remove(nodes)
            body = ir.Graph([index], [], nodes=nodes, name=op.name("body"))
            Emit(body, outer=op).give(results.values())
            drop_unused(body)
            if not results:
                return {}
            nonempty = isinstance(count, int) and count > 0
            length = op.vector(count)
            # at least one iteration
            iterations = count if nonempty else op.Max(op.const(length), [1])
            attributes, width = {"body": body, "num_scan_inputs": 1}, len(results)
            stacked = op.emit_many(
                "Scan", [self._indices_below(iterations)], attributes, outputs=width
            )
            if not nonempty:
                stacked = [op.Slice(v, [0], length, [0]) for v in stacked]
            for v, y in zip(stacked, body.outputs, strict=True):
                v.shape = ir.Shape([None, *(dims(y) or ())])
            if axis:
                stacked = [_move_first_axis(op, v, axis) for v in stacked]
        return dict(zip(results, stacked, strict=True))

    def _unit_vector(
        self, like: ir.Value, count: int | ir.Value, index: ir.Value, batched: bool
    ) -> ir.Value:
        """Return the unit vector shaped like `like` with a one at `index` (of every row)."""
        op = self.op
        shape, is_one = op.shape_of(like), op.Equal(self._indices_below(count), index)
        unit = op.Cast(is_one, to=like.dtype)
        if batched:
            row = op.vector(1, *(op.dim(like, i) for i in range(1, rank(like) or 1)))
            unit = op.Expand(op.Reshape(unit, row, allowzero=1), shape)
        else:
            unit = op.Reshape(unit, shape, allowzero=1)
        return op.set_type_like(unit, like)

    def _indices_below(self, count: int | ir.Value) -> ir.Value:
        """Return the int64 vector 0 ... count-1, computed by a Range node rather than stored."""
        length = count if isinstance(count, int) else None
        end = self.op.Reshape(count, []) if length is None else np.int64(length)
        numbers = self.op.Range(np.int64(0), end, np.int64(1))
        numbers.dtype, numbers.shape = ir.DataType.INT64, ir.Shape([length])
        return numbers


def _move_first_axis(op: Emit, v: ir.Value, axis: int) -> ir.Value:
    """Return `v` with its first axis moved to `axis`.

    The attribute `scan_output_axes` would do so too, but then onnxruntime 1.31 ends the process
    when the stack is empty.
    """
    n = len(v.shape or ())
    order = list(range(1, n))
    order.insert(axis % n, 0)
    return op.Transpose(v, perm=order)


def _nodes_reading_shape(graph: ir.Graph, value: ir.Value) -> tuple[list[ir.Node], bool]:
    """Return the nodes that read the shape of `value`, or of values computed from it, but no
    elements.

    The second result says whether subgraphs read one of these values.
    """
    seen, queue, in_subgraph = {value}, [value], False
    shape_nodes: list[ir.Node] = []
    for v in queue:  # grows while it is read
        if v in graph.outputs:
            raise NoGradientRule(
                f"output {v.name!r} depends on the values of the gradient {value.name!r}: a rule "
                "on the path is not linear in the gradient that it takes, so there is no forward "
                'mode; use `vjp`, or `jacobian` with mode="reverse"'
            )
        for node, _ in v.uses():
            if operator_of(node).traits >= {"shape", "int64"}:
                shape_nodes.append(node)
            elif any(subgraphs(node)) or node.graph is not graph:
                in_subgraph = True
            else:
                queue += [y for y in node.outputs if y not in seen]
                seen.update(node.outputs)
    return shape_nodes, in_subgraph
