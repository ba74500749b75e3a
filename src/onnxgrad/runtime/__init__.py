"""Running models on onnxruntime: devices, sessions, bound inputs and outputs."""
