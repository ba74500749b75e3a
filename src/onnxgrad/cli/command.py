"""The command line: its commands, and how they run.

Options are read, errors become one line and an exit code, and Ctrl-C, SIGTERM and SIGHUP stop a
command without losing results.
"""

from __future__ import annotations

import inspect
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pkgutil import resolve_name
from types import FrameType
from typing import Annotated, Any, Self

import typer

from onnxgrad import __version__
from onnxgrad.cli import command_options as commands, config
from onnxgrad.cli.command_help import Command, Commands
from onnxgrad.cli.console import Shell, print_error, print_warning
from onnxgrad.cli.options import OptionField, help_text, section_entries
from onnxgrad.errors import ProcessLostError, escape, speaking
from onnxgrad.garbage import exempt_imported_modules
from onnxgrad.model.files import one_line_message

FAILED, INVALID = 1, 2  # exit codes; 0 after success, and 128 + n after signal n
EXIT_CODES = (
    "Exit codes: 0: the command succeeded; 1: training diverged, a file could not be written to "
    "its path, a gradient is wrong, or an unexpected error; 2: invalid options, model or data, and "
    "nothing was written; 130 after Ctrl-C, and 128 + n after signal n."
)

# messages of C++ libraries if there is not enough memory
_NO_MEMORY = ("std::bad_alloc", "bad allocation", "Failed to allocate memory")

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(KeyboardInterrupt):
    """The error raised after SIGINT, SIGTERM or SIGHUP has asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.code = 128 + number  # the exit code by which shells report a signal


class StopRequests:
    """A context manager in which SIGINT, SIGTERM and SIGHUP raise `Stopped`.

    Only the first signal does, as a second signal must not interrupt the clean-up. After
    `delay_signals`, signals are only recorded, and `raise_if_signaled` raises where nothing is
    lost. Signals that were ignored before, as SIGHUP under nohup, stay ignored.
    """

    def __init__(self) -> None:
        self.request: Stopped | None = None
        self._held = False

    def __enter__(self) -> Self:
        self.request, self._held = None, False
        self._before: dict[int, Any] = {}
        # other threads cannot set handlers
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.request = self.request or Stopped(number)
        if not self._held:
            self._held = True
            raise Stopped(number)

    def delay_signals(self) -> None:
        """Let later signals be recorded for `raise_if_signaled`, instead of raising `Stopped`."""
        self._held = True

    def raise_if_signaled(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self.request is not None:
            raise self.request

    @contextmanager
    def allow_signals(self) -> Iterator[None]:
        """Let signals raise `Stopped` in the `with` block, such as during a prompt."""
        self._held = False
        try:
            yield
        finally:
            self._held = True


stop = StopRequests()


def build_command(name: str) -> Any:
    """Return the click command `name`, with the help and the options of its dataclass.

    It calls the function of the command with an instance; the function's module is imported then.
    """
    kind, function = COMMANDS[name]
    described = OptionField.fields_of(kind)

    def run_command(context: typer.Context, **values: Any) -> None:
        with _print_errors_and_exit(name, Shell(described), values["debug"]):
            options = _read_options(context, kind, described, values)
            import_function(f"onnxgrad.cli.{function}")(options)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(each.typer_parameter() for each in described.values())]
    signature = inspect.Signature(parameters)
    vars(run_command).update(__signature__=signature, __annotations__={}, described=described)
    examples = section_entries(kind, "Examples")
    epilog = "\n\n".join([*["Examples:"] * bool(examples), *examples, EXIT_CODES])
    alone = typer.Typer(add_completion=False)  # typer makes click's commands for a `Typer` only
    alone.command(name, cls=Command, help=help_text(kind), epilog=epilog)(run_command)
    return typer.main.get_command(alone)


@cache
def import_function(name: str) -> Callable[[Any], None]:
    """Return the function "module:name"; its module is imported in the first call."""
    with exempt_imported_modules():
        return resolve_name(name)


def _read_options(
    context: typer.Context, kind: type, described: dict[str, OptionField], values: dict[str, Any]
) -> Any:
    """Return the options of a command; the command line overrides the `--config` file.

    Raises:
        ValueError: an argument is missing, or an option has no effect without another.
    """
    sources = {name: context.get_parameter_source(name) for name in values}
    chosen = {
        n: values[n] for n, source in sources.items() if source and source.name == "COMMANDLINE"
    }
    if file := values.get("config"):
        chosen = config.read_config(file, described) | chosen
    rest = {name: value for name, value in values.items() if value is not None}
    options = kind(**(rest | chosen))
    for each in described.values():
        if each.required and not getattr(options, each.name):
            more = (
                f", or as {each.name} = ... in the file of --config" if "config" in values else ""
            )
            raise ValueError(f"{each.flag} is missing: pass it as an argument{more}")
        if each.name in chosen and each.needs and not any(getattr(options, n) for n in each.needs):
            missing = " or ".join(described[name].flag for name in each.needs)
            raise ValueError(
                f"{each.flag} has no effect without {missing}: pass {missing}, too, or leave out "
                f"{each.flag}"
            )
    return options


def error_text(error: Exception) -> str:
    """Return the message of an error, or an explanation if its message is unclear or empty."""
    text = one_line_message(error) if isinstance(error, OSError) else str(error)
    return plain_error_text(error) or text or type(error).__name__


def plain_error_text(error: Exception) -> str:
    """Return an explanation of an error of memory or recursion; "" for other errors."""
    if isinstance(error, RecursionError):
        return "a file, or a value of an option, is nested too deep to be read"
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
        return (
            "there is not enough memory: take fewer rows at once with --batch-size, a smaller "
            "model, or a machine with more memory"
        )
    return ""


@contextmanager
def _print_errors_and_exit(command: str, face: Shell, debug: bool) -> Iterator[None]:
    """Print an error of the `with` block as one line on stderr, and exit with an exit code."""
    try:
        with stop, speaking(face), warnings.catch_warnings():
            warnings.showwarning = lambda message, *others, **more: print_warning(message)
            yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Stopped as e:
        trained = "nothing was trained yet, and " if command == "train" else ""
        print_error(f"{e}: {trained}no file was written")
        raise typer.Exit(e.code) from None
    except Exception as e:
        if debug:
            escape(e)
            raise
        expected = isinstance(e, (ValueError, OSError, NotImplementedError, ImportError))
        known = expected or isinstance(e, ProcessLostError) or plain_error_text(e)
        print_error(error_text(e) + ("" if known else " (unexpected: --debug shows where)"))
        raise typer.Exit(INVALID if expected else FAILED) from None


# {command: (dataclass of its options, "module:function" in onnxgrad.cli)}
COMMANDS: dict[str, tuple[type, str]] = {
    "train": (commands.TrainOptions, "train:train"),
    "eval": (commands.EvalOptions, "predict:evaluate"),
    "predict": (commands.PredictOptions, "predict:predict"),
    "generate": (commands.GenerateOptions, "predict:generate"),
    "trainable": (commands.TrainableOptions, "inspect:trainable"),
    "losses": (commands.LossesOptions, "losses:losses"),
    "grad": (commands.GradOptions, "transform:grad"),
    "check": (commands.CheckOptions, "inspect:check"),
    "merge": (commands.MergeOptions, "transform:merge"),
    "report": (commands.ReportOptions, "records:report"),
    "show": (commands.ShowOptions, "inspect:show"),
}


class _ShellCommands(Commands):
    """The group of the commands in `COMMANDS`, each built when it is asked for, as most are not."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return the command `name`; None if there is none."""
        return build_command(name) if name in COMMANDS else None


app = typer.Typer(
    cls=_ShellCommands,
    help="Differentiate and train ONNX models on the ordinary onnxruntime.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"onnxgrad {__version__}")
        raise typer.Exit


@app.callback()
def _shell_main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass
