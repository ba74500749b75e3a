"""`quantize`: quantize a model by onnxruntime so that it can still be trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.checks import check_choice, check_count
from onnxgrad.data.indices import indexed_tables
from onnxgrad.errors import ModelError, argument, printable, unknown
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.model import external
from onnxgrad.model.draft import Draft
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import model_nodes
from onnxgrad.operators import operator_of
from onnxgrad.quantization.by_onnxruntime import QuantizationJob, prepare_for_quantization
from onnxgrad.reporting import frames_inside
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import load_session
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.fields import LABEL_FIELDS, DataSpec
from onnxgrad.training.job import Job
from onnxgrad.training.model_loss import BATCH
from onnxgrad.training.modes.stored_integers import store_floats, stored_weights
from onnxgrad.training.objective import Objective
from onnxgrad.training.parameters.choice import list_patterns

_WEIGHTS = {"int8": "QInt8", "uint8": "QUInt8", "int4": "QInt4", "uint4": "QUInt4"}
_ACTIVATIONS = {"uint8": "QUInt8", "int8": "QInt8", "uint16": "QUInt16", "int16": "QInt16"}
_CALIBRATIONS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
IN_MEMORY = 1 << 26  # bytes of weights from which memory holds no copies of them
_TERMS = 64  # products that are summed in the test for overflow


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
    """Return `model` quantized by onnxruntime, in a form that can still be trained.

    Weights and biases are floats, under their names, with QuantizeLinear and DequantizeLinear
    behind weights and around products. A `Trainer` trains them by default, the gradient passing
    straight through the rounding, and saves models with integers.

    Nodes with masks stay floats: nodes that read or write values that are not finite or beyond 1e6,
    or scores (sums that a Softmax reads) that range over more than 64; the logger names them.

    Args:
        model: model of floats, serialized model or path; never modified.
        data: rows as for `Trainer.predict`, which show the ranges of activations.
        weights: "int8", "uint8", "int4" or "uint4".
        activations: "uint8", "int8", "uint16" or "int16"; None: weights alone are quantized.
        per_channel: whether each output channel has a scale; otherwise each weight.
        block_size: elements, along the inputs of a MatMul or Gemm, that share a scale: a power of
            2, at least 16. For weights alone; weights of other operators stay floats.
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
    check_choice("weights", weights, tuple(_WEIGHTS))
    check_choice("calibration", calibration, tuple(_CALIBRATIONS))
    if activations is not None:
        check_choice("activations", activations, tuple(_ACTIVATIONS))
    if block_size is not None:
        _check_block_size(block_size, activations)
    check_count("batch_size", batch_size)
    check_count("rows", rows)
    if not reduce_range and integer_products_overflow(activations, weights):
        kinds = f"{argument('weights', weights)} and {argument('activations', activations)}"
        warnings.warn(
            f"onnxruntime's products of {kinds} overflow on this processor, as on others without "
            "VNNI: the saved file may return other results than the model that trained. Pass "
            f"{argument('reduce_range', True)}, which gives weights 7 bits",
            stacklevel=frames_inside() + 1,
        )
    proto = read(model)
    if activations is not None and data is None:
        raise ValueError(
            "quantize needs data to find the ranges of activations: pass some rows, or "
            f"{argument('activations', None)} to quantize weights alone"
        )
    remedy = "quantize the float model; or train this model, naming the weights to train"
    refuse_quantized_model(proto, remedy)
    job = QuantizationJob(
        weights=_WEIGHTS[weights],
        activations=None if activations is None else _ACTIVATIONS[activations],
        per_channel=per_channel,
        block_size=block_size or 0,
        calibration=_CALIBRATIONS[calibration],
        reduce_range=reduce_range,
        operators=None if operators is None else list_patterns(operators),
        exclude=_nodes_to_exclude(proto, list_patterns(exclude)),
    )
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        origin = _move_weights_to_folder(prepare_for_quantization(proto, folder), folder)
        del proto
        feeds = None if activations is None else calibration_feeds(origin, data, batch_size, rows)
        quantized = job.run(origin, folder, feeds)
        floats = {t.name: t for t in origin.graph.initializer if t.data_type in _FLOATS}
        names = [entry.tensor.name for entry in stored_weights(quantized)]
        if not names:
            raise ModelError(
                "onnxruntime found no weight to quantize: it quantizes constant operands of MatMul,"
                " Gemm, Conv and others in the main graph, of known type"
            )
        result = store_floats(quantized, names, floats)
        del quantized
        return _load_external_data(result, folder)


