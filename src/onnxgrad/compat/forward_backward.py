"""`OrtGradientForwardBackward`: the forward and the backward pass of a model, called separately."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.partition import partition
from onnxgrad.data.arrays import shape_mismatch
from onnxgrad.errors import EvaluationError, printable
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.surgery import select_model_inputs_outputs
from onnxgrad.model.write import write_models
from onnxgrad.operators.shapes import Dims, dims
from onnxgrad.reporting import logger, reporting
from onnxgrad.runtime.device import read_providers
from onnxgrad.runtime.session import load_session
from onnxgrad.runtime.values import Binding, copy_to_ortvalue, shape_of, to_numpy, wrap_ortvalue
from onnxgrad.training.parameters.choice import default_weights, expand_patterns

Tensor: TypeAlias = np.ndarray | ort.OrtValue
_NOT_PICKLED = ("sessions", "cls_type_")  # attributes that are not pickled, but built again
_GRAPH_NAMES = ("_trained_onnx", "_optimized_pre_grad_model", "_forward_onnx", "_backward_onnx")


class OrtGradientForwardBackward:
    """A model with its weights as inputs, whose forward and backward passes are called separately.

    The caller computes loss and update, in Python or in another framework.

    Args:
        onnx_model: model, serialized model or path; never modified.
        weights_to_train: names of the weights, or patterns as "layer4.*", in the order in which the
            weights are passed. None: the weights that train by default, see `trainable`.
        input_names: names of the inputs, in the order in which they are passed; None for the inputs
            of the model. They may be any tensors of the graph (`select_model_inputs_outputs`).
        output_names: names of the outputs, in the order in which they are returned; None for the
            outputs of the model. They may be any tensors of the graph, too.
        class_name: name of the pair of passes in messages and names of files.
        sess_options: `onnxruntime.SessionOptions` of both sessions.
        providers: a device, as "cpu" or "cuda:1", or execution providers as onnxruntime takes
            them: a list of names or of pairs (name, options). None is the CPU.
        provider_options: options of a list of names, a dict for each.
        run_options: `onnxruntime.RunOptions` of every call.
        graph_builder_config: must be None; in onnxruntime-training it configured the gradients.
        device_index: number of the GPU, if neither `providers` nor their options contain it.
        enable_logging: report every call through `logging`, to stderr if it is not configured.
        debug: raise `EvaluationError` for NaN and infinity in the results of the passes.

    Attributes:
        input_names: names of the inputs, in the order in which they are passed.
        weights_to_train: names of the weights, in the order in which they are passed.
        output_names: names of the outputs, in the order in which they are returned.
        partition: the forward and the backward model, `onnxgrad.graph.Partition`.
        cls_type_: the class of the objects that `new_instance` returns; it has the graphs of
            `save_onnx_graph` as attributes.

    Raises:
        ValueError: an unknown name, missing inputs, a `graph_builder_config`.
        ProviderError: a provider that the installed onnxruntime does not have, or numbers of GPUs
            that contradict each other.
        ModelError: `onnx_model` cannot be read.
        NoGradientRule: an operator between weights or inputs and an output has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> passes = og.compat.OrtGradientForwardBackward(model).new_instance()
        >>> [y] = passes.forward([np.float32([[1, 2]]), np.float32([2, 3])], training=True)
        >>> dx, dw = passes.backward([np.ones_like(y)])
        >>> y.tolist(), dx.tolist(), dw.tolist()
        ([[2.0, 6.0]], [[2.0, 3.0]], [1.0, 2.0])
    """

    def __init__(
        self,
        onnx_model: ModelLike,
        weights_to_train: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        class_name: str | None = None,
        sess_options: ort.SessionOptions | None = None,
        providers: str | Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        run_options: ort.RunOptions | None = None,
        graph_builder_config: None = None,
        device_index: int = 0,
        enable_logging: bool = False,
        debug: bool = False,
    ) -> None:
        if graph_builder_config is not None:
            raise ValueError("graph_builder_config has no effect in onnxgrad: do not pass it")
        self.providers, self.device = read_providers(
            providers, provider_options, device_index or None
        )
        self.onnx_model = read(onnx_model)
        if output_names is not None or input_names is not None:
            self.onnx_model = select_model_inputs_outputs(onnx_model, output_names, input_names)
        self.class_name = class_name or "OrtGradientForwardBackwardFunction"
        self.sess_options, self.run_options = sess_options, run_options
        self.enable_logging, self.debug = enable_logging, debug

        names = weights_to_train
        if names is None:
            names = default_weights(self.onnx_model, announce=True, needed=False)
        self.weights_to_train = expand_patterns(
            self.onnx_model, require_unique_names("weight", names), "weight"
        )
        self.partition = partition(self.onnx_model, self.weights_to_train)
        declared = {x.name: ir.from_proto(x) for x in self.partition.forward.graph.input}
        self.input_names = [name for name in declared if name not in self.weights_to_train]
        self.inputs = list(declared.values())
        tensors = [y for y in self.onnx_model.graph.output if not is_non_tensor(y)]
        self.output_names = [y.name for y in self.partition.forward.graph.output][: len(tensors)]
        self.read = [x.name for x in self.partition.backward.graph.input]

    def new_instance(self) -> OrtGradientForwardBackwardFunction:
        """Return an object with the methods `forward` and `backward`; `forward` stores the tensors
        that `backward` reads.
        """
        return self.cls_type_(self)

    @cached_property
    def cls_type_(self) -> type[OrtGradientForwardBackwardFunction]:
        """The class of the objects that `new_instance` returns; its attributes are the
        ONNX graphs.
        """
        name, bases = printable(self.class_name), (OrtGradientForwardBackwardFunction,)
        return type(name, bases, dict(self.graphs()))

    @cached_property
    def sessions(self) -> list[ort.InferenceSession]:
        """The onnxruntime sessions of the forward model and of the backward model."""
        models = self.partition.forward, self.partition.backward
        return [
            load_session(model, self.sess_options, providers=self.providers) for model in models
        ]

    def graphs(self) -> dict[str, ModelProto]:
        """Return {name: model} of the ONNX graphs that `save_onnx_graph` writes."""
        parts = self.partition
        outputs = [y.name for y in parts.forward.graph.output][: len(self.output_names)]
        evaluated = select_model_inputs_outputs(parts.forward, outputs)
        graphs = (parts.joint, evaluated, parts.forward, parts.backward)
        return dict(zip(_GRAPH_NAMES, graphs, strict=True))

    def save_onnx_graph(
        self,
        folder: str | os.PathLike | type[bytes],
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        """Write the ONNX graphs of the forward and the backward pass into `folder`, created if
        missing.

        The names of the files are `<prefix><class_name>.<name><suffix>.onnx`.

        Returns:
            `{name: path}`, or with `bytes` instead of a folder `{name: serialized model}`.
            `_trained_onnx` is the joint graph with its YieldOp, `_optimized_pre_grad_model` the
            model with its weights as inputs; `_forward_onnx` and `_backward_onnx` are the models
            that run.

        Raises:
            ValueError: `class_name` cannot be part of the name of a file.
            OSError: the folder cannot be written.
        """
        return write_models(self.graphs(), folder, f"{prefix or ''}{self.class_name}.", suffix)

    def check(
        self,
        what: str,
        value: Any,
        dtype: ir.DataType | None,
        shape: Dims | None,
        in_row: bool = False,
    ) -> Tensor:
        """Return `value` as an array or OrtValue that fits `dtype` and `shape`, or raise
        `ValueError`.

        Args:
            what: the name of the tensor in messages.
            value: an array or an OrtValue.
            dtype: the dtype that it must have.
            shape: the shape that it must have, up to axes of length one.
            in_row: whether all numbers may be in one row, (1, n).
        """
        if value is None:
            raise ValueError(f"{what} is None: pass an array or an OrtValue")
        if isinstance(value, ort.OrtValue):
            kind, given = session_dtype(value.data_type()), tuple(value.shape())
            self.device.check_holds(what, value)
        else:
            value = np.asarray(to_numpy(value), order="C")
            kind, given = ir.DataType.from_numpy(value.dtype), value.shape
        if kind != dtype:
            raise ValueError(f"{what} must hold {dtype}, not {kind}")
        if mismatch := shape_mismatch(given, shape):
            lengths = tuple(d for d in shape or () if isinstance(d, int))
            same = [n for n in given if n != 1] == [n for n in lengths if n != 1]
            same |= in_row and given == (1, math.prod(lengths))
            if not same or len(lengths) != len(shape or ()):
                raise ValueError(f"{what} {mismatch}")
            return self.reshape(value, lengths)
        return value

    def reshape(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return `value`, an array or OrtValue, reshaped to `shape`."""
        array = to_numpy(value).reshape(shape)
        return copy_to_ortvalue(array, self.device) if isinstance(value, ort.OrtValue) else array

    def results_like(
        self, which: str, names: Sequence[str], results: list[ort.OrtValue], inputs: Sequence[Any]
    ) -> list[Tensor]:
        """Return `results` as OrtValues if any of `inputs` is an OrtValue, else as arrays."""
        if self.enable_logging:
            with reporting(logging.INFO):
                logger.info("%s of %s: %s", which, self.class_name, ", ".join(names))
        if self.debug:
            for name, value in zip(names, results, strict=True):
                array = value.numpy()
                if array.dtype.kind == "f" and not np.isfinite(array).all():
                    raise EvaluationError(f"{which}: {name!r} holds NaN or infinity: check inputs")
        if any(isinstance(v, ort.OrtValue) for v in inputs):
            return results
        return [np.array(v.numpy()) for v in results]  # copies: backward may read the values

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_PICKLED}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"


