"""Arrays, tensors of PyTorch and OrtValues, read as one another."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.values import (
    array_of,
    copy_to_ortvalue,
    fit_shape_and_dtype,
    is_finite,
    shape_of,
    to_numpy,
    to_ortvalue,
    wrap_ortvalue,
)

DTYPES = "float16 float32 float64 int64 int32 bool".split()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 3), ()])
def test_ortvalues_hold_what_arrays_hold(dtype, shape):
    array = np.arange(6)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    for value in (to_ortvalue(array, CPU), copy_to_ortvalue(array, CPU)):
        assert shape_of(value) == shape_of(array) == shape
        assert to_ortvalue(value, CPU) is wrap_ortvalue(value) is value
        for found in (to_numpy(value), array_of(value)):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


def test_memory_is_shared_but_where_a_copy_is_asked_for():
    array = np.zeros((2, 2), np.float32)
    shared, apart = to_ortvalue(array, CPU), copy_to_ortvalue(array, CPU)
    seen = array_of(shared)
    array[0, 0] = 1
    assert seen[0, 0] == shared.numpy()[0, 0] == 1
    assert apart.numpy()[0, 0] == 0
    kept = array_of(apart)
    del apart
    np.testing.assert_array_equal(kept, 0)


def test_elements_of_a_vector_of_ortvalues():
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector

    values, array = OrtValueVector(), np.float32([1, 2])  # whose memory the vector does not keep
    values.push_back(to_ortvalue(array, CPU)._ortvalue)
    assert isinstance(wrap_ortvalue(values[0]), ort.OrtValue)
    np.testing.assert_array_equal(to_numpy(values[0]), [1, 2])


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        x = torch.tensor([1, 2], dtype=dtype)
        x.requires_grad = dtype.is_floating_point
        found = to_numpy(x)
        np.testing.assert_array_equal(found, [1, 2])
        expected = "float32" if dtype == torch.bfloat16 else str(dtype).removeprefix("torch.")
        assert found.dtype == expected
    with pytest.raises(ValueError, match="to_dense"):
        to_numpy(torch.eye(2).to_sparse())


@pytest.mark.parametrize(("at", "number"), [(0, np.nan), (70_000, np.inf), (99_999, -np.inf)])
def test_one_number_that_is_not_finite(at, number):
    array = np.zeros((10, 10_000), np.float32)
    assert is_finite(to_ortvalue(array, CPU))
    array.reshape(-1)[at] = number
    assert not is_finite(to_ortvalue(array, CPU))


@pytest.mark.parametrize(
    ("given", "dtype", "shape", "is_kept"),
    [
        ("float32", "float32", (2, 3), True), ("int64", "int64", (2, 3), True),
        ("float32", "float64", (2, 3), False), ("float32", "float32", (3, 2), False),
        ("int64", "float32", (2, 3), False), ("float64", "int64", (2, 3), False),
        ("int32", "int32", (2, 3), False),
    ],
)  # fmt: skip
def test_an_ortvalue_that_fits_is_not_copied(given, dtype, shape, is_kept):
    array = np.arange(6).reshape(2, 3).astype(given)
    value = to_ortvalue(array, CPU)
    found = fit_shape_and_dtype(value, shape, np.dtype(dtype))
    assert (found is value) == is_kept
    for result in (found, fit_shape_and_dtype(array, shape, np.dtype(dtype))):
        assert to_numpy(result).dtype == dtype
        np.testing.assert_array_equal(to_numpy(result), array.reshape(shape))
