"""A model to which sweeps are added, and loops over them; what higher derivatives are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import as_constants, as_inputs, by_name, choose_inputs
from onnxgrad.autodiff.guards import require_equal_lengths
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import NoGradientRule
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, is_real, rank
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import non_tensor, to_proto
from onnxgrad.model.read import ModelLike, once, read
from onnxgrad.reporting import logger

Result = tuple[str, ir.Value]  # the name that an output gets, and the output


class Sheet:
    """The graph of a prepared model, its outputs, and what they are differentiated by.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights, which become inputs; None: all that the outputs depend on.
        inputs: names of inputs; None: all floats that the outputs depend on.
        outputs: names of the outputs that are kept, all of them floats; None: all, of which the
            floats are differentiated.
        rows: the chosen inputs have the same number of rows, whatever their first axes are called.

    Attributes:
        wanted: the inputs, then the weights.
        kept: the outputs of the model that is made, before what is added.
        real: those of them that are differentiated.

    Raises:
        ValueError: an unknown name, one named twice, or one of a value that is no float.
        ModelError: `model` cannot be read.
    """

    def __init__(
        self,
        model: ModelLike,
        weights: Sequence[str] | None,
        inputs: Sequence[str] | None,
        outputs: Sequence[str] | None = None,
        rows: bool = False,
    ) -> None:
        self.origin = read(model)
        self.model = prepare(self.origin)
        chosen = choose_inputs(self.model.graph, inputs)
        if rows and len({shape[0] for x in chosen if (shape := dims(x))}) > 1:
            names = {str(d) for x in self.model.graph.inputs for d in dims(x) or ()}
            symbol = next(s for s in ("rows", "rows_of_inputs") if s not in names)
            self.model = prepare(self.origin, batch=symbol)
            chosen = choose_inputs(self.model.graph, inputs)
        self.graph = self.model.graph
        self._original_inputs = list(self.graph.inputs)
        self._cut_to(outputs)
        self._optional = chosen if inputs is None else []
        made = as_inputs(self.origin, self.graph, weights)
        self._optional = [*self._optional, *(made if weights is None else [])]
        self.wanted = [*chosen, *made]
        self.inputs = chosen
        self.kept = list(self.graph.outputs)
        self.real = [y for y in self.kept if is_real(y)]
        self.op = Emit(self.graph)
        self._dummies: dict[ir.Value, ir.Value] = {}

    def _cut_to(self, outputs: Sequence[str] | None) -> None:
        dropped = [o.name for o in self.origin.graph.output if non_tensor(o)]
        if outputs is not None:
            found = [by_name("output", y, self.graph.outputs) for y in once("output", outputs)]
            for y in found:
                if not is_real(y):
                    raise ValueError(f"output {y.name!r} holds {y.dtype}: only floats can be used")
            self.graph.outputs[:] = found
        elif dropped:
            logger.warning("outputs that are no tensors are not kept: %s", ", ".join(dropped))

    def input_like(self, x: ir.Value, suffix: str) -> ir.Value:
        """Return a new input `<x>_<suffix>` of the shape and dtype of `x`."""
        made = ir.Value(name=self.op.name(f"{x.name}_{suffix}"), type=x.type, shape=x.shape)
        self.graph.inputs.append(made)
        return made

    def pull(
        self, seeds: Iterable[tuple[ir.Value, ir.Value]], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Write the gradients of `wrt` from what arrives at some values, as `sweep` does."""
        return sweep(self.op, dict(seeds), wrt)

    def settle(self, reached: Iterable[ir.Value]) -> None:
        """Take from `wanted` what was chosen by default, and does not reach an output.

        Raises:
            ValueError: nothing does.
        """
        reached = set(reached)
        if not reached:
            raise ValueError(
                f"no differentiable path from any of {[x.name for x in self.wanted]} to any of "
                f"{[y.name for y in self.kept]}: every derivative is zero"
            )
        lost = [x for x in self._optional if x not in reached]
        as_constants(self.graph, [w for w in lost if w not in self.inputs])
        self.wanted = [x for x in self.wanted if x not in lost]

    def forget(self, dummy: ir.Value, y: ir.Value) -> None:
        """Let go of an input on whose values nothing depends that is finished; it is like `y`."""
        self._dummies[dummy] = y

    def finish(self, made: Sequence[Result]) -> ModelProto:
        """Return the model of the kept outputs and those that are made, which get these names."""
        protected = {*self.graph.inputs, *self.kept}
        named = [self.op.name_output(v, name, v, protected) for name, v in made]
        self.graph.outputs[:] = [*self.kept, *named]
        tidy(self.model)
        for dummy, y in self._dummies.items():
            self._replace(dummy, y)
        if self._dummies:
            tidy(self.model)
        require_equal_lengths(self.graph, self._original_inputs, {})
        constants.note_constants(self.model, self.origin)
        logger.info("finished: %d nodes", self.graph.num_nodes())
        return to_proto(self.model)

    def _replace(self, dummy: ir.Value, y: ir.Value) -> None:
        """Put `y` in the place of a dummy, of which only shapes may still depend.

        Loops and branches may carry along what they do not use, which cannot be told from outside:
        they get NaN of the shape of `y`, which shows where it is used.
        """
        op = Emit(self.graph)
        readers, holds = _readers_of(self.graph, dummy)
        with op.at(next(iter(self.graph))):  # what reads inputs only may come first
            for node in readers:
                if node.op_type == "Shape" and node.inputs[0] is not dummy:
                    self._shape_from_inputs(op, node)
        if holds:
            nodes, source = list(self.graph), y.producer()
            with op.at(nodes[0 if source is None else nodes.index(source) + 1]):
                y = op.set_type_like(op.Expand(op.const(np.nan, y.dtype), op.shape_of(y)), y)
        ir.convenience.replace_all_uses_with(dummy, y)
        self.graph.inputs.remove(dummy)

    def _shape_from_inputs(self, op: Emit, node: ir.Node) -> None:
        """Read a shape from those of the inputs, if it can be: not to compute what has it."""
        shape, axes = dims(node.inputs[0]), self._axes_of_inputs()
        if shape is None:
            return
        first, end = (node.attributes.get_int(k, d) for k, d in (("start", 0), ("end", len(shape))))
        known = [d if isinstance(d, int) else axes.get(d) for d in shape[first:end]]
        if None not in known:
            lengths = [d if isinstance(d, int) else op.dim(*d) for d in known if d is not None]
            made = op.const(op.vector(*lengths))
            ir.convenience.replace_all_uses_with(node.outputs[0], made)

    def _axes_of_inputs(self) -> dict[Any, tuple[ir.Value, int]]:
        """Return for each symbol an axis of an input of that length."""
        inputs = [x for x in self.graph.inputs if x not in self._dummies]
        return {d: (x, i) for x in inputs for i, d in enumerate(dims(x) or ())}

    # -- loops over unit vectors --------------------------------------------------------------

    def loop(
        self,
        like: ir.Value,
        write: Callable[[ir.Value], Mapping[ir.Value, ir.Value]],
        batched: bool,
        axis: int,
    ) -> dict[ir.Value, ir.Value]:
        """Return, stacked along a new `axis`, what `write` returns for all unit vectors.

        They have the shape of `like`, and with `batched` each is one in the same place of every
        row. `write` is called once; what depends on the vector becomes the body of a `Scan`, and
        all else stays outside, to be computed once.
        """
        op = self.op
        count = op.numel(like, int(batched))  # elements, or those of a row
        kind = ir.TensorType(ir.DataType.INT64)
        place = ir.Value(name=op.name("place"), type=kind, shape=ir.Shape([]))
        with op:
            hot = op.Cast(op.Equal(self._numbers(count), place), to=like.dtype)
            if batched:
                row = op.vector(1, *(op.dim(like, i) for i in range(1, rank(like) or 1)))
                unit = op.set_type_like(
                    op.Expand(op.Reshape(hot, row, allowzero=1), op.shape_of(like)), like
                )
            else:
                unit = op.set_type_like(op.Reshape(hot, op.shape_of(like), allowzero=1), like)
            found = write(unit)
            results = {x: _flat(op, v) if rank(x) is None else v for x, v in found.items()}
            stacked = self._scan(place, count, list(results.values()))
            if axis:
                stacked = [_moved(op, v, axis) for v in stacked]
        return dict(zip(results, stacked, strict=True))

    def _scan(
        self, place: ir.Value, count: int | ir.Value, results: list[ir.Value]
    ) -> list[ir.Value]:
        """Return `results`, stacked, for all places from 0 to count-1, by one `Scan`."""
        op, nodes = self.op, _depending(self.graph, place)
        inside, outs = {y for node in nodes for y in node.outputs}, list[ir.Value]()
        for v in results:
            if v not in inside or v in outs:  # a body gives values of its own, each once
                v = op.copy_of(v)
                nodes.append(v.producer())  # type: ignore[arg-type]
            outs.append(v)
        self.graph.remove(nodes)
        kept = _needed(nodes, outs)
        if not outs:
            return []
        some = isinstance(count, int) and count > 0
        turns = count if some else op.Max(op.const(op.vector(count)), [1])  # one turn at least
        body = ir.Graph([place], outs, nodes=kept, name=op.name("body"))
        attributes = {"body": body, "num_scan_inputs": 1}
        stacked = list(op.emit_many("Scan", [self._numbers(turns)], attributes, outputs=len(outs)))
        for i, out in enumerate(outs):
            stacked[i].type = out.type
            if not some:
                stacked[i] = op.Slice(stacked[i], [0], op.vector(count), [0])
            stacked[i].shape = ir.Shape([None, *(dims(out) or ())])
        return stacked

    def _numbers(self, count: int | ir.Value) -> ir.Value:
        """Return the numbers 0..count-1."""
        known = count if isinstance(count, int) else None
        end = self.op.Reshape(count, []) if known is None else np.int64(known)
        made = self.op.Range(np.int64(0), end, np.int64(1))
        made.dtype, made.shape = ir.DataType.INT64, ir.Shape([known])
        return made


