"""`FunctionModel`: a file as a function of its inputs and of the weights that are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.autodiff.derivative import make_weights_inputs
from onnxgrad.autodiff.primal.free_rows import free_rows
from onnxgrad.autodiff.primal.prepare import prepare
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.precision import converted_tensor, set_precision
from onnxgrad.graph.tidy import tidy
from onnxgrad.model import weights as constants
from onnxgrad.model.convert import source_tensor_name, to_proto
from onnxgrad.model.read import ModelLike, read
from onnxgrad.operators.shapes import dims, is_real
from onnxgrad.training.parameters.choice import default_weights, expand_patterns

_BATCH_SYMBOL = "batch"  # the dimension of any number of rows
_LARGE = 1 << 16  # bytes of a constant that sessions may share


class FunctionModel:
    """A prepared model whose chosen weights are inputs, for frameworks that own the weights.

    Args:
        model: model, serialized model or path; not modified.
        trainable: names and patterns of the constants that become inputs; None: the weights that
            `onnxgrad.trainable` selects by default.
        freeze: names and patterns of weights that stay constants, though `trainable` selects them.
        share_from: the bytes of large float constants from which these are inputs, too, so that the
            sessions of all passes read one copy. None: they stay constants.

    Attributes:
        model: a copy of the file, as the user gave it.
        weight_names: names of the weights, in the order of the graph's inputs.
        output_names: names of the outputs that hold numbers, in the order of the graph's outputs.
        constant_arrays: the constants that are inputs because of `share_from`, by name.
        forward_model: the prepared model: its inputs are the inputs of the file, the weights, then
            the constants of `constant_arrays`.
    """

    def __init__(
        self,
        model: ModelLike,
        trainable: str | Sequence[str] | None = None,
        freeze: str | Sequence[str] = (),
        share_from: int | None = None,
    ) -> None:
        self.model = read(model)
        if self.model is model:  # the caller may modify it later
            self.model = ModelProto()
            self.model.CopyFrom(model)
        self.weight_names = _trainable_names(self.model, trainable, freeze)
        prepared = _prepared_model(self.model, self.weight_names)
        self.output_names = [str(y.name) for y in prepared.graph.outputs]
        self.constant_arrays: dict[str, np.ndarray] = {}
        if share_from is not None:
            self.constant_arrays = _make_large_constants_inputs(prepared.graph, share_from)
        self.forward_model = _copy_aliased_outputs(prepared)

    def weight_arrays(self) -> dict[str, np.ndarray]:
        """Return the weights of the file, by name."""
        refs = {ref.name: ref for ref in constants.constant_refs(self.model)}
        return {name: refs[name].array() for name in self.weight_names}

    def in_precision(self, dtype: ir.DataType) -> ModelProto:
        """Return the forward model, which computes in the float type `dtype`."""
        model = ir.from_proto(self.forward_model)
        set_precision(model, dtype)
        return to_proto(model)

    def constants_for(self, proto: ModelProto) -> list[np.ndarray]:
        """Return the arrays of `constant_arrays` in the dtypes of the last inputs of `proto`, the
        forward model in any precision.
        """
        arrays = self.constant_arrays
        inputs = proto.graph.input[len(proto.graph.input) - len(arrays) :]
        kinds = [ir.DataType(x.type.tensor_type.elem_type) for x in inputs]
        pairs = zip(arrays.values(), kinds, strict=True)
        return [a if a.dtype == t.numpy() else converted_tensor(a, t).numpy() for a, t in pairs]

    def with_weights(self, arrays: Mapping[str, np.ndarray]) -> ModelProto:
        """Return the file with new weights, otherwise unchanged."""
        return constants.replace_constants(self.model, dict(arrays))


def _trainable_names(
    proto: ModelProto, trainable: str | Sequence[str] | None, freeze: str | Sequence[str]
) -> list[str]:
    """Return the names of the weights that `trainable` selects and `freeze` does not."""
    if trainable is None:
        names = default_weights(proto, announce=True, needed=False)
    else:
        names = expand_patterns(proto, trainable, "weight or pattern")
    frozen = set(expand_patterns(proto, freeze, "weight or pattern (freeze=)", weights_first=False))
    return [name for name in names if name not in frozen]


def _prepared_model(proto: ModelProto, names: list[str]) -> ir.Model:
    """Return the model prepared for autograd: the weights `names` are inputs, string outputs are
    removed.
    """
    model = prepare(proto)
    firsts = [shape[0] for x in model.graph.inputs if (shape := dims(x))]
    one = 1 in firsts and all(isinstance(d, int) for d in firsts)
    freed = free_rows(model, _BATCH_SYMBOL, {}) if one else None
    if freed is not None and all(_BATCH_SYMBOL in (dims(y) or ()) for y in freed.graph.outputs):
        model = freed
    graph = model.graph
    make_weights_inputs(proto, graph, names)
    graph.outputs[:] = [y for y in graph.outputs if y.dtype != ir.DataType.STRING]
    remaining = {y.name for y in graph.outputs}
    dropped = [y.name for y in proto.graph.output if y.name not in remaining]
    if dropped and not any(map(is_real, graph.outputs)):
        tensors = [name for y in dropped if (name := source_tensor_name(proto, y))]
        raise ValueError(
            f"no float tensor is left without the outputs {dropped}, which hold no numbers; "
            "choose other outputs by onnxgrad.graph.select_model_inputs_outputs"
            f"{', such as ' if tensors else ''}{', '.join(map(repr, tensors))}"
        )
    tidy(model)
    return model


def _make_large_constants_inputs(graph: ir.Graph, least: int) -> dict[str, np.ndarray]:
    """Turn the large float constants of a graph into inputs if they have `least` bytes in total;
    return their elements by name.
    """
    large = [
        (value, tensor)
        for value in graph.initializers.values()
        if is_real(value) and (tensor := value.const_value) is not None and tensor.nbytes > _LARGE
    ]
    if sum(tensor.nbytes for _, tensor in large) < least:
        return {}
    for value, _ in large:
        del graph.initializers[str(value.name)]
        value.const_value = None
        graph.inputs.append(value)
    return {str(value.name): tensor.numpy() for value, tensor in large}


def _copy_aliased_outputs(model: ir.Model) -> ModelProto:
    """Return the model, where each output that is an input or a constant is replaced by a copy.

    Otherwise these outputs would share the memory of the inputs.
    """
    graph, op = model.graph, Emit(model.graph)
    graph.outputs[:] = [
        y if y.producer() is not None else op.set_type_like(op.copy_of(y), y) for y in graph.outputs
    ]
    return to_proto(model)
