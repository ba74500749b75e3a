"""Dropout: which nodes of the file are active, where dropout is inserted, and how it is written.

onnxruntime's Dropout keeps the state of its generator, which neither a resumed run nor a second
session continues. Here an element of a mask depends on the seed, the number of the draw, the index
of the dropout and the position of the element only, through SplitMix64 (Steele, Lea & Flood 2014,
"Fast splittable pseudorandom number generators", figure 17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from math import prod

import numpy as np
import onnx_ir as ir

from onnxgrad.errors import argument, unknown
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import remove_node, replace_value
from onnxgrad.graph.traversal import subgraphs
from onnxgrad.operators import OPERATORS, marks
from onnxgrad.operators.shapes import constant, dims, is_real, static
from onnxgrad.reporting import logger

# operators whose second output is no data, but a mask or a statistic
_SECOND_IS_NO_DATA = ("Dropout", "BatchNormalization")


@dataclass
class DropoutSite:
    """A Dropout node of the file, or an output after which dropout is to be inserted."""

    node: ir.Node
    value: ir.Value
    ratio: float

    @property
    def is_file_node(self) -> bool:
        """Whether the site is a Dropout node of the file."""
        return _is_dropout(self.node)


def dropout_sites(
    graph: ir.Graph, dropout: Mapping[str, float], in_inference: bool = False
) -> list[DropoutSite]:
    """Return the Dropout nodes of a graph, and the outputs that `dropout` matches, in graph order.

    `dropout` is `{pattern: probability}`. The ratio of a node in inference mode is 0, or with
    `in_inference` the ratio that the node states.
    """
    nodes = list(walk_with_outer_nodes(graph))
    ratios = _ratios_by_value([node for node, _ in nodes], dropout)
    chosen = []
    for node, around in nodes:
        for value in _droppable_outputs(node):
            if value in ratios or _is_dropout(node):
                ratio = ratios.get(value)
                if ratio is None:
                    ratio = _dropout_ratio_in_file(node, in_inference)
                repeated = [outer for outer in around if outer.op_type in ("Loop", "Scan")]
                if ratio and repeated:
                    raise ValueError(
                        f"dropout at {describe_node(node)} in the body of "
                        f"{describe_node(repeated[-1])} has one mask for all iterations: switch it "
                        f"off by {argument('dropout', {str(value.name): 0})}"
                    )
                chosen.append(DropoutSite(node, value, ratio))
    return chosen


def write_dropouts(
    op: Emit, chosen: Iterable[DropoutSite], draw: ir.Value | None, seed: int
) -> None:
    """Replace active Dropout nodes, remove inactive nodes, and insert dropout at other sites."""
    chosen = list(chosen)
    active = [site for site in chosen if site.ratio]
    masks = None
    if active:
        if draw is None:
            raise ValueError(
                f"dropout at {describe_node(active[0].node)} needs draw=: pass a scalar that "
                "differs from step to step"
            )
        masks = Masks(op, seed, draw, len(active), next(iter(op.graph), None))
    graphs = {site.node.graph for site in chosen}
    following = dict(chain.from_iterable(pairwise(graph or ()) for graph in graphs))
    index = 0
    for site in chosen:
        inner = emitter_inside(op, site.node.graph)
        if not site.ratio or masks is None:
            if site.is_file_node:
                _remove_dropout(inner, site.node)
            continue
        logger.info("dropout %g at %s", site.ratio, describe_node(site.node))
        with inner.at(site.node if site.is_file_node else following.get(site.node)):
            x = site.node.inputs[0] if site.is_file_node else site.value
            assert x is not None
            uses = list(x.uses())  # without the nodes for the mask, which read the shape of x
            keep, scale = masks.write_mask(inner, index, x, site.ratio)
            factor = inner.Cast(keep, to=x.dtype) * scale
            y = inner.set_type_like(inner.emit("Mul", [x, factor], {}, fresh=True), x)
            if _has_user_dropout_rule():
                settings = inner.const(np.float32(site.ratio)), inner.const(np.True_)
                node = y.producer()
                assert node is not None
                node.name = site.node.name if site.is_file_node else None
                node.meta[marks.RULED_AS] = partial(_AsDropout, settings)
            if site.is_file_node:
                replace_node(inner, site.node, [y, keep])
            else:
                _redirect_uses(inner, x, y, uses)
        index += 1


def _has_user_dropout_rule() -> bool:
    """Return whether a user's rule gives the gradient of Dropout."""
    return OPERATORS["", "Dropout"].of_user


