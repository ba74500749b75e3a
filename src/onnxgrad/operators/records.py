"""The record of an operator: traits, shapes, axes, rule, lowering; and how a file adds them.

No other package keeps a table of operators. A file of this package declares similar operators by
`declare_operators`, and registers their rules and lowerings by decorators; `user_rules` registers
the rules and lowerings of users.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import onnx_ir as ir
from onnx import NodeProto

ValueRange = tuple[float, float]
OperandNumbers = tuple[tuple[int, float], ...]  # (index of an operand, number)


class ListedAxes(NamedTuple):
    """The attribute or operand in which an operator lists axes of its first operand (an Unsqueeze:
    of its output).

    Attributes:
        attribute: the attribute that holds the named axes.
        operand: the index of the operand that holds them, if there is no such attribute.
        default: (rank, inputs, attributes) -> the axes that a node names if it states none, or
            None if they are unknown.
    """

    attribute: str
    operand: int | None = None
    default: Callable[[int, Sequence, Mapping], Sequence[int] | None] = lambda *_: None


# A rule or lowering of a user takes the place of the fields with this metadata.
_OF_RULE = {"of_rule": True}


@dataclass(frozen=True)
class Operator:
    """The record of all that is known of an operator; the default of a field means that nothing is
    known.

    Attributes:
        traits: see below; empty for operators of other domains.
        shape: (inputs, attributes) -> the shape of the first output, or a list of shapes, one for
            each of the first outputs; None or an UnknownShapeError if unknown. Operands that do not
            fit are an IndexError, another ValueError or a ZeroDivisionError.
        shape_like: a standard operator whose result has the same shape, and how many operands it
            takes.
        result_type: (inputs, attributes) -> the type of the output; None: a tensor of the dtype of
            the first typed operand.
        elements: (node, elements of each operand) -> the elements of the result, a short vector of
            lengths. None is an unknown operand, and an unknown result.
        lengths: (node, elements of each operand) -> the shape of the result, where elements are its
            lengths.
        value_range: (node, range of the elements of each operand) -> the range of the elements of
            the first output; or that range, if it is the same for all operands.
        naming: where its nodes list axes.
        axes: (node, operand, axis) -> the axis of the outputs that the axis becomes: see `axes`.
        features: the index of the operand of weights that makes the features of the result, and
            the axis of these.
        terms: (op, operand) -> the terms that a reduction adds, or averages, one for each element.
        roles: the role of each operand, a letter: see below.
        settings: indices of the operands that say how to compute, or hold lengths: they are neither
            weights nor inputs of a derivative by default.
        float32_operand: index of an operand that is float32, whatever the dtype of the data.
        lookup_operand: index of the operand that holds the indices of the rows to look up.
        scaled_operands: for each operand of integers that stand for floats, its index and the
            indices of its scale and of its zero points.
        ratio_operand: index of the operand that holds the ratio of dropped elements; the training
            mode follows it.
        coefficients: attributes that hold tensors: the name of each, and whether it is a weight if
            none is named.
        fitted: how a model that it computes is fitted without gradients: an error says this
            behind the name of the node.
        straight_through: how a gradient passes straight through its rounding. A function (walk,
            node) -> its results computed in floats, or None to use its rule; or the indices of the
            operands whose integers it moves or combines, () for all operands: the same operator
            does so with floats.
        finite_at: pairs of the index of an operand and a number, or (node) -> such pairs: value and
            slope are finite where these operands have these numbers, and the others are finite. ()
            for operators whose value and slope are finite at all finite operands.
        work: (node, function from a value to its lengths) -> its multiply-adds. The function raises
            `UnknownShapeError`, which is not caught.
        kept_results: the number of values of the size of its result that its gradient reads.
        rule: writes the gradients of the inputs: (op, node, cotangents) -> one for each input.
        subgraph_rule: the rule of an operator whose subgraphs capture values: (op, node, list of
            cotangents, values on the path) -> pairs of a value and its gradient.
        no_gradient: why it has none; no path goes through its nodes.
        lowering: rewrites a node before the sweep: (op, node) -> values, or None to leave it.
        on_demand: the lowering is for the sweep, which applies it to nodes with a cotangent, as it
            slows down the forward pass.
        of_user: whether a user registered its rule or lowering.
        remedy: (node) -> the advice to users if rule and lowering leave the node; None: only the
            advice of its domain.
        members: the member form, which writes one node for all members of a `TrainerStack`; without
            it, the form follows from the other fields: see `member_forms`.
    """

    traits: frozenset[str] = frozenset()
    shape: Callable[[Sequence, Mapping[str, Any]], Any] | None = None
    shape_like: tuple[str, int] = ("", 0)
    result_type: Callable[[Sequence, Mapping[str, Any]], ir.TypeProtocol | None] | None = None
    elements: Callable[..., Any] | None = None
    lengths: Callable[..., Any] | None = None
    value_range: Callable[[ir.Node, Sequence[ValueRange]], ValueRange] | ValueRange | None = None
    naming: ListedAxes | None = None
    axes: Callable[..., Any] | None = None
    features: tuple[int, int] | None = None
    terms: Callable[[Any, ir.Value], ir.Value] | None = None
    roles: str = ""
    settings: tuple[int, ...] = ()
    float32_operand: int | None = None
    lookup_operand: int | None = None
    scaled_operands: tuple[tuple[int, int, int], ...] = ()
    ratio_operand: int | None = None
    coefficients: tuple[tuple[str, bool], ...] = ()
    fitted: str = ""
    straight_through: Callable[..., Any] | tuple[int, ...] | None = None
    finite_at: Callable[[ir.Node], OperandNumbers] | OperandNumbers = ()
    work: Callable[[ir.Node, Callable[[Any], Sequence[int]]], int] | None = None
    kept_results: int = 1
    rule: Callable[..., Any] | None = field(default=None, metadata=_OF_RULE)
    subgraph_rule: Callable[..., list[tuple[ir.Value, ir.Value]]] | None = field(
        default=None, metadata=_OF_RULE
    )
    no_gradient: str = field(default="", metadata=_OF_RULE)
    lowering: Callable[..., Any] | None = field(default=None, metadata=_OF_RULE)
    on_demand: bool = field(default=False, metadata=_OF_RULE)
    of_user: bool = False
    remedy: Callable[[ir.Node], str | None] | None = field(default=None, metadata=_OF_RULE)
    members: Callable[..., list[ir.Value] | None] | None = None

    @property
    def is_covered(self) -> bool:
        """Whether nodes have gradients, by a rule or a lowering, or are known to have none."""
        return bool(self.rule or self.subgraph_rule or self.no_gradient or self.lowering)


# The traits, by which graphs are rewritten, read and scheduled:
#
# elementwise     an element of the result depends on those at its position only; operands broadcast
# unary           the result has the shape of the first operand, which the others do not change
# cheap           one pass over memory, without a transcendental function
# transcendental  computes exp, log, powers or the like for every element
# normalizes      two passes over memory: one for means, one that divides by deviations
# view            the elements of the first operand in their order, in another shape or none
# reorders        every element of the operand is one of the result
# selects         every element of the result is one of the first operand
# moves           hands on one value in another order, shape or dtype, or parts along an axis
# aligned         the axes of the first operand are the axes of the result; an index along one means
#                 the same in all rows, even where the axis is mixed or cut
# affine          adds, subtracts, multiplies or divides at each position
# distribution    shares of one along the named axis, or their logarithms
# sequences       takes or returns sequences or Optionals
# shape           reads the shape of its operand only, or makes a tensor of a shape
# arithmetic      computes sizes and positions
# random          two equal nodes give two results
# exact           an element has the same bits, however many elements there are
# never_fails     computes a result for any operand
# bounds          keeps elements above or below others
# powers          multiplies elements, or takes a power or the magnitude of each
# bits            shifts the bits of integers, or combines the bits of two
# moments         sums, means, or roots of sums, of elements or their squares along axes
# sums            an element of the result is a sum of elements, one of them, its negative, or 0
# reduces         combines the elements along the axes that it names
# searches        the last output holds positions on the axis that it names
# product         multiplies matrices: its first operand by its second, which layers keep as weights
# convolution     slides its second operand over the first
# attention       averages values by the scores of queries and keys
# recurrent       hands a state on from step to step
# subgraphs       runs graphs that its attributes hold
# maps            takes or returns maps
# quantized       computes with integers that stand for floats, or rounds to them
# rounds          rounds to integers that stand for floats
# quantizable     a product that onnxruntime's quantization turns into one of integers
# real_settings   its settings are floats that models compute: scales, tables of cosines
#       onnxruntime has kernels for few ranks or axes
# float32_in_reference   onnx.reference computes parts of it in float32
# boolean, int64  the dtype of the result, whatever the operands are

# The role of each operand is a letter; the last one of an operator applies to all that follow.
#
# x  data                             t  table whose rows are looked up
# a  added to the data                i  index of a row or a region
# e  factor, element by element       p  slope
# f  factor of a product              h  initial state
# b  bias                             m  added to the scores of attention
# s  scale of a normalization         w  chosen by a condition
# o  bias of a normalization          c  setting: a bound, a condition, a size
# r  running statistic                v  setting in which the result varies smoothly: an exponent
# q  scale of quantization            l  length, axis or place, which says where elements go
# k  rotary table

# why operators of several families have no gradient
OF_SHAPE = "depends on the shape of its input only"
INTEGER = "the output is an integer; to pass a gradient, name the output in `straight_through`"
OF_SETTINGS = "a constant: its inputs are lengths and settings"
INDEX = "the output is an index"
PIECEWISE = "piecewise constant: zero almost everywhere"

OPERATORS: dict[tuple[str, str], Operator] = {}  # by domain and name
DOMAIN_REMEDIES: dict[str, Callable[[ir.Node], str]] = {}  # of nodes whose records have no remedy
_UNKNOWN = Operator()


def operator_of(node: ir.Node | NodeProto) -> Operator:
    """Return the `Operator` record of a node's operator; an empty record for an unknown
    operator.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    return OPERATORS.get((domain, node.op_type), _UNKNOWN)


