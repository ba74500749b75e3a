"""How commands run: their errors are one line on stderr, and their exit codes mean something."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import typer

from onnxgrad.cli.command_help import Command
from onnxgrad.cli.console import complain, warn
from onnxgrad.cli.face import Shell
from onnxgrad.cli.options import argument, option, options
from onnxgrad.cli.signals import Stopped, StopRequests
from onnxgrad.cli.signature import takes_options
from onnxgrad.errors import ProcessLostError, escape, speaking
from onnxgrad.model.files import one_line

DONE, FAILED, INVALID = 0, 1, 2  # exit codes; 128 + n after signal n
EXIT_CODES = (
    "Exit codes: 0 done; 1 done in part, or the answer is no (training diverged, a file could not "
    "be written where it should go, a gradient is wrong), or an unexpected error; 2 invalid "
    "options, model or data, and nothing was written; 130 after Ctrl-C, 128 + n after signal n."
)

# what libraries in C++ say where no memory is left
_NO_MEMORY = ("std::bad_alloc", "bad allocation", "Failed to allocate memory")

stop = StopRequests()


@options()
class ModelArgument:
    """The model: the last base of the options of a command, so that it comes first."""

    model: str = argument('The .onnx file; "-" reads it from standard input.')


@options()
class Common:
    """What every command takes: the first base, so that it comes last."""

    json: bool = option(
        "Print one JSON object on stdout, everything else on stderr.", False, usual=True
    )
    debug: bool = option("Show the traceback of an error.", False)


def register(app: typer.Typer, runs: str, *examples: str) -> Callable[[Callable[[Any], None]], Any]:
    """Register a command with the name, the type of options and the help of a function.

    It calls `runs`, "module:function", which is imported then; `examples` end its help.
    """
    epilog = "\n\n".join([*(["Examples:"] if examples else []), *examples, EXIT_CODES])

    def add(function: Callable[[Any], None]) -> Any:
        command = takes_options(function, runs)
        guarded = _with_short_errors(command, function.__name__)
        # typer keeps the line breaks of a docstring, whatever the width of the terminal
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        name = function.__name__.removesuffix("_")
        app.command(name, cls=Command, help=text, epilog=epilog)(guarded)
        return function

    return add


def reason_of(error: Exception) -> str:
    """Return what an error says, in plain words where only its type says it."""
    text = one_line(error) if isinstance(error, OSError) else str(error)
    return plain_reason(error) or text or type(error).__name__


def plain_reason(error: Exception) -> str:
    """Return the reason of an error of memory or depth; "" for errors whose message has it."""
    if isinstance(error, RecursionError):
        return "a file, or a value of an option, is nested too deep to be read"
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
        return (
            "there is not enough memory: take fewer rows at once with --batch-size, a smaller "
            "model, or a machine with more"
        )
    return ""


def _with_short_errors(command: Callable[..., None], name: str) -> Callable[..., None]:
    """Return a command whose errors are one line on stderr."""
    face = Shell(frozenset(inspect.signature(command).parameters))

    def guarded(context: typer.Context, debug: bool = False, **values: Any) -> None:
        try:
            with stop, speaking(face), warnings.catch_warnings():
                warnings.showwarning = lambda message, *category_and_source, **more: warn(message)
                command(context, debug=debug, **values)
        except (typer.Exit, BrokenPipeError):
            raise
        except Stopped as e:
            trained = "nothing was trained yet, and " if name == "train" else ""
            complain(f"{e}: {trained}no file was written")
            raise typer.Exit(e.code) from None
        except Exception as e:
            if debug:
                escape(e)
                raise
            expected = isinstance(e, (ValueError, OSError, NotImplementedError, ImportError))
            known = expected or isinstance(e, ProcessLostError)
            hint = "" if known else " (unexpected: --debug shows where)"
            complain(plain_reason(e) or f"{reason_of(e)}{hint}")
            raise typer.Exit(INVALID if expected else FAILED) from None

    vars(guarded).update(vars(command))
    guarded.__name__, guarded.__doc__ = command.__name__, command.__doc__
    guarded.__annotations__ = {}
    return guarded