class _AsDropout:
    """A view of the product x * mask as a Dropout node, for a user's rule of Dropout."""

    domain, op_type = "", "Dropout"

    def __init__(self, settings: tuple[ir.Value, ir.Value], product: ir.Node) -> None:
        x, factor = product.inputs
        self.name, self.graph, self.attributes = product.name, product.graph, product.attributes
        self.inputs = x, *settings
        self.outputs = product.outputs[0], _first_operand(_first_operand(factor))


def _first_operand(value: ir.Value | None) -> ir.Value:
    """Return the first operand of the node that computes `value`."""
    node = None if value is None else value.producer()
    x = None if node is None else node.inputs[0]
    assert x is not None
    return x


def _is_dropout(node: ir.Node | None) -> bool:
    """Return whether `node` is a Dropout of ONNX."""
    return node is not None and not node.domain and node.op_type == "Dropout"


def _droppable_outputs(node: ir.Node) -> Sequence[ir.Value]:
    """Return the outputs of `node` after which dropout can be inserted.

    A mask and a running statistic are left out.
    """
    return node.outputs[:1] if node.op_type in _SECOND_IS_NO_DATA else node.outputs


def _redirect_uses(op: Emit, x: ir.Value, y: ir.Value, uses: Iterable) -> None:
    """Let the reads `uses` of `x`, and a graph output that is `x`, read `y`, the result of dropout.

    A graph output keeps its name.
    """
    for user, i in uses:
        user.replace_input_with(i, y)
    if x.is_graph_output():
        op.graph.outputs[:] = [y if output is x else output for output in op.graph.outputs]
        y.name, x.name = x.name, op.name(f"{x.name}.before_dropout")


def _remove_dropout(op: Emit, node: ir.Node) -> None:
    """Remove a Dropout; if a user's rule gives its gradient, remove only the optional inputs."""
    x = node.inputs[0]
    assert x is not None
    if _has_user_dropout_rule():
        node.resize_inputs(1)
        return
    with op.at(node):
        results = [x]
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            results.append(op.Expand(np.True_, op.shape_of(x)))
        replace_node(op, node, results)


# -- settings ------------------------------------------------------------------------------------


def _dropout_ratio_in_file(node: ir.Node, in_inference: bool) -> float:
    """Return the probability of a Dropout node in the file.

    It is 0 for a node in inference mode, unless `in_inference` asks for the ratio of such a node.
    """
    ratio, training = (*node.inputs, None, None)[1:3]
    mode, number = constant(training), constant(ratio)
    active = in_inference or (mode is not None and mode.all())
    computed = "training_mode" if not active and training is not None and mode is None else ""
    if computed or (active and ratio is not None and number is None):
        raise ValueError(
            f"the {computed or 'ratio'} of {describe_node(node)} is no constant: set the "
            f"probability by {argument('dropout', {str(node.outputs[0].name): 0.1})}"
        )
    if not active:
        return 0.0
    probability = 0.5 if number is None else float(number.item())
    _require_probability(str(node.name), probability)
    return probability


def _require_probability(name: str, ratio: float) -> None:
    """Raise `ValueError` if the dropout called `name` has a `ratio` outside of [0, 1)."""
    if not 0 <= ratio < 1:
        raise ValueError(f"dropout of {name!r} is {ratio}: give a probability in [0, 1)")


