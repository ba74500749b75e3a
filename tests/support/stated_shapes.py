"""What a model states of the shapes of its values, against what they are when it runs."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrad.operators.shapes import dims
from tests.support.cases import run_in_dtype


def assert_one_length_per_symbol(
    claims: dict[str, tuple], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Check that one length per symbol explains all `shapes`."""
    lengths: dict[str, int] = {}
    for name, claim in claims.items():
        assert len(claim) == len(shapes[name]), name
        for d, n in zip(claim, shapes[name], strict=True):
            if isinstance(d, str) and "*" not in d:
                assert lengths.setdefault(d, n) == n, (name, claim, shapes[name])
    for name, claim in claims.items():
        for d, n in zip(claim, shapes[name], strict=True):
            if d is not None:
                parts = [int(p) if p.isdigit() else lengths[p] for p in str(d).split("*")]
                assert prod(parts) == n, (name, claim, shapes[name])


def all_values(model: onnx.ModelProto, arrays: dict) -> dict:
    """Return every value that the nodes of the main graph compute, by name; sequences as lists."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    names = {y for node in model.graph.node for y in node.output if y}
    missing = names - {y.name for y in model.graph.output}
    whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(missing))
    outputs = [y.name for y in whole.graph.output]
    return dict(zip(outputs, run_in_dtype(whole, arrays), strict=True))


def claims_and_shapes(model: onnx.ModelProto, values: dict, arrays: dict) -> tuple[dict, dict]:
    """Return for each of `all_values`, and of the inputs, the stated shape and the one it has."""
    graph = ir.from_proto(model).graph
    stated = {str(v.name): dims(v) for node in graph for v in node.outputs if v.name}
    claims = {name: shape for name, shape in stated.items() if shape is not None}
    found = dict(values)
    for name, elements in values.items():
        if isinstance(elements, np.ndarray | np.generic):
            continue
        claim = claims.pop(name, None)  # of a sequence, that of all elements; None holds nothing
        for i, array in enumerate(elements or ()):
            found[f"{name}[{i}]"] = array
            claims |= {} if claim is None else {f"{name}[{i}]": claim}
        del found[name]
    shapes = {name: np.shape(array) for name, array in found.items()}
    inputs = {str(x.name): dims(x) for x in graph.inputs}
    claims |= {name: shape for name, shape in inputs.items() if shape is not None}
    return claims, shapes | {name: np.shape(arrays[name]) for name in inputs}
