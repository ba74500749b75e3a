"""The step of a stack: the axis of members is pushed through the step of one model.

The members are the copies of a model that a stack trains. They may have optimizers of one kind,
whose updates have the same nodes and differ in constants only, such as rates of decay. These
constants get the axis of members, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrad.autodiff.members import MemberAxis
from onnxgrad.graph.emit import Emit
from onnxgrad.graph.tidy import take_apart_after
from onnxgrad.graph.traversal import attribute_key
from onnxgrad.graph.walk import Walk
from onnxgrad.operators.shapes import constant, dims, static
from onnxgrad.optimizers.averages import OptimizerWrapper
from onnxgrad.optimizers.base import Chain, Optimizer, Slots, UpdateInputs
from onnxgrad.optimizers.scaling import AddDecayedWeights
from onnxgrad.training.objective import Objective
from onnxgrad.training.step.inputs import FEEDS, feed_inputs, feed_of
from onnxgrad.training.step.update import Update, update_groups
from onnxgrad.training.step.weight_groups import WeightGroup, graph_input, write_groups

_DOUBLE = ir.DataType.DOUBLE
ConstantsByOperand = dict[tuple[int, int], np.ndarray]  # by the indices of the node and operand


@dataclass
class GroupOfMembers(WeightGroup):
    """A `WeightGroup` of a stack of models, whose arrays have the axis of models first.

    `optimizers` are the optimizers of the members.
    """

    optimizers: Sequence[Optimizer]

    def initial(
        self,
        weights: Mapping[str, np.ndarray],
        slots: Mapping[str, Mapping[str, np.ndarray]],
        copies: bool = True,
    ) -> list[np.ndarray]:
        """Return the initial arrays of the inputs, always copies: see `WeightGroup.initial`."""
        members = []
        for k, optimizer in enumerate(self.optimizers):
            own = optimizer.for_weight(*next(iter(self.shapes.items())))
            group = WeightGroup(self.shapes, self.state, self.slots, own, self.in_blocks)
            known = {
                name: {s: a[k] for s, a in slots.get(name, {}).items() if s in own.slots}
                for name in self.shapes
            }
            members.append(group.initial({name: weights[name][k] for name in self.shapes}, known))
        return [np.stack(arrays) for arrays in zip(*members, strict=True)]

    def split(
        self, arrays: Iterable[np.ndarray], copies: bool = True
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return the weights, and the slots by weight, see `WeightGroup.split`; always copies."""
        members = [WeightGroup.split(self, own, False) for own in zip(*arrays, strict=True)]
        weights = {name: np.stack([own[name] for own, _ in members]) for name in self.shapes}
        slots = {
            name: {slot: np.stack([own[name][slot] for _, own in members]) for slot in self.slots}
            for name in self.shapes
        }
        return weights, slots


@dataclass
class Members:
    """The models that a stack trains together, called members, with their optimizers.

    Attributes:
        optimizers: the optimizer of each member.
        weights: the weights (members, ...), by name. A step reads weights without a gradient from
            here.
        constants: values of the update that stand for constants which differ between members, and
            the constants (members, ...).
    """

    optimizers: Sequence[Optimizer]
    weights: Mapping[str, np.ndarray]
    constants: dict[ir.Value, np.ndarray] = field(default_factory=dict)

    def write_update(
        self, op: Emit, gradients: dict[ir.Value, ir.Value], packed: int | None = None
    ) -> Update:
        """Write the update of one member, with new inputs for the constants that differ by member.

        See `write_update` for the arguments.

        Raises:
            ValueError: optimizers of different kinds.
        """
        same = all(optimizer == self.optimizers[0] for optimizer in self.optimizers)
        every = self.optimizers if same else _optimizers_with_equal_nodes(self.optimizers)
        plain, own = write_groups(op, gradients, every[0], packed, block_bytes=0)
        groups: list[WeightGroup] = [
            GroupOfMembers(**vars(group), optimizers=self.optimizers) for group in plain
        ]
        sketch, differing = _UpdateSketch(op, groups, own, every[0]), list[ConstantsByOperand]()
        for k, optimizer in enumerate(every):
            if (known := every.index(optimizer)) < k:  # optimizers are compared, not hashed
                differing.append(differing[known])
                continue
            optimizer.check_names([str(w.name) for w in gradients])
            alike = _replace_optimizer(groups, optimizer)
            other = None if alike is None else _UpdateSketch(op, alike, own, optimizer)
            differences = None if other is None else sketch.constant_differences(other)
            if differences is None:
                raise ValueError(
                    f"the members 0 and {k} of a stack have optimizers of different kinds, "
                    f"{self.optimizers[0]} and {self.optimizers[k]}: train a TrainerStack for each "
                    "kind. The optimizers of a stack may differ in numbers, unless a number leaves "
                    "out a part of the update, as momentum=0 does"
                )
            differing.append(differences)
        return sketch.write(op, self._values_for_constants(op, sketch, differing))

    def _values_for_constants(
        self, op: Emit, sketch: _UpdateSketch, differing: list[ConstantsByOperand]
    ) -> dict[tuple[int, int], ir.Value]:
        """Return `{(node index, operand index): value}` for the constants that differ by member.

        `differing` has the constants of each member that differ from the first member's.
        """
        values: dict[tuple[int, int], ir.Value] = {}
        known: dict[bytes, ir.Value] = {}
        for i, j in dict.fromkeys(key for own in differing for key in own):
            operand = sketch.nodes[i].inputs[j]
            first = constant(operand)
            assert operand is not None
            assert first is not None
            array = np.stack([own.get((i, j), first) for own in differing])
            key = array.dtype.str.encode() + array.tobytes()
            if key not in known:
                known[key] = graph_input(op, "of_member", operand)
                self.constants[known[key]] = array
            values[i, j] = known[key]
        return values

    def push_member_axis(self, op: Emit, carried: Sequence[ir.Value]) -> None:
        """Rewrite the graph of a step so that weights, slots and buffers have an axis of members.

        The weights, slots and buffers are the inputs `carried`. Learning rates get the axis, too;
        data have no axis of members.

        Raises:
            ValueError: a node that cannot be written for all members.
        """
        graph, axis = op.graph, MemberAxis(op, len(self.optimizers), {})
        Walk(graph).infer(graph)  # a node with operands of unknown rank is written for each member
        fed = feed_inputs(graph).values()
        own = {v: feed for v in fed if (feed := feed_of(v)) and feed.of_members}
        for v in (*carried, *own):
            axis.set_stacked(v, axis.set_member_type(ir.Value(name=v.name), v))
        for v, feed in own.items():
            feed.mark_input(axis.value_for(v))
        for v, array in self.constants.items():
            axis.set_stacked(v, op.const(array))
        for name in [name for name in graph.initializers if name in self.weights]:
            axis.set_stacked(graph.initializers[name], op.const(self.weights[name]))
        graph.inputs[:] = axis.values_for(graph.inputs)
        count, outputs = len(carried), list(graph.outputs)
        axis.push(graph)
        op.give([*map(axis.expanded_value, outputs[:count]), *axis.values_for(outputs[count:])])


