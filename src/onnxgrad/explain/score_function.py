"""`ScoreFunction`: the scores of the rows of a model, as a function of some of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import node_with_reason, smooth_values
from onnxgrad.explain import targets
from onnxgrad.explain.piece import Piece, checked_device
from onnxgrad.explain.rows_first import move_rows_first
from onnxgrad.explain.user_inputs import Arrays, Inputs, checked_feed, rows_of
from onnxgrad.graph.traversal import all_nodes, dependents
from onnxgrad.model.class_labels import stored_labels
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.notes import CLASSES, read_note
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.surgery import with_tensors_of_maps
from onnxgrad.model.weights import is_setting
from onnxgrad.operators import RANDOM
from onnxgrad.operators.shapes import is_real

Attributions: TypeAlias = np.ndarray | dict[str, np.ndarray]


class ScoreFunction:
    """The score of each row of a model, as a function of some of its values, with its gradient.

    The functions of `onnxgrad.explain` take one in place of a model, and then build nothing again:
    use it for many calls. Sessions are created when they are first needed.

    Rows are explained independently of each other. If that row i of the output depends on row i of
    the inputs only is not proven from the graph, rows run one at a time, and a warning is logged.

    Args:
        model: model, serialized model or path; never modified.
        wrt: name or names of the values to which the scores are attributed: inputs, or results of
            nodes, such as that of an embedding. None: every float input that the output depends on
            differentiably; if there is none, as before trees, every one that it depends on.
        output: name of the output of which the scores are elements, or of any other float tensor
            with rows. None: the only float output.
        device: "cpu", "cuda" or "cuda:1"; None is the CPU.
        batch_size: how many rows run at once.
        batch_axes: `{name: axis}` of the inputs, and of the output, whose rows are not on their
            first axis, as {"x": 1, "y": 1} for a model of time steps first. Arrays that are passed
            and returned have the rows there; an index of a `target` leaves that axis out.

    Attributes:
        wrt: the names, as a list.
        output: the name.
        batch_size: as the argument.

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
        proto, maps = with_tensors_of_maps(read(model))
        self._proto = move_rows_first(proto, self.batch_axes)
        self._device = checked_device(self._proto, device, batch_size, "scores")
        self.batch_size = int(batch_size)
        self.output = maps.get(output or "") or _output(self._proto, output)
        names = [wrt] if isinstance(wrt, str) else wrt
        self.wrt = (
            _float_inputs(self.whole)
            if names is None
            else list(require_unique_names("value", names))
        )
        if not self.wrt:
            raise ValueError("`wrt` is empty: name at least one value")
        self.single = isinstance(wrt, str) or (wrt is None and len(self.wrt) == 1)
        self.inner = [name for name in self.wrt if name not in names_without_default(self._proto)]
        self._check_wrt()
        for node in all_nodes(self.whole.graph):
            if node.op_type in RANDOM and not node.domain:
                raise ValueError(
                    f"{node_with_reason(node)}: its scores are random; name an `output` in front "
                    "of it"
                )

    @classmethod
    def of(
        cls,
        model: ModelLike | ScoreFunction,
        wrt: str | Sequence[str] | None,
        output: str | None,
        batch_axes: Mapping[str, int] | None,
    ) -> ScoreFunction:
        """Return `model` if it is a `ScoreFunction`, or that of a model.

        Raises:
            ValueError: names or axes beside a `ScoreFunction`, which has its own.
        """
        if not isinstance(model, ScoreFunction):
            return cls(model, wrt, output, batch_axes=batch_axes)
        if wrt is not None or output is not None or batch_axes is not None:
            raise ValueError(
                "a ScoreFunction has its own `wrt`, `output` and `batch_axes`: do not pass these"
            )
        return model

    def piece(self, outputs: Sequence[str], cut: Sequence[str] = ()) -> Piece:
        """Return the part of the model from `cut` to `outputs`."""
        stated = bool(self.batch_axes)
        return Piece(self._proto, outputs, cut, self._device, self.batch_size, stated)

    @cached_property
    def whole(self) -> Piece:
        """The part that computes the output from the inputs."""
        return self.piece([self.output])

    @cached_property
    def behind(self) -> Piece:
        """The part that computes the output from `wrt`, and from inputs that it needs besides."""
        return self.piece([self.output], self.wrt) if self.inner else self.whole

    @cached_property
    def front(self) -> Piece:
        """The part that computes the inner values of `wrt` from the inputs."""
        return self.piece(self.inner)

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes that the model stores."""
        return list(map(str, read_note(self._proto, CLASSES) or stored_labels(self._proto) or ()))

    def at(self, inputs: Inputs, target: targets.Target | None = None) -> Point:
        """Return the values at which scores are explained.

        Args:
            inputs: the array of the only input, or `{name: array}`.
            target: which element of a row of the output is its score; see `saliency`.

        Raises:
            ValueError: an unknown or missing input, or inputs of different numbers of rows.
            TypeError: a dtype that the input cannot hold.
        """
        graph = self.whole.graph.inputs
        needed = [*self.whole.inputs, *(self.front.inputs if self.inner else ())]
        feed = checked_feed(
            inputs, graph, dict.fromkeys(needed), names_without_default(self._proto)
        )
        feed = {name: self.rows_first(name, x) for name, x in feed.items()}
        rows, rowed = rows_of(feed, graph)
        point = Point(self, feed, rowed, rows, self.values(feed, rowed), target)
        for name, x in point.values.items():
            if name in feed and name not in rowed:
                raise ValueError(
                    f"{name!r} of shape {list(x.shape)} has not the {rows} rows of the inputs: it "
                    "is the same for all of them; name other values as `wrt`"
                )
        return point

    def values(self, feed: Arrays, rowed: set[str]) -> Arrays:
        """Return the values of `wrt` that `feed` gives."""
        inner = self.front.run(feed, rowed) if self.inner else ()
        known = feed | dict(zip(self.inner, inner, strict=True))
        return {name: known[name] for name in self.wrt}

    def rows_first(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return an array for an input, or for a value of `wrt`, with its rows first."""
        return np.moveaxis(x, self.batch_axes.get(name, 0), 0) if x.ndim else x

    # -- checks --------------------------------------------------------------------------------

    def _check_wrt(self) -> None:
        """Raise if `wrt` names the output, what it does not read, or dependent values."""
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
            others = [y for y in self.wrt if y != name and values.get(y) in depending]
            if others:
                raise ValueError(
                    f"{others[0]!r} depends on {name!r}: explain them in separate calls"
                )
        for name in self.wrt:
            if name not in self.behind.inputs:
                raise ValueError(
                    f"{self.output!r} does not depend on {name!r}: its attributions would all be "
                    f"zero; leave {name!r} out of `wrt`"
                )


