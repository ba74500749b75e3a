"""`replace_head`: a new last layer for other classes; `features`: the model before that layer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import argument, node_text, unknown
from onnxgrad.finetune.attach import declared_types, restore_types
from onnxgrad.finetune.follow import follow_units_to_outputs
from onnxgrad.finetune.head_activation import ACTIVATIONS, change_activation
from onnxgrad.finetune.label_outputs import (
    Classes,
    has_labels,
    restore_zipmaps,
    update_class_metadata,
    without_zipmaps,
    write_labels,
)
from onnxgrad.finetune.layers import Layer, declare_rank, set_constant_values, standardize
from onnxgrad.finetune.locate import LayerSearch, nodes_text, source_values
from onnxgrad.finetune.new_weights import kept_unit_filler, replace_weights
from onnxgrad.finetune.unit_axes import INDEX, UnitAxes
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.infer import infer
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import dependents, nodes_after
from onnxgrad.model.convert import to_ir, to_proto
from onnxgrad.model.local_functions import inline_functions
from onnxgrad.model.notes import CLASSES, HEAD, read_metadata, write_metadata
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.surgery import drop_unused_inputs, select_model_inputs_outputs
from onnxgrad.operators import operator_of
from onnxgrad.operators.shapes import dims
from onnxgrad.reporting import logger


def replace_head(
    model: ModelLike,
    units: int | Sequence[str] | Sequence[int],
    at: str | Sequence[str] | None = None,
    name: str = "head",
    *,
    output: str | None = None,
    activation: str | None = "same",
    seed: int = 0,
    keep: Sequence[int | None] | None = None,
) -> ModelProto:
    """Return `model` with a new last layer for another number of units, or for other classes.

    The last linear or convolutional layer gets new weights, and a bias of zeros if it has a bias.
    Linear weights are uniform between ±sqrt(6 / (features + units)) (Glorot and Bengio, 2010, eq.
    16); weights of convolutions are normal with variance 2 / (features * size of the kernel) (He
    et al., 2015, eq. 10). What follows stays if it works for any number of units; lengths that it
    states, and shapes of outputs, are corrected. Local functions are inlined. A bias that an Add
    brings is found behind a Cast, and behind nodes that reshape, transpose or average the results.

    A detector has several such layers, one for each scale: `at` names all of them, and the boxes
    beside the scores stay. Layers that share their weights share the new ones.

    A model that returns labels, as scikit-learn's classifiers, returns the new class of the largest
    score, also in its ZipMap, and a softmax if it returned probabilities. In other models, the
    names of classes are stored as metadata, `onnxgrad.classes`. Metadata of other programs that
    describe the old classes, as `names` and `character`, are rewritten or removed; the logger warns
    which. A model that only returns the number of the largest score (ArgMax) still does: a
    `Trainer` computes the loss from the scores, and the logger tells their name (level INFO).

    Args:
        model: model, serialized model or path; never modified.
        units: number of units; or the classes, all strings or all ints, in their order. A number
            for a model that returns labels: the classes are 0, 1...
        at: the layer: name of its node, its result, or its weights; or several layers of equal
            numbers of units, by a pattern as "cv3.*.2.weight" or a list of names and patterns.
            None: the only layer that comes last before the outputs.
        name: the new tensors are `<name>.weight` and `<name>.bias`, or with a numeric suffix; of
            several layers `<name>.0.weight`..., in the order of `at`, then of the graph.
        output: the output whose last layer is replaced, if outputs have several.
        activation: "softmax", "log_softmax" or "sigmoid" of the scores; None: the scores. "same":
            as in `model`; but one unit has a Sigmoid and several a Softmax, except in a detector.
        seed: of the new weights.
        keep: for each new unit the index of an old one, whose weights and bias it gets unchanged,
            or None for fresh ones plus the mean of the kept ones. None: all are fresh.

    Raises:
        ValueError: no such layer, several of different numbers of units, or without `at`; one that
            cannot be replaced, or an operator behind it that needs the old number of units; an
            invalid argument; `keep` where weights are no floats of the file.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] p) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        ...     h = Gemm <transB = 1> (x, w)  p = Softmax(h) }''')
        >>> [tuple(tensor.dims) for tensor in og.replace_head(model, units=5).graph.initializer]
        [(5, 2)]
    """
    request = HeadRequest(units, name, activation, seed, keep)
    return _replace_last_layers(read(model), request, at, output)


def features(model: ModelLike, at: str | None = None, *, output: str | None = None) -> ModelProto:
    """Return the part of `model` that computes the input (features) of its last layer.

    The only output is that value, under its name in `model`. Inputs that it does not need are
    removed.

    Args:
        model: model, serialized model or path; never modified.
        at: where to cut: behind the value of this name; or before a layer, named by its node or its
            weights, which may be a pattern. None: before the layer that `replace_head` replaces.
        output: the output whose last layer is meant, if outputs have several.

    Raises:
        ValueError: there is no such value or layer, or several.
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,3] p) <float[3,2] w = {1, 2, 3, 4, 5, 6}> {
        ...     a = Relu(x)  h = Gemm <transB = 1> (a, w)  p = Softmax(h) }''')
        >>> part = og.graph.features(model)
        >>> [node.op_type for node in part.graph.node], part.graph.output[0].name
        (['Relu'], 'a')
    """
    proto = read(model)
    value = at or ""
    if not at or all(at not in node.output for node in proto.graph.node):
        proto, _ = without_zipmaps(inline_functions(proto) if proto.functions else proto)
        changed = to_ir(proto)
        infer(changed)
        value = str(find_layer(changed.graph, proto, at, output).x.name)
    part = select_model_inputs_outputs(proto, outputs=[value])
    drop_unused_inputs(part)
    return part


class HeadRequest:
    """The checked arguments of `replace_head` or `add_head` that describe the new layer.

    Raises:
        ValueError: an invalid argument.
    """

    def __init__(
        self,
        units: int | Sequence[str] | Sequence[int],
        name: str,
        activation: str | None,
        seed: int,
        keep: Sequence[int | None] | None = None,
    ) -> None:
        if activation not in (None, "same", *ACTIVATIONS):
            raise unknown("activation", activation, ["same", *ACTIVATIONS, "None"])
        if not name:
            raise ValueError("name must not be empty: the new tensors begin with it")
        self.units, self.classes = _unit_count_and_classes(units)
        if keep is not None and len(keep) != self.units:
            raise ValueError(
                f"{argument('keep')} has {len(keep)} entries, and the new layer has {self.units} "
                "units: pass for each new unit the index of an old unit, or None"
            )
        self.keep = keep
        self.name, self.activation, self.seed = name, activation, seed

    def finish_model(
        self,
        proto: ModelProto,
        tensors: Sequence[str],
        labeled: bool,
        origin: ModelProto,
        old: int | None = None,
        alone: bool = True,
    ) -> ModelProto:
        """Return `proto` after writing into its metadata the names of the new tensors, and the
        class names unless the model outputs labels.

        It is changed in place: metadata about the `old` classes, see `update_class_metadata`, and
        the IR version, which becomes the version of `origin`.
        """
        update_class_metadata(proto, old, self.classes, alone)
        # before IR version 4, initializers had to be inputs
        proto.ir_version = max(4, origin.ir_version)
        own = {t.name for t in proto.graph.initializer}
        earlier = [name for name in read_metadata(proto, HEAD) if name in own]
        write_metadata(proto, HEAD, list(dict.fromkeys([*earlier, *tensors])))
        write_metadata(proto, CLASSES, [] if labeled else list(self.classes or ()))
        return proto


def _replace_last_layers(
    proto: ModelProto, request: HeadRequest, at: str | Sequence[str] | None, output: str | None
) -> ModelProto:
    """Return `proto` with the new last layers that `request` describes; see `replace_head` for the
    other arguments.
    """
    proto, zips = without_zipmaps(inline_functions(proto) if proto.functions else proto)
    model = to_ir(proto)
    graph = model.graph
    before = declared_types(graph)
    infer(model)
    set_constant_values(graph)
    layers = find_layers(graph, proto, at, output)
    layer, op = layers[0], Emit(graph)
    own = [y for each in layers for y in (each.y, *each.node.outputs)]
    nodes, affected = nodes_after(graph, own), dependents(graph, own)
    indices = [i for i, y in enumerate(graph.outputs) if y in affected]
    classes = None
    if labeled := any(has_labels(each, nodes, affected) for each in layers):
        if layer.add is not None and layer.y is not layer.add.outputs[0]:
            layer.bias, layer.add = False, None  # the Add of the bias is behind the label's scores
        classes = request.classes or list(range(request.units))
        if len(layers) > 1:
            raise ValueError(
                f"{argument('at', at)} names {len(layers)} layers, and the model returns class "
                "labels of their units: name a single layer"
            )
    keep = request.keep
    kept = [None if keep is None else kept_unit_filler(each, keep) for each in layers]
    for each in layers:
        standardize(op, each)
        declare_rank(model, each)
    units = UnitAxes(op, layers, request.units)
    if classes is not None:
        write_labels(op, layer, nodes, indices, classes, request.activation)
        units.changed.update(graph.outputs)
    else:
        follow_units_to_outputs(units)
        change_activation(units, request.activation)
    weights = [w for each in layers for w in each.weights]
    sources = {v for w in weights for v in source_values(w) if v.producer() is None}
    old = {v for v in sources if v.const_value is not None}
    added = replace_weights(op, layers, request.units, request.name, request.seed, kept)
    tidy(model)
    _log_replaced_layers(layers, old, units)
    _restore_declared_shapes(model, before, units)
    new = to_proto(model)
    restore_zipmaps(new, zips, classes)
    alone = len(indices) == len(graph.outputs)
    return request.finish_model(new, added, labeled, proto, layer.units, alone)


def find_layer(graph: ir.Graph, proto: ModelProto, at: str | None, output: str | None) -> Layer:
    """Return the layer that `at` names, or the last layer before the outputs; raise `ValueError` if
    there are several layers.

    Raises:
        ValueError: there is no such layer, or several, or it cannot be replaced.
    """
    layers = find_layers(graph, proto, at, output)
    if len(layers) > 1:
        names = nodes_text([layer.node for layer in layers])
        raise ValueError(f"{argument('at', at)} names several layers: {names}; name one of them")
    return layers[0]


def find_layers(
    graph: ir.Graph, proto: ModelProto, at: str | Sequence[str] | None, output: str | None
) -> list[Layer]:
    """Return the layers that `at` names; if `at` is None, the last layer before `output`, or before
    all outputs.

    Args:
        graph: the main graph of `proto`; its shapes are inferred.
        proto: the model.
        at: as in `replace_head`.
        output: as in `replace_head`.

    Raises:
        ValueError: there is no such layer, or it cannot be replaced, or several have different
            numbers of units.
    """
    outputs = list(graph.outputs)
    if output is not None:
        outputs = [y for y in outputs if y.name == output]
        if not outputs:
            raise unknown("output", output, [str(y.name) for y in graph.outputs])
    search = LayerSearch(graph, proto)
    if at is None:
        return [search.last_layer(outputs)]
    return search.named_layers([at] if isinstance(at, str) else list(at))


def _unit_count_and_classes(
    units: int | Sequence[str] | Sequence[int],
) -> tuple[int, Classes | None]:
    """Return (count of units, classes); the classes are None if `units` is a number."""
    if isinstance(units, (str, bytes)):
        raise ValueError(f"{argument('units', units)}: pass a number, or a list of classes")
    if not isinstance(units, Sequence) and not hasattr(units, "tolist"):
        if isinstance(units, bool) or operator.index(units) < 1:
            raise ValueError(f"{argument('units', units)}: pass a number of units of at least 1")
        return operator.index(units), None
    classes = list(units.tolist() if hasattr(units, "tolist") else units)
    if not classes:
        raise ValueError(f"{argument('units', classes)}: pass one class or more")
    if {type(c) for c in classes} not in ({str}, {int}):
        raise ValueError(
            f"{argument('units', classes)}: pass classes that are all strings or all ints"
        )
    if len(set(classes)) < len(classes):
        raise ValueError(f"{argument('units', classes)}: a class is repeated, name each class once")
    return len(classes), classes


def _log_replaced_layers(layers: Sequence[Layer], old: Iterable[ir.Value], units: UnitAxes) -> None:
    """Log which layers were replaced, which of their old weights other nodes still read, and scores
    that are no output of the model.
    """
    for layer in layers:
        logger.info("replaced %s, of %d units", node_text(layer.node), layer.units)
    outputs = [y for y in units.op.graph.outputs if y in units.axes]
    if outputs and all(units.axes[y] == INDEX for y in outputs):
        searches = [n for n in units.op.graph if "searches" in operator_of(n).traits]
        scores = [str(x.name) for n in searches if (x := n.inputs[0]) in units.axes and x]
        remedy = f"select_model_inputs_outputs(model, outputs={scores}) returns the scores"
        logger.info("the model returns numbers of classes only: %s", remedy)
    for value in old:
        if value.uses() and value.const_value is not None and value.const_value.size > 1:
            logger.warning(
                "%r, weights of the layer that was replaced, are used elsewhere too: they stay "
                "there, and are no longer tied to the layer",
                value.name,
            )


def _restore_declared_shapes(
    model: ir.Model, before: dict[ir.Value, ir.Value], units: UnitAxes
) -> None:
    """Declare again the shapes and types that the model file declared, in place, except for values
    whose shapes changed.
    """
    affected = dependents(model.graph, (v for v in units.changed if v.producer() is not None))
    for v in affected:
        v.shape = None if v.producer() is not None and v not in model.graph.outputs else v.shape
    written = {y: dims(y) for y in model.graph.outputs}
    by_name = {v.name: v.shape for v in before.values()}
    infer(model)
    restore_types(before, affected | units.changed)
    for y in model.graph.outputs:
        shape = by_name.get(y.name)
        axis = units.axes.get(y, INDEX)
        if axis != INDEX and shape is not None and (y.shape is None or len(shape) == len(y.shape)):
            changed = list(shape)
            changed[axis] = units.new_length(y)
            y.shape = ir.Shape(changed)
        elif y in affected and y.shape is None and (lengths := written[y]) is not None:
            y.shape = ir.Shape(lengths)