def _ratios_by_value(nodes: list[ir.Node], dropout: Mapping[str, float]) -> dict[ir.Value, float]:
    """Return the ratio of each value that a pattern of `dropout` matches."""
    ratios: dict[ir.Value, float] = {}
    for pattern, ratio in dropout.items():
        _require_probability(pattern, ratio)
        values = values_by_pattern(nodes, pattern, argument("dropout"))
        own = [v for v in values if _is_dropout(v.producer())]
        ratios |= dict.fromkeys(own or values, float(ratio))
    return ratios


def values_by_pattern(nodes: list[ir.Node], pattern: str, given: str) -> list[ir.Value]:
    """Return the float outputs whose name, or whose node's name, is `pattern`, or else matches it.

    Raises:
        ValueError: there is none; `given` is the argument that has the pattern, for the message.
    """
    values = _matched_values(nodes, pattern.__eq__) or _matched_values(
        nodes, partial(fnmatchcase, pat=pattern)
    )
    if not values:
        floats = [v for node in nodes for v in node.outputs if is_real(v)]
        names = [str(v.name) for v in floats] + [node.name for node in nodes if node.name]
        raise unknown(f"node or output ({given})", pattern, dict.fromkeys(names))
    return values


def _matched_values(nodes: list[ir.Node], matches: Callable[[str], bool]) -> list[ir.Value]:
    """Return the float outputs whose name, or whose node's name, `matches` accepts."""
    values: list[ir.Value] = []
    for node in nodes:
        whole = bool(node.name) and matches(str(node.name))
        named = [y for y in node.outputs if y.name and matches(y.name)]
        if _is_dropout(node):
            values += node.outputs[:1] if whole or named else []
        else:
            named = [y for y in named if y in _droppable_outputs(node)]
            values += filter(is_real, node.outputs[:1] if whole and not named else named)
    return values


# -- masks: random numbers as a function of a counter ----------------------------------------------

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shift, factor
_LAST_SHIFT = 31
_LEVELS = 1 << 16  # each 64-bit number serves four elements
_OFFSETS = ((16, "LEFT"), (0, "RIGHT"), (16, "RIGHT"), (32, "RIGHT"))


