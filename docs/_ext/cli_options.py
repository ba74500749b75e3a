"""Sphinx: the directive `commands`, the options of `onnxgrad` as the command line declares them."""

from __future__ import annotations

import re
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from onnxgrad.cli import app as shell

GENERAL = "Other"  # the panel of what every command takes


class Commands(SphinxDirective):
    """A section for each command: what it does, its examples, and a table of its options."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [section(name, command) for name, command in commands().items()]


def commands() -> dict[str, Any]:
    """Return the commands of click by name, without `--help` among their parameters."""
    return dict(typer.main.get_command(shell).commands)


def section(name: str, command: Any) -> nodes.section:
    """Return the title, the help and the options of a command."""
    made = nodes.section(ids=[f"onnxgrad-{name}"], names=[f"onnxgrad {name}"])
    made += nodes.title("", f"onnxgrad {name}")
    made += [nodes.paragraph("", "", *text(part)) for part in command.help.split("\n\n")]
    examples = [line for line in command.epilog.split("\n\n") if "onnxgrad " in line]
    code = nodes.literal_block("", "\n".join(examples), language="bash")
    made += [code] if examples else []
    made += table([p for p in command.params if not getattr(p, "hidden", False)])
    return made


def table(parameters: list[Any]) -> nodes.table:
    """Return a table of two columns, with a line for each panel of the help."""
    body = nodes.tbody()
    panels = list(dict.fromkeys(map(panel_of, parameters)))  # in the order of the help
    panels.sort(key=lambda panel: panel == GENERAL)
    for panel in panels:
        heading = nodes.entry("", nodes.paragraph("", "", nodes.strong("", panel)), morecols=1)
        body += nodes.row("", heading)
        for each in (p for p in parameters if panel_of(p) == panel):
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
    """Add the directive to a site."""
    app.add_directive("commands", Commands)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
