"""Losses by name and as objects, and formulas that user-defined losses are made of."""

from onnxgrad.losses.applied_to import (
    are_probabilities as are_probabilities,
)
from onnxgrad.losses.combined import (
    combined_loss as combined_loss,
)
from onnxgrad.losses.formulas import (
    LOSSES as LOSSES,
)
from onnxgrad.losses.image_losses import (
    box_iou as box_iou,
    distribution_focal as distribution_focal,
    varifocal as varifocal,
)
from onnxgrad.losses.info import (
    LossInfo as LossInfo,
)
from onnxgrad.losses.other_models import (
    LossModel as LossModel,
    distillation as distillation,
)
from onnxgrad.losses.output_losses import (
    OutputLoss as OutputLoss,
)
from onnxgrad.losses.perceptual import (
    perceptual_loss as perceptual_loss,
)
from onnxgrad.losses.row_losses import (
    unreduced_onnx_loss as unreduced_onnx_loss,
)
from onnxgrad.losses.spec import (
    LabelKind as LabelKind,
    LossSpec as LossSpec,
)
from onnxgrad.training.mixing import (
    cutmix as cutmix,
    mixup as mixup,
)
