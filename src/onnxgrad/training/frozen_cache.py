"""The frozen part of a model, computed once for all epochs: `fit(cache=True)`.

Where weights train only behind some nodes, these nodes give the same results for a row in each
epoch. `find_frozen_cut` finds such values in the graph of an objective, `FrozenCut` makes them
inputs, and `CachedSource` yields batches of them, which a model of the frozen part has computed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.row_proofs import BATCH_SYMBOL, RowWalk, UnprovenRows, infer_from_rows
from onnxgrad.errors import argument, join_first, named
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import reads, subgraphs
from onnxgrad.model.convert import to_proto_and_free
from onnxgrad.model.external import content_digest
from onnxgrad.native import Target, to_native
from onnxgrad.operators import SAME_ELEMENTS, made_by, operator_of
from onnxgrad.operators.shapes import Dim, Dims, dims, static
from onnxgrad.reporting import logger
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.runtime.values import take_rows
from onnxgrad.training.batches import ArraySource, BatchSource, ReaderSource
from onnxgrad.training.model_loss import BATCH
from onnxgrad.training.objective import Objective
from onnxgrad.training.row_axes import RowAxes
from onnxgrad.training.step.inputs import BatchSlice

Arrays = dict[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
_SHARE_OF_MEMORY = 4  # a cache takes at most this part of the free memory, or else a file
_MOVES = SAME_ELEMENTS - {"Cast"}
_KEPT_DTYPES = "fiub"  # kinds of numpy's dtypes
_MANIFEST = "manifest.json"  # written when all rows are


@dataclass(frozen=True)
class FrozenCut:
    """The values of an objective's graph that frozen nodes compute and other nodes read.

    Attributes:
        axes: the axis of the rows of each value, by name.
        shapes: the shape of each value for one row, without the axis of the rows.
        rows: the length of the axis of the rows, as the data declare it.
        unread: the features that only frozen nodes read.
        sized: the features of which other nodes read the shape only.
        share: the part of the forward pass's multiply-adds that frozen nodes compute.
    """

    axes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    rows: Dim
    unread: frozenset[str]
    sized: frozenset[str]
    share: float

    def entries(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield the name, the axis of the rows and the shape of a row of each value."""
        for name, axis in self.axes.items():
            yield name, axis, self.shapes[name]

    def apply(self, objective: Objective) -> Objective:
        """Return the objective with these values as inputs in place of data, changed in place."""
        graph = objective.model.graph
        values = {y.name: y for node in graph for y in node.outputs}
        inputs = []
        for name, axis, row in self.entries():
            before, shape = values[name], (*row[:axis], self.rows, *row[axis:])
            new = ir.Value(name=name, type=before.type, shape=ir.Shape(shape))
            before.name = f"{name}/frozen"
            before.replace_all_uses_with(new)
            inputs.append(new)
        outputs = list(graph.outputs)
        graph.outputs[:] = [*{**dict.fromkeys(outputs), **dict.fromkeys(objective.named_values)}]
        tidy(objective.model)
        graph.outputs[:] = outputs
        graph.inputs[:] = [*(x for x in graph.inputs if x.name not in self.unread), *inputs]
        rest = [x for x in objective.data if x.name not in self.unread]
        return replace(objective, data=[*inputs, *rest])

    def frozen_model(self, objective: Objective, device: Device, rows: int) -> ModelProto:
        """Return the model that computes these values from data, in the native form of a device.

        `objective` is taken over. `rows` is the count of rows of a batch.
        """
        graph = objective.model.graph
        values = {y.name: y for node in graph for y in node.outputs}
        graph.outputs[:] = [values[name] for name in self.axes]
        tidy(objective.model)
        graph.inputs[:] = [x for x in objective.data if x.uses()]
        to_native(graph, Target.for_step(device, count_multiply_adds(graph) * rows, rows))
        return to_proto_and_free(objective.model)


