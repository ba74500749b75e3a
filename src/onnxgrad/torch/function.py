"""A graph as a function of PyTorch: onnxruntime computes it, and its gradients of every order.

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
_KINDS = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL"
DTYPES: dict[ir.DataType, torch.dtype] = {  # PyTorch's names are those of numpy
    kind: getattr(torch, kind.numpy().name) for kind in (ir.DataType[n] for n in _KINDS.split())
}
# multiply-adds of a forward pass per thread; fewer threads pay than in a training loop that
# onnxruntime runs, as its threads sleep while PyTorch computes
_WORK_PER_THREAD = 1e7
_LOCK = threading.RLock()  # so that each session and graph is built once
_OPTIONS = ort.RunOptions()
# onnxruntime 1.32 reads booleans by DLPack; before, a flag said which bytes are booleans
_DLPACK_HAS_BOOLS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)


class Session:
    """Runs a model on tensors of one device, in the order of its inputs and outputs."""

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
        """Return the outputs, which own their memory."""
        feeds, fetches = OrtValueVector(), OrtValueVector()
        feeds.reserve(len(tensors))
        for t in tensors:
            _append(feeds, t)
        if self._cuda is not None:  # onnxruntime uses its own stream
            torch.cuda.current_stream(self._cuda).synchronize()
        with escaping():
            self._run(_OPTIONS, self._inputs, feeds, self._outputs, fetches, self._devices)
        outputs = fetches.to_dlpacks(from_dlpack)
        for i in self._bools:
            outputs[i] = outputs[i].view(torch.bool)
        return outputs


def _append(feeds: OrtValueVector, t: Tensor) -> None:
    """Append a tensor to the inputs of a session, without a copy if it is contiguous."""
    if _DLPACK_HAS_BOOLS:
        feeds.push_back(to_dlpack(t.resolve_neg().contiguous()))  # DLPack ignores the negative bit
    elif t.dtype is torch.bool:
        feeds.push_back(to_dlpack(t.contiguous().view(torch.uint8)), True)
    else:
        feeds.push_back(to_dlpack(t.resolve_neg().contiguous()), False)


@dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass for the gradients of some inputs."""

    forward: Session
    backward: Session | None  # None: none of the inputs has a gradient
    names: list[str]  # of the inputs that have a gradient
    indices: list[int]  # of these inputs
    saved: list[int]  # indices of the outputs of the forward pass that are saved with its inputs
    reads: list[int]  # indices of what backward reads among inputs, saved tensors and cotangents


