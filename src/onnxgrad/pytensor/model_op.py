"""`OnnxOp`: an ONNX model as an operation of PyTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.bridges.function_model import FunctionModel
from onnxgrad.bridges.host_graph import HostGraph
from onnxgrad.checks import check_choice
from onnxgrad.errors import not_installed, unknown
from onnxgrad.model.read import ModelLike

try:
    import pytensor.tensor as pt
    from pytensor.gradient import DisconnectedType
    from pytensor.graph.basic import Apply, Variable
    from pytensor.graph.op import Op
    from pytensor.tensor.exceptions import ShapeError
except ImportError as e:
    raise not_installed("onnxgrad.pytensor", "pytensor", "pymc") from e


class GraphOp(Op):
    """The operation that runs a graph on arrays of the host, with gradients and tangents.

    Its operands are the inputs of the graph, in order. The gradient of a graph is a graph, too, so
    that operations are differentiated to any order.
    """

    __props__ = ("graph",)

    def __init__(self, graph: HostGraph) -> None:
        self.graph = graph

    def make_node(self, *inputs: Any) -> Apply:
        """Return the node for inputs and weights, in the order of the graph's inputs."""
        operands = []
        for x, spec in zip(inputs, self.graph.inputs, strict=True):
            x = pt.as_tensor_variable(x)
            if x.dtype != spec.dtype.name:
                if not np.can_cast(x.dtype, spec.dtype, "safe"):
                    raise TypeError(
                        f"{spec.name!r} takes {spec.dtype}, not {x.dtype}: convert it by "
                        ".astype, or choose OnnxOp(..., dtype=)"
                    )
                x = x.astype(spec.dtype.name)
            if spec.shape is not None and x.ndim != len(spec.shape):
                raise ValueError(
                    f"{spec.name!r} has {x.ndim} axes, where the model takes {len(spec.shape)}"
                )
            operands.append(x)
        outputs = []
        for spec in self.graph.outputs:
            if spec.shape is None:
                raise ValueError(f"the rank of output {spec.name!r} is unknown: PyTensor needs it")
            lengths = tuple(d if isinstance(d, int) else None for d in spec.shape)
            outputs.append(pt.tensor(dtype=spec.dtype.name, shape=lengths))
        return Apply(self, operands, outputs)

    def perform(self, node: Apply, inputs: Sequence[Any], output_storage: Any) -> None:
        """Write the outputs of the graph for arrays into the storage of the node's outputs.

        Raises:
            ValueError: a shape that does not fit, or a symbol with two lengths.
        """
        self.graph.check_shapes(tuple(x.shape for x in inputs))
        for cell, result in zip(output_storage, self.graph.run(inputs), strict=True):
            cell[0] = result

    def infer_shape(self, fgraph: Any, node: Apply, shapes: Sequence[Any]) -> list[tuple]:
        """Return the shapes of the outputs by the shapes of the inputs, where names say them."""
        lengths: dict[Any, Any] = {}
        for spec, shape in zip(self.graph.inputs, shapes, strict=True):
            lengths |= dict(zip(spec.shape or (), shape, strict=False))
        found = []
        for spec in self.graph.outputs:
            if any(isinstance(d, str) and d not in lengths for d in spec.shape or ()):
                raise ShapeError
            found.append(tuple(lengths.get(d, d) for d in spec.shape or ()))
        return found

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """Return for each input whether each output has a gradient with respect to it."""
        real = [_is_float_dtype(spec.dtype) for spec in self.graph.outputs]
        return [[_is_float_dtype(spec.dtype) and r for r in real] for spec in self.graph.inputs]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        """Return the gradients of the float inputs, by the graph of the gradient."""
        passes = self.graph.passes
        names = passes.pass_models(
            [_is_float_dtype(spec.dtype) for spec in self.graph.inputs]
        ).names
        found = self._gradients(names, inputs, outputs, cotangents) if names else {}
        return [
            found[spec.name]
            if spec.name in found
            else pt.zeros_like(x)
            if _is_float_dtype(spec.dtype)
            else DisconnectedType()()
            for x, spec in zip(inputs, self.graph.inputs, strict=True)
        ]

    def _gradients(
        self,
        names: list[str],
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> dict[str, Variable]:
        """Return the gradients of the inputs `names`, by name."""
        graph = self.graph.derived_graph("gradient", self.graph.passes.gradient_model(names))
        given = [
            pt.zeros_like(y) if isinstance(g.type, DisconnectedType) else g
            for y, g, spec in zip(outputs, cotangents, self.graph.outputs, strict=True)
            if _is_float_dtype(spec.dtype)
        ]
        gradients = GraphOp(graph)(*inputs, *given, return_list=True)
        return dict(zip(names, gradients, strict=True))

    L_op = pullback  # its name before PyTensor 3

    def pushforward(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], tangents: Sequence[Variable]
    ) -> list[Variable]:
        """Return the tangents of the float outputs, by the graph of tangents."""
        chosen = {
            spec.name: t
            for spec, t in zip(self.graph.inputs, tangents, strict=True)
            if _is_float_dtype(spec.dtype) and not isinstance(t.type, DisconnectedType)
        }
        model = self.graph.passes.tangent_model(list(chosen))
        graph = self.graph.derived_graph("tangent", model)
        results = GraphOp(graph)(*inputs, *chosen.values(), return_list=True)
        rest = iter(results[len(outputs) :])
        return [
            next(rest) if _is_float_dtype(spec.dtype) else DisconnectedType()()
            for spec in self.graph.outputs
        ]

    def R_op(self, inputs: Sequence[Variable], eval_points: Any) -> list[Variable | None]:  # noqa: N802
        """Return the tangents of the float outputs, as PyTensor 2 asks for them."""
        given = [DisconnectedType()() if t is None else t for t in eval_points]
        found = self.pushforward(inputs, self(*inputs, return_list=True), given)
        return [None if isinstance(t.type, DisconnectedType) else t for t in found]


