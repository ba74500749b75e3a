"""Large numbers in data, of which a training may diverge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrad.errors import named

_LARGE = 100.0  # in size: numbers that nobody has standardized


def large_numbers(
    arrays: Mapping[str, np.ndarray],
    columns: Mapping[str, Sequence[str]],
    weight: str | None = None,
) -> str | None:
    """Return a clause that names the largest number of the data, None if it is not large.

    Args:
        arrays: those of data, by input.
        columns: the names of columns, by input.
        weight: the input of sample weights, of which only differences count.
    """
    found: list[tuple[float, str]] = []
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not array.size:
            continue
        names = columns.get(name, ())
        by_column = len(names) == array.shape[-1] if array.ndim else False
        flat = array.reshape(-1, len(names) if by_column else 1)
        ends = np.fmin.reduce(flat), np.fmax.reduce(flat)  # NaN is a label that does not count
        sizes = np.abs(np.stack(ends).astype(np.float64)).max(axis=0)
        largest = float(sizes.max())
        what = f"the input {name!r}"
        if name == weight:
            usual = float(np.median(array[array > 0])) if largest else 1.0
            what = f"the largest {named('sample_weight')}"
            shown = f"is {largest:.3g}, and the median {usual:.3g}"
            largest /= usual
        else:
            shown = f"reaches {largest:.3g}"
            if by_column:
                what = f"the column {names[int(sizes.argmax())]!r}"
        if largest > _LARGE:
            found.append((largest, f"{what} {shown}"))
    return max(found)[1] if found else None
