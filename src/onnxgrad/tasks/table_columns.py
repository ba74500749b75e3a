"""Which columns of data are labels, and which each input of a model takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import first_names
from onnxgrad.data.columns import Names
from onnxgrad.errors import argument, named, printable, unknown
from onnxgrad.training.objective import Objective

Columns = dict[str, list[str]]  # by input
TargetColumns = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
InputColumns = Sequence[str] | Mapping[str, Sequence[str]] | None


@dataclass(frozen=True)
class Targets:
    """The columns of the labels: by the output that a loss compares with them, None for all."""

    columns: dict[str | None, list[str]]

    @classmethod
    def of(
        cls,
        target: TargetColumns,
        names: Collection[str],
        trained: Names,
        outputs: Sequence[str] = (),
        weight: str | None = None,
    ) -> Targets:
        """Return the columns of the labels, by default as in an earlier training.

        Args:
            target: a column, several, or one or several by output; None: none is named.
            names: all columns.
            trained: the names that the model stores.
            outputs: the outputs that have losses, if they are several.
            weight: the column of sample weights.

        Raises:
            ValueError: a column that is not there or is named twice, or outputs without a column.
        """
        by_output = target if isinstance(target, Mapping) else {None: target} if target else {}
        columns = {out: _as_columns(group) for out, group in by_output.items()}
        if outputs and (wrong := [out for out in columns if out not in outputs]):
            own = columns[wrong[0]] if wrong[0] is None else wrong
            raise _needs_outputs(outputs, f", not {own[0]!r}")
        if not columns and trained.target and set(trained.target) <= set(names):
            columns[None] = list(trained.target)
        own_targets = cls(columns)
        for name in own_targets.names:
            if name not in names:
                raise unknown("column", name, names)
        if len(set(own_targets.names)) < len(own_targets.names):
            twice = ", ".join(map(repr, own_targets.names))
            raise DataError(f"a target is named twice: {twice}")
        if weight in own_targets.names:
            raise DataError(
                f"{argument('sample_weight', weight)} is the target: name the column of the "
                "weights of rows, or leave it out"
            )
        if len(columns) == 1 and None in columns:
            return cls({None: trained.copy().target_order(own_targets.names)})
        return own_targets

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [name for each in self.columns.values() for name in each]

    def by_label(self, objective: Objective) -> Columns:
        """Return the columns of each label input."""
        inputs = [str(x.name) for x in objective.data]
        infos = {name: info for name, info in objective.labels.items() if name in inputs}
        names = list(infos)
        if not names and self.names:
            names = [next((t for t in self.names if t in inputs), "label")]
            if names[0] not in inputs:
                raise ValueError(
                    f"the model computes its own loss, but has no input {names[0]!r}: "
                    f"{argument('target')} must be the input that takes the labels, one of "
                    f"{', '.join(map(printable, inputs))}"
                )
        if names and not self.names:
            raise ValueError(
                f"the loss compares with labels: name their column with {argument('target')}"
            )
        if len(names) < 2:
            return dict.fromkeys(names, self.names)
        outputs = {str(info.prediction): name for name, info in infos.items()}
        if any(output not in outputs for output in self.columns):
            raise _needs_outputs(outputs)
        if missing := next((o for o in outputs if o not in self.columns), None):
            raise _needs_outputs(outputs, f": {missing!r} has none")
        return {name: self.columns[output] for output, name in outputs.items()}


def _as_columns(group: str | Sequence[str]) -> list[str]:
    return [group] if isinstance(group, str) else list(group)


def _needs_outputs(outputs: Iterable[str], more: str = "") -> ValueError:
    return ValueError(
        f"the losses are of several outputs: write {named('target={output: column}')} for each of "
        f"{', '.join(map(printable, outputs))}{more}"
    )


def choose_columns(
    columns: InputColumns, names: list[str], inputs: Sequence[str], trained: Names
) -> tuple[list[str], Names]:
    """Return the columns that are read, and the names with the columns of each input.

    Args:
        columns: the columns of the only input in their order, or of each input; None: all.
        names: the columns that are no labels.
        inputs: of the model, other than labels.
        trained: the names that the model stores.

    Raises:
        ValueError: a column that is not there or is named twice, several inputs without their
            names, or others than in an earlier training.
    """
    if not columns:
        return names, trained
    if not isinstance(columns, Mapping) and len(inputs) > 1:
        raise ValueError(
            f"{argument('columns', list(columns))}: the model has several inputs: write "
            f"{named('columns={input: [...]}')} for each of {', '.join(map(printable, inputs))}"
        )
    by_input = columns if isinstance(columns, Mapping) else {inputs[0]: columns}
    result = trained.copy()
    for name, group in by_input.items():
        if name not in inputs:
            raise unknown(f"input ({argument('columns')})", name, inputs)
        for column in group:
            if column not in names:
                raise unknown(f"column ({argument('columns')})", column, names)
        if len({*group}) < len(group):
            raise ValueError(f"{argument('columns')} names a column twice: {first_names(group)}")
        if result.columns.setdefault(name, list(group)) != list(group):
            raise ValueError(
                f"{argument('columns', list(group))}: the model was trained on "
                f"{','.join(result.columns[name])}, which it takes by name: leave it out"
            )
    used = {column for group in by_input.values() for column in group}
    return [name for name in names if name in used or name in inputs], result


def in_other_order(names: Iterable[str], columns: Columns, trained: Names) -> list[str]:
    """Return messages about columns that the data have in another order than a training."""
    messages = []
    for name, group in columns.items():
        order = [column for column in names if column in group]
        if name in trained.columns and order != group:
            messages.append(
                f"columns of input {name} are taken by name, in the order of its training: "
                f"{first_names(group)} (the data has {first_names(order)})"
            )
    return messages


def ignored_columns(
    names: Iterable[str], columns: Columns, others: Collection[str | None] = ()
) -> list[str]:
    """Return a message about columns that are neither of an input nor `others`, if there are."""
    used = {*others, *(name for group in columns.values() for name in group)}
    left = [name for name in names if name not in used]
    return [f"ignored columns: {first_names(left)}"] if left else []
