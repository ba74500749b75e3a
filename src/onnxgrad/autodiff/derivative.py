"""`onnx_derivative`: a model in, the model of its gradient out."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.guards import require_equal_lengths
from onnxgrad.autodiff.primal.prepare import listed_as, prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.shapes import dims, has_reals, is_real, static
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import non_tensor, tensor_behind, to_proto
from onnxgrad.model.read import ModelLike, once, read
from onnxgrad.model.write import save
from onnxgrad.reporting import level_of, logger, reporting


class DerivativeOptions(IntFlag):
    """What `onnx_derivative` puts into the gradient model; combined with `|`.

    - `Zero`: inputs are those of the model, the weights, and `<output>_grad`.
    - `KeepYieldOp`: one joint graph, with a `com.microsoft::YieldOp` from outputs to gradients.
    - `KeepOutputs`: the original outputs too.
    - `FillGrad`: ones in place of the inputs `<output>_grad`; asks for `KeepOutputs`.
    - `Loss`: the model computes a loss; the gradient starts from it.
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
) -> ModelProto:
    """Return the model that computes the gradient of `onx`, in standard operators.

    Inputs of the result: those of `onx`, the weights in the order asked, then `Y_grad` for every
    float output Y, of Y's shape and dtype. Outputs: `X_grad` for the inputs, `W_grad` for the
    weights, each of the shape and dtype of X or W, then the kept outputs.

    Args:
        onx: model, serialized model or path; never modified.
        weights: names of the weights, which become inputs. None: every float constant of the model
            (`get_train_initializer`) that the outputs depend on; `[]`: none, they stay.
        inputs: names of the inputs. None: every float input that the outputs depend on, but for the
            scales and regions of a Resize. The gradient of a sequence is a sequence of gradients.
        options: see `DerivativeOptions`.
        loss: with `Loss`, the output that holds the loss.
        label: with `Loss`, the label input or inputs, for which no gradient is computed.
        path_name: where to `save` the result too.
        verbose: 1 reports progress through `logging`, to stderr where it is not configured; 2
            every node.
        stop_gradient: names of results that count as constants: no gradient goes back through them.
        straight_through: names of results whose gradient goes to what they were made from as it is,
            such as those of Round, Sign, or a DequantizeLinear behind a QuantizeLinear (Bengio,
            Léonard & Courville 2013, arXiv:1308.3432): through nodes without a gradient of their
            own, up to the nearest float of the same dtype and shape.

    Raises:
        TypeError: `options` is no `DerivativeOptions`.
        ValueError: an unknown name, options that exclude each other, a missing `loss` or `label`,
            a weight that is no float, one that the outputs do not depend on, or a result that no
            gradient can go straight through.
        ModelError: `onx` cannot be read.
        NoGradientRule: an operator on the way has no rule, or computes with what was quantized.
    """
    labels = _check(options, loss, label)
    proto = read(onx)
    with reporting(level_of(verbose)), garbage_kept():
        asked = DerivativeRequest(
            weights, inputs, options, loss, labels, stop_gradient, straight_through
        )
        made, _ = derivative(proto, asked)
    if path_name is not None:
        save(made, path_name)
    return made


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Pause the collector: it would walk through a graph that grows, of which all is in use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check(options: DerivativeOptions, loss: str | None, label: object) -> list[str]:
    if not isinstance(options, DerivativeOptions):
        raise TypeError(f"options must be DerivativeOptions, not {type(options).__name__}")
    flags = DerivativeOptions
    if options & flags.KeepYieldOp and options != flags.KeepYieldOp:
        raise ValueError("KeepYieldOp cannot be combined with another option")
    if options & flags.FillGrad and not options & (flags.KeepOutputs | flags.Loss):
        raise ValueError("FillGrad needs KeepOutputs: use FillGrad | KeepOutputs")
    if options & flags.Loss and (loss is None or label is None):
        raise ValueError("option Loss needs the names of the loss output and of the label input")
    if not options & flags.Loss and (loss is not None or label is not None):
        raise ValueError("loss and label are used with options=DerivativeOptions.Loss only")
    return [label] if isinstance(label, str) else list(label or ())  # type: ignore[call-overload]


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
    all_reached: bool = True  # raise for what was named and has no gradient


def derivative(proto: ModelProto, asked: DerivativeRequest) -> tuple[ModelProto, dict[str, str]]:
    """Return the model of the gradient, and `{input or weight: name of its gradient}`."""
    flags, options, loss = DerivativeOptions, asked.options, asked.loss
    model = prepare(proto, keep={*asked.stop_gradient, *asked.straight_through})
    graph, inputs = model.graph, list(model.graph.inputs)
    logger.info("prepared: %d nodes", graph.num_nodes())
    original_outputs = list(graph.outputs)
    stops = _results(graph, "stop_gradient", asked.stop_gradient)
    shortcuts = {y: _origin(y) for y in _results(graph, "straight_through", asked.straight_through)}
    chosen_inputs = choose_inputs(graph, asked.inputs, asked.labels, has_reals)
    chosen_weights = as_inputs(proto, graph, asked.weights)
    wanted = [*chosen_inputs, *chosen_weights]

    op = Emit(graph)
    if loss is not None:
        differentiated = [by_name("output", loss, original_outputs)]
    else:
        differentiated = [y for y in original_outputs if is_real(y)]
    seeds = _seeds(op, graph, differentiated, original_outputs, options)
    gradients = sweep(op, seeds, wanted, stops, shortcuts)
    named = [*(chosen_inputs if asked.inputs else ()), *(chosen_weights if asked.weights else ())]
    if asked.all_reached:
        require_path(named, gradients, differentiated)
    if asked.weights is None:
        as_constants(graph, [w for w in chosen_weights if w not in gradients])

    others = [listed_as(y) for y in original_outputs if loss is None or y is not differentiated[0]]
    kept = ([] if loss is None else differentiated) + (
        others if options & flags.KeepOutputs else []
    )
    dropped = [o.name for o in proto.graph.output if non_tensor(o)]
    if dropped and options & flags.KeepOutputs:
        logger.warning("outputs that are no tensors are not kept: %s", ", ".join(dropped))
    protected = {*graph.inputs, *kept, *seeds.values()}
    if options & flags.KeepYieldOp:
        protected.update(original_outputs)
    found = [x for x in wanted if x in gradients]
    if not found:
        raise ValueError(_nothing_to_do(proto, differentiated, wanted))
    made = [op.name_output(gradients[x], f"{x.name}_grad", x, protected) for x in found]
    graph.outputs[:] = [*kept[:1], *made, *kept[1:]] if loss is not None else [*made, *kept]
    tidy(model)
    if not options & flags.KeepYieldOp:
        data = [x for x in inputs if x.name not in asked.labels]
        require_equal_lengths(graph, data, dict(zip(found, made, strict=True)))
    constants.note_constants(model, proto)
    logger.info("gradient: %d nodes", graph.num_nodes())
    names = {str(x.name): str(g.name) for x, g in zip(found, made, strict=True)}
    return to_proto(model), names


def _results(graph: ir.Graph, kind: str, names: Sequence[str]) -> list[ir.Value]:
    """Return the results of nodes that are named."""
    known = {y.name: y for node in graph for y in node.outputs if y.name}
    for name in once(kind, names):
        if name not in known:
            raise unknown(f"{kind} result", name, known)
    return [known[name] for name in names]


def _origin(y: ir.Value) -> ir.Value:
    """Return what `y` was made from: the nearest float of its dtype, and of its shape."""
    x: ir.Value | None = y
    while x is not None and (x is y or x.dtype != y.dtype):
        node = x.producer()
        x = node.inputs[0] if node is not None and node.inputs else None
    here, there = dims(y), dims(x)
    if x is None or (here and there and static(here) and static(there) and here != there):
        raise ValueError(
            f"no gradient can go straight through {y.name!r}: its first operand is no {y.dtype} "
            "of the same shape"
        )
    return x


def _nothing_to_do(proto: ModelProto, outputs: list[ir.Value], wanted: list[ir.Value]) -> str:
    if outputs:
        return f"no differentiable path from any of {[x.name for x in wanted]} to an output"
    behind = {o.name: tensor_behind(proto, o.name) for o in proto.graph.output if non_tensor(o)}
    hints = [
        f" {y!r} is no tensor: select {repr(x) if x else 'a tensor that it is made of'} instead"
        for y, x in behind.items()
    ]
    return f"the model has no float tensor among its outputs.{';'.join(hints)}"


