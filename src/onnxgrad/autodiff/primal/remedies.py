"""What to do about operators without a rule: a table of functions, one for a family of domains."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnxgrad.autodiff.primal.lowerings import microsoft

_REMEDIES: tuple[Callable[[ir.Node], str | None], ...] = (microsoft.remedy,)


def remedy(node: ir.Node) -> str | None:
    """Return what the user can do about `node`, which has no rule, or None."""
    remedies = (function(node) for function in _REMEDIES)
    return next((text for text in remedies if text is not None), None)