def _flat(op: Emit, v: ir.Value) -> ir.Value:
    """Return `v` on one axis: what a Scan stacks has a known rank."""
    made = op.Reshape(v, [-1])
    made.shape = ir.Shape([None])
    return made


def _moved(op: Emit, v: ir.Value, axis: int) -> ir.Value:
    """Return `v` with its first axis at `axis`; a Scan would do so too, but not where it is empty.

    (onnxruntime 1.31 ends the process then.)
    """
    n = len(v.shape or ())
    order = list(range(1, n))
    order.insert(axis % n, 0)
    return op.Transpose(v, perm=order)


def _readers_of(graph: ir.Graph, value: ir.Value) -> tuple[list[ir.Node], bool]:
    """Return the nodes that read the shape of what is computed from `value`, and whether it is read
    in other ways in the graphs that nodes hold.

    Raises:
        NoGradientRule: an output depends on `value` itself.
    """
    seen, queue, found, holds = {value}, [value], [], False
    for v in queue:  # which grows
        if v in graph.outputs:
            raise NoGradientRule(
                f"output {v.name!r} depends on the values of the gradient {value.name!r}: a rule "
                "on the way is not linear in the gradient that it takes, so that there is no "
                'forward mode; `vjp`, and `jacobian` with mode="reverse", do without'
            )
        for node, _ in v.uses():
            if node.op_type in ("Shape", "Size", "SequenceLength"):
                found.append(node)
            elif any(subgraphs(node)) or node.graph is not graph:
                holds = True
            else:
                queue += [y for y in node.outputs if y not in seen]
                seen.update(node.outputs)
    return found, holds


def _depending(graph: ir.Graph, value: ir.Value) -> list[ir.Node]:
    """Return the nodes that depend on `value`."""
    after, found = {value}, []
    for node in graph:
        if not after.isdisjoint(reads(node)):
            found.append(node)
            after.update(node.outputs)
    return found


def _needed(nodes: Sequence[ir.Node], outputs: Iterable[ir.Value]) -> list[ir.Node]:
    """Return those of `nodes` that the outputs need, and let go of what the others read."""
    needed: set[ir.Value | None] = set(outputs)
    found = []
    for node in reversed(nodes):
        inner = [n for held in subgraphs(node) for n in held.all_nodes()]
        if needed.isdisjoint(node.outputs):
            for n in (node, *inner):
                n.resize_inputs(0)
        else:
            found.append(node)
            needed.update(v for n in (node, *inner) for v in n.inputs)
            needed.update(v for held in subgraphs(node) for v in held.outputs)
    return found[::-1]