def as_inputs(proto: ModelProto, graph: ir.Graph, names: Sequence[str] | None) -> list[ir.Value]:
    """Turn the named constants of the prepared `graph` into inputs, and return them in order.

    None: all those that are trained by default.

    Raises:
        ValueError: an unknown name, one named twice, or a constant that is no float.
    """
    known = {site.name: site for site in constants.constant_refs(proto)}
    if names is None:
        names = [name for name, site in known.items() if site.default]
    made = []
    for name in once("weight", names):
        if name not in known:
            floats = [n for n, s in known.items() if s.read().data_type in constants.FLOATS]
            raise unknown("weight", name, floats)
        tensor = known[name].read()
        dtype = ir.DataType(tensor.data_type)
        if not dtype.is_floating_point():
            raise ValueError(f"weight {name!r} holds {dtype}: only floats have a gradient")
        value = graph.initializers.pop(name, None)
        if value is None:  # nothing reads it
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(tensor.dims))
        graph.inputs.append(value)
        made.append(value)
    return made


def as_constants(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Undo `as_inputs` for `values`."""
    for value in values:
        graph.inputs.remove(value)
        if value.const_value is not None:
            graph.register_initializer(value)


def require_path(asked, gradients, outputs) -> None:
    """Raise for those of `asked` that no differentiable path leads to `outputs`."""
    lost = [repr(x.name) for x in asked if x not in gradients]
    if lost:
        raise ValueError(
            f"no differentiable path from {', '.join(lost)} to "
            f"{', '.join(repr(y.name) for y in outputs)}: the gradient is zero everywhere; "
            "leave it out of `weights` or `inputs`"
        )


def choose_inputs(
    graph: ir.Graph,
    names: Sequence[str] | None,
    labels: Sequence[str] = (),
    varies: Callable[[ir.Value], bool] = is_real,
) -> list[ir.Value]:
    """Return the inputs to differentiate by, in order; None: all floats but labels and settings.

    Raises:
        ValueError: an unknown name, one named twice, or an input that is no float.
    """
    floats = [x for x in graph.inputs if varies(x)]
    for name in labels:
        by_name("input", name, graph.inputs)
    if names is None:
        return [x for x in floats if x.name not in labels and not constants.is_setting(x)]
    made = [by_name("input", name, graph.inputs) for name in once("input", names)]
    for x in made:
        if x not in floats:
            raise ValueError(f"input {x.name!r} holds {x.dtype}: only floats have a gradient")
    return made


def by_name(kind: str, name: str, values: Sequence[ir.Value]) -> ir.Value:
    """Return the value of this name; `kind` says in the error what is unknown."""
    for value in values:
        if value.name == name:
            return value
    raise unknown(kind, name, [str(v.name) for v in values])


def _seeds(
    op: Emit,
    graph: ir.Graph,
    differentiated: list[ir.Value],
    outputs: list[ir.Value],
    options: DerivativeOptions,
) -> dict[ir.Value, ir.Value]:
    """Return the gradient that arrives at each output: fed, filled with ones, or yielded."""
    flags = DerivativeOptions
    if options & (flags.FillGrad | flags.Loss):
        return {y: op.ones_like(y) for y in differentiated}
    if options & flags.KeepYieldOp:
        places = [outputs.index(y) for y in differentiated]
        attributes = {"full_shape_outputs": list(range(len(outputs)))}
        if skipped := [i for i in range(len(outputs)) if i not in places]:
            attributes["non_differentiable_outputs"] = skipped
        made = op.emit_many(
            "YieldOp", outputs, attributes, len(differentiated), "com.microsoft", fresh=True
        )
        graph.opset_imports["com.microsoft"] = 1
        gradients = [made] if isinstance(made, ir.Value) else made
    else:
        gradients = [ir.Value() for _ in differentiated]
        graph.inputs.extend(gradients)
    for y, g in zip(differentiated, gradients, strict=True):
        g.name = op.name(f"{listed_as(y).name}_grad")
        g.type, g.shape = y.type, y.shape
    return dict(zip(differentiated, gradients, strict=True))
