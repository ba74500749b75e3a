"""Penalties on weights: a |w| + b w^2, in a graph that has the weight, or in small ones."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, MutableSet, Sequence
from math import isfinite
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto

from onnxgrad.autodiff.reverse import sweep
from onnxgrad.errors import unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import tidy
from onnxgrad.model.draft import Draft
from onnxgrad.runtime.small_models import SmallFunctions
from onnxgrad.runtime.values import owned, to_numpy


def penalty_loss_onnx(
    name: str,
    dtype: Any,
    l1: float | None = None,
    l2: float | None = None,
    existing_names: Iterable[str] | None = None,
) -> tuple[list[TensorProto], list[NodeProto]]:
    """Return the initializers and nodes that compute `l1 |w| + l2 w^2`, summed, for a weight w.

    The last node computes the penalty, `penalty_<name>`, of shape (1, 1) and of the weight's dtype.
    They are valid from opset 13 on.

    Args:
        name: name of the weight, a tensor of any shape.
        dtype: its numpy dtype.
        l1: coefficient of the absolute values, None or 0 for none.
        l2: coefficient of the squares, None or 0 for none.
        existing_names: names that the graph already has. Those of the results and initializers
            are different, with a number at their end if need be. A set is updated with them, so
            that it can be passed on for the next weight.

    Raises:
        ValueError: both coefficients are zero.
    """
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    weight = ir.Value(name=name, type=kind)
    graph = ir.Graph([weight], [], nodes=[], opset_imports={"": 18})
    op = Emit(graph, existing_names or ())
    with op:
        output = penalty(op, weight, l1, l2)
    output.name = op.name(f"penalty_{name}")
    graph.outputs.append(output)
    tidy(ir.Model(graph, ir_version=8))
    tensors = [v.const_value for v in graph.initializers.values() if v.const_value is not None]
    nodes = [ir.to_proto(node) for node in graph]
    for node in nodes:
        node.name = ""  # or those of two penalties would have the same names
    if isinstance(existing_names, MutableSet):
        existing_names |= {str(t.name) for t in tensors}
        existing_names |= {y for node in nodes for y in node.output}
    return [ir.to_proto(t) for t in tensors], nodes


def penalty(op: Emit, w: ir.Value, l1: float | None, l2: float | None) -> ir.Value:
    """Write `l1 |w| + l2 w^2`, summed, of shape (1, 1)."""
    if not l1 and not l2:
        raise ValueError(f"the penalty of {w.name!r} is zero: give l1 or l2 a value")
    flat = op.Reshape(w, [1, -1])
    if flat.shape is None:
        flat.shape = ir.Shape([1, f"elements of {w.name}"])
    terms = []
    for factor, sizes in ((l1, op.Abs), (l2, lambda x: x * x)):
        if factor:
            summed = op.ReduceSum(sizes(flat), keepdims=1)
            summed.shape = ir.Shape([1, 1])
            terms.append(factor * summed)
    return op.total(terms)


def add_penalties(
    op: Emit, loss: ir.Value, penalties: Mapping[str, Any], values: Mapping[str, ir.Value]
) -> ir.Value:
    """Write `loss` plus the penalties of the named `values`, `{name: b}` or `{name: {l1, l2}}`."""
    floats = {n: v for n, v in values.items() if v.dtype and v.dtype.is_floating_point()}
    for name, given in penalties.items():
        if name not in floats:
            raise unknown("weight in penalty", name, floats)
        options = _options(name, given)
        added = penalty(op, floats[name], options.get("l1"), options.get("l2"))
        loss = loss + op.Cast(added, to=loss.dtype)
    return loss


def _options(name: str, given: Any) -> dict[str, Any]:
    """Return `{"l1": a, "l2": b}` for what is given for a weight: that, or a number, its l2."""
    options = dict(given) if isinstance(given, Mapping) else {"l2": given}
    for key in options:
        if key not in ("l1", "l2"):
            raise unknown(f"penalty of {name!r}", key, ["l1", "l2"])
    return options


class BaseLearningPenalty(SmallFunctions):
    """What every penalty offers; one of your own writes `penalty`."""

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write what is added to the loss, a sum over rows, for a weight; inside of `with op:`.

        Returns:
            The penalty, of shape (1, 1) and of the weight's dtype, or None for none.
        """
        raise NotImplementedError

    def check(self, names: Iterable[str]) -> None:
        """Raise if the penalty is wrong for weights of these names: by default, it never is."""

    def build_onnx_function(
        self,
        opset: int | None = None,
        device: str | None = None,
        n_tensors: int = 1,
        dtype: Any = np.float32,
        names: Sequence[str] | None = None,
    ) -> BaseLearningPenalty:
        """Write the models that `penalty_loss` and `penalty_gradient` run; returns `self`.

        `penalty_onnx_` has the weights as inputs, of any shape, and the output Y, their summed
        penalty, a scalar. `penalty_grad_onnx_` has the same inputs, and for every weight W that has
        a penalty the output `W_grad`. Neither is there if no weight has one.

        Args:
            opset: of the models, 14 to 26; None is 18.
            device: "cpu", "cuda" or "cuda:1", a GPU by its number; None is "cpu".
            n_tensors: the number of weights, if they are not named: W0, W1, ...
            dtype: numpy dtype of the weights.
            names: names of the weights.

        Raises:
            ValueError: a number, dtype, opset or name that cannot be.
            ProviderError: the installed onnxruntime has none for `device`.
        """
        names = weight_names(n_tensors) if names is None else list(names)
        self.check(names)
        for stale in ("penalty_onnx_", "penalty_grad_onnx_"):
            self.__dict__.pop(stale, None)
        models = {
            attribute: made
            for attribute, gradient in (("penalty_onnx_", False), ("penalty_grad_onnx_", True))
            if (made := penalty_onnx(self, names, gradient, opset, dtype)) is not None
        }
        self._keep(device, **models)
        self._names, self._dtype = names, np.dtype(dtype)
        return self

    def penalty_loss(self, *weights: Any) -> Any:
        """Return the summed penalty of the weights, a scalar.

        Args:
            *weights: arrays or OrtValues, as many as `build_onnx_function` was told, in that order.
                What is returned is of the kind of the first.

        Raises:
            EvaluationError: `build_onnx_function` was not called.
            ValueError: another number of weights.
        """
        feed, binds = self._feed(weights)
        if "penalty_onnx_" in self.__dict__:
            return self._run("penalty_onnx_", feed, binds)[0]
        zero = np.zeros((), self._dtype)
        return owned(zero, self._device) if binds else zero

    def penalty_gradient(self, *weights: Any) -> list[Any]:
        """Return the gradient of the penalty by each weight, of its shape; None where none is.

        Arguments and errors are those of `penalty_loss`.
        """
        feed, binds = self._feed(weights)
        if "penalty_grad_onnx_" not in self.__dict__:
            return [None] * len(weights)
        made = self._run("penalty_grad_onnx_", feed, binds)
        outputs = [y.name for y in self._session("penalty_grad_onnx_").get_outputs()]
        found = dict(zip(outputs, made, strict=True))
        return [found.get(f"{name}_grad") for name in self._names]

    def _feed(self, weights: Sequence[Any]) -> tuple[dict[str, Any], bool]:
        if "_names" not in self.__dict__:
            self._session("penalty_onnx_")  # raises
        if len(weights) != len(self._names):
            raise ValueError(
                f"{len(weights)} weights given, and built for {len(self._names)}: {self._names}"
            )
        feed = {
            name: w if isinstance(w, ort.OrtValue) else to_numpy(w).astype(self._dtype, copy=False)
            for name, w in zip(self._names, weights, strict=True)
        }
        return feed, isinstance(weights[0], ort.OrtValue)

    @staticmethod
    def select(class_name: Any = None, **options: Any) -> BaseLearningPenalty:
        """Return the penalty for an instance, a class, a name, None, a number, or a dictionary.

        Names: `elastic`, `l1l2`, and those of the classes; None and "" are `NoLearningPenalty`. A
        number is the l2 of all weights. A dictionary gives some weights, by name, a penalty,
        `{"l1": a, "l2": b}` or a number, their l2, and the others none.

        Raises:
            ValueError: an unknown name or option, or a penalty in a dictionary that is null.
        """
        made = _CLASSES.get(class_name) if isinstance(class_name, (str, type(None))) else class_name
        if isinstance(made, type) and issubclass(made, BaseLearningPenalty):
            valid = list(inspect.signature(made).parameters)
            for name in options:
                if name not in valid:
                    raise unknown(f"option of penalty {class_name!r}", name, valid)
            return made(**options)
        if options and not isinstance(class_name, str):
            raise ValueError(f"{class_name!r} is a penalty already: {list(options)} go with a name")
        if isinstance(class_name, BaseLearningPenalty):
            return class_name
        if isinstance(class_name, Mapping):
            return PerWeightLearningPenalty(dict(class_name))
        if isinstance(class_name, (int, float, np.number)) and not isinstance(class_name, bool):
            return ElasticLearningPenalty(0.0, float(class_name))
        raise unknown("penalty", class_name, [name for name in _CLASSES if name])


