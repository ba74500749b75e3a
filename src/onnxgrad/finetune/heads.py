"""`replace_head`: another number of units, or other classes, for the last layer of a model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.primal.local_functions import inlined
from onnxgrad.errors import unknown
from onnxgrad.finetune.activations import ACTIVATIONS, change_activation
from onnxgrad.finetune.follow import follow
from onnxgrad.finetune.labels import (
    Classes,
    behind,
    has_labels,
    restore_zipmaps,
    without_zipmaps,
    write_labels,
)
from onnxgrad.finetune.layers import Layer, replace_weights, shown, standardized
from onnxgrad.finetune.locate import Search, origins
from onnxgrad.finetune.tail import INDEX, Tail
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.shapes import dims
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.notes import HEAD, read_note, write_note
from onnxgrad.model.read import ModelLike, read
from onnxgrad.reporting import logger

CLASSES = "onnxgrad.classes"  # metadata: the classes of a model without labels inside, as JSON


def replace_head(
    model: ModelLike,
    units: int | Sequence[str] | Sequence[int],
    at: str | None = None,
    name: str = "head",
    *,
    output: str | None = None,
    activation: str | None = "same",
    seed: int = 0,
) -> ModelProto:
    """Return `model` with a fresh last layer for another number of units, or for other classes.

    The last linear or convolutional layer before the outputs gets new weights, and a new bias of
    zeros if it has a bias. Other layers keep their weights. Operators behind it stay if they work
    for any number of units, and lengths that they state are corrected; a rounding of its quantized
    result is removed. The declared shapes of the outputs are corrected.

    Weights of linear layers are uniform between ±sqrt(6 / (features + units)), equation 16 of
    Glorot and Bengio, 2010; those of convolutions normal with variance 2 / (features * size of the
    kernel), equation 10 of He et al., 2015. A layer of `ai.onnx.ml` becomes a Gemm.

    A model that returns labels, such as an exported scikit-learn classifier, returns the new
    classes, also in its ZipMap: the label of the largest score, and the softmax of the scores if it
    returned probabilities, also where these were normalized by another function. In other models,
    the names of classes are stored as metadata, `onnxgrad.classes`. Local functions are inlined.

    Args:
        model: model, serialized model or path; never modified.
        units: number of units; or the classes, all strings or all ints, in their order. A number
            for a model that returns labels: the classes are 0, 1...
        at: the layer: name of its node, its result, or its weights, which may be a pattern. None:
            the only one that comes last before the outputs.
        name: the new tensors are `<name>.weight` and `<name>.bias`; a numeric suffix is added if
            the model has a value of that name.
        output: the output whose last layer is replaced, in a model where outputs have several.
            Outputs that do not depend on the layer stay.
        activation: what the outputs are: "softmax", "log_softmax" or "sigmoid" of the scores, None:
            the scores. "same": as in `model`; but a Softmax over one unit is a Sigmoid, and a
            Sigmoid of one unit is a Softmax over several.
        seed: of the new weights.

    Raises:
        ValueError: there is no such layer, or several; it cannot be replaced, or an operator behind
            it needs the old number of units, which the message names; an invalid argument.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> from onnxgrad.finetune.heads import replace_head
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] p) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        ...     h = Gemm <transB = 1> (x, w)  p = Softmax(h) }''')
        >>> five = replace_head(model, units=5)
        >>> [(node.op_type, list(node.input)) for node in five.graph.node]
        [('Gemm', ['x', 'head.weight']), ('Softmax', ['h'])]
        >>> og.get_train_initializer(five)["head.weight"][0].shape
        (5, 2)
    """
    count, classes = _checked(units, name, activation)
    proto = read(model)
    tensors, zips = without_zipmaps(inlined(proto) if proto.functions else proto)
    changed = to_ir(tensors)
    graph = changed.graph
    declared = _declared(graph)
    infer(changed)
    layer = find_layer(graph, tensors, at, output)
    op = Emit(graph)
    starts = [layer.y, *layer.node.outputs]
    nodes, affected = behind(graph, starts)
    indices = [i for i, y in enumerate(graph.outputs) if y in affected]
    labelled = has_labels(layer, nodes, affected)
    standardized(op, layer)
    tail = Tail(op, shown(layer.node), layer.y, layer.axis, layer.units, count)
    tail.changed.update(layer.node.outputs)
    if labelled:
        classes = classes or list(range(count))
        write_labels(op, layer, nodes, indices, classes, activation)
        tail.changed.update(graph.outputs)
    else:
        follow(tail)
        change_activation(tail, activation)
    old = {v for w in layer.weights for v in origins(w) if v.const_value is not None}
    added = replace_weights(op, layer, count, name, seed)
    tidy(changed)
    _say(layer, old)
    _declare(changed, declared, tail)
    new = to_proto(changed)
    restore_zipmaps(new, zips, classes if labelled else None)
    earlier = [n for n in read_note(new, HEAD) if n in {t.name for t in new.graph.initializer}]
    write_note(new, HEAD, list(dict.fromkeys([*earlier, *added])))
    write_note(new, CLASSES, [] if labelled else list(classes or ()))
    return new


def find_layer(graph: ir.Graph, proto: ModelProto, at: str | None, output: str | None) -> Layer:
    """Return the layer called `at`, or the last one before `output`, or before all outputs.

    Args:
        graph: the main graph of `proto`; its shapes are inferred.
        proto: the model.
        at: as in `replace_head`.
        output: as in `replace_head`.

    Raises:
        ValueError: there is none, or several, or it cannot be replaced.
    """
    outputs = list(graph.outputs)
    if output is not None:
        outputs = [y for y in outputs if y.name == output]
        if not outputs:
            raise unknown("output", output, [str(y.name) for y in graph.outputs])
    search = Search(graph)
    return search.last(outputs) if at is None else search.named(proto, at)


def _checked(
    units: int | Sequence[str] | Sequence[int], name: str, activation: str | None
) -> tuple[int, Classes | None]:
    """Return the number of units, and the classes if `units` are these."""
    if activation not in (None, "same", *ACTIVATIONS):
        raise unknown("activation", activation, ["same", *ACTIVATIONS, "None"])
    if not name:
        raise ValueError("name must not be empty: the new tensors begin with it")
    if isinstance(units, (str, bytes)):
        raise ValueError(f"units={units!r}: pass a number, or a list of classes")
    if not isinstance(units, Sequence) and not hasattr(units, "tolist"):
        if isinstance(units, bool) or operator.index(units) < 1:
            raise ValueError(f"units={units!r}: a layer has one unit or more")
        return operator.index(units), None
    classes = list(units.tolist() if hasattr(units, "tolist") else units)
    if not isinstance(classes, list) or not classes:
        raise ValueError("units: pass one class or more")
    if {type(c) for c in classes} not in ({str}, {int}):
        raise ValueError(f"classes are all strings or all ints, not {classes}")
    if len(set(classes)) < len(classes):
        raise ValueError(f"a class is repeated in {classes}")
    return len(classes), classes


def _say(layer: Layer, old: Iterable[ir.Value]) -> None:
    """Report which layer was replaced, and weights that others share with it."""
    logger.info("replaced %s, of %d units", shown(layer.node), layer.units)
    for value in old:
        if value.uses() and value.const_value is not None and value.const_value.size > 1:
            logger.warning(
                "%r, weights of the layer that was replaced, are used elsewhere too: they stay "
                "there, and are no longer tied to the layer",
                value.name,
            )


_Stated = dict[ir.Value, tuple[ir.Shape | None, ir.TypeProtocol | None, str | None]]


def _declared(graph: ir.Graph) -> _Stated:
    """Return the shapes and types that the file declares."""
    inner = [v for g in graph.subgraphs() for v in (*g.inputs, *g.outputs)]
    results = [y for node in graph.all_nodes() for y in node.outputs]
    values = [*graph.inputs, *graph.initializers.values(), *results, *inner]
    return {v: (None if v.shape is None else v.shape.copy(), v.type, v.name) for v in values}


def _declare(model: ir.Model, declared: _Stated, tail: Tail) -> None:
    """Declare the shapes and types of the file again, except of values that changed, in place."""
    affected = behind(model.graph, [v for v in tail.changed if v.producer() is not None])[1]
    for v in affected:
        v.shape = None if v.producer() is not None and v not in model.graph.outputs else v.shape
    stated = {y: dims(y) for y in model.graph.outputs}
    by_name = {name: shape for shape, _, name in declared.values()}
    infer(model)
    for v, (shape, kind, _) in declared.items():
        if v not in affected and v not in tail.changed:
            v.shape, v.type = shape, kind
    for y in model.graph.outputs:
        shape = by_name.get(y.name)
        axis = tail.axes.get(y, INDEX)
        if (
            axis != INDEX
            and shape is not None
            and y.shape is not None
            and (len(shape) == len(y.shape))
        ):
            changed = list(shape)
            changed[axis] = tail.new
            y.shape = ir.Shape(changed)
        elif y in affected and y.shape is None and (lengths := stated[y]) is not None:
            y.shape = ir.Shape(lengths)