@dataclass(frozen=True)
class _ExplicitWeightDecay(AddDecayedWeights):
    """Weight decay that writes the same nodes for all decays, also for a decay of 0 or 1."""

    elementwise = True

    def update(self, op: Any, u: Any, slots: Slots, inputs: UpdateInputs) -> tuple[ir.Value, Slots]:
        """Return the step `u` plus the decay times the weight; there are no slots."""
        return u + op.emit("Mul", [self.decay, inputs.weight], {}, fresh=True), {}


def _with_explicit_weight_decays(optimizer: Optimizer) -> Optimizer:
    """Return an equal optimizer whose update has the same nodes for any weight decay."""
    if isinstance(optimizer, Chain):
        return replace(optimizer, parts=tuple(map(_with_explicit_weight_decays, optimizer.parts)))
    if isinstance(optimizer, OptimizerWrapper):
        return replace(optimizer, optimizer=_with_explicit_weight_decays(optimizer.optimizer))
    if isinstance(optimizer, AddDecayedWeights):
        return _ExplicitWeightDecay(optimizer.decay, optimizer.exclude)
    return optimizer


def _chain_parts(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the parts of a chain of transforms; (optimizer,) for an optimizer that is no chain."""
    return optimizer.parts if isinstance(optimizer, Chain) else (optimizer,)


def _match_zero_weight_decays(optimizer: Optimizer, other: Optimizer) -> Optimizer:
    """Return `optimizer` with zero weight decays added where the chain `other` has decays."""
    if isinstance(optimizer, OptimizerWrapper) and isinstance(other, OptimizerWrapper):
        inner = _match_zero_weight_decays(optimizer.optimizer, other.optimizer)
        return replace(optimizer, optimizer=inner)
    parts, wanted = _chain_parts(optimizer), _chain_parts(other)
    if optimizer is other or len(wanted) - len(parts) not in (0, 1):
        return optimizer
    if len(wanted) > len(parts):
        added = (i for i, part in enumerate(wanted) if isinstance(part, AddDecayedWeights))
        i = next(added, len(parts))
        parts = (*parts[:i], _ExplicitWeightDecay(0.0), *parts[i:])
    if len(parts) == 1:
        return optimizer
    return Chain(tuple(map(_match_zero_weight_decays, parts, wanted)))


def _optimizers_with_equal_nodes(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return equal optimizers whose updates have the same nodes, though weight decays differ."""
    written = [*map(_with_explicit_weight_decays, optimizers)]
    for other in written:
        written = [_match_zero_weight_decays(optimizer, other) for optimizer in written]
    return written


class _UpdateSketch:
    """The update of groups by one optimizer in a separate graph, to be compared between members."""

    def __init__(
        self, op: Emit, groups: list[WeightGroup], gradients: list[ir.Value], optimizer: Optimizer
    ) -> None:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": op.opset}, name="update")
        take_apart_after(self, graph)
        inner = Emit(graph)
        copies = [
            replace(
                group,
                state=graph_input(inner, "state", group.state),
                slots={slot: graph_input(inner, slot, v) for slot, v in group.slots.items()},
            )
            for group in groups
        ]
        own = [graph_input(inner, "gradient", g) for g in gradients]
        update = update_groups(inner, copies, own, optimizer)
        self.groups, self.gradients, self.update = groups, gradients, update
        self.nodes = list(graph)
        self.feeds = feed_inputs(graph)
        self.inputs = [*update.states, *own, *self.feeds.values()]

    def constant_differences(self, other: _UpdateSketch) -> ConstantsByOperand | None:
        """Return the constants of `other` that differ from the constants of this sketch.

        The keys are (node index, operand index). None if the sketches differ in anything else.
        """
        if len(self.nodes) != len(other.nodes):
            return None
        same: dict[ir.Value | None, ir.Value | None] = {None: None}
        same.update(zip(self.inputs, other.inputs, strict=True))
        differing: ConstantsByOperand = {}
        for i, (a, b) in enumerate(zip(self.nodes, other.nodes, strict=True)):
            if _node_key(a) != _node_key(b):
                return None
            for j, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=True)):
                if x in same:
                    if same[x] is not y:
                        return None
                    continue
                p, q = constant(x), constant(y)
                if p is None or q is None or (p.dtype, p.shape) != (q.dtype, q.shape):
                    return None
                if p.tobytes() != q.tobytes():
                    differing[i, j] = q
            same.update(zip(a.outputs, b.outputs, strict=True))
        pairs = zip(self.update.new, other.update.new, strict=True)
        return differing if all(same.get(x) is y for x, y in pairs) else None

    def write(self, op: Emit, constants: Mapping[tuple[int, int], ir.Value]) -> Update:
        """Write the nodes into the graph of `op`, with values in place of the given constants."""
        update, wide = self.update, any(v.dtype == _DOUBLE for v in self.feeds.values())
        feeds = [FEEDS[name].input_in(op, wide) for name in self.feeds]
        states = [v for group in self.groups for v in group.inputs]
        new: dict[ir.Value, ir.Value] = {}
        new.update(zip(self.inputs, [*states, *self.gradients, *feeds], strict=True))
        for i, node in enumerate(self.nodes):
            inputs = []
            for j, x in enumerate(node.inputs):
                value = constants.get((i, j)) or (None if x is None else new.get(x))
                inputs.append(op.const(constant(x)) if value is None else value)
            new.update(zip(node.outputs, op.copy_node(node, inputs), strict=True))
        return Update(self.groups, [new[y] for y in update.new], self.gradients)


