"""Devices such as "cuda:1" or "webgpu", and the execution providers of sessions on them."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import ProviderError, argument, unknown

VALID = (
    "a device is 'cpu', 'cuda', or an execution provider of onnxruntime by its name as 'webgpu', "
    "'openvino' or 'coreml', with the number of a GPU as 'cuda:1'; 'gpu' means 'cuda'"
)
_FORM = re.compile(r"([a-z][a-z_-]*)(?::([0-9]{1,4}))?", re.ASCII | re.IGNORECASE)
_SUFFIX = "ExecutionProvider"
_CPU, _CUDA = f"CPU{_SUFFIX}", f"CUDA{_SUFFIX}"
_ON_CUDA = (_CUDA, f"Tensorrt{_SUFFIX}")  # providers whose tensors are in CUDA memory
_OTHER_NAMES = {"gpu": "cuda", "directml": "dml", "trt": "tensorrt"}
_NUMBER = "device_id"  # the option of a provider for the number of its device
# options with which a provider computes in the precision of the file: OpenVINO computes in 16 bits
# on processors that have them
_EXACT = {f"OpenVINO{_SUFFIX}": {"precision": "FP32"}}

Provider = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Device:
    """The processor that runs a session: the CPU, a GPU, or what an execution provider runs on.

    Args:
        kind: the name of the execution provider in lower case, as "cpu", "cuda" or "webgpu".
        index: number of the device; 0 for the CPU.
        options: options of the execution provider, as pairs (name, value).
        written: how the caller wrote the device, for messages.
    """

    kind: str = "cpu"
    index: int = 0
    options: tuple[tuple[str, str], ...] = ()
    written: str = field(default="", compare=False, repr=False)

    @staticmethod
    def of(device: Any) -> Device:
        """Return the device for a name, a pair (name, options), a `torch.device` or a `Device`.

        A name is "cpu", "cuda", "cuda:1", "gpu", or the name of an execution provider, such as
        "openvino" or "OpenVINOExecutionProvider".

        Raises:
            ProviderError: `device` is neither such a text nor such an object.
        """
        if isinstance(device, Device):
            return device
        options: Mapping[Any, Any] = {}
        written = device
        if isinstance(device, tuple) and len(device) == 2 and isinstance(device[1], Mapping):
            device, options = device
        parts = _FORM.fullmatch(str(device)) if _is_device_name(device) else None
        kind, index = parts.groups() if parts else ("", None)
        kind, number = device_kind(kind), int(index or 0)
        if not kind or (kind == "cpu" and (number or options)) or not _may_be_provider(kind):
            quoted = repr(str(written)) if _is_device_name(written) else repr(written)
            raise ProviderError(
                f"device {quoted}: the installed onnxruntime offers "
                f"{ort.get_available_providers()}; {VALID}"
            )
        texts = tuple((str(name), str(value)) for name, value in options.items())
        return Device(kind, number, texts, str(written))

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.index else self.kind

    @property
    def memory(self) -> tuple[str, int]:
        """The kind and the number of the memory in which sessions take and return tensors.

        It is the memory of the CPU but for CUDA and TensorRT: other providers copy tensors.
        """
        return ("cuda", self.index) if self.kind in ("cuda", "tensorrt") else ("cpu", 0)

    @property
    def copies_tensors(self) -> bool:
        """Whether each call copies tensors between the memory of the CPU and the device."""
        return self.kind != "cpu" and self.memory == CPU.memory

    @property
    def providers(self) -> list[Provider]:
        """The execution providers of a session on this device, with their options.

        Raises:
            ProviderError: the installed onnxruntime has no provider for this device.
        """
        name = _registered_provider(self.kind)
        if name is None:
            written = self.written or str(self)
            raise ProviderError(
                f"device {written!r}: the installed onnxruntime offers "
                f"{ort.get_available_providers()}; use {argument('device', 'cpu')}, or install "
                + _packages_of(self.kind)
            )
        cpu: Provider = (_CPU, {})
        if self.kind == "cpu":
            return [cpu]
        own: dict[str, Any] = {**_EXACT.get(name, {}), **dict(self.options)}
        if self.memory[0] == "cuda" or self.index:
            own = {_NUMBER: self.index, **own}
        cuda: Provider = (_CUDA, {_NUMBER: self.index})
        if self.kind == "tensorrt" and _CUDA in ort.get_available_providers():
            return [(name, own), cuda, cpu]
        return [(name, own), cpu]

    def check(self) -> Device:
        """Return this device; raise `ProviderError` if onnxruntime has no provider for it."""
        assert self.providers
        return self

    def ortvalue(self, array: np.ndarray) -> ort.OrtValue:
        """Return an array as an OrtValue on this device; the CPU's OrtValue shares the memory."""
        return ort.OrtValue.ortvalue_from_numpy(array, *self.memory)

    def empty(self, shape: Sequence[int], dtype: Any) -> ort.OrtValue:
        """Return an OrtValue with newly allocated memory on this device."""
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype, *self.memory)

    def check_holds(self, what: str, value: ort.OrtValue) -> None:
        """Raise ValueError if `value` is on another device, as onnxruntime reports."""
        kind = value.device_name().lower().replace("gpu", "cuda")
        dlpack_device = getattr(value, "__dlpack_device__", None) if kind == "cuda" else None
        if dlpack_device is not None:
            device = Device(kind, dlpack_device()[1])
        else:
            device = Device(kind, self.index if kind == "cuda" else 0)
        if device.memory != self.memory:
            raise ValueError(
                f"{what} is on '{device}', and the session on '{self}': copy the tensor there"
            )


