"""Reading, preparing and writing ONNX graphs."""