@dataclass
class Point:
    """Rows of inputs at which scores are explained.

    Attributes:
        function: of which these are the arguments.
        feed: the inputs of the model.
        rowed: names of the inputs that have rows; the others are the same for each row.
        rows: how many there are.
        values: the values of `wrt`.
        target: which element of a row of the output is its score.
    """

    function: ScoreFunction
    feed: Arrays
    rowed: set[str]
    rows: int
    values: Arrays
    target: targets.Target | None = None

    def __post_init__(self) -> None:
        self._rowed = {*self.rowed, *self.values}

    def result(self, values: Mapping[str, np.ndarray]) -> Attributions:
        """Return attributions as users get them: in the dtypes of `values`, if these are floats.

        They are one array if `wrt` is one name, else `{name: array}`.
        """
        function, results = self.function, {}
        for name, x in self.values.items():
            array = values[name] if x.dtype.kind in "iub" else values[name].astype(x.dtype)
            results[name] = np.moveaxis(array, 0, function.batch_axes.get(name, 0))
        return results[function.wrt[0]] if function.single else results

    @cached_property
    def output(self) -> np.ndarray:
        """The output of the model, (rows, ...)."""
        return self.outputs(self.values)

    @cached_property
    def indices(self) -> np.ndarray:
        """The index of the score of each row: see `target_indices`."""
        target = targets.without_names(self.target, self.function.classes)
        return targets.target_indices(target, self.rows, self._row_shape)

    def chunks(self, copies: int) -> Iterator[slice]:
        """Yield slices of so many copies of the rows, each of as many as run at once."""
        size = max(1, self.function.batch_size // self.rows)
        return (slice(i, i + size) for i in range(0, copies, size))

    def outputs(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the output where `wrt` are `values`: k rows for each of this point, tiled."""
        y = self.function.behind.run(self.feed_at(values), self._rowed)[0]
        if y.dtype.kind in "iubOU":
            raise ValueError(f"{self.function.output!r} holds {y.dtype}: scores are floats")
        return y

    def scores(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the scores where `wrt` are `values`, float64 of shape (k rows,)."""
        y = self.outputs(values)
        every = np.tile(self.indices, (self._copies(values), 1))
        return targets.scores_at(y, every).astype(np.float64)

    def gradients(self, values: Mapping[str, np.ndarray]) -> Arrays:
        """Return the gradients of the scores with respect to `wrt`, at `values`."""
        return self.pull_back(values, self.seed(self._copies(values)))

    def seed(self, copies: int) -> np.ndarray:
        """Return the cotangent of the output for so many copies of the rows: one at each score."""
        every = np.tile(self.indices, (copies, 1))
        y = self.function.behind.graph.outputs[0]
        assert y.dtype is not None
        return targets.seeds((len(every), *self._row_shape), y.dtype.numpy(), every)

    def pull_back(self, values: Mapping[str, np.ndarray], seed: np.ndarray) -> Arrays:
        """Return the gradients of sum(seed * output) with respect to `wrt`, at `values`."""
        behind = self.function.behind
        for name, x in values.items():
            if x.dtype.kind in "iubO":
                raise ValueError(
                    f"{name!r} holds {x.dtype}: only floats have a gradient; name an inner float "
                    f"value as `wrt`{_suggestion(self.function.whole.graph)}"
                )
        return behind.gradients(self.feed_at(values), self._rowed, self.function.wrt, seed)

    @cached_property
    def _row_shape(self) -> tuple[int, ...]:
        shape = self.function.behind.shape(self.function.output)
        known = [d for d in (shape or ())[1:] if isinstance(d, int)]
        if shape is None or len(known) != len(shape) - 1:
            return self.output.shape[1:]
        return tuple(known)

    def _copies(self, values: Mapping[str, np.ndarray]) -> int:
        return len(next(iter(values.values()))) // self.rows

    def feed_at(self, values: Mapping[str, np.ndarray]) -> Arrays:
        """Return the inputs for `values`: this point's, tiled, and those of `values`."""
        copies = self._copies(values)
        feed = dict(self.feed)
        for name in self.rowed:
            if copies != 1 and name not in values:
                feed[name] = np.tile(feed[name], (copies, *[1] * (feed[name].ndim - 1)))
        return feed | dict(values)


def _output(proto: ModelProto, name: str | None) -> str:
    """Return the name of the output whose elements are scores."""
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


def _float_inputs(whole: Piece) -> list[str]:
    """Return the float inputs that the output depends on differentiably."""
    graph, (y,) = whole.graph, whole.graph.outputs
    floats = [x for x in graph.inputs if is_real(x) and not is_setting(x)]
    used = [x for x in floats if y in dependents(graph, [x])]
    smooth = [x for x in used if y in smooth_values(graph, [x])]
    if used:  # by trees only: `occlusion` needs no gradient, and others say what ends the paths
        return [str(x.name) for x in smooth or used]
    raise ValueError(
        f"no float input leads to {y.name!r}: name an inner float value as `wrt`"
        f"{_suggestion(graph)}"
    )


def _suggestion(graph: ir.Graph) -> str:
    """Return the end of a message: the first floats that are computed from integer inputs."""
    integers = [x for x in graph.inputs if not is_real(x)]
    depending = dependents(graph, integers)
    lookups = [
        repr(node.outputs[0].name)
        for node in graph
        if node.op_type == "Gather" and node.inputs[1] in depending and is_real(node.outputs[0])
    ]
    return f", such as {' or '.join(lookups[:3])}, what embeddings return" if lookups else ""
