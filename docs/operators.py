"""Write operators.md: what is known of every operator, from the rules and their tests.

Run from anywhere, with the packages of the tests: `python docs/operators.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests"))

import onnx

import covered
from microsoft_rows import CASES
from onnxgrad.autodiff.primal.function_bodies import has_body
from onnxgrad.autodiff.primal.lowerings import LOWERINGS, ON_DEMAND
from onnxgrad.autodiff.rules import NON_DIFFERENTIABLE, RULES, SUBGRAPH_RULES
from test_control import CASES as OF_GRAPHS

FLOATS = {"tensor(float)", "tensor(double)", "seq(tensor(float))"}
HEAD = """# Operators

What has a gradient, by which operands, and how that is checked. Made by `python docs/operators.py`
from the rules and from the tests, which fail when this page is stale. The slopes at kinks are
compared with those of PyTorch in [a table of their own](kinks.md).

A **rule** writes the gradient. A **lowering** rewrites the operator to others before, and so does
the function **body** that the specification has. *Rows* are cases of the table of rules: value and
gradient against central differences in float64, first and second order, lengths known, symbolic,
known by rank only, or unknown. *Shipped* counts the node cases of onnx {version}, run with constant
and with fed operands; those of ai.onnx.ml are compared with the kernels of onnxruntime on models of
their own. What is refused raises `NoGradientRule` where it is needed.

