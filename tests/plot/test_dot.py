"""Models as pictures: the text for Graphviz, read by pydot where that is there, and figures."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from onnx import AttributeProto, numpy_helper

from onnxgrad import ModelError, to_svg
from onnxgrad.plot import plot_onnxs, to_dot
from tests.support.drawn_models import (
    ATTRIBUTES,
    BRANCHES,
    ODD_NAMES,
    SEED,
    joint_gradient,
    oddly_named_model,
)
from tests.support.models import parse_model


def boxes_of_dot(dot: str) -> dict[str, tuple[str, str]]:
    """Return style and label of every box."""
    found = re.findall(r'^ *(\w+) \[(.*) label="(.*)" fontsize=10\];$', dot, re.MULTILINE)
    return {name: (style, label) for name, style, label in found}


def arrows_of_dot(dot: str) -> list[tuple[str, str]]:
    return re.findall(r"^  (\w+) -> (\w+)(?: \[.*\])?;$", dot, re.MULTILINE)


def test_the_boxes_of_the_seeds():
    dot = to_dot(parse_model(SEED))
    node = 'shape=box style="filled,rounded" color=orange'
    found = boxes_of_dot(dot)
    assert dot.startswith("digraph {\n")
    assert len(found) == 2 + 8 + 1
    assert found["x"] == ("shape=box color=red", r"x\nfloat32[N, 2]")
    assert found["loss"] == ("shape=box color=green", r"loss\nfloat32[1, 1]")
    label = r"Mul\ninit float32[1, 2] = [[0.5, -0.3333300054073334]]\n→ out_mul_0_2 float32[N, 2]"
    assert found["Mul_2"] == (node, label)
    assert found["ReduceSum_1"] == (node, r"ReduceSum\n→ loss float32[1, 1]")
    assert found["ReduceSum"][1].startswith(r"ReduceSum\nkeepdims=1\ninit_2 int64[1] = [1]\n")
    arrows = arrows_of_dot(dot)
    assert arrows.count(("x", "Mul")) == 2
    assert {("x", "Mul_2"), ("Mul", "Mul_1"), ("label", "Sub"), ("ReduceSum_1", "loss")} < {*arrows}
    assert len(arrows) == 2 + 1 + 1 + 2 + 1 + 2 + 2 + 1 + 1  # operands that are no constants, loss


def test_branches_and_functions():
    dot = to_dot(parse_model(BRANCHES))
    assert re.findall(r'cluster_\d+ \{\n +label="(.*)";', dot) == [
        "If: then_branch", "If: else_branch", "own.twice"
    ]  # fmt: skip
    for edge in (("own_twice", "Add"), ("own_twice", "Identity"), ("p", "If"), ("q", "If"),
                 ("v", "Add_1")):  # fmt: skip
        assert edge in arrows_of_dot(dot)
    first = dot.index("subgraph cluster_1")
    assert dot.index("  own_twice [") < first < dot.index("    p [") < dot.index("cluster_2")
    assert dot.rindex("}\n  ") < dot.index(" -> ")  # no arrow draws a box into a cluster


def test_modules_are_clusters():
    model = parse_model(SEED)
    for i, node in enumerate(model.graph.node):
        node.name = f"/layer{i // 4}/{node.op_type}"
    assert re.findall(r' {4}label="(.*)";', to_dot(model)) == ["layer0", "layer1"]


def test_the_results_of_a_node_are_told_apart():
    dot = to_dot(
        parse_model("""<ir_version: 9, opset_import: ["": 20]>
        f (float[4] x) => (float[2] y) { a, b = Split<num_outputs = 2>(x) y = Sub(b, a) }""")
    )
    assert re.findall(r"  Split -> Sub (.*);", dot) == [
        '[label="b float32[2]" fontsize=8]', '[label="a float32[2]" fontsize=8]'
    ]  # fmt: skip
    assert "  Sub -> y;" in dot


def test_one_name_in_two_branches():
    made = parse_model("""g (float[N] x, bool c) => (float[N] y) { h = Exp(x)  y = If (c) <
            then_branch = t () => (float[N] h) { h = Neg(x) },
            else_branch = e () => (float[N] h) { k = Abs(x)  h = Exp(k) }> }""")
    found, arrows = boxes_of_dot(to_dot(made)), arrows_of_dot(to_dot(made))
    assert {"h", "h_1"} <= found.keys()
    assert [a for a, b in arrows if b == "If"] == ["c", "h", "h_1"]
    assert {("x", "Exp"), ("Neg", "h"), ("Exp_1", "h_1"), ("Abs", "Exp_1")} <= set(arrows)


def test_values_of_every_kind():
    made = parse_model(
        """<ir_version: 3, opset_import: ["": 9, "ai.onnx.ml": 1]>
        g (float[N,2] x, float[2] v) => (float[N,2] x, float[2] u, float[N,2] y, seq(float[N]) s)
        { w = Mul(x, v)  y = Clip(w, , top)  s = SequenceConstruct(y)  t = Neg(nothing) }"""
    )
    for name in "vu":
        made.graph.initializer.append(numpy_helper.from_array(np.float32([4, 5]), name))
    values, places = np.float32([3]), np.int64([1])
    sparse = onnx.helper.make_sparse_tensor(
        numpy_helper.from_array(values, "top"), numpy_helper.from_array(places), [2]
    )
    made.graph.sparse_initializer.append(sparse)
    made.graph.initializer.append(numpy_helper.from_array(np.array(["a"], object), "text"))
    made.graph.node.add(op_type="Identity", input=["text"])
    dot = to_dot(made)
    found, made = boxes_of_dot(dot), arrows_of_dot(dot)
    assert r"\nv float32[2] = [4.0, 5.0]\n→ w" in found["Mul"][1]
    assert found["x_1"] == ("shape=box color=green", r"x\nfloat32[N, 2]")
    assert ("x", "x_1") in made
    assert found["u"] == (
        "shape=box color=green", r"u\nfloat32[2]\nu float32[2] = [4.0, 5.0]"
    )  # fmt: skip
    assert r"\ntop sparse float32[2]\n" in found["Clip"][1]
    assert found["s"][1] == r"s\nsequence"
    assert found["Identity"][1] == r"Identity\ntext string[1] = ['a']"
    assert r"\nnothing: not computed by any node\n" in found["Neg"][1]


def test_attributes():
    found = boxes_of_dot(to_dot(parse_model(ATTRIBUTES)))
    scaler = found["ai_onnx_ml_Scaler"][1].split(r"\n")
    assert scaler[:3] == ["ai.onnx.ml.Scaler", "offset=[0.1]", "scale=[11 values]"]
    made = parse_model(ATTRIBUTES)
    node = made.graph.node[1]
    node.attribute.add(name="text", s=b"t" * 100, type=AttributeProto.STRING)
    node.attribute.add(name="kind", type=AttributeProto.TYPE_PROTO).tp.tensor_type.elem_type = 1
    node.attribute.add(name="sparse", type=AttributeProto.SPARSE_TENSOR).sparse_tensor.dims[:] = [2]
    lines = boxes_of_dot(to_dot(made))["LeakyRelu"][1].split(r"\n")
    assert lines[2] == f"text='{'t' * 51}..."
    assert lines[3:5] == ["kind=type_proto", "sparse=sparse_tensor"]


def test_odd_names():
    dot = to_dot(oddly_named_model())
    labels = [label for style, label in boxes_of_dot(dot).values() if "filled" in style]
    assert [label.partition(r"\nt='")[0].split(r"\n→ ")[0] for label in labels] == [
        rf"Exp\n{name}"
        for name in [r"a\"b", r"a\\", r"new\\nline", "a<b>|{c}", "&amp;lt;", "é 字",
                     "node", "1", "a.b", "a_b"]
    ]  # fmt: skip
    assert len(arrows_of_dot(dot)) == len(ODD_NAMES)
    assert {name for edge in arrows_of_dot(dot) for name in edge} == boxes_of_dot(dot).keys()


def test_pydot_reads_the_text():
    pydot = pytest.importorskip("pydot")
    for made in (
        oddly_named_model(),
        parse_model(SEED),
        parse_model(BRANCHES),
        parse_model(ATTRIBUTES),
    ):
        dot = to_dot(made)
        [graph] = pydot.graph_from_dot_data(dot)
        nodes, graphs = graph.get_nodes(), graph.get_subgraphs()
        for inner in graphs:
            nodes += inner.get_nodes()
        assert {n.get_name() for n in nodes} == boxes_of_dot(dot).keys()
        assert [(e.get_source(), e.get_destination()) for e in graph.get_edges()] == arrows_of_dot(
            dot
        )


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_the_names():
    done = subprocess.run(
        ["dot", "-Tsvg"],
        input=to_dot(oddly_named_model()).encode(),
        capture_output=True,
        check=True,
    )
    assert not done.stderr
    texts = {e.text for e in ElementTree.fromstring(done.stdout).iter() if e.tag.endswith("text")}
    for name in ODD_NAMES:
        assert name.replace("\n", "\\n") in texts


def numbers_of_svg(svg: str, pattern: str) -> list[list[str]]:
    """Return the coordinates in each match of `pattern`."""
    return sorted(re.findall(r"-?\d+\.\d", text) for text in re.findall(pattern, svg))


def one_decimal(numbers: Iterable[float]) -> list[str]:
    return [f"{n:.1f}" for n in numbers]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("renderer", ["matplotlib", "dot"])
def test_figures_draw_what_svg_files_have(renderer, tmp_path):
    import matplotlib.pyplot as plt

    models = [parse_model(SEED), parse_model(BRANCHES), parse_model(ATTRIBUTES)]
    models += [oddly_named_model(), joint_gradient()]
    titles = list("abcde")
    axes = plot_onnxs(*models, renderer=renderer, title=titles)
    assert [ax.get_title() for ax in axes] == titles
    for model, ax in zip(models, axes, strict=True):
        svg = to_svg(model)
        boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch)]
        sizes = [(b.get_x(), b.get_y(), b.get_width(), b.get_height()) for b in boxes]
        assert sorted(map(one_decimal, sizes)) == numbers_of_svg(svg, "<rect .*?>")
        arrows = [p for p in ax.patches if isinstance(p, FancyArrowPatch)]
        paths = [one_decimal(p._path_original.vertices.ravel()) for p in arrows]
        assert sorted(paths) == numbers_of_svg(svg, r'<path class="arrow.*? d="(.*?)"')
        texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
        assert sorted(t.get_text() for t in ax.texts) == sorted(t.text for t in texts)
    axes[0].figure.savefig(tmp_path / "f.png", dpi=80)
    pixels = plt.imread(tmp_path / "f.png")[..., :3]
    for color in ("#2f7de1", "#1f9d55"):  # edges of inputs and outputs
        assert (abs(pixels - to_rgb(color)).max(axis=2) < 0.2).any()
    plt.close(axes[0].figure)


def test_circles_are_drawn():
    """No file is valid with them, and a picture shows where they are."""
    import matplotlib.pyplot as plt

    model = parse_model("""f (float[2] x) => (float[2] y) {
        a = Add(x, c)  b = Relu(a)  c = Exp(b)  y = Neg(c)  own = Abs(own) }""")
    ax = plot_onnxs(model)
    assert {text.get_text() for text in ax.texts} > {"Add", "Relu", "Exp", "Abs"}
    plt.close(ax.figure)


@pytest.mark.parametrize("ax", [None, "new"])
def test_one_title_for_several_models(ax):
    import matplotlib.pyplot as plt

    axes = plot_onnxs(parse_model(SEED), parse_model(BRANCHES), ax=ax, title="both")
    assert [axes[0].figure.get_suptitle(), axes[0].get_title()] == ["both", ""]
    assert axes[0].figure is axes[1].figure
    one = plot_onnxs(parse_model(SEED), ax="new", title="loss")
    assert one.get_title() == "loss"
    assert one.figure is not axes[0].figure
    for figure in (one.figure, axes[0].figure):
        plt.close(figure)


@pytest.mark.parametrize(("dpi", "most"), [(50, (40, 200)), (96, (40, 200)), (200, (19.2, 96))])
def test_resolution(dpi, most):
    import matplotlib.pyplot as plt

    chain = " ".join(f"h{i + 1} = Relu(h{i})" for i in range(500))
    model = parse_model(f"""<ir_version: 9, opset_import: ["": 20]>
        f (float[N] h0) => (float[N] h500) {{ {chain} }}""")
    model.graph.input[0].name = model.graph.node[0].input[0] = 1000 * "x"
    for index, made in ((0, model), (1, model)):
        figure = plot_onnxs(made, ax="new", dpi=dpi).figure
        assert figure.dpi == dpi
        np.testing.assert_allclose(figure.get_size_inches()[index], most[index])
        plt.close(figure)
    small = plot_onnxs(parse_model(SEED), dpi=dpi).figure
    assert (small.get_size_inches() < [6, 12]).all()
    plt.close(small)


def figure_texts_and_patches(size: float):
    """Return the texts, the boxes and the arrows of a drawn figure, in pixels, and its figure."""
    figure = Figure(figsize=(size, size))
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    assert plot_onnxs(parse_model(SEED), ax=ax) is ax
    figure.draw_without_rendering()
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch)]
    return ax.texts, boxes, [p for p in ax.patches if isinstance(p, FancyArrowPatch)]


def test_lines_of_a_figure_are_as_thick_as_its_font_is_large():
    shares = []
    for size in (2, 6):
        texts, boxes, arrows = figure_texts_and_patches(size)
        font = max(t.get_fontsize() for t in texts)
        shares.append([line.get_linewidth() / font for line in (arrows[0], boxes[0])])
    np.testing.assert_allclose(*shares)


@pytest.mark.parametrize("size", [4, 9])
def test_texts_of_a_figure_are_in_their_boxes(size):
    texts, boxes, _ = figure_texts_and_patches(size)
    places = [b.get_window_extent() for b in boxes]
    assert len(places) == 11
    assert len(texts) == 2 * 3 + 8 + 3  # types, and constants
    for i, a in enumerate(places):
        assert not any(a.overlaps(b) for b in places[:i])
    for text in texts:
        extent = text.get_window_extent()
        assert sum(p.contains(*extent.min) and p.contains(*extent.max) for p in places) == 1


def test_given_axes():
    figure = Figure()
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 1)
    axes = plot_onnxs(parse_model(SEED), parse_model(BRANCHES), ax=grid)
    assert list(axes) == list(grid)


def test_without_graphviz(monkeypatch):
    monkeypatch.setenv("PATH", "")
    figure = Figure()
    FigureCanvasAgg(figure)
    assert plot_onnxs(parse_model(SEED), ax=figure.add_subplot()).texts


def test_show(monkeypatch):
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(1))
    figure = Figure()
    FigureCanvasAgg(figure)
    for show in (False, True):
        plot_onnxs(parse_model(SEED), ax=figure.add_subplot(), show=show)
    assert shown == [1]


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"plot_onnxs.* one model"):
        plot_onnxs()
    with pytest.raises(ValueError, match="renderer 'svg'"):
        plot_onnxs(parse_model(SEED), renderer="svg")
    with pytest.raises(ValueError, match=r"1 models, not 2"):
        plot_onnxs(parse_model(SEED), title=["a", "b"])
    for dpi in (0, -96, np.nan, np.inf):
        with pytest.raises(ValueError, match=r"dpi.* above 0"):
            plot_onnxs(parse_model(SEED), dpi=dpi)
    grid = Figure().subplots(2, 1)
    with pytest.raises(ValueError, match=r"title.* 2 models"):
        plot_onnxs(parse_model(SEED), parse_model(SEED), ax=grid, title="both")
    with pytest.raises(ValueError, match=r"2 models, not 1"):
        plot_onnxs(parse_model(SEED), parse_model(SEED), ax=Figure().add_subplot())
    with pytest.raises(ModelError):
        to_dot(b"no model")
