"""`to_dot`: the graph of a model as text in the DOT language, which Graphviz draws."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from onnxgrad.model.read import ModelLike
from onnxgrad.plot.scene import ROOT, Scene

_LONGEST_LINE = 60  # characters
_STYLES = {
    "input": "shape=box color=red",
    "output": "shape=box color=green",
    "node": 'shape=box style="filled,rounded" color=orange',
}
_KEYWORDS = {"digraph", "edge", "graph", "node", "strict", "subgraph"}


def to_dot(model: ModelLike) -> str:
    """Return the graph of `model` in the DOT language, for Graphviz and other viewers.

    Inputs are red, outputs green, nodes orange and rounded. A node shows its name, its attributes,
    its constant operands and its results, with dtypes and shapes, and the elements of constants up
    to 10. Modules, branches, loop bodies and local functions are clusters.

    Args:
        model: model, serialized model or path.

    Raises:
        ModelError: `model` cannot be read.

    Examples:
        >>> import onnx, onnxgrad as og
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["": 20]> f (float[N] x) => (float[N] y) {y = Exp(x)}
        ... ''')
        >>> print("".join(line for line in og.plot.to_dot(model).splitlines(True) if "->" in line))
          x -> Exp;
          Exp -> y;
        <BLANKLINE>
    """
    scene = Scene(model)
    words = _unique_dot_ids(item.title for item in scene.items)
    members: dict[int, list[str]] = defaultdict(list)
    for item, word in zip(scene.items, words, strict=True):
        style, label = _STYLES[item.kind], _dot_label(item.details)
        members[item.group].append(f'{word} [{style} label="{label}" fontsize=10];')
    values: dict[int, set[str]] = defaultdict(set)
    for arrow in scene.arrows:
        values[arrow.source].add(arrow.text)
    lines = ["digraph {", "  orientation=portrait;", "  ranksep=0.25;", "  nodesep=0.05;"]
    lines += _cluster_lines(scene, ROOT, members, "  ")
    # at the end: an edge in a cluster would move the boxes at both its ends into that cluster
    for arrow in scene.arrows:
        several = len(values[arrow.source]) > 1  # results: which of them is it?
        label = f' [label="{_dot_label([arrow.text])}" fontsize=8]' if several else ""
        lines.append(f"  {words[arrow.source]} -> {words[arrow.target]}{label};")
    return "\n".join([*lines, "}\n"])


def _cluster_lines(
    scene: Scene, group: int, members: dict[int, list[str]], margin: str
) -> Iterator[str]:
    """Yield the DOT lines of a group: its boxes, and a cluster for each group in it."""
    yield from (margin + line for line in members[group])
    for inner in scene.groups:
        if inner.parent == group:
            yield f"{margin}subgraph cluster_{inner.id} {{"
            yield f'{margin}  label="{_dot_label([inner.title])}";'
            yield from _cluster_lines(scene, inner.id, members, margin + "  ")
            yield f"{margin}}}"


def _dot_label(lines: Iterable[str]) -> str:
    """Return lines as the text of a quoted DOT label, with escapes and shortened.

    Only edges have `->`, so that programs which read line by line find them.
    """
    lines = (line.replace("->", "→") for line in lines)
    short = (s if len(s) <= _LONGEST_LINE else f"{s[: _LONGEST_LINE - 3]}..." for s in lines)
    text = (line.replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") for line in short)
    return r"\n".join(text)


def _unique_dot_ids(titles: Iterable[str]) -> list[str]:
    """Return an unquoted DOT identifier for each title, all distinct."""
    found: dict[str, int] = {}  # {identifier: how many began with it}
    for title in titles:
        word = re.sub(r"\W", "_", title, flags=re.ASCII)
        if not word or word[0].isdigit() or word.lower() in _KEYWORDS:
            word = f"_{word}"
        identifier = word
        while identifier in found:
            found[word] += 1
            identifier = f"{word}_{found[word]}"
        found[identifier] = 0
    return list(found)
