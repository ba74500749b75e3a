"""Random operators, and If, Loop and Scan: what `programs` writes its programs of.

Operators are smooth, so that central differences tell whether a gradient is right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.support.program_scope import ROW, ROWS, SQUARE, Scope, Value


class Bodies:
    """Draws operators, and If, Loop and Scan."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.integers(13, 23))
        self.single = bool(self.rng.random() < 0.3)
        self.dtype = np.float32 if self.single else np.float64
        self.type = TensorProto.FLOAT if self.single else TensorProto.DOUBLE
        self.alias = bool(self.rng.random() < 0.15)
        self.functions: list = []
        self.settings: dict[str, tuple[int, np.ndarray]] = {}  # inputs that are no floats

    # ---- operators -----------------------------------------------------------------------------

    def grow(self, s: Scope, steps: int) -> Value:
        """Write `steps` operators, each on one of the newest values."""
        x = s.values[-1] if s.values else self.value(s, s.pick(ROW, ROWS))
        for _ in range(steps):
            x = self.step(s, x)
            if self.rng.random() < 0.2:
                x = s.values[self.rng.integers(len(s.values))]
        return x

    def step(self, s: Scope, x: Value) -> Value:
        x = self.settle(s, x)
        deep = [self.conditional, self.loop, self.scan] if s.depth < 3 else []
        if deep and self.rng.random() < (0.4, 0.15, 0.1)[s.depth]:
            return deep[self.rng.integers(3)](s, x)
        if self.functions and self.rng.random() < 0.25:
            return self.call(s, x)
        return self.simple(s, x)

    def call(self, s: Scope, x: Value) -> Value:
        raise NotImplementedError  # there are functions to call in `programs`

    def simple(self, s: Scope, x: Value) -> Value:
        steps: list[Callable] = [
            self.unary, self.unary, self.binary, self.binary, self.matmul, self.reduced,
            self.parts, self.gathered, self.softmax,
        ]  # fmt: skip
        return steps[self.rng.integers(len(steps))](s, x)

    def unary(self, s, x):
        ops = ["Tanh", "Sin", "Sigmoid", "Neg", "Identity", "Cos", "Tanh"]
        op = s.pick(
            *ops, *(["Softplus", "Elu", "Erf", "Gelu"][: 3 + (s.opset >= 20)] * self.single)
        )
        return s.add(s.emit(op, [x[0]]), x[1])

    def binary(self, s, x):
        op = s.pick("Add", "Mul", "Sub", "Mul")
        other = self.value(s, s.pick(ROW, x[1]))
        pair = [x[0], other[0]] if self.rng.random() < 0.7 else [other[0], x[0]]
        return s.add(s.emit(op, pair), x[1])

    def matmul(self, s, x):
        w = s.constant(SQUARE)
        if x[1] == ROWS and self.rng.random() < 0.4:
            parts = [x[0], w] + ([s.constant(ROW)] if self.rng.random() < 0.5 else [])
            y = s.emit("Gemm", parts, transB=int(self.rng.integers(2)), alpha=0.5)
        else:
            y = s.emit("MatMul", [x[0], w])
            if self.rng.random() < 0.5:
                y = s.emit("Add", [y, s.constant(ROW)])
        return s.add(s.emit("Tanh", [y]), x[1])

    def reduced(self, s, x):
        axis = int(self.rng.integers(len(x[1])))
        mean = self.reduce(s, s.pick("ReduceMean", "ReduceSum", "ReduceL2"), x[0], axis, 1)
        return s.add(s.emit("Sub", [x[0], mean]), x[1])

    def reduce(self, s, op, x, axis, keepdims):
        if s.inlined and (s.opset >= 18) != (self.opset >= 18):
            op = "ReduceSum"  # which has one form in all opsets: onnxruntime mixes them
        if op == "ReduceSum" or s.opset >= 18:
            return s.emit(op, [x, s.ints(axis)], keepdims=keepdims)
        return s.emit(op, [x], keepdims=keepdims, axes=[axis])

    def parts(self, s, x):
        """Join with a constant, and cut a part of the same shape out."""
        other = s.constant(x[1])
        joined = s.emit("Concat", [x[0], other], axis=0)
        lengths = [s.ints(1), s.ints(1 + x[1][0]), s.ints(0)]
        return s.add(s.emit("Slice", [joined, *lengths]), x[1])

    def gathered(self, s, x):
        order = s.ints(*(int(i) for i in self.rng.integers(-x[1][0], x[1][0], x[1][0])))
        return s.add(s.emit("Gather", [x[0], order], axis=0), x[1])

    def softmax(self, s, x):
        y = s.emit("Softmax", [x[0]], axis=s.pick(0, -1))
        return s.add(s.emit("Mul", [y, self.value(s, x[1])[0]]), x[1])

    def value(self, s: Scope, shape) -> Value:
        """Return a value of this shape: one of those there are, or a new constant."""
        there = [v for v in s.visible() if v[1] == shape]
        if there and self.rng.random() < 0.5:
            return there[self.rng.integers(len(there))]
        return s.add(s.constant(shape), shape)

    def settle(self, s: Scope, x: Value, shape=None) -> Value:
        """Return a value of `shape`, a row or rows, that is computed from x."""
        name, have = x
        if have not in (ROW, ROWS):  # results stacked along the first axis, or the last
            name = self.reduce(s, "ReduceSum", name, -1 if have[0] == 3 else 0, 0)
            have = ROWS if have[1:] == ROWS else ROW
            name = s.emit("Tanh", [name])
        if shape and have != shape:
            if shape == ROW:
                name = self.reduce(s, s.pick("ReduceSum", "ReduceMean"), name, 0, 0)
            else:
                name = s.emit("Add", [name, s.constant(ROWS)])
            have = shape
        return (name, have) if name == x[0] else s.add(name, have)

    # ---- bodies --------------------------------------------------------------------------------

    def result(self, s: Scope, shape, before: list[Value]) -> str:
        """Return what a body returns: computed, or handed on from wherever it is."""
        kinds = "computed initializer Constant sparse input outer again floats"
        odds = [0.5, 0.12, 0.08, 0.03, 0.1, 0.07, 0.06, 0.04]
        kind = str(self.rng.choice(kinds.split(), p=odds))
        same = {
            "input": [v for v in s.inputs if v[1] == shape],
            "outer": [v for v in s.outer() if v[1] == shape],
            "again": [v for v in before if v[1] == shape],
        }.get(kind, [])
        if same:
            name = same[self.rng.integers(len(same))][0]
            # onnxruntime returns what memory held before, where a Scan returns an input of its body
            # as it is, or an If or a Scan one value twice; from Loop they come as they should
            if kind == "outer" or not s.looped:
                name = s.emit("Identity", [name])
        elif kind in ("initializer", "Constant", "sparse", "floats"):
            name = s.constant(shape, kind)
        else:
            name = self.settle(s, self.simple(s, self.grow(s, 1)), shape)[0]
        before.append((name, shape))
        return name

    def truth(self, s: Scope, value: bool = True) -> str:
        return s.keep(np.array(value))

    def setting(self, s: Scope, stem: str, kind: int, array) -> str:
        """Return an input of the model that is no float, visible in all but functions."""
        scope = s
        while scope.parent is not None:
            scope = scope.parent
        if scope.function:
            return s.keep(np.asarray(array))
        self.settings.setdefault(stem, (kind, np.asarray(array)))
        return stem

    def conditional(self, s: Scope, x: Value) -> Value:
        kind = s.pick("input", "constant", "computed", "computed")
        if kind == "input":
            condition = self.setting(s, s.pick("yes", "no"), TensorProto.BOOL, True)
            if condition == "no":
                self.settings["no"] = (TensorProto.BOOL, np.array(False))
        elif kind == "constant":
            condition = self.truth(s, bool(self.rng.integers(2)))
        else:
            total = s.emit("ReduceMax", [x[0]], keepdims=0)
            limit = s.keep(np.asarray(self.rng.normal(), self.dtype))
            condition = s.emit(s.pick("Less", "Greater"), [total, limit])
        shapes = [s.pick(ROW, ROWS) for _ in range(self.rng.integers(1, 3))]
        branches = {}
        for key in ("then_branch", "else_branch"):
            body = Scope(self, s)
            self.grow_from(body, x, int(self.rng.integers(3)))
            before: list[Value] = []
            names = [self.result(body, shape, before) for shape in shapes]
            infos = [body.info(n, shape) for n, shape in zip(names, shapes, strict=True)]
            branches[key] = body.graph(key, [], infos)
        names = s.emit("If", [condition], len(shapes), **branches)
        return self.outputs(s, names, shapes)

    def grow_from(self, body: Scope, x: Value, steps: int) -> None:
        body.values.append((body.emit("Identity", [x[0]]), x[1]) if self.rng.random() < 0.1 else x)
        self.grow(body, steps)
        body.values = [v for v in body.values if v != x] or body.values

    def outputs(self, s: Scope, names, shapes) -> Value:
        names = [names] if isinstance(names, str) else names
        found = [s.add(n, shape) for n, shape in zip(names, shapes, strict=True)]
        settled = [self.settle(s, v) for v in found]
        s.values = [v for v in s.values if v[1] in (ROW, ROWS, SQUARE)]
        if len(settled) > 1 and self.rng.random() < 0.7:
            a, b = settled[-2:]
            return s.add(s.emit("Add", [a[0], self.settle(s, b, a[1])[0]]), a[1])
        return settled[self.rng.integers(len(settled))]

    def loop(self, s: Scope, x: Value) -> Value:
        states = [x] + [self.value(s, s.pick(ROW, ROWS)) for _ in range(self.rng.integers(2))]
        stop = s.pick("identity", "handed", "own", "Constant", "early", "data", "outer", "once")
        count = self.rng.integers(1, 4)
        trips = s.pick("constant", "constant", "input", "missing")
        if trips == "missing" and stop in ("early", "once"):
            trip = ""
        elif trips == "input":
            trip = self.setting(s, f"n{count}", TensorProto.INT64, np.int64(count))
        else:
            trip = s.ints(count if self.rng.random() < 0.9 else 0, scalar=True)
        body = Scope(self, s)
        body.looped = True
        i, go = body.name(), body.name()
        body.inputs = [(body.name(), v[1]) for v in states]
        body.values = list(body.inputs)
        self.grow(body, int(self.rng.integers(3)))
        start = s.pick("", self.truth(s))
        condition = self.stop(body, stop, i, go, start)
        before: list[Value] = []
        names = [self.result(body, v[1], before) for v in states]
        shapes = [s.pick(ROW, ROWS) for _ in range(self.rng.integers(3))]
        names += [self.result(body, shape, before) for shape in shapes]
        taken = [
            helper.make_tensor_value_info(i, TensorProto.INT64, ()),
            helper.make_tensor_value_info(go, TensorProto.BOOL, ()),
            *(body.info(*v) for v in body.inputs),
        ]
        given = [body.info(condition, (), TensorProto.BOOL)]
        full = [v[1] for v in states] + shapes
        given += [body.info(n, shape) for n, shape in zip(names, full, strict=True)]
        graph = body.graph("body", taken, given)
        made = s.emit("Loop", [trip, start, *(v[0] for v in states)], len(full), body=graph)
        return self.outputs(s, made, full[: len(states)] + [(None, *shape) for shape in shapes])

    def stop(self, body: Scope, kind: str, i: str, go: str, start: str) -> str:
        if kind == "handed":
            return go
        if kind in ("own", "once", "Constant"):
            tensor = numpy_helper.from_array(np.array(kind != "once"), body.name())
            if kind == "Constant":
                node = helper.make_node("Constant", [], [tensor.name], value=tensor)
                body.nodes.append(node)
            else:
                body.initializers.append(tensor)
            return tensor.name
        if kind == "early":
            return body.emit("Less", [i, body.ints(int(self.rng.integers(3)), scalar=True)])
        if kind == "data":
            total = body.emit("ReduceMax", [body.inputs[0][0]], keepdims=0)
            limit = body.keep(np.asarray(self.rng.uniform(0, 1), self.dtype))
            return body.emit("Less", [total, limit])
        return body.emit("Identity", [start if kind == "outer" and start else go])

    def scan(self, s: Scope, x: Value) -> Value:
        states = [x] if self.rng.random() < 0.8 else []
        rows, axes = [], []
        for _ in range(self.rng.integers(1, 3)):
            axis = int(self.rng.integers(2))
            v = self.value(s, ROWS)[0] if axis == 0 or self.rng.random() < 0.5 else None
            if axis:
                v = s.emit("Transpose", [v], perm=[1, 0]) if v else s.constant((3, 2))
            rows.append(v)
            axes.append(s.pick(axis, axis - 2))
        body = Scope(self, s)
        body.scanned = True
        body.inputs = [(body.name(), v[1]) for v in states] + [(body.name(), ROW) for _ in rows]
        body.values = list(body.inputs)
        self.grow(body, int(self.rng.integers(3)))
        before: list[Value] = []
        names = [self.result(body, v[1], before) for v in states]
        count = self.rng.integers(0 if states else 1, 3)
        names += [self.result(body, ROW, before) for _ in range(count)]
        ends = [int(self.rng.integers(2)) for _ in range(count)]
        attributes = {"num_scan_inputs": len(rows), "scan_input_axes": axes}
        if count:
            attributes["scan_output_axes"] = ends
            attributes["scan_output_directions"] = [int(self.rng.integers(2)) for _ in ends]
        if self.rng.random() < 0.5:
            attributes["scan_input_directions"] = [int(self.rng.integers(2)) for _ in rows]
        full = [v[1] for v in states] + [ROW] * count
        graph = body.graph(
            "body",
            [body.info(*v) for v in body.inputs],
            [body.info(n, shape) for n, shape in zip(names, full, strict=True)],
        )
        made = s.emit("Scan", [*(v[0] for v in states), *rows], len(full), body=graph, **attributes)
        shapes = [v[1] for v in states] + [(3, 2) if end else ROWS for end in ends]
        return self.outputs(s, made, shapes)
