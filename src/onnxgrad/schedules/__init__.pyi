"""Learning rates by step, and the range test that finds one."""

from onnxgrad.schedules.base import (
    Schedule as Schedule,
    constant as constant,
)
from onnxgrad.schedules.compose import (
    join as join,
    warmup as warmup,
)
from onnxgrad.schedules.curves import (
    cosine as cosine,
    exponential as exponential,
    inverse_sqrt as inverse_sqrt,
    linear as linear,
    one_cycle as one_cycle,
    plateau as plateau,
    polynomial as polynomial,
    step_decay as step_decay,
)
from onnxgrad.training.range_test import (
    RangeTest as RangeTest,
    lr_range_test as lr_range_test,
)
