"""Tests, in one folder for each room of `src/onnxgrad`; `support` has what several of them use."""
