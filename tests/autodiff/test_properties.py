"""Random equations, shapes and attributes: gradients against central differences, by hypothesis."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings, strategies as st

from onnxgrad import check_gradient
from tests.support.models import parse_model
from tests.support.witness import Unstable, mismatches, unoptimized_session

pytestmark = pytest.mark.sweep
DRAWN = settings(
    max_examples=int(os.environ.get("ONNXGRAD_EXAMPLES", "60")),
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,  # the same for all examples
    ],
)
OPSETS = st.integers(18, 23)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
KNOWN = st.sampled_from(["lengths", "symbols"])
FAR = 2**31 - 1


def normal_of_shape(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape) + len(shape)).normal(size=shape)


def model_of_node(
    node: str, feed: dict, fixed: dict, known: str, opset: int, kind: str = "double"
) -> onnx.ModelProto:
    """Return the model of a node that writes y from inputs in `feed` and constants in `fixed`."""
    inputs = []
    for name, array in feed.items():
        lengths = [f"{name}{i}" if known == "symbols" else n for i, n in enumerate(array.shape)]
        inputs.append(
            f"{kind}[{', '.join(map(str, lengths))}] {name}" if lengths else f"{kind} {name}"
        )
    text = f"g ({', '.join(inputs)}) => ({kind} y) {{ y = {node} }}"
    return parse_model(text, opset=opset, output_shapes=False, **fixed)


def assert_gradient_agrees(made: onnx.ModelProto, feed: dict) -> None:
    try:
        unoptimized_session(made).run(None, feed)
    except Exception:  # what onnxruntime does not run is no example
        assume(False)
    try:
        wrong = mismatches(made, feed)
    except Unstable:
        assume(False)
    assert not wrong, "\n".join([*wrong, onnx.printer.to_text(made)])


# -- Einsum ------------------------------------------------------------------------------------


@st.composite
def equations(draw) -> tuple[str, list[tuple[int, ...]]]:
    """Draw an equation and the shapes of its operands."""
    sizes = {letter: draw(st.integers(1, 3)) for letter in "abcd"}
    term = st.lists(st.sampled_from("abcd"), max_size=3, unique=True).map("".join)
    terms = draw(st.lists(term, min_size=1, max_size=3).filter(any))
    shapes = [tuple(sizes[letter] for letter in t) for t in terms]
    batch = draw(st.sampled_from([(), (2,), (2, 3)]))
    dots = [bool(batch) and draw(st.booleans()) for _ in terms]
    letters = sorted(set("".join(terms)))
    result = "".join(draw(st.permutations(letters))[: draw(st.integers(0, len(letters)))])
    for i, has in enumerate(dots):
        if has:  # the trailing axes of the batch, some of which may be broadcast
            axes = batch[draw(st.integers(0, len(batch) - 1)) :]
            axes = tuple(draw(st.sampled_from([1, n])) for n in axes)
            terms[i], shapes[i] = f"...{terms[i]}", axes + shapes[i]
    result = f"...{result}" if any(dots) else result
    arrow = "->" + result if any(dots) or draw(st.booleans()) else ""
    return ",".join(terms) + arrow, shapes


@DRAWN
@given(equations(), KNOWN, OPSETS)
def test_einsum(drawn, known, opset):
    equation, shapes = drawn
    feed = {f"x{i}": np.asarray(normal_of_shape(*s) + i) for i, s in enumerate(shapes)}
    node = f'Einsum<equation="{equation}">({", ".join(feed)})'
    assert_gradient_agrees(model_of_node(node, feed, {}, known, opset), feed)


# -- Slice and Pad -----------------------------------------------------------------------------


def axes_of(shape: tuple[int, ...]) -> st.SearchStrategy[list[int]]:
    """Return a strategy of some axes, counted from the front or from the back."""
    rank = len(shape)
    axes = st.lists(st.sampled_from(range(rank)), min_size=1, unique=True)
    return st.tuples(axes, st.booleans()).map(lambda t: [a - rank * t[1] for a in t[0]])


STEPS = st.sampled_from([1, 1, 1, -1, 2, -2, 3])


@st.composite
def bounds(draw, n: int) -> tuple[int, int]:
    """Draw a start before an end, each from the front, the back or beyond, or any two numbers."""
    if draw(st.integers(0, 7)) == 0:
        anywhere = st.one_of(st.integers(-6, 6), st.sampled_from([FAR, -FAR]))
        return draw(anywhere), draw(anywhere)
    start = draw(st.integers(0, n - 1))
    end = draw(st.integers(start + 1, n))
    starts = [start, start - n] + [-n - 2, -FAR] * (start == 0)
    ends = [end, n + 2, FAR] if end == n else [end, end - n]
    return draw(st.sampled_from(starts)), draw(st.sampled_from(ends))


@st.composite
def slice_operands(draw) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
    """Draw a shape and the operands of a Slice, few of which leave nothing."""
    shape = draw(SHAPES)
    columns = [(*draw(bounds(shape[a])), a, draw(STEPS)) for a in draw(axes_of(shape))]
    columns = [(e, s, a, k) if k < 0 else (s, e, a, k) for s, e, a, k in columns]
    # there, onnxruntime takes the largest end for none, against the specification
    assume(not any(end == FAR and step < 0 for _, end, _, step in columns))
    arrays = map(np.int64, zip(*columns, strict=True))
    return shape, dict(zip(("starts", "ends", "axes", "steps"), arrays, strict=True))


@DRAWN
@given(slice_operands(), KNOWN, OPSETS)
def test_slice(drawn, known, opset):
    shape, fixed = drawn
    feed = {"x": normal_of_shape(*shape)}
    assert_gradient_agrees(
        model_of_node("Slice(x, starts, ends, axes, steps)", feed, fixed, known, opset), feed
    )


@st.composite
def pads(draw) -> tuple[tuple[int, ...], str, dict[str, np.ndarray]]:
    shape, mode = draw(SHAPES), draw(st.sampled_from(["constant", "edge", "reflect", "wrap"]))
    axes = draw(axes_of(shape))
    low = {"constant": -1}.get(mode, 0)
    most = {a: {"reflect": shape[a] - 1, "wrap": shape[a]}.get(mode, 4) for a in axes}
    widths = [draw(st.integers(low if shape[a] > 2 else 0, most[a])) for a in axes * 2]
    return shape, mode, {"pads": np.int64(widths), "axes": np.int64(axes)}


@DRAWN
@given(pads(), st.booleans(), KNOWN, OPSETS)
def test_pad(drawn, filled, known, opset):
    shape, mode, fixed = drawn
    assume(mode != "wrap" or opset > 18)
    feed = {"x": normal_of_shape(*shape)} | ({"v": np.asarray(1.5)} if filled else {})
    node = f'Pad<mode="{mode}">(x, pads, {"v" if filled else ""}, axes)'
    assert_gradient_agrees(model_of_node(node, feed, fixed, known, opset), feed)


# -- Resize ------------------------------------------------------------------------------------

PLACES = "half_pixel pytorch_half_pixel align_corners asymmetric half_pixel_symmetric".split()
ROUNDINGS = "round_prefer_floor round_prefer_ceil floor ceil".split()


@st.composite
def resize_operands(draw) -> tuple[tuple[int, ...], str, dict[str, np.ndarray]]:
    shape = (1, 2, *draw(st.lists(st.integers(2, 4), min_size=2, max_size=2)))
    mode = draw(st.sampled_from(["linear", "nearest", "cubic"]))
    options = [f'mode="{mode}", coordinate_transformation_mode="{draw(st.sampled_from(PLACES))}"']
    if mode == "nearest":
        options.append(f'nearest_mode="{draw(st.sampled_from(ROUNDINGS))}"')
    else:
        options.append(f"antialias={draw(st.integers(0, 1))}")
    if mode == "cubic":
        options.append(f"exclude_outside={draw(st.integers(0, 1))}")
    if draw(st.booleans()):
        fixed = {"sizes": np.int64([*shape[:2], *(draw(st.integers(1, 6)) for _ in "ab")])}
        operands = "x, , , sizes"
    else:
        scale = st.sampled_from([0.5, 0.75, 1.0, 1.3, 2.0, 2.5])
        fixed = {"scales": np.float32([1, 1, draw(scale), draw(scale)])}
        operands = "x, , scales"
    return shape, f"Resize<{', '.join(options)}>({operands})", fixed


@DRAWN
@given(resize_operands(), KNOWN, st.integers(19, 23))
def test_resize(drawn, known, opset):
    """onnxruntime has no kernel in float64: `check_gradient` takes onnx.reference."""
    shape, node, fixed = drawn
    feed = {"x": normal_of_shape(*shape)}
    made = model_of_node(node, feed, fixed, known, opset, "float")
    report = check_gradient(made, feed=feed, weights=[])
    assert report.ok, f"{report}\n{onnx.printer.to_text(made)}"
