"""Predictions and losses of a trained model, for data of any number of rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session, work
from onnxgrad.training.fields import Fields
from onnxgrad.training.objective import LossOutside, predicted
from onnxgrad.training.run.runner import ROWS, pieces


@dataclass(frozen=True)
class Computation:
    """One output of a model, computed for all rows of checked arrays."""

    session: ort.InferenceSession
    checks: Fields
    output: str
    size: int  # rows of one call

    @property
    def fields(self) -> Fields:
        """A copy of `checks` for one call, so that it does not store names of columns."""
        fields = copy.copy(self.checks)
        fields.names = self.checks.names.copy()
        return fields

    @escaping()
    def __call__(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the output for all rows."""
        parts = pieces(arrays, self.size)
        return np.concatenate([self.session.run([self.output], part)[0] for part, _ in parts])


def prediction(proto: ModelProto, objective: LossOutside, device: Device) -> Computation:
    """Return the computation of the output of `proto` that is compared with the labels."""
    return _computation(proto, predicted(proto), objective, work(objective.model.graph), device)


def row_losses(objective: LossOutside, device: Device) -> Computation:
    """Return the computation of the loss of every row; this modifies the graph of `objective`."""
    multiply_adds = work(objective.model.graph)
    model = objective.compute(objective.losses)
    return _computation(model, model.graph.output[0].name, objective, multiply_adds, device)


def _computation(
    model: ModelProto, output: str, objective: LossOutside, multiply_adds: float, device: Device
) -> Computation:
    fields = Fields(objective)
    size = fields.fixed_rows or ROWS
    return Computation(session(model, device, multiply_adds * size), fields, output, size)
