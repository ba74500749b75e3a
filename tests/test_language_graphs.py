"""Graphs of language models: types and shapes behind operators that onnxruntime adds to ONNX's."""

from __future__ import annotations

import pytest

from microsoft_rows import CASES
from onnxgrad.graph.inference.infer import infer
from onnxgrad.graph.shapes import dims
from onnxgrad.model.convert import to_ir
from running import in_sweep, run
from test_microsoft import model

# a rank that depends on an operand, and statistics that onnx infers nothing of
UNKNOWN = {"ExpandDims", "ConvTransposeWithDynamicPads", "LayerNormalization 12"}
KNOWN = [case for case in CASES if case.id not in UNKNOWN]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("known", ["lengths", in_sweep("symbols")])
@pytest.mark.parametrize("case", KNOWN, ids=lambda case: case.id)
def test_inferred_is_what_runs(case, known):
    made = model(case, known)
    for y in made.graph.output:
        y.type.Clear()
    inferred = to_ir(made)
    infer(inferred)
    if case.formula is None:
        results = run(model(case), case.feed)
    else:
        results = case.formula(*case.feed.values())
        results = results if isinstance(results, tuple) else (results,)
    of_symbols = {f"{n}{i}": k for n, x in case.feed.items() for i, k in enumerate(x.shape)}
    for y, result in zip(inferred.graph.outputs, results, strict=True):
        assert case.formula or y.dtype.numpy() == result.dtype
        shape = dims(y)
        if shape is None:  # a kernel, or indices, of unknown lengths
            assert known == "symbols"
            assert case.id.startswith(("FusedConv", "GatherND"))
            continue
        assert len(shape) == result.ndim
        static = [of_symbols.get(d, d) for d in shape]
        unknown = [d for d in static if isinstance(d, str)]
        assert all(d in unknown or d == k for d, k in zip(static, result.shape, strict=True))
        if known == "lengths":  # but a cache grows by an amount that only its nodes know
            assert len(unknown) < 2 or case.id == "Pad", shape
