"""The part of a model between some of its values and some others, run on rows in chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import DerivativeOptions, DerivativeRequest, derivative
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.row_proofs import UnprovenRows, require_apart
from onnxgrad.checks import check_count
from onnxgrad.errors import printable
from onnxgrad.explain.paths import require_differentiable
from onnxgrad.explain.user_inputs import Arrays
from onnxgrad.graph.emit import garbage_kept
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.surgery import drop_unused_inputs, select_model_inputs_outputs
from onnxgrad.operators.shapes import Dim, Dims, dims, is_stated
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import CPU, Device
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.training.modes.inference_form import has_training_nodes

_Backward = tuple[Predictor, dict[str, str], str]


class Piece:
    """The model that computes `outputs` from `cut` and from the inputs that it needs besides.

    What computes the values of `cut` is not run. `batch_size` rows run at once; `stated` says that
    the user has said where the rows are. `inputs` are the names of the inputs that it reads.
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
        self._stated = stated
        names = list(dict.fromkeys([*names_without_default(proto), *cut]))
        self.outputs, self._device, self._batch_size = list(outputs), device, batch_size
        self._proto = select_model_inputs_outputs(proto, outputs, names)
        drop_unused_inputs(self._proto)
        with garbage_kept():
            self._model = prepare(self._proto)
        self._values = {str(x.name): x for x in self.graph.inputs}
        self.inputs = list(self._values)
        self._mixing: dict[tuple, str | None] = {}
        self._warned = False
        self._gradient: tuple[tuple[str, ...], _Backward] | None = None

    @property
    def graph(self) -> ir.Graph:
        """The prepared graph."""
        return self._model.graph

    def shape(self, name: str) -> Dims | None:
        """Return the shape that is known of an input or an output, as far as it is."""
        listed = [*self.graph.inputs, *self.graph.outputs]
        return next((dims(v) for v in listed if v.name == name), None)

    def run(self, feed: Mapping[str, np.ndarray], rowed: Collection[str]) -> list[np.ndarray]:
        """Return the outputs of all rows.

        `rowed` are the names of the inputs of `feed` whose first axis is the rows; the others are
        the same for each row.
        """
        parts = []
        for rows, part in self._chunks(feed, rowed):
            results = self._forward.run({name: part[name] for name in self._forward.inputs})
            for name, y in zip(self.outputs, results, strict=True):
                if y.ndim == 0 or len(y) != rows:
                    raise ValueError(
                        f"{name!r} of shape {list(y.shape)} does not have the {rows} rows of the "
                        "inputs along its first axis: name an `output` that has"
                    )
            parts.append(results)
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def gradients(
        self,
        feed: Mapping[str, np.ndarray],
        rowed: Collection[str],
        wrt: Sequence[str],
        seed: np.ndarray,
    ) -> Arrays:
        """Return the gradients of sum(seed * output) with respect to `wrt`; see `run`."""
        running, names, cotangent = self._backward(tuple(wrt))
        parts: list[list[np.ndarray]] = []
        for _, part in self._chunks({**feed, cotangent: seed}, {*rowed, cotangent}, cotangent):
            part = {name: part[name] for name in running.inputs}
            parts.append(running.run(part, [names[x] for x in wrt]))
        whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return dict(zip(wrt, whole, strict=True))

    @cached_property
    def _work(self) -> float:
        return count_multiply_adds(self.graph) * self._batch_size

    @cached_property
    def _forward(self) -> Predictor:
        return Predictor(self._proto, self.outputs, self._device, 0, self._work)

    def _backward(self, wrt: tuple[str, ...]) -> _Backward:
        """Return what runs the gradient, the names of the gradients and of the cotangent."""
        if self._gradient is None or self._gradient[0] != wrt:
            values = [self._values[name] for name in wrt]
            require_differentiable(self.graph, values, self.graph.outputs[0])
            request = DerivativeRequest([], list(wrt), DerivativeOptions.Zero)
            with garbage_kept():
                model, names = derivative(self._proto, request)
            running = Predictor(model, (), self._device, 0, 3 * self._work)
            before = {x.name for x in self._proto.graph.input}
            (cotangent,) = [x.name for x in model.graph.input if x.name not in before]
            self._gradient = wrt, (running, names, cotangent)
        return self._gradient[1]

    # -- rows ----------------------------------------------------------------------------------

    def _chunks(
        self, feed: Mapping[str, np.ndarray], rowed: Collection[str], *more: str
    ) -> Iterator[tuple[int, Arrays]]:
        """Yield the number of rows of each chunk, and its inputs."""
        needed = {name: feed[name] for name in (*self.inputs, *more)}
        rows = next(len(x) for name, x in needed.items() if name in rowed)
        size = self.at_once(needed, rowed, rows)
        for i in range(0, rows, size):
            part = {n: x[i : i + size] if n in rowed else x for n, x in needed.items()}
            yield min(size, rows - i), part

    def at_once(self, feed: Mapping[str, np.ndarray], rowed: Collection[str], rows: int) -> int:
        """Return how many rows run at once: one where it is not proven that they are independent.

        Raises:
            ValueError: the model takes a fixed number of rows, and mixes them or gets others; or
                inputs of several symbols for their rows, which cannot be told from other axes.
        """
        firsts = {n: (self.shape(n) or (None,))[0] for n in self.inputs if n in rowed}
        fixed = {d for d in firsts.values() if isinstance(d, int)}
        if fixed == {1} or (rows == 1 and not fixed):
            return 1
        if fixed and rows % max(fixed):
            raise ValueError(
                f"the model takes {max(fixed)} rows at a time, and has to compute {rows}: pass "
                "inputs of that many rows, or export it with a symbolic first axis"
            )
        mixing = self._proof(feed, rowed)
        if mixing is None:
            return max(fixed, default=self._batch_size)
        if fixed:
            raise ValueError(
                f"the model takes {max(fixed)} rows at a time, which it mixes or may mix "
                f"({mixing}): export it with a first axis of 1, or with a symbolic one"
            )
        symbols = {n: d for n, d in firsts.items() if d is not None}
        if len(set(symbols.values())) > 1:
            raise ValueError(
                f"rows are not proven to be independent ({mixing}), and the inputs "
                f"{list(symbols)} have first axes of different symbols: pass one row at a time"
            )
        others = {} if self._stated else self._other_axes(firsts)
        if others:
            raise ValueError(
                f"rows are not proven to be independent ({mixing}), and inputs and outputs have "
                f"another axis in common, {others}: say which are the rows with batch_axes="
                f"{{{next(iter(firsts))!r}: axis, {self.outputs[0]!r}: axis}}"
            )
        if not self._warned:
            logger.warning("rows run one at a time, each as if alone: %s", mixing)
            self._warned = True
        return 1

    def _other_axes(self, firsts: Mapping[str, Dim]) -> list[str]:
        """Return the symbols, except the first, that all inputs with rows and the outputs have.

        None if the first is called a batch.
        """
        if any("batch" in str(d).lower() for d in firsts.values()):
            return []
        shapes = [self.shape(name) or () for name in (*firsts, *self.outputs)]
        common = set.intersection(*(set(shape) for shape in shapes)) - set(firsts.values())
        return sorted(d for d in common if isinstance(d, str) and is_stated(d))

    def _proof(self, feed: Mapping[str, np.ndarray], rowed: Collection[str]) -> str | None:
        """Return None if row i of the outputs depends on row i of the inputs only, or why not."""
        lengths = {name: feed[name].shape for name in self.inputs}
        axes = {name: 0 if name in rowed else None for name in self.inputs}
        key = tuple((n, s[1:] if n in rowed else s, axes[n]) for n, s in lengths.items())
        if key not in self._mixing:
            model = self._model.clone()
            try:
                require_apart(model, axes, lengths)
                self._mixing[key] = None
            except UnprovenRows as e:
                self._mixing[key] = str(e)
        return self._mixing[key]


def checked_device(proto: ModelProto, device: Any, batch_size: int, what: str) -> Device:
    """Return the device called `device`, on which rows of `proto` can be explained one by one."""
    if training := has_training_nodes(proto):
        raise ValueError(
            f"nodes in training mode: {', '.join(map(printable, training[:3]))}; {what} would "
            "depend on other rows, or on random numbers: export the model in inference mode, as "
            "by model.eval()"
        )
    check_count("batch_size", batch_size)
    return CPU if device is None else Device.of(device).check()
