"""TracIn: the influence of each training row on the loss of other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.higher import jvp, vjp
from onnxgrad.errors import unknown
from onnxgrad.explain.piece import ModelPiece, check_model_and_device
from onnxgrad.explain.user_inputs import Arrays, Inputs, count_rows, input_arrays
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
    """Return how much an SGD step on each training row lowers each test row's loss: TracIn.

    The sum over checkpoints of the learning rate times the product of two gradients w.r.t. the
    weights: of the loss of a training row, and of the loss of a test row (Pruthi et al. 2020,
    arXiv:2002.08484).

    Args:
        model: model, serialized model or path, never modified; its output is the prediction.
        train: training rows, the array of the only input or `{name: array}`.
        train_labels: labels of the training rows; see `add_loss_output`.
        test: rows whose loss is explained.
        test_labels: labels of these rows.
        loss: a key of `onnxgrad.losses.LOSSES`, or a function; see `add_loss_output`.
        checkpoints: models, or `{weight: array}` with all `weights`. None: `model` itself.
        learning_rates: learning rate at each checkpoint, or one for all checkpoints.
        weights: names of weights. None: the weights that `trainable` selects by default.
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
    losses = _RowGradients(model, weights, loss, output, device, batch_size, options)
    states = [losses.checkpoint_weights(c) for c in checkpoints or [model]]
    rates = np.asarray(learning_rates, np.float64)
    if rates.shape not in ((), (len(states),)):
        raise ValueError(
            f"{rates.size} learning_rates for {len(states)} checkpoints: give a rate for each"
        )
    explained, rows = losses.check_rows(test, test_labels), losses.check_rows(train, train_labels)
    products = [losses.row_products(s, rows, losses.row_gradients(s, explained)) for s in states]
    return np.tensordot(np.broadcast_to(rates, len(states)), products, 1)


@dataclass
class _DataRows:
    """Input and label arrays by name; `with_rows` names the arrays that have a row axis."""

    feed: Arrays
    with_rows: set[str]
    count: int

    def slice_rows(self, start: int, stop: int) -> Arrays:
        """Return the input and label arrays cut to the rows from `start` to `stop`."""
        return {n: x[start:stop] if n in self.with_rows else x for n, x in self.feed.items()}


class _RowGradients:
    """Computes the gradient of each row's loss w.r.t. the weights, and its dot products with other
    gradients.
    """

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
        device = check_model_and_device(proto, device, batch_size, "the loss of a row")
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
        self._piece = ModelPiece(losses, [str(graph.outputs[0].name)], (), device, batch_size)
        self._vjp = Predictor(vjp(losses, self.names, []), (), device, 0, 3 * effort)
        self._jvp = Predictor(jvp(losses, self.names, []), (), device, 0, 256 * effort)
        self._dtype = graph.outputs[0].dtype or ir.DataType.FLOAT

    def checkpoint_weights(self, checkpoint: Checkpoint) -> Arrays:
        """Return {name: array} of the weights in a checkpoint."""
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
                    f"and in the model {list(self._shapes[name])}: pass checkpoints of this model"
                )
        return {name: weights[name] for name in self.names}

    def check_rows(self, data: Inputs, labels: Any) -> _DataRows:
        """Return inputs and labels as `_DataRows`, in the dtypes of the model; check that
        they fit.
        """
        names = [str(x.name) for x in self._inputs]
        feed = input_arrays(data, self._inputs, names, self._unused)
        count, with_rows = count_rows(feed, self._inputs)
        feed |= input_arrays({self._label: labels}, self._labels, [self._label])
        if feed[self._label].shape[:1] != (count,):
            raise ValueError(
                f"the labels have the shape {list(feed[self._label].shape)}, and the inputs have "
                f"{count} rows: pass a label for each row"
            )
        return _DataRows(feed, {*with_rows, self._label}, count)

    def row_gradients(self, state: Arrays, rows: _DataRows) -> list[Arrays]:
        """Return for each row the gradient of its loss w.r.t. the weights."""
        # raises an error if the model takes a fixed number of rows
        self._piece.rows_per_call(rows.slice_rows(0, 1), rows.with_rows, 1)
        cotangent = [*self._vjp.inputs.values()][-1]
        one = np.ones([1] * len(cotangent.shape), self._dtype.numpy())
        gradients = []
        for i in range(rows.count):
            feed = rows.slice_rows(i, i + 1) | state | {cotangent.name: one}
            results = self._vjp.run({name: feed[name] for name in self._vjp.inputs})
            gradients.append(dict(zip(self.names, results[1:], strict=True)))
        return gradients

    def row_products(self, state: Arrays, rows: _DataRows, gradients: list[Arrays]) -> np.ndarray:
        """Return the dot products (gradients, rows) of each gradient in `gradients` with each row's
        gradient.
        """
        result = np.zeros((len(gradients), rows.count))
        for row, gradient in zip(result, gradients, strict=True):
            feed = rows.feed | state | {f"{name}_tangent": g for name, g in gradient.items()}
            _, products = self._piece.run_rows(self._jvp, feed, rows.with_rows).values()
            row[:] = products.reshape(-1)
        return result
