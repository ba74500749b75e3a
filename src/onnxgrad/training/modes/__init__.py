"""The form of a model that trains, and the form that predicts.

`training_form.py` has BatchNormalization with the statistics of a batch, `dropouts.py` Dropout,
`stored_integers.py` quantized weights as floats and as the integers of a file, `ranges.py` scales
of quantization that train; `inference_form.py` writes the model that predicts.
"""
