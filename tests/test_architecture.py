"""The house: rooms stand in floors, and imports run down."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.support.source_nodes import imports_and_calls, module_files

# from the ground up: a room imports those before it, and the public names import all but `tasks`,
# which are above them, and `cli`
FLOORS = (
    "lazy_sympy errors limits reporting estimator"
    " graph model runtime native data autodiff parallel"
    " losses metrics optimizers schedules training quantization compat artifacts adapters finetune"
    " language explain plot report torch sklearn __init__ tasks cli __main__"
).split()


def module_key(name: str) -> str | None:
    """Return the key of `module_files` for the dotted name of a module or a package."""
    return next((n for n in (name, f"{name}.__init__") if n in module_files()), None)


@cache
def imported_modules(importer: str) -> set[str]:
    """Return the modules of the package that one of them imports."""
    found = set()
    for node in imports_and_calls()[importer]:
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{importer}: import by full names"
            base = str(node.module)
            found |= {
                module_key(f"{base}.{alias.name}") or module_key(base) for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {module_key(alias.name) for alias in node.names}
    return {name for name in found if name}


def room(name: str) -> str:
    return name.split(".")[1]


def test_imports_run_down():
    floor = {name: i for i, name in enumerate(FLOORS)}
    assert {room(name) for name in module_files()} == set(FLOORS)
    wrong = [
        f"{name} imports {other}"
        for name in module_files()
        for other in imported_modules(name)
        if floor[room(other)] > floor[room(name)]
    ]
    assert not wrong


def test_tasks_use_public_names_only():
    tasks = [name for name in module_files() if room(name) == "tasks"]
    used = {other for name in tasks for other in imported_modules(name)}
    assert {other for other in used if room(other) not in ("tasks", "__init__")} == set()


def test_no_circle():
    graph = {name: imported_modules(name) - {name} for name in module_files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))
