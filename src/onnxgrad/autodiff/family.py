"""`derivative_family`: a model and its directional derivatives, by the conventions of CasADi.

With f(x) = y, J its Jacobian, u a seed of y (`adj_y`) and v one of x (`fwd_x`): `fwd_f` is J v,
`adj_f` is J^T u, and `fwd_adj_f` is the derivative of J^T u along (v, w) in (x, u), which is
H(u) v + J^T w with H(u) the Hessian of u^T f. H(u) v is the gradient of <J^T u, v> (Christianson
1992, IMA J. Numer. Anal. 12(2)), so that one sweep computes both terms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.directions import Seeds, pack, packed_dims
from onnxgrad.autodiff.matrices import Forward, with_gradients
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.sheet import Derivatives, Result, Sheet
from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.graph.emit import garbage_kept
from onnxgrad.model.convert import in_precision
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import nodes_of
from onnxgrad.model.write import save
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

_DTYPES = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
_DERIVATIVE = re.compile(r"(fwd|adj)[^_]*_")  # what CasADi takes for the name of a derivative


def derivative_family(
    model: ModelLike,
    path: str | os.PathLike | None = None,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    dtype: str | None = None,
) -> dict[str, ModelProto]:
    """Return a model with its directional derivatives, named as CasADi 3.8 looks for them.

    The result is `{"f": ..., "fwd_f": ..., "adj_f": ..., "fwd_adj_f": ...}`, with the stem of
    `path` in place of `f`. For inputs X and outputs Y, `fwd_f` takes `fwd_X`, too, and returns
    `fwd_Y`, the Jacobian times these seeds; `adj_f` takes `adj_Y` and returns `adj_X`, the
    transposed Jacobian times these; `fwd_adj_f`, for exact Hessians, takes `adj_Y`, `fwd_X` and
    `fwd_adj_Y`, and returns `fwd_adj_X`, the derivative of `adj_X` along `fwd_X`, and `fwd_adj_Y`
    in `adj_Y`. All return Y as well. K seeds of an r x c matrix are one of r x (K * c). A value of
    another rank counts as a column; K is then the second axis of its seeds.

    Args:
        model: model, serialized model or path; never modified.
        path: where f is saved, the others beside it; existing files are replaced. None: nowhere.
        weights: names of weights that become inputs, as in `vjp`. None: all that Y depends on.
        inputs: names of inputs that have derivatives. None: every float that Y depends on.
        outputs: names of the float outputs to keep. None: all, which must be floats.
        dtype: "float32" or "float64", to which all floats are converted; onnxruntime must have
            their operators in it, on the CPU. None: they stay.

    Raises:
        ValueError: an unknown name or dtype, a `path` that does not end in `.onnx`, a value that is
            no float or of unknown rank, a name that CasADi has for other values (`fwd_x`, `adj_y`;
            `out_y` of an input, if y is an output), no differentiable path, or a `dtype` in which
            onnxruntime lacks an operator, as Conv in float64.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule, or one without forward mode (see `jvp`).
        OSError: a file cannot be written.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (double[2] x) => (double[2] y) { y = Mul(x, x) }''')
        >>> family = og.derivative_family(model)
        >>> list(family)
        ['f', 'fwd_f', 'adj_f', 'fwd_adj_f']
        >>> session = ort.InferenceSession(family["adj_f"].SerializeToString())
        >>> seeds = np.array([[1.0, 0.0], [0.0, 1.0]])  # two, as columns
        >>> session.run(["adj_x"], {"x": np.array([1.0, 3.0]), "adj_y": seeds})[0].tolist()
        [[2.0, 0.0], [0.0, 6.0]]
    """
    files = family_paths("f.onnx" if path is None else path)
    with garbage_kept():
        origin = _in_dtype(read(model), dtype)
        first = Sheet(origin, weights, inputs, outputs)
        _check(first)
        family = dict(zip(files, _models(first, origin, outputs), strict=True))
    if dtype is not None:
        _require_kernels(family.values(), dtype)
    if path is not None:
        for name, file in files.items():
            save(family[name], file)
    return family


def _models(
    first: Sheet, origin: ModelProto, outputs: Sequence[str] | None
) -> tuple[ModelProto, ModelProto, ModelProto, ModelProto]:
    """Return f, fwd_f, adj_f and fwd_adj_f; `first` is a sheet of f."""
    adjoint = _directional(first, "adj", first.differentiated, first.gradients)
    names = [str(x.name) for x in first.wrt]  # those that the outputs depend on
    split = len([x for x in first.wrt if x in first.inputs])

    def again() -> Sheet:
        return Sheet(origin, names[split:], names[:split], outputs)

    mode = Forward(again())
    forward = _directional(mode.sheet, "fwd", mode.sheet.wrt, mode.push)
    return again().finish([]), forward, adjoint, _forward_over_adjoint(again())


def family_paths(path: str | os.PathLike) -> dict[str, Path]:
    """Return the files of the family whose first is `path`, by the names of its models."""
    first = Path(path)
    if first.suffix != ".onnx":
        raise ValueError(f"{str(path)!r} does not end in .onnx, as files of a family do")
    names = [prefix + first.stem for prefix in ("", "fwd_", "adj_", "fwd_adj_")]
    return {name: first.with_name(f"{name}.onnx") for name in names}


def _in_dtype(proto: ModelProto, dtype: str | None) -> ModelProto:
    if dtype is not None and dtype not in _DTYPES:
        raise unknown("dtype", dtype, _DTYPES)
    return proto if dtype is None else in_precision(proto, _DTYPES[dtype])


def _require_kernels(models: Iterable[ModelProto], dtype: str) -> None:
    """Raise `ValueError` for models with operators that onnxruntime does not compute in `dtype`."""
    for model in models:
        try:
            session(model, CPU, work=0.0)
        except Exception as e:  # a type of onnxruntime's own
            if (found := re.search(r"implementation for (\w+)", str(e))) is None:
                raise
            nodes = [n for n in nodes_of(model) if n.op_type == found[1]]
            where = printable(next((n.name or n.output[0] for n in nodes), ""))
            raise ValueError(
                f"{argument('dtype', dtype)}: onnxruntime has no {found[1]} of it, node {where!r}; "
                f"leave {named('dtype')} out, or name other {named('outputs')}"
            ) from e


def _check(sheet: Sheet) -> None:
    """Raise a ValueError if CasADi would not know a name or an output for what it is."""
    inputs, outputs = ([str(v.name) for v in vs] for vs in (sheet.graph.inputs, sheet.kept))
    reserved = {*outputs, *(f"out_{y}" for y in outputs)}  # CasADi adds the second as inputs
    clashes = [x for x in inputs if x in reserved or _DERIVATIVE.match(x)]
    clashes += [y for y in outputs if _DERIVATIVE.match(y)]
    if clashes:
        raise ValueError(
            f"CasADi has other values of the names {clashes}: rename them, for example all by "
            "`onnx.compose.add_prefix(model, 'f_')`"
        )
    others = [str(y.name) for y in sheet.kept if y not in sheet.differentiated]
    if others:
        raise ValueError(
            f"the outputs {others} are no floats, and have no derivatives: name the outputs to keep"
        )


def _directional(
    sheet: Sheet, prefix: str, seeded: Sequence[ir.Value], derive: Callable[[Derivatives], Any]
) -> ModelProto:
    """Return the model of J^T u or of J v, of which `derive` returns those of one direction."""
    seeds = Seeds(sheet, seeded, prefix)

    def write(index: ir.Value) -> Derivatives:
        derivatives = derive(seeds.at(index))
        others = sheet.wrt if prefix == "adj" else sheet.differentiated
        return {x: sheet.or_zeros(derivatives, x) for x in others}

    return _finish(sheet, sheet.each(sheet.op.Max(*seeds.counts), write), prefix)


def _forward_over_adjoint(first: Sheet) -> ModelProto:
    """Return the model of H(u) v + J^T w."""
    seeds = first.cotangents()
    sheet, gradients = with_gradients(first, seeds, keep=False)
    inputs = {x.name: x for x in sheet.graph.inputs}
    cotangents = [inputs[u.name] for u in seeds.values()]
    for u in cotangents:
        sheet.graph.inputs.remove(u)
    adjoint, forward = Seeds(sheet, sheet.kept, "adj"), Seeds(sheet, sheet.wrt, "fwd")
    both = Seeds(sheet, sheet.kept, "fwd_adj")
    op = sheet.op
    nadj = op.Max(*adjoint.counts)
    count = op.Max(op.Mul(nadj, op.Max(*forward.counts)), *both.counts)

    def write(k: ir.Value) -> Derivatives:
        width = op.Reshape(nadj, [])
        u, v = adjoint.at(op.Mod(k, width)), forward.at(op.Div(k, width))
        along = {gradients[x]: seed for x, seed in v.items()}
        results = sweep(op, along | both.at(k), sheet.wrt)
        ir.convenience.replace_all_uses_with(cotangents, list(u.values()))
        sheet.graph.sort()  # the seeds were written after the nodes that read them
        return {x: sheet.or_zeros(results, x) for x in sheet.wrt}

    return _finish(sheet, sheet.each(count, write), "fwd_adj")


def _finish(sheet: Sheet, stacked: Derivatives, prefix: str) -> ModelProto:
    """Return the model that returns the outputs of the sheet, and the derivatives, packed."""
    results: list[Result] = []
    for x, v in stacked.items():
        matrix = pack(sheet.op, v, x)
        matrix.type, matrix.shape = x.type, ir.Shape(packed_dims(x, prefix))
        results.append((f"{prefix}_{x.name}", matrix))
    return sheet.finish(results)
