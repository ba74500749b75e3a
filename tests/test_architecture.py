"""The house: rooms stand in floors, imports run down, and no room outgrows its budget."""

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from tests.support.paths import PACKAGE, ROOT
from tests.support.source_nodes import imports_and_calls, module_files

# from the ground up: a room imports the rooms before it. Stubs point to any room, as the names that
# they list are imported when they are first used.
FLOORS = (
    "lazy_names lazy_sympy garbage errors checks reporting estimator"
    " operators graph model runtime native data autodiff parallel"
    " losses metrics optimizers schedules training quantization compat artifacts adapters finetune"
    " language explain plot report bridges torch jax pytensor sklearn callbacks __init__ tasks cli"
    " __main__"
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


def test_tasks_use_public_names_and_rooms_of_data_and_training():
    tasks = [name for name in module_files() if room(name) == "tasks"]
    used = {room(other) for name in tasks for other in imported_modules(name)}
    rooms = "errors operators graph model runtime data losses schedules training language tasks"
    assert used <= {*rooms.split(), "lazy_names", "__init__"}


def test_the_page_names_rooms_and_functions_that_exist():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r"`((?:[a-z_]+\.)+(?!py`)[a-z_]+)`", page))
    assert len(names) >= 7
    for name in names:
        place, _, own = f"onnxgrad.{name}".rpartition(".")
        assert module_key(f"{place}.{own}") or hasattr(importlib.import_module(place), own), name
    rooms = {room(name) for name, path in module_files().items() if path.parent != PACKAGE}
    listed = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"(?m)^\| (`[a-z].*?) \|", page)))
    assert rooms - {"callbacks"} <= set(listed)


