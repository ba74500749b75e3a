"""Computations on data of any number of rows: what a trained model predicts, and its losses."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import escaping
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import session, work
from onnxgrad.training.data import Fields
from onnxgrad.training.objective import LossOutside, predicted
from onnxgrad.training.runner import ROWS, pieces


@dataclass(frozen=True)
class Computation:
    """One output of a model, computed for all rows of checked arrays."""

    session: ort.InferenceSession
    checks: Fields
    output: str
    size: int  # rows of one call

    @property
    def fields(self) -> Fields:
        """What checks the data of one call: names of columns that it sees first are not kept."""
        fields = copy.copy(self.checks)
        fields.names = self.checks.names.copy()
        return fields

    @escaping()
    def __call__(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the output for all rows."""
        parts = pieces(arrays, self.size)
        return np.concatenate([self.session.run([self.output], part)[0] for part, _ in parts])


def prediction(proto: ModelProto, objective: LossOutside, device: Device) -> Computation:
    """Return what computes the output of `proto` that the loss of `objective` judges."""
    return _computation(proto, predicted(proto), objective, work(objective.model.graph), device)


def row_losses(objective: LossOutside, device: Device) -> Computation:
    """Return what computes the loss of every row, which takes up the graph of `objective`."""
    multiply_adds = work(objective.model.graph)
    model = objective.compute(objective.losses)
    return _computation(model, model.graph.output[0].name, objective, multiply_adds, device)


def _computation(
    model: ModelProto, output: str, objective: LossOutside, multiply_adds: float, device: Device
) -> Computation:
    fields = Fields(objective)
    size = fields.fixed_rows or ROWS
    return Computation(session(model, device, multiply_adds * size), fields, output, size)