CPU = Device()


# -- providers by the names of devices -------------------------------------------------------------


def device_kind(name: str) -> str:
    """Return the lower-case kind of a device for the name of a device or a provider."""
    kind = name.lower().removesuffix(_SUFFIX.lower()).replace("_", "").replace("-", "")
    return _OTHER_NAMES.get(kind, kind)


def _known_providers() -> dict[str, str]:
    """Return the execution providers that onnxruntime can start, by the kind of device."""
    names = list(ort.get_available_providers())
    names += [d.ep_name for d in _plugin_devices() if d.ep_name not in names]
    return {device_kind(name): name for name in names}


def _may_be_provider(kind: str) -> bool:
    """Return whether `kind` is an execution provider of some build or plugin of onnxruntime."""
    every = {device_kind(name) for name in ort.get_all_providers()}
    return kind in every or kind in _known_providers() or kind in _plugin_modules()


def _registered_provider(kind: str) -> str | None:
    """Return the execution provider for a kind of device, after its plugin is registered.

    None: neither onnxruntime nor an installed plugin has it.

    Raises:
        ProviderError: the plugin cannot be loaded, or finds no device on this machine.
    """
    if (name := _known_providers().get(kind)) is not None:
        return name
    module = _plugin_modules().get(kind)
    if module is None:
        return None
    try:
        plugin = importlib.import_module(module)
        ort.register_execution_provider_library(module, plugin.get_library_path())
    except Exception as e:  # of several types
        raise ProviderError(
            f"device {kind!r}: the plugin {module} cannot be loaded: {e}. Install a version of it "
            f"for onnxruntime {ort.__version__}"
        ) from e
    name = _known_providers().get(kind)
    if name is None:
        raise ProviderError(
            f"device {kind!r}: the plugin {module} finds no device on this machine: check the "
            f"driver of the device, or use {argument('device', 'cpu')}"
        )
    return name


def _plugin_modules() -> dict[str, str]:
    """Return the installed packages with a plugin of onnxruntime, by the kind of device.

    The packages are named as `onnxruntime-ep-webgpu` or `onnxruntime-qnn`.
    """
    found = {}
    for module in pkgutil.iter_modules():
        if module.name.startswith("onnxruntime_") and module.ispkg:
            found[device_kind(re.sub("^onnxruntime_(ep_)?", "", module.name))] = module.name
    return found


def _plugin_devices() -> list[Any]:
    """Return onnxruntime's `OrtEpDevice` objects; [] in versions without plugins."""
    listed = getattr(ort, "get_ep_devices", None)
    return [] if listed is None else list(listed())


def needs_check(provider: str) -> bool:
    """Return whether runs on an execution provider are compared with the CPU."""
    return provider not in (_CPU, *_ON_CUDA, f"Azure{_SUFFIX}")


def add_numbered_plugin_device(options: ort.SessionOptions, providers: Sequence[Provider]) -> bool:
    """Let a session run on the device of a plugin that has a number among its options.

    Return False, and do nothing, where no number is given, or the provider is no plugin: a session
    then takes providers by name.

    Raises:
        ProviderError: the plugin has fewer devices.
    """
    for name, settings in providers:
        devices = [d for d in _plugin_devices() if d.ep_name == name and name != _CPU]
        if not devices or _NUMBER not in settings:
            continue
        rest = {key: value for key, value in settings.items() if key != _NUMBER}
        number = _device_number(settings[_NUMBER])
        if number >= len(devices):
            raise ProviderError(
                f"{name} has no device {number} on this machine: its devices are 0 to "
                f"{len(devices) - 1}"
            )
        options.add_provider_for_devices([devices[number]], rest)
        return True
    return False


def _packages_of(kind: str) -> str:
    """Return the text of a message: the packages that may bring a provider."""
    if kind in ("cuda", "tensorrt"):
        return f"onnxruntime-gpu for {kind!r}"
    return f"a package of onnxruntime with it: onnxruntime-ep-{kind} or onnxruntime-{kind}"


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
    numbers = {_device_number(settings[_NUMBER]) for settings in on_gpu if _NUMBER in settings}
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
        settings[_NUMBER] = number
    return pairs, Device("cuda", number) if on_gpu else CPU


def _device_number(device_id: Any) -> int:
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
            if str(providers).endswith(_SUFFIX):
                raise ProviderError
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
    available = list(_known_providers().values())
    if name not in available and (kind := device_kind(name)) in _plugin_modules():
        name = _registered_provider(kind) or name
        available.append(name)
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
