"""Sphinx: the directives `command-help` and `command-options`, for the pages of commands."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from onnxgrad.cli.command import COMMANDS, build_command

GENERAL = "Other"  # the panel of what every command takes
MOST_IN_ONE_TABLE = 20  # options; of a command with more, each panel is a section


class CommandHelp(SphinxDirective):
    """The paragraphs of the help of the command that is the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the paragraphs."""
        parts = commands()[self.arguments[0]].help.split("\n\n")
        return [nodes.paragraph("", "", *text(part)) for part in parts]


class CommandOptions(SphinxDirective):
    """A section with the options of the command that is the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [options_section(self.arguments[0], commands()[self.arguments[0]])]


def commands() -> dict[str, Any]:
    """Return the commands of click by name, without `--help` among their parameters."""
    return {name: build_command(name) for name in COMMANDS}


def options_section(name: str, command: Any) -> nodes.section:
    """Return a section with all options of a command, of many options by panel of the help."""
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    panels = list(dict.fromkeys(map(panel_of, shown)))  # in the order of the help
    panels.sort(key=lambda panel: panel == GENERAL)
    parts = {panel: [p for p in shown if panel_of(p) == panel] for panel in panels}
    made = nodes.section(ids=[f"{name}-options"], names=[f"{name} options"])
    made += nodes.title("", "Options")
    if len(shown) <= MOST_IN_ONE_TABLE:
        made += options_table(parts)
        return made
    for panel in panels:
        label = f"{name}-{panel.lower()}"
        part = nodes.section(ids=[label], names=[label])
        part += nodes.title("", panel)
        part += options_table({"": parts[panel]})
        made += part
    return made


def options_table(parts: dict[str, list[Any]]) -> nodes.table:
    """Return a table of two columns, with a line for each panel that has a title."""
    body = nodes.tbody()
    for panel, parameters in parts.items():
        if panel:
            heading = nodes.entry("", nodes.paragraph("", "", nodes.strong("", panel)), morecols=1)
            body += nodes.row("", heading)
        for each in parameters:
            meaning = nodes.paragraph("", "", *text(description(each)))
            name = nodes.paragraph("", "", nodes.literal("", usage(each)))
            body += nodes.row("", nodes.entry("", name), nodes.entry("", meaning))
    columns = nodes.colspec(colwidth=35), nodes.colspec(colwidth=65)
    return nodes.table("", nodes.tgroup("", *columns, body, cols=2), classes=["options"])


def panel_of(parameter: Any) -> str:
    """Return the title above an option in the help."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return parameter.rich_help_panel or GENERAL


def usage(parameter: Any) -> str:
    """Return an option as it is typed, such as `--epochs N`."""
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def description(parameter: Any) -> str:
    """Return the help of an option, and its default where the help shows one."""
    shown = getattr(parameter, "show_default", False)
    if not shown:
        return parameter.help
    default = shown if isinstance(shown, str) else parameter.default
    if default is True:
        default = parameter.opts[0]
    return f"{parameter.help} Default: {default}."


def text(line: str) -> list[nodes.Node]:
    """Return text, with code in backticks and options as literals."""
    parts = re.split(r"(`[^`]+`|(?<!\w)--[a-z][a-z-]+)", line)
    return [
        nodes.literal("", part.strip("`")) if number % 2 else nodes.Text(part)
        for number, part in enumerate(parts)
    ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives to a site."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("command-options", CommandOptions)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
