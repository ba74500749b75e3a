"""Attributions, attacks and influences of models of which only the file exists."""

from onnxgrad.explain.adversarial import (
    fgsm as fgsm,
    pgd as pgd,
)
from onnxgrad.explain.counterfactuals import (
    Counterfactual as Counterfactual,
    counterfactual as counterfactual,
)
from onnxgrad.explain.gradient_methods import (
    completeness_gap as completeness_gap,
    integrated_gradients as integrated_gradients,
    saliency as saliency,
    smooth_grad as smooth_grad,
)
from onnxgrad.explain.influences import (
    influence as influence,
)
from onnxgrad.explain.layer_attributions import (
    grad_cam as grad_cam,
    layer_conductance as layer_conductance,
)
from onnxgrad.explain.occlusions import (
    occlusion as occlusion,
)
from onnxgrad.explain.pictures import (
    show_image as show_image,
    show_table as show_table,
    show_text as show_text,
)
from onnxgrad.explain.score_function import (
    ScoreFunction as ScoreFunction,
)
