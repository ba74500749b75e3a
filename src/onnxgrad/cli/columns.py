"""Which columns of data are labels, and which each input of a model takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgrad.cli.data_options import LabelOptions
from onnxgrad.data.arrays import DataError
from onnxgrad.data.columns import Names, check_names, same_columns
from onnxgrad.errors import argument, printable, unknown
from onnxgrad.training.objective import Objective

Columns = dict[str, list[str]]  # by input


@dataclass(frozen=True)
class Targets:
    """The columns of the labels: by the output that a loss compares with them, None for all."""

    columns: dict[str | None, list[str]]

    @classmethod
    def of(
        cls,
        options: LabelOptions,
        names: Collection[str],
        trained: Names,
        outputs: Sequence[str] = (),
    ) -> Targets:
        """Return the columns of `--target`, or else those of an earlier training.

        Args:
            options: of the command.
            names: of all columns.
            trained: the names of an earlier training.
            outputs: those that have losses, if they are several.

        Raises:
            ValueError: an unknown column, one that is named twice, or one without its output.
        """
        columns: dict[str | None, list[str]] = {}
        for text in options.target:
            output, equals, column = text.partition("=") if outputs else ("", "", text)
            if outputs and (not equals or output not in outputs):
                raise _several(outputs, f", not {text!r}")
            columns.setdefault(output if outputs else None, []).append(column)
        if not columns and trained.target and set(trained.target) <= set(names):
            columns[None] = list(trained.target)
        own = cls(columns)
        for name in own.names:
            if name not in names:
                raise unknown("column", name, names)
        if len(set(own.names)) < len(own.names):
            raise DataError(f"a target is named twice: {', '.join(map(repr, own.names))}")
        return own

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [name for each in self.columns.values() for name in each]

    def by_label(self, objective: Objective) -> Columns:
        """Return the columns of each label input.

        Raises:
            ValueError: a label without a column, or columns without a label.
        """
        inputs = [str(x.name) for x in objective.data]
        infos = {name: info for name, info in objective.labels.items() if name in inputs}
        names = list(infos)
        if not names and self.names:
            names = [next((t for t in self.names if t in inputs), "label")]
            if names[0] not in inputs:
                raise ValueError(
                    f"the model computes its own loss, but has no input {names[0]!r}: "
                    "--target must be the input that takes the labels, one of "
                    f"{', '.join(map(printable, inputs))}"
                )
        if names and not self.names:
            raise ValueError("the loss compares with labels: name their column with --target")
        if len(names) < 2:
            return dict.fromkeys(names, self.names)
        outputs = {str(info.prediction): name for name, info in infos.items()}
        if any(output not in outputs for output in self.columns):
            raise _several(outputs)
        if missing := next((o for o in outputs if o not in self.columns), None):
            raise ValueError(f"no --target {missing}=COLUMN for the loss of {missing!r}")
        return {name: self.columns[output] for output, name in outputs.items()}


def _several(outputs: Iterable[str], more: str = "") -> ValueError:
    return ValueError(
        "the losses are of several outputs: write --target OUTPUT=COLUMN for each of "
        f"{', '.join(map(printable, outputs))}{more}"
    )


def assign(
    ranks: Mapping[str, int],
    targets: Sequence[str],
    inputs: Sequence[str],
    trained: Names = Names(),  # noqa: B008 - never modified
) -> Columns:
    """Return the columns for each input.

    Each of several inputs takes the columns that it was trained on, or else the column of its
    name. A single input takes the column of its name if that contains arrays, else all columns but
    the targets: in the order of an earlier training, which are taken by name, or of the file.

    Args:
        ranks: how many axes the array of each column has.
        targets: columns of labels.
        inputs: names of inputs.
        trained: the names of an earlier training.

    Raises:
        ValueError: a target or an input without a column, or columns that an input was not trained
            on.
    """
    for name in targets:
        if name not in ranks:
            raise unknown("column", name, ranks)
    if sorted(targets) == sorted(trained.target):
        same_columns(targets, trained.target, "the target", "training", first=1)
    rest = [name for name in ranks if name not in targets]
    if not rest:
        raise DataError("every column is a target: none is left for the inputs of the model")
    first = inputs[0]
    if len(inputs) == 1 and not (first in rest and ranks[first] > 1):
        check_names(rest)
        order = trained.columns.get(first) or rest
        if sorted(order) != sorted(rest):
            _refuse_columns(first, rest, order)
        return {first: list(order)}
    columns_of = {name: trained.columns.get(name, [name]) for name in inputs}
    for name in (column for columns in columns_of.values() for column in columns):
        if name not in rest:
            raise unknown("column (every input of the model needs one)", name, rest)
    return columns_of


def _refuse_columns(name: str, names: Sequence[str], order: Sequence[str]) -> None:
    """Raise for columns of an input that are not those of an earlier training."""
    extra = [n for n in names if n not in order]
    try:
        same_columns(names, order, f"input {name!r}", "training", first=1)
    except DataError as e:
        advice = "correct the names in the data; their order does not matter"
        if set(order) <= set(names):
            advice = f"leave it out with {argument('ignore', extra[:6])}"
        raise DataError(f"{str(e).rpartition(': ')[0]}: {advice}") from None


def in_other_order(names: Iterable[str], columns: Columns, trained: Names) -> list[str]:
    """Return messages about columns that the data have in another order than a training."""
    messages = []
    for name, group in columns.items():
        order = [column for column in names if column in group]
        if name in trained.columns and order != group:
            messages.append(
                f"columns of input {name} are taken by name, in the order of its training: "
                f"{listed(group)} (the data has {listed(order)})"
            )
    return messages


def ignored(names: Iterable[str], columns: Columns, others: Sequence[str | None] = ()) -> list[str]:
    """Return a message about columns that are neither of an input nor `others`, if there are."""
    used = {*others, *(name for group in columns.values() for name in group)}
    left = [name for name in names if name not in used]
    return [f"ignored columns: {listed(left)}"] if left else []


def listed(names: Sequence[str]) -> str:
    """Return up to 12 names as text."""
    more = f", and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more
