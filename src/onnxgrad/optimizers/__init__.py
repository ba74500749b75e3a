"""Optimizers: chained transforms that turn a gradient into a step, written as ONNX nodes.

The input of the first transform is the gradient; the output of the last one is added to the weight.
A transform may keep slots from step to step. Optimizers are frozen dataclasses: compared, printed
and pickled by their parameters.
"""

from onnxgrad.optimizers.adaptive import (
    Rprop,
    ScaleByAdadelta,
    ScaleByAdagrad,
    ScaleByAdam,
    ScaleByAdamax,
    ScaleByAdamEpsHat,
    ScaleByLion,
    ScaleByNadam,
    ScaleByRadam,
    ScaleByRms,
)
from onnxgrad.optimizers.averages import (
    Ema,
    Lookahead,
    ScheduleFree,
    Swa,
    ema,
    lookahead,
    schedule_free,
    swa,
)
from onnxgrad.optimizers.base import Chain, Inputs, Optimizer, Slots
from onnxgrad.optimizers.clipping import (
    Clip,
    ClipByGlobalNorm,
    ClipByNorm,
    clip,
    clip_by_global_norm,
    clip_by_norm,
)
from onnxgrad.optimizers.groups import ByRank, ParamGroup, ParamGroups, WithRate, param_groups
from onnxgrad.optimizers.matrix_updates import Adafactor, Orthogonalize, ScaleByTrustRatio
from onnxgrad.optimizers.presets import (
    OPTIMIZERS,
    WHOLE_TENSORS,
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    lamb,
    lion,
    momentum,
    muon,
    nadam,
    nesterov,
    radam,
    rmsprop,
    rprop,
    select,
    sgd,
)
from onnxgrad.optimizers.scaling import AddDecayedWeights, ScaleByLearningRate, Trace
