"""Inputs bound to a session: one that is where it was is not bound again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import CPU, Device

# Before 1.31, what a binding returns is a part of it, and changes when it runs again.
_OUTPUTS_STAY = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 31)


class Binding:
    """Runs a session on arrays and OrtValues, without a copy where they are on its device.

    Between calls, an input of the same memory, shape and dtype stays bound. Outputs are new with
    every call.
    """

    def __init__(self, session: ort.InferenceSession, device: Device) -> None:
        self._session, self._device = session, device
        self._binding = session.io_binding()
        self._bound: dict[str, tuple[Any, ...]] = {}

    def run(
        self,
        inputs: Mapping[str, np.ndarray | ort.OrtValue],
        outputs: Sequence[str],
        options: ort.RunOptions | None = None,
    ) -> list[ort.OrtValue]:
        """Return the outputs, in the order asked, on the device."""
        if not _OUTPUTS_STAY:
            self._binding, self._bound = self._session.io_binding(), {}
        for name, value in inputs.items():
            self._bind(name, value)
        self._binding.clear_binding_outputs()  # what was returned before keeps its memory
        self._device.bind_outputs(self._binding, outputs)
        with escaping():
            self._session.run_with_iobinding(self._binding, options)
        return self._binding.get_outputs()

    def _bind(self, name: str, value: np.ndarray | ort.OrtValue) -> None:
        if isinstance(value, ort.OrtValue):
            place: tuple[Any, ...] = (value.data_ptr(), value.shape(), value.data_type())
            if self._bound.get(name) != place:
                self._binding.bind_ortvalue_input(name, value)
        elif self._device != CPU:  # copied to the device, whatever is there already
            self._binding.bind_cpu_input(name, value)
            place = ()
        else:
            place = (value.ctypes.data, value.shape, value.dtype)
            if self._bound.get(name) != place:
                self._binding.bind_input(
                    name, CPU.kind, CPU.index, value.dtype, value.shape, place[0]
                )
        self._bound[name] = place
