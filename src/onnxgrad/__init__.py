"""Train and differentiate ONNX models with the ordinary onnxruntime wheel.

The public names are listed in `__init__.pyi`, here and in each submodule; a module is imported when
one of its names is first used.
"""

import os
from importlib.util import find_spec

from onnxgrad.lazy_names import offer_names
from onnxgrad.lazy_sympy import defer_sympy_import

defer_sympy_import()
__getattr__, __dir__, __all__ = offer_names(__name__, __file__)
if find_spec("sklearn") is None:  # or `from onnxgrad import *` would raise
    __all__ = [name for name in __all__ if name not in ("OnnxClassifier", "OnnxRegressor")]
__version__ = "0.1.0"

if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}.isdisjoint(os.environ):  # started by MPI
    from onnxgrad.parallel.engines import abort_all_on_error

    abort_all_on_error()  # also if this process fails before it has a trainer
