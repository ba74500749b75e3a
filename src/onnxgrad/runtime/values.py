"""Conversion between arrays and OrtValues."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue as BoundValue

from onnxgrad.runtime.device import Device

FLOATS = {  # by the names of onnxruntime
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}


_VIEWED = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_CACHED_PART = 1 << 16  # elements that stay in the cache


def wrapped(value: Any) -> Any:
    """Return an element of an `OrtValueVector` as an `onnxruntime.OrtValue`; leave other values."""
    return ort.OrtValue(value) if isinstance(value, BoundValue) else value


def to_numpy(value: Any) -> np.ndarray:
    """Return an OrtValue, a tensor of torch or an array-like as an array."""
    value = wrapped(value)
    if isinstance(value, ort.OrtValue):
        return value.numpy()
    if not hasattr(value, "detach"):
        return np.asarray(value)
    try:
        return value.numpy(force=True)
    except TypeError:  # numpy lacks its dtype, as bfloat16
        if "sparse" in str(value.layout):
            raise ValueError("a sparse tensor is not supported: pass its .to_dense()") from None
        return value.float().numpy(force=True)


def to_ortvalue(value: Any, device: Device) -> ort.OrtValue:
    """Return an array or an OrtValue as an OrtValue; on the CPU the memory is shared."""
    if isinstance(value, ort.OrtValue):
        return value
    return device.ortvalue(np.asarray(value, order="C"))


def owned(array: np.ndarray, device: Device) -> ort.OrtValue:
    """Return a copy of an array as an OrtValue.

    An OrtValue of `ortvalue_from_numpy` shares the memory of the array, and the result of its
    `numpy()` does not keep this memory alive.
    """
    value = device.empty(array.shape, array.dtype)
    value.update_inplace(np.asarray(array, order="C"))
    return value


def array_of(value: ort.OrtValue) -> np.ndarray:
    """Return an OrtValue as an array; on the CPU it shares the memory, which it keeps alive."""
    kind = FLOATS.get(value.data_type())
    if value.device_name().lower() != "cpu" or kind is None or kind not in _VIEWED:
        return value.numpy()
    shape, dtype = tuple(value.shape()), kind.numpy()
    if not (count := prod(shape)):
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(value.data_ptr())
    memory.owner = value
    return np.frombuffer(memory, dtype, count).reshape(shape)


def is_finite(value: ort.OrtValue) -> bool:
    """Return whether all numbers of an OrtValue are finite; on the CPU it is not copied."""
    array = array_of(value).reshape(-1)
    parts = range(0, array.size, _CACHED_PART)
    return all(np.isfinite(array[i : i + _CACHED_PART]).all() for i in parts)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or an OrtValue."""
    return tuple(value.shape() if isinstance(value, ort.OrtValue) else np.shape(value))


def fit(
    value: Any, shape: tuple[int, ...], dtype: np.dtype, array: np.ndarray | None = None
) -> Any:
    """Return `value` in this shape and dtype; an OrtValue of both is returned without a copy.

    `array` is the value as an array, if the caller has it.
    """
    if isinstance(value, ort.OrtValue) and shape_of(value) == shape:
        kind = FLOATS.get(value.data_type())
        if kind is not None and kind.numpy() == dtype:
            return value
        if value.data_type() == "tensor(int64)" and dtype == np.int64:
            return value
    array = to_numpy(value) if array is None else array
    return array.reshape(shape).astype(dtype, copy=False)
