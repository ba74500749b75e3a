"""`onnx_derivative`: the model that computes the gradient of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.primal.prepare import (
    has_default,
    is_weight_input,
    original_output,
    prepare,
    restore_defaults,
    values_by_name,
)
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import node_text, unknown
from onnxgrad.garbage import pause_garbage_collection
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import latest_replacement
from onnxgrad.graph.traversal import nodes_behind, reads
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import is_non_tensor, source_tensor_name, to_proto
from onnxgrad.model.notes import PRIMAL
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.surgery import replace_maps_by_tensors
from onnxgrad.model.write import save
from onnxgrad.operators import marks, operator_of
from onnxgrad.operators.shapes import dims, has_reals, is_real, static
from onnxgrad.reporting import logger, logging_level, reporting

_SHOWN = 3  # nodes in a message about the ends of paths
_Axis = tuple[ir.Value, int]


class DerivativeOptions(IntFlag):
    """What the gradient model of `onnx_derivative` takes and returns; combined with `|`.

    - `Zero`: the inputs are the inputs of the model, the weights, and the cotangents
      `<output>_grad`.
    - `KeepYieldOp`: the joint graph of forward and backward pass, in which the node
      `com.microsoft::YieldOp` takes the outputs and returns their cotangents.
    - `KeepOutputs`: the original outputs are returned too.
    - `FillGrad`: all cotangents are ones, and no inputs; needs `KeepOutputs` or `Loss`.
    - `Loss`: the gradient is the gradient of the output `loss`, which is returned first.

    Examples:
        >>> from onnxgrad import DerivativeOptions
        >>> options = DerivativeOptions.FillGrad | DerivativeOptions.KeepOutputs
        >>> DerivativeOptions.KeepOutputs in options
        True
    """

    Zero = 0
    KeepYieldOp = 1
    KeepOutputs = 2
    FillGrad = 4
    Loss = 8


def onnx_derivative(
    onx: ModelLike,
    weights: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | Sequence[str] | None = None,
    path_name: str | os.PathLike | None = None,
    verbose: int = 0,
    stop_gradient: Sequence[str] = (),
    straight_through: Sequence[str] = (),
    note_primal: bool = False,
) -> ModelProto:
    """Return the model that computes the gradient of `onx`, in standard operators.

    Inputs of the result: the inputs of `onx`, the weights in the order of `weights`, then the
    cotangent `Y_grad` of every float output Y, of Y's shape and dtype. Outputs: `X_grad` for the
    inputs, `W_grad` for the weights, each of the shape and dtype of X or W, then the kept outputs.

    Args:
        onx: model, serialized model or path; never modified.
        weights: names of the weights to differentiate with respect to, which become inputs. None:
            every float constant (`get_train_initializer`) that the outputs depend on; `[]`: none.
        inputs: names of the inputs to differentiate with respect to. None: every float input that
            the outputs depend on, except the scales and regions of a Resize. The gradient of a
            sequence is a sequence of gradients.
        options: see `DerivativeOptions`.
        loss: with `Loss`, the name of the loss output.
        label: with `Loss`, the label input or inputs, for which no gradient is computed.
        path_name: path to `save` the result to as well.
        verbose: 1 logs progress through `logging`, to stderr if it is not configured; 2 every node.
        stop_gradient: names of node outputs through which no gradient flows, as if constant.
        straight_through: names of node outputs, as of Round, whose cotangent passes unchanged along
            first inputs, to the nearest value of the same dtype (Bengio 2013, arXiv:1308.3432).
        note_primal: note in the metadata of nodes which one each helps to differentiate: `to_html`.

    Raises:
        TypeError: `options` is no `DerivativeOptions`.
        ValueError: an unknown name, options that exclude each other, a missing `loss` or `label`, a
            weight that is no float or has no gradient, or nothing to pass `straight_through` to.
        ModelError: `onx` cannot be read.
        NoGradientRule: an operator on a path has no rule, or computes with quantized numbers.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> gradient = og.onnx_derivative(model)
        >>> [x.name for x in gradient.graph.input], [y.name for y in gradient.graph.output]
        (['x', 'w', 'y_grad'], ['x_grad', 'w_grad'])
    """
    labels = _checked_label_names(options, loss, label)
    more = stop_gradient, straight_through, note_primal
    request = DerivativeRequest(weights, inputs, options, loss, labels, *more)
    with reporting(logging_level(verbose)), pause_garbage_collection():
        gradient_model, _ = derivative(read(onx), request)
    if path_name is not None:
        save(gradient_model, path_name)
    return gradient_model


def _checked_label_names(
    options: DerivativeOptions, loss: str | None, label: str | Sequence[str] | None
) -> list[str]:
    """Return the names of the label inputs as a list; raise if the options contradict each
    other.
    """
    if not isinstance(options, DerivativeOptions):
        raise TypeError(f"options must be DerivativeOptions, not {type(options).__name__}")
    flags = DerivativeOptions
    if options & flags.KeepYieldOp and options != flags.KeepYieldOp:
        raise ValueError("options: KeepYieldOp excludes all other options; pass it alone")
    if options & flags.FillGrad and not options & (flags.KeepOutputs | flags.Loss):
        raise ValueError("FillGrad needs KeepOutputs: use FillGrad | KeepOutputs")
    if options & flags.Loss and (loss is None or label is None):
        raise ValueError("option Loss needs the names of the output `loss` and the input `label`")
    if not options & flags.Loss and (loss is not None or label is not None):
        raise ValueError("leave out `loss` and `label`, or pass options=DerivativeOptions.Loss")
    return [label] if isinstance(label, str) else list(label or ())


@dataclass(frozen=True)
class DerivativeRequest:
    """The arguments of `onnx_derivative`."""

    weights: Sequence[str] | None
    inputs: Sequence[str] | None
    options: DerivativeOptions
    loss: str | None = None
    labels: Sequence[str] = ()
    stop_gradient: Sequence[str] = ()
    straight_through: Sequence[str] = ()
    note_primal: bool = False
    all_reached: bool = True  # raise if a named weight or input has no gradient


def derivative(proto: ModelProto, request: DerivativeRequest) -> tuple[ModelProto, dict[str, str]]:
    """Return the model of the gradient, and `{input or weight: name of its gradient}`."""
    flags, options, loss = DerivativeOptions, request.options, request.loss
    proto, _ = replace_maps_by_tensors(proto)
    model = prepare(proto, keep={*request.stop_gradient, *request.straight_through}, defaults=True)
    graph, inputs = model.graph, list(model.graph.inputs)
    logger.info("prepared: %d nodes", graph.num_nodes())
    original_outputs = list(graph.outputs)
    results = [y for node in graph for y in node.outputs if y.name]
    stop_gradient, straight = (
        values_by_name(
            f"{kind} result", require_unique_names(kind, getattr(request, kind)), results
        )
        for kind in ("stop_gradient", "straight_through")
    )
    straight_through = {y: _straight_through_origin(y) for y in straight}
    chosen_inputs = choose_inputs(graph, request.inputs, request.labels, has_reals)
    weights = make_weights_inputs(proto, graph, request.weights)
    wrt = [*chosen_inputs, *weights]
    require_unique_names("input or weight", [str(x.name) for x in wrt])

    op = Emit(graph)
    if loss is not None:
        differentiated = values_by_name("output", [loss], original_outputs)
    else:
        differentiated = [y for y in original_outputs if is_real(y)]
    seeds = _cotangents_of_outputs(op, differentiated, original_outputs, options)
    gradients = sweep(op, seeds, wrt, stop_gradient, straight_through)
    if request.all_reached:
        asked = [*(chosen_inputs if request.inputs else ()), *(weights if request.weights else ())]
        require_path(asked, gradients, differentiated)
    if request.weights is None:
        make_inputs_constants(graph, [w for w in weights if w not in gradients])

    kept = _kept_outputs(proto, original_outputs, request)
    protected = {*graph.inputs, *kept, *seeds.values()}
    if options & flags.KeepYieldOp:
        protected.update(original_outputs)
    reached = [x for x in wrt if x in gradients]
    if not reached:
        raise ValueError(_no_gradient_message(proto, graph, differentiated, wrt))
    named = [op.name_output(gradients[x], f"{x.name}_grad", x, protected) for x in reached]
    names = {str(x.name): str(g.name) for x, g in zip(reached, named, strict=True)}
    graph.outputs[:] = [*named, *kept] if loss is None else [*kept[:1], *named, *kept[1:]]
    finish(model)
    if not options & flags.KeepYieldOp:
        data = [x for x in inputs if x.name not in request.labels]
        require_equal_lengths(
            graph, data, dict(zip(reached, map(latest_replacement, named), strict=True))
        )
    restore_defaults(graph)
    constants.record_constants(model, proto)
    if request.note_primal:
        for node in graph:
            if (primal := node.meta.get(marks.PRIMAL)) is not None:
                node.metadata_props[PRIMAL] = str(primal.outputs[0].name)
    logger.info("gradient: %d nodes", graph.num_nodes())
    return to_proto(model), names


def _kept_outputs(
    proto: ModelProto, outputs: list[ir.Value], request: DerivativeRequest
) -> list[ir.Value]:
    """Return the outputs of the model that the gradient model also returns, the loss first."""
    loss = [y for y in outputs if y.name == request.loss][:1]
    if not request.options & DerivativeOptions.KeepOutputs:
        return loss
    warn_of_dropped_outputs(proto)
    return [*loss, *(original_output(y) for y in outputs if y not in loss)]


def warn_of_dropped_outputs(proto: ModelProto) -> None:
    """Log a warning that names the outputs that are no tensors, if there are any."""
    if dropped := [o.name for o in proto.graph.output if is_non_tensor(o)]:
        logger.warning("outputs that are no tensors are not kept: %s", ", ".join(dropped))


def _straight_through_origin(y: ir.Value) -> ir.Value:
    """Return the value to which the cotangent of `y` passes straight through.

    It is the first input of the node of `y`, or the nearest value of the same dtype before it,
    along first inputs.
    """
    x: ir.Value | None = y
    while x is not None and (x is y or x.dtype != y.dtype):
        node = x.producer()
        x = node.inputs[0] if node is not None and node.inputs else None
    y_shape, x_shape = static(dims(y)), static(dims(x))
    if x is None or (y_shape and x_shape and y_shape != x_shape):
        raise ValueError(
            f"no gradient can go straight through {y.name!r}: its first input is no {y.dtype} "
            f"of the same shape; leave {y.name!r} out of `straight_through`"
        )
    return x


def _no_gradient_message(
    proto: ModelProto, graph: ir.Graph, outputs: list[ir.Value], wrt: list[ir.Value]
) -> str:
    """Return the error message for a model in which no input or weight of `wrt` has a gradient."""
    if outputs:
        ends = path_ends_text(graph, wrt, outputs)
        return f"no differentiable path from any of {[x.name for x in wrt]} to an output. {ends}"
    sources = {
        o.name: source_tensor_name(proto, o.name) for o in proto.graph.output if is_non_tensor(o)
    }
    hints = [
        f" {y!r} is no tensor: select {repr(x) if x else 'a tensor that it contains'} instead"
        for y, x in sources.items()
    ]
    return f"the model has no float tensor among its outputs.{';'.join(hints)}"


def make_weights_inputs(
    proto: ModelProto, graph: ir.Graph, names: Sequence[str] | None
) -> list[ir.Value]:
    """Turn the constants `names` of a prepared graph into inputs, and return these in order.

    `names=None`: all constants that are trained by default. Those that are no floats are an error.
    """
    refs = {ref.name: ref for ref in constants.constant_refs(proto)}
    if names is None:
        names = [name for name, ref in refs.items() if ref.default]
    weights, listed = [], {str(x.name): x for x in graph.inputs}
    for name in require_unique_names("weight", names):
        if name not in refs:
            floats = [n for n, ref in refs.items() if ref.read().data_type in constants.FLOATS]
            raise unknown("weight", name, floats)
        tensor = refs[name].read()
        dtype = ir.DataType(tensor.data_type)
        if not dtype.is_floating_point():
            raise ValueError(f"weight {name!r} holds {dtype}, which has no gradient: leave it out")
        value = listed.get(name) or graph.initializers.pop(name, None)
        if value is None:  # no node reads it
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(tensor.dims))
        if name not in listed:
            graph.inputs.append(value)
        weights.append(value)
    return weights


def make_inputs_constants(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Turn inputs that `make_weights_inputs` has created back into constants of the graph."""
    for value in values:
        if has_default(value):
            continue
        graph.inputs.remove(value)
        if value.const_value is not None:
            graph.register_initializer(value)


