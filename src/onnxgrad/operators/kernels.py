"""The kernels of onnxruntime for the CPU."""

from __future__ import annotations

from functools import cache

import onnxruntime as ort

_CPU = ort.get_available_providers()[-1]  # sorted from the fastest


@cache
def cpu_kernels() -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Return the first and last opset of each kernel of the CPU, by domain and operator."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == _CPU:
            key = kernel.domain, kernel.op_name
            found.setdefault(key, []).append(kernel.version_range)
    return found


def has_kernel(domain: str, op_type: str) -> bool:
    """Return whether onnxruntime runs a version of the operator on the CPU."""
    return (domain, op_type) in cpu_kernels()
