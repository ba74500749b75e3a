"""The score of each row, which explanations differentiate, and the baselines of attributions.

A baseline is a value that stands for the absence of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import differentiable_values, node_with_reason
from onnxgrad.errors import unknown
from onnxgrad.explain import targets
from onnxgrad.explain.piece import ModelPiece, check_model_and_device
from onnxgrad.explain.user_inputs import Arrays, Inputs, count_rows, input_arrays, move_rows_first
from onnxgrad.graph.traversal import all_nodes, dependents
from onnxgrad.model.class_labels import stored_labels
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.notes import CLASSES, read_metadata
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.surgery import replace_maps_by_tensors
from onnxgrad.model.weights import feeds_settings_only
from onnxgrad.operators import RANDOM
from onnxgrad.operators.shapes import is_real, static
from onnxgrad.runtime.values import to_numpy

Attributions: TypeAlias = np.ndarray | dict[str, np.ndarray]


class ScoreFunction:
    """The score of each row as a function of explained values of a model, with its gradient.

    The functions of `onnxgrad.explain` take a `ScoreFunction` in place of a model; in several calls
    with the same one, graphs and sessions are built once, when they are first needed.

    Rows are explained independently of each other. Unless the graph proves that row i of the output
    depends on row i of the inputs only, rows run one at a time, and a warning is logged.

    Args:
        model: model, serialized model or path; never modified.
        wrt: name or names of the values to which the scores are attributed: inputs, or results of
            nodes, such as the Gather of an embedding. None: every float input that the output
            depends on differentiably; if there is none, as in front of trees, every float input
            that the output depends on.
        output: name of the output of which the scores are elements, or of any other float tensor
            with rows. None: the only float output.
        device: "cpu", "cuda" or "cuda:1"; None is the CPU.
        batch_size: number of rows that run at once.
        batch_axes: `{name: axis}` of the inputs, and of the output, whose rows are not on their
            first axis, as {"x": 1, "y": 1} for a model with time steps first. Arrays that are
            passed and returned have the rows on this axis; an index of a `target` leaves it out.

    Attributes:
        wrt: the names of the values, as a list.
        output: the name of the output.
        batch_size: the argument of this name.

    Raises:
        ValueError: an unknown name, several float outputs, no float input that the output depends
            on, or nodes that are in training mode or draw random numbers.
        ModelError: `model` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] y)
        ...     <float[2,3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = MatMul(x, w) }''')
        >>> scores = og.explain.ScoreFunction(model)
        >>> scores.wrt, scores.output
        (['x'], 'y')
        >>> x = np.float32([[1, 1], [2, 0]])
        >>> [og.explain.saliency(scores, x, target=i).tolist() for i in (0, 2)]
        [[[1.0, 4.0], [1.0, 4.0]], [[3.0, 6.0], [3.0, 6.0]]]
    """

    def __init__(
        self,
        model: ModelLike,
        wrt: str | Sequence[str] | None = None,
        output: str | None = None,
        *,
        device: Any = None,
        batch_size: int = 32,
        batch_axes: Mapping[str, int] | None = None,
    ) -> None:
        self.batch_axes = dict(batch_axes or {})
        proto, maps = replace_maps_by_tensors(read(model))
        self._proto = move_rows_first(proto, self.batch_axes)
        self._device = check_model_and_device(self._proto, device, batch_size, "scores")
        self.batch_size = int(batch_size)
        self.output = maps.get(output or "") or _output_name(self._proto, output)
        names = [wrt] if isinstance(wrt, str) else wrt
        self.wrt = (
            _explainable_inputs(self.whole)
            if names is None
            else list(require_unique_names("value", names))
        )
        if not self.wrt:
            raise ValueError("`wrt` is empty: name at least one value")
        self.single = isinstance(wrt, str) or (wrt is None and len(self.wrt) == 1)
        self.inner = [name for name in self.wrt if name not in names_without_default(self._proto)]
        self._check_explained_values()
        for node in all_nodes(self.whole.graph):
            if node.op_type in RANDOM and not node.domain:
                raise ValueError(
                    f"{node_with_reason(node)}: scores behind this node are random; name an "
                    "`output` in front of it"
                )

    @classmethod
    def of(
        cls,
        model: ModelLike | ScoreFunction,
        wrt: str | Sequence[str] | None,
        output: str | None,
        batch_axes: Mapping[str, int] | None,
    ) -> ScoreFunction:
        """Return `model` if it is a `ScoreFunction`, else a new `ScoreFunction` of the model.

        Raises:
            ValueError: names or axes are passed together with a `ScoreFunction`.
        """
        if not isinstance(model, ScoreFunction):
            return cls(model, wrt, output, batch_axes=batch_axes)
        if wrt is not None or output is not None or batch_axes is not None:
            raise ValueError(
                "`wrt`, `output` and `batch_axes` are arguments of the ScoreFunction: do not pass "
                "them here"
            )
        return model

    def piece(self, outputs: Sequence[str], cut: Sequence[str] = ()) -> ModelPiece:
        """Return the part of the model that computes `outputs` from the values `cut`."""
        stated = bool(self.batch_axes)
        return ModelPiece(self._proto, outputs, cut, self._device, self.batch_size, stated)

    @cached_property
    def whole(self) -> ModelPiece:
        """The part of the model that computes the output from the inputs."""
        return self.piece([self.output])

    @cached_property
    def behind(self) -> ModelPiece:
        """The part of the model that computes the output from the explained values `wrt`."""
        return self.piece([self.output], self.wrt) if self.inner else self.whole

    @cached_property
    def front(self) -> ModelPiece:
        """The part of the model that computes the explained values that are no inputs."""
        return self.piece(self.inner)

    @cached_property
    def classes(self) -> list[str]:
        """The class names that the model stores; empty if it stores none."""
        return list(
            map(str, read_metadata(self._proto, CLASSES) or stored_labels(self._proto) or ())
        )

    def at(self, inputs: Inputs, target: targets.Target | None = None) -> Point:
        """Return a `Point`: the rows of the given inputs, their explained values, and the target.

        Args:
            inputs: the array of the only input, or `{name: array}`.
            target: which element of a row of the output is its score; see `saliency`.

        Raises:
            ValueError: an unknown or missing input, or inputs of different numbers of rows.
            TypeError: a dtype that the input cannot hold.
        """
        graph = self.whole.graph.inputs
        needed = [*self.whole.inputs, *(self.front.inputs if self.inner else ())]
        feed = input_arrays(
            inputs, graph, dict.fromkeys(needed), names_without_default(self._proto)
        )
        feed = {name: self.rows_first(name, x) for name, x in feed.items()}
        rows, with_rows = count_rows(feed, graph)
        point = Point(self, feed, with_rows, rows, self.values(feed, with_rows), target)
        for name, x in point.values.items():
            if name in feed and name not in with_rows:
                raise ValueError(
                    f"{name!r} of shape {list(x.shape)} does not have the {rows} rows of the "
                    "inputs, so that it is the same for all rows; name other values as `wrt`"
                )
        return point

    def values(self, feed: Arrays, with_rows: set[str]) -> Arrays:
        """Return {name: array} of the explained values `wrt`, computed from the inputs `feed`."""
        inner = self.front.run(feed, with_rows) if self.inner else ()
        known = feed | dict(zip(self.inner, inner, strict=True))
        return {name: known[name] for name in self.wrt}

    def rows_first(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the array `x` of the value `name`, with the row axis moved to the front."""
        return np.moveaxis(x, self.batch_axes.get(name, 0), 0) if x.ndim else x

    # -- checks --------------------------------------------------------------------------------

    def _check_explained_values(self) -> None:
        """Raise `ValueError` if the explained values `wrt` depend on each other, or do not affect
        the output.

        These are the output, values that it does not depend on, and values that depend on others
        of them.
        """
        if self.output in self.wrt:
            raise ValueError(f"{self.output!r} is the output: name values in front of it as `wrt`")
        graph = self.piece([self.output, *self.inner]).graph
        values = {v.name: v for v in (*graph.inputs, *graph.outputs)}
        computed = dependents(graph, graph.inputs)
        for name in self.inner:
            if values.get(name) not in computed:
                raise ValueError(
                    f"{name!r} is the same for all rows: name a value computed from the inputs"
                )
        for name in self.wrt:
            depending = dependents(graph, [values[name]] if name in values else [])
            if others := [y for y in self.wrt if y != name and values.get(y) in depending]:
                raise ValueError(
                    f"{others[0]!r} depends on {name!r}: explain them in separate calls"
                )
            if name not in self.behind.inputs:
                raise ValueError(
                    f"{self.output!r} does not depend on {name!r}: its attributions would all be "
                    f"zero; leave {name!r} out of `wrt`"
                )


@dataclass
class Point:
    """The rows of inputs, and the explained values at these rows, at which scores are computed.

    Attributes:
        function: the function that computes the scores.
        feed: the inputs of the model, by name.
        with_rows: names of the inputs that have rows; other inputs are the same for each row.
        rows: number of rows.
        values: the values `wrt`, by name.
        target: which element of a row of the output is its score.
    """

    function: ScoreFunction
    feed: Arrays
    with_rows: set[str]
    rows: int
    values: Arrays
    target: targets.Target | None = None

    def __post_init__(self) -> None:
        self._behind_with_rows = {*self.with_rows, *self.values}

    def to_attributions(self, values: Mapping[str, np.ndarray]) -> Attributions:
        """Return attributions in the explained values' dtypes, with rows on the inputs' row axis.

        They are one array if `wrt` is one name, else `{name: array}`. Attributions to integers stay
        floats.
        """
        function, results = self.function, {}
        for name, x in self.values.items():
            array = values[name] if x.dtype.kind in "iub" else values[name].astype(x.dtype)
            results[name] = np.moveaxis(array, 0, function.batch_axes.get(name, 0))
        return results[function.wrt[0]] if function.single else results

    @cached_property
    def output(self) -> np.ndarray:
        """The model's output at this point, (rows, ...)."""
        return self.outputs(self.values)

    @cached_property
    def score_indices(self) -> np.ndarray:
        """The index of the explained score in each row of the output, an array (rows, axes of a
        row).
        """
        target = targets.class_indices(self.target, self.function.classes)
        return targets.target_indices(target, self.rows, self._output_row_shape)

    def copy_slices(self, copies: int) -> Iterator[slice]:
        """Return slices of the indices of copies of the rows; one run computes one slice."""
        size = max(1, self.function.batch_size // self.rows)
        return (slice(i, i + size) for i in range(0, copies, size))

    def outputs(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the model's output at `values`, copies of the rows one after another."""
        y = self.function.behind.run(self.tiled_feed(values), self._behind_with_rows)[0]
        if y.dtype.kind in "iubOU":
            raise ValueError(
                f"{self.function.output!r} holds {y.dtype}: name a float tensor as `output`"
            )
        return y

    def scores(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the scores of k copies of the rows at `values`, float64 of shape (k * rows,)."""
        y = self.outputs(values)
        every = np.tile(self.score_indices, (self._count_of_copies(values), 1))
        return y[(np.arange(len(y)), *every.T)].astype(np.float64)

    def gradients(self, values: Mapping[str, np.ndarray]) -> Arrays:
        """Return {name: gradient of the scores at `values`} for the explained values."""
        return self.pull_back(values, self.cotangent(self._count_of_copies(values)))

    def cotangent(self, copies: int) -> np.ndarray:
        """Return the output's cotangent for k = `copies` of the rows: 1 at each score, else 0."""
        every = np.tile(self.score_indices, (copies, 1))
        y = self.function.behind.graph.outputs[0]
        assert y.dtype is not None
        return targets.score_cotangent(
            (len(every), *self._output_row_shape), y.dtype.numpy(), every
        )

    def pull_back(self, values: Mapping[str, np.ndarray], cotangent: np.ndarray) -> Arrays:
        """Return {name: gradient of sum(cotangent * output) at `values`} for explained values."""
        behind = self.function.behind
        for name, x in values.items():
            if x.dtype.kind in "iubO":
                raise ValueError(
                    f"{name!r} holds {x.dtype}: only floats have a gradient; name an inner float "
                    f"value as `wrt`{_embedding_hint(self.function.whole.graph)}"
                )
        return behind.gradients(
            self.tiled_feed(values), self._behind_with_rows, self.function.wrt, cotangent
        )

    @cached_property
    def _output_row_shape(self) -> tuple[int, ...]:
        """The shape of a row of the output, from the graph or from running the model."""
        shape = self.function.behind.shape(self.function.output)
        known = None if shape is None else static(shape[1:])
        return self.output.shape[1:] if known is None else known

    def _count_of_copies(self, values: Mapping[str, np.ndarray]) -> int:
        """Return k, the count of copies of this point's rows in `values`."""
        return len(next(iter(values.values()))) // self.rows

    def tiled_feed(self, values: Mapping[str, np.ndarray]) -> Arrays:
        """Return {name: array} of `values` and of the model's inputs, repeated to the row count of
        `values`.
        """
        copies = self._count_of_copies(values)
        feed = dict(self.feed)
        for name in self.with_rows:
            if copies != 1 and name not in values:
                feed[name] = np.tile(feed[name], (copies, *[1] * (feed[name].ndim - 1)))
        return feed | dict(values)


def _output_name(proto: ModelProto, name: str | None) -> str:
    """Return `name`, or the name of the only float output; raise `ValueError` if several."""
    if name is not None:
        return name
    floats = [
        y.name
        for y in proto.graph.output
        if y.type.HasField("tensor_type")
        and ir.DataType(y.type.tensor_type.elem_type).is_floating_point()
    ]
    if len(floats) != 1:
        raise ValueError(f"the model has the float outputs {floats}: name one tensor as `output`")
    return floats[0]


def _explainable_inputs(whole: ModelPiece) -> list[str]:
    """Return the float inputs that the output depends on, preferring differentiable ones."""
    graph, (y,) = whole.graph, whole.graph.outputs
    floats = [x for x in graph.inputs if is_real(x) and not feeds_settings_only(x)]
    used = [x for x in floats if y in dependents(graph, [x])]
    smooth = [x for x in used if y in differentiable_values(graph, [x])]
    if used:  # of trees only, `occlusion` explains inputs, and other methods name the first node
        return [str(x.name) for x in smooth or used]
    raise ValueError(
        f"no float input leads to {y.name!r}: name an inner float value as `wrt`"
        f"{_embedding_hint(graph)}"
    )


def _embedding_hint(graph: ir.Graph) -> str:
    """Return a hint, for messages, that names results of Gather nodes with integer input
    indices.
    """
    integers = [x for x in graph.inputs if not is_real(x)]
    depending = dependents(graph, integers)
    lookups = [
        repr(node.outputs[0].name)
        for node in graph
        if node.op_type == "Gather" and node.inputs[1] in depending and is_real(node.outputs[0])
    ]
    return f", such as {' or '.join(lookups[:3])}, results of embeddings" if lookups else ""


def baseline_values(point: Point, baselines: Any, what: str = "baseline") -> Arrays:
    """Return {name of an explained value: its baseline array, in the value's shape and dtype}.

    Args:
        point: the rows that are explained.
        baselines: a number or an array for the only value of `wrt`; or a dict by the names of
            values of `wrt`, or of inputs from which inner values are computed. None: zeros, if
            `wrt` are inputs.
        what: the name of a baseline in messages.

    Raises:
        ValueError: no baseline for an inner value, an unknown name, or another shape.
    """
    function = point.function
    if isinstance(baselines, Mapping):
        given = dict(baselines)
        inputs = {n: x for n, x in given.items() if n in point.feed and n not in point.values}
        if other := [n for n in given if n not in inputs and n not in point.values]:
            raise unknown(what, other[0], [*point.values, *point.feed])
        computed: dict[str, Any] = {} if function.inner else dict.fromkeys(point.values, 0)
        if inputs:
            feed = {
                n: _baseline_like(point, n, inputs.get(n), x, what) for n, x in point.feed.items()
            }
            computed |= function.values(feed, point.with_rows)
        given = computed | {n: b for n, b in given.items() if n in point.values}
    elif baselines is None:
        given = {n: 0 for n in point.values if n not in function.inner}
    elif len(point.values) == 1 or np.ndim(baselines) == 0:
        given = dict.fromkeys(point.values, baselines)
    else:
        raise ValueError(
            f"`wrt` names {len(point.values)} values: pass {what}s as a dict of arrays by name"
        )
    if missing := [n for n in point.values if n not in given]:
        raise ValueError(
            f"no {what} for the inner value {missing[0]!r}: pass one for it, as "
            f"{{{missing[0]!r}: 0}}, or inputs to compute it from, as "
            f"{{{next(iter(point.feed))!r}: array}}"
        )
    return {n: _baseline_like(point, n, given[n], x, what) for n, x in point.values.items()}


def _baseline_like(point: Point, name: str, baseline: Any, x: np.ndarray, what: str) -> np.ndarray:
    """Return `baseline` in the shape and dtype of `x`, or `x` if `baseline` is None."""
    if baseline is None:
        return x
    array = point.function.rows_first(name, to_numpy(baseline))
    if array.ndim and array.shape not in (x.shape, (1, *x.shape[1:])):
        raise ValueError(
            f"the {what} of {name!r} has the shape {list(array.shape)}: give a number, or an array "
            f"of the shape {list(x.shape)}, or of one row of it"
        )
    if not np.can_cast(array.dtype, x.dtype, "same_kind"):
        raise ValueError(f"the {what} of {name!r} holds {array.dtype}: pass {x.dtype}")
    return np.broadcast_to(array, x.shape).astype(x.dtype)