def test_docstrings_of_rooms_name_files_that_exist():
    named = [
        path.parent / name
        for path in module_files().values()
        if path.name == "__init__.py"
        for name in re.findall(r"`(\w+\.py)`", ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert len(named) > 40
    assert [str(path) for path in named if not path.exists()] == []


def test_no_circle():
    graph = {name: imported_modules(name) - {name} for name in module_files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))


# -- keys of `meta` --------------------------------------------------------------------------------


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def meta_keys(tree: ast.Module) -> Iterator[tuple[ast.expr, bool]]:
    """Yield each key with which `meta` is written or read, and whether it is written."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=meta, slice=key, ctx=context) if is_meta(meta):
                yield key, isinstance(context, ast.Store)
            case ast.Call(func=ast.Attribute(value=meta, attr=name), args=args) if is_meta(meta):
                assert name in ("get", "pop", "setdefault"), name
                yield args[0], name == "setdefault"
            case ast.Compare(left=key, comparators=[meta]) if is_meta(meta):
                yield key, False


def test_keys_of_meta_are_declared_written_and_read():
    marks = "onnxgrad.operators.marks"
    declared = ast.parse(module_files()[marks].read_text()).body
    constants = {node.targets[0].id for node in declared if isinstance(node, ast.Assign)}
    written, used, users = Counter(), Counter(), defaultdict(set)
    for name, file in module_files().items():
        if name == marks:
            continue
        tree = ast.parse(file.read_text())
        for key, is_written in meta_keys(tree):
            match key:
                case ast.Attribute(value=ast.Name(id="marks"), attr=constant):
                    written[constant] += is_written
                case _:
                    pytest.fail(f"{name}:{key.lineno}: declare the key in {marks}")
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id="marks"), attr=constant):
                    used[constant] += 1
                    users[constant].add(name.removeprefix("onnxgrad.").replace(".", "/"))
    assert set(used) == constants
    comments = re.findall(r"((?:^#.*\n)+)([A-Z_]+) = ", module_files()[marks].read_text(), re.M)
    assert {name: set(re.findall(r"[a-z]+(?:/[a-z_]+)+", said)) for said, name in comments} == users
    assert all(0 < written[constant] < used[constant] for constant in constants)


# -- budgets: who raises a number says why in the same commit --------------------------------------

BUDGETS = {  # of each room, code lines (no docstrings, comments, blank lines) and files
    "adapters": (2250, 15),
    "artifacts": (650, 6),
    "autodiff": (5355, 34),
    "bridges": (400, 4),
    "callbacks": (50, 1),
    "cli": (2400, 19),
    "compat": (1850, 10),
    "data": (3750, 25),
    "explain": (1400, 12),
    "finetune": (2750, 15),
    "graph": (1380, 9),
    "jax": (350, 3),
    "language": (2200, 16),
    "losses": (3700, 26),
    "metrics": (1100, 12),
    "model": (2934, 21),
    "modules": (470, 9),  # with `lazy_names`, by which all submodules offer their names
    "native": (1810, 12),
    "operators": (6100, 33),
    "optimizers": (1050, 8),
    "parallel": (500, 4),
    "plot": (1400, 10),
    "pytensor": (200, 3),
    "quantization": (450, 3),
    "report": (1100, 9),
    "runtime": (1485, 10),
    "schedules": (500, 4),
    "sklearn": (950, 8),
    "tasks": (3700, 19),
    "torch": (450, 4),
    "training": (12230, 66),
}


def code_lines(text: str) -> int:
    """Return the number of lines with code, without docstrings, comments and blank lines."""
    described = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            described.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(x) and not x.startswith("#") and n not in described for n, x in lines)


def test_no_room_outgrows_its_budget():
    lines, files = Counter(), Counter()
    for name, path in module_files().items():
        own = room(name) if path.parent != PACKAGE else "modules"
        lines[own] += code_lines(path.read_text())
        files[own] += 1
    assert set(lines) == set(BUDGETS)
    over = {r: (lines[r], files[r]) for r, (most, count) in BUDGETS.items()
            if lines[r] > most or files[r] > count}  # fmt: skip
    assert not over


# -- one record for each operator: no table keyed by operators stands elsewhere --------------------

LEAST_ENTRIES = 3  # of a table; two names are a pattern that a rewrite looks for


@cache
def schema_names() -> set[str]:
    """Return the names of the operators of onnx and of onnxruntime."""
    return {schema.name for schema in (*defs.get_all_schemas(), *get_all_operator_schema())}


def entries(node: ast.AST, in_module: bool) -> list[str]:
    """Return the texts that are keys or elements of a dict, a set or `"...".split()`.

    Also those of a tuple or list that a module defines: in a function, it is a pattern.
    """
    if isinstance(node, ast.Dict):
        found = [*node.keys]
        found += [e for key in node.keys if isinstance(key, ast.Tuple) for e in key.elts]
    elif isinstance(node, ast.Set) or (in_module and isinstance(node, ast.Tuple | ast.List)):
        found = node.elts
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = node.func.value
        splits = node.func.attr == "split" and isinstance(text, ast.Constant)
        return text.value.split() if splits and isinstance(text.value, str) else []
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        is_table = node.func.id in ("dict", "set", "frozenset")
        literals = [a for a in node.args if isinstance(a, ast.Tuple | ast.List)]
        found = [e for a in literals for e in a.elts] if is_table else []
        if is_table:
            found += [ast.Constant(k.arg) for k in node.keywords if k.arg]
    else:
        return []
    return [e.value for e in found if isinstance(e, ast.Constant) and isinstance(e.value, str)]


def has_table_of_operators(text: str) -> bool:
    """Return whether a module has a table that is keyed by, or made of, names of operators."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(text), True)]
    for node, in_module in waiting:  # grows while it is read
        found = entries(node, in_module)
        if found and len(schema_names().intersection(found)) >= LEAST_ENTRIES:
            return True
        outside = in_module and not isinstance(node, ast.FunctionDef | ast.Lambda)
        waiting += [(child, outside) for child in ast.iter_child_nodes(node)]
    return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A = {'Conv': 1, 'Gemm': 2, 'MatMul': 3}", True),
        ("def f():\n    return {'Conv', 'Gemm', 'MatMul'}", True),
        ("A = frozenset('Conv Gemm MatMul'.split())", True),
        ("A = dict(Conv=1, Gemm=2, MatMul=3)", True),
        ("A = ('Conv', 'Gemm', 'MatMul')", True),
        ("A = {('', 'Conv'): 1, ('', 'Gemm'): 2, ('', 'MatMul'): 3}", True),
        ("A = {'Conv', 'Gemm'}", False),
        ("A = 'one two three'.split()", False),
        ("def f(x):\n    return made_by(x, 'Conv', 'Gemm', 'MatMul')", False),
        ("def f(n):\n    return n.op_type in ('Conv', 'Gemm', 'MatMul')", False),
    ],
)
def test_what_a_table_of_operators_is(text, expected):
    assert has_table_of_operators(text) is expected


def test_all_that_is_known_of_an_operator_is_its_record():
    found = {
        str(file.relative_to(PACKAGE).with_suffix(""))
        for name, file in module_files().items()
        if room(name) != "operators" and has_table_of_operators(file.read_text())
    }
    assert not found
