"""Calls of `onnxruntime.quantization`, which logs, prints, and works on files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import raise_opset
from onnxgrad.errors import ModelError, first_line
from onnxgrad.model import external
from onnxgrad.model.constants import opset_versions
from onnxgrad.model.read import read
from onnxgrad.model.traversal import nodes_of
from onnxgrad.model.write import save

_PER_AXIS_OPSET = 13  # the first whose QuantizeLinear has an axis
_PRODUCTS = ["MatMul", "Gemm"]  # whose weights onnxruntime reads in blocks


def prepared(proto: ModelProto, folder: Path) -> ModelProto:
    """Return `proto` as it is quantized; mostly, it is so already.

    An opset whose QuantizeLinear has no axis is raised. BatchNormalization nodes become a part of
    the convolutions in front of them, by onnxruntime: nodes in between would be rounded, and then
    no kernel of integers would remain. Without them, the names of the file stay.
    """
    if opset_versions(proto.opset_import).get("", 0) < _PER_AXIS_OPSET:
        proto = raise_opset(proto)
    if not any(node.op_type == "BatchNormalization" for node in nodes_of(proto)):
        return proto
    from onnxruntime.quantization.shape_inference import quant_pre_process

    before, after = folder / "given.onnx", folder / "prepared.onnx"
    save(proto, before)
    with _quiet(), _as_model_error():
        large = external.inline_nbytes(proto) > external.IN_MODEL
        quant_pre_process(before, after, skip_symbolic_shape=True, save_as_external_data=large)
    return read(after)


@dataclass
class Job:
    """How onnxruntime quantizes.

    Attributes:
        weights: name of a `QuantType`.
        activations: name of a `QuantType`; None: weights alone are quantized.
        per_channel: whether each output channel has a scale.
        block_size: elements that share a scale; 0 for no blocks.
        calibration: name of a `CalibrationMethod`.
        reduce_range: whether weights have 7 of 8 bits.
        operators: types of the operators to quantize; None for all.
        exclude: names of the nodes to leave out.
    """

    weights: str
    activations: str | None
    per_channel: bool
    block_size: int
    calibration: str
    reduce_range: bool = False
    operators: list[str] | None = None
    exclude: list[str] = field(default_factory=list)

    def run(
        self, proto: ModelProto, folder: Path, feeds: Iterator[dict[str, Any]] | None
    ) -> ModelProto:
        """Return the quantized model, with stored integers.

        Raises:
            ModelError: onnxruntime cannot quantize it.
        """
        before, after = folder / "float.onnx", folder / "quantized.onnx"
        save(proto, before)
        large = external.inline_nbytes(proto) > external.IN_MODEL or bool(external.files_of(proto))
        with _quiet(), _as_model_error():
            if feeds is None:
                self._weights_alone(before, after, large)
            else:
                self._with_activations(before, after, feeds, large)
        return read(after)

    def _with_activations(
        self, before: Path, after: Path, feeds: Iterator[dict[str, Any]], large: bool
    ) -> None:
        from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static

        assert self.activations is not None
        quantize_static(
            before,
            after,
            _reader(feeds),
            op_types_to_quantize=self.operators,
            per_channel=self.per_channel,
            reduce_range=self.reduce_range,
            activation_type=QuantType[self.activations],
            weight_type=QuantType[self.weights],
            nodes_to_exclude=self.exclude,
            use_external_data_format=large,
            calibrate_method=CalibrationMethod[self.calibration],
            extra_options={"CalibStridedMinMax": 1},  # whatever the method is
        )

    def _weights_alone(self, before: Path, after: Path, large: bool) -> None:
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.quantize import update_opset_version
        from onnxruntime.quantization.registry import QDQRegistry

        kind, blocks = QuantType[self.weights], self.block_size
        known = _PRODUCTS if blocks else sorted(QDQRegistry)
        operators = known if self.operators is None else self.operators
        model = update_opset_version(onnx.load(before), kind, block_size=blocks)
        quantizer = _weight_quantizer()(
            model,
            self.per_channel or bool(blocks),
            self.reduce_range,
            kind,
            QuantType.QUInt8,
            None,
            [],
            self.exclude,
            [name for name in operators if name in known],
            {"BlockSize": blocks, "QDQKeepRemovableActivations": True},
        )
        quantizer.quantize_model()
        quantizer.model.save_model_to_file(after, large)


def _reader(feeds: Iterator[dict[str, Any]]) -> Any:
    """Return feeds as onnxruntime reads them one by one: they may differ in shape."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = list(feeds)
            self.left: Iterator[dict[str, Any]] = iter(self.feeds)

        def __len__(self) -> int:
            return len(self.feeds)

        def set_range(self, start_index: int, end_index: int) -> None:
            self.left = iter(self.feeds[start_index:end_index])

        def get_next(self) -> dict[str, Any] | None:
            return next(self.left, None)

    return Reader()


def _weight_quantizer() -> Any:
    """Return the class of onnxruntime that quantizes, without activations and biases.

    Blocks are along the inputs of a product, where its scales per channel are along the outputs.
    """
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    class WeightQuantizer(QDQQuantizer):
        def quantize_activation_tensor(self, tensor_name: str) -> None:
            """Leave it in floats."""

        def quantize_output_same_as_input(self, *_: str) -> None:
            """Leave it in floats."""

        def quantize_bias_tensor(self, *_: Any) -> None:
            """Leave it in floats."""

        def quantize_weight_tensor_per_channel(self, tensor_name: str, axis: int) -> None:
            """Quantize a weight; in blocks, only if it is a matrix."""
            weight = self.initializers.get(tensor_name)
            if self.block_size and (weight is None or len(weight.dims) != 2):
                return
            other = 1 - axis if self.block_size else axis
            super().quantize_weight_tensor_per_channel(tensor_name, other)

        def quantize_weight_tensor(self, tensor_name: str) -> None:
            """Quantize a weight, if it has the axis of the channels that blocks need."""
            if not self.block_size:
                super().quantize_weight_tensor(tensor_name)

    return WeightQuantizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what onnxruntime logs by the root logger, and prints, in the block."""
    root, drop = logging.getLogger(), logging.NullHandler()
    own = logging.getLogger("onnxruntime.quantization")
    level = own.level
    root.addFilter(_never)
    root.addHandler(drop)  # without any, it would add one that writes to stderr, and stays
    own.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        root.removeFilter(_never)
        root.removeHandler(drop)
        own.setLevel(level)


def _never(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _as_model_error() -> Iterator[None]:
    """Raise what onnxruntime raises as `ModelError`, but errors of the data."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as e:  # of many types
        raise ModelError(f"onnxruntime cannot quantize the model: {first_line(e)}") from e
