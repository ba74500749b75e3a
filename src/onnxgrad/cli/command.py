"""The command line: its commands, and how they run.

Options are read, errors become one line and an exit code, and Ctrl-C, SIGTERM and SIGHUP stop a
command without losing results.
"""

from __future__ import annotations

import inspect
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import FrameType
from typing import Annotated, Any, Self

import typer

from onnxgrad import __version__
from onnxgrad.cli import command_options as commands, config
from onnxgrad.cli.command_help import Command, Commands
from onnxgrad.cli.console import Shell, complain, warn
from onnxgrad.cli.options import Described, help_text, section_entries
from onnxgrad.errors import ProcessLostError, escape, speaking
from onnxgrad.model.files import one_line_message

FAILED, INVALID = 1, 2  # exit codes; 0 after success, and 128 + n after signal n
EXIT_CODES = (
    "Exit codes: 0: the command succeeded; 1: training diverged, a file could not be written to "
    "its path, a gradient is wrong, or an unexpected error; 2: invalid options, model or data, and "
    "nothing was written; 130 after Ctrl-C, and 128 + n after signal n."
)

# what libraries in C++ say where no memory is left
_NO_MEMORY = ("std::bad_alloc", "bad allocation", "Failed to allocate memory")

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class Stopped(KeyboardInterrupt):
    """Raised when a signal has asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.code = 128 + number  # as shells report it


class StopRequests:
    """A context manager in which signals that ask to stop raise `Stopped`.

    Only the first signal does, as another must not interrupt the clean-up. After `hold`, signals
    are only recorded, and `check` raises where nothing is lost. Signals that were ignored before
    stay ignored, as SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self.request: Stopped | None = None
        self._held = False

    def __enter__(self) -> Self:
        self.request, self._held = None, False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
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

    def hold(self) -> None:
        """From now on, record signals for `check` instead of raising `Stopped`."""
        self._held = True

    def check(self) -> None:
        """Raise `Stopped` if a signal was received."""
        if self.request is not None:
            raise self.request

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let signals raise `Stopped` within the block, such as during a prompt."""
        self._held = False
        try:
            yield
        finally:
            self._held = True


stop = StopRequests()


def register(app: typer.Typer, name: str, kind: type, function: str) -> None:
    """Register a command with the help and the options of the dataclass `kind`.

    It calls `function`, "module:name", with an instance; the module is imported then.
    """
    described = Described.fields_of(kind)

    def run_command(context: typer.Context, **values: Any) -> None:
        with _short_errors(name, Shell(described), values["debug"]):
            resolve_name(function)(_read_options(context, kind, described, values))

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(each.typer_parameter() for each in described.values())]
    vars(run_command).update(__signature__=inspect.Signature(parameters), __annotations__={})
    vars(run_command)["usual"] = {name for name, each in described.items() if each.usual}
    examples = section_entries(kind, "Examples")
    epilog = "\n\n".join([*["Examples:"] * bool(examples), *examples, EXIT_CODES])
    app.command(name, cls=Command, help=help_text(kind), epilog=epilog)(run_command)


def _read_options(
    context: typer.Context, kind: type, described: dict[str, Described], values: dict[str, Any]
) -> Any:
    """Return the options of a command: of the command line, then of the `--config` file.

    Raises:
        ValueError: an argument is missing, or an option has no effect without another.
    """
    sources = {name: context.get_parameter_source(name) for name in values}
    chosen = {
        n: values[n] for n, source in sources.items() if source and source.name == "COMMANDLINE"
    }
    if file := values.get("config"):
        chosen = config.read(file, described) | chosen
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
            raise ValueError(f"{each.flag} has no effect without {missing}: pass that, too")
    return options


def reason_of(error: Exception) -> str:
    """Return the message of an error, or plain words for an error without a clear message."""
    text = one_line_message(error) if isinstance(error, OSError) else str(error)
    return plain_reason(error) or text or type(error).__name__


def plain_reason(error: Exception) -> str:
    """Return plain words for an error of too little memory or too deep nesting; else ""."""
    if isinstance(error, RecursionError):
        return "a file, or a value of an option, is nested too deep to be read"
    if isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY):
        return (
            "there is not enough memory: take fewer rows at once with --batch-size, a smaller "
            "model, or a machine with more memory"
        )
    return ""


@contextmanager
def _short_errors(command: str, face: Shell, debug: bool) -> Iterator[None]:
    """Print an error of the block as one line on stderr, and exit with its code."""
    try:
        with stop, speaking(face), warnings.catch_warnings():
            warnings.showwarning = lambda message, *category_and_source, **more: warn(message)
            yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Stopped as e:
        trained = "nothing was trained yet, and " if command == "train" else ""
        complain(f"{e}: {trained}no file was written")
        raise typer.Exit(e.code) from None
    except Exception as e:
        if debug:
            escape(e)
            raise
        expected = isinstance(e, (ValueError, OSError, NotImplementedError, ImportError))
        known = expected or isinstance(e, ProcessLostError) or plain_reason(e)
        complain(reason_of(e) + ("" if known else " (unexpected: --debug shows where)"))
        raise typer.Exit(INVALID if expected else FAILED) from None


COMMANDS: dict[str, tuple[type, str]] = {  # the function is in a module of this room
    "train": (commands.TrainOptions, "train:train"),
    "eval": (commands.EvalOptions, "predict:evaluate"),
    "predict": (commands.PredictOptions, "predict:predict"),
    "generate": (commands.GenerateOptions, "predict:generate"),
    "trainable": (commands.TrainableOptions, "inspect:trainable"),
    "losses": (commands.LossesOptions, "inspect:losses"),
    "grad": (commands.GradOptions, "transform:grad"),
    "check": (commands.CheckOptions, "inspect:check"),
    "merge": (commands.MergeOptions, "transform:merge"),
    "report": (commands.ReportOptions, "records:report"),
    "show": (commands.ShowOptions, "inspect:show"),
}

app = typer.Typer(
    cls=Commands,
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


for _name, (_options, _function) in COMMANDS.items():
    register(app, _name, _options, f"onnxgrad.cli.{_function}")