def cut_for_source(objective: Objective, source: BatchSource) -> FrozenCut:
    """Return the values of an objective to keep for the batches of a source.

    Raises:
        ValueError: no such value, see `find_frozen_cut`.
    """
    piece = _first_slice(source)
    lengths = {n: a.shape for n, a in piece.row_axes.as_declared(piece.first_batch()).items()}
    return find_frozen_cut(objective, piece.row_axes.find_row_axes(lengths), lengths)


def _first_slice(source: BatchSource) -> BatchSlice:
    """Return the first batch of an epoch without shuffling."""
    with closing(source.epoch(None, 0, lambda batch: 1)) as slices:
        return next(slices)


def find_frozen_cut(
    objective: Objective, axes: Mapping[str, int | None], lengths: Shapes
) -> FrozenCut:
    """Return the values to keep: the last ones in front of nodes that train, computed row by row.

    A value is kept if it depends on features only, if row i of it is proven to depend on row i of
    the data, and if products or convolutions compute it; masks and indices are computed anew.

    Args:
        objective: the loss; never changed.
        axes: the axis of the rows of each input of data; None for an input without rows.
        lengths: the shapes of a batch, by input.

    Raises:
        ValueError: no such value.
    """
    model = objective.model.clone()
    labels = {*objective.labels, objective.row_weight}
    features = [str(x.name) for x in objective.data if x.name not in labels]
    walk = RowWalk(infer_from_rows(model, axes, lengths, BATCH_SYMBOL), BATCH_SYMBOL)
    graph, named = model.graph, {str(v.name) for v in objective.named_values}
    trained = {str(v.name) for v in (*objective.weights, *objective.buffers)}
    changing = {x for x in graph.inputs if x.name not in features}
    changing |= {v for name, v in graph.initializers.items() if name in trained}
    frozen = {v for v in _frozen_values(graph, changing, walk) if v.name not in named}
    needed = [y for node in graph for y in node.outputs if y.name in named]
    kept, computing = _values_to_keep(needed, frozen, walk)
    if not kept:
        raise ValueError(
            f"{argument('cache', True)} keeps the results of frozen layers, and no product or "
            f"convolution in front of the weights that train is computed from "
            f"{join_first(list(map(repr, features)), 3)} row by row and without random numbers: "
            "leave it out, or freeze the first layers"
        )
    readers: dict[str, list[ir.Node]] = {name: [] for name in features if name not in named}
    for node in computing:
        for name in readers.keys() & {str(x.name) for x in reads(node)}:
            readers[name].append(node)
    whole, rest = count_multiply_adds(graph), count_multiply_adds(computing)
    places = {str(v.name): walk.states[v].axis for v in kept}
    return FrozenCut(
        axes=places,
        shapes={str(v.name): _shape_of_row(v, places[str(v.name)]) for v in kept},
        rows=_declared_rows(objective, axes),
        unread=frozenset(name for name, nodes in readers.items() if not nodes),
        sized=frozenset(n for n, nodes in readers.items() if nodes and all(map(_is_shape, nodes))),
        share=1 - rest / whole if whole else 1.0,
    )


def _frozen_values(graph: ir.Graph, changing: set[ir.Value], walk: RowWalk) -> set[ir.Value]:
    """Return the values that products or convolutions compute, row by row, from features only.

    `changing` are inputs and weights on which no such value depends; other values are added.
    """
    frozen = set[ir.Value]()
    for node in graph:
        read = reads(node)
        if not changing.isdisjoint(read) or not _walks_along(walk, node):
            changing.update(node.outputs)
        elif not frozen.isdisjoint(read) or _has_products(node):
            frozen.update(y for y in node.outputs if walk.has_rows(y))
    return frozen


