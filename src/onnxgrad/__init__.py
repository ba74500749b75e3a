"""Train and differentiate ONNX models with the ordinary onnxruntime wheel.

The public names are listed in `__init__.pyi`; each module is imported when a name of it is first
used.
"""

from importlib.util import find_spec

import lazy_loader

from onnxgrad.deferred import defer

defer()
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
if find_spec("sklearn") is None:  # or `from onnxgrad import *` would raise
    __all__ = [name for name in __all__ if name not in ("OnnxClassifier", "OnnxRegressor")]
__version__ = "0.1.0"
