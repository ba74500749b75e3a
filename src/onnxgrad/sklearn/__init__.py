"""Estimators with the manners of scikit-learn, whose network is an ONNX model."""
