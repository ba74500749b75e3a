"""The estimators of `onnxcustom.training`, and the passes of `experimental_experiment`."""