def require_path(
    wrt: Iterable[ir.Value], gradients: Collection[ir.Value], outputs: Iterable[ir.Value]
) -> None:
    """Raise a ValueError if an input or weight of `wrt` has no gradient: no path leads to
    `outputs`.
    """
    unreached = [repr(x.name) for x in wrt if x not in gradients]
    if unreached:
        raise ValueError(
            f"no differentiable path from {', '.join(unreached)} to "
            f"{', '.join(repr(y.name) for y in outputs)}: the gradient is zero everywhere; "
            "leave these names out of `weights` and `inputs`"
        )


def choose_inputs(
    graph: ir.Graph,
    names: Sequence[str] | None,
    labels: Sequence[str] = (),
    varies: Callable[[ir.Value], bool] = is_real,
) -> list[ir.Value]:
    """Return the inputs to differentiate with respect to, in the order of `names`.

    `names=None`: all floats except labels, settings, such as the scales of a Resize, and weights
    that the file lists among the inputs.
    """
    floats = [x for x in graph.inputs if varies(x)]
    values_by_name("input", labels, graph.inputs)
    if names is None:
        others = (
            x for x in floats if x.name not in labels and not constants.feeds_settings_only(x)
        )
        return [x for x in others if not is_weight_input(x)]
    inputs = values_by_name("input", require_unique_names("input", names), graph.inputs)
    for x in inputs:
        if not varies(x):
            raise ValueError(
                f"input {x.name!r} holds {x.dtype}, which has no gradient: leave it out"
            )
    return inputs


