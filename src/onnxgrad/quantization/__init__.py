"""Quantization by onnxruntime, in the form that trains."""
