"""Whether products of 8-bit integers overflow on this processor."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onnxgrad.model.draft import Draft
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import loaded

_TERMS = 64  # of one sum


@cache
def integer_products_overflow(activations: str | None, weights: str) -> bool:
    """Return whether onnxruntime's CPU kernel sums the largest products of two dtypes wrongly.

    Processors without VNNI add pairs of products of uint8 and int8 in 16 bits, which saturate.
    Other dtypes have no kernel of integers.
    """
    if not {activations, weights} <= {"uint8", "int8"}:
        return False
    feed: dict[str, np.ndarray] = {}
    draft, exact = Draft("products"), _TERMS
    for kind, shape in ((activations, (1, _TERMS)), (weights, (_TERMS, 1))):
        most = np.iinfo(np.dtype(kind)).max
        name, exact = f"x{len(feed)}", exact * int(most)
        feed[name] = np.full(shape, most, kind)
        draft.add(ir.val(name, ir.DataType.from_numpy(feed[name].dtype), shape))
    sums = draft.op.MatMulInteger(*draft.graph.inputs)
    sums.dtype = ir.DataType.INT32
    model = draft.model({"sums": sums})
    session = loaded(model, ort.SessionOptions(), providers=Device.of("cpu").providers)
    return bool(session.run(None, feed)[0].item() != exact)
