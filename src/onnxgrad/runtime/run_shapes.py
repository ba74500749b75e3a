"""The shapes of outputs found by a run, where a file may declare wrong shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.model.external import content_digest
from onnxgrad.model.feeds import random_feed
from onnxgrad.operators.shapes import Dim, Dims, dims, shape_text
from onnxgrad.reporting import logger, warn_once
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

# the lengths of symbolic dimensions in a run: of first axes, and of other axes. A Squeeze without
# axes removes axes of length one: a second run, in which all are one, shows such a rank
_LENGTHS, _ONES = (3, 2), (1, 1)
_KEPT = 64  # models whose shapes are remembered: a training prepares a model several times
_runs: dict[tuple[bytes, tuple[int, int]], dict[str, Any]] = {}


def confirmed_by_run(proto: ModelProto) -> Callable[[ir.Value, Dims], Dims]:
    """Return a function that corrects an output's declared shape by running the model.

    The model runs on random inputs when the first output is asked for. The run gives the rank,
    unless a second run, in which all lengths are one, gives another rank; lengths that the run
    contradicts become unknown. A model that fails on these inputs keeps its stated shapes.
    """

    def confirm(y: ir.Value, stated: Dims) -> Dims:
        shapes = _shapes_in_run(proto, _LENGTHS)
        node = y.producer()
        if (actual := shapes.get(str(y.name))) is None or node is None or node.graph is None:
            return stated
        sizes: dict[Dim, int] = {}
        for x in node.graph.inputs:
            sizes.update(zip(dims(x) or (), shapes.get(str(x.name), ()), strict=False))
        if len(actual) != len(stated):
            if len(_shapes_in_run(proto, _ONES).get(str(y.name), actual)) != len(actual):
                return stated
            confirmed: Dims = (None,) * len(actual)
        else:
            known = [d if isinstance(d, int) else sizes.get(d) for d in stated]
            pairs = zip(stated, known, actual, strict=True)
            confirmed = tuple(d if n in (None, length) else None for d, n, length in pairs)
        if confirmed != stated:
            warn_once(
                f"the file states the shape {shape_text(stated)} of the output {y.name!r}, which "
                f"is {actual} when the model runs: the stated shape is ignored"
            )
        return confirmed

    return confirm


def _shapes_in_run(proto: ModelProto, lengths: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs and outputs in a run on random data; {} if the model fails.

    `lengths` has the length of symbolic first axes, and the length of other symbolic axes.
    """
    key = content_digest(proto), lengths
    if key not in _runs:
        if len(_runs) == _KEPT:
            del _runs[next(iter(_runs))]
        shapes: dict[str, tuple[int, ...]] = {}
        names = [y.name for y in proto.graph.output if y.type.HasField("tensor_type")]
        try:
            running = session(proto, CPU, work=0.0)
            feed = random_feed(running.get_inputs(), *lengths, random_state=0)
            arrays = feed | dict(zip(names, running.run(names, feed), strict=True))
            shapes = {name: array.shape for name, array in arrays.items()}
        except Exception as e:  # onnxruntime's errors have no common base
            logger.debug("shapes of outputs are taken as stated: %s", e)
        _runs[key] = shapes
    return _runs[key]
