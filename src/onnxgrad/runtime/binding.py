"""A session with bound inputs, which are bound again only if their memory has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import CPU, Device


class Binding:
    """Runs a session on arrays and OrtValues; inputs on its device are not copied.

    An input stays bound while its memory, shape and dtype equal the ones of the previous call. Each
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
        """Return the named outputs, on the device; an output in `into` is written to its array."""
        for name, value in inputs.items():
            self._bind_input(name, value)
        places = {name: into[name] for name in outputs if into is not None and name in into}
        if len(places) < len(outputs) or any(
            self._places.get(n) is not a for n, a in places.items()
        ):
            self._binding.clear_binding_outputs()  # outputs returned before keep their memory
            for name in outputs:
                if name in places:
                    bind_output(self._binding, name, places[name])
                else:
                    self._device.bind_outputs(self._binding, [name])
            self._places = places
        with escaping():
            self._session.run_with_iobinding(self._binding, options)
        return self._binding.get_outputs()

    def _bind_input(self, name: str, value: np.ndarray | ort.OrtValue) -> None:
        if isinstance(value, ort.OrtValue):
            key: tuple[Any, ...] = (value.data_ptr(), value.shape(), value.data_type())
            if self._bound.get(name) != key:
                self._binding.bind_ortvalue_input(name, value)
        elif self._device != CPU:  # copied to the device in every call
            self._binding.bind_cpu_input(name, value)
            key = ()
        else:
            key = (value.ctypes.data, value.shape, value.dtype)
            if self._bound.get(name) != key:
                self._binding.bind_input(
                    name, CPU.kind, CPU.index, value.dtype, value.shape, key[0]
                )
        self._bound[name] = key


def bind_output(binding: ort.IOBinding, name: str, array: np.ndarray) -> None:
    """Let the session write an output into `array`, in the memory of the CPU."""
    place = array.ctypes.data
    binding.bind_output(name, CPU.kind, CPU.index, array.dtype, array.shape, place)
