"""ONNX models as operations of PyTensor, for PyMC: `model_op.py`, and `jax_compilation.py` for
functions that PyTensor compiles to JAX.
"""

import onnxgrad.pytensor.jax_compilation
from onnxgrad.pytensor.model_op import OnnxOp

__all__ = ["OnnxOp"]
