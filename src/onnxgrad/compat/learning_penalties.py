"""Penalties on weights outside of the model, written into any graph or into small models."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto

from onnxgrad.autodiff.forms import finish
from onnxgrad.autodiff.reverse import sweep
from onnxgrad.compat.small_models import SmallFunctions, select_object
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.losses.in_graph import penalty_coefficients, weight_penalty
from onnxgrad.model.draft import Draft
from onnxgrad.runtime.values import copy_to_ortvalue, to_numpy


def penalty_loss_onnx(
    name: str,
    dtype: Any,
    l1: float | None = None,
    l2: float | None = None,
    existing_names: Iterable[str] | None = None,
) -> tuple[list[TensorProto], list[NodeProto]]:
    """Return the initializers and nodes that compute `l1 |w| + l2 w^2`, summed over a weight w.

    The last node computes the penalty, `penalty_<name>`, of shape (1, 1) and of the weight's dtype.
    The nodes are valid from opset 13 on.

    Args:
        name: name of the weight, a tensor of any shape.
        dtype: numpy dtype of the weight.
        l1: coefficient of the absolute values; None is 0.
        l2: coefficient of the squares; None is 0.
        existing_names: names of the graph. A new name that is among them gets a numeric suffix. If
            this is a set, the new names are added to it, so that it can be passed for the next
            weight.

    Raises:
        ValueError: both coefficients are zero.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> initializers, nodes = og.compat.penalty_loss_onnx("w", np.float32, l2=0.1)
        >>> [node.op_type for node in nodes]
        ['Reshape', 'ReduceSumSquare', 'Mul']
        >>> nodes[-1].output
        ['penalty_w']
    """
    weight = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))))
    graph = ir.Graph([weight], [], nodes=[], opset_imports={"": 18})
    op = Emit(graph, existing_names or ())
    with op:
        output = weight_penalty(op, weight, l1, l2)
    output.name = op.name(f"penalty_{name}")
    graph.outputs.append(output)
    tidy(ir.Model(graph, ir_version=8))
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    nodes = [ir.to_proto(node) for node in graph]
    for node in nodes:
        node.name = ""  # else nodes of two penalties would have the same names
    if isinstance(existing_names, MutableSet):
        existing_names |= {str(t.name) for t in tensors}
        existing_names |= {y for node in nodes for y in node.output}
    return [_tensor_without_raw_data(t) for t in tensors], nodes


def _tensor_without_raw_data(tensor: ir.TensorProtocol) -> TensorProto:
    """Return a TensorProto whose numbers are in `float_data` (or `double_data`, `int64_data`), not
    in `raw_data`.
    """
    proto = ir.to_proto(tensor)
    field = {1: "float_data", 7: "int64_data", 11: "double_data"}.get(proto.data_type)
    if field is not None:
        proto.ClearField("raw_data")
        getattr(proto, field).extend(tensor.numpy().ravel().tolist())
    return proto


class BaseLearningPenalty(SmallFunctions):
    """Base class of penalties on weights; a subclass overrides `penalty`.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> class UnitSum(og.compat.BaseLearningPenalty):
        ...     def penalty(self, op, name, w):
        ...         distance = op.ReduceSum(op.Reshape(w, [1, -1]), keepdims=1) - 1.0
        ...         return distance * distance
        >>> unit_sum = UnitSum().build_onnx_function()
        >>> w = np.float32([1, 2, 3])
        >>> print(unit_sum.penalty_loss(w), *unit_sum.penalty_gradient(w))
        25.0 [10. 10. 10.]
    """

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write the penalty of the weight `w`, which is added to the summed loss, inside of `with
        op:`.

        Returns:
            The penalty, of shape (1, 1) and of the weight's dtype, or None for no penalty.
        """
        raise NotImplementedError

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` if the penalty does not apply to weights called `names`."""

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
        names: Sequence[str] | None = None,
    ) -> BaseLearningPenalty:
        """Write the models that `penalty_loss` and `penalty_gradient` run; return `self`.

        `penalty_onnx_` has the weights as inputs, of any shape, and the output Y, their summed
        penalty, a scalar. `penalty_grad_onnx_` has the same inputs, and an output `W_grad` for
        every weight W that has a penalty. If no weight has a penalty, neither attribute is set.

        Args:
            opset: opset of the models, 14 or newer; None is 18.
            device: "cpu", "cuda" or "cuda:1", a GPU by its number; None is "cpu".
            n_tensors: number of weights, W0, W1, ...; not used with `names`.
            dtype: numpy dtype of the weights.
            names: names of the weights.

        Raises:
            ValueError: an invalid number, dtype, opset or name.
            ProviderError: the installed onnxruntime has none for `device`.
        """
        names = weight_names(n_tensors) if names is None else list(names)
        self.check(names)
        self._store_models(
            device,
            penalty_onnx_=self._penalty_model(names, False, opset, dtype),
            penalty_grad_onnx_=self._penalty_model(names, True, opset, dtype),
        )
        self._names, self._dtype = names, np.dtype(dtype)
        return self

    def _penalty_model(
        self, names: Sequence[str], gradient: bool, opset: int | None, dtype: Any
    ) -> ModelProto | None:
        """Return the model of the summed penalty, or of its gradients; None if no weight has a
        penalty.
        """
        draft, terms = Draft(type(self).__name__, opset, dtype), []
        op, weights = draft.op, [draft.input(name) for name in names]
        with op:
            for w in weights:
                term = self.penalty(op, str(w.name), w)
                if term is not None and type(self) is ElasticLearningPenalty:
                    # coefficients are constants of the model, also a coefficient of 0
                    term = weight_penalty(op, w, self.l1, self.l2, zeros=True)
                terms += [] if term is None else [term]
            if not terms:
                return None
            if not gradient:
                return draft.model({"Y": op.Reshape(op.total(terms), [])}, finish)
            gradients = sweep(op, {term: op.ones_like(term) for term in terms}, weights)
        return draft.model({f"{w.name}_grad": g for w, g in gradients.items()}, finish)

    def penalty_loss(self, *weights: Any) -> Any:
        """Return the summed penalty of the weights, a scalar.

        Args:
            *weights: arrays or OrtValues, in the number and order of `build_onnx_function`. The
                result is an OrtValue if the first weight is an OrtValue.

        Raises:
            EvaluationError: `build_onnx_function` was not called.
            ValueError: another number of weights.
        """
        feed, binds = self._feed_of_weights(weights)
        if "penalty_onnx_" in self.__dict__:
            return self._run_model("penalty_onnx_", feed, binds)[0]
        zero = np.zeros((), self._dtype)
        return copy_to_ortvalue(zero, self._device) if binds else zero

    def penalty_gradient(self, *weights: Any) -> list[Any]:
        """Return the gradient of the penalty w.r.t. each weight; None for a weight without penalty.

        Arguments and errors are as for `penalty_loss`.
        """
        feed, binds = self._feed_of_weights(weights)
        if "penalty_grad_onnx_" not in self.__dict__:
            return [None] * len(weights)
        results = self._run_model("penalty_grad_onnx_", feed, binds)
        outputs = [y.name for y in self._model_session("penalty_grad_onnx_").get_outputs()]
        gradients = dict(zip(outputs, results, strict=True))
        return [gradients.get(f"{name}_grad") for name in self._names]

    def _feed_of_weights(self, weights: Sequence[Any]) -> tuple[dict[str, Any], bool]:
        """Return ({name: array of the weight}, whether the caller passed OrtValues and gets
        OrtValues).
        """
        if "_names" not in self.__dict__:
            self._model_session("penalty_onnx_")  # raises `EvaluationError`
        if len(weights) != len(self._names):
            raise ValueError(
                f"{len(weights)} weights are passed, and the penalty was built for "
                f"{len(self._names)}, {self._names}: pass these, or call build_onnx_function again"
            )
        feed = {
            name: w if isinstance(w, ort.OrtValue) else to_numpy(w).astype(self._dtype, copy=False)
            for name, w in zip(self._names, weights, strict=True)
        }
        return feed, isinstance(weights[0], ort.OrtValue)

    @staticmethod
    def select(class_name: Any = None, **options: Any) -> BaseLearningPenalty:
        """Return the penalty that `class_name` is or names: an instance, class, name, None, number,
        or dictionary.

        Names: `elastic`, `l1l2`, and the classes; None and "" are `NoLearningPenalty`. A number is
        the l2 of all weights. A dictionary maps names of weights to a penalty,
        `{"l1": a, "l2": b}` or a number, their l2; other weights have no penalty.

        Raises:
            ValueError: an unknown name or option, or a penalty of zero in a dictionary.
        """
        if options and not isinstance(class_name, (str, type(None), type)):
            raise ValueError(
                f"{class_name!r} is not a name or a class: leave out {list(options)}, which are "
                "options of a named penalty"
            )
        selected = select_object(BaseLearningPenalty, "penalty", class_name, _CLASSES, options)
        if selected is not None:
            return selected
        if isinstance(class_name, Mapping):
            return PerWeightLearningPenalty(dict(class_name))
        if isinstance(class_name, (int, float, np.number)) and not isinstance(class_name, bool):
            return ElasticLearningPenalty(0.0, float(class_name))
        raise unknown("penalty", class_name, [name for name in _CLASSES if name])


class NoLearningPenalty(BaseLearningPenalty):
    """A penalty of zero for all weights.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> none = og.compat.NoLearningPenalty().build_onnx_function()
        >>> print(none.penalty_loss(np.ones(3)), none.penalty_gradient(np.ones(3)))
        0.0 [None]
    """

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Return None, as no weight has a penalty."""
        return None


@dataclass(eq=False, repr=False)
class ElasticLearningPenalty(BaseLearningPenalty):
    """l1 |w| + l2 w^2, summed over the weight w, with the gradient l1 sign(w) + 2 l2 w.

    Args:
        l1: factor of the absolute values, at least 0.
        l2: factor of the squares, at least 0.

    Examples:
        >>> import numpy as np, onnxgrad as og
        >>> penalty = og.compat.ElasticLearningPenalty(l1=1, l2=0.5).build_onnx_function()
        >>> w = np.float32([2, -4])
        >>> print(penalty.penalty_loss(w), *penalty.penalty_gradient(w))
        16.0 [ 3. -5.]
    """

    l1: float = 0.5
    l2: float = 0.5

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write l1 |w| + l2 w^2, summed over the weight w; return None if both
        coefficients are 0.
        """
        self.check([name])
        return weight_penalty(op, w, self.l1, self.l2) if self.l1 or self.l2 else None

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` if a coefficient is negative, infinite or NaN."""
        for key, value in (("l1", self.l1), ("l2", self.l2)):
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{key} must be a number of at least 0, not {value!r}")


@dataclass(eq=False, repr=False)
class PerWeightLearningPenalty(BaseLearningPenalty):
    """A separate penalty for each weight in a dict, and no penalty for other weights.

    Args:
        penalties: `{weight name: penalty}`, where a penalty is an instance, `{"l1": a, "l2": b}` or
            a number, its l2.

    Examples:
        >>> import numpy as np
        >>> from onnxgrad.compat import PerWeightLearningPenalty
        >>> penalty = PerWeightLearningPenalty({"w": {"l1": 1}, "b": 0.5})
        >>> penalty = penalty.build_onnx_function(names=["w", "b", "c"])
        >>> print(penalty.penalty_loss(np.float32([2]), np.float32([4]), np.float32([8])))
        10.0
    """

    penalties: Mapping[str, Any]

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write the penalty of the weight `name`; return None for a weight without penalty."""
        penalty = self._penalty_by_weight().get(name)
        return None if penalty is None else penalty.penalty(op, name, w)

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` if a penalty is 0, or belongs to a weight outside of `names`."""
        names = list(names)
        for name, penalty in self._penalty_by_weight().items():
            if name not in names:
                raise unknown("weight in penalty", name, names)
            penalty.check([name])

    def _penalty_by_weight(self) -> dict[str, BaseLearningPenalty]:
        """Return {name of a weight: its penalty}."""
        penalties = {}
        for name, setting in self.penalties.items():
            penalty = setting
            if not isinstance(setting, BaseLearningPenalty):
                penalty = ElasticLearningPenalty(**penalty_coefficients(name, setting))
                if not penalty.l1 and not penalty.l2:
                    raise ValueError(f"the penalty of {name!r} is zero: give l1 or l2 a value")
            penalties[name] = penalty
        return penalties


_CLASSES: dict[str | None, type[BaseLearningPenalty]] = {
    None: NoLearningPenalty,
    "": NoLearningPenalty,
    "NoLearningPenalty": NoLearningPenalty,
    "elastic": ElasticLearningPenalty,
    "l1l2": ElasticLearningPenalty,
    "ElasticLearningPenalty": ElasticLearningPenalty,
}


def weight_names(n_tensors: int) -> list[str]:
    """Return the names W0, W1, ... of `n_tensors` weights."""
    if operator.index(n_tensors) < 1:
        raise ValueError(f"n_tensors={n_tensors}: give the number of weights, at least 1")
    return [f"W{i}" for i in range(n_tensors)]
