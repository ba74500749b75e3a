"""Specs of a graph's inputs, weights and outputs, and checks of tensors against these specs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from onnxgrad.bridges.host_graph import SharedSymbols
from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.errors import printable
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.torch.function import DTYPES, GraphFunction


@dataclass
class TensorSpec:
    """The name, dtype and shape of an input, a weight or an output."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: Dims | None

    @staticmethod
    def of(kind: str, value: ir.Value) -> TensorSpec:
        """Return the spec of a graph's value; raise `ValueError` for a type unknown to PyTorch."""
        tensor = isinstance(value.type, ir.TensorType)
        dtype = DTYPES.get(value.dtype) if tensor and value.dtype else None
        if dtype is None:
            raise ValueError(
                f"{kind} {value.name!r} has the type {value.type}, which PyTorch lacks: add a Cast"
            )
        return TensorSpec(kind, str(value.name), dtype, dims(value))

    def __str__(self) -> str:
        shape = ["..."] if self.shape is None else ["?" if d is None else d for d in self.shape]
        lengths = ", ".join(map(printable, shape))
        return f"{printable(self.name)}: {str(self.dtype).removeprefix('torch.')}[{lengths}]"

    def check(self, x: Any, device: torch.device) -> None:
        """Raise `TypeError` or `ValueError` if `x` does not fit this spec and `device`."""
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


def shared_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor of the elements of `array`, which shares its memory where PyTorch can."""
    if array.dtype.name == "bfloat16":  # PyTorch does not convert it from numpy
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only, and no operator writes to it
        return torch.from_numpy(array)


class GraphVariant:
    """The graph of a module for given weight dtypes and device, with the specs of its inputs.

    `constants` are the tensors of the last inputs of the graph, which no caller sees.
    """

    def __init__(
        self,
        graph: GraphFunction,
        inputs: list[TensorSpec],
        weights: list[TensorSpec],
        constants: list[Tensor],
    ) -> None:
        self.graph, self.inputs, self.weights = graph, inputs, weights
        self._constants = constants
        self._device = graph.device
        self._shared_symbols = SharedSymbols({spec.name: spec.shape for spec in inputs})

    def run(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of the graph for the tensors of a call."""
        return self.graph((*inputs, *weights, *self._constants))

    def needs_check(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> bool:
        """Return whether `check` must run, since onnxruntime may not report a bad tensor.

        onnxruntime does not compare symbolic dimensions, and copies tensors between devices.
        """
        return bool(self._shared_symbols) or any(
            not isinstance(x, Tensor) or x.device != self._device for x in (*inputs, *weights)
        )

    def cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the input tensors of a call, with floats cast to the dtypes of the graph."""
        return tuple(
            x.to(spec.dtype)
            if isinstance(x, Tensor) and x.is_floating_point() and spec.dtype.is_floating_point
            else x
            for spec, x in zip(self.inputs, inputs, strict=True)
        )

    def check(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> None:
        """Raise `TypeError` or `ValueError` for the first tensor that does not fit the specs and
        the device.
        """
        for specs, tensors in ((self.inputs, inputs), (self.weights, weights)):
            for spec, x in zip(specs, tensors, strict=True):
                spec.check(x, self._device)
        self._shared_symbols.check([x.shape for x in inputs])