def standard_operator(op_type: str) -> Operator:
    """Return the `Operator` record of a standard operator, by its name."""
    return OPERATORS.get(("", op_type), _UNKNOWN)


def remedy_for_node(node: ir.Node) -> str | None:
    """Return the advice to users about a node that has no gradient, None if there is no advice.

    The advice of a domain is also the advice of its subdomains.
    """
    of_operator = operator_of(node).remedy
    found = None if of_operator is None else of_operator(node)
    of_domains = (f(node) for name, f in DOMAIN_REMEDIES.items() if node.domain.startswith(name))
    return found or next(of_domains, None)


def numbers_of_finite_slopes(node: ir.Node) -> OperandNumbers:
    """Return pairs of the index of an operand and a number at which value and slope of a node are
    finite: see `Operator.finite_at`.
    """
    pairs = operator_of(node).finite_at
    return pairs(node) if callable(pairs) else pairs


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that computes `value`, if it is a standard node of one of `op_types`, else
    None.
    """
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in op_types and not node.domain else None


def add_facts(domain: str, name: str, **fields: Any) -> None:
    """Set fields of the `Operator` record of an operator."""
    known = vars(OPERATORS.get((domain, name), _UNKNOWN))
    OPERATORS[domain, name] = Operator(**{**known, **fields})


def declare_operators(names: str, traits: str = "", domain: str = "", **fields: Any) -> None:
    """Set fields of the `Operator` records of several operators; spaces separate names and traits.

    The operators keep the traits of earlier declarations.

    Examples:
        >>> declare_operators("Tide Ebb", "unary cheap", domain="doc.example")
        >>> sorted(OPERATORS["doc.example", "Ebb"].traits)
        ['cheap', 'unary']
    """
    for name in names.split():
        known = OPERATORS.get((domain, name), _UNKNOWN).traits
        add_facts(domain, name, traits=known.union(traits.split()), **fields)


def names_with_trait(trait: str) -> frozenset[str]:
    """Return the names of the operators that have a trait."""
    return frozenset(name for (_, name), operator in OPERATORS.items() if trait in operator.traits)


# -- rules and lowerings of the package ----------------------------------------------------------

Rule: TypeAlias = Callable[..., Any]  # (op, node, *gradients of the outputs) -> one per input

Lowering: TypeAlias = Callable[..., Any]  # (op, node) -> one value per output, or None


@dataclass(frozen=True)
class Unsupported:
    """A rule returns this in place of a gradient that it cannot compute.

    If that gradient is needed, `NoGradientRule` is raised; otherwise nothing happens.

    Attributes:
        reason: why, and what to do instead; it becomes part of the error message.

    Examples:
        A rule that covers one of two modes:

        >>> from onnxgrad import rule
        >>> from onnxgrad.graph import Unsupported
        >>> @rule("Wave", domain="doc.example")
        ... def wave(op, node, g):
        ...     # y = sin x:  dx = g cos x
        ...     if node.attributes.get_string("kind", "sine") != "sine":
        ...         return (Unsupported("only kind='sine' has a gradient"),)
        ...     return (g * op.Cos(node.inputs[0]),)
    """

    reason: str


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of operators; users call `onnxgrad.rule`."""
    return recording_decorator(add_facts, op_types, domain, "rule")


