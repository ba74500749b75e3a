"""Streams of sounds: files in consecutive windows, for models with states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import onnxgrad as og


@dataclass(eq=False)
class Streams(og.data.Reader):
    """Files in consecutive windows, several side by side as the rows of a batch.

    Files of similar length share their batches; shorter ones end in windows of weight zero. A seed
    changes the order of such groups. A group begins with the states in its data.

    Attributes:
        folder: the clips, which are the labeled parts of files.
        windows: returns windows (count, samples) and labels (count, ...) of the clips of a file,
            for a generator or None.
        inputs: from windows (N, samples) to the features, with states if told so.
        width: files side by side, or if `along`, consecutive windows of one file.
        along: whether the rows of a batch are windows of one file.
    """

    folder: Any
    windows: Callable[[list, np.random.Generator | None], tuple[np.ndarray, np.ndarray]]
    inputs: Callable[[np.ndarray], dict[str, np.ndarray]]
    width: int
    along: bool = False
    sequences = True

    def __post_init__(self) -> None:
        files: dict[Any, list] = {}
        for clip in self.folder.clips:
            files.setdefault(clip.file, []).append(clip)
        self.files = list(files.values())
        self.counts = [-(-self.folder.length(file) // self.folder.samples) for file in files]
        order = sorted(range(len(self.files)), key=lambda i: self.counts[i])
        size = 1 if self.along else min(self.width, len(order))
        self.groups = [order[i : i + size] for i in range(0, len(order), size)]
        self.count = sum(self._count_steps(group) for group in self.groups)

    def _count_steps(self, group: list[int]) -> int:
        longest = max(self.counts[i] for i in group)
        return -(-longest // self.width) if self.along else longest

    def batches(self, size: int, seed: int | None, skip: int) -> Iterator[Any]:
        """Yield the batches of one pass; `size` is not read."""
        order = np.arange(len(self.groups))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        for group in (self.groups[i] for i in order):
            if skip >= (steps := self._count_steps(group)):
                skip -= steps
                continue
            if not skip and group is not self.groups[order[0]]:
                yield None
            yield from self._read_group(group, seed, skip)
            skip = 0

    def _read_group(self, group: list[int], seed: int | None, skip: int) -> Iterator[Any]:
        read = []
        for i in group:
            rng = None if seed is None else np.random.default_rng([seed, i])
            read.append(self.windows(self.files[i], rng))
        if self.along:
            ((x, y),) = read
            for at in range(skip * self.width, len(x), self.width):
                rows = slice(at, at + self.width)
                yield self.inputs(x[rows]), y[rows], np.ones(len(y[rows]), np.float32)
            return
        sides = [read[i % len(read)] for i in range(len(self.groups[0]))]  # each batch has as many
        for t in range(skip, self._count_steps(group)):
            own = [min(t, len(y) - 1) for _, y in sides]
            weight = [i < len(read) and t < len(y) for i, (_, y) in enumerate(sides)]
            x, y = (
                np.stack([side[k][at] for side, at in zip(sides, own, strict=True)]) for k in (0, 1)
            )
            yield self.inputs(x), y, np.asarray(weight, np.float32)

    def describe(self) -> dict[str, Any]:
        """Return the number of batches and a digest of parts, sizes and times of files."""
        digest = self.folder.describe()["digest"]
        return {"kind": "streams", "count": self.count, "width": self.width, "digest": digest}
