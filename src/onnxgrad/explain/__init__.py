"""Explanations of models by their ONNX files alone: attributions, attacks, influences.

Examples:
    >>> import numpy as np, onnx, onnxgrad as og
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 9, opset_import: ["": 20]>
    ...     f (float[N,2] x) => (float[N,2] y) { y = Mul(x, x) }''')
    >>> og.explain.saliency(model, np.float32([[1, 2]]), target=1).tolist()
    [[0.0, 4.0]]
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
