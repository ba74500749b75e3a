"""Running models on onnxruntime: devices, sessions, bound inputs and outputs.

`predictor.py` is the one way to run rows of arrays: in chunks, in fixed batches, cast to the dtypes
of the inputs. `device.py` names devices, `session.py` makes sessions, `values.py` binds arrays and
OrtValues. `not_finite.py`, `profile.py` and `run_shapes.py` run a model to learn a fact of it.
"""