class OrtGradientForwardBackwardFunction:
    """An object that runs the forward and the backward pass of an `OrtGradientForwardBackward`
    model.

    Threads cannot share an instance: each thread needs one.

    Examples:
        >>> import numpy as np
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,2] y) <float[2] w = {2.0, 3.0}> { y = Mul(x, w) }''')
        >>> passes = og.compat.OrtGradientForwardBackward(model, ["w"]).new_instance()
        >>> x, w = np.ones((1, 2), np.float32), np.array([2, 3], np.float32)
        >>> [y] = passes.forward([x, w], training=True)
        >>> dx, dw = passes.backward([np.ones_like(x)])
        >>> dx.tolist(), dw.tolist()
        ([[2.0, 3.0]], [1.0, 1.0])
    """

    def __init__(self, parent: OrtGradientForwardBackward) -> None:
        self.parent = parent
        self._outputs: list[ort.OrtValue] | None = None  # of the last forward pass for training
        self._saved: dict[str, Tensor] | None = None  # inputs of its backward pass

    def forward(self, inputs: Sequence[Tensor], training: bool = False) -> list[Tensor]:
        """Return the outputs of the model for a list of inputs and weights.

        Args:
            inputs: the inputs of the model, then the weights, arrays or OrtValues; a weight may
                lack axes of length one. With `training`, do not modify them before the backward
                pass.
            training: save the tensors that the backward pass needs, in place of the tensors of the
                last call.

        Returns:
            The outputs, OrtValues if one of the inputs is an OrtValue, else arrays.

        Raises:
            ValueError: another number of inputs, or an input of another dtype, shape or device.
        """
        parent, names = self.parent, self.parent.output_names
        expected = [*parent.input_names, *parent.weights_to_train]
        if isinstance(inputs, Mapping):
            raise ValueError(f"forward takes a list of the inputs {expected}: pass no dict")
        inputs = [wrap_ortvalue(v) for v in inputs]
        if len(inputs) != len(expected):
            raise ValueError(
                f"forward takes {len(expected)} inputs {expected}, not {len(inputs)}: pass the "
                "inputs, then the weights"
            )
        feed = {
            str(x.name): parent.check(f"input {x.name!r}", value, x.dtype, dims(x))
            for x, value in zip(parent.inputs, inputs, strict=True)
        }
        saved = [t.name for t in parent.partition.saved if t.name not in names] if training else []
        results = self._session_bindings[0].run(feed, [*names, *saved], parent.run_options)
        if training:
            self._shapes = [shape_of(value) for value in inputs]
            values = feed | dict(zip([*names, *saved], results, strict=True))
            self._outputs = results[: len(names)]
            self._saved = {name: values[name] for name in parent.read if name in values}
        return parent.results_like("forward", names, results[: len(names)], inputs)

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients w.r.t. the inputs and the weights of the last `forward` call.

        Args:
            grad_outputs: the cotangent of each output, of its dtype and shape, or without its axes
                of length one, or all numbers in one row (1, n); None for zeros, and for an integer
                output.

        Returns:
            The gradient w.r.t. each input of the model, then each weight, in the shape that was
            passed to `forward`; None if there is no gradient. They are OrtValues if one of
            `grad_outputs` is an OrtValue, else arrays.

        Raises:
            EvaluationError: there was no forward pass for training, or its backward pass was
                called already.
            ValueError: another number of cotangents, or a cotangent of another shape, dtype or
                device.
        """
        parent, outputs, saved = self.parent, self._outputs, self._saved
        grad_outputs = [wrap_ortvalue(g) for g in grad_outputs]
        if outputs is None:
            raise EvaluationError("call forward(inputs, training=True) before backward")
        if saved is None:
            raise EvaluationError(
                "backward was called already for the last forward: call forward(inputs, "
                "training=True) again"
            )
        if len(grad_outputs) != len(outputs):
            raise ValueError(
                f"backward takes {len(outputs)} gradients, of {parent.output_names}, "
                f"not {len(grad_outputs)}: pass a gradient or None for each output"
            )
        feed = dict(saved)
        for name, y, g in zip(parent.output_names, outputs, grad_outputs, strict=True):
            dtype, shape = session_dtype(y.data_type()), tuple(y.shape())
            if g is not None:
                g = parent.check(f"gradient of {name!r}", g, dtype, shape, in_row=True)
            elif dtype is not None:
                g = np.zeros(shape, dtype.numpy())
            if name in parent.partition.cotangents:
                feed[parent.partition.cotangents[name]] = g
        names = [y.name for y in parent.partition.backward.graph.output]
        results = self._session_bindings[1].run(feed, names, parent.run_options)
        self._saved = None
        gradients = parent.results_like("backward", names, results, grad_outputs)
        by_name = dict(zip(names, gradients, strict=True))
        gradient_names = parent.partition.gradients
        found = [by_name.get(gradient_names.get(str(x.name), "")) for x in parent.inputs]
        return [
            g if g is None or shape_of(g) == shape else parent.reshape(g, shape)
            for g, shape in zip(found, self._shapes, strict=True)
        ]

    def save_onnx_graph(
        self,
        folder: str | os.PathLike | type[bytes],
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> dict[str, Any]:
        """Write the ONNX graphs of the forward and the backward pass into `folder`."""
        return self.parent.save_onnx_graph(folder, prefix, suffix)

    @cached_property
    def _session_bindings(self) -> list[Binding]:
        return [Binding(session, self.parent.device) for session in self.parent.sessions]

    def __reduce__(self) -> Any:
        return OrtGradientForwardBackward.new_instance, (self.parent,)

    def __repr__(self) -> str:
        parent = self.parent
        inputs = ", ".join(map(printable, [*parent.input_names, *parent.weights_to_train]))
        outputs = ", ".join(map(printable, parent.output_names))
        passes = f"{type(parent).__name__}({inputs} -> {outputs})"
        return f"{printable(parent.class_name)}({passes})"
