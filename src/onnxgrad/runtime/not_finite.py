"""Find the node of a model that first computes NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from onnx import ModelProto, NodeProto

from onnxgrad.errors import escaping, printable
from onnxgrad.model.external import tensor_to_array
from onnxgrad.model.read import read
from onnxgrad.model.rewrites import densify_subgraphs
from onnxgrad.runtime.device import CPU
from onnxgrad.runtime.node_runs import NodeRuns, node_title
from onnxgrad.runtime.session import session

_ALL_CORES = 1e8  # multiply-adds, so that a session takes a thread for each core
_CONSTANT = ("Constant", "ConstantOfShape")  # operators that may write infinity into a mask
FINITE, INFINITE, NAN = "finite", "infinity", "NaN"


@escaping()
def first_not_finite(
    model: ModelProto, feed: Mapping[str, np.ndarray], rows: Sequence[int] = (), of: str = ""
) -> str | None:
    """Return a text that names the node which computes NaN or infinity from finite inputs; None if
    no output has them.

    Only nodes are considered on which an output that is not finite depends through values that are
    not finite, either: the infinities of a mask in front of a Softmax are no fault. In the branch
    that an If takes, the first such node is named, too; in the body of a Loop or Scan, none is.

    The model runs once, in pieces, on the CPU. Values are kept while later pieces read them.

    Args:
        model: model; never modified.
        feed: its inputs.
        rows: the number of each row of `feed`, so that the rows at fault are named.
        of: the text behind the list of rows, such as " of batch 3".

    Returns:
        A clause such as "Exp (node 'grow', output 'h') gives infinity; its input 'x' is between 1
        and 100"; None if all outputs are finite. The clause names an input or a constant of the
        model instead of a node if the input or constant is not finite.
    """
    search = _NotFiniteSearch(densify_subgraphs(read(model)), feed, rows, of)
    search.run()
    return search.fault_message()


class _NotFiniteSearch:
    """Runs a model in pieces to record the range of each value and find NaN or infinity."""

    def __init__(
        self, model: ModelProto, feed: Mapping[str, np.ndarray], rows: Sequence[int], of: str
    ) -> None:
        self.model, self.feed, self.numbers, self.of = model, feed, np.asarray(rows), of
        self.runs = NodeRuns(model, feed, partial(session, device=CPU, work=_ALL_CORES))
        self.nodes, self.reads = self.runs.nodes, self.runs.reads
        self.initializers = self.runs.initializers
        self.producers = {y: i for i, node in enumerate(self.nodes) for y in node.output if y}
        self.ranges: dict[str, tuple[float, float]] = {}  # least and greatest element, of floats
        self.rows: dict[str, np.ndarray] = {}  # indices of rows that are not finite, by value
        self.branches: dict[int, str] = {}  # clauses on the branch of an If, by index of the node

    # -- running --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the model, and record the range of every value."""
        for name in self.feed.keys() & {x.name for x in self.model.graph.input}:
            self._record_range(name, np.asarray(self.feed[name]))
        for piece in self.runs.run_pieces():
            for i in piece:
                for name in filter(None, self.nodes[i].output):
                    value = self.runs.values[name]
                    # numpy has no bfloat16
                    if value.is_tensor() and value.data_type() != "tensor(bfloat16)":
                        self._record_range(name, value.numpy())
            for i in self.runs.with_subgraphs.intersection(piece):
                starts_here = not self._any_not_finite(self.reads[i])
                if starts_here and self._any_not_finite(self.nodes[i].output):
                    self.branches[i] = self._fault_in_branch(self.nodes[i])

    def _fault_in_branch(self, node: NodeProto) -> str:
        """Return a text on the node at fault in the taken branch of an If; "" otherwise."""
        if node.op_type != "If":
            return ""
        try:
            name = node.input[0]
            fed = self.runs.values.get(name)
            condition = tensor_to_array(self.initializers[name]) if fed is None else fed.numpy()
            taken = "then_branch" if condition.item() else "else_branch"
            branch = next(a.g for a in node.attribute if a.name == taken)
            model = self.runs.model_of_nodes(branch.node, [y.name for y in branch.output])
            model.graph.initializer.extend(branch.initializer)
            feed = {x.name: self.runs.values[x.name].numpy() for x in model.graph.input}
            search = _NotFiniteSearch(model, feed, (), "")
            search.run()
            return search.fault_message() or ""
        except Exception:  # without a clause, the message names the If only
            return ""

    def _record_range(self, name: str, value: np.ndarray) -> None:
        """Record the least and greatest element of a tensor of floats; NaN if it has NaN."""
        if value.dtype.kind in "biuSUO":
            return
        x = value.astype(np.float64, copy=False) if value.dtype.kind != "f" else value
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        self.ranges[name] = low, high
        if not np.isfinite([low, high]).all() and len(self.numbers):
            axes = [i for i, length in enumerate(x.shape) if length == len(self.numbers)]
            if axes:  # the first axis, if several are as long
                bad = np.moveaxis(~np.isfinite(x), axes[0], 0).reshape(len(self.numbers), -1)
                self.rows[name] = self.numbers[bad.any(axis=1)]

    def _finiteness_of_value(self, name: str) -> str | None:
        """Return FINITE, INFINITE or NAN for a tensor of floats; None for any other value."""
        if name not in self.ranges and name in self.initializers:
            self._record_range(name, tensor_to_array(self.initializers[name]))
        ends = self.ranges.get(name)
        if ends is None:
            return None
        return NAN if np.isnan(ends).any() else INFINITE if np.isinf(ends).any() else FINITE

    def _any_not_finite(self, names: Iterable[str]) -> bool:
        """Return whether a tensor of floats among the values `names` is not finite."""
        return any(self._finiteness_of_value(name) in (INFINITE, NAN) for name in names)

    # -- from the outputs back to the node at fault ---------------------------------------------

    def fault_message(self) -> str | None:
        """Return the text that names the node or input at fault, or None; call `run` before."""
        outputs = [y.name for y in self.model.graph.output]
        bad = [y for y in outputs if self._finiteness_of_value(y) in (INFINITE, NAN)]
        bad = [y for y in bad if self._finiteness_of_value(y) == NAN] or bad
        if not bad:
            return None
        sources, created = self._trace_not_finite_sources(bad)
        constants = sorted(
            (v for v in sources if self._is_input_or_constant(v)),
            key=lambda v: (self._finiteness_of_value(v) != NAN, v not in self.feed),
        )
        if constants and self._finiteness_of_value(constants[0]) == NAN:
            return self._fault_message_of_constant(constants[0], None)
        computed = [v for v in sources if not self._is_input_or_constant(v)]
        if computed:
            return self._fault_message_of_node(min(computed, key=lambda v: self.producers[v]), bad)
        return self._fault_message_of_constant(constants[0], min(created, default=None))

    def _is_input_or_constant(self, name: str) -> bool:
        """Return whether a value is an input, an initializer or the output of a Constant."""
        i = self.producers.get(name)
        return i is None or (self.nodes[i].op_type in _CONSTANT and not self.nodes[i].domain)

    def _trace_not_finite_sources(self, bad: Sequence[str]) -> tuple[set[str], set[int]]:
        """Return the values from which NaN or infinity spreads to `bad`, and the indices of nodes
        that create NaN.

        NaN is followed to NaN, or if no operand is NaN to infinity. The second set has the indices
        of the nodes that compute NaN from other numbers.
        """
        sources, created = set[str](), set[int]()
        seen, stack = set(bad), list(bad)
        while stack:
            v = stack.pop()
            i = self.producers.get(v)
            read = [] if i is None else self._tensors_read_by(i)
            causes = [x for x in read if self._finiteness_of_value(x) == NAN]
            if not causes:
                if i is not None and self._finiteness_of_value(v) == NAN:
                    created.add(i)
                causes = [x for x in read if self._finiteness_of_value(x) == INFINITE]
            if not causes:
                sources.add(v)
            stack += [x for x in causes if x not in seen]
            seen.update(causes)
        return sources, created

    def _tensors_read_by(self, node: int) -> list[str]:
        """Return the names of tensors that a node reads, directly or as elements of sequences."""
        values: dict[str, None] = {}
        stack, seen = [node], {node}
        while stack:
            for name in self.reads[stack.pop()]:
                producer = self.producers.get(name)
                if producer is None or self._finiteness_of_value(name) is not None:
                    values[name] = None
                elif producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
        return list(values)

    # -- messages -------------------------------------------------------------------------------

    def _fault_message_of_node(self, name: str, outputs: Sequence[str]) -> str:
        """Return the message on the node that computes the value `name`."""
        i = self.producers[name]
        text = f"{node_title(self.nodes[i], name)} gives {self._finiteness_of_value(name)}"
        if rows := next((self.rows[v].tolist() for v in (name, *outputs) if v in self.rows), None):
            listed = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
            text += f" in row{'s' * (len(rows) > 1)} {listed}{self.of}"
        if branch := self.branches.get(i):
            return f"{text}; in the branch that it takes, {branch}"
        for x in self.reads[i]:
            if self._finiteness_of_value(x) is not None:
                low, high = self.ranges[x]
                text += f"; its input {printable(x)!r} is between {low:g} and {high:g}"
        return text

    def _fault_message_of_constant(self, name: str, node: int | None) -> str:
        """Return the text on an input or constant that is not finite, and the `node` that computes
        NaN from it.
        """
        kind = "input" if name in self.feed else "constant"
        text = f"the {kind} {printable(name)!r} holds {self._finiteness_of_value(name)}"
        if name in self.feed and np.ndim(self.feed[name]):
            finite = np.isfinite(np.asarray(self.feed[name]).astype(np.float64))
            text += f", first at {np.argwhere(~finite)[0].tolist()}"
        if node is None:
            return text
        return f"{text}, from which {node_title(self.nodes[node])} computes NaN"
