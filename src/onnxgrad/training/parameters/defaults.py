"""`trainable`: which constants of a model train by default, and why."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

import numpy as np
import onnx_ir as ir
from onnx import ModelProto
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.errors import printable
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import to_ir
from onnxgrad.model.read import ModelLike, read
from onnxgrad.reporting import logger
from onnxgrad.training.parameters import evidence
from onnxgrad.training.parameters.roles import QUANTIZED, Roles, Verdict

_LISTED = 12  # tensors that a message names


@dataclass(frozen=True)
class Tensor:
    """A float constant of a model, and whether it trains by default.

    Attributes:
        name: its name, as in `weights_to_train`.
        shape: its shape.
        dtype: "float32", "float64", "float16" or "bfloat16".
        size: number of its elements.
        trains: whether it trains by default.
        why: its role in the graph, or the reason why it does not train.
        doubtful: whether trainers warn about the decision.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    trains: bool
    why: str
    doubtful: bool = False


class Tensors(list[Tensor]):
    """A list of `Tensor` that prints as a table."""

    def __str__(self) -> str:
        head = ("name", "shape", "dtype", "trains", "why")
        rows = [
            (printable(t.name), str(list(t.shape)), t.dtype, "yes" if t.trains else "no", t.why)
            for t in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        trained = [t for t in self if t.trains]
        size = sum(t.size for t in trained)
        summary = f"{len(trained)} of {len(self)} float constants train: {size:,} numbers"
        return "\n".join([*lines, summary])

    __repr__ = __str__


def trainable(model: ModelLike) -> Tensors:
    """Return the float constants of `model`, which of them train by default, and why.

    A tensor trains if its role in the graph is that of a weight: factor of a product with data,
    bias added to one, scale or bias of a normalization, table of an embedding, and so on. Masks,
    running statistics, tables of sines, scales of attention or of images and other constants of
    formulas do not. Trainers, `OnnxModule` and the command line train these weights by default, and
    any others that the user names.

    Args:
        model: model, serialized model or path; not modified.

    Returns:
        A list of tensors in the order of the graph, with attributes `name`, `shape`, `dtype`,
        `size`, `trains` and `why`; it prints as a table.

    Raises:
        ModelError: `model` cannot be read, or computes with maps.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N,2] x) => (float[N,1] y)
        ...     <float[2] units = {0.1, 0.2}, float[2,1] w = {1.0, 2.0}>
        ...     { scaled = Mul(x, units) y = MatMul(scaled, w) }''')
        >>> print(og.trainable(model))
        name   shape   dtype    trains  why
        units  [2]     float32  no      a factor of an input before any weight (Mul)
        w      [2, 1]  float32  yes     factor of MatMul
        1 of 2 float constants train: 2 numbers
        >>> [t.name for t in og.trainable(model) if t.trains]
        ['w']
    """
    proto = read(model)
    inner = to_ir(inlined(proto, lifted=True))
    RemoveInitializersFromInputsPass()(inner)
    values = inner.graph.initializers
    stated = evidence.stated_kinds(proto.graph)
    buffers = [values[n] for n, parameter in stated.items() if not parameter and n in values]
    roles = Roles(inner.graph, proto.producer_name == "pytorch", buffers)
    noted = constants.noted(proto)
    rows = Tensors()
    for site in constants.constant_refs(proto):
        if site.read().data_type in constants.FLOATS:
            array = site.array()
            verdict = Verdict(False, "part of a loss or of a gradient")
            if site.name not in noted:
                verdict = _verdict(roles, values, site.name, array, stated.get(site.name))
            rows.append(
                Tensor(
                    site.name,
                    array.shape,
                    str(array.dtype),
                    array.size,
                    verdict.trains,
                    printable(verdict.why),
                    verdict.doubtful,
                )
            )
    return rows


def default_weights(proto: ModelProto, announce: bool = False, needed: bool = True) -> list[str]:
    """Return the names of the weights that train by default.

    With `announce`, each float constant that does not train is logged with the reason, and a
    warning names uncertain ones: single numbers that may be learned, and large tensors.

    Raises:
        ValueError: weights are `needed`, and none of the float constants trains.
    """
    rows = trainable(proto)
    names = [t.name for t in rows if t.trains]
    if not names and any(t.why.startswith(QUANTIZED) for t in rows):
        return [t.name for t in rows]  # the sweep raises an error that explains why
    if rows and not names and needed:
        untrained = [t for t in rows if not t.trains]
        raise ValueError(
            f"none of the float constants is a weight by its role: {listed(untrained)}. Name those "
            "to train"
        )
    if announce:
        _announce(rows)
    return names


def _announce(rows: Tensors) -> None:
    untrained = [t for t in rows if not t.trains]
    if untrained:
        logger.info("not trained by default: %s", listed(untrained, len(untrained)))
    doubtful = [t for t in rows if t.doubtful]
    if doubtful:
        decisions = "; ".join(
            f"{printable(t.name)!r} {'trains' if t.trains else 'does not train'}: {t.why}"
            for t in doubtful[:_LISTED]
        )
        message = f"{decisions}{_more(doubtful)}. List the weights to choose otherwise"
        warnings.warn(message, stacklevel=_frames_inside() + 1)


def _frames_inside() -> int:
    """Return the number of frames of this package from the caller up, for `stacklevel`."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("onnxgrad"):
        frame, count = frame.f_back, count + 1
    return count


def listed(rows: Iterable[Tensor], most: int = _LISTED) -> str:
    """Return names and reasons as one line of text."""
    rows = list(rows)
    text = "; ".join(f"{printable(t.name)!r} ({t.why})" for t in rows[:most])
    return text + _more(rows, most)


def _verdict(
    roles: Roles,
    values: Mapping[str, ir.Value],
    name: str,
    array: np.ndarray,
    parameter: bool | None,
) -> Verdict:
    """Return the verdict of the role, or of the exporter if it states what the tensor is."""
    if name not in values:
        return Verdict(False, "no node reads it")
    verdict = roles.judge(name, values[name], array)
    if parameter is False and verdict.trains:
        return Verdict(False, f"a buffer, as its exporter states ({verdict.why})")
    if parameter and not verdict.trains and np.isfinite(array).all():
        why = f"a parameter, as its exporter states ({verdict.why})"
        return Verdict(True, why, array.size == 1)
    if parameter is False:
        return Verdict(False, verdict.why)
    return verdict


def _more(rows: list[Tensor], most: int = _LISTED) -> str:
    return f"; and {len(rows) - most} more" if len(rows) > most else ""
