"""`GraphFunction`: a function for PyTorch's autograd, whose graphs onnxruntime runs.

Tensors are exchanged with onnxruntime by DLPack, without copies. Running a graph modifies no shared
state, so that threads may run it at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from onnxgrad.autodiff.derivative import onnx_derivative
from onnxgrad.autodiff.partition import partition
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import escaping, printable_lines
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.graph.traversal import all_nodes
from onnxgrad.native import Target, to_native
from onnxgrad.operators import RANDOM
from onnxgrad.operators.shapes import constant, is_real
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import count_multiply_adds, load_session

V = TypeVar("V")
_NAMES = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL"
DTYPES: dict[ir.DataType, torch.dtype] = {  # PyTorch and numpy have the same names of dtypes
    kind: getattr(torch, kind.numpy().name) for kind in (ir.DataType[n] for n in _NAMES.split())
}
# multiply-adds of a forward pass per thread; fewer threads pay than in a training loop that
# onnxruntime runs, as its threads sleep while PyTorch computes
_WORK_PER_THREAD = 1e7
_LOCK = threading.RLock()  # so that each session and graph is built once
_OPTIONS = ort.RunOptions()
# onnxruntime 1.32 reads booleans by DLPack; before, a flag said which bytes are booleans
_DLPACK_HAS_BOOLS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)


class Session:
    """Runs an ONNX model on PyTorch tensors of one device, in the order of the model's inputs."""

    def __init__(self, proto: ModelProto, device: torch.device, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        # between two runs, leave the cores to PyTorch
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        ort_device = Device.of(device)
        providers = ort_device.providers
        try:
            session = load_session(proto, options, providers=providers)
        except Exception as e:  # onnxruntime's errors have no common base
            raise RuntimeError(
                f"onnxruntime cannot run the graph on {device}: {printable_lines(e)}"
            ) from e
        self._run = session.run_with_ortvaluevector
        self._inputs = [x.name for x in proto.graph.input]
        self._outputs = [y.name for y in proto.graph.output]
        self._devices = [ort.OrtDevice.make(ort_device.kind, ort_device.index)._get_c_device()]
        self._devices *= len(self._outputs)
        kinds = [y.type.tensor_type.elem_type for y in proto.graph.output]
        self._bools = [i for i, kind in enumerate(kinds) if kind == ir.DataType.BOOL]
        self._cuda = device if device.type == "cuda" else None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the model's outputs for the inputs `tensors`, as tensors that own memory."""
        feeds, fetches = OrtValueVector(), OrtValueVector()
        feeds.reserve(len(tensors))
        for t in tensors:
            _append_input(feeds, t)
        if self._cuda is not None:  # onnxruntime uses its own stream
            torch.cuda.current_stream(self._cuda).synchronize()
        with escaping():
            self._run(_OPTIONS, self._inputs, feeds, self._outputs, fetches, self._devices)
        outputs = fetches.to_dlpacks(from_dlpack)
        for i in self._bools:
            outputs[i] = outputs[i].view(torch.bool)
        return outputs


def _append_input(feeds: OrtValueVector, t: Tensor) -> None:
    """Append the tensor `t` to `feeds`, without a copy if `t` is contiguous."""
    if _DLPACK_HAS_BOOLS:
        feeds.push_back(to_dlpack(t.resolve_neg().contiguous()))  # DLPack ignores the negative bit
    elif t.dtype is torch.bool:
        feeds.push_back(to_dlpack(t.contiguous().view(torch.uint8)), True)
    else:
        feeds.push_back(to_dlpack(t.resolve_neg().contiguous()), False)


@dataclass(frozen=True)
class _SessionPair:
    """The sessions of the forward pass, and of the backward pass for a given set of inputs.

    Attributes:
        forward: session of the forward pass.
        backward: session of the backward pass; None if none of the inputs has a gradient.
        names: names of the inputs that have a gradient.
        indices: indices of these inputs.
        saved: indices of the outputs of the forward pass that are saved with its inputs.
        reads: index of each input of the backward pass in the list of the inputs of the forward
            pass, then the saved outputs, then the cotangents.
    """

    forward: Session
    backward: Session | None
    names: list[str]
    indices: list[int]
    saved: list[int]
    reads: list[int]


class GraphFunction:
    """A function of PyTorch tensors, run by onnxruntime and differentiable to every order.

    Args:
        proto: a prepared model, with all its weights among the inputs.
        device: device of the tensors.
        recompute: see `partition`.
    """

    def __init__(self, proto: ModelProto, device: torch.device, recompute: str) -> None:
        self.proto, self.device, self.recompute = proto, device, recompute
        self.inputs = [x.name for x in proto.graph.input]
        kinds = [ir.DataType(y.type.tensor_type.elem_type) for y in proto.graph.output]
        self.outputs = len(kinds)
        self.float_outputs = [i for i, t in enumerate(kinds) if t.is_floating_point()]
        self._work = count_multiply_adds(ir.from_proto(proto).graph)
        self._forward_sessions: dict[int, Session] = {}
        self._session_pairs: dict[tuple[tuple[bool, ...], int], _SessionPair] = {}
        self._gradient_functions: dict[tuple[str, ...], GraphFunction] = {}

    def __call__(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Return the outputs for the inputs `tensors`, differentiable if autograd is enabled."""
        threads = torch.get_num_threads()  # at most; the first axis of the first tensor is the rows
        rows = len(tensors[0]) if tensors and tensors[0].ndim else 0
        threads = max(1, min(threads, int(self._work * rows / _WORK_PER_THREAD)))
        if torch.is_grad_enabled():
            return _AutogradFunction.apply(self, threads, *tensors)
        return self.forward_session(threads)(tensors)

    def forward_session(self, threads: int) -> Session:
        """Return the session of the forward pass alone, for calls without gradients."""

        def build_session() -> Session:
            model = ir.from_proto(self.proto)
            to_native(model.graph, Target(Device.of(self.device), threads))
            return Session(ir.to_proto(model), self.device, threads)

        return _build_once(self._forward_sessions, threads, build_session)

    def session_pair(self, needed: tuple[bool, ...], threads: int) -> _SessionPair:
        """Return sessions of the forward and backward pass; `needed` tells for each input if it
        needs a gradient.
        """
        return _build_once(
            self._session_pairs, (needed, threads), lambda: self._build_sessions(needed, threads)
        )

    def gradient(self, names: list[str]) -> GraphFunction:
        """Return the `GraphFunction` that computes the gradients of the inputs `names`.

        Its inputs are the inputs of this function, then the cotangents of the float outputs.
        """

        def build_gradient() -> GraphFunction:
            if (node := _first_random_node(self.proto)) is not None:
                at = f"node {node.name!r}, output {node.outputs[0].name!r}"
                raise RuntimeError(
                    f"{node.op_type} ({at}) draws at random: gradients of gradients would belong "
                    "to another draw; export the model in inference mode"
                )
            proto = onnx_derivative(self.proto, [], names)
            return GraphFunction(proto, self.device, self.recompute)

        return _build_once(self._gradient_functions, tuple(names), build_gradient)

    def _build_sessions(self, needed: tuple[bool, ...], threads: int) -> _SessionPair:
        """Return new sessions of the forward and the backward pass; see `session_pair`."""
        names = [name for name, is_needed in zip(self.inputs, needed, strict=True) if is_needed]
        try:
            parts = partition(self.proto, [], names, self.recompute) if names else None
        except ValueError:
            if not _has_constant_gradients(self.proto, names):
                raise
            parts = None
        if parts is None:
            return _SessionPair(self.forward_session(threads), None, [], [], [], [])
        names = [name for name in names if name in parts.gradients]
        outputs = [y.name for y in parts.forward.graph.output]
        saved = [outputs.index(tensor.name) for tensor in parts.saved]
        readable = [*self.inputs, *(outputs[i] for i in saved), *parts.cotangents.values()]
        reads = [readable.index(x.name) for x in parts.backward.graph.input]
        indices = [self.inputs.index(name) for name in names]
        forward, backward = (
            Session(p, self.device, threads) for p in (parts.forward, parts.backward)
        )
        return _SessionPair(forward, backward, names, indices, saved, reads)


def _build_once(built: dict[Any, V], key: Any, build: Callable[[], V]) -> V:
    """Return `built[key]`; if it is missing, store `build()` there, once even among
    several threads.
    """
    if key not in built:
        with _LOCK:
            if key not in built:
                built[key] = build()
    return built[key]


class _AutogradFunction(torch.autograd.Function):
    """The `torch.autograd.Function` that runs the sessions of a `GraphFunction`."""

    @staticmethod
    def forward(ctx, graph: GraphFunction, threads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        sessions = graph.session_pair(ctx.needs_input_grad[2:], threads)
        outputs = sessions.forward(tensors)
        ctx.graph, ctx.sessions = graph, sessions
        if sessions.backward is not None:
            # PyTorch checks saved tensors for changes in place, and passes them to its hooks
            ctx.save_for_backward(*tensors, *[outputs[i] for i in sessions.saved])
        return tuple(outputs[: graph.outputs])

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        graph, sessions = ctx.graph, ctx.sessions
        result: list[Tensor | None] = [None] * (len(graph.inputs) + 2)
        if sessions.backward is None:
            return tuple(result)
        cotangents = [grad_outputs[i] for i in graph.float_outputs]
        if torch.is_grad_enabled():  # for gradients of this gradient
            inputs = ctx.saved_tensors[: len(graph.inputs)]
            gradients = graph.gradient(sessions.names)((*inputs, *cotangents))
        else:
            tensors = [*ctx.saved_tensors, *cotangents]
            gradients = sessions.backward([tensors[i] for i in sessions.reads])
        for i, gradient in zip(sessions.indices, gradients, strict=True):
            result[i + 2] = gradient
        return tuple(result)


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
