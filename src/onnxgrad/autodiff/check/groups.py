"""Which tensors `check_gradient` moves together, so that a large model takes few runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_LARGEST = 8  # tensors that are moved together
_UNLIKE = 100  # largest ratio of the sizes of their gradients: a wrong small one is seen


def together(
    names: Sequence[str] | Mapping, gradients: Mapping[str, np.ndarray]
) -> list[list[str]]:
    """Return groups of tensors whose gradients are of similar size, in the order of the first ones.

    The derivative along a joint direction is a sum over the tensors of a group. None of its terms
    is expected below 1/100 of the largest one, so that it is not lost among the others. Gradients
    that are zero, or absent, are together, and each that is not finite is alone.

    Examples:
        >>> import numpy as np
        >>> sizes = {"a": 1.0, "b": 50.0, "c": 1e-4, "d": 0.0, "e": 2.0}
        >>> together([*sizes, "f"], {n: np.array([g]) for n, g in sizes.items()})
        [['b', 'e', 'a'], ['c'], ['d', 'f']]
    """
    norms = {n: float(np.linalg.norm(gradients.get(n, np.zeros(1)))) for n in names}
    groups: list[list[str]] = []
    for name in sorted(norms, key=lambda n: -norms[n] if np.isfinite(norms[n]) else -np.inf):
        size = norms[name]
        first = norms[groups[-1][0]] if groups else np.nan
        alike = np.isfinite(size) and (size > 0) == (first > 0) and size * _UNLIKE >= first
        if alike and np.isfinite(first) and len(groups[-1]) < _LARGEST:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups
