"""Huge pages for the memory of a training, on Linux.

A pass over a large array waits for the addresses of its pages, unless they are huge: 2 MB in place
of 4 kB on most machines. Where the system gives huge pages to programs that ask for them, as
Ubuntu and Fedora do, NumPy asks for large arrays, and onnxruntime does not ask for the values
between the nodes of a model.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrad.reporting import logger

_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: include/uapi/asm-generic/mman-common.h
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# Copies of 220 to 800 MB took 0.4 to 1 s on an Intel Xeon with AVX-512; each step after them took
# 0.94 to 0.96 of the time on two threads. A training has paid them back after about 20 s; one of
# less than 4 s copies nothing.
_SHARE = 1 / 8
_LEAST_SECONDS = 0.5  # time for copies from which memory is searched for
_LEAST_FILLED = 3 / 4  # a huge page is in memory as a whole


class HugePages:
    """Copies memory of the process that is filled after this object was made into huge pages.

    Addresses and contents stay, and no other part of the program notices. Nothing is copied where
    the system gives no huge pages to programs that ask for them, and before Linux 6.1.

    Args:
        share: the most time of copies, as a share of the time of runs.
    """

    def __init__(self, share: float = _SHARE) -> None:
        self.copied_bytes = 0
        self._share, self._least_seconds = share, _LEAST_SECONDS
        self._run_seconds = self._copy_seconds = 0.0
        huge_size = _huge_page_size()
        self._memory = _PageMemory(huge_size) if huge_size else None
        # memory of other parts of the program, and memory that was copied
        self._passed = set(self._memory.filled_addresses()) if self._memory else set()

    def after_run(self, seconds: float) -> None:
        """Copy memory after a run of `seconds` seconds, for as long as the share allows."""
        self._run_seconds += seconds
        allowed = self._share * self._run_seconds - self._copy_seconds
        if self._memory is None or allowed < self._least_seconds:
            return
        start, before = time.perf_counter(), self.copied_bytes
        filled = set(self._memory.filled_addresses())
        self._passed &= filled
        for address in filled - self._passed:
            if time.perf_counter() - start > allowed:
                break
            self._passed.add(address)
            if self._memory.copy_to_huge_page(address):
                self.copied_bytes += self._memory.huge_size
        self._copy_seconds += time.perf_counter() - start
        if self.copied_bytes == before:
            self._least_seconds *= 2  # other batches may fill memory later; an older Linux refuses
        else:
            logger.debug("%d MB are in huge pages", self.copied_bytes >> 20)


class _PageMemory:
    """The memory of the process in pages, by calls of the C library."""

    def __init__(self, huge_size: int) -> None:
        self.huge_size = huge_size
        self._libc: Any = ctypes.CDLL(None)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def filled_addresses(self) -> Iterator[int]:
        """Yield the addresses of memory that fits a huge page and is in memory for the most part.

        Only memory without a file, which the process reads and writes.
        """
        pages = self.huge_size // mmap.PAGESIZE
        for first, end in _anonymous_ranges():
            first = -(-first // self.huge_size) * self.huge_size
            count = (end - first) // self.huge_size
            if count <= 0:
                continue
            states = np.zeros((count, pages), np.uint8)  # bit 0: in memory
            if self._libc.mincore(first, count * self.huge_size, states.ctypes.data):
                continue  # another thread has freed it
            filled = (states & 1).mean(axis=1) >= _LEAST_FILLED
            yield from (first + np.flatnonzero(filled) * self.huge_size).tolist()

    def copy_to_huge_page(self, address: int) -> bool:
        """Copy the pages at an address into a huge page, in place; return whether Linux did so."""
        return self._libc.madvise(address, self.huge_size, _COLLAPSE) == 0


def _anonymous_ranges() -> Iterator[tuple[int, int]]:
    """Yield (first address, end) of each range of memory without a file, to read and write."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # a sandbox may hide it
        return
    for line in lines:
        place, access, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and name in ([], ["[heap]"]):
            first, _, end = place.partition("-")
            yield int(first, 16), int(end, 16)


def _huge_page_size() -> int:
    """Return the bytes of a huge page; 0 if the system does not give them to programs that ask."""
    try:
        on_request = "[madvise]" in (_SETTINGS / "enabled").read_text()
        return int((_SETTINGS / "hpage_pmd_size").read_text()) if on_request else 0
    except OSError:  # another system than Linux, or a Linux without huge pages
        return 0
