"""Explanations of models of which only the file exists: attributions, attacks, influences.

Examples:
    >>> import numpy as np, onnx, onnxgrad as og
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 9, opset_import: ["": 20]>
    ...     f (float[N,2] x) => (float[N,2] y) { y = Mul(x, x) }''')
    >>> og.explain.saliency(model, np.float32([[1, 2]]), target=1).tolist()
    [[0.0, 4.0]]
"""

from onnxgrad.explain.adversarial import fgsm, pgd
from onnxgrad.explain.counterfactuals import Counterfactual, counterfactual
from onnxgrad.explain.gradient_methods import (
    completeness_gap,
    integrated_gradients,
    saliency,
    smooth_grad,
)
from onnxgrad.explain.influences import influence
from onnxgrad.explain.layer_attributions import grad_cam, layer_conductance
from onnxgrad.explain.occlusions import occlusion
from onnxgrad.explain.pictures import show_image, show_table, show_text
from onnxgrad.explain.score_function import ScoreFunction

__all__ = [
    "Counterfactual",
    "ScoreFunction",
    "completeness_gap",
    "counterfactual",
    "fgsm",
    "grad_cam",
    "influence",
    "integrated_gradients",
    "layer_conductance",
    "occlusion",
    "pgd",
    "saliency",
    "show_image",
    "show_table",
    "show_text",
    "smooth_grad",
]