def _cotangents_of_outputs(
    op: Emit, differentiated: list[ir.Value], outputs: list[ir.Value], options: DerivativeOptions
) -> dict[ir.Value, ir.Value]:
    """Return the cotangent of each output: a new input, ones, or an output of the YieldOp."""
    flags = DerivativeOptions
    if options & (flags.FillGrad | flags.Loss):
        return {y: op.ones_like(y) for y in differentiated}
    if options & flags.KeepYieldOp:
        attributes = {"full_shape_outputs": list(range(len(outputs)))}
        if skipped := [i for i, y in enumerate(outputs) if y not in differentiated]:
            attributes["non_differentiable_outputs"] = skipped
        cotangents = op.emit_many(
            "YieldOp", outputs, attributes, len(differentiated), "com.microsoft", fresh=True
        )
        op.graph.opset_imports["com.microsoft"] = 1
    else:
        cotangents = [ir.Value() for _ in differentiated]
        op.graph.inputs.extend(cotangents)
    for y, g in zip(differentiated, cotangents, strict=True):
        g.name = op.name(f"{original_output(y).name}_grad")
        g.type, g.shape = y.type, y.shape
    return dict(zip(differentiated, cotangents, strict=True))


# -- why a value has no gradient: the nodes that end every path ------------------------------------


