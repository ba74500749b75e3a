"""Several processes that train one model."""

from onnxgrad.errors import (
    ProcessLostError as ProcessLostError,
)
from onnxgrad.parallel.process_groups import (
    DataParallel as DataParallel,
)
