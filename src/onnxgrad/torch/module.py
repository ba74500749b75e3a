"""`OnnxModule`: an ONNX model as a PyTorch module, run and differentiated by onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from os import PathLike
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import OrtValueVector

try:
    import torch
    from torch import Tensor, nn
except ImportError as e:
    raise ImportError("onnxgrad.torch needs PyTorch: pip install 'onnxgrad[torch]'") from e
if not hasattr(OrtValueVector, "to_dlpacks"):
    raise ImportError(
        "onnxgrad.torch needs onnxruntime 1.21 or later, the first that takes tensors by DLPack, "
        f"not {ort.__version__}: pip install 'onnxgrad[torch]'"
    )

from onnxgrad.autodiff.derivative import as_inputs
from onnxgrad.autodiff.partition import RECOMPUTE
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.errors import printable, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import set_precision
from onnxgrad.graph.shapes import is_real
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import tensor_behind, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.model.write import save
from onnxgrad.runtime.device import Device
from onnxgrad.torch.graph import DTYPES, Graph
from onnxgrad.torch.ports import Port, Variant
from onnxgrad.training.parameters.defaults import default_weights

_FLOATS = {dtype: t for t, dtype in DTYPES.items() if t.is_floating_point()}


class OnnxModule(nn.Module):
    """An ONNX model as a module: its weights are parameters, onnxruntime computes both passes.

    It goes wherever a module goes: optimizers of `torch.optim`, `nn.Sequential`, `state_dict`,
    `torch.utils.checkpoint`, `DistributedDataParallel`, gradients of gradients. Tensors pass
    between PyTorch and onnxruntime without copying, on the CPU and on CUDA (with onnxruntime-gpu).

    `state_dict` has the names of the ONNX model: weight `layer1.weight` is the parameter `weight`
    of the submodule `layer1`. Where PyTorch has no room for a name - a part of it is empty or an
    attribute of every module such as `type`, or `a` is a weight beside `a.b` - that part gets an
    underscore behind it, or as many as make it unique; `weight_names` has the two side by side.

    The dtype of the parameters decides in what the graph computes: after `double()` it takes and
    returns float64 where it did float32, as long as onnxruntime has the kernels. `train()` and
    `eval()` change nothing: a Dropout or a BatchNormalization does what the graph says.

    A gradient is computed for the inputs and parameters that require one, and only for these:
    `requires_grad_(False)` saves time. What no differentiable path leads to has None.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names of constants, or patterns such as `"fc*"` that choose among those of the
            default. None: those that play the role of a weight, see `onnxgrad.trainable`. What is
            not trainable is a constant of the graph.
        recompute: what is computed again in the backward pass to save memory: "none" for nothing,
            "cheap" for what is cheap, "all" for everything; see `partition`.

    Attributes:
        weight_names: `{name in the ONNX model: key of state_dict}`.
        input_names: names of the inputs, in order.
        output_names: names of the outputs, in order. Outputs that hold no numbers (maps, strings)
            are left out.

    Raises:
        ValueError: a name or pattern that fits no weight, a weight that is no float, an unknown
            `recompute`, an input of a type that PyTorch does not have, or no output that is left.
        ModelError: `model` cannot be read.
        ImportError: PyTorch is not installed, or onnxruntime is older than 1.21.

    Example:
        ```python
        import torch
        from onnxgrad.torch import OnnxModule

        module = OnnxModule("classifier.onnx", trainable=["fc.*"])
        optimizer = torch.optim.Adam(module.parameters())
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        module.to_onnx("trained.onnx")
        ```
    """

    def __init__(
        self,
        model: ModelLike,
        trainable: str | Sequence[str] | None = None,
        recompute: str = "cheap",
    ) -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise unknown("recompute", recompute, RECOMPUTE)
        self._memory = recompute
        self._model = read(model)
        if self._model is model:  # which may change later
            self._model = ModelProto()
            self._model.CopyFrom(model)
        names = _choose(self._model, trainable)
        prepared = _prepared(self._model, names)
        ports = [Port.of("input", x) for x in prepared.graph.inputs]
        self._inputs, weights = ports[: len(ports) - len(names)], ports[len(ports) - len(names) :]
        self._outputs = [Port.of("output", y) for y in prepared.graph.outputs]
        self._primal = _without_aliases(prepared)
        floats = (port.dtype for port in (*ports, *self._outputs) if port.dtype in _FLOATS)
        self._like = torch.empty(0, dtype=next(floats, torch.float32))  # for want of parameters
        self._native = tuple(w.dtype for w in weights) or (self._like.dtype,)
        self._variants: dict[tuple, Variant] = {}
        self._current: Variant | None = None
        self._getters: list[attrgetter] = []
        self._places: list[tuple[list[str], str]] = []
        self.weight_names: dict[str, str] = {}
        self.input_names = [x.name for x in self._inputs]
        self.output_names = [y.name for y in self._outputs]
        self.weight_names = _keys(names, self)
        keys = self.weight_names.values()
        self._getters = [attrgetter(key) for key in keys]
        self._places = [(path, last) for *path, last in (key.split(".") for key in keys)]
        arrays = {site.name: site.array for site in constants.constant_refs(self._model)}
        for name, key in self.weight_names.items():
            _register(self, key, nn.Parameter(_tensor(arrays[name]())))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the outputs of the model.

        Args:
            *inputs: tensors in the order of `input_names`, on the device of the module; floats are
                of the dtype that the parameters have.
            **named: further tensors by their names.

        Returns:
            The output, or a tuple of them if there are several.

        Raises:
            ValueError: inputs missing or unknown, or a tensor of another device, dtype, rank or
                fixed length; parameters that were changed in shape, or differ in device or dtype.
            TypeError: an input that is no tensor.
            ProviderError: the installed onnxruntime does not offer the device of the module.
            NoGradientRule: a gradient is wanted, and an operator on the way has no rule.
            RuntimeError: onnxruntime has no kernel for an operator in this dtype.
        """
        if torch.compiler.is_compiling():  # which cannot look into onnxruntime
            return torch.compiler.disable(self.forward)(*inputs, **named)
        if named or len(inputs) != len(self._inputs):
            inputs = self._ordered(inputs, named)
        weights = self._read_weights()
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            inputs = self._fitting(weights).cast(inputs)
        variant = self._current
        if variant is None or variant.doubtful(inputs, weights):
            variant = self._variant(inputs, weights)
        try:
            made = variant.graph((*inputs, *weights))
        except Exception:  # onnxruntime compares dtypes and lengths too, before it computes
            again = self._variant(inputs, weights)
            if again is variant:
                raise
            made = again.graph((*inputs, *weights))
        return made[0] if len(made) == 1 else tuple(made)

    def to_onnx(self, path: str | PathLike | None = None) -> ModelProto:
        """Return the model with the weights as they are now, everything else of it unchanged.

        Args:
            path: where to `onnxgrad.save` it too, with what that raises.
        """
        values = {
            name: _array(get(self))
            for name, get in zip(self.weight_names, self._getters, strict=True)
        }
        made = constants.replace(self._model, values)
        if path is not None:
            save(made, path)
        return made

    def extra_repr(self) -> str:
        """Describe the inputs and outputs."""
        groups = {"inputs": self._inputs, "outputs": self._outputs}
        return "\n".join(f"{kind}: {', '.join(map(str, ps))}" for kind, ps in groups.items())

    # -- what PyTorch does with modules -------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the module, as any other.

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
            self._variants, self._current = {}, None  # sessions hold memory
        self._like = like
        return self

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        for key, get in zip(self.weight_names.values(), self._getters, strict=True):
            given, own = state_dict.get(prefix + key), get(self)
            if isinstance(given, Tensor) and given.shape != own.shape:
                raise RuntimeError(
                    f"size mismatch for {printable(prefix + key)}: the weight has shape "
                    f"{tuple(own.shape)}, the given one {tuple(given.shape)}; no weight was changed"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_variants": {}, "_current": None}  # sessions are made anew

    # -- one forward pass ---------------------------------------------------------------------

    def _read_weights(self) -> list[Tensor]:
        found = []
        try:
            for path, last in self._places:  # as attributes, in a third of the time
                module: nn.Module = self
                for part in path:
                    module = module._modules[part]  # type: ignore[assignment]
                found.append(module._parameters[last])
        except KeyError:  # parametrized, or a replica
            return [get(self) for get in self._getters]
        return found  # type: ignore[return-value]

    def _ordered(self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs in order."""
        names = self.input_names
        if len(inputs) > len(names):
            raise ValueError(f"the model takes {len(names)} inputs {names}, not {len(inputs)}")
        found = dict(zip(names, inputs, strict=False))
        for name, x in named.items():
            if name not in names:
                raise unknown("input", name, names)
            if name in found:
                raise ValueError(f"input {name!r} is given twice: by place and by name")
            found[name] = x
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"no tensor for the inputs {missing}")
        return tuple(found[name] for name in names)

    def _variant(self, inputs: Sequence[Any], weights: Sequence[Tensor]) -> Variant:
        """Return the graph for the dtype and device of the weights, to which all tensors fit."""
        variant = self._fitting(weights)
        variant.check(inputs, weights)
        self._current = variant
        return variant

    def _fitting(self, weights: Sequence[Tensor]) -> Variant:
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
            held = dict(zip(self.weight_names.values(), map(str, dtypes), strict=True))
            raise ValueError(
                f"the weights must have the dtypes of the model, or all the same one: {held}"
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
    """Raise for a device on which onnxruntime cannot run; on meta nothing ever runs."""
    if device is not None and device.type != "meta":
        Device.of(device).check()


def _choose(proto: ModelProto, trainable: str | Sequence[str] | None) -> list[str]:
    """Return the names of the weights that are asked for."""
    default = default_weights(proto, announce=trainable is None, needed=False)
    if trainable is None:
        return default
    known = {
        site.name: site.read().data_type in constants.FLOATS
        for site in constants.constant_refs(proto)
    }
    chosen: dict[str, None] = {}
    for asked in [trainable] if isinstance(trainable, str) else trainable:
        found = [asked] if asked in known else [n for n in default if fnmatchcase(n, asked)]
        if not found:
            raise unknown("weight or pattern", asked, [n for n, real in known.items() if real])
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _prepared(proto: ModelProto, names: list[str]) -> ir.Model:
    """Return the model in the working dialect, its weights as inputs, tensors of numbers only."""
    model = prepare(proto)
    graph = model.graph
    as_inputs(proto, graph, names)
    graph.outputs[:] = [y for y in graph.outputs if y.dtype != ir.DataType.STRING]
    kept = {y.name for y in graph.outputs}
    dropped = [y.name for y in proto.graph.output if y.name not in kept]
    if dropped and not any(map(is_real, graph.outputs)):
        behind = [name for y in dropped if (name := tensor_behind(proto, y))]
        raise ValueError(
            f"no float tensor is left without the outputs {dropped}, which hold no numbers; "
            f"choose others by select_model_inputs_outputs{', such as ' if behind else ''}"
            f"{', '.join(map(repr, behind))}"
        )
    tidy(model)
    return model


def _without_aliases(model: ir.Model) -> ModelProto:
    """Return the model with no input or constant among its outputs: they would share memory."""
    graph, op = model.graph, Emit(model.graph)
    graph.outputs[:] = [
        y if y.producer() is not None else op.set_type_like(op.copy_of(y), y) for y in graph.outputs
    ]
    return to_proto(model)


def _keys(names: list[str], root: nn.Module) -> dict[str, str]:
    """Return the key of every weight in `state_dict`: its name, or the nearest that is possible."""
    taken, modules, made = set[str](), set[str](), dict[str, str]()
    inner = nn.Module()

    def impossible(parts: list[str]) -> int | None:
        """Return the first part that cannot stay."""
        for i, part in enumerate(parts):
            path = ".".join(parts[: i + 1])
            used = path in taken or (i == len(parts) - 1 and path in modules)
            if not part or used or hasattr(inner if i else root, part):
                return i
        return None

    for change in (False, True):  # who can keep its name comes first
        for name in names:
            parts = name.split(".")
            while change and name not in made and (i := impossible(parts)) is not None:
                parts[i] += "_"
            if name not in made and impossible(parts) is None:
                made[name] = ".".join(parts)
                taken.add(made[name])
                modules.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return {name: made[name] for name in names}


def _register(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Put a parameter where `key` says, into modules that are made for it."""
    *path, last = key.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # which numpy does not have
        return torch.tensor(array.astype(np.float32)).bfloat16()
    return torch.tensor(array)


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
