"""The machine and the versions with which this process runs."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

_PACKAGES = "onnxgrad onnxruntime onnx onnx-ir numpy onnxruntime-gpu".split()
_INSTRUCTION_SETS = (  # of onnxruntime's kernels, named as in /proc/cpuinfo
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve"),
)


def machine_and_versions() -> dict[str, str]:
    """Return {name: text} of package versions, the system, processor, cores and memory."""
    found = {"Python": platform.python_version()}
    found |= {name: version(name) for name in _PACKAGES if _is_installed(name)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["system"] = f"{platform.system()} {platform.release()} ({platform.machine()})"
    found["processor"] = _processor_field("model name") or platform.processor() or "unknown"
    found["cores"] = str(cores)
    with suppress(AttributeError, OSError, ValueError):  # the system does not tell
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{total / 2**30:.1f} GiB"
    return found


def instruction_sets() -> list[str]:
    """Return the processor's instruction sets for which onnxruntime has kernels; [] if unknown."""
    known = _processor_field("flags", "Features").split()
    return [name for name in _INSTRUCTION_SETS if name in known]


def missing_packages() -> dict[str, list[str]]:
    """Return {extra of onnxgrad: its packages that are not installed}."""
    if not _is_installed("onnxgrad"):  # it runs from a folder of sources
        return {}
    package = distribution("onnxgrad")
    missing: dict[str, list[str]] = {n: [] for n in package.metadata.get_all("Provides-Extra", [])}
    for line in package.requires or []:
        if found := re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)", line):
            name, extra = found.groups()
            missing[extra] += [] if _is_installed(name) else [name]
    return missing


def _is_installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(name))
    return False


def peak_memory() -> int | None:
    """Return the largest resident memory of this process so far, in bytes; None if unknown."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor_field(*names: str) -> str:
    """Return the value of the first field of `names` in /proc/cpuinfo; "" if it has none
    of them.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() in names), "")