def differentiable_values(graph: ir.Graph, starts: Iterable[ir.Value]) -> set[ir.Value]:
    """Return `starts` and the float values that depend differentiably on any of `starts`."""
    values = set(starts)
    for node in graph:
        if operator_of(node).no_gradient or values.isdisjoint(reads(node)):
            continue
        values.update(y for y in node.outputs if y.dtype is None or is_real(y))
    return values


def path_ends_text(graph: ir.Graph, starts: Iterable[ir.Value], ends: Sequence[ir.Value]) -> str:
    """Return the text that names the nodes at which all paths from `starts` to `ends` stop being
    differentiable; "" if none.
    """
    values, behind = differentiable_values(graph, starts), nodes_behind(ends)
    found = [
        node_with_reason(node)
        for node in graph
        if node in behind and not values.isdisjoint(reads(node)) and values.isdisjoint(node.outputs)
    ]
    return f"What ends the paths: {'; '.join(found[:_SHOWN])}" if found else ""


def node_with_reason(node: ir.Node) -> str:
    """Return the text that names a node, and says why the node has no gradient."""
    reason = operator_of(node).no_gradient
    return node_text(node) + (f", {reason}" if reason else "")


# -- checks at run time ----------------------------------------------------------------------------


def require_equal_lengths(
    graph: ir.Graph, inputs: Iterable[ir.Value], gradients: Mapping[ir.Value, ir.Value]
) -> None:
    """Make `graph` fail when `inputs` that share a symbolic dimension differ in its length.

    onnxruntime does not compare the lengths, and broadcasts where it can. The gradient relies on
    symbolic dimensions: it would have a wrong shape, or sum over too few elements. `gradients` maps
    inputs to outputs of `graph`. The node that fails is a Reshape whose name tells the two axes.
    """
    first: dict[str, _Axis] = {}
    shared: dict[ir.Value, dict[int, _Axis]] = {}
    for x in inputs:
        if not isinstance(x.type, ir.TensorType):
            continue
        for axis, d in enumerate(dims(x) or ()):
            if isinstance(d, str) and first.setdefault(d, (x, axis)) != (x, axis):
                shared.setdefault(x, {})[axis] = first[d]
                shared.setdefault(first[d][0], {})
    op, head = Emit(graph), next(iter(graph), None)
    for x, axes in shared.items():
        is_unused = all(node.op_type == "Shape" for node, _ in x.uses())
        if is_unused and x in gradients:
            _reshape_gradient_to_input(op, x, gradients[x])
        elif axes and not is_unused:
            with op.at(head):
                _check_axis_lengths_before_use(op, x, axes)


