"""Random ONNX programs: nested bodies, local functions, and constants kept in every way.

`program(seed)` returns a model and what to feed it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.program_bodies import Bodies
from tests.support.program_scope import ROW, ROWS, SQUARE, Attribute, Scope, Value

DOMAINS = ("my", "your.own")


@dataclass
class Program:
    """A model, what it is run with, and whether it declares shapes that do not hold."""

    model: onnx.ModelProto
    feed: dict[str, np.ndarray]
    lies: bool


@dataclass
class Function:
    domain: str
    name: str
    attributes: list[Attribute]
    inputs: list[tuple]  # their shapes; the last one is optional
    outputs: list[tuple]


class Writer(Bodies):
    """Draws one program."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.protos: list[onnx.FunctionProto] = []

    # ---- functions -----------------------------------------------------------------------------

    def function(self) -> None:
        """Write one more function, which may call those that are there."""
        rng = self.rng
        opset = self.opset if rng.random() < 0.7 else int(rng.integers(13, 23))
        s = Scope(self, None, opset)
        uses = "scale shifts axis flag axes perm equation words tensor fill branch scale".split()
        for i in range(rng.integers(4)):
            use = str(rng.choice(uses))
            default = self.argument(use) if rng.random() < 0.6 else None
            s.attributes = [*s.attributes, Attribute("pqrs"[i], use, default)]
        shapes = [s.pick(ROW, ROWS), ROW, ROW]
        s.inputs = [(s.name(), shape) for shape in shapes]
        s.values = s.inputs[:2]
        x = s.inputs[0]
        for a in s.attributes:
            x = self.inside(s, a, x) if rng.random() < 0.2 else self.use(s, a, x)
        if rng.random() < 0.7:
            w = self.settle(s, x, ROWS)[0]
            x = s.add(s.emit("Gemm", [w, s.constant(SQUARE), s.inputs[2][0]]), ROWS)
        x = self.grow(s, int(rng.integers(3)))
        results = [self.settle(s, self.simple(s, x), s.pick(ROW, ROWS))]
        if rng.random() < 0.5:
            shape = s.pick(ROW, ROWS)
            results.append((self.result(s, shape, results[:]), shape))
        rng.shuffle(results)
        name = s.pick("f", "g", "h") + str(len(self.protos))
        domain = DOMAINS[rng.integers(2)]
        imports = {"": opset} | dict.fromkeys(DOMAINS, 1)
        outputs = [(str(n), tuple(shape)) for n, shape in results]
        proto = helper.make_function(
            domain,
            name,
            [v[0] for v in s.inputs],
            [n for n, _ in outputs],
            s.nodes,
            [helper.make_opsetid(d, v) for d, v in imports.items()],
            attributes=[a.name for a in s.attributes if a.default is None],
            attribute_protos=[
                helper.make_attribute(a.name, a.default)
                for a in s.attributes
                if a.default is not None
            ],
        )
        self.protos.append(proto)
        shapes = [shape for _, shape in s.inputs]
        self.functions.append(
            Function(domain, name, s.attributes, shapes, [shape for _, shape in outputs])
        )

    def inside(self, s: Scope, a: Attribute, x: Value) -> Value:
        """Use an attribute of the function in the branch of an If."""
        branches = {}
        for key in ("then_branch", "else_branch"):
            body = Scope(self, s)
            body.values = [x]
            y = self.use(body, a, x)
            name = self.settle(body, self.unary(body, y), ROW)[0]
            branches[key] = body.graph(key, [], [body.info(name, ROW)])
        condition = self.truth(s, bool(self.rng.integers(2)))
        return s.add(s.emit("If", [condition], **branches), ROW)

    def argument(self, use: str):
        """Return a value for an attribute of this use."""
        rng = self.rng
        if use == "branch":
            body = Scope(self, None, self.opset)
            body.function = False
            tensor = numpy_helper.from_array(body.array(*ROW), body.name())
            if rng.random() < 0.5:
                body.initializers.append(tensor)
                name = tensor.name
            else:
                body.nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
                name = body.emit("Tanh", [tensor.name])
            return body.graph("branch", [], [body.info(name, ROW)])
        return {
            "scale": lambda: float(np.float32(rng.uniform(0.3, 1.5))),
            "shifts": lambda: [float(np.float32(v)) for v in rng.normal(size=3)],
            "axis": lambda: int(rng.integers(2)) - 1,
            "flag": lambda: int(rng.integers(2)),
            "axes": lambda: [[0], [1], [0, 1], [-1]][rng.integers(4)],
            "perm": lambda: [[0, 1], [1, 0]][rng.integers(2)],
            "equation": lambda: ("ij,jk->ik", "ij,kj->ik")[rng.integers(2)],
            "words": lambda: ["a"] * int(rng.integers(1, 4)),
            "tensor": lambda: numpy_helper.from_array(rng.normal(size=3).astype(self.dtype), "t"),
            "fill": lambda: numpy_helper.from_array(rng.normal(size=1).astype(self.dtype), "t"),
        }[use]()

    def use(self, s: Scope, a: Attribute, x: Value) -> Value:
        """Write an operator, or a few, that depend on the attribute."""
        shape = x[1]

        def floats(name):
            return s.emit("Cast", [name], to=self.type)

        if a.use == "scale":
            form = s.pick(
                "Constant", "Gemm", *(("Elu", "Selu", "LeakyRelu") if self.single else ())
            )
            if form == "Constant":
                y = s.emit("Mul", [x[0], floats(s.emit("Constant", [], value_float=a))])
            elif form in ("Elu", "LeakyRelu"):
                y = s.emit(form, [x[0]], alpha=a)
            elif form == "Selu":
                y = s.emit("Selu", [x[0]], gamma=a, alpha=0.7)
            else:
                x = self.settle(s, x, ROWS)
                y, shape = s.emit("Gemm", [x[0], s.constant(SQUARE)], alpha=a), ROWS
        elif a.use == "shifts":
            y = s.emit("Add", [x[0], floats(s.emit("Constant", [], value_floats=a))])
        elif a.use == "axis":
            y = s.emit("Softmax", [x[0]], axis=a)
            y = s.emit("Mul", [y, s.constant(ROW)])
        elif a.use == "flag":
            form = s.pick("Constant", "reverse", "exclusive")
            if form == "Constant":
                y = s.emit("Add", [x[0], floats(s.emit("Constant", [], value_int=a))])
            else:
                y = s.emit("CumSum", [x[0], s.ints(-1, scalar=True)], **{form: a})
        elif a.use == "axes":
            x = self.settle(s, x, ROWS)
            shape = ROWS
            mean = s.emit("ReduceSum", [x[0], s.emit("Constant", [], value_ints=a)], keepdims=1)
            y = s.emit("Sub", [x[0], mean])
        elif a.use == "perm":
            y = s.emit("MatMul", [x[0], s.emit("Transpose", [s.constant(SQUARE)], perm=a)])
        elif a.use == "equation":
            x = self.settle(s, x, ROWS)
            y, shape = s.emit("Einsum", [x[0], s.constant(SQUARE)], equation=a), ROWS
        elif a.use == "words":
            size = s.emit("Size", [s.emit("Constant", [], value_strings=a)])
            y = s.emit("Mul", [x[0], floats(size)])
        elif a.use == "tensor":
            y = s.emit("Mul", [x[0], s.emit("Constant", [], value=a)])
        elif a.use == "fill":
            y = s.emit("Sub", [x[0], s.emit("ConstantOfShape", [s.ints(3)], value=a)])
        else:
            body = Scope(self, s)
            name = self.settle(body, self.unary(body, x), ROW)[0]
            other = body.graph("other", [], [body.info(name, ROW)])
            branches = {"then_branch": a, "else_branch": other}
            other = s.emit("If", [self.truth(s, bool(self.rng.random() < 0.7))], **branches)
            y = s.emit("Add", [x[0], other])
        return s.add(s.emit("Tanh", [y]), shape)

    def call(self, s: Scope, x: Value) -> Value:
        """Call a function: with attributes, without them, or with those of the caller."""
        f = self.functions[self.rng.integers(len(self.functions))]
        passed = {}
        for a in f.attributes:
            here = [b for b in s.attributes if b.use == a.use]
            if here and self.rng.random() < 0.7:
                passed[a.name] = here[self.rng.integers(len(here))]
            elif a.default is None or self.rng.random() < 0.5:
                passed[a.name] = self.argument(a.use)
        taken = [self.settle(s, x, f.inputs[0])[0], self.value(s, ROW)[0]]
        if self.rng.random() < 0.5:
            taken.append(self.value(s, ROW)[0])
        elif self.rng.random() < 0.5:
            taken.append("")
        names = s.emit(f.name, taken, len(f.outputs), domain=f.domain, **passed)
        names = [names] if isinstance(names, str) else names
        used = int(self.rng.integers(len(names)))
        if len(names) > 1 and self.rng.random() < 0.3:
            s.nodes[-1].output[(used + 1) % len(names)] = ""
        return s.add(names[used], f.outputs[used])

    # ---- programs ------------------------------------------------------------------------------

    def program(self) -> Program:
        rng = self.rng
        for _ in range(rng.choice([0, 1, 2, 3], p=[0.4, 0.3, 0.2, 0.1])):
            self.function()
        s = Scope(self)
        # setting() gives these names to inputs that are no floats
        s.names |= {"yes", "no", *(f"n{i}" for i in range(5))}
        s.values = s.inputs = [(n, s.pick(ROW, ROWS)) for n in "XYZ"[: rng.integers(1, 4)]]
        s.values = list(s.inputs)
        while s.depth == 0 and not any(n.op_type in ("If", "Loop", "Scan") for n in s.nodes):
            x = self.grow(s, int(rng.integers(1, 5)))
        outputs = [self.settle(s, x)]
        others = [v for v in s.values if v[1] in (ROW, ROWS, SQUARE)]
        for _ in range(rng.integers(3)):
            outputs.append(others[rng.integers(len(others))])
        if rng.random() < 0.12:
            outputs.append(outputs[0])
        feed = {n: s.array(*shape) for n, shape in s.inputs}
        taken = [self.declared(n, shape) for n, shape in s.inputs]
        for name, (kind, array) in self.settings.items():
            taken.append(helper.make_tensor_value_info(name, kind, array.shape))
            feed[name] = array
        if s.initializers and rng.random() < 0.05:  # an input with a default value
            t = s.initializers[0]
            taken.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
        graph = s.graph("g", taken, [s.info(n, shape) for n, shape in outputs])
        lies = self.declare(s, graph)
        imports = {"": self.opset} | (dict.fromkeys(DOMAINS, 1) if self.protos else {})
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid(d, v) for d, v in imports.items()],
            functions=self.protos,
            ir_version=10,
        )
        if self.alias:
            rename_standard(model.opset_import)
        return Program(model, feed, lies)

    def declared(self, name: str, shape) -> onnx.ValueInfoProto:
        form = self.rng.integers(3)
        if self.rng.random() < 0.05:
            return helper.make_tensor_value_info(name, self.type, None)
        dims = [f"{name}{d}" if form == 2 or (form == 1 and d == 2) else d for d in shape]
        return helper.make_tensor_value_info(name, self.type, dims)

    def declare(self, s: Scope, graph: onnx.GraphProto) -> bool:
        """Declare the shapes of some results, at times wrongly; tell whether one does not hold."""
        lies = False
        shown = {y.name for y in graph.output}
        computed = {y for n in graph.node if n.op_type != "Constant" for y in n.output}
        if self.rng.random() < 0.5:
            return lies
        for name, shape in s.values:
            if name in computed - shown and None not in shape and self.rng.random() < 0.3:
                wrong = self.rng.random() < 0.1
                lies |= wrong
                shape = [shape, (7,), (3, 2), (1, 3), (2, 1, 3)][self.rng.integers(1, 5) * wrong]
                graph.value_info.append(helper.make_tensor_value_info(name, self.type, shape))
                computed.remove(name)
        return lies


def rename_standard(imports) -> None:
    """Write the domain of the standard operators as ai.onnx."""
    for entry in imports:
        if entry.domain == "":
            entry.domain = "ai.onnx"


def program(seed: int) -> Program:
    return Writer(seed).program()
