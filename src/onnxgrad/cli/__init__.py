"""The command line."""

from onnxgrad.cli.app import app

__all__ = ["app"]
