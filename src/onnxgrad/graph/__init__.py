"""Graphs of `onnx_ir`: writing nodes, inferring shapes and types, removing unused nodes."""