def _values_to_keep(
    needed: list[ir.Value], frozen: Collection[ir.Value], walk: RowWalk
) -> tuple[list[ir.Value], set[ir.Node]]:
    """Return the frozen values that other nodes read on the way to `needed`, and these nodes.

    A value that has the elements of another one is computed from it, so that they are kept once.
    """
    kept, computing, waiting = dict[ir.Value, None](), set[ir.Node](), list(needed)
    for value in waiting:  # grows while it is read
        producer = value.producer()
        if producer is None or producer in computing:
            continue
        computing.add(producer)
        for x in reads(producer):
            is_kept = x in frozen and _can_be_kept(walk, x)
            if is_kept and not _is_move_of_kept_value(x, frozen, walk):
                kept[x] = None
            else:
                waiting.append(x)
    return list(kept), computing


def _declared_rows(objective: Objective, axes: Mapping[str, int | None]) -> Dim:
    """Return the length of the rows' axis that the data of an objective declare."""
    for x in objective.data:
        axis, shape = axes.get(str(x.name)), dims(x)
        if axis is not None and shape is not None:
            return shape[axis]
    return BATCH


def _walks_along(walk: RowWalk, node: ir.Node) -> bool:
    """Let a walk visit a node; return whether the node keeps rows apart and draws no numbers."""
    try:
        walk.visit(node)
    except UnprovenRows:
        return False
    return True


def _has_products(node: ir.Node) -> bool:
    """Return whether a node has products or subgraphs, so that its results are worth keeping."""
    return operator_of(node).work is not None or any(subgraphs(node))


def _is_shape(node: ir.Node) -> bool:
    """Return whether a node is a Shape or Size, which reads no element."""
    return node.op_type in ("Shape", "Size") and not node.domain


def _can_be_kept(walk: RowWalk, value: ir.Value) -> bool:
    """Return whether a value has exactly one entry for each row, and a known shape and dtype."""
    state = walk.states[value]
    if state.outer != 1 or state.length != BATCH_SYMBOL or value.dtype is None:
        return False
    shape = dims(value)
    if shape is None or static((*shape[: state.axis], *shape[state.axis + 1 :])) is None:
        return False
    return value.dtype != ir.DataType.BFLOAT16 and value.dtype.numpy().kind in _KEPT_DTYPES


def _is_move_of_kept_value(x: ir.Value, frozen: Collection[ir.Value], walk: RowWalk) -> bool:
    """Return whether `x` has the elements of another frozen value that can be kept."""
    producer = made_by(x, *_MOVES)
    return (
        producer is not None
        and (source := producer.inputs[0]) in frozen
        and source is not None
        and _can_be_kept(walk, source)
    )


def _shape_of_row(value: ir.Value, axis: int) -> tuple[int, ...]:
    """Return the shape of a value without the axis of the rows."""
    shape = dims(value) or ()
    return tuple(d for i, d in enumerate(shape) if i != axis and isinstance(d, int))


# -- the data --------------------------------------------------------------------------------------


class CachedSource(ArraySource):
    """Batches of kept values and of the data that the rest of a model reads.

    Args:
        source: the data, whose rows can be read in any order.
        arrays: kept values, and data with rows on the first axis, by input.
        whole: the names of the arrays without rows.
        row_axes: the axes on which the model has the rows.
    """

    def __init__(
        self,
        source: BatchSource,
        arrays: Arrays,
        whole: Iterable[str],
        row_axes: RowAxes,
    ) -> None:
        super().__init__(arrays, frozenset(whole), row_axes, source.batch_size)
        self._source = source
        self.numbers = source.numbers if isinstance(source, ArraySource) else None

    @property
    def description(self) -> dict[str, Any]:
        """The description of the data, from which the values are computed."""
        return self._source.description

    def row_order(self, rng: np.random.Generator | None) -> np.ndarray:
        """Return the indices of all rows in the order in which an epoch of the data yields them."""
        order = self._source.row_order(rng)
        assert order is not None
        return order


@dataclass(frozen=True)
class CachePlace:
    """Where kept values are: in memory or a temporary file, or in a folder for later trainings.

    - `folder`: the folder; None: values are in memory if they take at most a quarter of the free
      memory, and in a temporary file otherwise.
    """

    folder: Path | None = None

    @staticmethod
    def of(cache: bool | str | os.PathLike) -> CachePlace | None:
        """Return the place for the argument `cache` of `fit`; None for False."""
        if isinstance(cache, bool):
            return CachePlace() if cache else None
        if not isinstance(cache, (str, os.PathLike)):
            raise ValueError(f"cache must be True, False or a folder, not {cache!r}")
        return CachePlace(Path(cache))


