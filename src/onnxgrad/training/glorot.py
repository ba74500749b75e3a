"""Where weights start that are drawn by the rule of Glorot & Bengio 2010."""

from __future__ import annotations

from math import prod

import numpy as np


def glorot(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return a weight of two or more axes, drawn uniformly for its fan in and out; else itself."""
    if w.ndim < 2:
        return w
    receptive = prod(w.shape[2:])
    limit = np.sqrt(6 / ((w.shape[0] + w.shape[1]) * receptive))
    return rng.uniform(-limit, limit, w.shape).astype(w.dtype)
