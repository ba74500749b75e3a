"""Messages of the command line: where they are printed, and how they name options.

Results go to stdout; progress, warnings and errors go to stderr. `Shell` lets messages of the
library name options instead of Python's arguments.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from onnxgrad.errors import Face, printable, printable_lines


def make_console(stderr: bool = False) -> Any:
    """Return a console of rich, which prints tables and colors on stdout or stderr."""
    from rich.console import Console  # imported here, as short commands print plain text

    return Console(stderr=stderr)


def ignore_closed_output() -> suppress:
    """Return a context manager that ignores errors of a closed terminal or pipe while printing."""
    return suppress(OSError, SystemExit)


def print_message(message: str, stderr: bool = False, style: str = "") -> None:
    """Print a message, as it is, on stdout or stderr."""
    text = printable_lines(message)
    if not style:
        # rich explains characters that the output cannot encode, and closes broken pipes
        with suppress(OSError, UnicodeEncodeError):
            print(text, file=sys.stderr if stderr else sys.stdout, flush=True)
            return
    from rich.text import Text

    with ignore_closed_output():
        make_console(stderr).print(Text(text, style=style), soft_wrap=True)


def print_note(message: str) -> None:
    """Print a message on stderr, apart from the results on stdout."""
    print_message(message, stderr=True)


def print_error(message: str) -> None:
    """Print an error on stderr, as one line."""
    print_message(f"Error: {' '.join(message.split())}", stderr=True, style="red")


def print_warning(message: Warning | str) -> None:
    """Print a warning on stderr."""
    print_message(f"Warning: {message}", stderr=True, style="yellow")


def print_rows(rows: Mapping[str, object], stderr: bool = False) -> None:
    """Print a table of two columns, names and values, on stdout or stderr."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(Text(printable(name)), Text(str(value)))
    with ignore_closed_output():
        make_console(stderr).print(table)


def print_json(values: dict[str, Any]) -> None:
    """Print one JSON object on stdout; NaN and infinity, which JSON lacks, are null."""
    text = json.dumps(_json_value(values), indent=2, allow_nan=False)
    with ignore_closed_output():
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _json_value(value: Any) -> Any:
    """Return a value converted to JSON types: arrays become lists, NaN becomes None."""
    if isinstance(value, dict):
        return {str(name): _json_value(v) for name, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(v) for v in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


_FEATURES = "--head N --head-at NAME --head-pool none, or mean, first, image"
_LOSSES = "loss_options."
_JOINED = ("classes", "units")  # lists of names that the option takes as one text "A,B,..."
OPTION_BY_ARGUMENT = {  # {argument: option} where the names differ
    "units": "head",
    "at": "head_at",
    "pool": "head_pool",
    "mask": "head_mask",
    "rank": "lora_rank",
    "add_lora.dropout": "lora_dropout",
    "loss_options": "loss_option",
    "loss_weights": "loss_weight",
    "budget_seconds": "budget",
    "every_seconds": "checkpoint_seconds",
    "y": "target",
    "size": "image_size",
}
SHELL_WORDS = {  # {name in Python: words on the command line}, of functions and phrases
    "add_head": _FEATURES,
    "replace_head": "`onnxgrad train --head N`",
    "onnxgrad.replace_head": "`onnxgrad train --head N`",
    "add_lora": "`onnxgrad train --lora PATTERN`",
    "List the weights": "Use --train and --freeze",
    "add_loss_output(..., weight_name='weight')": "--loss NAME",
    "loss={output: loss}": "--loss OUTPUT=LOSS",
    "loss={tensor: loss}": "--loss TENSOR=LOSS",
    "metrics={output: [...]}": "--metrics OUTPUT=METRIC",
    "target={output: column}": "--target OUTPUT=COLUMN",
    "columns={input: [...]}": "--columns INPUT=A,B,...",
    "model": "MODEL",
    "pass inputs={input: output}": "give its inputs the names of the outputs that they take",
    "fit": "training",
    "label": "target",
    "start anew without resume": "name another folder for a new training",
    "onnxgrad.losses.LOSSES": "`onnxgrad train --help`",
}


class Shell(Face):
    """How messages on the command line name arguments: as options, not as in Python."""

    first = 1

    def __init__(self, options: Collection[str]) -> None:
        self.options = options

    def named(self, python: str) -> str:
        """Return how the command line calls a Python argument: mostly by the option of its name."""
        return SHELL_WORDS.get(python) or self._option_flag(python) or python

    def given(self, argument: str, *value: Any) -> str:
        """Return an argument as the option that sets it, with the value as users type it."""
        option = self._option_flag(argument)
        if option is None or not value:
            return option or super().given(argument, *value)
        given = value[0]
        if argument.startswith(_LOSSES):
            return option + (given if isinstance(given, str) else json.dumps(given))
        if given is None or isinstance(given, bool):
            return f"no {option}" if given is None else option if given else f"--no{option[1:]}"
        if argument in _JOINED and isinstance(given, list):
            given = ",".join(given)
        if isinstance(given, dict):
            given = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in given.items()]
        several = given if isinstance(given, (list, tuple)) else [given]
        return " ".join(f"{option} {shlex.quote(str(v))}" for v in several)

    def _option_flag(self, argument: str) -> str | None:
        if argument.startswith(_LOSSES) and "loss_option" in self.options:
            return f"--loss-option {argument.removeprefix(_LOSSES)}="
        name = OPTION_BY_ARGUMENT.get(argument, argument)
        return f"--{name.replace('_', '-')}" if name in self.options else None
