"""Losses and optimizers by their names in the enumerations of onnxruntime.training.artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxgrad.errors import unknown
from onnxgrad.losses.formulas import LOSSES, loss_spec
from onnxgrad.losses.objectives import ALIASES
from onnxgrad.optimizers.adaptive import ScaleByAdamEpsHat
from onnxgrad.optimizers.base import Chain, Optimizer
from onnxgrad.optimizers.presets import select, sgd
from onnxgrad.optimizers.scaling import ScaleByLearningRate

# the loss, and its options
FORMER_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "MSELoss": ("squared_error", {}),
    "CrossEntropyLoss": ("cross_entropy", {"from_logits": True}),
    "BCEWithLogitsLoss": ("binary_cross_entropy", {"from_logits": True}),
    "L1Loss": ("absolute_error", {}),
}
# with the defaults of onnxruntime.training.artifacts, which differ from the defaults of onnxgrad
FORMER_OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": Chain((ScaleByAdamEpsHat(eps=1e-6), ScaleByLearningRate())),
    "SGD": sgd(),
}


def select_loss(
    loss: Any, options: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    """Return loss and options for `Trainer`, also for onnxruntime.training's name of a loss.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(loss, Mapping):
        return {output: _select_output_loss(own) for output, own in loss.items()}, options
    if not isinstance(loss, str) or loss.endswith(".onnx"):
        return loss, options
    if loss in FORMER_LOSSES:
        name, own = FORMER_LOSSES[loss]
        return name, {**own, **(options or {})}
    if loss not in LOSSES and loss not in ALIASES:
        raise unknown("loss", loss, [*FORMER_LOSSES, *LOSSES])
    return loss, options


def _select_output_loss(loss: Any) -> Any:
    """Return the loss of one of several outputs, also for a name of onnxruntime.training."""
    if not isinstance(loss, str) or loss not in FORMER_LOSSES:
        return loss
    name, options = FORMER_LOSSES[loss]
    return loss_spec(name, None, options)


def select_optimizer(optimizer: str | Optimizer) -> Optimizer:
    """Return the optimizer for an instance or a name, also for a name of onnxruntime.training.

    Raises:
        ValueError: an unknown name, or an optimizer that averages weights.
    """
    if isinstance(optimizer, str) and optimizer in FORMER_OPTIMIZERS:
        return FORMER_OPTIMIZERS[optimizer]
    chosen = select(optimizer)
    if chosen.averages:
        raise ValueError(
            f"{chosen!r} evaluates averages of weights, which no file computes: pass the optimizer "
            "without averages, or train with Trainer"
        )
    return chosen
