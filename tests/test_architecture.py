"""The house: rooms stand in floors, imports run down, and nothing grows too long."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import PACKAGE

# from the ground up: a room imports those before it, and the public names import all but `tasks`,
# which are above them, and `cli`
FLOORS = [
    *("lazy_sympy", "errors", "limits", "reporting", "estimator"),
    *("graph", "model", "runtime", "native", "data", "autodiff", "parallel"),
    *(
        "losses",
        "metrics",
        "optimizers",
        "schedules",
        "training",
        "quantization",
        "compat",
        "artifacts",
        "adapters",
        "finetune",
        "language",
        "explain",
        "plot",
        "report",
        "torch",
        "sklearn",
        "__init__",
        "tasks",
        "cli",
        "__main__",
    ),
]
FILES = {
    ".".join(("onnxgrad", *file.relative_to(PACKAGE).with_suffix("").parts)): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def module(name: str) -> str | None:
    """Return the key of `FILES` for the dotted name of a module or a package."""
    return next((n for n in (name, f"{name}.__init__") if n in FILES), None)


def imports(file: Path) -> set[str]:
    """Return the modules of the package that a file imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: import by full names"
            base = str(node.module)
            found |= {module(f"{base}.{alias.name}") or module(base) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {module(alias.name) for alias in node.names}
    return {name for name in found if name}


def room(name: str) -> str:
    return name.split(".")[1]


def test_imports_run_down():
    floor = {name: i for i, name in enumerate(FLOORS)}
    assert {room(name) for name in FILES} == set(FLOORS)
    wrong = [
        f"{name} imports {other}"
        for name, file in FILES.items()
        for other in imports(file)
        if floor[room(other)] > floor[room(name)]
    ]
    assert not wrong


def test_tasks_use_public_names_only():
    used = {
        other for name, file in FILES.items() if room(name) == "tasks" for other in imports(file)
    }
    assert {other for other in used if room(other) not in ("tasks", "__init__")} == set()
    assert (
        sum(len(f.read_text().splitlines()) for n, f in FILES.items() if room(n) == "tasks") < 3100
    )


def test_no_circle():
    graph = {name: imports(file) - {name} for name, file in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))


def test_few_modules_belong_to_no_room():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name):
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, node.name
