"""Random programs: gradients of the file, plain and as onnxruntime's optimizer writes it."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest

from onnxgrad import ModelError, NoGradientRule
from tests.support.programs import Program, program
from tests.support.running import in_sweep
from tests.support.witness import (
    LEVELS,
    Unstable,
    loadable_optimized_model,
    mismatches,
    unoptimized_session,
)

COUNT = int(os.environ.get("ONNXGRAD_PROGRAMS", "200"))  # 2000 is a night's work
PART = 10  # programs a test


def refused_clearly(drawn: Program, error: Exception) -> bool:
    """Tell whether a clear error is due to what the model does not declare, or wrongly."""
    if drawn.lies and isinstance(error, ModelError | NoGradientRule | ValueError):
        return True
    open_ = any(not x.type.tensor_type.HasField("shape") for x in drawn.model.graph.input)
    return open_ and isinstance(error, NoGradientRule) and "state the shapes" in str(error)


def mismatches_by_level(seed: int) -> dict[str, list[str] | None]:
    """Return the mismatches at each level; None where there is nothing to compare."""
    drawn = program(seed)
    try:
        unoptimized_session(drawn.model).run(None, drawn.feed)
    except Exception:  # what onnxruntime does not run is no program
        return {}
    found: dict[str, list[str] | None] = {}
    done: dict[bytes, str] = {}
    for level in LEVELS:
        found[level] = None
        try:
            file = loadable_optimized_model(drawn.model, level)
        except Exception:  # what the optimizer writes does not load in onnxruntime
            continue
        data = file.SerializeToString(deterministic=True)
        if data in done:
            found[level] = found[done[data]]
            continue
        done[data] = level
        try:
            found[level] = mismatches(file, drawn.feed, seed, fill=seed % 3 == 0)
        except Unstable:
            continue
        except Exception as error:
            if not refused_clearly(drawn, error):
                found[level] = [f"{type(error).__name__}: {error}"]
    return found


@pytest.mark.parametrize(
    "first",
    [n if n < PART else in_sweep(n) for n in range(0, COUNT, PART)],
)
def test_gradients(first):
    results = {seed: mismatches_by_level(seed) for seed in range(first, first + PART)}
    wrong = [
        f"program({seed}), {level}: {text[:300]}"
        for seed, levels in results.items()
        for level, texts in levels.items()
        for text in texts or []
    ]
    assert not wrong, "\n".join(wrong)
    compared = sum(texts is not None for levels in results.values() for texts in levels.values())
    assert compared >= 1.5 * PART  # of 3 levels each


def forms_of(model: onnx.ModelProto) -> set[str]:
    """Return the operators and the forms that a program has."""
    found = {"function" for _ in model.functions}
    found |= {"default" for f in model.functions if f.attribute_proto}
    found |= {"sparse" for _ in model.graph.sparse_initializer}
    found |= {"ai.onnx" for o in model.opset_import if o.domain == "ai.onnx"}
    if len({y.name for y in model.graph.output}) < len(model.graph.output):
        found.add("output twice")
    stack = [(n, 0) for n in (*model.graph.node, *(n for f in model.functions for n in f.node))]
    for node, depth in stack:  # which grows
        found.add(node.op_type)
        for a in node.attribute:
            if a.ref_attr_name:
                found.add(f"@{onnx.AttributeProto.AttributeType.Name(a.type)}")
            if node.op_type == "Constant":
                found.add(f"Constant {a.name}")
            if a.type == a.GRAPH and not a.ref_attr_name:
                found.add(f"depth {depth + 1}")
                held = {t.name for t in a.g.initializer}
                if held.intersection(y.name for y in a.g.output):
                    found.add(f"{node.op_type} returns an initializer")
                stack += [(n, depth + 1) for n in a.g.node]
    return found


def test_programs_have_all_forms():
    """The drawing that the gradients are checked on: most of it runs, and nothing is left out."""
    forms, ran = set[str](), 0
    for seed in range(100):
        drawn = program(seed)
        try:
            unoptimized_session(drawn.model)
        except Exception:
            continue
        ran += 1
        forms |= forms_of(drawn.model)
    assert ran >= 80
    expected = {
        "If", "Loop", "Scan", "function", "default", "sparse", "ai.onnx", "output twice", "depth 3",
        "Constant value", "Constant value_floats", "Constant sparse_value", "@FLOAT", "@FLOATS",
        "@INT", "@INTS", "@STRING", "@STRINGS", "@TENSOR", "If returns an initializer",
        "Loop returns an initializer", "Scan returns an initializer",
    }  # fmt: skip
    assert expected <= forms, expected - forms


def test_the_witness_sees_what_is_wrong(monkeypatch):
    """A gradient that is off by a part, and one that is missing, are told."""
    from tests.support import witness

    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]> g (double[3] X, bool c) => (double[3] Y) {
        Y = If(c) <then_branch = t () => (double[3] y) <double[3] w = {1, 2, 3}> { y = Mul(X, w) },
            else_branch = e () => (double[3] z) { z = Sin(X) }> }"""
    )
    feed = {"X": np.float64([0.5, 1, 2]), "c": np.array(True)}
    assert mismatches(model, feed) == []
    derivative = witness.onnx_derivative

    def without_weights(model, **options):
        return derivative(model, weights=[], **options)

    def halved(model, **options):
        made = derivative(model, **options)
        gradient = made.graph.output[0].name
        for node in made.graph.node:
            node.output[:] = ["whole" if y == gradient else y for y in node.output]
        made.graph.node.add(op_type="Constant", output=["part"]).attribute.append(
            onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(np.float64(0.99)))
        )
        made.graph.node.add(op_type="Mul", input=["whole", "part"], output=[gradient])
        return made

    monkeypatch.setattr(witness, "onnx_derivative", without_weights)
    assert [text.split(":")[0] for text in mismatches(model, feed)] == ["w (3,)"]
    monkeypatch.setattr(witness, "onnx_derivative", halved)
    assert len(mismatches(model, feed)) == 1