The last table is of operators of com.microsoft, which onnxruntime's optimizers leave in models: all
are lowered, and compared with its kernels, or with formulas where the CPU has no kernel. Others of
that domain are refused.
"""
TABLES = {
    "With a gradient": "| Operator | By | Gradient of | Not of | Rows | Shipped | Mathematics "
    "| Notes | Kinks: slopes | Unsupported |",
    "Declared without a gradient": "| Operator | Why |",
    "Not differentiated yet": "| Operator | Why |",
    "Of onnxruntime": "| Operator | Cases | Mathematics | Notes |",
}
WHY = {
    "CastMap|DictVectorizer|ZipMap": "works on maps: select the tensor before it",
    "Scatter|Upsample": "deprecated; models that have it are converted",
}


def text() -> str:
    """Return the page."""
    rows, shipped = covered.counts(covered.rows()), covered.counts(covered.shipped())
    kinks = _kinks()
    answers, parts = covered.by_input(), {title: list[str]() for title in TABLES}
    for schema in covered.operators():
        key = (schema.domain, schema.name)
        name = f"`{schema.name}`" + (f" ({schema.domain})" if schema.domain else "")
        if key in NON_DIFFERENTIABLE:
            parts["Declared without a gradient"].append(f"| {name} | {NON_DIFFERENTIABLE[key]} |")
        elif (how := _how(schema)) is None:
            why = next(w for names, w in WHY.items() if re.fullmatch(names, schema.name))
            parts["Not differentiated yet"].append(f"| {name} | {why} |")
        else:
            yes, no = _operands(schema, answers.get(key))
            held = sum(bool(re.search(rf"\b{key[1]} ?[<(]", t)) for t, _ in OF_GRAPHS.values())
            count = held if key in _holders() else rows[key]
            numbers = f"{count or ''} | {shipped[key] or ''}"
            doc, refused = _doc(key), "; ".join(dict.fromkeys(_refused(key)))
            more = f"{doc} | {'; '.join(kinks.get(schema.name, ()))} | {refused}"
            cells = f"{name} | {how} | {yes} | {no} | {numbers} | {more}"
            parts["With a gradient"].append(f"| {cells} |")
    cases = Counter(match.group(1) for c in CASES if (match := re.search(r"= (\w+)", c.node)))
    for key in sorted(LOWERINGS):
        if key[0] == "com.microsoft":
            line = f"| `{key[1]}` | {cases[key[1]]} | {_doc(key)} |"
            parts["Of onnxruntime"].append(line)
    return "\n".join([HEAD.format(version=onnx.__version__), *_tables(parts)])


def _tables(parts: dict[str, list[str]]) -> Iterator[str]:
    for title, lines in parts.items():
        head = TABLES[title]
        yield from (f"## {title}: {len(lines)}", "", head, "|---" * (head.count("|") - 1) + "|")
        yield from (*lines, "")


def _how(schema: Any) -> str | None:
    key = (schema.domain, schema.name)
    if key in RULES:
        return "rule"
    if key in LOWERINGS or key in ON_DEMAND:
        return "lowering"
    return "rule" if key in _holders() else "body" if has_body(schema) else None


def _holders() -> dict[tuple[str, str], Any]:
    """Return the functions for operators that hold graphs."""
    return {("", name): f for name, f in SUBGRAPH_RULES.items() if ("", name) not in ON_DEMAND}


def _operands(schema: Any, answers: dict[int, set[str]] | None) -> tuple[str, str]:
    """Return the names of the float operands with a gradient, and of those without."""
    floats = [(i, x.name) for i, x in enumerate(schema.inputs) if not FLOATS.isdisjoint(x.types)]
    if ("", schema.name) in _holders():
        return ", ".join([*(name for _, name in floats), "all that its graphs read"]), ""
    if answers is None:
        return ", ".join(name for _, name in floats), ""
    yes = [name for i, name in floats if "value" in answers.get(i, ())]
    no = [name for i, name in floats if name not in yes]
    return ", ".join(yes), ", ".join(no)


def _doc(key: tuple[str, str]) -> str:
    """Return the docstring as two cells: the mathematics, which come first, and the rest."""
    function = (RULES | LOWERINGS | ON_DEMAND | _holders()).get(key)
    doc = inspect.getdoc(function) if function else ""
    first, _, rest = (doc or "").replace("|", "\\|").partition("\n\n")
    mathematics = _slope(key[1], function) or " ".join(first.split()).rstrip(".")
    return f"`{mathematics}` | {' '.join(rest.split())}" if mathematics else " | "


def _slope(name: str, function: Any) -> str | None:
    """Return y and dx of a rule that is given by its slope, as it is written there."""
    slope = inspect.getclosurevars(function).nonlocals.get("slope") if function else None
    if slope is None:
        return None
    for node in ast.walk(ast.parse(Path(inspect.getfile(slope)).read_text())):
        pairs = [(node.arg, node.value)] if isinstance(node, ast.keyword) else []
        if isinstance(node, ast.Dict):
            pairs = [
                (getattr(k, "value", None), v) for k, v in zip(node.keys, node.values, strict=True)
            ]
        for key, value in pairs:
            if key == name and isinstance(value, ast.Lambda):
                return f"y = {name}(x):  dx = g * ({ast.unparse(value.body)})"
    return None


def _kinks() -> dict[str, list[str]]:
    """Return what kinks.md says of each operator."""
    found: dict[str, list[str]] = {}
    page = (FOLDER / "kinks.md").read_text()
    for name, at, slope in re.findall(r"^\| `(\w+).*?` \| (.*?) \| (.*?) \|", page, re.MULTILINE):
        found.setdefault(name, []).append(f"{at}: {slope}")
    return found


def _refused(key: tuple[str, str]) -> Iterator[str]:
    """Yield the reasons that the rule, or what it calls in the rules, may refuse with."""
    function = RULES.get(key)
    waiting, seen = [function] if function else [], set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Unsupported":
                yield _phrase(node.args[0])
            elif isinstance(node, ast.Name):
                value = function.__globals__.get(node.id)
                if inspect.isfunction(value) and ".rules." in value.__module__:
                    waiting.append(value)


def _phrase(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    parts = [v.value if isinstance(v, ast.Constant) else "..." for v in getattr(node, "values", ())]
    return re.sub(r"^\.\.\. ", "", "".join(map(str, parts)))


if __name__ == "__main__":
    (FOLDER / "operators.md").write_text(text())
