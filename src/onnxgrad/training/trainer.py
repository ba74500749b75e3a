"""`Trainer`: trains a model of any file on any data."""

from __future__ import annotations

import os
from typing import Any

from onnx import ModelProto

from onnxgrad.model.without_elements import filled
from onnxgrad.model.write import save_filled
from onnxgrad.training.base import TrainerBase
from onnxgrad.training.data import as_dataset
from onnxgrad.training.fit import Fit
from onnxgrad.training.modes import exported
from onnxgrad.training.recipe import Recipe


class Trainer(TrainerBase):
    """Trains a model.

    The loss is the mean over a batch of its terms, as PyTorch's `reduction="mean"`: of the elements
    of a regression, of the labels of a classification that are not ignored. Sample and class
    weights make it a weighted mean. The learning rate is constant, or a schedule by step.

    By default, tensors train that play the role of a weight: see `trainable`.

    Args:
        model: model, serialized model or path; never modified.
        loss: name of one of `onnxgrad.losses`, a `LossSpec` or `BaseLearningLoss`, a function
            `(op, prediction, label)` that writes the loss with the emitter, a second model
            (`LossModel`), or `{output: loss}` for several outputs. None: the model has an output
            that is the loss, called "loss" or the only one with a single number.
        optimizer: name of one of `onnxgrad.optimizers`, or one with options, such as
            `adamw(weight_decay=0.01)`.
        learning_rate: number, a constant rate; or one of `onnxgrad.schedules`, such as
            `cosine(1e-3, warmup=100)`. None: 0.001 for Adam and its kin, 0.01 for SGD and its kin,
            1 for Adadelta, 0.0001 for Lion.
        train: names of float tensors of the model, and patterns as "layer4.*", that train; they
            match aliases, too, and patterns choose among weights: see `trainable`, which shows
            the result. None: the weights that train by default.
        freeze: names and patterns of tensors that do not train.
        train_ranges: whether the scales of QuantizeLinear train, too: learned step size
            quantization (Esser et al. 2020). They begin with the values of the file, and stay
            positive.
        clip_norm: largest 2-norm of all gradients together; larger ones are scaled down to it.
        accumulate: number of micro-batches into which a batch is split, to save memory. The step
            equals the step of the whole batch, up to rounding, if the loss is a mean or a sum over
            rows, also a sum in the file. Where rows are compared with each other or a model
            normalizes over them, the step differs, and `fit` warns, naming the node. Micro-batches
            have equal numbers of rows, so that there may be more; with `batch_norm="train"`, a
            short or prime batch is not cut into single rows. A fixed batch of the file, whose rows
            are not proven to be independent, is a micro-batch. With 1, large batches of arrays are
            computed in parts on a CPU, where the gradient is proven to be the sum over rows.
        batch_norm: "frozen" normalizes by the stored statistics, "train" by the statistics of the
            batch, and updates the stored ones.
        dropout: `{pattern: p}`, zeroes elements with probability p behind the nodes whose name or
            output matches, in training only.
        mix: `mixup(alpha=0.2)` or `cutmix(alpha=1.0)`: rows of each batch are mixed with each
            other, in training only.
        class_weight: `{class: weight}` or an array, for a loss with class indices; "balanced":
            inversely proportional to their frequencies in the rows that the last `fit` trained
            on, also in `evaluate` and `partial_fit`, which need one before. Several losses: by
            output, "balanced" for some or all.
        classes: the names of all classes in the order of the model's output, if labels and
            `class_weight` are names: texts, or numbers such as 3, 5, 8; empty: the names in
            the file, if they are texts. The trained model stores them.
        loss_options: of a loss given by name: `{"ignore_index": 0}`, `{"ignore_nan": True}`.
        loss_weights: `{output: factor}` for a loss of several outputs.
        metrics: names and objects of `onnxgrad.metrics`, functions `(prediction, label)`, metrics
            of torchmetrics; `{output: list}` for a loss of several outputs.
        callbacks: objects such as `EarlyStopping(...)` and `Checkpoint(...)`, see `Callback`.
        batch_axes: `{input: axis}`, the axis of an array along which its rows are; None: it has
            none, and goes into every batch whole. Otherwise read from the declared shapes.
        carry: `{input: output}`: the input gets the value of the output in the batch before. In
            the first batch of an epoch, and in a batch after None in an iterable or `Reader`, it
            gets the value in the data. The gradient does not pass: truncated backpropagation
            through time, over the steps of a batch, which `unroll` adds to a model of one. Needs
            `shuffle=False`, an iterable of batches, or a reader of sequences.
        recompute: the values that the backward pass computes again instead of keeping them, to
            save memory; the weights are the same up to rounding. "none": no value. "cheap": results
            of normalizations, and of nodes that `partition` calls cheap. "all": the forward pass in
            segments, also products and convolutions, as `torch.utils.checkpoint`, and attention
            over long sequences by blocks of queries. A deep transformer gains most; where the
            gradient of one convolution needs more memory than all activations, "all" needs more.
        precision: of a model with floats of 16 bits, float16 or bfloat16. "auto": "float32" on the
            CPU, whose kernels for them convert each operand, and "mixed" on a GPU. In both, weights
            and optimizer slots are float32 while they train; "float32" computes all else in it,
            too, and "mixed" computes gradients in the dtypes of the model, with a loss scale that
            adapts: a step whose gradients are not finite is skipped, and counted in the history.
            The trained model has the dtypes of the given one, and evaluations and predictions use
            its rounded weights: `rounding` gives the errors. "file": weights and slots have the
            dtypes of the model; small updates are rounded to zero. Models without floats of
            16 bits compute in their dtypes, float64 in float64.
        device: "cpu", "cuda" or "cuda:1".
        seed: of the order of the rows, dropout and the split of validation data.
        parallel: how several processes train this model together, each of which calls `fit`: see
            `DataParallel`. None: with the defaults of `DataParallel`, in an initialized group of
            `torch.distributed` or MPI. False: each process trains a separate model.

    Attributes:
        state: the `TrainState`: weights, slots, buffers, step, epoch and history.
        trained: the names of the weights that train.
        precision: "float32", "mixed" or "file", in which the model trains.
        metrics: the metrics, of all outputs.
        history: an entry an epoch: `step`, `epoch`, `loss`, `learning_rate`, and with validation
            data `validation_loss` and metrics, as `validation_accuracy`.
        rounding: the errors of rounding the weights to the 16 bits of the file.
        progress: the `FitProgress` of the training that runs or ran last.
        gradient_norms: 2-norm of the gradient of each weight in the last step, if a callback needs
            them.

    Raises:
        ValueError: an invalid argument.
        ModelError: the model cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {0.0, 0.0}> { y = MatMul(x, w) }
        ... ''')
        >>> X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
        >>> y = X @ np.float32([[2], [3]])
        >>> trainer = og.Trainer(model, "squared_error", optimizer="adam", learning_rate=0.1)
        >>> trainer.fit(X, y, epochs=50).predict(np.float32([[1, 1]])).round(2).tolist()
        [[5.0]]
    """

    def step_models(self, X: Any, y: Any = None) -> tuple[ModelProto, ModelProto]:
        """Return a step of training as two models, for a loop of your own.

        The first computes gradients: from weights, buffers and a batch to `<weight>_grad`,
        `<buffer>.new`, and the sums and counts of the loss. The second updates the weights, and
        clips gradients if the trainer does: from weights, slots `<weight>.<slot>`, gradients,
        `minus_learning_rate` and `step` (int64, 1 in the first step), to `<weight>.new` and
        `<weight>.<slot>.new`. In between, gradients of several batches or machines can be added.

        Args:
            X: as in `fit`, a few rows are enough.
            y: as in `fit`.

        Raises:
            ValueError: as `fit`.
            NoGradientRule: an operator between the weights and the loss has no rule.
        """
        data = as_dataset(X, y)
        call = Fit(self, Recipe.of(self._job, self.state, data), self._names, data)
        call.balance()
        return call.recipe.step_models()

    # -- results ------------------------------------------------------------------------------

    @property
    def model(self) -> ModelProto:
        """The model with the current weights and statistics, in its inference form.

        Raises:
            ValueError: a weight beyond the range of the 16 bits that it has in the file.
        """
        values = self._job.values_for_file(self.state)
        return filled(exported(self._job.proto, values, self._names), values)

    def save(self, path: str | os.PathLike) -> None:
        """Write `model` to a file; large weights go there one by one.

        Raises:
            ValueError: as `model`; an existing file is unchanged.
            OSError: the file cannot be written; an existing file is unchanged.
        """
        values = self._job.values_for_file(self.state)
        save_filled(exported(self._job.proto, values, self._names), values, path)
