"""Training: from a model, data and arguments to trained weights.

`trainer.py` and `stack.py` have a `Job` (`job.py`): the arguments, which one table checks, and the
notes for the metadata of the trained file. A call of `fit` (`fit.py`) derives a `Recipe` from job
and data (`recipe.py`, `data.py`, `fields.py`), an objective (`objective.py`, `model_loss.py`), a
step (`step`), a runner (`run`) and the loop (`loop.py`), which changes the state and reports the
progress (`state.py`); `saving.py` and `array_files.py` write it to the disk. `evaluator.py`
computes losses, metrics and predictions for any weights, `samples.py` predictions with dropout,
`loss_gradient.py` the gradient of the loss of all rows, and `frozen_cache.py` the frozen layers
once. `parameters` decides what trains, `modes` has the forms of BatchNormalization, Dropout and
stored integers, `callbacks` the public callbacks. `diagnose.py` says why a training ended, and
`device_check.py` which nodes of a step a device computes.
"""
