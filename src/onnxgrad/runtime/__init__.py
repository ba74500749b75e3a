"""Running models on onnxruntime: devices, sessions, bound inputs and outputs.

`predictor.py` is the one way to run rows of arrays: in chunks, in fixed batches, cast to the dtypes
of the inputs. `device.py` names devices and registers plugins, `session.py` makes sessions, and
measures the times of operators and the shapes of outputs by a run; `values.py` binds arrays and
OrtValues. `checked.py` compares the first run on a device with the CPU, and `device_report.py`
tells where nodes run; `node_runs.py` runs a model in pieces, by which `not_finite.py` finds the
node that first computes NaN. `huge_pages.py` copies the memory of long trainings into huge pages.
"""
