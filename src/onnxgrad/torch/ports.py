"""The tensors that a graph takes and returns, and the errors for tensors that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.errors import printable
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.torch.function import DTYPES, Graph


@dataclass
class Port:
    """The name, dtype and shape of an input, a weight or an output."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: Dims | None

    @staticmethod
    def of(kind: str, value: ir.Value) -> Port:
        """Return the port of `value`, or raise for a type that PyTorch does not have."""
        tensor = isinstance(value.type, ir.TensorType)
        dtype = DTYPES.get(value.dtype) if tensor and value.dtype else None
        if dtype is None:
            raise ValueError(f"{kind} {value.name!r} is {value.type}, no tensor that PyTorch has")
        return Port(kind, str(value.name), dtype, dims(value))

    def __str__(self) -> str:
        return f"{printable(self.name)}: {str(self.dtype).removeprefix('torch.')}{self._lengths()}"

    def _lengths(self) -> str:
        shape = ["..."] if self.shape is None else ["?" if d is None else d for d in self.shape]
        return f"[{', '.join(map(printable, shape))}]"

    def check(self, x: Any, device: torch.device) -> None:
        """Raise if `x` does not fit."""
        who = f"{self.kind} {self.name!r}"
        if not isinstance(x, Tensor):
            raise TypeError(f"{who} takes a tensor, not {type(x).__name__}")
        if x.device != device:
            raise ValueError(
                f"{who} is on {x.device}, the module on {device}: move one of them with .to"
            )
        if x.dtype != self.dtype:
            raise ValueError(
                f"{who} takes {self.dtype}, not {x.dtype}: convert it with .to, or the module"
            )
        if mismatch := shape_mismatch(x.shape, self.shape):
            raise ValueError(f"{who} {mismatch}")


class Variant:
    """The graph in one precision on one device."""

    def __init__(self, graph: Graph, inputs: list[Port], weights: list[Port]) -> None:
        self.graph, self.inputs, self.weights = graph, inputs, weights
        self._device = graph.device
        axes: dict[str, list[tuple[int, int]]] = {}
        for i, port in enumerate(inputs):
            for axis, d in enumerate(port.shape or ()):
                if isinstance(d, str):
                    axes.setdefault(d, []).append((i, axis))
        self._same = {symbol: pairs for symbol, pairs in axes.items() if len(pairs) > 1}

    def doubtful(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> bool:
        """Return whether `check` is needed, as onnxruntime would not raise by itself.

        It does not compare symbolic dimensions, and copies tensors between devices.
        """
        device = self._device
        return bool(
            self._same
            or [x for x in inputs if not isinstance(x, Tensor) or x.device != device]
            or [w for w in weights if w.device != device]
        )

    def cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return `inputs` with the floats in the dtypes of the graph."""
        return tuple(
            x.to(port.dtype)
            if isinstance(x, Tensor) and x.is_floating_point() and port.dtype.is_floating_point
            else x
            for port, x in zip(self.inputs, inputs, strict=True)
        )

    def check(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> None:
        """Raise for the first tensor that does not fit."""
        for ports, tensors in ((self.inputs, inputs), (self.weights, weights)):
            for port, x in zip(ports, tensors, strict=True):
                port.check(x, self._device)
        for symbol, places in self._same.items():  # gradients count on it
            lengths = [inputs[i].shape[axis] for i, axis in places]
            if len(set(lengths)) > 1:
                where = [f"axis {axis} of {self.inputs[i].name!r}" for i, axis in places]
                listed = ", ".join(f"{n} as {w}" for n, w in zip(lengths, where, strict=True))
                raise ValueError(f"{symbol!r} has more than one length: {listed}")
