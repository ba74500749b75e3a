"""Messages of the command line: results on stdout, warnings and errors on stderr."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.text import Text

from onnxgrad.errors import printable_lines

stdout, stderr = Console(), Console(stderr=True)


def ignoring_closed_output() -> suppress:
    """Go on when the terminal or the pipe behind the output is closed: rich exits then."""
    return suppress(OSError, SystemExit)


def say(message: str, console: Console = stdout, style: str = "") -> None:
    """Print a message."""
    with ignoring_closed_output():
        console.print(Text(printable_lines(message), style=style), soft_wrap=True)


def complain(message: str) -> None:
    """Print an error, as one line."""
    say(f"Error: {' '.join(message.split())}", stderr, "red")


def warn(message: Warning | str) -> None:
    """Print a warning."""
    say(f"Warning: {message}", stderr, "yellow")
