"""`predict_samples`: predictions with dropout, whose spread tells how sure a model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx import ModelProto

from onnxgrad.checks import check_count
from onnxgrad.data.columns import read_names
from onnxgrad.errors import argument, named
from onnxgrad.graph.emit import Emit
from onnxgrad.losses.objectives import WrittenLoss
from onnxgrad.model.convert import is_non_tensor
from onnxgrad.model.notes import trained_dropout
from onnxgrad.model.read import ModelLike, read, require_unique_names
from onnxgrad.model.weights import FLOATS
from onnxgrad.runtime.device import Device
from onnxgrad.training.data import Dataset, as_dataset
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import LABEL_FIELDS
from onnxgrad.training.job import Job
from onnxgrad.training.precision import training_precision
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.state import TrainState
from onnxgrad.training.step.inputs import feed_inputs


class PredictionSamples(NamedTuple):
    """The results of `predict_samples`: arrays, or dicts of arrays by output.

    - `mean`: the mean of the samples, (rows, ...).
    - `std`: the standard deviation of the samples, (rows, ...).
    - `samples`: (samples, rows, ...).
    """

    mean: Any
    std: Any
    samples: Any


def predict_samples(
    model: ModelLike,
    X: Any,
    n: int,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    outputs: Sequence[str] | None = None,
    dropout: Mapping[str, float] | None = None,
    device: Any = "cpu",
) -> PredictionSamples:
    """Return `n` predictions of `model` for each row, in which its dropout is active.

    Their spread is an estimate of how uncertain the model is (Monte Carlo dropout: Gal and
    Ghahramani 2016, "Dropout as a Bayesian Approximation"). Every Dropout node of the file drops
    elements, also in inference mode, with the probability that the node states, 0.5 if it states
    none; BatchNormalization uses its stored statistics. The masks are a function of `seed`, the
    sample, the batch and the position of an element: the same arguments return the same samples.

    Args:
        model: model, serialized model or path; never modified.
        X: rows as for `Trainer.predict`.
        n: number of samples.
        batch_size: rows of one call of the runtime.
        seed: of the masks.
        outputs: names of outputs, or of other tensors. None: all outputs of floats.
        dropout: `{pattern: p}` as of `Trainer`: other probabilities of Dropout nodes, 0 to switch
            one off; or dropout behind nodes of a file without Dropout.
        device: as of `Trainer`.

    Returns:
        A named tuple: `mean` and `std`, the mean and the standard deviation of the samples (with
        their number as the divisor), (rows, ...), and `samples`, (n, rows, ...). They are arrays,
        or dicts of arrays by output if there are several outputs. Mean and standard deviation of
        predictions of 16 bits are float32.

    Raises:
        ValueError: no dropout is active; an unknown output, or one that holds no floats; data that
            the inputs do not accept; Dropout in the body of a loop.
        ModelError: `model` cannot be read.

    Examples:
        >>> import numpy as np, onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]>
        ...     f (float[N,2] x) => (float[N,1] y) <float[2,1] w = {1.0, 2.0}> { y = MatMul(x, w) }
        ... ''')
        >>> model = og.insert_dropout(model, after="MatMul", rate=0.5)
        >>> drawn = og.predict_samples(model, np.float32([[1, 1]]), 1000)
        >>> drawn.samples.shape, np.unique(drawn.samples).tolist()
        ((1000, 1, 1), [0.0, 6.0])
        >>> drawn.mean.shape, bool(abs(drawn.mean - 3) < 0.5), bool(abs(drawn.std - 3) < 0.2)
        ((1, 1), True, True)
    """
    check_count("n", n)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    proto, placed = read(model), Device.of(device).check()
    data = Dataset(as_dataset(X).X)
    job = Job(
        proto,
        loss=_NoLoss(_outputs_to_sample(proto, outputs)),
        dropout=trained_dropout(proto) | dict(dropout or {}),
        precision=training_precision("auto", proto, placed),
        device=placed,
        seed=seed,
    )
    recipe = Recipe.for_data(job, TrainState(), data)
    recipe.samples = True
    evaluator = Evaluator(recipe).copy_with_names(read_names(proto))
    one, fields = evaluator.member_objective, evaluator.fields
    if not feed_inputs(one.model.graph):
        raise ValueError(
            "the model has no Dropout node with a probability above 0, and so all samples would be "
            f"equal: insert Dropout nodes by {named('onnxgrad.insert_dropout')}, or pass "
            f"{argument('dropout', {'<node or output>': 0.1})}"
        )
    for name, y in one.predictions.items():
        if y.dtype is None or not y.dtype.is_floating_point():
            raise ValueError(
                f"the output {name!r} holds {y.dtype}, and samples have a mean if they are floats: "
                f"leave it out of {argument('outputs')}"
            )
    fields.left_out = LABEL_FIELDS
    source = data.source(fields, batch_size or evaluator.default_rows)
    samples = evaluator.sample_predictions(source, n)
    parts = (
        samples,
        *({k: f(y) for k, y in samples.items()} for f in (_sample_mean, _sample_deviation)),
    )
    every, mean, std = (p if len(p) > 1 else next(iter(p.values())) for p in parts)
    return PredictionSamples(mean, std, every)


@dataclass(frozen=True)
class _NoLoss:
    """The outputs of a model, of which no loss is computed, in place of a `TrainingLoss`."""

    names: Sequence[str]

    def outputs(self, proto: ModelProto) -> list[str]:
        """Return the names of the outputs."""
        return list(self.names)

    def write(
        self, op: Emit, predictions: Mapping[str, ir.Value], weighted: bool = False
    ) -> WrittenLoss:
        """Return a loss without terms."""
        return WrittenLoss()


def _outputs_to_sample(proto: ModelProto, outputs: Sequence[str] | None) -> list[str]:
    """Return the argument `outputs` as a list of names; None stands for all outputs of floats.

    Raises:
        ValueError: a name that is repeated, or a model without outputs of floats.
    """
    if outputs is not None:
        return list(require_unique_names("output", outputs))
    tensors = [y for y in proto.graph.output if not is_non_tensor(y)]
    names = [y.name for y in tensors if y.type.tensor_type.elem_type in {0, *FLOATS}]
    if not names:
        raise ValueError(
            f"the model has no output of floats: name a tensor of floats by {argument('outputs')}"
        )
    return list(dict.fromkeys(names))


def _sample_mean(samples: np.ndarray) -> np.ndarray:
    """Return the mean of samples, of float32 for samples of 16 bits."""
    return samples.mean(0, dtype=np.float64).astype(_wide_dtype(samples))


def _sample_deviation(samples: np.ndarray) -> np.ndarray:
    """Return the standard deviation of samples, of float32 for samples of 16 bits."""
    return samples.std(0, dtype=np.float64).astype(_wide_dtype(samples))


def _wide_dtype(samples: np.ndarray) -> np.dtype:
    """Return the dtype of samples, or float32 for samples of 16 bits."""
    return np.dtype(np.float32) if samples.dtype.itemsize == 2 else samples.dtype
