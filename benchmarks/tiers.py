"""What the default tier of the tests reaches: names, operators, options, errors, commands, lines.

    python benchmarks/tiers.py [--keep FOLDER] [--whole]

runs the default tier with coverage and writes `tests/tiers.md`. With `--whole`, the sweep runs as
well, to compare the lines that both reach; without, the table compares with all lines that there
are, which the whole set can't exceed. `--keep` names a folder for what was measured, which a next
call takes.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "tiers.md"


def room_of(path: Path) -> str:
    """Return the room of a source file, such as "graph"."""
    inside = path.as_posix().split("src/onnxgrad/")[-1]
    return inside.split("/")[0] if "/" in inside else "(top)"


# -- a run of the tests: which lines each test runs, its seconds, what it calls ------------------


class Recorder:
    """A plugin of pytest: seconds of each test, commands that run, errors that are raised."""

    def __init__(self, keep: Path) -> None:
        self.keep = keep
        self.seconds: dict[str, float] = collections.Counter()
        self.commands: set[tuple[str, ...]] = set()
        self.errors: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionstart(self) -> None:
        from typer.testing import CliRunner

        import onnxgrad

        def record_command(_: Any, app: Any, arguments: Any = (), **more: Any) -> Any:
            self.commands.add(tuple(map(str, arguments)))
            return invoke(_, app, arguments, **more)

        invoke, CliRunner.invoke = CliRunner.invoke, record_command
        for error in error_types(onnxgrad):
            error.__init__ = self._recording(error, error.__init__)

    def _recording(self, error: type, start: Callable[..., None]) -> Callable[..., None]:
        def record_error(instance: Any, *arguments: Any, **more: Any) -> None:
            self.errors.add(error.__name__)  # of subclasses, too
            start(instance, *arguments, **more)

        return record_error

    def pytest_sessionfinish(self) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "controller")
        content = {"commands": sorted(self.commands), "errors": sorted(self.errors)}
        (self.keep / f"calls-{name}.json").write_text(json.dumps(content))
        if name == "controller":
            (self.keep / "seconds.json").write_text(json.dumps(self.seconds))


def pytest_configure(config: pytest.Config) -> None:
    """Record in each worker: pytest loads this file as a plugin."""
    config.pluginmanager.register(Recorder(Path(os.environ["ONNXGRAD_RECORD"])))


def public_objects(package: Any) -> dict[str, Any]:
    """Return the public objects of a package and its submodules, such as "optimizers.adamw"."""
    found = {}
    for name in package.__all__:
        value = getattr(package, name)
        inner = public_objects(value) if inspect.ismodule(value) else {}
        found |= {f"{name}.{own}": each for own, each in inner.items()} or {name: value}
    return found


def error_types(package: Any) -> set[type[BaseException]]:
    """Return the public errors and warnings."""
    found = public_objects(package).values()
    return {
        value for value in found if isinstance(value, type) and issubclass(value, BaseException)
    }


def run_with_coverage(folders: list[str], keep: Path, *options: str) -> None:
    """Run tests, and write into `keep` which test runs which lines, their seconds and calls."""
    keep.mkdir(parents=True, exist_ok=True)
    settings = keep / "coverage.ini"
    options_of_coverage = f"source = onnxgrad\ndata_file = {keep / 'lines'}\nparallel = true\n"
    settings.write_text(f"[run]\n{options_of_coverage}patch = subprocess\n")
    arguments = ["-q", "-n", "2", "-p", "tiers", "--cov=onnxgrad", f"--cov-config={settings}"]
    arguments += ["--cov-context=test", "--cov-report=", *options, *folders]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ONNXGRAD_RECORD": str(keep), "PYTHONPATH": paths}
    # in a process of its own: this one may not import the package before it is mutated
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], env=environment)
    if done.returncode:
        print("some tests failed; what they reach counts", file=sys.stderr)


def lines_of_tests(keep: Path) -> Any:
    """Return the coverage data of a run, with the name of the test of each line."""
    from coverage import CoverageData

    data = CoverageData(str(keep / "lines"))
    data.read()
    return data


def reached_lines(data: Any, path: str | Path) -> set[int]:
    """Return the lines of a file that run within tests, or while the package is imported."""
    path = Path(path).as_posix().split("src/onnxgrad/")[-1]
    files = [f for f in data.measured_files() if f.endswith(f"/onnxgrad/{path}")]
    return {line for file in files for line in data.lines(file) or ()}


# -- the table -----------------------------------------------------------------------------------


def tested_code(data: Any, value: Any) -> bool:
    """Return whether a test runs a line of the body of a function, or of a method of a class."""
    codes = list(_codes(value))
    for code in codes:
        path = code.co_filename.split("src/onnxgrad/")[-1]
        files = [f for f in data.measured_files() if f.endswith(f"/onnxgrad/{path}")]
        body = {line for *_, line in code.co_lines() if line and line > code.co_firstlineno}
        body = body or {code.co_firstlineno}  # a lambda
        for file in files:
            contexts = data.contexts_by_lineno(file)
            if any(set(contexts.get(line, ())) - {""} for line in body):
                return True
    return not codes  # a constant or an alias of types


def _codes(value: Any) -> Iterator[Any]:
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.isclass(value):
        for member in vars(value).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(member) and "src/onnxgrad/" in member.__code__.co_filename:
                yield member.__code__
    elif inspect.isfunction(value):
        inner = [c.cell_contents for c in value.__closure__ or () if callable(c.cell_contents)]
        functions = [f for f in inner if inspect.isfunction(f)]
        yield from (f.__code__ for f in functions or [value])


def page_commands() -> set[str]:
    """Return the command lines `onnxgrad ...` that pages show, to the first pipe."""
    found = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"\\\n\s*", "", page.read_text())
        line = r"^\s*(?:\$ )?onnxgrad ([a-z][^|>#]*?)\s*(?:2?[|>#].*)?$"
        found |= set(re.findall(line, text, re.MULTILINE))
    commands = {command for command, _ in shell_options()}
    return {line for line in found if line.split()[0] in commands}


def command_and_options(words: list[str]) -> tuple[str, frozenset[str]]:
    """Return the command of a command line, and its options by their first long names."""
    names = option_names()
    command = words[0] if words else ""
    options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return command, frozenset(names.get((command, option), option) for option in options)


@cache
def option_names() -> dict[tuple[str, str], str]:
    """Return for each command of the shell and each spelling of an option its first long name."""
    from onnxgrad.cli.command import COMMANDS, build_command

    return {
        (name, spelling): next((o for o in option.opts if o.startswith("--")), option.opts[0])
        for name in COMMANDS
        for option in build_command(name).params
        if option.param_type_name == "option" and option.name != "help"
        for spelling in option.opts + option.secondary_opts
    }


def shell_options() -> set[tuple[str, str]]:
    """Return each command of the shell with each of its options, by its first long name."""
    return {(command, name) for (command, _), name in option_names().items()}


def rows_of_table(data: Any, keep: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield what must be tested, how many there are, and which are not."""
    import onnxgrad
    import onnxgrad.training.trainer  # registers what is known of operators
    from onnxgrad.operators import OPERATORS

    public = public_objects(onnxgrad)
    missing = [place for place, thing in public.items() if not tested_code(data, thing)]
    yield "public names", len(public), missing

    functions = {
        f"{domain or 'ai.onnx'}::{name}": o.rule or o.subgraph_rule or o.lowering
        for (domain, name), o in OPERATORS.items()
        if o.rule or o.subgraph_rule or o.lowering
    }
    missing = [name for name, function in functions.items() if not tested_code(data, function)]
    yield "operators with a rule or a lowering", len(functions), missing

    calls = [json.loads(file.read_text()) for file in sorted(keep.glob("calls-*.json"))]
    run = {command_and_options(words) for call in calls for words in call["commands"]}
    options = shell_options()
    missing = sorted(options - {(command, option) for command, used in run for option in used})
    yield "options of the shell", len(options), [" ".join(pair) for pair in missing]

    types = sorted(error.__name__ for error in error_types(onnxgrad))
    raised = {name for call in calls for name in call["errors"]}
    yield "errors and warnings", len(types), sorted(set(types) - raised)

    pages = {line: command_and_options(shlex.split(line)) for line in sorted(page_commands())}
    missing = [
        line
        for line, (command, options) in pages.items()
        if not any(command == other and options <= used for other, used in run)
    ]
    yield "commands on pages, with their options", len(pages), missing


