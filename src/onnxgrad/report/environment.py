"""The machine and the versions with which a training ran."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("onnxgrad", "onnxruntime", "onnx", "onnx-ir", "numpy")
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # packages of which one is installed


def environment() -> dict[str, str]:
    """Return versions, the system, the processor, its cores and the memory, as texts."""
    found = {"Python": platform.python_version()}
    for name in dict.fromkeys([*_PACKAGES, *_RUNTIMES]):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found["system"] = f"{platform.system()} {platform.release()} ({platform.machine()})"
    found["processor"] = _processor()
    found["cores"] = str(cores)
    if (total := _memory()) is not None:
        found["memory"] = f"{total / 2**30:.1f} GiB"
    return found


def peak_memory() -> int | None:
    """Return the largest resident memory of this process so far, in bytes; None if unknown."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
