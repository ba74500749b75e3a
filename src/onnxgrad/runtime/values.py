"""Arrays and OrtValues: conversions, and sessions whose inputs and outputs are bound to them.

Inputs of a session are bound again only if their memory has changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue as BoundValue

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import CPU, Device

Value: TypeAlias = ort.OrtValue | np.ndarray
FLOATS = {  # dtypes by onnxruntime's names of types
    "tensor(float16)": ir.DataType.FLOAT16,
    "tensor(bfloat16)": ir.DataType.BFLOAT16,
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
}


_NUMPY_FLOATS = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_CACHED_PART = 1 << 16  # elements of an array that stay in the cache of the processor


def wrap_ortvalue(value: Any) -> Any:
    """Return an element of an `OrtValueVector` as an `onnxruntime.OrtValue`; any other value
    unchanged.
    """
    return ort.OrtValue(value) if isinstance(value, BoundValue) else value


def to_numpy(value: Any) -> np.ndarray:
    """Return an OrtValue, a torch tensor or an array-like as a numpy array."""
    value = wrap_ortvalue(value)
    if isinstance(value, ort.OrtValue):
        return value.numpy()
    if not hasattr(value, "detach"):
        return np.asarray(value)
    try:
        return value.numpy(force=True)
    except TypeError:  # numpy lacks the dtype of the tensor, such as bfloat16
        if "sparse" in str(value.layout):
            raise ValueError("a sparse tensor is not supported: pass its .to_dense()") from None
        return value.float().numpy(force=True)


def to_ortvalue(value: Any, device: Device) -> ort.OrtValue:
    """Return an array or OrtValue as an OrtValue; on the CPU, it shares the memory of the array."""
    if isinstance(value, ort.OrtValue):
        return value
    return device.ortvalue(np.asarray(value, order="C"))


def copy_to_ortvalue(array: np.ndarray, device: Device) -> ort.OrtValue:
    """Return an OrtValue on a device, with a copy of an array.

    An OrtValue of `ortvalue_from_numpy` shares the memory of the array, which the result of the
    method `numpy` does not keep alive.
    """
    value = device.empty(array.shape, array.dtype)
    value.update_inplace(np.asarray(array, order="C"))
    return value


def array_of(value: Value) -> np.ndarray:
    """Return an array or OrtValue as an array, without a copy if its memory is on the CPU."""
    if isinstance(value, np.ndarray):
        return value
    kind = FLOATS.get(value.data_type())
    if value.device_name().lower() != "cpu" or kind is None or kind not in _NUMPY_FLOATS:
        return value.numpy()
    shape, dtype = tuple(value.shape()), kind.numpy()
    if not (count := prod(shape)):
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(value.data_ptr())
    memory.owner = value
    return np.frombuffer(memory, dtype, count).reshape(shape)


def is_finite(value: Value, axes: int = 0) -> np.ndarray:
    """Return whether all numbers of an array are finite, for each index of its first `axes` axes.

    An OrtValue on the CPU is not copied.
    """
    array = array_of(value)
    rest = array.reshape(*array.shape[:axes], -1)
    part = max(1, _CACHED_PART // max(1, prod(array.shape[:axes])))
    finite = np.isfinite(rest[..., :part]).all(axis=-1)
    for i in range(part, rest.shape[-1], part):
        finite = finite & np.isfinite(rest[..., i : i + part]).all(axis=-1)
    return finite


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or an OrtValue."""
    return tuple(value.shape() if isinstance(value, ort.OrtValue) else np.shape(value))


def take_rows(
    arrays: Mapping[str, np.ndarray], rows: slice | np.ndarray, whole: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """Return the rows of each array in `arrays`; the arrays named in `whole` are not cut.

    `take` is faster than an index, but copies the whole of an array that is not contiguous.
    """
    taken = {}
    for name, array in arrays.items():
        if name in whole:
            taken[name] = array
        elif isinstance(rows, slice) or not array.flags.c_contiguous:
            taken[name] = array[rows]
        else:
            taken[name] = array.take(rows, 0)
    return taken


def fit_shape_and_dtype(
    value: Any, shape: tuple[int, ...], dtype: np.dtype, array: np.ndarray | None = None
) -> Any:
    """Return `value` in this shape and dtype; an OrtValue that has both is not copied.

    An OrtValue that has both is returned itself. `array` is the value as an array, if the caller
    has it.
    """
    if isinstance(value, ort.OrtValue) and shape_of(value) == shape:
        kind = FLOATS.get(value.data_type())
        if kind is not None and kind.numpy() == dtype:
            return value
        if value.data_type() == "tensor(int64)" and dtype == np.int64:
            return value
    array = to_numpy(value) if array is None else array
    return array.reshape(shape).astype(dtype, copy=False)


class Binding:
    """Runs a session on arrays and OrtValues; inputs on the session's device are not copied.

    An input stays bound while its memory, shape and dtype do not change between calls. Each
    call returns new outputs, except for the outputs that `into` names.
    """

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session, self._device = session, device
        self._binding = session.io_binding()
        self._bound: dict[str, tuple[Any, ...]] = {}
        self._places: dict[str, np.ndarray] = {}  # arrays into which outputs are written

    def run(
        self,
        inputs: Mapping[str, np.ndarray | ort.OrtValue],
        outputs: Sequence[str],
        options: ort.RunOptions | None = None,
        into: Mapping[str, np.ndarray] | None = None,
    ) -> list[ort.OrtValue]:
        """Return the outputs, on the device; outputs in `into` are written to the arrays there."""
        for name, value in inputs.items():
            self._bind_input(name, value)
        places = {name: into[name] for name in outputs if into is not None and name in into}
        if len(places) < len(outputs) or any(
            self._places.get(n) is not a for n, a in places.items()
        ):
            self._binding.clear_binding_outputs()  # outputs returned before keep their memory
            for name in outputs:
                bind_output(self._binding, name, places.get(name, self._device))
            self._places = places
        with escaping():
            self._session.run_with_iobinding(self._binding, options)
        return self._binding.get_outputs()

    def _bind_input(self, name: str, value: np.ndarray | ort.OrtValue) -> None:
        """Bind an input to a value, unless it is bound to the same memory already."""
        if isinstance(value, ort.OrtValue):
            key: tuple[Any, ...] = (value.data_ptr(), value.shape(), value.data_type())
            if self._bound.get(name) != key:
                self._binding.bind_ortvalue_input(name, value)
        elif self._device != CPU:  # the array is copied to the device in every call
            self._binding.bind_cpu_input(name, value)
            key = ()
        else:
            key = (value.ctypes.data, value.shape, value.dtype)
            if self._bound.get(name) != key:
                self._binding.bind_input(name, *CPU.memory, value.dtype, value.shape, key[0])
        self._bound[name] = key


def bind_output(binding: ort.IOBinding, name: str, place: np.ndarray | Device) -> None:
    """Bind an output of a session to an array, or to new memory on a device."""
    if isinstance(place, Device):
        binding.bind_output(name, *place.memory)
    else:
        memory = place.dtype, place.shape, place.ctypes.data
        binding.bind_output(name, *CPU.memory, *memory)