class NoLearningPenalty(BaseLearningPenalty):
    """No penalty."""

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write nothing."""
        return None


class ElasticLearningPenalty(BaseLearningPenalty):
    """a |w| + b w^2, summed over the weight, with the gradient a sign(w) + 2 b w.

    Args:
        l1: a, at least 0.
        l2: b, at least 0.
    """

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        self.l1 = l1
        self.l2 = l2

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write a |w| + b w^2, unless both are 0.

        Raises:
            ValueError: a coefficient that is negative or no number.
        """
        self.check([name])
        return penalty(op, w, self.l1, self.l2) if self.l1 or self.l2 else None

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` if a coefficient is negative or no number."""
        for key, value in (("l1", self.l1), ("l2", self.l2)):
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{key} must be a number of at least 0, not {value!r}")


class PerWeightLearningPenalty(BaseLearningPenalty):
    """A penalty of its own for each of some weights, and none for the others.

    Args:
        penalties: `{weight name: penalty}`, a penalty being an instance, `{"l1": a, "l2": b}` or a
            number, which is l2.
    """

    def __init__(self, penalties: Mapping[str, Any]) -> None:
        self.penalties = penalties

    def penalty(self, op: Any, name: str, w: ir.Value) -> ir.Value | None:
        """Write the penalty of the weight of that name, if it has one."""
        chosen = self._chosen().get(name)
        return None if chosen is None else chosen.penalty(op, name, w)

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` if a penalty is null, or is for a weight that is not among `names`."""
        names = list(names)
        for name, chosen in self._chosen().items():
            if name not in names:
                raise unknown("weight in penalty", name, names)
            chosen.check([name])

    def _chosen(self) -> dict[str, BaseLearningPenalty]:
        return {name: self._one(name, given) for name, given in self.penalties.items()}

    def _one(self, name: str, given: Any) -> BaseLearningPenalty:
        if isinstance(given, BaseLearningPenalty):
            return given
        options = {"l1": 0.0, "l2": 0.0} | _options(name, given)
        if not options["l1"] and not options["l2"]:
            raise ValueError(f"the penalty of {name!r} is zero: give l1 or l2 a value")
        return ElasticLearningPenalty(**options)


_CLASSES: dict[str | None, type[BaseLearningPenalty]] = {
    None: NoLearningPenalty,
    "": NoLearningPenalty,
    "NoLearningPenalty": NoLearningPenalty,
    "elastic": ElasticLearningPenalty,
    "l1l2": ElasticLearningPenalty,
    "ElasticLearningPenalty": ElasticLearningPenalty,
}


def weight_names(n_tensors: int) -> list[str]:
    """Return W0, W1, ...

    Raises:
        ValueError: there is none.
    """
    if operator.index(n_tensors) < 1:
        raise ValueError(f"n_tensors={n_tensors}: give the number of weights, at least 1")
    return [f"W{i}" for i in range(n_tensors)]


def penalty_onnx(
    kind: BaseLearningPenalty,
    names: Sequence[str],
    gradient: bool = False,
    opset: int | None = None,
    dtype: Any = np.float32,
) -> ModelProto | None:
    """Return the model of the summed penalty Y of weights, or of its gradients; None for none."""
    draft = Draft(type(kind).__name__, opset, dtype)
    op, weights = draft.op, [draft.input(name) for name in names]
    with op:
        each = [kind.penalty(op, n, w) for n, w in zip(names, weights, strict=True)]
        terms = [term for term in each if term is not None]
        if not terms:
            return None
        if not gradient:
            return draft.model({"Y": op.Reshape(op.total(terms), [])})
        found = sweep(op, {term: op.ones_like(term) for term in terms}, weights)
    return draft.model({f"{w.name}_grad": g for w, g in found.items()})