def _node_key(node: ir.Node) -> tuple:
    """Return a key that is equal for nodes that compute the same from the same operands."""
    keys = sorted(map(attribute_key, node.attributes.values()))
    return node.domain, node.op_type, len(node.inputs), len(node.outputs), keys


def _replace_optimizer(groups: list[WeightGroup], optimizer: Optimizer) -> list[WeightGroup] | None:
    """Return the groups with `optimizer` in place; None if its groups or slots would differ.

    None: weights would be in other groups, or have other slots, with that optimizer.
    """
    new = []
    for group in groups:
        own = [optimizer.for_weight(name, shape) for name, shape in group.shapes.items()]
        together = all(o == own[0] for o in own) and (len(own) == 1 or own[0].elementwise)
        shape = static(dims(group.state)) or ()
        slots = {slot: own[0].slot_shape(slot, shape) for slot in own[0].slots}
        if not together or slots != {s: static(dims(v)) for s, v in group.slots.items()}:
            return None
        new.append(replace(group, optimizer=own[0]))
    return new


def objective_of_stack(objective: Objective, members: int) -> Objective:
    """Return the objective of a stack of `members` models, made from the objective of one model.

    The graph is changed in place. Weights get the axis of members, and so do inputs that get an
    output of the batch before.

    Raises:
        ValueError: a node that cannot be written for all members.
    """
    graph, written = objective.model.graph, objective.written
    axis = MemberAxis(Emit(graph), members, {})
    carried = [x for x in objective.data if x.name in objective.states]
    for v in (*objective.weights, *carried):
        axis.set_stacked(v, axis.set_member_type(ir.Value(name=v.name), v))
    graph.inputs[:] = axis.values_for(graph.inputs)
    read = [*written.sums, *written.counts, *objective.predictions.values()]
    graph.outputs[:] = list(dict.fromkeys([*read, *objective.states.values()]))
    axis.push(graph)
    return replace(
        objective,
        data=axis.values_for(objective.data),
        weights=axis.values_for(objective.weights),
        written=replace(
            written,
            sums=[axis.expanded_value(v) for v in written.sums],
            counts=axis.values_for(written.counts),
        ),
        predictions={name: axis.expanded_value(v) for name, v in objective.predictions.items()},
        states={name: axis.expanded_value(v) for name, v in objective.states.items()},
    )
