"""Operators that learn without gradients: why a model of them has nothing to train."""

from __future__ import annotations

from onnx import ModelProto

from onnxgrad.errors import printable
from onnxgrad.model.traversal import nodes_of

_TREES = (
    "decides by thresholds, which have no gradient: trees of scikit-learn, LightGBM, XGBoost and "
    "CatBoost are trained by these libraries. As a part of a larger model, trees stay as they are, "
    "and the layers behind them train"
)
_NEIGHBOURS = (
    "selects the nearest of stored rows: such a model is its data, and is fitted by storing others"
)
_NO_KERNEL = (
    "is an operator that onnxruntime does not have, so that the model does not run: select outputs "
    "in front of it, or use another classifier than the GaussianProcessClassifier of scikit-learn"
)
_WHY = {
    "Solve": _NO_KERNEL,
    "TreeEnsemble": _TREES,
    "TreeEnsembleRegressor": _TREES,
    "TreeEnsembleClassifier": _TREES,
    "TopK": _NEIGHBOURS,
}


def without_gradient(proto: ModelProto) -> str:
    """Return the first node that learns without gradients and the reason, or an empty text."""
    for kinds in (_NO_KERNEL, _TREES, _NEIGHBOURS):
        for node in nodes_of(proto):
            if _WHY.get(node.op_type) == kinds:
                name = f" {printable(node.name)!r}" if node.name else ""
                return f"{node.op_type}{name} {kinds}"
    return ""
