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
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative_builder import Builder, Derivatives, Result
from onnxgrad.autodiff.matrices import ForwardMode, gradient_builder
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.graph.emit import Emit
from onnxgrad.model.convert import convert_precision
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.traversal import model_nodes
from onnxgrad.model.write import save
from onnxgrad.operators.shapes import Dim, dims, rank, static
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.session import session

# prefix -> symbol of the number of directions
_COUNTS = {"adj": "nadj", "fwd": "nfwd", "fwd_adj": "nfwd_x_nadj"}
_DTYPES = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
_DERIVATIVE = re.compile(r"(fwd|adj)[^_]*_")  # names that CasADi takes for derivatives


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
        >>> family = og.graph.derivative_family(model)
        >>> list(family)
        ['f', 'fwd_f', 'adj_f', 'fwd_adj_f']
        >>> session = ort.InferenceSession(family["adj_f"].SerializeToString())
        >>> seeds = np.array([[1.0, 0.0], [0.0, 1.0]])  # two, as columns
        >>> session.run(["adj_x"], {"x": np.array([1.0, 3.0]), "adj_y": seeds})[0].tolist()
        [[2.0, 0.0], [0.0, 6.0]]
    """
    files = family_paths("f.onnx" if path is None else path)
    with pause_garbage_collection():
        if dtype is not None and dtype not in _DTYPES:
            raise unknown("dtype", dtype, _DTYPES)
        origin = read(model) if dtype is None else convert_precision(read(model), _DTYPES[dtype])
        first = Builder(origin, weights, inputs, outputs)
        _check_casadi_names(first)
        family = dict(zip(files, _family_models(first, origin, outputs), strict=True))
    if dtype is not None:
        _require_kernels(family.values(), dtype)
    if path is not None:
        for name, file in files.items():
            save(family[name], file)
    return family


def _family_models(
    first: Builder, origin: ModelProto, outputs: Sequence[str] | None
) -> tuple[ModelProto, ModelProto, ModelProto, ModelProto]:
    """Return the models f, fwd_f, adj_f and fwd_adj_f; `first` is the builder that holds f."""
    adjoint = _directional_model(first, "adj", first.differentiated, first.write_gradients)
    inputs = [str(x.name) for x in first.wrt if x in first.inputs]  # that the outputs depend on
    weights = [str(x.name) for x in first.wrt if x not in first.inputs]
    new_builder = partial(Builder, origin, weights, inputs, outputs)
    mode = ForwardMode(new_builder())
    forward = _directional_model(mode.builder, "fwd", mode.builder.wrt, mode.push_tangents)
    return new_builder().build_model([]), forward, adjoint, _fwd_adj_model(new_builder())


def family_paths(path: str | os.PathLike) -> dict[str, Path]:
    """Return {name of a model: its file} of the family of four models whose first file is
    `path`.
    """
    first = Path(path)
    if first.suffix != ".onnx":
        raise ValueError(f"{str(path)!r} does not end in .onnx: name the file of the first model")
    names = [prefix + first.stem for prefix in ("", "fwd_", "adj_", "fwd_adj_")]
    return {name: first.with_name(f"{name}.onnx") for name in names}


def _require_kernels(models: Iterable[ModelProto], dtype: str) -> None:
    """Raise `ValueError` for models with operators that onnxruntime does not compute in `dtype`."""
    for model in models:
        try:
            session(model, CPU, work=0.0)
        except Exception as e:  # onnxruntime's errors have no common base
            if (found := re.search(r"implementation for (\w+)", str(e))) is None:
                raise
            nodes = [n for n in model_nodes(model) if n.op_type == found[1]]
            where = printable(next((n.name or n.output[0] for n in nodes), ""))
            raise ValueError(
                f"{argument('dtype', dtype)}: onnxruntime has no {found[1]} of it, node {where!r}; "
                f"leave {named('dtype')} out, or name other {named('outputs')}"
            ) from e


def _check_casadi_names(builder: Builder) -> None:
    """Raise a ValueError if CasADi would misread the name of an input or output, or if an output is
    no float.
    """
    inputs, outputs = ([str(v.name) for v in vs] for vs in (builder.graph.inputs, builder.kept))
    reserved = {*outputs, *(f"out_{y}" for y in outputs)}  # CasADi adds inputs out_<y>
    clashes = [x for x in inputs if x in reserved or _DERIVATIVE.match(x)]
    clashes += [y for y in outputs if _DERIVATIVE.match(y)]
    if clashes:
        raise ValueError(
            f"CasADi reads another meaning into the names {clashes}: rename these inputs and "
            "outputs, for example by `onnx.compose.add_prefix(model, 'f_')`"
        )
    others = [str(y.name) for y in builder.kept if y not in builder.differentiated]
    if others:
        raise ValueError(
            f"the outputs {others} are no floats: name the float outputs to keep in `outputs`"
        )


def _directional_model(
    builder: Builder, prefix: str, seeded: Sequence[ir.Value], derive: Callable[[Derivatives], Any]
) -> ModelProto:
    """Return the model of J^T u or J v for all seeds; `derive` maps one direction to its
    derivatives.
    """
    seeds = Seeds(builder, seeded, prefix)

    def write_direction(index: ir.Value) -> Derivatives:
        derivatives = derive(seeds.seeds_at(index))
        others = builder.wrt if prefix == "adj" else builder.differentiated
        return {x: builder.derivative_or_zeros(derivatives, x) for x in others}

    stacked = builder.map_indices(builder.op.Max(*seeds.counts), write_direction)
    return _packed_model(builder, stacked, prefix)


def _fwd_adj_model(first: Builder) -> ModelProto:
    """Return the model of the second-order derivative H(u) v + J^T w for all seeds."""
    seeds = first.add_cotangents()
    builder, gradients = gradient_builder(first, seeds, keep=False)
    inputs = {x.name: x for x in builder.graph.inputs}
    cotangents = [inputs[u.name] for u in seeds.values()]
    for u in cotangents:
        builder.graph.inputs.remove(u)
    adjoint, forward = Seeds(builder, builder.kept, "adj"), Seeds(builder, builder.wrt, "fwd")
    both = Seeds(builder, builder.kept, "fwd_adj")
    op = builder.op
    nadj = op.Max(*adjoint.counts)
    count = op.Max(op.Mul(nadj, op.Max(*forward.counts)), *both.counts)

    def write_direction(k: ir.Value) -> Derivatives:
        width = op.Reshape(nadj, [])
        u, v = adjoint.seeds_at(op.Mod(k, width)), forward.seeds_at(op.Div(k, width))
        along = {gradients[x]: seed for x, seed in v.items()}
        results = sweep(op, along | both.seeds_at(k), builder.wrt)
        ir.convenience.replace_all_uses_with(cotangents, list(u.values()))
        builder.graph.sort()  # the seeds were written after the nodes that read them
        return {x: builder.derivative_or_zeros(results, x) for x in builder.wrt}

    return _packed_model(builder, builder.map_indices(count, write_direction), "fwd_adj")


def _packed_model(builder: Builder, stacked: Derivatives, prefix: str) -> ModelProto:
    """Return the model that returns the kept outputs, and the derivatives in packed form."""
    results: list[Result] = []
    for x, v in stacked.items():
        matrix = packed_seeds(builder.op, v, x)
        matrix.type, matrix.shape = x.type, ir.Shape(packed_dims(x, prefix))
        results.append((f"{prefix}_{x.name}", matrix))
    return builder.build_model(results)


# -- seeds of many directions in one matrix --------------------------------------------------------
#
# CasADi reads a tensor as a matrix: a tensor of rank 0 or 1 as a column, of rank 2 unchanged, of a
# higher rank as the column of its elements in row-major order. K seeds of an r x c matrix are one
# matrix of r x (K * c): the columns of the first, of the second, and so on.


class Seeds:
    """Graph inputs `<prefix>_<x>` for the directions of derivatives, one input for each value x.

    Each input holds its directions side by side, as CasADi passes them. `counts` has the number of
    directions of each input, an int64 of shape [1].
    """

    def __init__(self, builder: Builder, values: Sequence[ir.Value], prefix: str) -> None:
        self._op, inputs = builder.op, []
        for x in values:
            builder.release_name(name := f"{prefix}_{x.name}")
            seeds = ir.Value(name=name, type=x.type, shape=ir.Shape(packed_dims(x, prefix)))
            inputs.append((x, seeds))
            builder.graph.inputs.append(seeds)
        self.counts = [_direction_count(builder.op, seeds, x) for x, seeds in inputs]
        self._stacked = [(x, _unpacked_seeds(builder.op, seeds, x)) for x, seeds in inputs]

    def seeds_at(self, index: ir.Value) -> dict[ir.Value, ir.Value]:
        """Return `{value: its seed}` of direction number `index`, which must not exceed the last
        direction.
        """
        op = self._op
        return {x: op.set_type_like(op.Gather(v, index, axis=0), x) for x, v in self._stacked}


def packed_dims(like: ir.Value, prefix: str) -> tuple[Dim, Dim]:
    """Return the dimensions of the input `<prefix>_<like>`, the packed seeds of the value `like`.

    ONNX has no products of symbols: the number of columns is K where c is 1, else a symbol of its
    own, which CasADi sets to the width of the seeds that it passes.
    """
    shape, count, name = dims(like), _COUNTS[prefix], f"{prefix}_{like.name}"
    if shape is None:
        raise ValueError(
            f"the rank of {like.name!r} is unknown, so that its seeds have no layout: declare its "
            "shape in the model"
        )
    if len(shape) == 2:
        rows, columns = shape
        return rows, count if columns == 1 else f"{count}_x_{columns or name}"
    lengths = static(shape)
    unknown = shape[0] if len(shape) == 1 else f"{name}_rows"
    return unknown if lengths is None else prod(lengths), count


def _direction_count(op: Emit, seeds: ir.Value, like: ir.Value) -> ir.Value:
    columns = op.dim(like, 1) if rank(like) == 2 else 1
    width = op.const(op.vector(op.dim(seeds, 1)))
    return width if columns == 1 else op.Div(width, op.const(op.vector(columns)))


def _unpacked_seeds(op: Emit, seeds: ir.Value, like: ir.Value) -> ir.Value:
    """Return the packed `seeds` of `like` as a tensor of K directions, (K, *like.shape)."""
    if rank(like) == 2:
        split = op.Reshape(seeds, op.vector(op.dim(like, 0), -1, op.dim(like, 1)))
        split.shape = ir.Shape([None, None, None])
        stacked = op.Transpose(split, perm=[1, 0, 2])
    else:
        shape = op.vector(-1, *(op.dim(like, i) for i in range(rank(like) or 0)))
        stacked = op.Reshape(op.Transpose(seeds, perm=[1, 0]), shape)
    stacked.dtype, stacked.shape = like.dtype, ir.Shape([None, *(dims(like) or ())])
    return stacked


def packed_seeds(op: Emit, stacked: ir.Value, like: ir.Value) -> ir.Value:
    """Return `stacked`, derivatives of K directions (K, *like.shape), as one packed matrix."""
    if rank(like) == 2:
        flat = op.Transpose(stacked, perm=[1, 0, 2])
        return op.Reshape(flat, op.vector(op.dim(like, 0), -1))
    return op.Transpose(op.Reshape(stacked, op.vector(-1, op.numel(like, 0))), perm=[1, 0])
