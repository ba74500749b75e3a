"""Models of Jacobian- and Hessian-vector products, of Jacobians and of Hessians.

All are compositions of the sweep, which computes J^T u. That is linear in u, so the gradient of
<J^T u, v> with respect to u is J v: forward mode without rules (Townsend 2017, "A new
trick for calculating Jacobian vector products"; for H v, Christianson 1992, IMA J. Numer. Anal.
12(2)).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onnx import ModelProto

from onnxgrad.autodiff.derivative_builder import Builder
from onnxgrad.autodiff.matrices import (
    ForwardMode,
    gradient_builder,
    has_one_element,
    jacobian_of,
    jacobians,
    jacobians_of_rows,
    named_blocks,
)
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.autodiff.row_proofs import require_independent_derivatives
from onnxgrad.errors import unknown
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.model.read import ModelLike
from onnxgrad.operators.shapes import dims

_BATCHED = (True, False, "unchecked")


def vjp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return a model that computes the outputs and vector-Jacobian products J^T u, the gradients.

    Inputs of the result: the inputs of `model`, the weights, then the cotangents u: `Y_grad` for
    every float output Y, of Y's shape and dtype. Outputs: the outputs of `model`, then `X_grad` and
    `W_grad` for the inputs and weights, of the shape and dtype of X or W; zeros if no output
    depends on a named one. `onnx_derivative` has more options, and does not return the outputs of
    `model`.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`. None: every one that the outputs depend on; by default none.
        inputs: names of inputs to differentiate with respect to. None: every float input that the
            outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            float outputs, and the others are kept.

    Raises:
        ValueError: an unknown name, a name that occurs twice, a value that is no float, or no
            differentiable path from any of the inputs and weights to any output.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[2] x) => (float[2] y) { y = Mul(x, x) }''')
        >>> session = ort.InferenceSession(og.vjp(model).SerializeToString())
        >>> feed = {"x": np.float32([1, 2]), "y_grad": np.float32([10, 1])}
        >>> [result.tolist() for result in session.run(["y", "x_grad"], feed)]
        [[1.0, 4.0], [20.0, 4.0]]
    """
    with pause_garbage_collection():
        builder = Builder(model, weights, inputs, outputs)
        gradients = builder.write_gradients(builder.add_cotangents())
        return builder.build_with_derivatives("grad", builder.wrt, gradients)


