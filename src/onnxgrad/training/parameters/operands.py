"""The roles of operands, and the ways of values through a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import onnx_ir as ir

from onnxgrad.operators import OF_SHAPES, OPERATORS, PACKS, REORDERS, SELECTS, Operator

# these take one value and hand it on, in another order or shape or dtype
MOVES = (REORDERS | SELECTS | PACKS | {"CastLike", "Dropout"}) - {
    "Concat", "GatherElements", "GatherND"
}  # fmt: skip

# the elements of the result are those of the first operand, and the others only say how
_OF_FIRST = MOVES - {"Gather", "SequenceConstruct"} | {"Pad", "Resize", "TopK", "Trilu"}

# of these, the first operands lead on to what is computed; the others choose or locate
_LEADS = {"RoiAlign": 1, "Gather": 1, "GatherElements": 1, "GatherND": 1, "NonMaxSuppression": 0}


def letter(node: ir.Node, index: int) -> str:
    """Return the role of operand `index` of `node`, a letter of its record, or "" if unknown."""
    letters = OPERATORS.get((domain(node), node.op_type), Operator()).roles
    return letters[min(index, len(letters) - 1)] if letters else ""


def domain(node: ir.Node) -> str:
    """Return the domain of `node`, "" for the standard one."""
    return "" if node.domain == "ai.onnx" else node.domain


def value_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands whose elements the results are computed from."""
    standard = domain(node) == ""
    if standard and node.op_type in OF_SHAPES:
        return []
    first = standard and node.op_type in _OF_FIRST
    return [x for x in (node.inputs[:1] if first else node.inputs) if x is not None]


def leading_operands(node: ir.Node) -> list[ir.Value]:
    """Return the operands through which a smooth function of them would pass."""
    count = _LEADS.get(node.op_type, len(node.inputs)) if domain(node) == "" else len(node.inputs)
    return [x for x in value_operands(node) if x in node.inputs[:count]]


def reachable(
    starts: Iterable[ir.Value], onward: Callable[[ir.Value], Iterable[ir.Value | None]]
) -> Iterator[ir.Value]:
    """Yield `starts`, and all values to which `onward` leads from them, each once."""
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for value in waiting:  # the loop appends to it
        yield value
        new = {x: None for x in onward(value) if x is not None and x not in seen}
        seen |= new
        waiting += new


def readers(
    starts: Iterable[ir.Value], through: Collection[str] = MOVES
) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads `starts`, or results that nodes of the types `through` make of them.

    Each is a node and the index of the operand; those in between are yielded, too.
    """

    def results(value: ir.Value) -> Iterator[ir.Value]:
        return (y for node, _ in value.uses() if node.op_type in through for y in node.outputs)

    for value in reachable(starts, results):
        yield from value.uses()


def source_of(value: ir.Value) -> ir.Value:
    """Return the value of which `value` is a moved copy, or `value` itself."""
    node = value.producer()
    while node is not None and node.op_type in MOVES and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def maker_of(value: ir.Value) -> ir.Node | None:
    """Return the node that computes `value`, ignoring nodes that only move its elements."""
    return source_of(value).producer()
