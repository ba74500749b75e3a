"""The precision of a training, and the rounding of weights to the 16 bits of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TypeProto

from onnxgrad.errors import argument, printable
from onnxgrad.graph.precision import HALVES
from onnxgrad.model.traversal import model_graphs, model_nodes
from onnxgrad.runtime.device import Device

PRECISIONS = ("auto", "float32", "mixed", "file")
Arrays = dict[str, np.ndarray]
Dtypes = dict[str, np.dtype]


def training_precision(precision: str, proto: ModelProto, device: Device) -> str:
    """Return the precision in which a model trains: "float32", "mixed" or "file".

    `precision` is the argument of a trainer, one of `PRECISIONS`. The result is "file" for a model
    without floats of 16 bits.

    Raises:
        ValueError: "mixed" for a model without floats of 16 bits; bfloat16 on the CPU in another
            precision than "float32".
    """
    halves = set(HALVES).intersection(_tensor_dtypes(proto))
    if not halves:
        if precision == "mixed":
            raise ValueError(
                f"{argument('precision', 'mixed')} computes in the 16 bits of the file, and the "
                "model has no floats of 16 bits: convert it first, as by "
                "onnxconverter_common.float16, or leave the argument out"
            )
        return "file"
    if precision == "auto":
        return "mixed" if device.memory[0] == "cuda" else "float32"
    if device.kind == "cpu" and precision != "float32" and ir.DataType.BFLOAT16 in halves:
        raise ValueError(
            f"{argument('precision', precision)}: onnxruntime has no products of bfloat16, which "
            f"the model has, on the CPU: give {argument('precision', 'float32')}, "
            "after which the file comes out in bfloat16 again, or train on a GPU"
        )
    return precision


def _tensor_dtypes(proto: ModelProto) -> Iterator[int]:
    """Yield the data types that the tensors of a model declare, and to which its nodes cast."""
    for graph in model_graphs(proto):
        yield from (t.data_type for t in graph.initializer)
        yield from (t.values.data_type for t in graph.sparse_initializer)
        yield from (_element_type(value.type) for value in (*graph.input, *graph.output))
    for attribute in (attribute for node in model_nodes(proto) for attribute in node.attribute):
        if attribute.name in ("to", "dtype", "output_dtype"):
            yield attribute.i
        elif attribute.HasField("t"):
            yield attribute.t.data_type


def _element_type(proto: TypeProto) -> int:
    """Return the data type of a tensor, or of the elements of a sequence; 0 for other types."""
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    return proto.tensor_type.elem_type if kind == "tensor_type" else 0


def cast_halves_to_float32(array: np.ndarray) -> np.ndarray:
    """Return a float16 or bfloat16 array as float32; an array of another dtype is unchanged."""
    half = array.dtype in (np.float16, ml_dtypes.bfloat16)
    return array.astype(np.float32) if half else array


def cast_to_dtypes(arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> Arrays:
    """Return arrays by name, cast to `dtypes`; elements beyond the range become infinite.

    Arrays whose name is not in `dtypes` are unchanged.
    """
    with np.errstate(over="ignore"):
        return {n: a.astype(dtypes[n]) if n in dtypes else a for n, a in arrays.items()}


def cast_within_range(arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> Arrays:
    """Return arrays by name, cast to `dtypes` for the file; no element becomes infinite.

    Raises:
        ValueError: an element is beyond the range of the dtype.
    """
    result = cast_to_dtypes(arrays, dtypes)
    for name in dtypes.keys() & result.keys():
        if lost := np.count_nonzero(np.isinf(result[name]) & np.isfinite(arrays[name])):
            dtype = dtypes[name]
            most = float(ml_dtypes.finfo(dtype).max)
            raise ValueError(
                f"{printable(name)!r} has {lost} elements beyond {most:g}, the largest number of "
                f"{dtype}, in which the file stores it: state.weights has them in float32. "
                "Convert the model to float32, or train with a lower learning rate"
            )
    return result


def rounding_errors(arrays: Mapping[str, np.ndarray], dtypes: Dtypes) -> dict[str, float]:
    """Return the `largest` and the `mean` error of rounding arrays to the dtypes of a file."""
    largest, total, count = 0.0, 0.0, 0
    for name in dtypes.keys() & arrays.keys():
        exact = arrays[name]
        with np.errstate(over="ignore"):
            difference = np.abs(exact - exact.astype(dtypes[name]).astype(exact.dtype))
        largest = max(largest, float(difference.max(initial=0.0)))
        total, count = total + float(difference.sum(dtype=np.float64)), count + difference.size
    return {"largest": largest, "mean": total / count} if count else {}


def rounding_text(errors: Mapping[str, float]) -> str:
    """Return the result of `rounding_errors` as a sentence; empty if nothing is rounded."""
    if not errors:
        return ""
    return (
        f"weights are rounded to the 16 bits of the file, by {errors['largest']:.2g} at most and "
        f"{errors['mean']:.2g} on average; evaluations use the rounded weights"
    )
