"""Values as onnxruntime holds them, and the dtypes and opsets of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.running import in_sweep


def as_ortvalue(array: np.ndarray) -> ort.OrtValue:
    """Return a copy of an array, on the CPU."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def each_dtype_and_opset(opsets: Sequence[int]) -> Any:
    """Return a mark: three dtypes with three opsets, by default each of them once."""
    dtypes = (np.float16, np.float64, np.float32)
    pairs = [(dtype, opset) for dtype in dtypes for opset in opsets]
    default = [*zip(dtypes, opsets, strict=True)]
    values = [pair if pair in default else in_sweep(*pair) for pair in pairs]
    return pytest.mark.parametrize(("dtype", "opset"), values)
