"""Call `onnxruntime.quantization` on models in memory, without its logs and prints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnxgrad.errors import ModelError, first_line
from onnxgrad.model import external
from onnxgrad.model.constants import opset_versions
from onnxgrad.model.local_functions import raise_opset
from onnxgrad.model.opsets import import_all_domains
from onnxgrad.model.read import read
from onnxgrad.model.scopes import unused_name
from onnxgrad.model.traversal import model_nodes
from onnxgrad.model.write import save
from onnxgrad.operators import REORDERS, SELECTS, names_with_trait, operator_of
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import load_session

_PER_AXIS_OPSET = 13  # the first opset whose QuantizeLinear has an axis
Range = tuple[float, float]  # least and greatest element of a value
_CALIBRATORS: dict[str, tuple[str, dict[str, Any]]] = {  # as `create_calibrator` creates them
    "MinMax": ("MinMaxCalibrater", {}),
    "Entropy": ("EntropyCalibrater", {"num_bins": 128, "num_quantized_bins": 128}),
    "Percentile": (
        "PercentileCalibrater", {"num_bins": 2048, "percentile": 99.999, "symmetric": True},
    ),
}  # fmt: skip
_PRODUCTS = ["MatMul", "Gemm"]  # operators whose weights onnxruntime reads in blocks


def prepare_for_quantization(proto: ModelProto, folder: Path) -> ModelProto:
    """Return `proto` with BatchNormalization fused into convolutions and, if its opset is too old
    for quantization, a newer opset.

    An opset whose QuantizeLinear has no axis is raised. onnxruntime makes BatchNormalization nodes
    part of the convolutions in front of them: nodes in between would be rounded, and then no kernel
    of integers would remain. Without BatchNormalization, the names of the file stay.
    """
    proto = import_all_domains(proto)
    if opset_versions(proto.opset_import).get("", 0) < _PER_AXIS_OPSET:
        proto = raise_opset(proto)
    if not any(node.op_type == "BatchNormalization" for node in model_nodes(proto)):
        return proto
    from onnxruntime.quantization.shape_inference import quant_pre_process

    before, after = folder / "given.onnx", folder / "prepared.onnx"
    save(proto, before)
    with _muted_onnxruntime(), _errors_as_model_error():
        large = external.inline_nbytes(proto) > external.IN_MODEL
        quant_pre_process(before, after, skip_symbolic_shape=True, save_as_external_data=large)
    return read(after)


@dataclass
class QuantizationJob:
    """The arguments of a quantization by onnxruntime, with the method `run` that quantizes a model.

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
        """Return the model `proto` quantized by onnxruntime, with weights stored as integers.

        Raises:
            ModelError: onnxruntime cannot quantize it.
        """
        before, after = folder / "float.onnx", folder / "quantized.onnx"
        save(proto, before)
        large = external.inline_nbytes(proto) > external.IN_MODEL or bool(
            external.external_files(proto)
        )
        left: list[str] = []
        with _muted_onnxruntime(), _errors_as_model_error():
            if feeds is None:
                self._quantize_weights(before, after, large)
            else:
                left = self._quantize_activations(before, after, list(feeds), large)
        if left:
            logger.info("%d nodes with masks stay floats: %s", len(left), ", ".join(left))
        return read(after)

    def _quantize_activations(
        self, before: Path, after: Path, feeds: list[dict[str, Any]], large: bool
    ) -> list[str]:
        """Quantize weights and activations; return the names of the nodes that stay float because
        they read or write masks.
        """
        from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_static
        from onnxruntime.quantization.calibrate import save_tensors_data
        from onnxruntime.quantization.quant_utils import load_model_with_shape_infer
        from onnxruntime.quantization.quantize import update_opset_version
        from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

        assert self.activations is not None
        types = QuantType[self.weights], QuantType[self.activations]
        operators = self.operators or sorted({*QLinearOpsRegistry, *QDQRegistry})
        model = update_opset_version(load_model_with_shape_infer(before), *types)
        _name_unnamed_nodes(model.graph)
        onnx.save_model(model, before, save_as_external_data=large)
        del model  # memory holds the weights once at most

        ranges = self._activation_ranges("MinMax", before, operators, feeds, set(), large)
        ends = {x: (float(np.min(r.lowest)), float(np.max(r.highest))) for x, r in ranges.items()}
        graph = _load_without_data(before).graph
        wide = mask_values(graph, ends)
        nodes = [n for n in graph.node if not wide.isdisjoint([*n.input, *n.output])]
        if self.calibration != "MinMax":
            ranges = self._activation_ranges(
                self.calibration, before, operators, feeds, wide, large
            )
        ranges.data = {name: entry for name, entry in ranges.items() if name not in wide}
        save_tensors_data(ranges, before.with_name("ranges.json"))
        quantize_static(
            before,
            after,
            None,
            calibration_cache_path=before.with_name("ranges.json"),
            op_types_to_quantize=operators,
            per_channel=self.per_channel,
            reduce_range=self.reduce_range,
            activation_type=types[1],
            weight_type=types[0],
            nodes_to_exclude=[*self.exclude, *(node.name for node in nodes)],
            use_external_data_format=large,
            calibrate_method=CalibrationMethod[self.calibration],
        )
        return [n.name for n in nodes if n.op_type in operators and n.name not in self.exclude]

    @staticmethod
    def _activation_ranges(
        method: str,
        path: Path,
        operators: list[str],
        feeds: list[dict[str, Any]],
        without: set[str],
        large: bool,
    ) -> Any:
        """Return the calibrated ranges of all activations, except for the activations named in
        `without`.
        """
        from onnxruntime.quantization import calibrate

        file, (kind, options) = path.with_name(f"{method}.onnx"), _CALIBRATORS[method]
        calibrator = getattr(calibrate, kind)(
            path, operators, str(file), use_external_data_format=large, **options
        )
        calibrator.augment_graph()
        calibrator.model = None  # was written to the file, from which the session maps the weights
        settings = ort.SessionOptions()
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        calibrator.infer_session = load_session(
            _load_without_data(file), settings, providers=CPU.providers
        )
        if without:  # infinite values have no histogram
            calibrator.tensors_to_calibrate -= without
        for feed in feeds:
            calibrator.collect_data(SimpleNamespace(get_next=partial(next, iter([feed]), None)))
        return calibrator.compute_data()

    def _quantize_weights(self, before: Path, after: Path, large: bool) -> None:
        """Quantize the weights, and no activations, of the model file `before`, and write the file
        `after`.
        """
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.quantize import update_opset_version
        from onnxruntime.quantization.registry import QDQRegistry

        kind, blocks = QuantType[self.weights], self.block_size
        known = _PRODUCTS if blocks else sorted(QDQRegistry)
        operators = known if self.operators is None else self.operators
        model = update_opset_version(onnx.load(before), kind, block_size=blocks)
        quantizer = _weight_quantizer_class()(
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


def _load_without_data(path: Path) -> ModelProto:
    """Return the model of a file, which refers to its external data by absolute paths."""
    model = onnx.load(path, load_external_data=False)
    return external.move_data_locations(model, path.parent.resolve().joinpath)


def _name_unnamed_nodes(graph: GraphProto) -> None:
    """Give nodes without a name a new name, in place: onnxruntime excludes nodes by name."""
    taken = {node.name for node in graph.node}
    for node in graph.node:
        if not node.name:
            node.name = unused_name(node.op_type, taken)


def _weight_quantizer_class() -> Any:
    """Return a subclass of onnxruntime's QDQQuantizer that quantizes weights only.

    Blocks are along the inputs of a product, where its scales per channel are along the outputs.
    """
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    class WeightQuantizer(QDQQuantizer):
        def quantize_activation_tensor(self, tensor_name: str) -> None:
            """Do nothing, so that activations stay float."""

        def quantize_output_same_as_input(self, *_: str) -> None:
            """Do nothing, so that the output of the node stays float."""

        def quantize_bias_tensor(self, *_: Any) -> None:
            """Do nothing, so that the bias stays float."""

        def quantize_weight_tensor_per_channel(self, tensor_name: str, axis: int) -> None:
            """Quantize a weight with a scale for each channel, or for each block; blocks are for
            matrices only.
            """
            weight = self.initializers.get(tensor_name)
            if self.block_size and (weight is None or len(weight.dims) != 2):
                return
            other = 1 - axis if self.block_size else axis
            super().quantize_weight_tensor_per_channel(tensor_name, other)

        def quantize_weight_tensor(self, tensor_name: str) -> None:
            """Quantize a weight with a single scale; if blocks are asked for, leave the weight
            float.
            """
            if not self.block_size:
                super().quantize_weight_tensor(tensor_name)

    return WeightQuantizer


@contextmanager
def _muted_onnxruntime() -> Iterator[None]:
    """Suppress the log records and prints of onnxruntime inside the `with` block."""
    root, drop = logging.getLogger(), logging.NullHandler()
    own = logging.getLogger("onnxruntime.quantization")
    level = own.level
    root.addFilter(_reject_record)
    root.addHandler(drop)  # without a handler, logging would add one that writes to stderr
    own.setLevel(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        root.removeFilter(_reject_record)
        root.removeHandler(drop)
        own.setLevel(level)


def _reject_record(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def _errors_as_model_error() -> Iterator[None]:
    """Convert errors in the `with` block to `ModelError`, except for `ValueError` and `OSError`,
    which the user's data cause.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as e:  # onnxruntime raises errors of many types
        raise ModelError(f"onnxruntime cannot quantize the model: {first_line(e)}") from e


# -- values with attention masks must stay float: no scale fits mask and scores --------------------

_LARGEST = 1e6  # the largest absolute value of an activation
_WIDEST = 64  # range of scores: by steps of 8 bits, a Softmax changes by a factor of exp(1/8)
_SUMS = names_with_trait("sums") | REORDERS | SELECTS
_SCALES = {"Mul", "Div"}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def mask_values(graph: GraphProto, ranges: Mapping[str, Range]) -> set[str]:
    """Return the names of the values that hold attention masks, or scores with masks: the nodes
    that read or write them stay float.

    1. Values that are not finite, or beyond 1e6.
    2. Scores, values of which a Softmax reads sums, that range over more than 64. Results of a
       product are no sums yet, and are quantized.
    3. Scores that are computed from values of 1 or 2: rows without a masked position have narrow
       ranges.

    Args:
        graph: a model of floats.
        ranges: least and greatest element of each value.
    """
    ends = {**ranges, **_constant_ranges(graph)}
    makers = {name: node for node in graph.node for name in node.output}
    scores = _values_before_softmax(graph, makers)
    # also true for NaN
    found = {name for name, (low, high) in ends.items() if not max(-low, high) <= _LARGEST}
    for name in scores & ends.keys():
        low, high = ends[name]
        made = name in makers and "quantizable" in operator_of(makers[name]).traits
        if not made and max(high, 0) - min(low, 0) > _WIDEST:  # the range of a scale includes 0
            found.add(name)
    for node in graph.node:
        summed = node.op_type in _SUMS | _SCALES and not found.isdisjoint(node.input)
        if summed and not scores.isdisjoint(node.output):
            found.update(node.output)
    return found


def _constant_ranges(graph: GraphProto) -> dict[str, Range]:
    """Return `{name: (least, greatest element)}` of the float constants that Add, Mul and similar
    nodes read.
    """
    readers = [node for node in graph.node if node.op_type in _SUMS | _SCALES]
    read = {name for node in readers for name in node.input}
    stored = {t.name: t for t in graph.initializer if t.name in read and t.data_type in _FLOATS}
    arrays = {name: external.tensor_to_array(tensor) for name, tensor in stored.items()}
    return {n: (float(np.min(a)), float(np.max(a))) for n, a in arrays.items() if a.size}


def _values_before_softmax(graph: GraphProto, makers: Mapping[str, NodeProto]) -> set[str]:
    """Return the names of the values from which the operands of Softmax are computed by sums,
    scalings, moves and selections.
    """
    pending = [x for node in graph.node if node.op_type == "Softmax" for x in node.input]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found and name in makers and makers[name].op_type in _SUMS | _SCALES:
            pending.extend(makers[name].input)
        found.add(name)
    return found
