"""The table of float constants that `trainable` returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex, overload

from onnxgrad.errors import join_first, printable
from onnxgrad.reporting import html_table

LISTED = 12  # tensors that a message names
_WIDEST = {"name": 80, "alias": 80, "why": 100}  # characters of a column


@dataclass(frozen=True)
class Tensor:
    """A float constant of a model, and whether it trains.

    Attributes:
        name: the name of the constant in the model.
        shape: the shape of the constant.
        dtype: "float32", "float64", "float16" or "bfloat16"; "int8", "uint4" or similar.
        size: the number of elements.
        trains: whether the constant trains.
        why: the role of the constant in the graph, or another reason why it trains or does not.
        doubtful: whether trainers warn about the decision.
        alias: where an exporter numbered the name: the name that the tensor has in its module, as
            "encoder.layer.0.query.weight"; otherwise "".
        is_weight: whether the role of the constant is a weight's: by default weights train.
        copy_of: the name of the table of an embedding with the same numbers: the network shares one
            weight, of which the exporter stored two copies. Otherwise "".
        is_last: whether it is a weight of a last layer, behind which there is no product with
            weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    trains: bool
    why: str
    doubtful: bool = False
    alias: str = ""
    is_weight: bool = False
    copy_of: str = ""
    is_last: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the constant, followed by its alias if it has an alias."""
        return (self.name, self.alias) if self.alias else (self.name,)


class Tensors(list[Tensor]):
    """A list of `Tensor` that prints as a table, and whose slices print as tables."""

    @property
    def trained(self) -> Tensors:
        """The tensors that train."""
        return Tensors(t for t in self if t.trains)

    @property
    def frozen(self) -> Tensors:
        """The tensors that do not train."""
        return Tensors(t for t in self if not t.trains)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice, /) -> Tensors: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> Tensor | Tensors:
        """Return a tensor by its index, or `Tensors` by a slice."""
        part = super().__getitem__(index)
        return Tensors(part) if isinstance(part, list) else part

    def _table_cells(self) -> list[list[str]]:
        """Return the lines of the table as lists of cells, the head first.

        The column of aliases is left out if no tensor has an alias.
        """
        columns = {
            "name": [_shortened_cell(t.name, "name") for t in self],
            "alias": [_shortened_cell(t.alias, "alias") for t in self],
            "shape": [str(list(t.shape)) for t in self],
            "dtype": [t.dtype for t in self],
            "trains": ["yes" if t.trains else "no" for t in self],
            "why": [_shortened_cell(t.why, "why") for t in self],
        }
        if not any(columns["alias"]):
            del columns["alias"]
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

    def _total_line(self) -> str:
        """Return the line below the table: the counts of constants and of elements that train."""
        trained = self.trained
        floats = [t for t in self if "int" not in t.dtype and "float8" not in t.dtype]
        numbers = f"{sum(t.size for t in trained):,} of {sum(t.size for t in floats):,} numbers"
        quantized = len(self) - len(floats)
        stay = f"; {quantized} quantized weights stay" if quantized else ""
        return f"{len(trained)} of {len(floats)} float constants train: {numbers}{stay}"

    def __str__(self) -> str:
        lines = self._table_cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([*table, self._total_line()])

    def _repr_html_(self) -> str:
        head, *rows = self._table_cells()
        return html_table(head, rows, [self._total_line()])

    __repr__ = __str__


def names_and_reasons(rows: Iterable[Tensor], most: int = LISTED) -> str:
    """Return the names of the first `most` tensors with the reasons `why`, as one line of text."""
    return join_first([f"{quoted_name(t)} ({t.why})" for t in rows], most, "; ")


def quoted_name(tensor: Tensor) -> str:
    """Return the name of a tensor in quotes for a message, with its alias if it has one."""
    alias = f" ({printable(tensor.alias)})" if tensor.alias else ""
    return f"{printable(tensor.name)!r}{alias}"


def _shortened_cell(text: str, column: str) -> str:
    """Return the text of a cell of the table, cut in the middle if it is too long."""
    text, half = printable(text), (_WIDEST[column] - 3) // 2
    return text if len(text) <= _WIDEST[column] else f"{text[:half]}...{text[-half:]}"
