"""The help of commands: usual and rare options, and suggestions for unknown commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from onnxgrad.errors import unknown

MOST_SHOWN = 20  # options; a command with more options shows only usual ones in --help
OTHER_NAMES = {  # {name of a command in other tools: name here}
    "fit": "train",
    "finetune": "train",
    "evaluate": "eval",
    "test": "eval",
    "validate": "eval",
    "inference": "predict",
    "infer": "predict",
}
_HELP_ALL = "--help-all"


class _PlainFlags:
    """The base class of commands and groups whose help shows no type beside a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters; flags get an empty metavar, so that no type shows."""
        parameters = list(super().get_params(ctx))  # type: ignore[misc]
        for each in parameters:
            if not getattr(each, "is_flag", False):
                continue
            each.metavar = ""
            if each.default is None and not each.expose_value:
                each.default = (
                    False  # typer would import pydantic for None: a third of the start-up time
                )
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command whose `--help` shows usual options, and whose `--help-all` shows all options.

    Its callback has the attribute `described`, the `OptionField` of each option by name.
    """

    shows_all = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        for each in self.params:
            is_number = vars(self.callback)["described"][each.name].kind in (int, float)
            vars(each)["process_value"] = _converter_of_texts(each, is_number)

    @property
    def rare_options(self) -> list[Any]:
        """The options that only `--help-all` shows."""
        options = [each for each in self.params if each.param_type_name == "option"]
        if len(options) <= MOST_SHOWN:
            return []
        described = vars(self.callback)["described"]
        return [each for each in options if not described[each.name].usual]

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help option: `--help`, and maybe `--help-all`."""
        names = super().get_help_option_names(ctx)
        return [*names, _HELP_ALL] if self.rare_options else names

    def get_help_option(self, ctx: Any) -> Any:
        """Return the help option of click, with a text that mentions `--help-all`."""
        shown = super().get_help_option(ctx)
        if shown is not None and self.rare_options:
            shown.help = "Show the usual options, or all of them, and exit."
        return shown

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, and remember whether `--help-all` is one of them."""
        self.shows_all = _HELP_ALL in args
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of a command: its usage, options and examples."""
        rare = [] if self.shows_all else self.rare_options
        # typer makes new parameters for each call of the app, so that they can be changed
        for each in rare:
            each.hidden = True
        super().format_help(ctx, formatter)
        if rare:
            formatter.write(f" {len(rare)} more options: {ctx.command_path} {_HELP_ALL}\n")


def _converter_of_texts(parameter: Any, is_number: bool) -> Callable[[Any, Any], Any]:
    """Return a function that converts a parameter's value as typer does, and leaves to typer only
    the texts of numbers.

    typer imports pydantic before it converts any value: a sixth of the start-up time.
    """
    convert = parameter.process_value

    def process_value(context: Any, value: Any) -> Any:
        if value is None:
            return () if getattr(parameter, "multiple", False) else None
        if isinstance(value, (int, float)) or (isinstance(value, (str, tuple)) and not is_number):
            return value
        return convert(context, value)

    return process_value


class Commands(_PlainFlags, TyperGroup):
    """The group of commands; it turns `--image-size H W` into one value, as click wants."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments after joining the two numbers of `--image-size H W` to `HxW`."""
        joined: list[str] = []
        for text in args:
            if joined[-2:-1] == ["--image-size"] and joined[-1].isdigit() and text.isdigit():
                joined[-1] += f"x{text}"
            else:
                joined.append(text)
        return super().parse_args(ctx, joined)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; the error suggests similar names."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            meant = [OTHER_NAMES[name]] if name in OTHER_NAMES else []
            ctx.fail(str(unknown("command", name, names, meant)))
        return super().resolve_command(ctx, args)
