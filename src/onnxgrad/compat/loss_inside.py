"""`OrtGradientOptimizer`: trains a model whose own graph computes the loss."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.autodiff.derivative import DerivativeOptions, DerivativeRequest, derivative
from onnxgrad.compat.seed_trainer import EstimatorFit, Fitted, SeedTrainer
from onnxgrad.model.read import read
from onnxgrad.model.write import save
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session
from onnxgrad.training.model_loss import ComputedLoss
from onnxgrad.training.step.build import build_epoch


@dataclass(eq=False, repr=False)
class OrtGradientOptimizer(SeedTrainer):
    """Trains the weights of a model whose graph computes the loss, on the ordinary onnxruntime.

    One model computes the gradient of a batch and updates the weights, and one call of onnxruntime
    runs many batches. The learning rate applies to the mean of the rows' gradients: the gradient of
    a loss that is a sum over rows is divided by the number of rows of the batch.

    Args:
        model_onnx: model, serialized model or path, with a loss output (`add_loss_output`).
        weights_to_train: names of float constants of the model, or patterns as "layer4.*", see
            `trainable`. None: the weights that train by default; a warning names uncertain ones.
        loss_output_name: the output that is the loss, of one element; it counts as a sum over rows
            unless `add_loss_output` noted in the model that it is a mean.
        max_iter: epochs; in each, every row is drawn once, the last batch may be shorter.
        training_optimizer_name: "SGDOptimizer", "momentum", "nesterov", "adam", "adamw", or an
            optimizer of `onnxgrad` such as `adam(b1=0.8)`.
        batch_size: rows of a batch; fewer rows of data are one batch.
        learning_rate: name, number or `BaseLearningRate`; `LearningRateSGDNesterov` has its own
            momentum, and requires "SGDOptimizer".
        device: "cpu", "cuda" or "cuda:1", a GPU by its number; "gpu" means "cuda".
        warm_start: `fit` continues with the weights, slots and step number of the last `fit`; the
            slots start empty for another optimizer, and if weights are added.
        verbose: 1 reports every epoch through `logging`, to stderr if it is not configured.
        validation_every: epochs between two validations, or below 1 a share of `max_iter`.
        saved_gradient: path to which `fit` saves the gradient model, with inputs for data and
            weights, the loss and `<weight>_grad` as outputs; the training model that runs is
            saved to the same path with ".training.onnx" appended.
        sample_weight_name: name of the input of sample weights.
        random_state: seed of the order of rows and of `weight_init`; None draws a new one.
        weight_init: "model" starts from the model's weights. "glorot" (Glorot & Bengio 2010,
            uniform) and "normal" (standard normal) initialize weights of rank 2 or more.

    Attributes:
        train_losses_: mean loss of a row, per epoch.
        validation_losses_: mean loss of a validation row, per validation.
        trained_coef_: `{name: array}`, the trained weights.
        n_iter_: number of finished epochs.
        n_steps_: step number of the optimizer: the batches since its slots were empty.
        learning_rate_: the rate of the last epoch.
        stop_reason_: why the last `fit` ended: "max_iter", "callback", "not finite" (the loss, a
            weight or the validation loss), "interrupted" (Ctrl-C), or "error" (any other); None
            while it runs.
        feature_names_in_: the names of the columns of X, if `fit` was called with a table.
        train_session_: an `onnxruntime.InferenceSession` of the gradient model, as
            `saved_gradient` saves it, for one batch.
        input_names_, output_names_: the names of `train_session_`: data, label and weights; the
            loss and the gradients.
        train_function_: the forward and the backward pass of the model
            (`OrtGradientForwardBackward`); its inputs are the inputs of the model, then the
            trained weights.
        cls_type_: the class of `train_function_`.

    A callback of `fit` reads the current values of attributes. Sessions and passes are built when
    they are first read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.compat.OrtGradientOptimizer(
        ...     og.add_loss_output(model), training_optimizer_name="momentum", learning_rate=0.02
        ... )
        >>> trainer.fit(X, y).get_state()["w"].ravel().round(2).tolist()
        [2.0, 3.0]
        >>> trained = trainer.get_trained_onnx(model)
    """

    saved_gradient: str | os.PathLike | None = None
    sample_weight_name: str = "weight"
    random_state: int | None = None
    weight_init: str = "model"

    trained_coef_ = Fitted(lambda self: self.get_state())
    train_session_ = Fitted(lambda self: self._build_cached("session", self._gradient_session))
    train_function_ = Fitted(
        lambda self: self._build_cached("function", self._forward_backward().new_instance)
    )
    input_names_ = Fitted(lambda self: [x.name for x in self.train_session_.get_inputs()])
    output_names_ = Fitted(lambda self: [y.name for y in self.train_session_.get_outputs()])

    def _training_loss(self, weighted: bool, weights: Sequence[str] | None = None) -> ComputedLoss:
        return ComputedLoss(self.loss_output_name, self.sample_weight_name, reduction="sum")

    def _save_gradient_model(self, call: EstimatorFit) -> None:
        if self.saved_gradient is not None:
            save(self._gradient_model(call.job.proto, call.state.trained), self.saved_gradient)
            # the model of the runner has operators of onnxruntime
            plain = build_epoch(call.recipe.step(call.recipe.objective(), in_place=False))
            save(plain, f"{os.fspath(self.saved_gradient)}.training.onnx")

    def _gradient_model(self, proto: ModelProto, weights: Sequence[str]) -> ModelProto:
        """Return a model that computes the loss and its gradients w.r.t. `weights`."""
        loss = DerivativeOptions.Loss
        return derivative(proto, DerivativeRequest(weights, [], loss, self.loss_output_name))[0]

    def _gradient_session(self) -> ort.InferenceSession:
        """Return a session that computes the loss and its gradients w.r.t. the trained weights."""
        model = self._gradient_model(read(self.model_onnx), self._trained_weight_names())
        return session(model, Device.of(self.device), work=0.0)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the trained weights, `{name: array}`, in the model's shapes and dtypes.

        Raises:
            NotFittedError: nothing was trained.
        """
        return {name: array.copy() for name, array in self._fitted_state().values.weights.items()}

    def set_state(self, state: Mapping[str, np.ndarray], check_trained: bool = False) -> Self:
        """Set weights, `{name: array}`, from which the next `fit` with `warm_start` starts.

        Args:
            state: values of weights, trained or not; other weights are unchanged.
            check_trained: raise for weights that the last `fit` did not train.

        Raises:
            ValueError: a name that no float constant of the model has, or an array of another
                shape; with `check_trained`, a weight that was not trained.
            NotFittedError: `check_trained`, and there was no `fit`.
        """
        weights = self._weight_arrays(state, check_trained)
        fitted = self._state_for_set_state()
        old = fitted.values
        fitted.values = replace(old, weights=old.weights | weights)
        return self
