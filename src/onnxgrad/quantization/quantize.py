"""`quantize`: a model as onnxruntime quantizes it, in the form that trains."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onnx import ModelProto, TensorProto

from onnxgrad.checks import check_choice, check_count
from onnxgrad.errors import ModelError, argument, printable, unknown
from onnxgrad.model import external
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import nodes_of
from onnxgrad.operators import operator_of
from onnxgrad.quantization.by_onnxruntime import Job, prepared
from onnxgrad.quantization.calibration import feeds
from onnxgrad.quantization.overflow import integer_products_overflow
from onnxgrad.reporting import frames_inside
from onnxgrad.training.modes.stored_integers import as_floats, stored
from onnxgrad.training.parameters.choice import as_list

_WEIGHTS = {"int8": "QInt8", "uint8": "QUInt8", "int4": "QInt4", "uint4": "QUInt4"}
_ACTIVATIONS = {"uint8": "QUInt8", "int8": "QInt8", "uint16": "QUInt16", "int16": "QInt16"}
_CALIBRATIONS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def quantize(
    model: ModelLike,
    data: Any = None,
    *,
    weights: str = "int8",
    activations: str | None = "uint8",
    per_channel: bool = True,
    block_size: int | None = None,
    reduce_range: bool = False,
    calibration: str = "minmax",
    rows: int = 1000,
    batch_size: int = 32,
    operators: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
) -> ModelProto:
    """Return `model` quantized by onnxruntime, in the form that trains.

    Weights and biases are floats, under their names, with QuantizeLinear and DequantizeLinear
    behind weights and around products. A `Trainer` trains them by default, the gradient passing
    straight through the rounding, and what it saves holds integers.

    Nodes with masks stay floats: those that read or write values that are not finite or beyond 1e6,
    or scores (sums of which Softmax reads) that range over more than 64; the logger names them.

    Args:
        model: model of floats, serialized model or path; never modified.
        data: rows as for `Trainer.predict`, which show the ranges of activations.
        weights: "int8", "uint8", "int4" or "uint4".
        activations: "uint8", "int8", "uint16" or "int16"; None: weights alone are quantized.
        per_channel: whether each output channel has a scale; otherwise each weight.
        block_size: elements, along the inputs of a MatMul or Gemm, that share a scale: a power of
            2, at least 16. Of weights alone; those of other operators stay floats.
        reduce_range: whether weights get 7 of 8 bits, for processors without VNNI: where products
            overflow on this one, a warning says so.
        calibration: how ranges follow from values: "minmax", "entropy" or "percentile".
        rows: how many rows of `data` are looked at, at most.
        batch_size: rows of one call of the runtime, of data that are not batches already.
        operators: types of operators to quantize. None: all that onnxruntime can.
        exclude: names of nodes that stay floats, and patterns of `fnmatch`.

    Raises:
        ValueError: an invalid argument; data that the inputs do not accept.
        ModelError: a model that is unreadable or quantized, or that onnxruntime cannot quantize.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2,2] w = {1, 2, 3, 4}>
        ...     { y = MatMul(x, w) }''')
        >>> quantized = og.quantize(model, np.float32([[-1, 2], [3, -4]]))
        >>> [t.name for t in og.trainable(quantized).trained]
        ['w']
        >>> trained = og.Trainer(quantized, "squared_error").model
        >>> {t.name: t.data_type for t in trained.graph.initializer}["w_quantized"]  # INT8
        3
    """
    job = _job(weights, activations, per_channel, block_size, calibration)
    job.reduce_range = reduce_range
    job.operators = None if operators is None else as_list(operators)
    sizes = check_count("batch_size", batch_size), check_count("rows", rows)
    if not reduce_range and integer_products_overflow(activations, weights):
        kinds = f"{argument('weights', weights)} and {argument('activations', activations)}"
        warnings.warn(
            f"onnxruntime's products of {kinds} overflow on this processor, as on others without "
            "VNNI: the saved file may compute something else than the model that trained. Pass "
            f"{argument('reduce_range', True)}, which gives weights 7 bits",
            stacklevel=frames_inside() + 1,
        )
    return _quantized(read(model), data, job, sizes, as_list(exclude))


def _job(
    weights: str,
    activations: str | None,
    per_channel: bool,
    block_size: int | None,
    calibration: str,
) -> Job:
    """Return how onnxruntime is to quantize.

    Raises:
        ValueError: an invalid argument.
    """
    check_choice("weights", weights, tuple(_WEIGHTS))
    check_choice("calibration", calibration, tuple(_CALIBRATIONS))
    if activations is not None:
        check_choice("activations", activations, tuple(_ACTIVATIONS))
    if block_size is not None:
        _check_block_size(block_size, activations)
    kinds = _WEIGHTS[weights], None if activations is None else _ACTIVATIONS[activations]
    return Job(*kinds, per_channel, block_size or 0, _CALIBRATIONS[calibration])


def _quantized(
    proto: ModelProto, data: Any, job: Job, sizes: tuple[int, int], exclude: list[str]
) -> ModelProto:
    if job.activations is not None and data is None:
        raise ValueError(
            "quantize needs data to find the ranges of activations: pass some rows, or "
            f"{argument('activations', None)} to quantize weights alone"
        )
    _check_floats(proto)
    job.exclude = _excluded(proto, exclude)
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        origin = prepared(proto, Path(folder))
        calibrating = None if job.activations is None else feeds(origin, data, *sizes)
        quantized = job.run(origin, Path(folder), calibrating)
        floats = {t.name: t for t in origin.graph.initializer if t.data_type in _FLOATS}
        names = [entry.tensor.name for entry in stored(quantized)]
        if not names:
            raise ModelError(
                "onnxruntime found no weight to quantize: it quantizes constant operands of MatMul,"
                " Gemm, Conv and others in the main graph, of known type"
            )
        return _in_memory(as_floats(quantized, names, floats), Path(folder))


def _check_block_size(size: int, activations: str | None) -> None:
    check_count("block_size", size)
    if size < 16 or size & (size - 1):
        raise ValueError(f"{argument('block_size', size)}: give a power of 2, at least 16")
    if activations is not None:
        raise ValueError(
            f"{argument('block_size', size)} is for weights alone, as onnxruntime has no product of"
            f" integers in blocks: pass {argument('activations', None)}"
        )


def _check_floats(proto: ModelProto) -> None:
    """Raise `ModelError` if a model is quantized already."""
    for node in nodes_of(proto):
        stores = node.op_type in ("DequantizeLinear", "MatMulNBits")
        if stores or not operator_of(node).traits.isdisjoint(("quantized", "rounds")):
            raise ModelError(
                f"the model is quantized already ({node.op_type} {printable(node.name)!r}): "
                "quantize the model of floats; or train this one, naming the weights to train"
            )


def _excluded(proto: ModelProto, patterns: list[str]) -> list[str]:
    """Return the names of the nodes that patterns name.

    Raises:
        ValueError: a pattern that matches none.
    """
    names = [node.name for node in proto.graph.node if node.name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise unknown("node (exclude=)", pattern, names)
        chosen |= dict.fromkeys(matched)
    return list(chosen)


def _in_memory(proto: ModelProto, folder: Path) -> ModelProto:
    """Return `proto` with the data that are in a folder which will be removed, in place."""
    for _, tensor in external.external_tensors(proto):
        place = {entry.key: entry.value for entry in tensor.external_data}["location"]
        if Path(place).is_relative_to(folder.resolve()):
            data = external.array(tensor).tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = data
    return proto
