"""Devices such as "cuda:1", and the execution providers of sessions that run on them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import ProviderError, argument, unknown

VALID = "a device is 'cpu', 'cuda', or a GPU by its number as 'cuda:1'; 'gpu' means 'cuda'"
_FORM = re.compile(r"(cpu|cuda|gpu)(?::([0-9]{1,4}))?", re.ASCII | re.IGNORECASE)
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_ON_CUDA = (_CUDA, "TensorrtExecutionProvider")  # providers whose tensors are in CUDA memory

Provider = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Device:
    """The processor that runs a session: the CPU, or one GPU.

    Args:
        kind: "cpu" or "cuda".
        index: number of the GPU; 0 for the CPU.
        written: how the caller wrote the device, for messages.
    """

    kind: str = "cpu"
    index: int = 0
    written: str = field(default="", compare=False, repr=False)

    @staticmethod
    def of(device: Any) -> Device:
        """Return the device for "cpu", "cuda", "cuda:1", "gpu", a `torch.device` or a `Device`.

        Raises:
            ProviderError: `device` is neither such a text nor such an object.
        """
        if isinstance(device, Device):
            return device
        parts = _FORM.fullmatch(str(device)) if _is_device_name(device) else None
        kind, index = parts.groups() if parts else ("", None)
        kind, number = kind.lower().replace("gpu", "cuda"), int(index or 0)
        if not kind or (kind == "cpu" and number):
            quoted = repr(str(device)) if _is_device_name(device) else repr(device)
            raise ProviderError(
                f"device {quoted}: the installed onnxruntime offers "
                f"{ort.get_available_providers()}; {VALID}"
            )
        return Device(kind, number, str(device))

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.index else self.kind

    @property
    def providers(self) -> list[Provider]:
        """The execution providers of a session on this device, with their options.

        Raises:
            ProviderError: the installed onnxruntime has no provider for this device.
        """
        available = ort.get_available_providers()
        name = {"cpu": _CPU, "cuda": _CUDA}[self.kind]
        if name not in available:
            raise ProviderError(
                f"device {self.written or str(self)!r}: the installed onnxruntime offers "
                f"{available}; use {argument('device', 'cpu')}, or install onnxruntime-gpu for "
                "'cuda'"
            )
        cpu: Provider = (_CPU, {})
        return [cpu] if self.kind == "cpu" else [(_CUDA, {"device_id": self.index}), cpu]

    def check(self) -> Device:
        """Return this device; raise `ProviderError` if onnxruntime has no provider for it."""
        assert self.providers
        return self

    def ortvalue(self, array: np.ndarray) -> ort.OrtValue:
        """Return an array as an OrtValue on this device; the CPU's OrtValue shares the memory."""
        return ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)

    def empty(self, shape: Sequence[int], dtype: Any) -> ort.OrtValue:
        """Return an OrtValue with newly allocated memory on this device."""
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, self.kind, self.index)

    def check_holds(self, what: str, value: ort.OrtValue) -> None:
        """Raise ValueError if `value` is on another device, as onnxruntime reports."""
        kind = value.device_name().lower().replace("gpu", "cuda")
        dlpack_device = getattr(value, "__dlpack_device__", None) if kind == "cuda" else None
        if dlpack_device is not None:
            device = Device(kind, dlpack_device()[1])
        else:
            device = Device(kind, self.index if kind == "cuda" else 0)
        if device != self:
            raise ValueError(
                f"{what} is on '{device}', and the session on '{self}': copy the tensor there"
            )


CPU = Device()


def read_providers(
    providers: Any, options: Sequence[Mapping[str, Any]] | None, index: int | None
) -> tuple[list[Provider], Device]:
    """Return execution providers with their options, and the device on which to bind tensors.

    Args:
        providers: a device, or a list of names or of pairs (name, options); None is the CPU.
        options: the options of each provider, a dict, if `providers` are no pairs.
        index: number of the GPU; None takes it from the options, or 0.

    Raises:
        ProviderError: a provider that the installed onnxruntime does not have, or numbers of GPUs
            that contradict each other.
        ValueError: `options` beside a device or pairs, or not one for each provider.
    """
    pairs = _provider_pairs(providers, options)
    on_gpu = [settings for name, settings in pairs if name in _ON_CUDA]
    numbers = {_gpu_index(settings["device_id"]) for settings in on_gpu if "device_id" in settings}
    if index is not None:
        if index and not on_gpu:
            raise ProviderError(
                f"device_index={index} is the number of a GPU, and the providers "
                f"{[name for name, _ in pairs]} use no GPU: pass providers='cuda:{index}'"
            )
        numbers.add(index)
    if len(numbers) > 1:
        raise ProviderError(
            f"providers, provider_options and device_index name several GPUs, {sorted(numbers)}: "
            "name one GPU"
        )
    number = max(numbers, default=0)
    for settings in on_gpu:
        settings["device_id"] = number
    return pairs, Device("cuda", number) if on_gpu else CPU


def _gpu_index(device_id: Any) -> int:
    """Return the index of a GPU, a whole number that providers may also take as a text."""
    if not re.fullmatch("[0-9]+", str(device_id), re.ASCII):
        raise ValueError(f"device_id must be the number of a GPU, not {device_id!r}")
    return int(device_id)


def _provider_pairs(providers: Any, options: Sequence[Mapping[str, Any]] | None) -> list[Provider]:
    """Return execution providers, each with a copy of its options; see `read_providers`."""
    if isinstance(providers, Device) or _is_device_name(providers):
        if options is not None:
            raise ValueError("provider_options go with a list of providers, not with a device")
        try:
            device = Device.of(providers)
        except ProviderError:
            raise ProviderError(
                f"providers={providers!r}: pass a list of names, or a device; {VALID}"
            ) from None
        numbered = isinstance(providers, Device) or ":" in str(providers)
        return device.providers if numbered else [(name, {}) for name, _ in device.providers]
    names = list(providers or [_CPU])
    if options is not None:
        if not all(isinstance(name, str) for name in names):
            raise ValueError("providers has options already: leave out provider_options")
        if len(options) != len(names):
            raise ValueError(
                f"provider_options: pass one for each of the providers {names}, not {len(options)}"
            )
        names = list(zip(names, options, strict=True))
    return [_provider_with_options(name) for name in names]


def _provider_with_options(provider: Any) -> Provider:
    """Return a provider with a copy of its options; raise if onnxruntime lacks it."""
    name, options = (provider, {}) if isinstance(provider, str) else provider
    available = ort.get_available_providers()
    if name not in available and name in ort.get_all_providers():
        raise ProviderError(
            f"the installed onnxruntime has no {name!r}, only {available}: install a build "
            "that has it, such as onnxruntime-gpu"
        )
    if name not in available:
        raise ProviderError(str(unknown("execution provider", name, available)))
    return name, dict(options)


def _is_device_name(device: Any) -> bool:
    """Return whether `device` is a string or a `torch.device`; torch is not imported."""
    return isinstance(device, str) or type(device).__module__ == "torch"
