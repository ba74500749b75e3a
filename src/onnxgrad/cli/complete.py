"""Names that the shell completes; what they come from is imported when it asks."""

from __future__ import annotations

from collections.abc import Iterable


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def losses(incomplete: str) -> list[str]:
    """Return the losses that begin so."""
    from onnxgrad.losses.formulas import LOSSES
    from onnxgrad.losses.objectives import ALIASES

    return _beginning([*LOSSES, *ALIASES], incomplete)


def metrics(incomplete: str) -> list[str]:
    """Return the metrics that begin so."""
    from onnxgrad.metrics.select import METRICS

    return _beginning(METRICS, incomplete)


def optimizers(incomplete: str) -> list[str]:
    """Return the optimizers that begin so."""
    from onnxgrad.optimizers.presets import OPTIMIZERS, WHOLE_TENSORS

    return _beginning([*OPTIMIZERS, *WHOLE_TENSORS], incomplete)


def schedules(incomplete: str) -> list[str]:
    """Return the schedules that begin so."""
    from onnxgrad.cli.schedule_names import SCHEDULES

    return _beginning(SCHEDULES, incomplete)
