"""What a model of sounds says of itself: inputs, states, windows, and what its outputs are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import onnxgrad as og
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.tasks.base import softmax

Shape = tuple[int | str | None, ...]


def values(listed: Any, without: Any = ()) -> dict[str, tuple[np.dtype, Shape]]:
    """Return dtypes and shapes of tensors by name; a dimension is a length or a symbol."""
    found = {}
    for proto in listed:
        value: ir.Value = ir.from_proto(proto)
        if value.name not in without and value.dtype is not None and value.shape is not None:
            shape = tuple(d if isinstance(d, int) else d.value for d in value.shape)
            found[str(value.name)] = (value.dtype.numpy(), shape)
    return found


class SoundModel:
    """Runs a model on windows of waveforms.

    Args:
        proto: the model.
        options: has the arguments of `Sound` as attributes.
    """

    def __init__(self, proto: onnx.ModelProto, options: Any) -> None:
        self.rate, self.front, self.context = options.rate, options.front, options.context
        self.carry, constants = dict(options.carry or {}), options.constants or {}
        carry = self.carry
        weights = {tensor.name for tensor in proto.graph.initializer}
        inputs = values(proto.graph.input, weights)
        outputs = values(proto.graph.output, self.carry.values())
        for name in carry:
            if name not in inputs:
                raise ValueError(f"carry: the model has no input {name!r}, but {list(inputs)}")
        others = {n: v for n, v in inputs.items() if n not in carry and n not in constants}
        self.input = _select_one("input of sounds", others, None)
        self.output = _select_one("output", outputs, options.output)
        self.single = len(proto.graph.output) == 1
        self.shape, self.out = inputs[self.input][1], outputs[self.output][1]
        self.states = {name: inputs[name] for name in carry}
        self.constants = {
            n: np.asarray(constants.get(n, self.rate), dtype)
            for n, (dtype, shape) in inputs.items()
            if n in constants or (shape == () and n == "sr")
        }
        if unknown := set(inputs) - {self.input, *carry, *self.constants}:
            raise ValueError(f"the model has the inputs {sorted(unknown)}, too: pass constants=")
        self.units = self.out[-1] if len(self.out) > 1 else 1
        self.samples = self._window_length(options.seconds)
        self.rows = self.shape[0] if isinstance(self.shape[0], int) else None
        self.activation = "none" if og.losses.are_probabilities(proto, self.output) else None

    def _window_length(self, seconds: float | None) -> int:
        stated = self.shape[-1]
        asked = None if seconds is None else round(seconds * self.rate)
        if self.front is None and isinstance(stated, int):
            if asked not in (None, stated - self.context):
                raise ValueError(
                    f"seconds={seconds} are {asked} samples, and the input {self.input!r} takes "
                    f"{stated}, of which {self.context} are context"
                )
            asked = stated - self.context
        if asked is None or asked < 1:
            raise ValueError(f"how long is a window? The input {self.input!r} has the shape "
                             f"{self.shape}: pass seconds=")  # fmt: skip
        return asked

    @property
    def along(self) -> bool:
        """Whether the rows of a batch are consecutive windows: rows that no state has."""
        own = [shape for _, shape in self.states.values()]
        return bool(own) and self.rows is None and not any(self.shape[0] in s for s in own)

    def zeros(self, rows: int) -> dict[str, np.ndarray]:
        """Return the states at the beginning of `rows` files."""
        return {
            name: np.zeros([d if isinstance(d, int) else rows for d in shape], dtype)
            for name, (dtype, shape) in self.states.items()
        }

    def inputs(self, waves: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs for windows (N, samples), with the states of the beginning.

        Raises:
            ValueError: the features do not have the shape of the input.
        """
        x = waves if self.front is None else np.asarray(self.front(waves), np.float32)
        for y in (x, x.swapaxes(-1, -2)) if x.ndim > 2 else (x,):
            if y.ndim + 1 == len(self.shape):
                y = np.expand_dims(y, 1 if self.shape[1] == 1 else -1)
            pairs = zip(y.shape[1:], self.shape[1:], strict=False)
            if y.ndim == len(self.shape) and all(
                n == d or not isinstance(d, int) for n, d in pairs
            ):
                return {self.input: y, **self.constants, **self.zeros(len(y))}
        raise ValueError(
            f"the input {self.input!r} has the shape {self.shape}, and "
            f"{'windows' if self.front is None else 'what front returns'} {x.shape}"
        )

    def windows(self, x: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a waveform in windows (count, context + samples), and the sample of their start.

        The last one ends with the waveform, or of a model with states, in zeros.
        """
        count = max(1, -(-(len(x) - self.samples) // step) + 1)
        starts, size = np.arange(count) * step, self.context + self.samples
        if not self.carry:
            starts = np.minimum(starts, max(0, len(x) - self.samples))
        padded = np.zeros(starts[-1] + size, np.float32)
        padded[self.context :][: len(x)] = x
        return np.lib.stride_tricks.sliding_window_view(padded, size)[starts], starts

    def scores(self, predictor: Predictor, windows: np.ndarray, activation: Any) -> np.ndarray:
        """Return probabilities (windows, classes); states go from window to window."""
        size = 1 if self.carry and not self.along else self.rows or 64
        state, found = self.zeros(self.rows or 1), []
        for at in range(0, len(windows), size):
            x = windows[at : at + size]
            count = len(x)
            if self.rows:
                x = np.resize(x, (self.rows, x.shape[1]))
            feed = {**self.inputs(np.ascontiguousarray(x)), **state}
            y, *new = predictor.run(feed, [self.output, *self.carry.values()])
            state = dict(zip(self.carry, new, strict=True))
            found.append(y.reshape(len(x), -1)[:count])
        y = np.concatenate(found)
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-y))
        if activation == "softmax":
            return softmax(y)
        if y.min() < 0 or y.max() > 1.0001:
            raise ValueError(f"{self.output!r} holds {y.min()} to {y.max()}, no probabilities: "
                             "pass activation=")  # fmt: skip
        return y


def _select_one(what: str, found: Mapping[str, tuple[np.dtype, Shape]], chosen: str | None) -> str:
    """Return the name of the only value of floats, or the chosen one."""
    names = [n for n, (dtype, shape) in found.items() if dtype.kind == "f" and shape]
    if chosen in names:
        return str(chosen)
    if chosen is not None or len(names) != 1:
        raise ValueError(f"{what}: the model has {names}: choose one, carry= or constants= others")
    return names[0]
