"""Messages of the command line: results on stdout; progress, warnings and errors on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onnxgrad.errors import printable, printable_lines

stdout, stderr = Console(), Console(stderr=True)


def ignoring_closed_output() -> suppress:
    """Ignore a closed terminal or pipe behind the output, where rich would exit."""
    return suppress(OSError, SystemExit)


def say(message: str, console: Console = stdout, style: str = "") -> None:
    """Print a message."""
    with ignoring_closed_output():
        console.print(Text(printable_lines(message), style=style), soft_wrap=True)


def note(message: str) -> None:
    """Print a message that is no result, on stderr."""
    say(message, stderr)


def complain(message: str) -> None:
    """Print an error, as one line."""
    say(f"Error: {' '.join(message.split())}", stderr, "red")


def warn(message: Warning | str) -> None:
    """Print a warning."""
    say(f"Warning: {message}", stderr, "yellow")


def print_rows(rows: Mapping[str, object], console: Console = stdout) -> None:
    """Print a table of two columns, name and value."""
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(Text(printable(name)), Text(str(value)))
    with ignoring_closed_output():
        console.print(table)


def results(json: bool = False, output: str = "") -> Console:
    """Return the console of tables and texts: stderr if stdout has JSON or a file "-"."""
    return stderr if json or output == "-" else stdout


def print_json(values: dict[str, Any]) -> None:
    """Print one JSON object on stdout; NaN and infinity, which JSON lacks, are null."""
    text = json.dumps(_json_value(values), indent=2, allow_nan=False)
    with ignoring_closed_output():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _json_value(value: Any) -> Any:
    """Return a value in the types of JSON; numpy's arrays and numbers become Python's."""
    if isinstance(value, dict):
        return {str(name): _json_value(v) for name, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(v) for v in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)
