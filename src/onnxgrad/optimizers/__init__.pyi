"""Optimizers by name, the transforms that they are chains of, groups and averages."""

from onnxgrad.optimizers.adaptive import (
    ScaleByAdadelta as ScaleByAdadelta,
    ScaleByAdagrad as ScaleByAdagrad,
    ScaleByAdam as ScaleByAdam,
    ScaleByAdamax as ScaleByAdamax,
    ScaleByAdamEpsHat as ScaleByAdamEpsHat,
    ScaleByLion as ScaleByLion,
    ScaleByNadam as ScaleByNadam,
    ScaleByRadam as ScaleByRadam,
    ScaleByRms as ScaleByRms,
)
from onnxgrad.optimizers.averages import (
    ema as ema,
    lookahead as lookahead,
    schedule_free as schedule_free,
    swa as swa,
)
from onnxgrad.optimizers.base import (
    Chain as Chain,
    Optimizer as Optimizer,
    UpdateInputs as UpdateInputs,
)
from onnxgrad.optimizers.groups import (
    ParamGroup as ParamGroup,
    param_groups as param_groups,
)
from onnxgrad.optimizers.matrix_updates import (
    Orthogonalize as Orthogonalize,
    ScaleByTrustRatio as ScaleByTrustRatio,
)
from onnxgrad.optimizers.presets import (
    adadelta as adadelta,
    adafactor as adafactor,
    adagrad as adagrad,
    adam as adam,
    adamax as adamax,
    adamw as adamw,
    gradual_unfreezing as gradual_unfreezing,
    lamb as lamb,
    lion as lion,
    momentum as momentum,
    muon as muon,
    nadam as nadam,
    nesterov as nesterov,
    radam as radam,
    rmsprop as rmsprop,
    rprop as rprop,
    sgd as sgd,
)
from onnxgrad.optimizers.scaling import (
    AddDecayedWeights as AddDecayedWeights,
    ScaleByLearningRate as ScaleByLearningRate,
    Trace as Trace,
    clip as clip,
    clip_by_global_norm as clip_by_global_norm,
    clip_by_norm as clip_by_norm,
)