def _check_block_size(size: int, activations: str | None) -> None:
    """Raise `ValueError` for a block size that onnxruntime does not support."""
    check_count("block_size", size)
    if size < 16 or size & (size - 1):
        raise ValueError(f"{argument('block_size', size)}: give a power of 2, at least 16")
    if activations is not None:
        raise ValueError(
            f"{argument('block_size', size)} is for weights alone, as onnxruntime has no product of"
            f" integers in blocks: pass {argument('activations', None)}"
        )


def refuse_quantized_model(proto: ModelProto, remedy: str) -> None:
    """Raise `ModelError` if the model `proto` is quantized; the message ends with `remedy`."""
    for node in model_nodes(proto):
        stores = node.op_type in ("DequantizeLinear", "MatMulNBits")
        if stores or not operator_of(node).traits.isdisjoint(("quantized", "rounds")):
            raise ModelError(
                f"the model is quantized already ({node.op_type} {printable(node.name)!r}): "
                f"{remedy}"
            )


def _nodes_to_exclude(proto: ModelProto, patterns: list[str]) -> list[str]:
    """Return the names of the nodes that match one of the patterns in the argument `exclude`.

    Raises:
        ValueError: a pattern matches no node.
    """
    names = [node.name for node in proto.graph.node if node.name]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise unknown("node (exclude=)", pattern, names)
        chosen |= dict.fromkeys(matched)
    return list(chosen)


def _move_weights_to_folder(proto: ModelProto, folder: Path) -> ModelProto:
    """Return `proto` with its large initializers in a file in `folder`, or `proto` if it is small.

    onnxruntime copies a model several times, and then copies no weights.
    """
    if external.inline_nbytes(proto) <= IN_MEMORY:
        return proto
    file = folder.resolve() / "floats.data"
    return external.write_initializers(
        proto, lambda t: (file, file) if external.is_large_inline(t, external.SMALL) else None
    )


def _load_external_data(proto: ModelProto, folder: Path) -> ModelProto:
    """Read the external data that lie in `folder` into the model, in place, and return the
    model.
    """
    for _, tensor in external.external_tensors(proto):
        place = {entry.key: entry.value for entry in tensor.external_data}["location"]
        if Path(place).is_relative_to(folder.resolve()):
            data = external.tensor_to_array(tensor).tobytes()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = data
    return proto


def calibration_feeds(
    proto: ModelProto, data: Any, batch_size: int, rows: int
) -> Iterator[dict[str, Any]]:
    """Yield `{input name: array}` batches of the first `rows` rows of `data`, for calibration.

    Raises:
        ValueError: the inputs do not accept the data.
    """
    model = prepare(proto, batch=BATCH)  # `prepare` renames symbols that have the same name
    graph, inputs = model.graph, list(model.graph.inputs)
    objective = Objective(
        Job(proto), model, inputs, [], WrittenLoss(), {}, indexed_tables(graph, inputs)
    )
    fields = DataSpec(objective)
    fields.left_out = LABEL_FIELDS
    size = fields.fixed_rows or min(batch_size, rows)
    source = Dataset(as_dataset(data).X).source(fields, size)
    left = rows
    for piece in source.epoch(None, 0, lambda batch: 1):
        arrays = piece.first_batch()
        if fields.fixed_rows is None and piece.own > left:
            arrays = fields.row_axes.take_rows(arrays, slice(0, left))
        data = fields.row_axes.as_declared(arrays)
        yield {name: np.ascontiguousarray(array) for name, array in data.items()}
        left -= piece.own
        if left <= 0:
            return


@cache
def integer_products_overflow(activations: str | None, weights: str) -> bool:
    """Return whether onnxruntime's MatMulInteger overflows on this processor for activations and
    weights of the given dtypes.

    Processors without VNNI add pairs of products of uint8 and int8 in 16 bits, which saturate.
    Other dtypes have no kernel of integers.
    """
    if not {activations, weights} <= {"uint8", "int8"}:
        return False
    feed: dict[str, np.ndarray] = {}
    draft, exact = Draft("products"), _TERMS
    for kind, shape in ((activations, (1, _TERMS)), (weights, (_TERMS, 1))):
        most = np.iinfo(np.dtype(kind)).max
        name, exact = f"x{len(feed)}", exact * int(most)
        feed[name] = np.full(shape, most, kind)
        draft.add(ir.val(name, ir.DataType.from_numpy(feed[name].dtype), shape))
    sums = draft.op.MatMulInteger(*draft.graph.inputs)
    sums.dtype = ir.DataType.INT32
    model = draft.model({"sums": sums})
    session = load_session(model, ort.SessionOptions(), providers=Device.of("cpu").providers)
    return bool(session.run(None, feed)[0].item() != exact)