def cache_frozen_values(
    source: BatchSource, frozen: ModelProto, cut: FrozenCut, place: CachePlace, device: Device
) -> CachedSource:
    """Return a source whose batches have the kept values, which `frozen` computes for all rows.

    Args:
        source: the data.
        frozen: the model of the frozen part, see `FrozenCut.frozen_model`.
        cut: the values to keep.
        place: where arrays are kept.
        device: where the model runs.

    Raises:
        ValueError: data that are read in one order only, or that change at random from epoch to
            epoch.
        OSError: the disk has no room for the values.
    """
    _require_equal_epochs(source)
    content = content_digest(frozen) + json.dumps(source.description, sort_keys=True).encode()
    digest = sha256(content).hexdigest()[:32]
    if place.folder is not None and (kept := _KeptArrays.load(place.folder / digest)) is not None:
        logger.warning("cache: the frozen values of these data are in %s", kept.folder)
    else:
        kept = _compute_values(source, Predictor(frozen, device=device), cut, place)
        kept.finish(None if place.folder is None else place.folder / digest)
    axes = _first_slice(source).row_axes
    shapes: dict[str, Dims | None] = {
        name: (*row[:axis], BATCH, *row[axis:]) for name, axis, row in cut.entries()
    }
    moved = replace(
        axes,
        shapes={**axes.shapes, **shapes},
        features=[*axes.features, *cut.axes],
        batch_axes={**axes.batch_axes, **cut.axes},
    )
    return CachedSource(source, kept.arrays, kept.whole, moved)


def _compute_values(
    source: BatchSource, predictor: Predictor, cut: FrozenCut, place: CachePlace
) -> _KeptArrays:
    """Return the kept values and the data of all rows, with rows on the first axis."""
    order, kept, done = source.unshuffled_order, _KeptArrays(place), 0
    for piece in source.epoch(None, 0, lambda batch: 1):
        arrays, count = piece.first_batch(), piece.own
        whole = piece.row_axes.names_without_rows(arrays)
        size = predictor.fixed_rows or count
        rows = np.minimum(np.arange(size), count - 1)  # a short batch is filled with its last row
        filled = arrays if size == count else take_rows(arrays, rows, whole)
        results = predictor.compute(piece.row_axes.as_declared(filled))
        values = {
            name: np.moveaxis(y, axis, 0)[:count]
            for (name, axis), y in zip(cut.axes.items(), results, strict=True)
        }
        rest = {name: a for name, a in arrays.items() if name not in cut.unread}
        if not done:
            kept.allocate({**values, **rest}, whole, source.rows or 0, cut)
        at = np.arange(done, done + count)
        kept.write(at if order is None else order[at], {**values, **rest})
        done += count
    return kept


