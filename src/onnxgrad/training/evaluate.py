"""Losses, metrics and predictions of the model of a trainer."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import numpy as np

from onnxgrad.data.columns import Names
from onnxgrad.errors import argument, named
from onnxgrad.model import weights as constants
from onnxgrad.operators.shapes import dims
from onnxgrad.training.class_weights import WeightedClasses
from onnxgrad.training.data import Dataset
from onnxgrad.training.evaluator import Evaluator
from onnxgrad.training.fields import Fields
from onnxgrad.training.job import Job
from onnxgrad.training.modes import inference_form
from onnxgrad.training.objective import Objective
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.state import TrainState


def check_weights(recipe: Recipe, data: Dataset, objective: Objective, fields: Fields) -> None:
    """Raise `ValueError` for balanced class weights before `fit`, or rows not on the first axis."""
    needed = WeightedClasses.of(recipe.job.class_weight, recipe.job.loss).balanced is not None
    if needed and recipe.balanced is None:
        raise ValueError(
            f"{argument('class_weight', 'balanced')} is computed from the labels of fit: call it "
            "first, or pass the weights of the classes"
        )
    if data.sample_weight is None or recipe.weight_axes != 1:
        return
    shapes, symbol = fields.row_axes.shapes, fields.row_axes.symbol
    labels = {info.prediction: shapes[label] for label, info in objective.labels.items()}
    for name, prediction in objective.predictions.items():
        shape = dims(prediction) or ()
        label = labels.get(name) or shape
        if symbol in shape[1:] and label[0] != symbol:
            raise ValueError(
                f"{named('sample_weight')}: the rows of the output {name!r}, {shape}, are not on "
                "its first axis: pass a weight for each label, in its shape, or batch_axes"
            )


def evaluator_of(recipe: Recipe, names: Names, buffers: Collection[str] = ()) -> Evaluator:
    """Return the evaluator of the model of a recipe, for any weights.

    The job keeps it while the recipe stays the same; the copy that is returned has `names`.

    Args:
        recipe: the recipe of a trainer's step.
        names: the names of the columns of tables.
        buffers: names of statistics that train, and are not in the state yet.
    """
    job, state = recipe.job, recipe.state
    changing = frozenset({*state.weights, *state.buffers, *buffers})

    def build() -> Evaluator:
        proto = inference_form(job.proto)
        read = sorted({ref.name for ref in constants.constant_refs(proto)} & changing)
        return Evaluator(recipe.plan.for_model(proto, read))

    key = "labeled" if recipe.labels else "unlabeled"
    kept = job.built.get(f"evaluator, {key}", lambda: (recipe.key, changing), build)
    return kept.with_names(names)


def evaluate(
    job: Job,
    state: TrainState,
    names: Names,
    data: Dataset,
    batch_size: int | None,
    shown: str | None = None,
) -> dict[str, Any]:
    """Return the loss and the metrics of data.

    Args:
        job: the arguments of a trainer.
        state: the state with the weights.
        names: the names of the columns of tables.
        data: the data.
        batch_size: rows of one call of the runtime; None: 256, 1,024 of a model that computes
            little for each row, or 8 of a file that takes one row. With a static batch in the
            model, its rows, and a single row where states go from one to the next.
        shown: the title of a progress bar; None for none.
    """
    recipe = Recipe.of(job, state, data)
    evaluator, values = evaluator_of(recipe, names.copy()), job.values_to_evaluate(state)
    evaluator.shown = shown
    check_weights(recipe, data, evaluator.described, evaluator.fields)
    source = data.source(evaluator.fields, batch_size or evaluator.rows)
    results = evaluator.evaluate(values, source, job.metrics)
    if bad := np.flatnonzero(~np.isfinite(results["loss"])).tolist():
        text = f"the loss is {results['loss']}"
        if job.members is not None:
            values = {name: array[bad[0]] for name, array in values.items()}
            text = f"the loss of the members {bad} is not finite"
        warnings.warn(f"{text}: {evaluator.cause(values)}", stacklevel=3)
    return results


def predict(
    job: Job,
    state: TrainState,
    names: Names,
    data: Dataset,
    batch_size: int | None,
    shown: str | None = None,
) -> dict[str, np.ndarray]:
    """Return the predictions for data, by output; see `evaluate` for the arguments."""
    recipe = Recipe.of(job, state, data)
    evaluator = evaluator_of(recipe, names.copy())
    evaluator.shown, fields = shown, evaluator.fields.without_labels()
    source = data.source(fields, batch_size or evaluator.rows)
    return evaluator.predict(job.values_to_evaluate(state), source)
