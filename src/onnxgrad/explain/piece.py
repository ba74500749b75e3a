"""`ModelPiece`: the part of a model between two sets of values, run on chunks of rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import (
    DerivativeOptions,
    DerivativeRequest,
    derivative,
    differentiable_values,
    path_ends_text,
)
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.row_proofs import UnprovenRows, require_independent_rows
from onnxgrad.checks import check_count
from onnxgrad.errors import printable
from onnxgrad.explain.user_inputs import Arrays
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.graph.traversal import dependents
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.surgery import drop_unused_inputs, select_model_inputs_outputs
from onnxgrad.operators.shapes import Dim, Dims, dims, is_stated
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.training.modes.inference_form import names_of_training_nodes

_GradientPredictor = tuple[Predictor, dict[str, str], str]


class ModelPiece:
    """The part of a model that computes `outputs` from the values `cut` and the model's inputs.

    Nodes that compute the values of `cut` do not run.

    Args:
        proto: the whole model.
        outputs: names of the values to compute.
        cut: names of the values that are inputs of the part.
        device: device of the sessions.
        batch_size: number of rows that run at once.
        stated: whether the user has said which axes the rows are, by `batch_axes`.

    Attributes:
        inputs: names of the inputs that the part reads.
    """

    def __init__(
        self,
        proto: ModelProto,
        outputs: Sequence[str],
        cut: Collection[str],
        device: Device,
        batch_size: int,
        stated: bool = False,
    ) -> None:
        self._rows_are_stated = stated
        names = list(dict.fromkeys([*names_without_default(proto), *cut]))
        self.outputs, self._device, self._batch_size = list(outputs), device, batch_size
        self._proto = select_model_inputs_outputs(proto, outputs, names)
        drop_unused_inputs(self._proto)
        with pause_garbage_collection():
            self._model = prepare(self._proto)
        self._values = {str(x.name): x for x in self.graph.inputs}
        self.inputs = list(self._values)
        self._reasons_by_shapes: dict[tuple, str | None] = {}
        self._warned = False
        self._gradient: tuple[tuple[str, ...], _GradientPredictor] | None = None

    @property
    def graph(self) -> ir.Graph:
        """The graph that computes `outputs`, prepared for differentiation."""
        return self._model.graph

    def shape(self, name: str) -> Dims | None:
        """Return the shape of the input or output `name`; None if the shape is unknown."""
        listed = [*self.graph.inputs, *self.graph.outputs]
        return next((dims(v) for v in listed if v.name == name), None)

    def run(self, feed: Mapping[str, np.ndarray], with_rows: Collection[str]) -> list[np.ndarray]:
        """Return the arrays of `outputs` for all rows of `feed`.

        Args:
            feed: the inputs, by name.
            with_rows: names of the inputs whose first axis is the rows; other inputs are the same
                for each row.
        """
        found = self.run_rows(self._output_predictor, feed, with_rows)
        if lacking := [name for name in self.outputs if name not in found]:
            raise ValueError(
                f"{lacking[0]!r} does not have the rows of the inputs along its first axis: name "
                "an `output` that has them"
            )
        return [found[name] for name in self.outputs]

    def gradients(
        self,
        feed: Mapping[str, np.ndarray],
        with_rows: Collection[str],
        wrt: Sequence[str],
        cotangent: np.ndarray,
    ) -> Arrays:
        """Return {name: gradient of sum(cotangent * output)} for the values `wrt`; `feed` is as in
        `run`.
        """
        predictor, names, last = self._gradient_predictor(tuple(wrt))
        found = self.run_rows(predictor, {**feed, last: cotangent}, {*with_rows, last})
        return {name: found[names[name]] for name in wrt}

    @cached_property
    def _multiply_adds(self) -> float:
        """The count of multiply-adds that compute `outputs` for `batch_size` rows."""
        return count_multiply_adds(self.graph) * self._batch_size

    @cached_property
    def _output_predictor(self) -> Predictor:
        """The `Predictor` that computes `outputs`."""
        return Predictor(self._proto, self.outputs, self._device, 0, self._multiply_adds)

    def _gradient_predictor(self, wrt: tuple[str, ...]) -> _GradientPredictor:
        """Return (predictor of gradients, {wrt: gradient's name}, name of the cotangent input)."""
        if self._gradient is None or self._gradient[0] != wrt:
            values = [self._values[name] for name in wrt]
            require_differentiable(self.graph, values, self.graph.outputs[0])
            request = DerivativeRequest([], list(wrt), DerivativeOptions.Zero)
            with pause_garbage_collection():
                model, names = derivative(self._proto, request)
            gradients = [names[x] for x in wrt]
            predictor = Predictor(model, gradients, self._device, 0, 3 * self._multiply_adds)
            (cotangent,) = {x.name for x in model.graph.input} - {*self._values}
            self._gradient = wrt, (predictor, names, cotangent)
        return self._gradient[1]

    # -- rows ----------------------------------------------------------------------------------

    def run_rows(
        self, predictor: Predictor, feed: Mapping[str, np.ndarray], with_rows: Collection[str]
    ) -> Arrays:
        """Return {name: array} of a predictor's outputs, leaving out outputs without a row axis.

        Args:
            predictor: computes values from the inputs of this piece and more inputs.
            feed: the inputs of this piece and of the predictor, by name.
            with_rows: names of the inputs whose first axis is the rows.
        """
        read = {name: feed[name] for name in predictor.inputs}
        count = next(len(array) for name, array in read.items() if name in with_rows)
        size = self.rows_per_call(feed, with_rows, count)
        return predictor.run_rows(read, size, read.keys() - with_rows)

    def rows_per_call(
        self, feed: Mapping[str, np.ndarray], with_rows: Collection[str], rows: int
    ) -> int:
        """Return how many rows run at once: 1 unless rows are proven not to depend on each other.

        Raises:
            ValueError: the model takes a fixed number of rows, and mixes them or gets another
                number; or the axis of rows cannot be told from other axes.
        """
        firsts = {n: (self.shape(n) or (None,))[0] for n in self.inputs if n in with_rows}
        fixed = {d for d in firsts.values() if isinstance(d, int)}
        if fixed == {1} or (rows == 1 and not fixed):
            return 1
        if fixed and rows % max(fixed):
            raise ValueError(
                f"the model takes {max(fixed)} rows at a time, and the inputs have {rows}: pass "
                f"{max(fixed)} rows, or export the model with a symbolic first axis"
            )
        mixing = self._reason_of_mixed_rows(feed, with_rows)
        if mixing is None:
            return max(fixed, default=self._batch_size)
        if fixed:
            raise ValueError(
                f"the model takes {max(fixed)} rows at a time, which it mixes or may mix "
                f"({mixing}): export it with a first axis of 1, or with a symbolic first axis"
            )
        symbols = {n: d for n, d in firsts.items() if d is not None}
        if len(set(symbols.values())) > 1:
            raise ValueError(
                f"rows are not proven to be independent ({mixing}), and the inputs "
                f"{list(symbols)} have first axes with different symbols: pass one row at a time"
            )
        if others := [] if self._rows_are_stated else self._shared_symbolic_lengths(firsts):
            raise ValueError(
                f"rows are not proven to be independent ({mixing}), and inputs and outputs have "
                f"another axis in common, {others}: say which axis is the rows with batch_axes="
                f"{{{next(iter(firsts))!r}: axis, {self.outputs[0]!r}: axis}}"
            )
        if not self._warned:
            logger.warning("rows run one at a time, each as if alone: %s", mixing)
            self._warned = True
        return 1

    def _shared_symbolic_lengths(self, firsts: Mapping[str, Dim]) -> list[str]:
        """Return the symbolic lengths that all inputs and outputs share, besides the first axes in
        `firsts`.

        Any of these may be the rows, unless a symbol of `firsts` is called a batch: then none is
        returned.
        """
        if any("batch" in str(d).lower() for d in firsts.values()):
            return []
        shapes = [self.shape(name) or () for name in (*firsts, *self.outputs)]
        common = set.intersection(*(set(shape) for shape in shapes)) - set(firsts.values())
        return sorted(d for d in common if isinstance(d, str) and is_stated(d))

    def _reason_of_mixed_rows(
        self, feed: Mapping[str, np.ndarray], with_rows: Collection[str]
    ) -> str | None:
        """Return why the model may mix rows; None if row i of outputs reads row i of inputs."""
        lengths = {name: feed[name].shape for name in self.inputs}
        axes = {name: 0 if name in with_rows else None for name in self.inputs}
        key = tuple((n, s[1:] if n in with_rows else s, axes[n]) for n, s in lengths.items())
        if key not in self._reasons_by_shapes:
            model = self._model.clone()
            try:
                require_independent_rows(model, axes, lengths)
                self._reasons_by_shapes[key] = None
            except UnprovenRows as e:
                self._reasons_by_shapes[key] = str(e)
        return self._reasons_by_shapes[key]


def check_model_and_device(proto: ModelProto, device: Any, batch_size: int, what: str) -> Device:
    """Return the `Device`; raise `ValueError` for nodes in training mode, which mix rows."""
    if training := names_of_training_nodes(proto):
        raise ValueError(
            f"nodes in training mode: {', '.join(map(printable, training[:3]))}; {what} would "
            "depend on other rows, or on random numbers: export the model in inference mode, after "
            "model.eval()"
        )
    check_count("batch_size", batch_size)
    return CPU if device is None else Device.of(device).check()


def require_differentiable(graph: ir.Graph, wrt: Sequence[ir.Value], y: ir.Value) -> None:
    """Raise `ValueError` unless `y` depends differentiably on each of the values `wrt`."""
    for x in wrt:
        if y in differentiable_values(graph, [x]):
            continue
        if y not in dependents(graph, [x]):
            raise ValueError(
                f"{y.name!r} does not depend on {x.name!r}: its attributions would all be zero; "
                f"leave {x.name!r} out of `wrt`"
            )
        raise ValueError(
            f"no differentiable path from {x.name!r} to {y.name!r}: every attribution would be "
            f"zero. {path_ends_text(graph, [x], [y])}. Name as `output` a value in front of "
            "this node, as the scores before an ArgMax, or use `occlusion`, which needs no gradient"
        )
