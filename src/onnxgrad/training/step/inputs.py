"""What a step reads beside the weights and slots that it updates, each input declared once.

A scalar has an entry of `SCALARS`: its dtype, and its values for the steps of a call. Nodes read it
as the value that `Scalar.input` returns; what runs a step feeds all that its graph reads, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrad.graph.emit import Emit
from onnxgrad.training.batches import Slice
from onnxgrad.training.mixing import Mixing

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Call:
    """The steps of one call of the runtime.

    - `piece`: their batches.
    - `rates`: the learning rate of each, (steps,); in a stack (steps, members).
    - `done`: the number of steps before them.
    - `position`: the number of the first batch in its epoch.
    - `micro_batches`: into how many parts each batch is split; None: into none.
    """

    piece: Slice
    rates: np.ndarray
    done: int
    position: int
    micro_batches: int | None = None

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of the steps, from 0 on."""
        return self.done + np.arange(self.piece.batches)


@dataclass(frozen=True)
class Scalar:
    """An input with one value a step, or one a micro-batch.

    - `values`: returns the values for the steps of a call, along the first axis.
    - `of_rows`: whether each part of the rows of a batch may read its own.
    """

    name: str
    dtype: ir.DataType
    values: Callable[[Call], np.ndarray]
    of_rows: bool = False

    def input(self, op: Emit, shape: Sequence[int] = (), wide: bool = False) -> ir.Value:
        """Return a new value for it, in float64 if it is `wide`; not yet an input of the graph."""
        dtype = ir.DataType.DOUBLE if wide else self.dtype
        return ir.Value(
            name=op.name(self.name), type=ir.TensorType(dtype), shape=ir.Shape(list(shape))
        )

    def fed(self, call: Call, value: ir.Value) -> np.ndarray:
        """Return the values for the steps of a call, in the dtype of the input `value`."""
        assert value.dtype is not None
        return self.values(call).astype(value.dtype.numpy())


def _draws(call: Call) -> np.ndarray:
    """Return numbers that differ between steps, micro-batches, and processes that share a batch."""
    part = call.piece.part
    numbers = call.numbers * part.size + part.rank
    if call.micro_batches is None:
        return numbers
    return (numbers[:, None] << 20) + np.arange(call.micro_batches)


def _shares(call: Call) -> np.ndarray:
    """Return the share of the rows of a batch that this process has."""
    return np.full(call.piece.batches, call.piece.counted / call.piece.rows)


def _firsts(call: Call) -> np.ndarray:
    """Return which batches begin an epoch or a sequence."""
    first = call.numbers == call.done - call.position
    return first if call.piece.begins is None else first | call.piece.begins


def _rows(call: Call) -> np.ndarray:
    """Return the number of rows of a batch, in all processes."""
    return np.full(call.piece.batches, call.piece.rows)


RATE = Scalar("minus_learning_rate", ir.DataType.FLOAT, lambda call: -call.rates)
STEP = Scalar("step", ir.DataType.INT64, lambda call: call.numbers + 1)
DRAW = Scalar("draw", ir.DataType.INT64, _draws, of_rows=True)
FIRST = Scalar("first", ir.DataType.BOOL, _firsts)
SHARE = Scalar("share", ir.DataType.DOUBLE, _shares, of_rows=True)
ROWS = Scalar("rows", ir.DataType.FLOAT, _rows)
SCALARS = {scalar.name: scalar for scalar in (RATE, STEP, DRAW, FIRST, SHARE, ROWS)}


@dataclass
class StepInputs:
    """The inputs of the graph of a step, in this order.

    - `states`: the weights and slots of groups, which the graph replaces.
    - `buffers`: other states that it replaces.
    - `data`: those of a batch, by their names in the objective.
    - `scalars`: those of `SCALARS` that it reads, by their names there.
    - `mixing`: how rows are mixed, with inputs of its own; None: they are not.
    """

    states: list[ir.Value]
    buffers: list[ir.Value]
    data: dict[str, ir.Value]
    scalars: dict[str, ir.Value]
    mixing: Mixing | None = None

    @property
    def carried(self) -> list[ir.Value]:
        """The inputs whose new values are the first outputs."""
        return [*self.states, *self.buffers]

    @property
    def all(self) -> list[ir.Value]:
        """All inputs, in their order."""
        mixed = [] if self.mixing is None else self.mixing.inputs
        return [*self.carried, *self.data.values(), *self.scalars.values(), *mixed]

    @property
    def of_rows(self) -> list[ir.Value]:
        """The inputs of which each part of the rows of a batch has its own."""
        scalars = [v for name, v in self.scalars.items() if SCALARS[name].of_rows]
        return [*self.data.values(), *scalars]

    def fed(self, call: Call, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return data and scalars for the steps of a call, by the names of the inputs."""
        fed = {str(x.name): arrays[name] for name, x in self.data.items()}
        fed |= {str(v.name): SCALARS[n].fed(call, v) for n, v in self.scalars.items()}
        if self.mixing is not None:
            rows = call.piece.own // (call.micro_batches or 1)
            fed |= self.mixing.fed(_draws(call), rows)
        return fed