class _KeptArrays:
    """Arrays with an entry for each row, in memory or in files of a folder.

    Attributes:
        arrays: the arrays by name.
        whole: the names of the arrays without rows.
        folder: the folder of the files; None: the arrays are in memory.
    """

    def __init__(self, place: CachePlace) -> None:
        self.place = place
        self.folder: Path | None = None
        self.arrays, self.whole = dict[str, np.ndarray](), set[str]()

    @classmethod
    def load(cls, folder: Path) -> _KeptArrays | None:
        """Return the arrays that a training has kept in a folder; None if there are none."""
        if not (folder / _MANIFEST).is_file():
            return None
        kept, described = cls(CachePlace(folder)), json.loads((folder / _MANIFEST).read_text())
        for i, name in enumerate(described["names"]):
            kept.arrays[name] = (
                _zeros_without_memory(*described["sized"][name])
                if name in described["sized"]
                else np.load(folder / f"{i}.npy", mmap_mode="r")
            )
        kept.whole, kept.folder = set(described["whole"]), folder
        return kept

    def allocate(
        self, first: Mapping[str, np.ndarray], whole: set[str], rows: int, cut: FrozenCut
    ) -> None:
        """Allocate arrays for `rows` rows like the first batch, of which `whole` has no rows.

        Raises:
            OSError: the disk has no room for them.
        """
        shapes = {n: a.shape if n in whole else (rows, *a.shape[1:]) for n, a in first.items()}
        sizes = {n: math.prod(shapes[n]) * a.itemsize for n, a in first.items()}
        nbytes = sum(size for name, size in sizes.items() if name not in cut.sized)
        if self.place.folder is not None:
            self.place.folder.mkdir(parents=True, exist_ok=True)
        if self.place.folder is not None or nbytes > free_memory() / _SHARE_OF_MEMORY:
            self.folder = folder = Path(mkdtemp(prefix=".onnxgrad-cache-", dir=self.place.folder))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            if nbytes > (free := shutil.disk_usage(folder).free):
                raise OSError(
                    errno.ENOSPC,
                    f"the frozen values of {rows} rows take {nbytes:,} bytes, and {free:,} are "
                    f"free: leave out {named('cache')}, or give a folder on another disk",
                    str(folder),
                )
        logger.warning(
            f"cache: {join_first(list(map(repr, cut.axes)), 3)} of {rows} rows take {nbytes:,} "
            f"bytes in {'memory' if self.folder is None else self.folder}, in place of "
            f"{cut.share:.1%} of the multiply-adds of a forward pass"
        )
        for i, (name, array) in enumerate(first.items()):
            if name in cut.sized:  # no node reads an element
                self.arrays[name] = _zeros_without_memory(array.dtype, shapes[name])
            elif self.folder is None:
                self.arrays[name] = np.empty(shapes[name], array.dtype)
            else:
                file = self.folder / f"{i}.npy"
                self.arrays[name] = np.lib.format.open_memmap(file, "w+", array.dtype, shapes[name])
        self.whole = whole

    def write(self, rows: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
        """Write the entries of some rows; an array without rows is written whole."""
        for name, array in batch.items():
            if self.arrays[name].flags.writeable:
                self.arrays[name][... if name in self.whole else rows] = array

    def finish(self, folder: Path | None) -> None:
        """Give the files their lasting folder, once all rows are written."""
        if folder is None or self.folder is None:
            return
        described: dict[str, Any] = {"names": list(self.arrays), "whole": sorted(self.whole)}
        described["sized"] = {
            name: (array.dtype.str, array.shape)
            for name, array in self.arrays.items()
            if not isinstance(array, np.memmap)
        }
        for array in self.arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        (self.folder / _MANIFEST).write_text(json.dumps(described))
        with suppress(OSError):  # another process has written it meanwhile
            self.folder.rename(folder)
        kept = _KeptArrays.load(folder)
        assert kept is not None
        self.arrays, self.folder = kept.arrays, folder


def _zeros_without_memory(dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Return zeros, all of which are one element in memory; the array cannot be written."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def free_memory() -> float:
    """Return the bytes of memory that are free or can be freed; infinity if the system has no such
    number.
    """
    try:
        text = Path("/proc/meminfo").read_text()
        return 1024 * float(text.partition("MemAvailable:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return math.inf


def _require_equal_epochs(source: BatchSource) -> None:
    """Raise `ValueError` for data whose rows cannot be read in any order, or change at random."""
    if source.row_order(np.random.default_rng(0)) is None:
        raise ValueError(
            f"{named('cache')} keeps a value for each row, and these data can be read in one order "
            "only, or are padded batch by batch: pass arrays, tables, folders of files or an "
            "IndexedReader, or leave it out"
        )
    if isinstance(source, ReaderSource) and source.reader.changes_rows():
        raise ValueError(
            f"{named('cache')} keeps a value for each row, and the rows change at random from "
            "epoch to epoch: leave out the random transforms, or the cache"
        )