class Graph:
    """A function of tensors that PyTorch can differentiate, any number of times.

    `proto` is in the working dialect, with all its weights among the inputs.
    """

    def __init__(self, proto: ModelProto, device: torch.device, recompute: str) -> None:
        self.proto, self.device, self.recompute = proto, device, recompute
        self.inputs = [x.name for x in proto.graph.input]
        kinds = [ir.DataType(y.type.tensor_type.elem_type) for y in proto.graph.output]
        self.outputs = len(kinds)
        self.real = [i for i, t in enumerate(kinds) if t.is_floating_point()]
        self._work = count_multiply_adds(ir.from_proto(proto).graph)
        self._plain: dict[int, Session] = {}
        self._passes: dict[tuple[tuple[bool, ...], int], _Passes] = {}
        self._gradients: dict[tuple[str, ...], Graph] = {}

    def __call__(self, tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Return the outputs, which are differentiable if gradients are enabled."""
        threads = self._threads(tensors)
        if torch.is_grad_enabled():
            return _Function.apply(self, threads, *tensors)
        return self.plain(threads)(tensors)

    def _threads(self, tensors: Sequence[Tensor]) -> int:
        """Return the number of threads for these tensors, by a rule of thumb."""
        most = torch.get_num_threads()
        if most == 1 or not tensors or not tensors[0].ndim:
            return 1
        return max(1, min(most, int(self._work * len(tensors[0]) / _WORK_PER_THREAD)))

    def plain(self, threads: int) -> Session:
        """Return the session of the forward pass alone."""

        def build() -> Session:
            model = ir.from_proto(self.proto)
            to_native(model.graph, Target(Device.of(self.device), threads))
            return Session(ir.to_proto(model), self.device, threads)

        return _once(self._plain, threads, build)

    def passes(self, needed: tuple[bool, ...], threads: int) -> _Passes:
        """Return the passes for the gradients of the inputs that are `needed`."""
        return _once(self._passes, (needed, threads), lambda: self._build(needed, threads))

    def gradient(self, names: list[str]) -> Graph:
        """Return the graph of the gradient; its inputs are those of the graph, then cotangents."""

        def build() -> Graph:
            if (node := _random(self.proto)) is not None:
                at = f"node {node.name!r}, output {node.outputs[0].name!r}"
                raise RuntimeError(
                    f"{node.op_type} ({at}) draws at random: gradients of gradients would be those "
                    "of another draw"
                )
            proto = onnx_derivative(self.proto, [], names)
            return Graph(proto, self.device, self.recompute)

        return _once(self._gradients, tuple(names), build)

    def _build(self, needed: tuple[bool, ...], threads: int) -> _Passes:
        names = [name for name, is_needed in zip(self.inputs, needed, strict=True) if is_needed]
        try:
            parts = partition(self.proto, [], names, self.recompute) if names else None
        except ValueError:
            if not _has_zero_gradient(self.proto, names):
                raise
            parts = None
        if parts is None:
            return _Passes(self.plain(threads), None, [], [], [], [])
        names = [name for name in names if name in parts.gradients]
        outputs = [y.name for y in parts.forward.graph.output]
        saved = [outputs.index(tensor.name) for tensor in parts.saved]
        readable = [*self.inputs, *(outputs[i] for i in saved), *parts.cotangents.values()]
        reads = [readable.index(x.name) for x in parts.backward.graph.input]
        indices = [self.inputs.index(name) for name in names]
        forward, backward = (
            Session(p, self.device, threads) for p in (parts.forward, parts.backward)
        )
        return _Passes(forward, backward, names, indices, saved, reads)


def _once(built: dict[Any, V], key: Any, build: Callable[[], V]) -> V:
    """Return what is built for a key, once, also where several threads ask for it."""
    if key not in built:
        with _LOCK:
            if key not in built:
                built[key] = build()
    return built[key]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: Graph, threads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        passes = graph.passes(ctx.needs_input_grad[2:], threads)
        outputs = passes.forward(tensors)
        ctx.graph, ctx.passes = graph, passes
        if passes.backward is not None:
            # PyTorch checks saved tensors for changes in place, and passes them to its hooks
            ctx.save_for_backward(*tensors, *[outputs[i] for i in passes.saved])
        return tuple(outputs[: graph.outputs])

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        graph, passes = ctx.graph, ctx.passes
        result: list[Tensor | None] = [None] * (len(graph.inputs) + 2)
        if passes.backward is None:
            return tuple(result)
        cotangents = [grad_outputs[i] for i in graph.real]
        if torch.is_grad_enabled():  # for gradients of this gradient
            inputs = ctx.saved_tensors[: len(graph.inputs)]
            gradients = graph.gradient(passes.names)((*inputs, *cotangents))
        else:
            tensors = [*ctx.saved_tensors, *cotangents]
            gradients = passes.backward([tensors[i] for i in passes.reads])
        for i, gradient in zip(passes.indices, gradients, strict=True):
            result[i + 2] = gradient
        return tuple(result)


def _has_zero_gradient(proto: ModelProto, names: list[str]) -> bool:
    """Return whether no gradient of the inputs `names` depends on the cotangents of the outputs."""
    model = prepare(proto)
    graph, op = model.graph, Emit(model.graph)
    cotangents = {y: ir.Value(type=y.type, shape=y.shape) for y in graph.outputs if is_real(y)}
    gradients = sweep(op, cotangents, [x for x in graph.inputs if x.name in names])
    graph.outputs[:] = list(gradients.values())
    tidy(model)
    return not any(g.uses() or g in graph.outputs for g in cotangents.values())


def _random(proto: ModelProto) -> ir.Node | None:
    """Return a node whose results differ from run to run, if there is one."""
    for node in all_nodes(ir.from_proto(proto).graph):
        if node.op_type == "Dropout":
            mode = node.inputs[2] if len(node.inputs) > 2 else None
            training = None if mode is None else constant(mode)
            if mode is not None and (training is None or training.any()):
                return node
        elif not node.domain and node.op_type in RANDOM:
            return node
    return None
