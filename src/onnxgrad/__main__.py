"""`python -m onnxgrad`."""

from onnxgrad.cli import app

app(prog_name="onnxgrad")
