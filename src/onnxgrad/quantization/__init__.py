"""Quantization by onnxruntime, to models with QuantizeLinear nodes that can be trained."""
