"""Which columns of data are labels, and which each input of a model takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from onnxgrad.cli.data_options import InputOptions, LabelOptions
from onnxgrad.data.arrays import DataError
from onnxgrad.data.class_numbers import first_names
from onnxgrad.data.columns import Names
from onnxgrad.errors import printable, unknown
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

        `names` are all columns, and `outputs` those that have losses, if they are several.
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
        if options.sample_weight in own.names:
            raise DataError(
                f"--sample-weight {options.sample_weight} is the target: name the column of the "
                "weights of rows, or leave it out"
            )
        if len(columns) == 1 and None in columns:
            return cls({None: trained.copy().target_order(own.names)})
        return own

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


def names_in(text: str) -> list[str]:
    """Return the names that commas separate, with or without blanks around them."""
    return [name.strip() for name in text.split(",")]


def chosen_columns(
    options: InputOptions, names: list[str], inputs: Sequence[str], trained: Names
) -> tuple[list[str], Names]:
    """Return the columns that are left by `--columns`, and the names with those of each input.

    Args:
        options: of the command.
        names: the columns that are no labels.
        inputs: of the model, other than labels.
        trained: the names that the model stores.

    Raises:
        ValueError: a column that is not there or is named twice, several inputs without their
            names, or others than those of an earlier training.
    """
    chosen: Columns = {}
    for text in options.columns:
        head, equals, tail = text.partition("=")
        named = bool(equals) and head in inputs
        if len(inputs) > 1 and not named:
            raise ValueError(
                f"--columns {text!r}: the model has several inputs: write INPUT=A,B,... for each "
                f"of {', '.join(map(printable, inputs))}"
            )
        name, listed = (head, tail) if named else (inputs[0], text)
        chosen.setdefault(name, []).extend(names_in(listed))
    if not chosen:
        return names, trained
    result = trained.copy()
    for name, group in chosen.items():
        for column in group:
            if column not in names:
                raise unknown("column (--columns)", column, names)
        if len({*group}) < len(group):
            raise ValueError(f"--columns names a column twice: {first_names(group)}")
        if result.columns.setdefault(name, group) != group:
            raise ValueError(
                f"--columns {','.join(group)}: the model was trained on "
                f"{','.join(result.columns[name])}, which it takes by name: leave it out"
            )
    used = {column for group in chosen.values() for column in group}
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
    names: Iterable[str], columns: Columns, others: Sequence[str | None] = ()
) -> list[str]:
    """Return a message about columns that are neither of an input nor `others`, if there are."""
    used = {*others, *(name for group in columns.values() for name in group)}
    left = [name for name in names if name not in used]
    return [f"ignored columns: {first_names(left)}"] if left else []