class Masks:
    """Streams of random masks for the dropouts of one model.

    Args:
        op: writes into the main graph.
        seed: any integer.
        draw: the number of the draw, one float or integer.
        count: the count of dropouts, each of which has a stream.
        head: the node before which the keys of the streams are computed; None: at the end.
    """

    def __init__(self, op: Emit, seed: int, draw: ir.Value, count: int, head: ir.Node | None):
        start = int(_splitmix64_with_numpy(np.array([seed % (1 << 64)], np.uint64))[0])
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        streams = _splitmix64_with_numpy(np.uint64(start) + steps)
        with op.at(head):
            number = op.Cast(op.Reshape(draw, [1]), to=ir.DataType.INT64)
            counters = number * _as_int64(_GAMMA) + streams.view(np.int64)
            self._keys = op.Cast(_write_splitmix64(op, counters), to=ir.DataType.INT64)

    def write_mask(self, op: Emit, index: int, x: ir.Value, ratio: float) -> tuple[ir.Value, float]:
        """Return a random mask, booleans of the shape of `x`, and the factor of kept elements.

        An element is False with the probability `ratio`, rounded to a multiple of 2**-16; the
        factor is the inverse of the exact probability of True. `index` is the index of the dropout.
        """
        dropped = min(max(round(ratio * _LEVELS), 1), _LEVELS - 1)
        lengths = static(dims(x))
        size = op.Size(x) if lengths is None else prod(lengths)
        count: ir.Value | np.int64
        count = np.int64(-(-size // 4)) if isinstance(size, int) else (size + 3) / 4
        counters = op.Range(np.int64(0), count, np.int64(1)) * _as_int64(_GAMMA)
        words = _write_splitmix64(op, counters + op.Gather(self._keys, [index]))
        shifted = [_shift_bits(op, words, by, direction) for by, direction in _OFFSETS]
        parts = [op.Cast(word, to=ir.DataType.INT32) for word in shifted]
        threshold = np.int32((dropped << 16) - (1 << 31))  # the upper half of a word decides
        keep = op.GreaterOrEqual(op.Concat(*parts, axis=0), threshold)
        shape = dims(x)
        if shape is None or prod(d for d in shape if isinstance(d, int)) % 4:
            end = [size] if isinstance(size, int) else op.Reshape(size, [1])
            keep = op.Slice(keep, [0], end)
        keep = op.Reshape(keep, op.shape_of(x), allowzero=1)
        keep.shape, keep.dtype = x.shape, ir.DataType.BOOL
        return keep, _LEVELS / (_LEVELS - dropped)


def _as_int64(number: int) -> np.int64:
    """Return the int64 with the bits of a 64-bit number; products mod 2**64 have equal bits."""
    return np.uint64(number).astype(np.int64)


def _shift_bits(op: Emit, words: ir.Value, by: int, direction: str) -> ir.Value:
    """Return uint64 `words` with their bits shifted "LEFT" or "RIGHT" by a number of bits."""
    return op.BitShift(words, np.uint64(by), direction=direction) if by else words


def _write_splitmix64(op: Emit, z: ir.Value) -> ir.Value:
    """Return SplitMix64's output, uint64, for the int64 counters `z`, as nodes of the graph.

    onnxruntime shifts unsigned integers only, and its versions from 1.16 to 1.21, for which there
    are artifacts, multiply signed integers only.
    """
    for shift, factor in _ROUNDS:
        z = op.Cast(_write_xor_with_shifted(op, z, shift), to=ir.DataType.INT64) * _as_int64(factor)
    return _write_xor_with_shifted(op, z, _LAST_SHIFT)


def _write_xor_with_shifted(op: Emit, z: ir.Value, shift: int) -> ir.Value:
    """Return the uint64 value `z ^ (z >> shift)` for the bits of `z`."""
    bits = op.Cast(z, to=ir.DataType.UINT64)
    return op.BitwiseXor(bits, _shift_bits(op, bits, shift, "RIGHT"))


def _splitmix64_with_numpy(z: np.ndarray) -> np.ndarray:
    """Return SplitMix64's output for the uint64 counters `z`, computed with numpy."""
    for shift, factor in _ROUNDS:
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    return z ^ (z >> np.uint64(_LAST_SHIFT))


def walk_with_outer_nodes(
    graph: ir.Graph, around: tuple[ir.Node, ...] = ()
) -> Iterator[tuple[ir.Node, tuple[ir.Node, ...]]]:
    """Yield (node, the nodes whose subgraphs contain it, outermost first) for all nodes of `graph`.

    Nodes of subgraphs are yielded, too. The graph may be modified at nodes that were yielded.
    """
    for node in list(graph):
        yield node, around
        for subgraph in subgraphs(node):
            yield from walk_with_outer_nodes(subgraph, (*around, node))


def describe_node(node: ir.Node) -> str:
    """Return the operator, name and first output of `node`, for messages."""
    return f"{node.op_type} {node.name!r} (output {node.outputs[0].name!r})"


def emitter_inside(op: Emit, graph: ir.Graph | ir.Function | None) -> Emit:
    """Return the emitter for `graph`, which is the main graph of `op` or a subgraph of it."""
    assert isinstance(graph, ir.Graph)
    return op if graph is op.graph else op.inside(graph)


def replace_node(op: Emit, node: ir.Node, results: Sequence[ir.Value]) -> None:
    """Replace the outputs of `node` by `results`, under the same names, and remove `node`."""
    for old, new in zip(node.outputs, results, strict=False):
        replace_value(op, old, new, keep=() if new in node.inputs else (old.name,))
    remove_node(node)
