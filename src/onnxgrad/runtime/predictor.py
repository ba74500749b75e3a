"""`Predictor`: the outputs of a model for rows of data, in calls of a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from onnxgrad.errors import argument, escaping
from onnxgrad.model.feeds import session_dtype
from onnxgrad.model.read import ModelLike, read
from onnxgrad.reporting import warn_once
from onnxgrad.runtime.checked import CheckedSession
from onnxgrad.runtime.device import Device
from onnxgrad.runtime.session import load_session, session
from onnxgrad.runtime.values import take_rows

Arrays = dict[str, np.ndarray]
ROWS = 256  # rows of a call
MANY_ROWS = 4 * ROWS  # rows of a call of a model that computes little


class Predictor:
    """Runs a model on rows of arrays.

    Args:
        model: model, serialized model or path; or a session of onnxruntime.
        outputs: names of the outputs that calls return; empty: all.
        device: where a model runs.
        fixed_rows: rows of a static batch, which every call has; None: as the model declares, 0:
            any number of rows.
        work: multiply-adds of a call of a model, for which there are threads; None: a thread for
            each core.

    Attributes:
        inputs, outputs: onnxruntime's description of each input and output, by name.
        fixed_rows: rows of a static batch; 0 if a call takes any number of rows.
    """

    def __init__(
        self,
        model: ModelLike | ort.InferenceSession | CheckedSession,
        outputs: Sequence[str] = (),
        device: Device | str = "cpu",
        fixed_rows: int | None = None,
        work: float | None = None,
    ) -> None:
        proto = ModelProto()
        if isinstance(model, (ort.InferenceSession, CheckedSession)):
            self.session: Any = model
        else:
            proto, device = read(model), Device.of(device).check()
            if work is None:
                self.session = load_session(proto, providers=device.providers)
            else:
                self.session = session(proto, device, work)
        self.inputs = {x.name: x for x in self.session.get_inputs()}
        self.outputs = {y.name: y for y in self.session.get_outputs()}
        # a graph may list an output twice
        self.returned = list(outputs) or [y.name for y in self.session.get_outputs()]
        if fixed_rows is None:
            declared = {x.shape[0] for x in self.inputs.values() if x.shape}
            (rows,) = declared if len(declared) == 1 else (0,)
            fixed_rows = rows if isinstance(rows, int) else 0
        self.fixed_rows = fixed_rows
        # an output of a static first axis may be a statistic of all rows, not a row for each row
        returned = (y for y in proto.graph.output if y.name in self.returned)
        first = [d for y in returned for d in y.type.tensor_type.shape.dim[:1]]
        self._declares_any_rows = any(not d.dim_value for d in first)

    @cached_property
    def dtypes(self) -> dict[str, np.dtype]:
        """The dtype of each input and output that is a tensor."""
        kinds = {name: session_dtype(v.type) for name, v in (self.inputs | self.outputs).items()}
        return {name: kind.numpy() for name, kind in kinds.items() if kind}

    @escaping()
    def run(self, feed: Any, outputs: Sequence[str] = ()) -> list[Any]:
        """Return the outputs of one call; `feed` is `{input: array}`, or an array for the only
        input.

        The arrays are cast to the dtypes of the inputs.

        Raises:
            ValueError: an input without an array, or an array that no input takes.
        """
        by_name = feed if isinstance(feed, Mapping) else {next(iter(self.inputs)): feed}
        if missing := [name for name in self.inputs if by_name.get(name) is None]:
            raise ValueError(
                f"pass the inputs {missing}, too: the model needs them beside {list(by_name)}"
            )
        if unknown := [name for name in by_name if name not in self.inputs]:
            raise ValueError(
                f"leave out {unknown}: the model has only the inputs {list(self.inputs)}"
            )
        arrays = {n: np.asarray(array, self.dtypes.get(n)) for n, array in by_name.items()}
        return self.compute(arrays, outputs)

    def compute(self, values: Mapping[str, Any], outputs: Sequence[str] = ()) -> list[Any]:
        """Return the outputs of one call, without the checks and casts of `run`.

        `values` has arrays of the dtypes of the inputs, or OrtValues, and may have more names, such
        as all the weights of a training. Names in messages are not escaped.
        """
        fed = {name: values[name] for name in self.inputs}
        return self.session.run(list(outputs) or self.returned, fed)

    def run_rows(
        self,
        feed: Mapping[str, np.ndarray],
        most: int | None = None,
        whole: Collection[str] = (),
    ) -> dict[str, Any]:
        """Return the outputs that have a row for each row of `feed`, by name.

        A call has at most `most` rows, or the rows of a static batch: missing rows are copies of
        the last row, and are cut from the outputs. Every call gets the arrays that `whole` names,
        which have no rows. A file may declare any number of rows, and not compute them: where it
        runs on one row, and not on two copies of it, each call gets one row.

        Raises:
            ValueError: as `run`; no rows for a static batch; an output that differs in length
                between calls, along another axis than the rows.
        """
        count = next(len(array) for name, array in feed.items() if name not in whole)
        size = self.fixed_rows or min(count, most or count)
        if count > size:
            cuts = (slice(i, i + size) for i in range(0, count, size))
            parts = [self.run_rows(take_rows(feed, cut, whole), None, whole) for cut in cuts]
            names = [name for name in self.returned if all(name in part for part in parts)]
            return {name: join_rows(name, [part[name] for part in parts]) for name in names}
        if count < size:
            if not count:
                raise ValueError(
                    f"the model takes {size} rows at once, and the data have none: pass a row"
                )
            feed = take_rows(feed, np.minimum(np.arange(size), count - 1), whole)
        try:
            named = dict(zip(self.returned, self.run(feed), strict=True))
        except Exception:  # of several types
            if self.fixed_rows or count < 2 or not self._takes_one_row_only(feed, whole):
                raise
            return self.run_rows(feed, None, whole)
        found = {name: y[:count] for name, y in named.items() if _count_rows(y) == size}
        may_be_single = count > 1 and not self.fixed_rows and self._declares_any_rows
        if not found and may_be_single and self._takes_one_row_only(feed, whole):
            return self.run_rows(feed, None, whole)
        return found

    def _takes_one_row_only(self, feed: Mapping[str, np.ndarray], whole: Collection[str]) -> bool:
        """Return whether the model can run on one row, but not on two copies of that row.

        If so, each call gets one row from now on, and the logger warns.
        """
        for count in (1, 2):
            rows = take_rows(feed, np.zeros(count, int), whole)
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
        """Return all outputs for any number of rows, by name, in calls of `rows` rows.

        Raises:
            ValueError: as `run`; an output that does not have a row for each.
        """
        found = self.run_rows(feed, rows)
        if lacking := [name for name in self.returned if name not in found]:
            raise ValueError(
                f"the outputs {lacking} do not have a row for each row of the data: choose other "
                f"outputs with {argument('outputs')}"
            )
        return found


def join_rows(name: str, parts: Sequence[Any], axis: int = 0) -> Any:
    """Return an output of several calls as one array, or as one list of dicts.

    Raises:
        ValueError: the arrays differ in length along another axis than `axis`, the rows.
    """
    if len(parts) == 1 or isinstance(parts[0], list):
        return parts[0] if len(parts) == 1 else list(chain(*parts))
    shapes = sorted({(*y.shape[:axis], None, *y.shape[axis + 1 :]) for y in parts}, key=str)
    if len(shapes) > 1:
        first, second = (str(list(shape)).replace("None", "N") for shape in shapes[:2])
        raise ValueError(
            f"{name!r} has the shape {first} in one batch and {second} in another, as sequences "
            "differ in length: predict rows of one length at a time, or all rows in one batch: "
            f"{argument('batch_size')}<number of rows>"
        )
    return np.concatenate(parts, axis)


def _count_rows(y: Any) -> int | None:
    """Return the length of a list, or of the first axis of an array; None for a scalar."""
    return len(y) if isinstance(y, list) or np.ndim(y) else None
