"""The form of a model that trains, and the form that predicts.

`training_form.py` has BatchNormalization with the statistics of a batch, `dropouts.py` Dropout,
`stored_integers.py` weights that are rounded and the integers of a file, `ranges.py` scales that
train; `inference_form.py` writes what a trained file predicts with.
"""
