"""The losses and optimizers of onnxruntime.training.artifacts, by the names of its enumerations."""

from __future__ import annotations

from typing import Any

from onnxgrad.errors import unknown
from onnxgrad.losses.formulas import LOSSES
from onnxgrad.losses.objectives import ALIASES
from onnxgrad.optimizers import Optimizer, adamw, select, sgd
from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS

# the loss, and its options
FORMER_LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "MSELoss": ("squared_error", {}),
    "CrossEntropyLoss": ("cross_entropy", {"from_logits": True}),
    "BCEWithLogitsLoss": ("binary_cross_entropy", {"from_logits": True}),
    "L1Loss": ("absolute_error", {}),
}
# with the defaults that they had there, which are not those of ours
FORMER_OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": adamw(eps=1e-6, weight_decay=0.0),
    "SGD": sgd(),
}


def select_loss(loss: Any, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any] | None]:
    """Return a loss and its options for `Trainer`; a name may be a former one.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(loss, str) or loss.endswith(".onnx"):
        return loss, options
    if loss in FORMER_LOSSES:
        name, own = FORMER_LOSSES[loss]
        return name, own | (options or {})
    if loss not in LOSSES and loss not in ALIASES:
        raise unknown("loss", loss, [*FORMER_LOSSES, *LOSSES])
    return loss, options


def select_optimizer(optimizer: str | Optimizer) -> Optimizer:
    """Return the optimizer for an instance or a name, which may be a former one.

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
