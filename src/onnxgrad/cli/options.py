"""Options of commands, as dataclasses: the fields are the options, the docstrings are the help.

Below "Attributes:", the docstring of a class has a text for each option. The docstring of a command
describes the command, and has command lines to copy below "Examples:". Names, types, bounds and
panels hold for the command line and for TOML files.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

import typer

T = TypeVar("T")
_METAVARS = {int: "N", float: "X", str: "TEXT", list: "TEXT", bool: ""}


def option(
    default: Any = None,
    *names: str,
    panel: str | None = None,
    needs: tuple[str, ...] = (),
    usual: bool = False,
    **more: Any,
) -> Any:
    """Return a dataclass field that is an option of the command line.

    Args:
        default: default of the field; an empty list for options that can be repeated.
        names: names on the command line, such as "--output", "-o"; none: the name of the field.
        panel: title of its panel in the help; None: the panel of its class.
        needs: fields without which the option has no effect: one of them must be set.
        usual: whether `--help` shows it where a command has many options.
        more: further arguments of `typer.Option`, such as `min` and `metavar`.
    """
    known = {"names": names, "panel": panel, "needs": needs, "usual": usual}
    return _dataclass_field(default, positional=False, **known, more=more)


def argument(*, required: bool = True) -> Any:
    """Return a dataclass field that is a positional argument, a text, which may be optional."""
    return _dataclass_field("", positional=True, required=required, panel="")


def _dataclass_field(default: Any, **metadata: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument))
def options(panel: str = "Other") -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class a dataclass of options, shown in one panel of the help.

    Args:
        panel: title of their panel in the help; in lower case, their section in a TOML file.
    """

    def decorate(cls: type[T]) -> type[T]:
        for each in vars(cls).values():
            if isinstance(each, dataclasses.Field) and each.metadata["panel"] is None:
                each.metadata = MappingProxyType({**each.metadata, "panel": panel})
        # dataclasses would compile methods for each class: a tenth of the time of a short command
        cls.__init__ = _set_option_values  # type: ignore[method-assign]
        return dataclass(kw_only=True, init=False, eq=False, repr=False)(cls)

    return decorate


def _set_option_values(self: Any, **values: Any) -> None:
    """Set the fields of a dataclass of options to `values`, or to their defaults."""
    for each in dataclasses.fields(self):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        vars(self)[each.name] = values.pop(each.name, default)
    if values:
        raise TypeError(f"{type(self).__name__} has no options {', '.join(values)}")


@options()
class ModelArgument:
    """The argument MODEL. It is the last base class of options, so that the help shows it first.

    Attributes:
        model: The .onnx file; "-" reads it from standard input.
    """

    model: str = argument()


@options()
class CommonOptions:
    """Options of every command. It is the first base class, so that the help shows them last.

    Attributes:
        json: Print the result as one JSON object on stdout, and messages on stderr.
        debug: Show the traceback of an error.
    """

    json: bool = option(False, usual=True)
    debug: bool = option(False)


def help_text(options: type) -> str:
    """Return the paragraphs of a docstring before its sections, each on one line.

    typer keeps line breaks, whatever the width of the terminal.
    """
    description = re.split(r"\n+\w+:\n", inspect.cleandoc(options.__doc__ or ""))[0]
    return "\n\n".join(" ".join(each.split()) for each in description.split("\n\n"))


def section_entries(options: type, title: str) -> list[str]:
    """Return the entries of the section `title` of a docstring, each entry on one line."""
    text = inspect.cleandoc(options.__doc__ or "")
    section = re.search(rf"^{title}:\n((?:    .*\n?)*)", text, re.M)
    entries = re.split(r"\n(?=    \S)", section[1]) if section else []
    return [" ".join(entry.split()) for entry in entries]


@dataclass(frozen=True)
class OptionField:
    """An option of a command: the name, type, default, panel and help of a dataclass field."""

    name: str
    hint: Any
    default: Any
    help: str
    positional: bool
    panel: str
    names: tuple[str, ...] = ()
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    required: bool = False
    needs: tuple[str, ...] = ()
    usual: bool = False

    @classmethod
    def fields_of(cls, options: type) -> dict[str, OptionField]:
        """Return `{name: OptionField}` of the fields of a dataclass of options."""
        bases = reversed(options.__mro__)
        entries = [entry for base in bases for entry in section_entries(base, "Attributes")]
        texts, hints = dict(entry.split(": ", 1) for entry in entries), get_type_hints(options)
        return {
            f.name: cls(f.name, hints[f.name], f.default, texts.get(f.name, ""), **f.metadata)
            for f in dataclasses.fields(options)
        }

    @property
    def kind(self) -> Any:
        """The type of the option's value: str, int, float, bool, or list if it can be repeated."""
        if self.is_list:
            return list
        return next((t for t in get_args(self.hint) if t is not type(None)), self.hint)

    @property
    def is_list(self) -> bool:
        """Whether the option can be repeated."""
        return self.default is MISSING

    def is_set(self, options: Any) -> bool:
        """Return whether the option's value in `options` differs from the default."""
        return bool(getattr(options, self.name) != ([] if self.is_list else self.default))

    @property
    def flag(self) -> str:
        """The name as users type it: "MODEL" for an argument, "--batch-size" for an option."""
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def section(self) -> str:
        """The section of a TOML file in which the option may stand."""
        return self.panel.lower()

    def typer_parameter(self) -> inspect.Parameter:
        """Return the option as a function parameter, from which `typer` builds the command line."""
        hint, default = self.hint, self.default
        if self.is_list:
            hint, default = list[str] | None, None
        if self.positional:
            hint, default = str | None, None
            info: Any = typer.Argument(help=self.help, show_default=False)
        else:
            shown = {"show_default": default not in (None, False), "metavar": _METAVARS[self.kind]}
            names = self.names or (self.flag,) * (default is False)
            arguments = {"help": self.help, "rich_help_panel": self.panel, **shown, **self.more}
            info = typer.Option(*names, **arguments)
        by_name = inspect.Parameter.KEYWORD_ONLY
        hint = Annotated[hint, info]
        return inspect.Parameter(self.name, by_name, annotation=hint, default=default)


def set_options(options: Any) -> set[str]:
    """Return the names of the options whose values are not the defaults."""
    described = OptionField.fields_of(type(options))
    return {name for name, each in described.items() if each.is_set(options)}
