"""Which training rows made a model what it predicts for other rows: TracIn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.higher import jvp, vjp
from onnxgrad.errors import unknown
from onnxgrad.explain.piece import Piece, checked_device
from onnxgrad.explain.user_inputs import Arrays, Inputs, checked_feed, rows_of
from onnxgrad.losses.in_graph import add_loss_output
from onnxgrad.losses.row_losses import unreduced_onnx_loss
from onnxgrad.losses.spec import Formula
from onnxgrad.model.convert import to_ir
from onnxgrad.model.feeds import names_without_default
from onnxgrad.model.read import ModelLike, require_unique_names
from onnxgrad.model.scopes import free_name
from onnxgrad.model.surgery import drop_unused_inputs
from onnxgrad.model.traversal import value_names as all_names
from onnxgrad.model.weights import constant_refs
from onnxgrad.operators.shapes import is_real
from onnxgrad.runtime.predictor import Predictor
from onnxgrad.runtime.session import count_multiply_adds
from onnxgrad.training.parameters.choice import trainable
from onnxgrad.training.parameters.equal_constants import separate_merged

Checkpoint = ModelLike | Mapping[str, Any]


def influence(
    model: ModelLike,
    train: Inputs,
    train_labels: Any,
    test: Inputs,
    test_labels: Any,
    loss: str | Formula = "squared_error",
    *,
    checkpoints: Sequence[Checkpoint] | None = None,
    learning_rates: Sequence[float] | float = 1.0,
    weights: Sequence[str] | None = None,
    output: str | None = None,
    device: Any = None,
    batch_size: int = 256,
    **options: Any,
) -> np.ndarray:
    """Return how much a step on each training row lowers the loss of each test row: TracIn.

    The sum over checkpoints of the learning rate times the product of two gradients with respect to
    the weights: of the loss of a training row, and of a test row (Pruthi et al. 2020,
    arXiv:2002.08484).

    Args:
        model: model, serialized model or path, never modified; its output is the prediction.
        train: training rows, the array of the only input or `{name: array}`.
        train_labels: their labels, as `add_loss_output` takes them.
        test: rows whose loss is explained.
        test_labels: as `train_labels`.
        loss: a key of `onnxgrad.losses.LOSSES`, or a function; see `add_loss_output`.
        checkpoints: models, or `{weight: array}` with all `weights`. None: `model` itself.
        learning_rates: of the steps at the checkpoints: one each, or one for all.
        weights: names of weights. None: those that train by default, see `trainable`.
        output: index or name of the prediction; see `add_loss_output`.
        device: "cpu", "cuda" or "cuda:1"; None is the CPU.
        batch_size: training rows that run at once; 1 where rows are not proven to be independent.
        **options: options of the loss.

    Returns:
        float64 of shape (test rows, training rows).

    Raises:
        ValueError: nodes in training mode, a checkpoint of other weights, labels of another number
            of rows, a model of a fixed number of rows, or no path from the weights to the loss.
        NoGradientRule: an operator on a path has no rule.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,1] x) => (float[N,1] y) <float[1,1] w = {1.0}> { y = MatMul(x, w) }''')
        >>> x, label = np.float32([[1], [2]]), np.float32([[0], [4]])
        >>> og.explain.influence(model, x, label, x[:1], label[:1]).tolist()
        [[4.0, -16.0]]
    """
    losses = _LossesOfRows(model, weights, loss, output, device, batch_size, options)
    states = [losses.state(c) for c in checkpoints or [model]]
    explained, rows = losses.rows(test, test_labels), losses.rows(train, train_labels)
    products = [losses.products(s, rows, losses.gradients(s, explained)) for s in states]
    return np.tensordot(_rates(learning_rates, len(states)), products, 1)


def _rates(rates: Sequence[float] | float, number: int) -> np.ndarray:
    array = np.asarray(rates, np.float64)
    if array.shape not in ((), (number,)):
        raise ValueError(f"{array.size} learning rates for {number} checkpoints: give one each")
    return np.broadcast_to(array, number)


@dataclass
class _Rows:
    """The inputs and the labels of rows; `rowed` are the names of those that have them."""

    feed: Arrays
    rowed: set[str]
    count: int

    def part(self, start: int, stop: int) -> Arrays:
        """Return some of the rows."""
        return {n: x[start:stop] if n in self.rowed else x for n, x in self.feed.items()}


class _LossesOfRows:
    """The losses of rows, and their derivatives with respect to the weights."""

    def __init__(
        self,
        model: ModelLike,
        names: Sequence[str] | None,
        loss: str | Formula,
        output: str | None,
        device: Any,
        batch_size: int,
        options: Mapping[str, Any],
    ) -> None:
        proto = separate_merged(model)
        kind = checked_device(proto, device, batch_size, "the loss of a row")
        if names is None:
            names = [t.name for t in trainable(proto).trained]
        self.names = list(require_unique_names("weight", names))
        self._label = free_name("label", {*all_names(proto.graph)})
        with_loss = add_loss_output(
            proto, loss, label_name=self._label, output_index=output, reduction="sum", **options
        )
        losses = unreduced_onnx_loss(with_loss, "loss_of_row")
        drop_unused_inputs(losses)
        graph = to_ir(losses).graph
        self._inputs = [x for x in graph.inputs if x.name != self._label]
        self._labels = [x for x in graph.inputs if x.name == self._label]
        self._unused = names_without_default(proto)
        self._shapes = {ref.name: tuple(ref.read().dims) for ref in constant_refs(proto)}
        effort = count_multiply_adds(graph)
        self._piece = Piece(losses, [str(graph.outputs[0].name)], (), kind, batch_size)
        self._backward = Predictor(vjp(losses, self.names, []), (), kind, 0, 3 * effort)
        self._forward = Predictor(jvp(losses, self.names, []), (), kind, 0, 256 * effort)
        assert all(is_real(y) for y in graph.outputs)
        self._dtype = graph.outputs[0].dtype or ir.DataType.FLOAT

    def state(self, checkpoint: Checkpoint) -> Arrays:
        """Return the weights of a checkpoint."""
        if isinstance(checkpoint, Mapping):
            weights = {name: np.asarray(w) for name, w in checkpoint.items()}
        else:
            weights = {ref.name: ref.array() for ref in constant_refs(separate_merged(checkpoint))}
        for name in self.names:
            if name not in weights:
                raise unknown("weight of a checkpoint", name, weights)
            if weights[name].shape != self._shapes[name]:
                raise ValueError(
                    f"weight {name!r} of a checkpoint has the shape {list(weights[name].shape)}, "
                    f"not {list(self._shapes[name])}"
                )
        return {name: weights[name] for name in self.names}

    def rows(self, data: Inputs, labels: Any) -> _Rows:
        """Return rows with their labels, as arrays of the dtypes of the model."""
        names = [str(x.name) for x in self._inputs]
        feed = checked_feed(data, self._inputs, names, self._unused)
        count, rowed = rows_of(feed, self._inputs)
        feed |= checked_feed({self._label: labels}, self._labels, [self._label])
        if feed[self._label].shape[:1] != (count,):
            raise ValueError(
                f"the labels have the shape {list(feed[self._label].shape)}, and there are {count} "
                "rows"
            )
        return _Rows(feed, {*rowed, self._label}, count)

    def gradients(self, state: Arrays, rows: _Rows) -> list[Arrays]:
        """Return the gradient of the loss of each row."""
        self._piece.at_once(rows.part(0, 1), rows.rowed, 1)  # raises for a fixed number of rows
        cotangent = [*self._backward.inputs.values()][-1]
        seed = np.ones([1] * len(cotangent.shape), self._dtype.numpy())
        gradients = []
        for i in range(rows.count):
            feed = rows.part(i, i + 1) | state | {cotangent.name: seed}
            results = self._backward.run({name: feed[name] for name in self._backward.inputs})
            gradients.append(dict(zip(self.names, results[1:], strict=True)))
        return gradients

    def products(self, state: Arrays, rows: _Rows, gradients: list[Arrays]) -> np.ndarray:
        """Return the products of `gradients` with that of each row, (gradients, rows)."""
        result = np.zeros((len(gradients), rows.count))
        size = self._piece.at_once(rows.feed, rows.rowed, rows.count)
        for i in range(0, rows.count, size):
            feed = rows.part(i, i + size) | state
            for row, gradient in zip(result, gradients, strict=True):
                tangents = {f"{name}_tangent": g for name, g in gradient.items()}
                whole = feed | tangents
                results = self._forward.run({name: whole[name] for name in self._forward.inputs})
                row[i : i + size] = results[1].reshape(-1)
        return result
