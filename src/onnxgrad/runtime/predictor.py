"""`Predictor`: the outputs of a model for rows of data, in calls of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import argument, escaping
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.read import ModelLike, read
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import loaded, session

Arrays = dict[str, np.ndarray]
ROWS = 256  # of a call


class Predictor:
    """Runs a model on arrays, which it casts to the dtypes of the inputs.

    Args:
        model: model, serialized model or path.
        outputs: names of the outputs that calls return; empty: all.
        device: where to run.
        fixed_rows: rows of a static batch, which every call has; None: as the model declares, 0:
            any number of rows.
        work: multiply-adds of a call, for which there are threads; None: a thread for each core.

    Attributes:
        inputs, outputs: the descriptions by onnxruntime, by name: types and shapes.
        fixed_rows: rows of a static batch; 0 if a call takes any number of rows.
    """

    def __init__(
        self,
        model: ModelLike,
        outputs: Sequence[str] = (),
        device: Device | str = "cpu",
        fixed_rows: int | None = None,
        work: float | None = None,
    ) -> None:
        running, device = read(model), Device.of(device).check()
        if work is None:
            settings = ort.SessionOptions()
            settings.log_severity_level = 4  # files hold constants that no node reads, and more
            self.session = loaded(running, settings, providers=device.providers)
        else:
            self.session = session(running, device, work)
        self.inputs = {x.name: x for x in self.session.get_inputs()}
        self.outputs = {y.name: y for y in self.session.get_outputs()}
        self.returned = list(outputs) or list(self.outputs)
        self.fixed_rows = self._declared_rows if fixed_rows is None else fixed_rows

    @property
    def _declared_rows(self) -> int:
        """The first length of all inputs, if all declare the same one; 0 otherwise."""
        first = {x.shape[0] for x in self.inputs.values() if x.shape}
        (rows,) = first if len(first) == 1 else (0,)
        return rows if isinstance(rows, int) else 0

    @cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each input and output that is a tensor."""
        kinds = {name: session_dtype(v.type) for name, v in (self.inputs | self.outputs).items()}
        return {name: kind.numpy() for name, kind in kinds.items() if kind}

    @escaping()
    def run(self, feed: Any, outputs: Sequence[str] = ()) -> list[Any]:
        """Return outputs of one call, for arrays by name, or for the array of the only input.

        Raises:
            ValueError: an input without an array, or an array that no input takes.
        """
        by_name = feed if isinstance(feed, Mapping) else {next(iter(self.inputs)): feed}
        if by_name.keys() != self.inputs.keys() or any(a is None for a in by_name.values()):
            self._refuse_names(by_name)
        arrays = {n: np.asarray(array, self.dtypes.get(n)) for n, array in by_name.items()}
        return self.session.run(list(outputs) or self.returned, arrays)

    def _refuse_names(self, by_name: Mapping[str, Any]) -> None:
        """Raise `ValueError` for inputs that have no array, or arrays that no input takes."""
        if missing := [name for name in self.inputs if by_name.get(name) is None]:
            raise ValueError(f"the model needs the inputs {missing}, and got {list(by_name)}")
        unknown = [name for name in by_name if name not in self.inputs]
        raise ValueError(f"the model has the inputs {list(self.inputs)}, and not {unknown}")

    def run_rows(self, feed: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the outputs of one call that have a row for each row of `feed`, by name.

        Rows that a static batch lacks are copies of the last one, and are cut from the outputs.

        Raises:
            ValueError: as `run`.
        """
        count = len(next(iter(feed.values())))
        size = self.fixed_rows or count
        if count < size:
            feed = {
                name: np.concatenate([array, np.repeat(array[-1:], size - count, axis=0)])
                for name, array in feed.items()
            }
        results = zip(self.returned, self.run(feed), strict=True)
        return {name: y[:count] for name, y in results if _count_rows(y) == size}

    def predict(self, feed: Mapping[str, np.ndarray], rows: int = ROWS) -> Arrays:
        """Return outputs for any number of rows, by name, in calls of so many rows.

        Raises:
            ValueError: as `run`; an output that does not have a row for each.
        """
        count, size = len(next(iter(feed.values()))), self.fixed_rows or rows
        parts = []
        for start in range(0, max(count, 1), size):
            part = self.run_rows({n: a[start : start + size] for n, a in feed.items()})
            if lacking := [name for name in self.returned if name not in part]:
                raise ValueError(
                    f"the outputs {lacking} do not have a row for each row of the data: choose "
                    f"others with {argument('outputs')}"
                )
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in self.returned}


def _count_rows(y: Any) -> int | None:
    """Return the length of a list, or of the first axis of an array; None for a scalar."""
    return len(y) if isinstance(y, list) or np.ndim(y) else None
