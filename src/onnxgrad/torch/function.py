"""`GraphFunction`: a function for PyTorch's autograd, whose graphs onnxruntime runs.

Tensors are exchanged with onnxruntime by DLPack, without copies. Running a graph modifies no shared
state, so that threads may run it at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from onnxgrad.bridges.passes import ModelPasses, PassModels, build_once
from onnxgrad.errors import escaping, printable_lines
from onnxgrad.native import Target, to_native
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import count_multiply_adds, load_session

_NAMES = "FLOAT DOUBLE FLOAT16 BFLOAT16 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL"
DTYPES: dict[ir.DataType, torch.dtype] = {  # PyTorch and numpy have the same names of dtypes
    kind: getattr(torch, kind.numpy().name) for kind in (ir.DataType[n] for n in _NAMES.split())
}
# multiply-adds of a forward pass per thread; fewer threads pay than in a training loop that
# onnxruntime runs, as its threads sleep while PyTorch computes
_WORK_PER_THREAD = 1e7
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
        self._devices = [ort.OrtDevice.make(*ort_device.memory)._get_c_device()]
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


# sessions of the forward and the backward pass, and the models that they run
SessionPair: TypeAlias = "tuple[Session, Session | None, PassModels]"


class GraphFunction:
    """A function of PyTorch tensors, run by onnxruntime and differentiable to every order.

    Args:
        proto: a prepared model, with all its weights among the inputs.
        device: device of the tensors.
        recompute: see `partition`.
    """

    def __init__(self, proto: ModelProto, device: torch.device, recompute: str) -> None:
        self.passes, self.device = ModelPasses(proto, recompute), device
        self._work = count_multiply_adds(ir.from_proto(proto).graph)
        self._forward_sessions: dict[int, Session] = {}
        self._session_pairs: dict[tuple[tuple[bool, ...], int], SessionPair] = {}
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
            model = ir.from_proto(self.passes.proto)
            to_native(model.graph, Target(Device.of(self.device), threads))
            return Session(ir.to_proto(model), self.device, threads)

        return build_once(self._forward_sessions, threads, build_session)

    def session_pair(self, needed: tuple[bool, ...], threads: int) -> SessionPair:
        """Return sessions of the forward and backward pass; `needed` tells for each input if it
        needs a gradient.
        """

        def build_pair() -> SessionPair:
            models = self.passes.pass_models(needed)
            if models.backward is None:
                return self.forward_session(threads), None, models
            forward, backward = (
                Session(p, self.device, threads) for p in (models.forward, models.backward)
            )
            return forward, backward, models

        return build_once(self._session_pairs, (needed, threads), build_pair)

    def gradient(self, names: list[str]) -> GraphFunction:
        """Return the `GraphFunction` that computes the gradients of the inputs `names`.

        Its inputs are the inputs of this function, then the cotangents of the float outputs.
        """

        def build_gradient() -> GraphFunction:
            return GraphFunction(
                self.passes.gradient_model(names), self.device, self.passes.recompute
            )

        return build_once(self._gradient_functions, tuple(names), build_gradient)


class _AutogradFunction(torch.autograd.Function):
    """The `torch.autograd.Function` that runs the sessions of a `GraphFunction`."""

    @staticmethod
    def forward(ctx, graph: GraphFunction, threads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        forward, backward, models = graph.session_pair(ctx.needs_input_grad[2:], threads)
        outputs = forward(tensors)
        ctx.graph, ctx.session, ctx.models = graph, backward, models
        if backward is not None:
            # PyTorch checks saved tensors for changes in place, and passes them to its hooks
            ctx.save_for_backward(*tensors, *[outputs[i] for i in models.saved])
        return tuple(outputs[: graph.passes.outputs])

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        passes, models = ctx.graph.passes, ctx.models
        result: list[Tensor | None] = [None] * (len(passes.inputs) + 2)
        if ctx.session is None:
            return tuple(result)
        cotangents = [grad_outputs[i] for i in passes.float_outputs]
        if torch.is_grad_enabled():  # for gradients of this gradient
            inputs = ctx.saved_tensors[: len(passes.inputs)]
            gradients = ctx.graph.gradient(models.names)((*inputs, *cotangents))
        else:
            tensors = [*ctx.saved_tensors, *cotangents]
            gradients = ctx.session([tensors[i] for i in models.reads])
        for i, gradient in zip(models.indices, gradients, strict=True):
            result[i + 2] = gradient
        return tuple(result)
