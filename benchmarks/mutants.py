"""What the tests would let through: small mistakes are put into the source, one at a time.

Seeded mutants of all rooms (an operator exchanged, a number one larger, a guard deleted) run
against the tests of their room that reach the changed line, until one fails. A mutant that passes
all of them has survived: a test is missing, or the change makes no difference.

    python benchmarks/mutants.py [ROOM ...] [--count 200] [--seed 0] [--jobs 2] [--keep FOLDER]

The first step runs the tests with coverage, as `tiers.py` does, to know which of them reach a line:
some minutes for all rooms. `--keep` names a folder for it, which a next call of either takes if it
is there. `--list` only prints the mutants.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib
import json
import os
import py_compile
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/onnxgrad")
PATIENCE = 1200  # seconds for the tests of one mutant
TEST_PATIENCE = 150  # seconds for one test: a mutant may loop for ever
LEAST = 4  # mutants of a small room
EXCHANGED = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<")},
    **{ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*")},
    **{ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|")},
    **{ast.And: ("and", "or"), ast.Or: ("or", "and")},
}
LEAVING = ast.Raise | ast.Return | ast.Continue  # the last statement of a guard
HEAVY = "numpy onnx onnx_ir onnxruntime matplotlib.figure pyarrow rich typer torch sklearn pandas"


@dataclass(frozen=True)
class Mutant:
    """A replacement of `old` by `new` in the bytes of a file, from `start` to `stop`."""

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} `{self.old}` -> `{self.new}`"

    def mutated_source(self) -> bytes:
        source = (ROOT / self.path).read_bytes()
        return source[: self.start] + self.new.encode() + source[self.stop :]


def mutants_of_file(path: Path) -> Iterator[Mutant]:
    """Yield every mutant of a file whose syntax is right."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(node: ast.AST, end: bool = False) -> int:
        line, column = (
            (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        )
        return starts[line - 1] + column

    def replaced(start: int, stop: int, old: str, new: str) -> Mutant:
        line = source.count(b"\n", 0, start) + 1
        return Mutant(str(path), line, start, stop, old, new)

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> Iterator[Mutant]:
        old, new = EXCHANGED.get(type(operator), ("", ""))
        begin, end = offset(left, end=True), offset(right)
        at = source.find(old.encode(), begin, end) if old else -1
        if at >= 0:
            yield replaced(at, at + len(old), old, new)

    for node in _mutable_nodes(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            yield from between(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield replaced(offset(node), offset(node.operand), "not", "")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            text = source[offset(node) : offset(node, end=True)].decode()
            yield replaced(offset(node), offset(node, end=True), text, repr(new))
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], LEAVING):
            stop = offset(node.test, end=True)
            text = source[offset(node.test) : stop].decode()
            yield replaced(offset(node.test), stop, text, "False")


def _mutable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no annotations, texts of messages, or imports for types."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "exc", "msg"):
                continue
            children = value if isinstance(value, list) else [value]
            pending += [
                child
                for child in children
                if isinstance(child, ast.AST)
                and not isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom)
                and not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            ]


def test_folder(path: Path) -> str:
    """Return the folder of the tests of a room; of files in no room, all tests."""
    folder = Path("tests") / tiers.room_of(path)
    return folder.as_posix() if (ROOT / folder).is_dir() else "tests"


