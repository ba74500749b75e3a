"""`OnnxModule`: an ONNX model as a PyTorch module, run and differentiated by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from os import PathLike
from typing import Any, Self

import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_choice
from onnxgrad.errors import not_installed, printable, unknown

try:
    import torch
    from torch import Tensor, nn
except ImportError as e:
    raise not_installed("onnxgrad.torch", "torch", "torch") from e

from onnxgrad.autodiff.partition import RECOMPUTE
from onnxgrad.bridges.function_model import FunctionModel
from onnxgrad.model.read import ModelLike
from onnxgrad.model.write import save
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.values import to_numpy
from onnxgrad.torch.function import DTYPES, GraphFunction
from onnxgrad.torch.tensor_specs import GraphVariant, TensorSpec, shared_tensor

_FLOATS = {dtype: t for t, dtype in DTYPES.items() if t.is_floating_point()}
# bytes of constants from which the sessions share one copy; each session copies smaller ones into
# an order in which convolutions take a tenth less time
_SHARED_BYTES = 1 << 26


class OnnxModule(nn.Module):
    """An ONNX model as a PyTorch module: its weights are parameters, onnxruntime runs both passes.

    It works wherever modules do: with optimizers of `torch.optim`, `nn.Sequential`, `state_dict`,
    `torch.utils.checkpoint`, `DistributedDataParallel`, gradients of gradients. Tensors are shared
    by PyTorch and onnxruntime without copying, on the CPU and on CUDA (with onnxruntime-gpu).

    `state_dict` uses the names of the ONNX model: weight `layer1.weight` is the parameter `weight`
    of the submodule `layer1`. Underscores are appended to a part of a name that PyTorch does not
    allow: an empty part, an attribute of every module such as `type`, or `a` if there is a weight
    `a.b` as well. `weight_names` maps the names of the model to the keys of `state_dict`.

    The graph computes in the dtype of the parameters: after `double()` its inputs and outputs are
    float64 instead of float32, as long as onnxruntime has the kernels. `train()` and `eval()` have
    no effect: the graph says whether Dropout and BatchNormalization train. A file for one row takes
    any number of rows if the graph proves that rows are independent.

    Gradients are computed only for inputs and parameters that require them: `requires_grad_(False)`
    saves time. The gradient of a tensor without a differentiable path to an output is None.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names and patterns of `fnmatch`, as "fc*", of the constants that become
            parameters; patterns choose among weights. None: the weights that
            `onnxgrad.trainable` selects by default. Other constants stay constants of the graph.
        recompute: which operators the backward pass computes again to save memory: "none", "cheap"
            or "all"; see `partition`.
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
        self._recompute = check_choice("recompute", recompute, RECOMPUTE)
        self._source = FunctionModel(model, trainable, freeze, _SHARED_BYTES)
        names, graph = self._source.weight_names, ir.from_proto(self._source.forward_model).graph
        specs = [TensorSpec.of("input", x) for x in graph.inputs]
        specs = specs[: len(specs) - len(self._source.constant_arrays)]
        self._inputs, weights = specs[: len(specs) - len(names)], specs[len(specs) - len(names) :]
        self._outputs = [TensorSpec.of("output", y) for y in graph.outputs]
        floats = (spec.dtype for spec in (*specs, *self._outputs) if spec.dtype in _FLOATS)
        # says device and dtype of a module without parameters
        self._empty_tensor = torch.empty(0, dtype=next(floats, torch.float32))
        self._model_dtypes = tuple(w.dtype for w in weights) or (self._empty_tensor.dtype,)
        self._variants: dict[tuple, GraphVariant] = {}
        self._last_variant: GraphVariant | None = None
        self._getters: list[attrgetter] = []
        self._paths: list[tuple[list[str], str]] = []
        self.weight_names: dict[str, str] = {}
        self.input_names = [x.name for x in self._inputs]
        self.output_names = self._source.output_names
        # each attribute of the module is set before, as no weight may have its name
        self.weight_names = state_keys(names, self)
        keys = self.weight_names.values()
        self._getters = [attrgetter(key) for key in keys]
        self._paths = [(path, last) for *path, last in (key.split(".") for key in keys)]
        for name, array in self._source.weight_arrays().items():
            weight = nn.Parameter(shared_tensor(array).clone())
            add_parameter(self, self.weight_names[name], weight)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs of the model as tensors.

        Args:
            *inputs: tensors in the order of `input_names`, on the device of the module; floats
                have the dtype of the parameters.
            **named: further tensors by the names of their inputs.

        Returns:
            The output, or a tuple of outputs if there are several.

        Raises:
            ValueError: inputs missing or unknown, or a tensor of another device, dtype or shape;
                parameters whose shape was changed, or that differ in device or dtype.
            TypeError: an input that is no tensor.
            ProviderError: the installed onnxruntime does not offer the device of the module.
            NoGradientRule: an input or a parameter requires a gradient, and an operator has no
                rule.
            RuntimeError: onnxruntime has no kernel for an operator in the dtype of the parameters.
        """
        if torch.compiler.is_compiling():  # the compiler cannot trace onnxruntime
            return torch.compiler.disable(self.forward)(*inputs, **named)
        if named or len(inputs) != len(self._inputs):
            inputs = self._ordered_inputs(inputs, named)
        weights = self._read_weights()
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            inputs = self._variant_of_weights(weights).cast(inputs)
        variant = self._last_variant
        if variant is None or variant.needs_check(inputs, weights):
            variant = self._checked_variant(inputs, weights)
        try:
            outputs = variant.run(inputs, weights)
        except Exception:  # onnxruntime checks dtypes and lengths, too; our errors say more
            checked = self._checked_variant(inputs, weights)
            if checked is variant:
                raise
            outputs = checked.run(inputs, weights)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def to_onnx(self, path: str | PathLike | None = None) -> ModelProto:
        """Return the ONNX model with the module's current weights, otherwise unchanged.

        Args:
            path: file to which the model is saved as well, by `onnxgrad.save`.
        """
        arrays = [to_numpy(get(self)) for get in self._getters]
        model = self._source.with_weights(dict(zip(self.weight_names, arrays, strict=True)))
        if path is not None:
            save(model, path)
        return model

    def extra_repr(self) -> str:
        """Return the inputs and outputs of the model as lines for `repr`."""
        groups = {"inputs": self._inputs, "outputs": self._outputs}
        return "\n".join(f"{kind}: {', '.join(map(str, ps))}" for kind, ps in groups.items())

    # -- methods of modules that PyTorch calls ------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to a device, or convert its weights to a dtype, as `nn.Module.to`.

        Raises:
            ProviderError: the installed onnxruntime does not offer the device; nothing is moved.
        """
        _check_device_provider(torch._C._nn._parse_to(*args, **kwargs)[0])
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a CUDA device; errors are as for `to`."""
        _check_device_provider(torch.device("cuda"))
        return super().cuda(device)

    def _apply(self, fn, recurse: bool = True) -> Self:
        like = fn(self._empty_tensor)
        _check_device_provider(like.device)
        super()._apply(fn, recurse)
        if (like.device, like.dtype) != (self._empty_tensor.device, self._empty_tensor.dtype):
            self._variants, self._last_variant = {}, None  # free the memory of the sessions
        self._empty_tensor = like
        return self

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        for key, get in zip(self.weight_names.values(), self._getters, strict=True):
            new, weight = state_dict.get(prefix + key), get(self)
            if isinstance(new, Tensor) and new.shape != weight.shape:
                raise RuntimeError(
                    f"size mismatch for {printable(prefix + key)}: the weight has shape "
                    f"{tuple(weight.shape)}, its new value {tuple(new.shape)}; no weight was "
                    "changed: load a state of this model"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_variants": {}, "_last_variant": None}  # sessions are built again

    # -- one forward pass ---------------------------------------------------------------------

    def _read_weights(self) -> list[Tensor]:
        """Return the parameters of the module in the order of `weight_names`."""
        weights = []
        try:
            for path, last in self._paths:  # this takes a third of the time of `attrgetter`
                module: nn.Module = self
                for part in path:
                    module = module._modules[part]  # type: ignore[assignment]
                weights.append(module._parameters[last])
        except KeyError:  # weights are parametrized, or the module is a replica
            return [get(self) for get in self._getters]
        return weights  # type: ignore[return-value]

    def _ordered_inputs(
        self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Return the inputs of a call, by position and by name, in the order of `input_names`."""
        names = self.input_names
        if len(inputs) > len(names):
            raise ValueError(
                f"the model takes {len(names)} inputs {names}, not {len(inputs)}: pass these"
            )
        tensors = dict(zip(names, inputs, strict=False))
        for name, x in named.items():
            if name not in names:
                raise unknown("input", name, names)
            if name in tensors:
                raise ValueError(f"input {name!r} is given by position and by name: pass it once")
            tensors[name] = x
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(
                f"no tensor was passed for the inputs {missing}: pass a tensor for each"
            )
        return tuple(tensors[name] for name in names)

    def _checked_variant(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> GraphVariant:
        """Return the `GraphVariant` for the weights' dtypes and device; check all tensors."""
        variant = self._variant_of_weights(weights)
        variant.check(inputs, weights)
        self._last_variant = variant
        return variant

    def _variant_of_weights(self, weights: Sequence[Tensor]) -> GraphVariant:
        """Return the `GraphVariant` for the weights' dtypes and device, built once."""
        deciding = weights or [self._empty_tensor]
        device, dtypes = deciding[0].device, tuple(w.dtype for w in deciding)
        variant = self._variants.get((device, dtypes))
        if variant is None:
            variant = self._variants.setdefault(
                (device, dtypes), self._build_variant(device, dtypes)
            )
        return variant

    def _build_variant(self, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> GraphVariant:
        """Return a new `GraphVariant` for a device and the dtypes of the weights."""
        Device.of(device).check()
        if dtypes == self._model_dtypes:
            proto = self._source.forward_model
        elif len(set(dtypes)) > 1 or dtypes[0] not in _FLOATS:
            names = dict(zip(self.weight_names.values(), map(str, dtypes), strict=True))
            raise ValueError(
                "the weights must all have one float dtype, or the dtypes that they have in the "
                f"model, not {names}: convert the whole module with .to"
            )
        else:
            proto = self._source.in_precision(_FLOATS[dtypes[0]])
        constants = [shared_tensor(a).to(device) for a in self._source.constants_for(proto)]
        specs = [TensorSpec.of("input", x) for x in ir.from_proto(proto).graph.inputs]
        specs = specs[: len(specs) - len(constants)]
        inputs, weights = specs[: len(self._inputs)], specs[len(self._inputs) :]
        for spec in weights:
            spec.kind = "weight"
        graph = GraphFunction(proto, device, self._recompute)
        return GraphVariant(graph, inputs, weights, constants)


def _check_device_provider(device: torch.device | None) -> None:
    """Raise `ProviderError` if onnxruntime cannot run on `device`, unless it is None or "meta"."""
    if device is not None and device.type != "meta":
        Device.of(device).check()


def state_keys(names: list[str], root: nn.Module) -> dict[str, str]:
    """Return {weight: key in `state_dict`}, which is the name, with `_` added where PyTorch
    requires it.
    """
    used_keys, modules, keys = set[str](), set[str](), dict[str, str]()
    inner = nn.Module()

    def forbidden_part_index(parts: list[str]) -> int | None:
        """Return the index of the first part of a dotted key that PyTorch forbids; None if it
        allows all.
        """
        for i, part in enumerate(parts):
            path = ".".join(parts[: i + 1])
            used = path in used_keys or (i == len(parts) - 1 and path in modules)
            if not part or used or hasattr(inner if i else root, part):
                return i
        return None

    for change in (False, True):  # first the names that need no change
        for name in names:
            parts = name.split(".")
            while change and name not in keys and (i := forbidden_part_index(parts)) is not None:
                parts[i] += "_"
            if name not in keys and forbidden_part_index(parts) is None:
                keys[name] = ".".join(parts)
                used_keys.add(keys[name])
                modules.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return {name: keys[name] for name in names}


def add_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Register `parameter` under a dotted `key`, and create the submodules that the key names."""
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)
