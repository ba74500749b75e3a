"""Graphs of `onnx_ir`: writing nodes, inferring shapes and types, removing unused nodes.

`emit.py` is the only writer of nodes. `walk.py` infers types and shapes node by node, by the
records of `operators` and by onnx (`by_onnx.py`); `infer.py` does so for a whole file. `rewrite.py`
drives functions that replace nodes, `tidy.py` removes what no output needs, `precision.py` changes
dtypes.
"""

from onnxgrad.lazy_names import offer_names

__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
