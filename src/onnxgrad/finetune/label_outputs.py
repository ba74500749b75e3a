"""Replace the classes of a model: in the labels that it outputs, and in its metadata.

Behind the last layer of a classifier that outputs labels, as exported from scikit-learn, all is
written anew: the probabilities, the label of the largest probability, and the ZipMap of the
probabilities. The metadata with class names are `names`, as ultralytics writes it, and
`character`, as PaddleOCR does.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from onnxgrad.errors import printable
from onnxgrad.finetune.head_activation import ACTIVATIONS, write_activation
from onnxgrad.finetune.layers import Layer
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.value_range import value_range
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.operators import operator_of
from onnxgrad.operators.shapes import rank
from onnxgrad.reporting import logger

Classes = Sequence[str] | Sequence[int]
Names = list[Any] | dict[Any, Any]
Reading = tuple[Names | None, Callable[[Names], str]]


@dataclass
class ZipMap:
    """A ZipMap node that was removed from a model, with its output and the position of the output
    among the graph outputs.
    """

    node: NodeProto
    output: ValueInfoProto
    index: int
    added: bool  # whether its tensor became an output of the model in its place

    @property
    def tensor_name(self) -> str:
        """The name of the tensor that the ZipMap reads."""
        return self.node.input[0]


def without_zipmaps(proto: ModelProto) -> tuple[ModelProto, list[ZipMap]]:
    """Return a copy of the model whose outputs are tensors in place of ZipMaps, and the list of the
    removed ZipMaps.

    `proto` itself is returned if all of its outputs are tensors.

    Raises:
        ValueError: an output is no tensor, and no ZipMap computes it.
    """
    if not any(is_non_tensor(y) for y in proto.graph.output):
        return proto, []
    changed = deepcopy(proto)
    graph, zipmaps = changed.graph, list[ZipMap]()
    makers = {y: node for node in graph.node for y in node.output}
    types = {v.name: v.type for v in graph.value_info}
    for i, y in enumerate(list(graph.output)):
        if not is_non_tensor(y):
            continue
        node = makers.get(y.name)
        if node is None or node.op_type != "ZipMap":
            raise ValueError(
                f"the output {y.name!r} is no tensor: keep the other outputs by "
                "onnxgrad.graph.select_model_inputs_outputs(model, outputs=[...]) first"
            )
        added = node.input[0] not in [v.name for v in graph.output]
        zipmap = ZipMap(deepcopy(node), deepcopy(y), i, added)
        zipmaps.append(zipmap)
        graph.node.remove(node)
        y.Clear()
        y.name = zipmap.tensor_name
        y.type.tensor_type.elem_type = TensorProto.FLOAT
        if zipmap.tensor_name in types:
            y.type.CopyFrom(types[zipmap.tensor_name])
    for zipmap in reversed(zipmaps):
        if not zipmap.added:
            del graph.output[zipmap.index]
    return changed, zipmaps


def restore_zipmaps(proto: ModelProto, zipmaps: Sequence[ZipMap], classes: Classes | None) -> None:
    """Put removed ZipMaps back into the model, in place, with the class labels `classes`; None
    keeps their labels.
    """
    for zipmap in zipmaps:
        node, output = deepcopy(zipmap.node), deepcopy(zipmap.output)
        if classes is not None:
            text = isinstance(classes[0], str)
            del node.attribute[:]
            attribute = node.attribute.add(
                name="classlabels_strings" if text else "classlabels_int64s",
                type=AttributeProto.STRINGS if text else AttributeProto.INTS,
            )
            if text:
                attribute.strings.extend(str(c).encode() for c in classes)
            else:
                attribute.ints.extend(int(c) for c in classes)
            key = TensorProto.STRING if text else TensorProto.INT64
            kind = output.type.sequence_type.elem_type.map_type
            kind.key_type, kind.value_type.tensor_type.elem_type = key, TensorProto.FLOAT
        proto.graph.node.append(node)
        if zipmap.added:
            proto.graph.output[zipmap.index].CopyFrom(output)
        else:
            proto.graph.output.insert(zipmap.index, output)


def has_labels(layer: Layer, nodes: Sequence[ir.Node], affected: set[ir.Value]) -> bool:
    """Return whether a model outputs class labels: `layer` is a classifier of ai.onnx.ml, or one of
    `nodes` looks up labels.
    """
    return layer.kind == "classifier" or any(_is_label_lookup(node, affected) for node in nodes)


def _is_label_lookup(node: ir.Node, affected: set[ir.Value]) -> bool:
    """Return whether `node` looks up class labels in a table, by an index that depends on the layer
    (is in `affected`).
    """
    if node.domain == "ai.onnx.ml":
        return operator_of(node).lookup_operand is not None
    if node.domain or node.op_type != "Gather":
        return False
    table, index = node.inputs[:2]
    if table is None or table in affected or index not in affected or rank(table) != 1:
        return False
    return table.dtype is not None and not table.dtype.is_floating_point()


def write_labels(
    op: Emit,
    layer: Layer,
    nodes: Sequence[ir.Node],
    indices: Sequence[int],
    classes: Classes,
    activation: str | None,
) -> None:
    """Replace the nodes behind `layer` that compute the labels and scores of a classifier, in
    place, for new classes.

    Args:
        op: emitter of the graph.
        layer: the last layer.
        nodes: the nodes behind the layer in the file.
        indices: indices of the outputs of the graph that depend on the layer.
        classes: the new classes.
        activation: as for `change_activation`.

    Raises:
        ValueError: fewer than two classes, or an output that is neither labels nor scores.
    """
    if len(classes) < 2:
        raise ValueError(f"a classifier with labels needs two classes or more, not {list(classes)}")
    outputs = [op.graph.outputs[i] for i in indices]
    scored = [str(y.name) for y in outputs if y.dtype is None or y.dtype.is_floating_point()]
    if len(scored) > 1:
        raise ValueError(
            f"the classifier returns several scores, {scored}: choose one score and the label by "
            "onnxgrad.graph.select_model_inputs_outputs(model, outputs=[...]); if there is a "
            "score for each class, convert the classifier with the option zipmap=False"
        )
    if rank(layer.y) not in (2, None):
        raise ValueError(
            f"the scores {layer.y.name!r} are no matrix: replace the head of a model that returns "
            "scores (rows, classes)"
        )
    with op.at(None):
        scores = _write_class_scores(op, layer, nodes, outputs, activation)
        winner = {k: op.ArgMax(layer.y, axis=1, keepdims=k) for k in (0, 1)}
        table = op.const(np.array(classes, object if isinstance(classes[0], str) else np.int64))
        for i, y in zip(indices, outputs, strict=True):
            if y.dtype is None or y.dtype.is_floating_point():
                new = op.Cast(scores, to=y.dtype or scores.dtype)
                new.shape = ir.Shape([(y.shape or [None])[0], len(classes)])
            else:
                keep = int(rank(y) == 2)
                new = op.emit("Gather", [table, winner[keep]], {"axis": 0}, fresh=True)
                new.type = ir.TensorType(table.dtype)
                new.shape = ir.Shape([(y.shape or [None])[0], *[1] * keep])
            new.name, y.name = y.name, op.name("unused")
            op.graph.outputs[i] = new


def _write_class_scores(
    op: Emit,
    layer: Layer,
    nodes: Sequence[ir.Node],
    outputs: Sequence[ir.Value],
    activation: str | None,
) -> ir.Value:
    """Write the activation of the new scores of a classifier, and return the scores."""
    if activation == "same":
        probable = any(n.op_type in ("Sigmoid", "Softmax") for n in nodes)
        probable |= any(value_range(y) >= (0, 0) and value_range(y)[1] <= 1 for y in outputs)
        activation = "softmax" if probable or layer.probable else None
    if activation is None:
        return op.set_type_like(op.copy_of(layer.y), layer.y)
    return write_activation(op, ACTIVATIONS[activation], layer.y, -1)


# -- metadata of other programs that names the classes ---------------------------------------------


def update_class_metadata(
    proto: ModelProto, old: int | None, classes: Sequence[Any] | None, alone: bool
) -> None:
    """Rewrite or remove the metadata entries that name the classes of a replaced layer, in place,
    and log which entries.

    Args:
        proto: the model.
        old: units of the replaced layer; None: all outputs of the model were replaced.
        classes: the new classes, if they have names.
        alone: whether the model has no other outputs, which metadata may describe.
    """
    rewritten, removed = [], []
    for entry in [e for e in proto.metadata_props if e.key in _READERS]:
        names, write = _READERS[entry.key](entry.value)
        # the list of names may lack a blank and a space, as PaddleOCR's `character`
        if names is None or not (alone or old is None or 0 <= old - len(names) <= 2):
            continue
        if len(names) == old and classes is not None:
            entry.value = write(_class_names_in_form_of(names, classes))
            rewritten.append(printable(entry.key))
        else:
            removed.append(printable(entry.key))
            proto.metadata_props.remove(entry)
    for keys, done in ((rewritten, "rewritten"), (removed, "removed")):
        if keys:
            logger.warning("metadata that described the old classes are %s: %s", done, keys)


def _parse_class_names(text: str) -> Reading:
    """Return the class names, a list or dict, that a metadata text holds, and a function that
    writes new class names in the same format.
    """
    for read, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
        try:
            found = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, (list, dict)) else None, write
    return None, str


def _parse_characters(text: str) -> Reading:
    """Return the characters in the lines of a metadata text, and a function that writes new
    characters in the same format.
    """
    end = "\n" if text.endswith("\n") else ""
    return text.removesuffix("\n").split("\n"), lambda new: "\n".join(map(str, new)) + end


def _class_names_in_form_of(old: Names, classes: Sequence[Any]) -> Names:
    """Return class names as the container that `old` is: a list, or a dict whose keys are strings
    or integers.
    """
    if isinstance(old, list):
        return [*classes]
    number = str if any(isinstance(key, str) for key in old) else int
    return {number(i): str(name) for i, name in enumerate(classes)}


_READERS: dict[str, Callable[[str], Reading]] = {
    "names": _parse_class_names,
    "character": _parse_characters,
}