def subgraph_rule(op_type: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of an operator with subgraphs."""
    return recording_decorator(add_facts, [op_type], "", "subgraph_rule")


def lowering(
    *op_types: str, domain: str = "", on_demand: bool = False
) -> Callable[[Lowering], Lowering]:
    """Register the decorated function as a lowering; users call `onnxgrad.lowering`."""
    return recording_decorator(add_facts, op_types, domain, "lowering", on_demand=on_demand)


def member_form(*op_types: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the writer of one node for all members of a
    `TrainerStack`: see `member_forms`.
    """
    return recording_decorator(add_facts, op_types, "", "members")


def recording_decorator(
    record: Callable[..., None], op_types: Iterable[str], domain: str, field: str, **others: Any
) -> Callable[[Rule], Rule]:
    """Return the decorator that sets a function as the field `field` of operators' records."""

    def register(function: Rule) -> Rule:
        for name in op_types:
            record(domain, name, **{field: function}, **others)
        return function

    return register


def elementwise(
    along: Callable[..., ir.Value] = lambda op, node, v: v, **slopes: Callable[..., Any]
) -> None:
    """Register rules of y = f(x) by their slopes f'(x): `Tanh=lambda op, x, y: 1 - y * y`.

    `along(op, node, v)` returns y or its cotangent in a shape that broadcasts to the shape of x.
    """
    for name, slope in slopes.items():
        rule(name)(_gradient_rule_from_slope(slope, along))


def _gradient_rule_from_slope(slope: Callable[..., Any], along: Callable[..., ir.Value]) -> Rule:
    def multiply_by_slope(op: Any, node: Any, g: ir.Value) -> Any:
        """y = f(x):  dx = g f'(x)."""
        y = along(op, node, node.outputs[0])
        return (along(op, node, g) * slope(op, node.inputs[0], y),)

    return multiply_by_slope


@cache
def cotangent_limit(function: Rule) -> int:
    """Return how many cotangents a rule accepts, one for each of the first outputs."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 1 << 30
    return len(parameters)