def jvp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return a model that computes the outputs and Jacobian-vector products J v, their tangents.

    Inputs of the result: the inputs of `model`, the weights, then the tangents v: `X_tangent` and
    `W_tangent` for the inputs and weights, of the shape and dtype of X or W. Outputs: the
    outputs of `model`, then `Y_tangent` for every float output Y, of Y's shape and dtype: the sum
    over X of (dY/dX) X_tangent, zeros if Y depends on none of them.

    The gradient is differentiated with respect to its cotangents (Townsend 2017), and only the part
    that computes J v remains: about as many operations as two forward passes.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`. None: every one that the outputs depend on; by default none.
        inputs: names of inputs to differentiate with respect to. None: every float input that the
            outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            float outputs, and the others are kept.

    Raises:
        ValueError: an unknown name, a name that occurs twice, a value that is no float, or no
            differentiable path from any of the inputs and weights to any output.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule, or one that is not linear in the
            cotangent.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[2] x) => (float[2] y) { y = Mul(x, x) }''')
        >>> session = ort.InferenceSession(og.jvp(model).SerializeToString())
        >>> feed = {"x": np.float32([1, 2]), "x_tangent": np.float32([10, 1])}
        >>> [result.tolist() for result in session.run(["y", "y_tangent"], feed)]
        [[1.0, 4.0], [20.0, 4.0]]
    """
    with pause_garbage_collection():
        forward = ForwardMode(Builder(model, weights, inputs, outputs))
        builder = forward.builder
        directions = {x: builder.add_input_like(x, "tangent") for x in builder.wrt}
        tangents = forward.push_tangents(directions)
        return builder.build_with_derivatives("tangent", builder.differentiated, tangents)


def hvp(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelProto:
    """Return a model that computes the outputs, the gradient and Hessian-vector products H v.

    H is the Hessian of a scalar function f with respect to all inputs and weights together. If one
    float output is chosen, of a single element such as a loss, f is that output. Otherwise f is a
    weighted sum of the output elements, `sum(Y_grad * Y)` over the float outputs Y, whose weights
    `Y_grad` are inputs of the result.

    Inputs of the result: the inputs of `model`, the weights, the output weights `Y_grad` if there
    are any, then v: `X_vector` and `W_vector` for the inputs and weights. Outputs: the outputs of
    `model`, then `X_grad` and `W_grad`, the gradient of f, then `X_hvp` and `W_hvp`, the parts of H
    v. All have the shape and dtype of X or W; zeros where f does not depend on it. Reverse mode
    over reverse mode (Christianson 1992).

    Args:
        model: model, serialized model or path; never modified. With a loss: see `add_loss_output`.
        weights: names of weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`. None: every one that the outputs depend on; by default none.
            For the Hessian of a loss with respect to its weights: `weights=None, inputs=[]`.
        inputs: names of inputs to differentiate with respect to. None: every float input that the
            outputs depend on.
        outputs: names of the float outputs in f; the result has no others. None: all float outputs,
            and the others are kept.

    Raises:
        ValueError: an unknown name, a name that occurs twice, a value that is no float, or no
            differentiable path from any of the inputs and weights to any output.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[2] x) => (float y) { s = Mul(x, x) y = ReduceProd<keepdims=0>(s) }''')
        >>> session = ort.InferenceSession(og.hvp(model).SerializeToString())
        >>> feed = {"x": np.float32([1, 2]), "x_vector": np.float32([1, 0])}
        >>> [result.tolist() for result in session.run(["x_grad", "x_hvp"], feed)]
        [[8.0, 4.0], [8.0, 8.0]]
    """
    with pause_garbage_collection():
        first = Builder(model, weights, inputs, outputs)
        single = len(first.differentiated) == 1 and has_one_element(first.differentiated[0], False)
        builder, gradients = gradient_builder(first, first.add_cotangents(ones=single))
        vectors = {g: builder.add_input_like(x, "vector") for x, g in gradients.items()}
        products = sweep(builder.op, vectors, builder.wrt)
        return builder.build_with_derivatives("hvp", builder.wrt, products)


def jacobian(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    batched: bool | str = False,
    mode: str = "auto",
) -> ModelProto:
    """Return a model that computes the outputs and their Jacobians.

    Inputs of the result: the inputs of `model`, then the weights. Outputs: the outputs of `model`,
    then, for every float output Y and every input or weight X, `Y_X_jacobian` of Y's dtype and of
    shape `(*Y.shape, *X.shape)`: dY/dX. With `batched`, of shape `(N, *Y.shape[1:], *X.shape[1:])`:
    the derivative of each of the N rows of Y with respect to the same row of X. A weight W has no
    rows: its Jacobians have the shape `(N, *Y.shape[1:], *W.shape)`. Zeros if Y does not depend on
    X.

    A `Scan` runs over its rows or columns; nodes that are the same for all of them are computed
    outside. With `batched` and weights, it runs over the N rows, and computes each of them alone.

    Args:
        model: model, serialized model or path; never modified.
        weights: names of weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`. None: every one that the outputs depend on; by default none.
        inputs: names of inputs to differentiate with respect to. None: every float input that the
            outputs depend on.
        outputs: names of the float outputs to differentiate; the result has no others. None: all
            float outputs, and the others are kept.
        batched: True for models in which row i of the output depends on row i of the inputs only,
            which is proven from the graph first. "unchecked" skips the proof: for a model that
            mixes rows, the result is then a sum over the rows of Y (in reverse mode) or of X (in
            forward mode), or with weights the Jacobian of a batch of one row. All data inputs with
            a symbolic first axis have rows then; with a static one, inputs of as many rows as Y.
        mode: "reverse" takes one pass for every element of Y (or of its row), "forward" one for
            every element of X; "auto" chooses by the static dimensions.

    Raises:
        ValueError: an unknown name or mode, a name that occurs twice, a value that is no float, no
            differentiable path from any of the inputs and weights to any output, or `batched` with
            a model that mixes rows or is not proven not to.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule, or in forward mode one that is not linear
            in the cotangent.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) { y = Mul(x, x) }''')
        >>> session = ort.InferenceSession(og.jacobian(model, batched=True).SerializeToString())
        >>> [jacobian] = session.run(["y_x_jacobian"], {"x": np.float32([[1, 2]])})
        >>> jacobian.tolist()  # of shape (N, 2, 2)
        [[[2.0, 0.0], [0.0, 4.0]]]
    """
    with pause_garbage_collection():
        builder, per_row = _open_builder(model, weights, inputs, outputs, batched), bool(batched)
        if per_row and len(builder.wrt) > len(builder.inputs):
            of_one = partial(jacobian, weights=weights, inputs=inputs, outputs=outputs, mode=mode)
            return jacobians_of_rows(builder, batched != "unchecked", of_one)
        _require_unmixed_rows(builder, batched)
        return jacobians(builder, per_row, mode)


def hessian(
    model: ModelLike,
    weights: Sequence[str] | None = (),
    inputs: Sequence[str] | None = None,
    output: str | None = None,
    batched: bool | str = False,
) -> ModelProto:
    """Return a model that computes an output of one element, its gradient and its Hessian.

    Inputs of the result: the inputs of `model`, then the weights. Outputs: the chosen output Y,
    then `X_grad` for each input or weight X, then for every pair of them `X_Z_hessian` of shape
    `(*X.shape, *Z.shape)`: the derivative of X_grad with respect to Z; for Z = X, it is named
    `X_hessian`. With `batched`, it is of shape `(N, *X.shape[1:], *Z.shape[1:])`, for an output of
    one element in each of N rows. Blocks that Y does not depend on are zeros.

    The rows of the Hessian are Hessian-vector products, one for every element of X (or of its row),
    computed by a `Scan`.

    Args:
        model: model, serialized model or path; never modified. With a loss: see `add_loss_output`.
        weights: names of weights to differentiate with respect to, which become inputs; see
            `onnx_derivative`. None: every one that the output depends on; by default none.
            For the Hessian of a loss with respect to its weights: `weights=None, inputs=[]`.
        inputs: names of inputs to differentiate with respect to. None: every float input that the
            output depends on.
        output: name of the output. None: the only float output.
        batched: see `jacobian`.

    Raises:
        ValueError: an unknown name, a name that occurs twice, a value that is no float, an output
            that is not proven to have one element (in each row), no `output` though the model has
            several, no differentiable path, `batched` with weights, or with a model that mixes rows
            or is not proven not to.
        ModelError: `model` cannot be read.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxruntime as ort, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[2] x) => (float y) { s = Mul(x, x) y = ReduceProd<keepdims=0>(s) }''')
        >>> session = ort.InferenceSession(og.hessian(model).SerializeToString())
        >>> session.run(["x_hessian"], {"x": np.float32([1, 2])})[0].tolist()
        [[8.0, 8.0], [8.0, 2.0]]
    """
    with pause_garbage_collection():
        chosen = None if output is None else [output]
        builder, per_row = _open_builder(model, weights, inputs, chosen, batched), bool(batched)
        if per_row and len(builder.wrt) > len(builder.inputs):
            names = [w.name for w in builder.wrt[len(builder.inputs) :]]
            raise ValueError(
                f"batched Hessians are with respect to inputs, not to the weights {names}, which "
                "have no rows: use batched=False"
            )
        _require_unmixed_rows(builder, batched)
        _keep_single_output(builder, per_row)
        builder, gradients = gradient_builder(builder, builder.add_cotangents(ones=True))
        blocks = {x: jacobian_of(builder, g, per_row) for x, g in gradients.items()}
        return builder.build_model(named_blocks(builder, blocks, per_row, "hessian"))


def _open_builder(model, weights, inputs, outputs, batched: bool | str) -> Builder:
    """Return a builder of derivatives of the model; raise if the value of `batched` is unknown."""
    if batched not in _BATCHED:
        raise unknown("value of `batched`", batched, map(str, _BATCHED))
    return Builder(model, weights, inputs, outputs, rows=bool(batched))


def _require_unmixed_rows(builder: Builder, batched: bool | str) -> None:
    """If `batched`, raise unless the graph proves that the model does not mix the rows of its
    inputs.
    """
    if batched:
        require_independent_derivatives(
            builder.graph, builder.wrt, builder.differentiated, proof=batched != "unchecked"
        )


def _keep_single_output(builder: Builder, per_row: bool) -> None:
    """Keep only the float output of the builder's model, which must have one element (in each
    row).
    """
    if len(builder.differentiated) != 1:
        names = [y.name for y in builder.differentiated]
        raise ValueError(f"of the float outputs {names}, name one as `output`")
    (y,) = builder.differentiated
    builder.kept, builder.graph.outputs[:] = [y], [y]
    if not has_one_element(y, per_row):
        raise ValueError(
            f"output {y.name!r} of shape {dims(y)} is not known to have one element"
            f"{' in each row' * per_row}: a Hessian is of a scalar; choose or add an "
            "output of one element, or use `hvp`, which takes output weights as an input"
        )
