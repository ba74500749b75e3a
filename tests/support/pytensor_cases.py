"""The models of `bridge_cases.py` as operations of PyTensor."""

import numpy as np
import pytensor.tensor as pt

from onnxgrad.pytensor import OnnxOp


def operation_of_case(case, model=None):
    """Return the outputs of a case as variables, its float variables, and the values of all."""
    op = OnnxOp(model or case.model(), trainable=list(case.weights), dtype=case.dtype)
    inputs = [free_variable(x) for x in case.inputs]
    weights = {name: free_variable(w) for name, w in op.params.items()}
    values = dict(zip(inputs, case.inputs, strict=True))
    values |= {variable: op.params[name] for name, variable in weights.items()}
    outputs = op(*inputs, params=weights, return_list=True)
    return outputs, [*weights.values(), *(inputs[i] for i in case.float_inputs())], values


def free_variable(array):
    """Return a variable for arrays of any lengths."""
    return pt.tensor(dtype=array.dtype.name, shape=(None,) * array.ndim)


def weighted_sum(outputs):
    """Return the loss of all float outputs."""
    real = [y for y in outputs if np.dtype(y.dtype).kind == "f"]
    return sum((i * y**2 + y).sum() for i, y in enumerate(real, 1))
