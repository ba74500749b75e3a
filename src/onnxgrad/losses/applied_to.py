"""Options of a loss (axis, logits or probabilities) that follow from the nodes before a prediction.

`axis=None` is the axis of the classes, found by `class_axis`. `from_logits=None` asks whether
the prediction is a probability, which is between 0 and 1 whatever the weights and the data are, or
a score. `soft_labels=None` is decided by the shape of the labels.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import onnx_ir as ir

from onnxgrad.errors import argument, unknown
from onnxgrad.graph.infer import infer
from onnxgrad.losses.class_axis import class_axis
from onnxgrad.losses.logits import (
    log_softmax_logits,
    sigmoid_logits,
    softmax_logits,
    written_sigmoid,
)
from onnxgrad.losses.spec import LossSpec
from onnxgrad.losses.value_range import (
    constant_range,
    moved_operands,
    quotient_operands,
    strip_zero_guard,
    summed_axes,
    value_before_casts,
    value_range,
)
from onnxgrad.model.convert import to_ir
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators import made_by, operator_of
from onnxgrad.operators.shapes import dims, rank
from onnxgrad.reporting import logger


def decide_options(spec: LossSpec, prediction: ir.Value, otherwise: int | None = None) -> LossSpec:
    """Return the loss with the options `axis`, `soft_labels` and `from_logits` decided by the
    graph, unless the user has set them.

    The logger "onnxgrad" reports the decisions.

    Args:
        spec: the loss.
        prediction: a value of a graph whose shapes are inferred.
        otherwise: the axis of the classes if no linear operator precedes the prediction; None
            raises an error.

    Raises:
        ValueError: the graph does not decide an option, or contradicts it.
    """
    options, name = spec.all_options, prediction.name
    filled: dict[str, Any] = {}
    n = rank(prediction)
    if "axis" in options and n is not None and n >= 2:
        filled["axis"] = _valid_class_axis(spec, prediction, n, otherwise)
        if spec.activation == "Softmax" and (dims(prediction) or ())[filled["axis"]] == 1:
            raise ValueError(
                f"the output {name!r} holds one score for each row, and {spec.name!r} takes "
                "scores of several classes: use 'binary_cross_entropy', or a loss of one score"
            )
    if options.get("soft_labels", False) is None:
        shape = dims(prediction)
        if n == 1:
            raise ValueError(
                f"{name!r} has the shape {shape}, and {spec.name!r} compares scores (N, C, ...) of "
                "several classes in each row: choose another output or loss"
            )
        labels, axis = spec.label_shape, filled.get("axis", 1)
        # soft labels have the axis of the classes, class indices at most an axis of length 1
        filled["soft_labels"] = (
            labels is not None
            and shape is not None
            and len(labels) == len(shape)
            and (labels[axis] != 1 or shape[axis] == 1)
        )
        logger.info("labels of %r: %s", name, "soft" if filled["soft_labels"] else "class indices")
    if options.get("from_logits") is None and "from_logits" in options:
        filled["from_logits"] = _holds_scores(spec, prediction)
        kind = "scores" if filled["from_logits"] else "probabilities"
        logger.info("%r holds %s, for the loss %r", name, kind, spec.name)
        if filled["from_logits"]:
            _warn_of_quotients_by_sums(prediction)
    elif options.get("from_logits") and is_probability(prediction):
        given = argument("loss_options.from_logits", True)
        logger.warning("%r holds probabilities, but %s takes them as scores", name, given)
    return replace(spec, options={**spec.options, **filled})


def loss_before_activation(
    op: Any, spec: LossSpec, plain: LossSpec, prediction: ir.Value
) -> tuple[LossSpec, ir.Value]:
    """Return (loss, logits) if a Softmax or Sigmoid computes the prediction from logits, else the
    arguments (`plain`, `prediction`).

    The loss is the same, but stable and without clipping. The activation may be written out, and
    followed by nodes that move or cast its results; see `losses.logits`. If the user has set
    `from_logits`, or the graph does not prove an activation, this returns `plain` and `prediction`.

    Args:
        op: emitter of the graph.
        spec: the loss with the options that the user set.
        plain: the loss with all options decided, by `decide_options`.
        prediction: the prediction.
    """
    if spec.activation is None or spec.all_options.get("from_logits") is not None:
        return plain, prediction
    if spec.activation == "Softmax":
        axis = plain.all_options.get("axis", 1)
        holds_shares = plain.all_options.get("from_logits") is False
        find_logits = softmax_logits if holds_shares else log_softmax_logits
        logits = find_logits(op, prediction, axis)
    else:
        logits = sigmoid_logits(op, prediction)
    if logits is None:
        _warn_of_clipped_scores(prediction)
        return plain, prediction
    if logits.shape is None:
        logits.shape = prediction.shape
    logger.info("the loss of %r is computed from its logits, %r", prediction.name, logits.name)
    return replace(plain, options={**plain.options, "from_logits": True}), logits


def _warn_of_clipped_scores(prediction: ir.Value) -> None:
    """Warn if the prediction is computed from clipped scores by additions and multiplications with
    constants: clipped scores have no gradient.
    """
    x: ir.Value | None = prediction
    while x is not None and (clip := made_by(x, "Clip", "HardSigmoid")) is None:
        x = _affine_operand(x)
    score = None if clip is None else clip.inputs[0]
    if clip is None or score is None:
        return
    if clip.op_type == "HardSigmoid" or value_range(score) == (-inf, inf):
        logger.warning(
            "%r is clipped by %s (node %r): rows whose scores %r are outside of the bounds "
            "have no gradient and do not train. Train the scores before the clipping: %s",
            prediction.name, clip.op_type, clip.name, score.name,
            argument("loss", {score.name: "binary_cross_entropy"}),
        )  # fmt: skip


def _affine_operand(x: ir.Value) -> ir.Value | None:
    """Return the operand v if a node computes `x` = a v + b, or copies, casts or reorders v, else
    None.
    """
    node = x.producer()
    if node is None or not (moved_operands(node) or "affine" in operator_of(node).traits):
        return None
    varying = [v for v in node.inputs if v is not None and constant_range(v) is None]
    if not varying:
        return None
    if node.op_type == "Div" and len(varying) == 2:
        return strip_zero_guard(varying[0])
    is_last = node.op_type in ("Concat", "Div") or len(varying) == 1
    return varying[-1] if is_last else node.inputs[0]


def _warn_of_quotients_by_sums(prediction: ir.Value) -> None:
    """Warn if a prediction is v / sum(v) without proof that v is positive, and is therefore taken
    for scores.
    """
    node = value_before_casts(prediction).producer()
    share = None if node is None else quotient_operands(node)
    if share is not None and node is not None and summed_axes(*share) is not None:
        logger.warning(
            "%r is %r divided by its sum, by %s (node %r), which the graph does not prove to be "
            "positive: it is taken for scores. Set %s if it holds probabilities, or train the "
            "scores before the division: %s",
            prediction.name, share[0].name, node.op_type, node.name,
            argument("loss_options.from_logits", False),
            argument("loss", {share[0].name: "cross_entropy"}),
        )  # fmt: skip


def _valid_class_axis(spec: LossSpec, prediction: ir.Value, n: int, otherwise: int | None) -> int:
    """Return the index, from 0, of the class axis of a prediction of rank `n`; raise `ValueError`
    for an axis out of range.
    """
    axis = spec.all_options["axis"]
    if axis is None:
        axis = class_axis(prediction, otherwise)
        if n > 2:
            logger.info("the classes of %r are along axis %d", prediction.name, axis)
    elif isinstance(axis, bool) or int(axis) != axis or not -n <= axis < n:
        given = argument("loss_options.axis", axis)
        raise ValueError(
            f"{given} is no axis of {prediction.name!r}, which has the shape {dims(prediction)}: "
            f"give an axis from {-n} to {n - 1}"
        )
    return int(axis) % n


def _holds_scores(spec: LossSpec, prediction: ir.Value) -> bool:
    """Return whether a prediction holds scores (logits) rather than probabilities.

    Log-probabilities count as scores: their softmax is the probabilities.

    Raises:
        ValueError: the prediction is neither a score nor a probability of the kind that the loss
            needs.
    """
    last = _element_op_type(prediction)
    if last in ("Sigmoid", "HardSigmoid") and spec.activation == "Softmax":
        raise ValueError(
            f"{prediction.name!r} holds the results of a {last}, which do not sum to 1 over the "
            f"classes, and {spec.name!r} needs scores or the results of a Softmax: use "
            "binary_cross_entropy, or say whether they are scores by "
            f"{argument('loss_options.from_logits', False)} or True"
        )
    logarithm = last in ("Log", "LogSoftmax") and value_range(prediction)[1] <= 0
    if logarithm and spec.activation == "Sigmoid":
        raise ValueError(
            f"{prediction.name!r} holds log-probabilities, and {spec.name!r} needs scores or "
            "probabilities: choose the output before the logarithm, or set "
            f"{argument('loss_options.from_logits', True)}"
        )
    return not is_probability(prediction)


def are_probabilities(model: ModelLike, output: str) -> bool:
    """Return whether the graph of a model proves that an output holds numbers from 0 to 1.

    The proof holds for any weights and data, as behind a Sigmoid or a Softmax, also in branches.

    Args:
        model: model, serialized model or path; never modified.
        output: name of the output.

    Raises:
        ValueError: no output has this name.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N] x) => (float[N] y, float[N] z) { y = Sigmoid(x)  z = Mul(x, x) }''')
        >>> og.losses.are_probabilities(model, "y"), og.losses.are_probabilities(model, "z")
        (True, False)
    """
    inner = to_ir(inline_functions(read(model)))
    infer(inner)
    found = {str(y.name): y for y in inner.graph.outputs}
    if output not in found:
        raise unknown("output", output, found)
    return is_probability(found[output])


def is_probability(prediction: ir.Value) -> bool:
    """Return whether the graph proves that all elements of a prediction lie between 0 and 1."""
    low, high = value_range(prediction)
    return (low >= 0 and high <= 1) or _element_op_type(prediction) == "Sigmoid"


def _element_op_type(x: ir.Value) -> str | None:
    """Return the op type of the node that computes the elements of `x`, looking through nodes that
    reorder, cast or clip elements.
    """
    while (node := x.producer()) is not None:
        sources = node.inputs[:1] if made_by(x, "Clip") else moved_operands(node)
        if len(sources) != 1 or sources[0] is None:
            break
        x = sources[0]
    if written_sigmoid(x) is not None:
        return "Sigmoid"
    return None if node is None or node.domain else node.op_type
