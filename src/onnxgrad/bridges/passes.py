"""The passes of a model as models: forward and backward pass, tangents, the gradient as a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import onnx_derivative
from onnxgrad.autodiff.higher import jvp
from onnxgrad.autodiff.partition import partition
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.operators import RANDOM
from onnxgrad.operators.shapes import constant, is_real

V = TypeVar("V")
_LOCK = threading.RLock()  # so that each session and each model is built once


@dataclass(frozen=True)
class PassModels:
    """The models of a forward and a backward pass, which gives gradients of some inputs.

    Attributes:
        forward: the outputs of the model, then the saved tensors.
        backward: the gradients of `names`; None if none of the inputs has a gradient.
        names: names of the inputs that have a gradient.
        indices: indices of these inputs.
        saved: indices of the outputs of `forward` that are saved with its inputs.
        reads: index of each input of `backward` in the list of the inputs of `forward`, then the
            saved outputs, then the cotangents of the float outputs.
    """

    forward: ModelProto
    backward: ModelProto | None
    names: list[str]
    indices: list[int]
    saved: list[int]
    reads: list[int]


class ModelPasses:
    """A prepared model whose weights are inputs, and the models that differentiate it.

    Each model is built once, when it is first asked for, even by several threads.

    Args:
        proto: a prepared model, with all its weights among the inputs.
        recompute: see `partition`.
    """

    def __init__(self, proto: ModelProto, recompute: str) -> None:
        self.proto, self.recompute = proto, recompute
        self.inputs = [x.name for x in proto.graph.input]
        kinds = [ir.DataType(y.type.tensor_type.elem_type) for y in proto.graph.output]
        self.outputs = len(kinds)
        self.float_outputs = [i for i, t in enumerate(kinds) if t.is_floating_point()]
        self._pairs: dict[tuple[str, ...], PassModels] = {}
        self._derived: dict[tuple[str, ...], ModelProto] = {}

    def input_names(self, needed: Sequence[bool]) -> list[str]:
        """Return the names of the inputs for which `needed` is true."""
        return [name for name, is_needed in zip(self.inputs, needed, strict=True) if is_needed]

    def pass_models(self, needed: Sequence[bool]) -> PassModels:
        """Return the models of both passes; `needed` says which inputs need gradients."""
        names = self.input_names(needed)
        return build_once(self._pairs, tuple(names), lambda: self._build_pass_models(names))

    def gradient_model(self, names: Sequence[str]) -> ModelProto:
        """Return the model of the gradients of the inputs `names`, for gradients of gradients.

        Its inputs are the inputs of this model, then the cotangents of the float outputs.

        Raises:
            RuntimeError: a node of the model draws random numbers, which a second pass would draw
                anew.
        """

        def build() -> ModelProto:
            self._refuse_random_nodes("gradients of gradients")
            return onnx_derivative(self.proto, [], names)

        return build_once(self._derived, ("gradient", *names), build)

    def tangent_model(self, names: Sequence[str]) -> ModelProto:
        """Return the model of the outputs, then of the tangents of the float outputs.

        Its inputs are the inputs of this model, then the tangents of the inputs `names`.

        Raises:
            RuntimeError: a node of the model draws random numbers, which the tangents would draw
                anew.
        """

        def build() -> ModelProto:
            self._refuse_random_nodes("tangents")
            return jvp(self.proto, [], names)

        return build_once(self._derived, ("tangent", *names), build)

    def _refuse_random_nodes(self, what: str) -> None:
        """Raise `RuntimeError` if a node draws random numbers, which `what` would draw anew."""
        if (node := _first_random_node(self.proto)) is not None:
            at = f"node {node.name!r}, output {node.outputs[0].name!r}"
            raise RuntimeError(
                f"{node.op_type} ({at}) draws at random: {what} would belong to another draw; "
                "export the model in inference mode"
            )

    def _build_pass_models(self, names: list[str]) -> PassModels:
        """Return new models of both passes, for gradients of the inputs `names`."""
        try:
            parts = partition(self.proto, [], names, self.recompute) if names else None
        except ValueError:
            if not _has_constant_gradients(self.proto, names):
                raise
            parts = None
        if parts is None:
            return PassModels(self.proto, None, [], [], [], [])
        names = [name for name in names if name in parts.gradients]
        outputs = [y.name for y in parts.forward.graph.output]
        saved = [outputs.index(tensor.name) for tensor in parts.saved]
        readable = [*self.inputs, *(outputs[i] for i in saved), *parts.cotangents.values()]
        reads = [readable.index(x.name) for x in parts.backward.graph.input]
        indices = [self.inputs.index(name) for name in names]
        return PassModels(parts.forward, parts.backward, names, indices, saved, reads)


def build_once(built: dict[Any, V], key: Any, build: Callable[[], V]) -> V:
    """Return `built[key]`; if it is missing, store `build()` there, once even among
    several threads.
    """
    if key not in built:
        with _LOCK:
            if key not in built:
                built[key] = build()
    return built[key]


def _has_constant_gradients(proto: ModelProto, names: list[str]) -> bool:
    """Return whether the gradients w.r.t. the inputs `names` are independent of all cotangents."""
    model = prepare(proto)
    graph, op = model.graph, Emit(model.graph)
    cotangents = {y: ir.Value(type=y.type, shape=y.shape) for y in graph.outputs if is_real(y)}
    gradients = sweep(op, cotangents, [x for x in graph.inputs if x.name in names])
    graph.outputs[:] = list(gradients.values())
    tidy(model)
    return not any(g.uses() or g in graph.outputs for g in cotangents.values())


def _first_random_node(proto: ModelProto) -> ir.Node | None:
    """Return the first node that draws random numbers; None for a deterministic model."""
    for node in all_nodes(ir.from_proto(proto).graph):
        if node.op_type == "Dropout":
            mode = node.inputs[2] if len(node.inputs) > 2 else None
            training = None if mode is None else constant(mode)
            if mode is not None and (training is None or training.any()):
                return node
        elif not node.domain and node.op_type in RANDOM:
            return node
    return None
