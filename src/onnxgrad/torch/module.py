"""`OnnxModule`: an ONNX model as a PyTorch module, run and differentiated by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from os import PathLike
from typing import Any, Self

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.errors import not_installed, printable, unknown

try:
    import torch
    from torch import Tensor, nn
except ImportError as e:
    raise not_installed("onnxgrad.torch", "torch", "torch") from e

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.partition import RECOMPUTE
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import set_precision
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import tensor_behind, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import save
from onnxgrad.operators.shapes import dims, is_real
from onnxgrad.runtime.device import Device
from onnxgrad.torch.function import DTYPES, Graph
from onnxgrad.torch.keys import register, state_keys
from onnxgrad.torch.ports import Port, Variant
from onnxgrad.training.parameters.choice import default_weights, expand_patterns

_FLOATS = {dtype: t for t, dtype in DTYPES.items() if t.is_floating_point()}
_ROWS = "batch"  # the symbol of any number of rows


class OnnxModule(nn.Module):
    """An ONNX model as a PyTorch module: its weights are parameters, onnxruntime runs both passes.

    It works wherever modules do: with optimizers of `torch.optim`, `nn.Sequential`, `state_dict`,
    `torch.utils.checkpoint`, `DistributedDataParallel`, gradients of gradients. Tensors are shared
    by PyTorch and onnxruntime without copying, on the CPU and on CUDA (with onnxruntime-gpu).

    `state_dict` uses the names of the ONNX model: weight `layer1.weight` is the parameter `weight`
    of the submodule `layer1`. Underscores are appended to a part of a name that PyTorch does not
    allow: an empty one, an attribute of every module such as `type`, or `a` if there is a weight
    `a.b` as well. `weight_names` maps the names of the model to the keys of `state_dict`.

    The graph computes in the dtype of the parameters: after `double()` its inputs and outputs are
    float64 instead of float32, as long as onnxruntime has the kernels. `train()` and `eval()` have
    no effect: Dropout and BatchNormalization do what the graph says. A file of one row takes any
    number of rows, where these are proven to be independent.

    Gradients are computed only for inputs and parameters that require them: `requires_grad_(False)`
    saves time. Without a differentiable path to an output, the gradient is None.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names and patterns of `fnmatch`, as "fc*", of the constants that become
            parameters; patterns choose among weights, see `onnxgrad.trainable`. None: those that
            train by default. Other constants stay constants of the graph.
        recompute: what is computed again in the backward pass to save memory: "none" for nothing,
            "cheap" for cheap operators, "all" for everything; see `partition`.
        freeze: names and patterns of weights that stay constants, though `trainable` selects them.

    Attributes:
        weight_names: `{name in the ONNX model: key of state_dict}`.
        input_names: names of the inputs, in order.
        output_names: names of the outputs, in order. Outputs that hold no numbers (maps, strings)
            are left out.

    Raises:
        ValueError: a name or pattern that matches no weight, a weight that is no float, an unknown
            `recompute`, an input of a type that PyTorch does not have, or a model without any
            output of numbers.
        ModelError: `model` cannot be read.
        ImportError: PyTorch is not installed.

    Examples:
        >>> import onnx, torch
        >>> from onnxgrad.torch import OnnxModule
        >>> module = OnnxModule(onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }'''))
        >>> module(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> module.w.grad
        tensor([1., 2.])
        >>> torch.optim.SGD(module.parameters(), lr=0.5).step()
        >>> trained = module.to_onnx()
    """

    def __init__(
        self,
        model: ModelLike,
        trainable: str | Sequence[str] | None = None,
        recompute: str = "cheap",
        freeze: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise unknown("recompute", recompute, RECOMPUTE)
        self._memory = recompute
        self._model = read(model)
        if self._model is model:  # the caller may modify it later
            self._model = ModelProto()
            self._model.CopyFrom(model)
        names = _choose(self._model, trainable, freeze)
        prepared = _prepare(self._model, names)
        ports = [Port.of("input", x) for x in prepared.graph.inputs]
        self._inputs, weights = ports[: len(ports) - len(names)], ports[len(ports) - len(names) :]
        self._outputs = [Port.of("output", y) for y in prepared.graph.outputs]
        self._primal = _without_aliases(prepared)
        floats = (port.dtype for port in (*ports, *self._outputs) if port.dtype in _FLOATS)
        self._like = torch.empty(
            0, dtype=next(floats, torch.float32)
        )  # instead of parameters, if there are none
        self._native = tuple(w.dtype for w in weights) or (self._like.dtype,)
        self._variants: dict[tuple, Variant] = {}
        self._current: Variant | None = None
        self._getters: list[attrgetter] = []
        self._paths: list[tuple[list[str], str]] = []
        self.weight_names: dict[str, str] = {}
        self.input_names = [x.name for x in self._inputs]
        self.output_names = [y.name for y in self._outputs]
        self.weight_names = state_keys(names, self)
        keys = self.weight_names.values()
        self._getters = [attrgetter(key) for key in keys]
        self._paths = [(path, last) for *path, last in (key.split(".") for key in keys)]
        arrays = {ref.name: ref.array for ref in constants.constant_refs(self._model)}
        for name, key in self.weight_names.items():
            register(self, key, nn.Parameter(_tensor(arrays[name]())))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the outputs of the model.

        Args:
            *inputs: tensors in the order of `input_names`, on the device of the module; floats
                have the dtype of the parameters.
            **named: further tensors by their names.

        Returns:
            The output, or a tuple of them if there are several.

        Raises:
            ValueError: inputs missing or unknown, or a tensor of another device, dtype or shape;
                parameters whose shape was changed, or that differ in device or dtype.
            TypeError: an input that is no tensor.
            ProviderError: the installed onnxruntime does not offer the device of the module.
            NoGradientRule: an input or a parameter requires a gradient, and an operator has no
                rule.
            RuntimeError: onnxruntime has no kernel for an operator in this dtype.
        """
        if torch.compiler.is_compiling():  # the compiler cannot trace onnxruntime
            return torch.compiler.disable(self.forward)(*inputs, **named)
        if named or len(inputs) != len(self._inputs):
            inputs = self._in_order(inputs, named)
        weights = self._read_weights()
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            inputs = self._variant_for(weights).cast(inputs)
        variant = self._current
        if variant is None or variant.doubtful(inputs, weights):
            variant = self._variant(inputs, weights)
        try:
            outputs = variant.graph((*inputs, *weights))
        except Exception:  # onnxruntime checks dtypes and lengths, too: raise our own error if any
            checked = self._variant(inputs, weights)
            if checked is variant:
                raise
            outputs = checked.graph((*inputs, *weights))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def to_onnx(self, path: str | PathLike | None = None) -> ModelProto:
        """Return the model with the current weights, otherwise unchanged.

        Args:
            path: where to save it as well, by `onnxgrad.save`, which may raise.
        """
        values = {
            name: _array(get(self))
            for name, get in zip(self.weight_names, self._getters, strict=True)
        }
        model = constants.replace(self._model, values)
        if path is not None:
            save(model, path)
        return model

    def extra_repr(self) -> str:
        """Describe the inputs and outputs."""
        groups = {"inputs": self._inputs, "outputs": self._outputs}
        return "\n".join(f"{kind}: {', '.join(map(str, ps))}" for kind, ps in groups.items())

    # -- what PyTorch does with modules -------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the module.

        Raises:
            ProviderError: the installed onnxruntime does not offer the device; nothing is moved.
        """
        _require_provider(torch._C._nn._parse_to(*args, **kwargs)[0])
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module, as `to`."""
        _require_provider(torch.device("cuda"))
        return super().cuda(device)

    def _apply(self, fn, recurse: bool = True) -> Self:
        like = fn(self._like)
        _require_provider(like.device)
        super()._apply(fn, recurse)
        if (like.device, like.dtype) != (self._like.device, self._like.dtype):
            self._variants, self._current = {}, None  # free the memory of the sessions
        self._like = like
        return self

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        for key, get in zip(self.weight_names.values(), self._getters, strict=True):
            new, weight = state_dict.get(prefix + key), get(self)
            if isinstance(new, Tensor) and new.shape != weight.shape:
                raise RuntimeError(
                    f"size mismatch for {printable(prefix + key)}: the weight has shape "
                    f"{tuple(weight.shape)}, its new value {tuple(new.shape)}; no weight was "
                    "changed"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_variants": {}, "_current": None}  # sessions are built again

    # -- one forward pass ---------------------------------------------------------------------

    def _read_weights(self) -> list[Tensor]:
        weights = []
        try:
            for path, last in self._paths:  # three times as fast as by attributes
                module: nn.Module = self
                for part in path:
                    module = module._modules[part]  # type: ignore[assignment]
                weights.append(module._parameters[last])
        except KeyError:  # parametrized, or a replica
            return [get(self) for get in self._getters]
        return weights  # type: ignore[return-value]

    def _in_order(
        self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the inputs in order."""
        names = self.input_names
        if len(inputs) > len(names):
            raise ValueError(f"the model takes {len(names)} inputs {names}, not {len(inputs)}")
        tensors = dict(zip(names, inputs, strict=False))
        for name, x in named.items():
            if name not in names:
                raise unknown("input", name, names)
            if name in tensors:
                raise ValueError(f"input {name!r} is given twice: by position and by name")
            tensors[name] = x
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"no tensor for the inputs {missing}")
        return tuple(tensors[name] for name in names)

    def _variant(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> Variant:
        """Return the graph for the dtype and device of the weights; check all tensors."""
        variant = self._variant_for(weights)
        variant.check(inputs, weights)
        self._current = variant
        return variant

    def _variant_for(self, weights: Sequence[Tensor]) -> Variant:
        deciding = weights or [self._like]
        device, dtypes = deciding[0].device, tuple(w.dtype for w in deciding)
        variant = self._variants.get((device, dtypes))
        if variant is None:
            variant = self._variants.setdefault((device, dtypes), self._build(device, dtypes))
        return variant

    def _build(self, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Variant:
        Device.of(device).check()
        if dtypes == self._native:
            proto = self._primal
        elif len(set(dtypes)) > 1 or dtypes[0] not in _FLOATS:
            names = dict(zip(self.weight_names.values(), map(str, dtypes), strict=True))
            raise ValueError(
                f"the weights must have the dtypes of the model, or all the same one: {names}"
            )
        else:
            model = ir.from_proto(self._primal)
            set_precision(model, _FLOATS[dtypes[0]])
            proto = to_proto(model)
        ports = [Port.of("input", x) for x in ir.from_proto(proto).graph.inputs]
        inputs, weights = ports[: len(self._inputs)], ports[len(self._inputs) :]
        for port in weights:
            port.kind = "weight"
        return Variant(Graph(proto, device, self._memory), inputs, weights)


def _require_provider(device: torch.device | None) -> None:
    """Raise for a device on which onnxruntime cannot run; nothing runs on the device meta."""
    if device is not None and device.type != "meta":
        Device.of(device).check()


def _choose(
    proto: ModelProto, trainable: str | Sequence[str] | None, freeze: str | Sequence[str]
) -> list[str]:
    """Return the names of the weights that `trainable` selects, without those of `freeze`."""
    if trainable is None:
        names = default_weights(proto, announce=True, needed=False)
    else:
        names = expand_patterns(proto, trainable, "weight or pattern")
    frozen = set(expand_patterns(proto, freeze, "weight or pattern (freeze=)", weights_first=False))
    return [name for name in names if name not in frozen]


def _prepare(proto: ModelProto, names: list[str]) -> ir.Model:
    """Return the model in the working dialect, weights as inputs, without outputs of strings."""
    model = prepare(proto)
    firsts = [shape[0] for x in model.graph.inputs if (shape := dims(x))]
    one = 1 in firsts and all(isinstance(d, int) for d in firsts)
    freed = free_rows(model, _ROWS, {}) if one else None
    if freed is not None and all(_ROWS in (dims(y) or ()) for y in freed.graph.outputs):
        model = freed
    graph = model.graph
    as_inputs(proto, graph, names)
    graph.outputs[:] = [y for y in graph.outputs if y.dtype != ir.DataType.STRING]
    remaining = {y.name for y in graph.outputs}
    dropped = [y.name for y in proto.graph.output if y.name not in remaining]
    if dropped and not any(map(is_real, graph.outputs)):
        tensors = [name for y in dropped if (name := tensor_behind(proto, y))]
        raise ValueError(
            f"no float tensor is left without the outputs {dropped}, which hold no numbers; "
            "choose others by onnxgrad.graph.select_model_inputs_outputs"
            f"{', such as ' if tensors else ''}{', '.join(map(repr, tensors))}"
        )
    tidy(model)
    return model


def _without_aliases(model: ir.Model) -> ModelProto:
    """Return the model, with copies of inputs and constants that are outputs as well.

    Otherwise these outputs would share the memory of the inputs.
    """
    graph, op = model.graph, Emit(model.graph)
    graph.outputs[:] = [
        y if y.producer() is not None else op.set_type_like(op.copy_of(y), y) for y in graph.outputs
    ]
    return to_proto(model)


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # PyTorch does not convert it
        return torch.tensor(array.astype(np.float32)).bfloat16()
    return torch.tensor(array)


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
