"""Arrays that models with If, Loop and Scan are fed with."""

import numpy as np


def normal_array(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers of float32, small enough for products in loops."""
    return (0.7 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
