"""`Predictor`: the outputs of a model for rows of data, in calls of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import onnxruntime as ort

from onnxgrad.errors import argument, escaping
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.read import ModelLike, read
from onnxgrad.reporting import warn_once
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import load_session, session

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
            self.session = load_session(running, settings, providers=device.providers)
        else:
            self.session = session(running, device, work)
        self.inputs = {x.name: x for x in self.session.get_inputs()}
        self.outputs = {y.name: y for y in self.session.get_outputs()}
        self.returned = list(outputs) or list(self.outputs)
        self.fixed_rows = self._declared_rows if fixed_rows is None else fixed_rows
        # whether the file states any number of rows for an output: else it may be of all rows
        returned = (y for y in running.graph.output if y.name in self.returned)
        first = [d for y in returned for d in y.type.tensor_type.shape.dim[:1]]
        self._stated_rows = any(not d.dim_value for d in first)

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

    def run_rows(self, feed: Mapping[str, np.ndarray], most: int | None = None) -> dict[str, Any]:
        """Return the outputs that have a row for each row of `feed`, by name.

        A call has at most so many rows, or the rows of a static batch: missing ones are copies of
        the last row, and are cut from the outputs. A file may declare any number of rows, and not
        compute them: where it runs on one row, and not on two copies of it, each call gets one.

        Raises:
            ValueError: as `run`.
        """
        count = len(next(iter(feed.values())))
        size = self.fixed_rows or min(count, most or count)
        if count > size:
            starts = range(0, count, size)
            parts = [self.run_rows({n: a[i : i + size] for n, a in feed.items()}) for i in starts]
            names = [name for name in self.returned if all(name in part for part in parts)]
            return {name: _join_rows([part[name] for part in parts]) for name in names}
        if count < size:
            feed = {
                name: np.concatenate([array, np.repeat(array[-1:], size - count, axis=0)])
                for name, array in feed.items()
            }
        try:
            named = dict(zip(self.returned, self.run(feed), strict=True))
        except Exception:  # of several types
            if self.fixed_rows or count < 2 or not self._takes_one_row(feed):
                raise
            return self.run_rows(feed)
        found = {name: y[:count] for name, y in named.items() if _count_rows(y) == size}
        several = count > 1 and not self.fixed_rows
        if several and not found and self._stated_rows and self._takes_one_row(feed):
            return self.run_rows(feed)
        return found

    def _takes_one_row(self, feed: Mapping[str, np.ndarray]) -> bool:
        """Return whether the model runs on the first row, and not on two copies of it.

        If so, each call gets one row from now on, and the logger warns.
        """
        for count in (1, 2):
            rows = {n: np.repeat(array[:1], count, axis=0) for n, array in feed.items()}
            try:
                runs = any(_count_rows(y) == count for y in self.run(rows))
            except Exception:  # of several types
                runs = False
            if runs == (count == 2):
                return False
        self.fixed_rows = 1
        warn_once("the file takes one row at a time, whatever number of rows it declares")
        return True

    def predict(self, feed: Mapping[str, np.ndarray], rows: int = ROWS) -> Arrays:
        """Return all outputs for any number of rows, by name, in calls of so many rows.

        Raises:
            ValueError: as `run`; an output that does not have a row for each.
        """
        found = self.run_rows(feed, rows)
        if lacking := [name for name in self.returned if name not in found]:
            raise ValueError(
                f"the outputs {lacking} do not have a row for each row of the data: choose "
                f"others with {argument('outputs')}"
            )
        return found


def _join_rows(parts: list[Any]) -> Any:
    """Return the rows of several calls as one array, or as one list of maps."""
    return list(chain(*parts)) if isinstance(parts[0], list) else np.concatenate(parts)


def _count_rows(y: Any) -> int | None:
    """Return the length of a list, or of the first axis of an array; None for a scalar."""
    return len(y) if isinstance(y, list) or np.ndim(y) else None
