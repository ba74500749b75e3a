"""`check_device`, which tells where the nodes of a model's training step run on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from onnxgrad.model.feeds import random_feed
from onnxgrad.model.read import ModelLike
from onnxgrad.native import Target
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.device_report import DeviceReport, report_device
from onnxgrad.training.data import Dataset
from onnxgrad.training.recipe import Recipe
from onnxgrad.training.trainer import Trainer

_ROWS = 4
_LENGTH = 32  # of axes other than rows whose length the model leaves open


def check_device(
    model: ModelLike,
    device: Any,
    loss: Any = "squared_error",
    train: str | Iterable[str] | None = None,
    random_state: int = 0,
) -> DeviceReport:
    """Return where the nodes run that compute a loss and its gradients, for a few random rows.

    The update of weights is left out, as the CPU computes it. Labels are 0 and 1.

    Args:
        model: model.
        device: as for `Trainer`.
        loss: as for `Trainer`.
        train: as for `Trainer`.
        random_state: seed of the inputs.

    Raises:
        ProviderError: onnxruntime cannot start the device.
        ValueError: as `Trainer`.
        NoGradientRule: an operator on the way has no rule.
    """
    place = Device.of(device).check()
    trainer = Trainer(model, loss, train=train)
    recipe = Recipe.for_data(trainer._job, trainer.state, Dataset(None))
    objective = recipe.objective().require_labels()
    gradients = recipe.gradient_model(Target.for_step(place, 0.0, _ROWS))
    known = trainer.state.weights | objective.initial_buffers
    rng = np.random.default_rng(random_state)
    feed = random_feed(gradients.graph.input, _ROWS, _LENGTH, rng)
    for name, array in feed.items():
        if name in objective.labels:
            feed[name] = rng.integers(0, 2, array.shape).astype(array.dtype)
        elif name in known:
            feed[name] = np.asarray(known[name], array.dtype).reshape(np.shape(known[name]))
    return report_device(gradients, feed, place)
