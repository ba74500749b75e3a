"""Where operators take an axis: what the table claims of random nodes, checked by running them."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrad import rule
from onnxgrad.operators import ELEMENTWISE, OPERATORS
from onnxgrad.operators.axes import SUMMED, named_axes, output_axes, shared_output_axes
from onnxgrad.operators.shapes import dims
from tests.support.axes_cases import DRAWS, NOT_RUN, NodeCase
from tests.support.running import session_of

FOLLOWED = {name for (_, name), operator in OPERATORS.items() if operator.axes is not None}


class Node:
    """A case as a node of `ir`, and as a session that runs it."""

    def __init__(self, case: NodeCase) -> None:
        self.case = case
        self.inputs = [
            None if a is None else ir.Value(name=f"x{i}", type=_type(a))
            for i, a in enumerate(case.operands)
        ]
        while self.inputs[-1] is None:
            self.inputs.pop()
        attributes = ir.convenience.convert_attributes(case.attributes)
        self.node = ir.Node("", case.op_type, self.inputs, attributes, num_outputs=case.outputs)
        for i, y in enumerate(self.node.outputs):
            y.name = f"y{i}"
        fed = [x for i, x in self.operands() if i not in case.constants]
        constants = [x for i, x in self.operands() if i in case.constants]
        for i, x in self.operands():
            if i in case.constants:
                x.const_value = ir.tensor(case.operands[i], name=x.name)
                x.shape = ir.Shape(case.operands[i].shape)
        graph = ir.Graph(
            fed, self.node.outputs, nodes=[self.node], initializers=constants,
            opset_imports={"": 21}, name="g",
        )  # fmt: skip
        self.session = session_of(ir.to_proto(ir.Model(graph, ir_version=10)))
        self.arrays = {i: np.asarray(case.operands[i]) for i, x in self.operands() if x in fed}
        self.outputs = self.run(self.arrays)

    def operands(self):
        return [(i, x) for i, x in enumerate(self.inputs) if x is not None]

    def run(self, arrays):
        return self.session.run(None, {f"x{i}": a for i, a in arrays.items()})

    def set_shapes(self, symbols: bool) -> None:
        """State the shapes of all values: lengths of two and more perhaps as one symbol each."""

        def shape(a):
            return ir.Shape([f"n{d}" if symbols and d > 1 else d for d in a.shape])

        for i, a in self.arrays.items():
            self.inputs[i].shape = shape(a)
        for y, a in zip(self.node.outputs, self.outputs, strict=True):
            y.shape = shape(a)


def _type(a):
    return ir.TensorType(ir.DataType.from_numpy(np.asarray(a).dtype))


def changed(rng, a, axis, index):
    """Return `a` with other values at an index of an axis, of the same range."""
    new = a.copy()
    at = (slice(None),) * axis + (index,)
    if a.dtype == bool:
        new[at] = ~new[at]
    elif a.dtype.kind == "f":
        new[at] += rng.uniform(0.5, 1, new[at].shape).astype(a.dtype)
    else:
        new[at] = rng.choice(a.ravel(), new[at].shape)
    return new


def compare_places(rng, case: NodeCase, symbols: bool) -> int:
    """Check all places of the axes of a node; return how many were compared."""
    one = Node(case)
    one.set_shapes(symbols)
    leading = defaultdict(dict)  # by output and place: operands, and their axes that it is of
    compared = 0
    for i, a in one.arrays.items():
        for axis, n in enumerate(a.shape):
            for k, place in enumerate(output_axes(one.node, i, axis)):
                what = f"{case}, {dims(one.inputs[i])}: axis {axis} of operand {i} at {place}"
                if place == SUMMED:
                    terms = [one.run(one.arrays | {i: a.take([j], axis)})[k] for j in range(n)]
                    total = sum(terms)
                    np.testing.assert_allclose(one.outputs[k], total, 1e-4, 1e-4, err_msg=what)
                elif place is None:
                    continue
                else:
                    leading[k, place][i] = axis
                    length = one.outputs[k].shape[place]
                    if length != n:
                        assert n == 1 or case.op_type in ("GatherElements", "Slice"), what
                    if length != n and (case.op_type != "Slice" or not length):
                        continue  # a Slice from the first keeps places
                    index = int(rng.integers(length))
                    after = one.run(one.arrays | {i: changed(rng, a, axis, index)})[k]
                    rest = [np.delete(y, index, place) for y in (one.outputs[k], after)]
                    np.testing.assert_array_equal(*rest, err_msg=what)
                compared += 1
    for (k, place), operands in leading.items():
        check_positions(rng, one, k, place, operands)
    return compared


def check_positions(rng, one: Node, k: int, place: int, operands: dict[int, int]) -> None:
    """Check that no positions count: permuted operands give a permuted output."""
    n = one.outputs[k].shape[place]
    whole = {i: axis for i, axis in operands.items() if one.arrays[i].shape[axis] == n}
    if any(one.arrays[i].shape[axis] not in (1, n) for i, axis in operands.items()):
        return
    order = rng.permutation(n)
    permuted = {i: one.arrays[i].take(order, axis) for i, axis in whole.items()}
    after = one.run(one.arrays | permuted)[k]
    expected = one.outputs[k].take(order, place)
    what = f"{one.case}: output {k} permuted along {place}, with {whole}"
    np.testing.assert_allclose(after, expected, 1e-5, 1e-6, err_msg=what)
    followed = {one.inputs[i]: axis for i, axis in operands.items()}
    assert shared_output_axes(one.node, followed)[k] == place, what


def random_checks(seed: int, count: int) -> Counter:
    """Check random nodes; return how many axes of each operator were compared."""
    rng = np.random.default_rng(seed)
    compared = Counter()
    others = sorted(DRAWS.keys() - ELEMENTWISE)
    for _ in range(count):
        few = rng.choice(sorted(ELEMENTWISE - NOT_RUN), 5)
        name = str(rng.choice([*others, *few]))
        compared[name] += compare_places(rng, DRAWS[name](rng, name), symbols=bool(rng.integers(2)))
    return compared


def test_places_of_random_nodes():
    assert random_checks(seed=0, count=100).total() > 100


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 6))
def test_places_of_many_random_nodes(seed):
    assert len(+random_checks(seed, count=400)) > 60


def test_every_operator_that_is_followed_is_drawn():
    assert DRAWS.keys() | NOT_RUN == FOLLOWED


def of_lengths(*shape, constant=None):
    made = ir.Value(shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    if constant is not None:
        made.const_value = ir.tensor(np.array(constant, np.int64))
        made.shape = ir.Shape(np.shape(constant))
    return made


def node_of(op_type, inputs, attributes, output, outputs=1):
    made = ir.Node(
        "", op_type, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs
    )
    for y in made.outputs:
        y.shape = ir.Shape(output)
    return made


X, LAST = of_lengths("N", 3, 4), of_lengths(constant=[-1])
KEPT = [
    ("Transpose", [X], {}, (4, 3, "N"), 0, [2]),
    ("Transpose", [X], {"perm": [1, 0, 2]}, (3, "N", 4), 0, [1]),
    ("Softmax", [X], {}, ("N", 3, 4), 0, [0]),
    ("Softmax", [X], {}, ("N", 3, 4), 2, [None]),
    ("ReduceSum", [X, LAST], {"keepdims": 0}, ("N", 3), 0, [0]),
    ("ReduceSum", [X, LAST], {}, ("N", 3, 1), 2, [SUMMED]),
    ("ReduceMean", [X, LAST], {}, ("N", 3, 1), 2, [None]),
    ("ReduceSum", [X, of_lengths(1)], {}, ("N", 3, 1), 0, [None]),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}, ("N", 3, 4), 0, [0]),
    ("ReduceSum", [X], {"axes": [0], "keepdims": 0}, (3, 4), 1, [0]),
    ("Unsqueeze", [X, of_lengths(constant=[0, -1])], {}, (1, "N", 3, 4, 1), 2, [3]),
    ("Unsqueeze", [X, of_lengths(1)], {}, (1, "N", 3, 4), 2, [3]),
    ("Squeeze", [of_lengths(1, "N", 1)], {}, ("N",), 1, [0]),
    ("Reshape", [X, of_lengths(2)], {}, ("N", 12), 0, [0]),
    ("Reshape", [X, of_lengths(2)], {}, ("N", 12), 1, [None]),
    ("Reshape", [X, of_lengths(3)], {}, ("M", 3, 4), 0, [0]),
    ("Add", [X, of_lengths(4)], {}, ("N", 3, 4), 2, [2]),
    (
        "Slice",
        [X, of_lengths(constant=[0]), of_lengths(constant=[1])],
        {},
        (1, 3, 4),
        0,
        [0],
    ),
    (
        "Slice",
        [X, of_lengths(constant=[1]), of_lengths(constant=[2])],
        {},
        (1, 3, 4),
        0,
        [None],
    ),
    (
        "Slice",
        [X, of_lengths(constant=[0]), of_lengths(constant=[1])],
        {},
        (1, 3, 4),
        1,
        [1],
    ),
    ("Pad", [X, of_lengths(constant=[0, 1, 0, 0, 0, 0])], {}, ("N", 4, 4), 0, [0]),
    ("Pad", [X, of_lengths(constant=[0, 1, 0, 0, 0, 0])], {}, ("N", 4, 4), 1, [None]),
    ("Tile", [X, of_lengths(constant=[1, 2, 1])], {}, ("N", 6, 4), 0, [0]),
    ("Gather", [X, of_lengths()], {"axis": 1}, ("N", 4), 2, [1]),
    ("Gather", [X, of_lengths(2)], {"axis": 1}, ("N", 2, 4), 1, [None]),
    ("Gather", [X, of_lengths(2, 5)], {"axis": 1}, ("N", 2, 5, 4), 2, [3]),
    ("GatherND", [X, of_lengths("N", 5, 1)], {"batch_dims": 1}, ("N", 5, 4), 0, [0]),
    ("GatherND", [X, of_lengths("N", 5, 1)], {"batch_dims": 1}, ("N", 5, 4), 1, [None]),
    ("OneHot", [of_lengths("N"), of_lengths(), of_lengths(2)], {}, ("N", 5), 0, [0]),
    ("OneHot", [of_lengths("N"), of_lengths(), of_lengths(2)], {"axis": 0}, (5, "N"), 0, [1]),
    ("MatMul", [X, of_lengths(4, 5)], {}, ("N", 3, 5), 1, [1]),
    ("MatMul", [X, of_lengths(4, 5)], {}, ("N", 3, 5), 2, [None]),
    ("Einsum", [X, of_lengths(4, 5)], {"equation": "nab,bc->can"}, (5, 3, "N"), 0, [2]),
    ("MaxPool", [X], {"kernel_shape": [2]}, ("N", 3, 3), 0, [0, None]),
    ("LSTM", [of_lengths(9, "N", 4)], {}, (9, 1, "N", 8), 1, [2, 1, 1]),
    ("If", [X], {}, ("N", 3, 4), 0, [None]),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "output", "axis", "expected"), KEPT)
def test_places(op_type, inputs, attributes, output, axis, expected):
    node = node_of(op_type, inputs, attributes, output, len(expected))
    assert output_axes(node, 0, axis) == expected


def test_equal_lengths_do_not_prove_that_a_resize_keeps_an_axis():
    scales = of_lengths(constant=[1, 1])
    scales.const_value = ir.tensor(np.float32([1.2, 1]))
    node = node_of("Resize", [of_lengths(4, 3), None, scales], {"mode": "linear"}, (4, 3))
    assert (output_axes(node, 0, 0), output_axes(node, 0, 1)) == ([None], [1])


def test_operands_are_followed_together():
    a, b = of_lengths("N", 3), of_lengths("N", 3)
    product = node_of("Mul", [a, b], {}, ("N", 3))
    assert shared_output_axes(product, {a: 0, b: 0}) == [0]
    assert shared_output_axes(product, {a: 0, b: 1}) == [None]
    assert shared_output_axes(product, {a: 1}) == [1]
    assert shared_output_axes(product, {}) == [None]


def test_a_users_rule_leaves_the_axes_of_its_operator(monkeypatch):
    monkeypatch.setitem(OPERATORS, ("", "Softmax"), OPERATORS["", "Softmax"])
    rule("Softmax")(lambda op, node, dy: [dy])
    softmax = node_of("Softmax", [X], {}, ("N", 3, 4))
    assert (output_axes(softmax, 0, 0), named_axes(softmax)) == ([0], [2])


def test_axes_are_named_in_their_order():
    assert named_axes(node_of("ReduceMax", [X, of_lengths(constant=[-1, 0])], {}, (1, 3, 1))) == [
        2,
        0,
    ]
    assert named_axes(node_of("ReduceMax", [X], {}, (1, 1, 1))) == [0, 1, 2]
    assert named_axes(node_of("Squeeze", [X], {}, ("N", 3, 4))) is None  # those of length 1
    assert named_axes(node_of("Slice", [X, of_lengths("K")], {}, (1, 3, 4))) is None
    assert named_axes(node_of("Relu", [X], {}, ("N", 3, 4))) is None
