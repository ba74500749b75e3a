"""Differentiating ONNX graphs."""
