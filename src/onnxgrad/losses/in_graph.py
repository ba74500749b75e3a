"""Losses and penalties written into the graph of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, printable, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer, infer_file
from onnxgrad.graph.tidy import rename_unused_results, tidy
from onnxgrad.losses.applied_to import decide_options
from onnxgrad.losses.formulas import loss_spec
from onnxgrad.losses.info import METADATA, LossInfo
from onnxgrad.losses.spec import Formula, LabelKind, LossSpec, match_label_shape
from onnxgrad.losses.sums import broadcast_weights
from onnxgrad.model.convert import is_non_tensor, source_tensor_name, to_ir, to_proto
from onnxgrad.model.feeds import caches_with_next_values
from onnxgrad.model.local_functions import raise_opset
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.weights import constant_refs, record_constants
from onnxgrad.operators import SAME_ELEMENTS, marks, operator_of, shapes
from onnxgrad.runtime.session import confirmed_by_run


def add_loss_output(
    onx: ModelLike,
    score_name: str | Formula | LossSpec = "squared_error",
    loss_name: str = "loss",
    label_name: str = "label",
    weight_name: str | None = None,
    penalty: Mapping[str, Any] | None = None,
    output_index: int | str | None = None,
    reduction: str | None = None,
    weight_per: str = "row",
    **kwargs: Any,
) -> ModelProto:
    """Return `onx` with a loss computed from one of its outputs, ready to be trained.

    The result has the outputs `[loss, prediction]`, the loss of shape (1, 1), and the inputs of
    `onx`, the label, and the sample weights if `weight_name` is given. Its opset is at least 18.

    Args:
        onx: model, serialized model or path; never modified.
        score_name: a key of `onnxgrad.losses.LOSSES`, a `LossSpec` such as a `perceptual_loss`, or
            a function `(op, prediction, label) -> loss per element or row` that writes nodes with
            `op`.
        loss_name: name of the loss output; an existing value of that name is renamed.
        label_name: name of the label input: of the shape and dtype of the prediction, but int64
            for `log` (N, 1) and for `cross_entropy` (N,), or the shape of the prediction without
            the axis of the classes: (N, d1, ...) for (N, C, d1, ...) or (N, d1, ..., C).
            A class index out of range has loss zero: trainers validate labels, the model does not.
        weight_name: name of an input of sample weights, (N,) or (N, 1); None for none.
        penalty: `{weight: {"l1": a, "l2": b}}` or `{weight: b}`, adds a |w| + b w^2.
        output_index: index or name of the output that is the prediction, or the name of any other
            float tensor of the graph; None: the only float output.
        reduction: "sum" over the rows, or "mean", divided by the number of all rows, ignored and
            weighted ones included. Default: "sum", but "mean" for `log`.
        weight_per: "row", or "element": the weights have as many axes as the losses, and are
            broadcast to their shape.
        **kwargs: options of the loss: see the functions in `onnxgrad.losses.formulas`, and
            `ignore_nan=True`, which leaves out float labels that are NaN.
            `cross_entropy` takes the axis of the classes as `axis`; None: the axis of the features
            that the last linear operator writes, 1 for Conv and the last axis for MatMul; or 1.

    Raises:
        ValueError: an unknown loss, option, output or weight, an output that is no tensor, or a
            prediction of three axes or more whose axis of classes the graph does not decide.
        ModelError: `onx` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> loss = og.add_loss_output(model, "huber", delta=0.5, penalty={"w": 0.01})
        >>> [x.name for x in loss.graph.input], [y.name for y in loss.graph.output]
        (['x', 'label'], ['loss', 'y'])
    """
    if weight_per not in ("row", "element"):
        raise unknown("weight_per", weight_per, ["row", "element"])
    spec = loss_spec(score_name, reduction, kwargs)
    proto, penalties = read(onx), penalty or {}
    chosen = choose_output(proto, output_index, inside=True)
    _check_penalized_weights(proto, penalties)
    model, values = _cut_to_outputs(proto, chosen, penalties)
    graph, prediction = model.graph, values[chosen]
    rename_unused_results(graph, {loss_name, label_name, weight_name})
    op, spec = Emit(graph), decide_options(spec, prediction, otherwise=1)
    label = make_label_input(op, prediction, spec.label_kind, spec.name, label_name)
    graph.inputs.append(label)
    with op:
        losses = spec.losses(op, prediction, match_label_shape(op, label, prediction))
        if weight_name is not None:
            by_element = weight_per == "element"
            losses = _multiply_by_sample_weights(
                op, model, losses, prediction, weight_name, by_element
            )
        loss = _reduce_losses(op, losses, spec, label)
        loss = add_penalties(op, loss, penalties, values)
    loss.name, loss.shape = op.name(loss_name), ir.Shape([1, 1])
    graph.outputs[:] = [loss, prediction]
    info = LossInfo.of(spec, prediction, label.name, chosen)
    model.metadata_props[METADATA] = info.to_metadata()
    tidy(model)
    record_constants(model, proto)
    return to_proto(model)


def _check_penalized_weights(proto: ModelProto, penalties: Iterable[str]) -> None:
    """Raise `ValueError` for a penalty of a weight that is not a tensor of the main graph."""
    for ref in constant_refs(proto):
        attribute = ref.attribute or (ref.node and ref.node.domain == "ai.onnx.ml")
        if ref.name in penalties and (attribute or ref.graph is not proto.graph):
            where = "is an attribute" if attribute else "is in a subgraph or a local function"
            raise ValueError(
                f"the weight {ref.name!r} {where}, and penalties are for initializers of the main "
                "graph: leave the weight out of penalty"
            )


def _cut_to_outputs(
    proto: ModelProto, prediction: str, penalized: Iterable[str]
) -> tuple[ir.Model, Mapping[str, ir.Value]]:
    """Return the model whose outputs are the prediction and the penalized weights, and the values
    of its graph by name.
    """
    model = to_ir(raise_opset(proto))
    infer_file(model, confirm=confirmed_by_run(proto))
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    weights = [values[name] for name in penalized if name in values]
    model.graph.outputs[:] = [values[prediction], *weights]
    tidy(model)
    return model, values


def _multiply_by_sample_weights(
    op: Any, model: ir.Model, losses: ir.Value, prediction: ir.Value, name: str, by_element: bool
) -> ir.Value:
    """Write the losses times a new input of sample weights, one weight for each element or row."""
    # the input has no shape, because (N,) and (N, 1) are both accepted
    weight = ir.Value(name=op.name(name), type=prediction.type)
    op.graph.inputs.append(weight)
    if shapes.rank(losses) is None:
        infer(model)
    shape = shapes.dims(losses)
    if not shape:
        raise ValueError(
            "sample weights need one loss for each row; the loss of output "
            f"{prediction.name!r} has the shape {printable(losses.shape)}: declare the shape of "
            "that output"
        )
    if by_element and len(shape) > 1:
        weight.shape = ir.Shape([None] * len(shape))
        return losses * broadcast_weights(op, weight, op.Shape(losses), losses)
    ones = [1] * (len(shape) - 1)
    weight = op.Reshape(weight, [-1, *ones])
    weight.shape = ir.Shape([shape[0], *ones])
    if list(shape[1:]) != ones:
        losses = op.ReduceSum(losses, list(range(1, len(shape))), keepdims=1)
    return losses * weight


def _reduce_losses(op: Any, losses: ir.Value, spec: LossSpec, label: ir.Value) -> ir.Value:
    """Write the sum or the mean over rows of the losses, of shape (1, 1)."""
    if shapes.rank(losses) == 2:
        loss = op.ReduceSum(losses, keepdims=1)
    else:
        loss = op.Reshape(op.ReduceSum(losses, keepdims=0), [1, 1])
    if spec.reduction == "sum" or shapes.rank(label) == 0:
        return loss
    rows = op.Shape(label, start=0, end=1)
    if label.shape is None:  # for a scalar, `rows` is empty, and its product 1
        rows = op.ReduceProd(rows, keepdims=1)
    return loss / op.Cast(rows, to=loss.dtype)


def weight_penalty(
    op: Emit, w: ir.Value, l1: float | None, l2: float | None, zeros: bool = False
) -> ir.Value:
    """Write the penalty `l1 |w| + l2 w^2` summed over `w`, (1, 1).

    With `zeros`, terms whose coefficient is 0 are written, too.
    """
    if not l1 and not l2:
        raise ValueError(f"the penalty of {w.name!r} is zero: give l1 or l2 a value above 0")
    flat = op.Reshape(w, [1, -1])
    if flat.shape is None:
        flat.shape = ir.Shape([1, f"elements of {w.name}"])
    terms = []
    for coefficient, v, total in ((l1, op.Abs(flat), op.ReduceSum), (l2, flat, op.ReduceSumSquare)):
        if coefficient or (zeros and coefficient is not None):
            summed = total(v, keepdims=1)
            summed.shape = ir.Shape([1, 1])
            terms.append(coefficient * summed)
    return op.total(terms)


def add_penalties(
    op: Emit, loss: ir.Value, penalties: Mapping[str, Any], values: Mapping[str, ir.Value]
) -> ir.Value:
    """Write `loss` plus penalties of weights, `{name: l2}` or `{name: {"l1": a, "l2": b}}`."""
    floats = {n: v for n, v in values.items() if v.dtype and v.dtype.is_floating_point()}
    for name, setting in penalties.items():
        if name not in floats:
            raise unknown("weight in penalty", name, floats)
        term = weight_penalty(op, floats[name], **penalty_coefficients(name, setting))
        loss = loss + op.Cast(term, to=loss.dtype)
    return loss


def penalty_coefficients(name: str, setting: Any) -> dict[str, Any]:
    """Return a penalty as `{"l1": a, "l2": b}`, given as a dict of these keys or as the number b
    alone.
    """
    given = dict(setting) if isinstance(setting, Mapping) else {"l2": setting}
    for key in given:
        if key not in ("l1", "l2"):
            raise unknown(f"penalty of {name!r}", key, ["l1", "l2"])
    return {"l1": 0.0, "l2": 0.0} | given


def choose_output(
    proto: ModelProto, index: int | str | None, remedy: str = "", inside: bool = False
) -> str:
    """Return the name of the float output chosen by index or name, or of the only float output.

    `index=None` is the only float output; with `inside`, also the only tensor of
    `score_tensors_behind_outputs` if no output holds floats.

    Raises:
        ValueError: there is no such tensor, or `index` is None and there are several. `remedy` is
            the advice for the latter; by default, to give the index.
    """
    outputs, floats = list(proto.graph.output), float_outputs(proto)
    behind = score_tensors_behind_outputs(proto)
    choice = ", ".join(map(repr, [*floats, *behind]))
    choice = f"one of {choice}" if choice else "a float tensor inside of the graph"
    if index is None:
        held = caches_with_next_values(proto).values()
        predictions = [name for name in floats if name not in held]
        predictions = predictions or (behind if inside and not floats else [])
        if len(predictions) == 1:
            return predictions[0]
        say = remedy or f"say which one with {argument('output_index')}"
        raise ValueError(f"the model has {len(floats)} float outputs: {say}, {choice}")
    if not isinstance(index, str) and not -len(outputs) <= index < len(outputs):
        given = argument("output_index", index)
        raise ValueError(
            f"{given}: the model has {len(outputs)} outputs; give an index below {len(outputs)}, "
            "or a name"
        )
    name = index if isinstance(index, str) else outputs[index].name
    for output in outputs:
        if output.name == name and (is_non_tensor(output) or name not in floats):
            kind = "tensor" if is_non_tensor(output) else "float tensor"
            raise ValueError(f"output {name!r} is no {kind}: choose {choice}")
    if not any(name in node.output for node in proto.graph.node):
        raise unknown("output", name, [o.name for o in outputs])
    return name


def score_tensors_behind_outputs(proto: ModelProto) -> list[str]:
    """Return the names of the float tensors of scores from which labels or maps in the outputs are
    computed.

    They are the tensors in outputs that are maps, or else the scores of an ArgMax or TopK whose
    indices become labels. Each is named once; none is an output.
    """
    makers = {y: node for node in proto.graph.node for y in node.output}
    found = [source_tensor_name(proto, o.name) for o in proto.graph.output if is_non_tensor(o)]
    for output in [] if any(found) else proto.graph.output:
        name = output.name
        while (node := makers.get(name)) is not None:
            operand = operator_of(node).lookup_operand
            if node.op_type in ("ArgMax", "TopK"):
                found.append(node.input[0])
                break
            if operand is None and node.op_type not in SAME_ELEMENTS:
                break
            name = node.input[operand or 0]
    return [x for x in dict.fromkeys(found) if x and x not in float_outputs(proto)]


def float_outputs(proto: ModelProto) -> list[str]:
    """Return the names of the outputs that are float tensors; each name once."""
    tensors = {o.name: o.type.tensor_type for o in proto.graph.output if not is_non_tensor(o)}
    return [n for n, t in tensors.items() if ir.DataType(t.elem_type).is_floating_point()]


def make_label_input(
    op: Emit, prediction: ir.Value, kind: LabelKind, loss_name: str, name: str
) -> ir.Value:
    """Return a new value for the label of a loss, not yet registered as an input of the graph.

    A symbolic length of the prediction that no input has is unknown in the label: nothing would
    compare it with the labels of users, and a label of length 1 would be broadcast.

    Raises:
        ValueError: the prediction does not hold floats, or not in a shape that the loss takes.
    """
    shape, dtype = shapes.dims(prediction), prediction.dtype
    if dtype is None or not dtype.is_floating_point():
        raise ValueError(f"output {prediction.name!r} holds {dtype}: choose an output of floats")
    if not kind.accepts(shape):
        raise ValueError(
            f"the loss {loss_name!r} needs {kind.needs}; the output {prediction.name!r} has the "
            f"shape {shape}: choose another output or loss"
        )
    shape = kind.shape(shape)
    if shape is not None:
        fed = {d for x in op.root.graph.inputs for d in shapes.dims(x) or ()}
        shape = tuple(d if isinstance(d, int) or d in fed else None for d in shape)
    label = ir.Value(
        name=op.name(name),
        type=ir.TensorType(kind.dtype or dtype),
        shape=None if shape is None else ir.Shape(shape),
    )
    label.meta[marks.LABEL_SHAPE] = kind.shape
    return label
