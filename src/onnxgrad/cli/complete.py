"""Names that the shell completes; their tables are imported when it asks."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name


def _table_completion(*tables: str) -> Callable[[str], list[str]]:
    """Return what completes the keys of tables, each of them `module:NAME`."""

    def complete(incomplete: str) -> list[str]:
        names = (name for table in tables for name in resolve_name(table))
        return sorted(name for name in names if name.startswith(incomplete))

    return complete


losses = _table_completion("onnxgrad.losses.formulas:LOSSES", "onnxgrad.losses.objectives:ALIASES")
metrics = _table_completion("onnxgrad.metrics.select:METRICS")
optimizers = _table_completion(
    "onnxgrad.optimizers.presets:OPTIMIZERS", "onnxgrad.optimizers.presets:WHOLE_TENSORS"
)
schedules = _table_completion("onnxgrad.cli.schedule_names:SCHEDULES")
