"""Gradients of graphs. Importing this package registers its rules and lowerings."""

from onnxgrad.autodiff import control, rules
from onnxgrad.autodiff.primal import lowerings