def lines_by_room(data: Any, whole: Any) -> dict[str, list[int]]:
    """Return for each room its lines, and how many of them the default tier and the set reach."""
    from coverage.python import PythonParser

    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for file in sorted((ROOT / "src" / "onnxgrad").rglob("*.py")):
        parser = PythonParser(filename=str(file), exclude=r"if TYPE_CHECKING:|pragma: no cover")
        parser.parse_source()
        lines = parser.statements
        fast = reached_lines(data, file) & lines
        every = (reached_lines(whole, file) & lines) | fast if whole else lines
        for room in (room_of(file), "all"):
            counts[room] = [
                a + len(b) for a, b in zip(counts[room], (lines, fast, every), strict=True)
            ]
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    os.chdir(ROOT)
    keep = (given.keep or Path(tempfile.mkdtemp(prefix="tiers-"))).resolve()
    if not (keep / "seconds.json").exists():
        run_with_coverage(["tests"], keep)
    if given.whole and not (keep / "whole" / "seconds.json").exists():
        run_with_coverage(["tests"], keep / "whole", "-m", "sweep")
    data = lines_of_tests(keep)
    whole = lines_of_tests(keep / "whole") if given.whole else None
    text = "# What the default tier of the tests reaches\n\n"
    text += "`python benchmarks/tiers.py` writes this page.\n\n"
    text += "| | there are | tested | not tested |\n|---|---|---|---|\n"
    for what, count, missing in rows_of_table(data, keep):
        shown = ", ".join(f"`{name}`" for name in missing)
        text += f"| {what} | {count} | {count - len(missing)} | {shown} |\n"
    text += f"\n| room | lines | default tier | {'whole set' if whole else 'at most'} | ratio |\n"
    text += "|---|---|---|---|---|\n"
    for room, (lines, fast, every) in sorted(lines_by_room(data, whole).items()):
        text += f"| {room} | {lines} | {fast} | {every} | {fast / every:.1%} |\n"
    TABLE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