class OnnxOp(GraphOp):
    """An ONNX model as an operation of PyTensor, differentiable with respect to inputs and weights.

    `op(*inputs)` returns the output of the model as a variable, or a list of variables if there are
    several outputs. `pytensor.grad` differentiates the variables, to any order: so a file can be
    the likelihood of a PyMC model, which NUTS samples. onnxruntime computes on the CPU.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names and patterns of `fnmatch`, as "fc*", of the constants in `params`;
            patterns choose among weights. None: the weights that `onnxgrad.trainable` selects.
        freeze: names and patterns of weights that stay constants, though `trainable` selects them.
        dtype: "float32" or "float64", in which the graph computes; None: as in the file. PyMC
            computes in float64, unless `pytensor.config.floatX` says otherwise.

    Attributes:
        params: the weights of the file by name, arrays in `dtype`.
        input_names: names of the inputs, in order.
        output_names: names of the outputs, in order.

    Raises:
        ValueError: a name or pattern that matches no weight, an unknown `dtype`, an input that
            holds no numbers, or a model without outputs of numbers.
        ModelError: `model` cannot be read.
        ImportError: PyTensor is not installed.

    Examples:
        >>> import onnx, pytensor, pytensor.tensor as pt
        >>> from onnxgrad.pytensor import OnnxOp
        >>> op = OnnxOp(onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }'''))
        >>> x = pt.matrix("x", dtype="float32")
        >>> pytensor.grad(op(x).sum(), x).eval({x: [[1.0, 2.0]]}).tolist()
        [[2.0, 3.0]]
    """

    def __init__(
        self,
        model: ModelLike,
        trainable: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        dtype: str | None = None,
    ) -> None:
        source = FunctionModel(model, trainable, freeze)
        proto, self.params = source.forward_model, source.weight_arrays()
        if dtype is not None:
            kinds = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}
            proto = source.in_precision(kinds[check_choice("dtype", dtype, kinds)])
            self.params = {name: array.astype(dtype) for name, array in self.params.items()}
        super().__init__(HostGraph(proto, "cheap"))
        names = [spec.name for spec in self.graph.inputs]
        self.input_names = names[: len(names) - len(self.params)]
        self.output_names = source.output_names

    def __call__(
        self, *inputs: Any, params: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Return the output of the model as a variable, or a list of outputs if there are several.

        Args:
            *inputs: arrays or variables in the order of `input_names`. Integers are cast to the
                dtype of the input, and floats of less precision.
            params: variables or arrays in place of weights of the file, by name; other weights
                are constants.
            **options: `name` and `return_list` of PyTensor's operations.

        Raises:
            ValueError: inputs missing, an unknown weight, or another rank.
            TypeError: an input or weight whose dtype has more precision than the graph.
        """
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"the model takes {len(self.input_names)} inputs {self.input_names}, "
                f"not {len(inputs)}: pass these"
            )
        given = dict(params or {})
        for name in given:
            if name not in self.params:
                raise unknown("weight", name, list(self.params))
        return super().__call__(*inputs, *(self.params | given).values(), **options)


def _is_float_dtype(dtype: np.dtype) -> bool:
    """Return whether arrays of a dtype have a gradient."""
    return np.issubdtype(dtype, np.floating)
