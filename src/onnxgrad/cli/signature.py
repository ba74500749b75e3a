"""Options of a command: a dataclass gives its signature, its help, and the keys of a TOML file.

A command calls a function of one argument, an instance of the dataclass. Each field has its help,
its panel and its bounds in the metadata, once for the command line and for TOML.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Annotated, Any, get_type_hints

import typer

from onnxgrad.cli import config
from onnxgrad.cli.options import Described


def takes_options(function: Callable[[Any], None], runs: str) -> Callable[..., None]:
    """Return a function with the signature that `typer` reads, which calls `runs` with options."""
    hints = get_type_hints(function)
    hints.pop("return", None)
    (kind,) = hints.values()
    described = Described.fields_of(kind)

    def command(context: typer.Context, **values: Any) -> None:
        chosen = {n: v for n, v in values.items() if _is_on_command_line(context, n)}
        if file := values.get("config"):
            chosen = config.read(file, described) | chosen
        rest = {n: v for n, v in values.items() if v is not None and n not in chosen}
        options = kind(**(rest | chosen))
        for name in (n for n, each in described.items() if each.required):
            if not getattr(options, name):
                more = f", or as {name} = ... in the file of --config" if "config" in values else ""
                raise ValueError(f"{name.upper()} is missing: pass it as an argument{more}")
        _check_needs(options, chosen, described)
        resolve_name(runs)(options)

    parameters = [inspect.Parameter("context", _BY_NAME, annotation=typer.Context)]
    parameters += [_typer_parameter(each) for each in described.values()]
    vars(command).update(__signature__=inspect.Signature(parameters), __annotations__={})
    vars(command)["usual"] = {name for name, each in described.items() if each.usual}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _check_needs(options: Any, chosen: Iterable[str], described: dict[str, Described]) -> None:
    """Raise `ValueError` if one of the `chosen` options has no effect without another."""
    for each in (described[name] for name in chosen):
        if each.needs and not any(getattr(options, name) for name in each.needs):
            missing = " or ".join(described[name].flag for name in each.needs)
            raise ValueError(f"{each.flag} has no effect without {missing}: pass that, too")


_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_METAVARS = {int: "N", float: "X", str: "TEXT", list: "TEXT"}


def _typer_parameter(each: Described) -> inspect.Parameter:
    """Return the parameter of a field, as `typer` reads it."""
    if each.positional:
        info = typer.Argument(help=each.help, show_default=False, **each.more)
        return inspect.Parameter(
            each.name, _BY_NAME, annotation=Annotated[str | None, info], default=None
        )
    hint, default = each.hint, each.default
    if each.is_list:
        hint, default = list[str] | None, None
    more = {"show_default": default not in (None, False), "metavar": _METAVARS.get(each.kind)}
    names = each.names or (f"--{each.name.replace('_', '-')}",) * (default is False)
    info = typer.Option(*names, help=each.help, rich_help_panel=each.panel, **(more | each.more))
    return inspect.Parameter(each.name, _BY_NAME, annotation=Annotated[hint, info], default=default)


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