def drawn_mutants(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants: of each room by its size, and at least `LEAST` of it."""
    draw, found = random.Random(seed), collections.defaultdict(list)
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        path = path.relative_to(ROOT)
        found[tiers.room_of(path)] += mutants_of_file(path)
    total = sum(map(len, found.values()))
    chosen = []
    for room, mutants in sorted(found.items()):
        number = min(len(mutants), max(LEAST, round(count * len(mutants) / total)))
        picked = draw.sample(mutants, number)
        chosen += picked if not rooms or room in rooms else []
    return chosen


def tests_of_line(keep: Path, path: str, line: int) -> set[str]:
    """Return the tests that run a line of a file: all of the file, if only import runs the line."""
    from coverage.python import PythonParser

    parser = PythonParser(filename=str(ROOT / path))
    parser.parse_source()
    data, first = tiers.lines_of_tests(keep), parser.first_line(line)
    lines: dict[int, set[str]] = collections.defaultdict(set)
    for file in data.measured_files():
        if file.endswith(path):
            for number, contexts in data.contexts_by_lineno(file).items():
                lines[number] |= {context.rpartition("|")[0] for context in contexts}
    by_import = "" in lines[first] or not lines[first]
    return (set().union(*lines.values()) if by_import else lines[first]) - {""}


def first_failure(mutant: Mutant, tests: list[str], source: Path, log: Path) -> int:
    """Start a process that runs tests against a mutant in `source`; return its number."""
    file = source / Path(mutant.path).relative_to("src")
    file.write_bytes(mutant.mutated_source())
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    process = os.fork()
    if process:
        return process
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-n0", f"--timeout={TEST_PATIENCE}", "--no-cov"]
    options += ["-p", "no:randomly", "-p", "no:cacheprovider"]
    os._exit(int(pytest.main([*options, *tests])))


def outcome_of(code: int, output: str) -> str:
    """Return what the exit code of pytest says of a mutant.

    Raises:
        RuntimeError: the tests did not run, for another reason than the mutant.
    """
    if code == pytest.ExitCode.USAGE_ERROR and "ERROR: not found" in output:
        raise RuntimeError(f"tests that were recorded are not there:\n{output[-2000:]}")
    return {0: "survived", -signal.SIGKILL: "no end"}.get(code, "killed")


def survivors(mutants: list[Mutant], keep: Path, jobs: int) -> dict[Mutant, str]:
    """Return what became of each mutant: "killed", "survived", "no end" in time, or "no test"."""
    for name in HEAVY.split():
        importlib.import_module(name)  # once, for all processes
    seconds = json.loads((keep / "seconds.json").read_text())
    outcome: dict[Mutant, str] = {}
    free = []
    for job in range(jobs):
        folder = Path(tempfile.mkdtemp(prefix=f"mutant-{job}-"))
        shutil.copytree(
            ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        for file in (folder / "src").rglob("*.py"):
            py_compile.compile(str(file))
        free.append(folder)
    running: dict[int, tuple[Mutant, Path, float]] = {}
    waiting = list(mutants)

    def restore(mutant: Mutant, folder: Path) -> None:
        file = folder / mutant.path
        shutil.copyfile(ROOT / mutant.path, file)
        py_compile.compile(str(file))
        free.append(folder)

    while waiting or running:
        while waiting and free:
            mutant = waiting.pop(0)
            reached = tests_of_line(keep, mutant.path, mutant.line)
            folder = test_folder(Path(mutant.path))
            tests = [t for t in reached if t.startswith(f"{folder}/")]
            if not tests:
                outcome[mutant] = "no test"
                print(f"no test   {mutant}", flush=True)
                continue
            tests.sort(key=lambda name: (seconds.get(name, 1.0), name))
            place = free.pop()
            log = place / "output.txt"
            process = first_failure(mutant, tests, place / "src", log)
            running[process] = mutant, place, time.monotonic()
        if not running:
            continue
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            for number, (_, _, since) in running.items():
                if time.monotonic() - since > PATIENCE:
                    os.killpg(number, signal.SIGKILL)
            time.sleep(0.05)
            continue
        mutant, place, _ = running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        outcome[mutant] = outcome_of(code, (place / "output.txt").read_text())
        print(f"{outcome[mutant]:9} {mutant}", flush=True)
        restore(mutant, place)
    for folder in free:
        shutil.rmtree(folder)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    os.chdir(ROOT)
    mutants = drawn_mutants(given.rooms, given.count, given.seed)
    if given.list:
        print(*mutants, sep="\n")
        return
    keep = given.keep or Path(tempfile.mkdtemp(prefix="mutants-"))
    keep = keep.resolve()
    if not (keep / "seconds.json").exists():
        tiers.run_with_coverage(sorted({test_folder(Path(m.path)) for m in mutants}), keep)
    outcome = survivors(mutants, keep, given.jobs)
    (keep / "outcome.json").write_text(
        json.dumps([asdict(m) | {"outcome": o} for m, o in outcome.items()], indent=1)
    )
    counts = collections.defaultdict(collections.Counter)
    for mutant, result in outcome.items():
        counts[tiers.room_of(Path(mutant.path))][result] += 1
    print("\n| room | mutants | killed |\n|---|---|---|")
    for room, of_room in sorted(counts.items()):
        print(f"| {room} | {of_room.total()} | {of_room['killed']} |")
    killed = sum(of_room["killed"] for of_room in counts.values())
    print(f"| all | {len(outcome)} | {killed} ({killed / max(1, len(outcome)):.0%}) |")


if __name__ == "__main__":
    main()