def _check_axis_lengths_before_use(op: Emit, x: ir.Value, axes: Mapping[int, _Axis]) -> None:
    """Replace `x` in its consumers by `Reshape(x)`, one Reshape for each axis whose length is
    checked.
    """
    uses, checked = list(x.uses()), x
    # an axis each: one Reshape for all would pass swapped lengths
    for axis, (other, i) in axes.items():
        own = [d if isinstance(d, int) else op.dim(x, j) for j, d in enumerate(dims(x) or ())]
        own[axis] = op.dim(other, i)
        name = f"axis {axis} of {x.name!r} is as long as axis {i} of {other.name!r}"
        checked = _checked_reshape(op, checked, op.vector(*own), name)
    for consumer, i in uses:
        consumer.replace_input_with(i, checked)


def _reshape_gradient_to_input(op: Emit, x: ir.Value, gradient: ir.Value) -> None:
    """Reshape the gradient of an unused input to the shape that the input has at run time."""
    name = f"the gradient has the lengths of {x.name!r}"
    shaped = _checked_reshape(op, gradient, op.Shape(x), name)
    shaped.name, gradient.name = gradient.name, op.name(str(gradient.name))
    op.graph.outputs[:] = [shaped if y is gradient else y for y in op.graph.outputs]


def _checked_reshape(op: Emit, x: ir.Value, shape: list[int] | ir.Value, name: str) -> ir.Value:
    """Return the output of a new Reshape node called `name`, which fails if `x` has another shape
    than `shape` at run time.
    """
    y = op.emit("Reshape", [x, shape], {"allowzero": 1}, fresh=True)
    node = op.set_type_like(y, x).producer()
    assert node is not None
    node.name = name
    return y
