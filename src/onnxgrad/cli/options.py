"""The fields of a dataclass of options: their names, types, bounds and help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

T = TypeVar("T")


def option(
    help: str,
    default: Any = None,
    *names: str,
    panel: str | None = None,
    needs: tuple[str, ...] = (),
    data: tuple[str, ...] = (),
    usual: bool = False,
    **more: Any,
) -> Any:
    """Return a field that is an option.

    Args:
        help: one sentence or two.
        default: of the field; an empty list for options that can be repeated.
        names: such as "--output", "-o"; None: derived from the name of the field.
        panel: the title of its panel in the help; None: the title of its class.
        needs: fields, of which it has no effect without one.
        data: the kinds of DATA on which it has an effect, of KINDS; none: all.
        usual: whether `--help` shows it where a command has many options.
        more: further arguments of `typer.Option`, such as `min`, `metavar` and `show_default`.
    """
    known = {"help": help, "names": names, "panel": panel, "needs": needs, "data": data}
    return _dataclass_field(default, positional=False, **known, usual=usual, more=more)


def output_option(help: str, default: str | None = None, **more: Any) -> Any:
    """Return the field of `--output`."""
    return option(help, default, "--output", "-o", metavar="PATH", **more)


def argument(help: str, *, required: bool = True, **more: Any) -> Any:
    """Return a field that is a positional argument, a text; "" where one is left out."""
    return _dataclass_field(
        "", positional=True, required=required, help=help, names=(), panel="", more=more
    )


def _dataclass_field(default: Any, **metadata: Any) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(option, output_option, argument),
)
def options(panel: str = "Other") -> Callable[[type[T]], type[T]]:
    """Return the decorator of a dataclass of options.

    Args:
        panel: the title of their panel in the help; in lower case its section in a TOML file.
    """

    def decorate(cls: type[T]) -> type[T]:
        for each in vars(cls).values():
            if isinstance(each, dataclasses.Field) and each.metadata["panel"] is None:
                each.metadata = MappingProxyType({**each.metadata, "panel": panel})
        return dataclass(frozen=True, kw_only=True)(cls)

    return decorate


@dataclass(frozen=True)
class Described:
    """A field of a dataclass of options: what `option` and `argument` say of it.

    - `hint`: its type; `kind`: that type without None.
    """

    name: str
    hint: Any
    default: Any
    positional: bool
    help: str
    names: tuple[str, ...]
    panel: str
    more: dict[str, Any]
    required: bool = False
    needs: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    usual: bool = False

    @classmethod
    def fields_of(cls, options: type) -> dict[str, Described]:
        """Return the fields of a dataclass by name."""
        hints = get_type_hints(options)
        return {
            f.name: cls(f.name, hints[f.name], f.default, **f.metadata)
            for f in dataclasses.fields(options)
        }

    @property
    def kind(self) -> Any:
        """The type of a value: str, int, float, bool, or list for several."""
        if self.is_list:
            return list
        return next((t for t in get_args(self.hint) if t is not type(None)), self.hint)

    @property
    def is_list(self) -> bool:
        """Whether the option can be repeated."""
        return self.default is dataclasses.MISSING

    def is_set(self, options: Any, name: str) -> bool:
        """Return whether the field `name` has another value than its default."""
        return bool(getattr(options, name) != ([] if self.is_list else self.default))

    @property
    def flag(self) -> str:
        """How it is called on the command line."""
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def section(self) -> str:
        """The section of a TOML file in which it may stand."""
        return self.panel.lower()
