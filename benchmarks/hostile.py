"""Models and data files that are made to take all time or memory: what becomes of each.

`python benchmarks/hostile.py` writes seconds, MB and the message of each, run in a process of its
own; `python benchmarks/hostile.py NAME` runs one of them here.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxgrad import onnx_derivative

MEMORY = 3 << 30  # of the address space of a child; libraries map more than they use
N, V = helper.make_node, helper.make_tensor_value_info


def model(nodes, inits=(), x=(2,), functions=()):
    graph = helper.make_graph(nodes, "g", [V("X", 1, x)], [V("Y", 1, None)], list(inits))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values[0] if len(values) == 1 else values, "i8"), name)


def vector(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def chain(n, op="Neg", *more):
    names = ["X", *(f"t{i}" for i in range(n - 1)), "Y"]
    return [N(op, [names[i], *more], [names[i + 1]]) for i in range(n)]


def many(op, n, **attributes):
    parts = [N("Neg", ["X"], [f"e{i}"]) for i in range(n)]
    return model([*parts, N(op, [f"e{i}" for i in range(n)], ["Y"], **attributes)])


def doubling(n):
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    bodies = [[N("Neg", ["a"], ["b"])]]
    for i in range(n):
        call = f"f{i}"
        bodies.append([N(call, ["a"], ["c"], domain="l"), N(call, ["c"], ["b"], domain="l")])
    functions = [
        helper.make_function("l", f"f{i}", ["a"], ["b"], b, opsets) for i, b in enumerate(bodies)
    ]
    return model([N(f"f{n}", ["X"], ["Y"], domain="l")], functions=functions)


def blown_up(node, *inits):
    rest = [
        N("Cast", ["r"], ["f"], to=1),
        N("ReduceMax", ["f"], ["m"], keepdims=0),
        N("Mul", ["X", "m"], ["Y"]),
    ]
    return model([node, *rest], inits)


def doubled_vector(n):
    nodes = [N("Concat", ["X" if not i else f"t{i}"] * 2, [f"t{i + 1}"], axis=0) for i in range(n)]
    return model([*nodes, N("ReduceMax", [f"t{n}"], ["Y"], keepdims=0)])


def sparse():
    made = blown_up(N("Neg", ["w"], ["r"]))
    tensor = made.graph.sparse_initializer.add(dims=[3 << 38])
    tensor.values.CopyFrom(numpy_helper.from_array(np.float32([1]), "w"))
    tensor.indices.CopyFrom(vector("i", 5))
    return made


def nested(n):
    def leaf():
        return helper.make_graph([N("Neg", ["X"], ["o"])], "leaf", [], [V("o", 1, None)])

    held = leaf()
    for _ in range(n):
        node = N("If", ["c"], ["o"], then_branch=held, else_branch=leaf())
        held = helper.make_graph([node], "held", [], [V("o", 1, None)])
    return model([*held.node, N("Neg", ["o"], ["Y"])], [numpy_helper.from_array(np.True_, "c")])


def named(length):
    return model([N("Neg", ["X"], ["a" * length]), N("Neg", ["a" * length], ["Y"])])


def noted(n):
    made = model(chain(2))
    for i in range(n):
        made.metadata_props.add(key=f"k{i}", value="v")
    return made


def inserted(n):
    nodes = [N("SequenceInsert", [f"s{i}", "X"], [f"s{i + 1}"]) for i in range(n)]
    last = N("ConcatFromSequence", [f"s{n}"], ["Y"], axis=0)
    return model([N("SequenceEmpty", [], ["s0"]), *nodes, last])


def long_weight(n):
    weight = numpy_helper.from_array(np.ones(n, np.float32), "w")
    return model([N("Add", ["X", "w"], ["Y"])], [weight], x=(n,))


def table():
    from onnxgrad.data import read_table

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        np.savez_compressed(path, x=np.zeros((10**5, 1000), np.float32))
        return read_table(path)


def external(location, offset="0"):
    made = model([N("Mul", ["X", "w"], ["Y"])])
    tensor = made.graph.initializer.add(name="w", dims=[2], data_type=1, data_location=1)
    for key, value in {"location": location, "offset": offset, "length": "8"}.items():
        tensor.external_data.add(key=key, value=value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(made.SerializeToString())
        (Path(folder) / "w.data").write_bytes(bytes(8))
        return onnx_derivative(path)


BIG = 10**12
CASES = {
    "cycle": lambda: model([N("Neg", ["b"], ["a"]), N("Neg", ["a"], ["b"]), *chain(1)]),
    "functions that double 20 times": lambda: doubling(20),
    "functions that double 60 times": lambda: doubling(60),
    "Sum of 20,000": lambda: many("Sum", 20_000),
    "Concat of 20,000": lambda: many("Concat", 20_000, axis=0),
    "Max of 2,000": lambda: many("Max", 2_000),
    "chain of 20,000": lambda: model(chain(20_000)),
    "chain of 100,000": lambda: model(chain(100_000)),
    "Range of 1e12": lambda: blown_up(
        N("Range", ["a", "b", "d"], ["r"]), ints("a", 0), ints("b", BIG), ints("d", 1)
    ),
    "ConstantOfShape of 1e12": lambda: blown_up(
        N("ConstantOfShape", ["s"], ["r"]), vector("s", BIG)
    ),
    "Expand to 1e12": lambda: blown_up(
        N("Expand", ["w", "s"], ["r"]), vector("s", BIG), vector("w", 2)
    ),
    "Tile 1e12 times": lambda: blown_up(
        N("Tile", ["w", "s"], ["r"]), vector("s", BIG), vector("w", 2)
    ),
    "Pad by 1e12": lambda: blown_up(
        N("Pad", ["w", "s"], ["r"]), vector("s", 0, BIG), vector("w", 2)
    ),
    "vector doubled 50 times": lambda: doubled_vector(50),
    "2,000 Unsqueezes": lambda: model(chain(2_000, "Unsqueeze", "s"), [vector("s", 0)]),
    "5,000 SequenceInserts": lambda: inserted(5_000),
    "sparse constant of 3 TiB": sparse,
    "If nested 25 deep": lambda: nested(25),
    "If nested 31 deep": lambda: nested(31),
    "names of 10 MB": lambda: named(10**7),
    "100,000 metadata entries": lambda: noted(10**5),
    "weight of 20,000,000 in one axis": lambda: long_weight(20_000_000),
    "npz of 400 KB that holds 400 MB": table,
    "external data in /proc": lambda: external("/proc/self/mem"),
    "external data above the folder": lambda: external("../../etc/hostname"),
    "external data at an offset of 1e18": lambda: external("w.data", str(10**18)),
}


def run(name: str) -> str:
    """Return what becomes of one case, in one line."""
    start = time.perf_counter()
    try:
        made = CASES[name]()
        start = time.perf_counter()
        if isinstance(made, onnx.ModelProto) and not name.startswith("external"):
            made = onnx_derivative(made)
        said = f"{len(made.graph.node)} nodes" if isinstance(made, onnx.ModelProto) else "read"
    except (ValueError, NotImplementedError) as e:
        said = f"{type(e).__name__}: {e}"
    seconds = time.perf_counter() - start
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{seconds:.1f} s | {megabytes:.0f} MB | {said}"


def child(name: str, timeout: float = 300.0) -> subprocess.CompletedProcess:
    """Run one case in a process of its own, with a limit on its memory."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    command = [sys.executable, __file__, name]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, preexec_fn=limit, check=False
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(run(sys.argv[1]))
    else:
        for case in CASES:
            done = child(case)
            print(
                "|", case, "|", (done.stdout or done.stderr.strip()[-200:]).strip(), "|", flush=True
            )
