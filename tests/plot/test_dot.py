"""Models as pictures: the text for Graphviz, read by pydot where that is there, and figures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from onnx import AttributeProto, numpy_helper

from onnxgrad import ModelError
from onnxgrad.plot import figure as figure_module, plot_onnxs, to_dot
from tests.support.drawn_models import ATTRIBUTES, BRANCHES, ODD_NAMES, SEED, oddly_named_model
from tests.support.models import parse_model

RENDERERS = ["matplotlib", pytest.param("dot", marks=pytest.mark.skipif(
    shutil.which("dot") is None, reason="Graphviz is not installed"))]  # fmt: skip


def boxes_of_dot(dot: str) -> dict[str, tuple[str, str]]:
    """Return style and label of every box."""
    found = re.findall(r'^ *(\w+) \[(.*) label="(.*)" fontsize=10\];$', dot, re.MULTILINE)
    return {name: (style, label) for name, style, label in found}


def arrows_of_dot(dot: str) -> list[tuple[str, str]]:
    return re.findall(r"^  (\w+) -> (\w+);$", dot, re.MULTILINE)


def test_the_boxes_of_the_seeds():
    dot = to_dot(parse_model(SEED))
    node = 'shape=box style="filled,rounded" color=orange'
    found = boxes_of_dot(dot)
    assert dot.startswith("digraph {\n")
    assert len(found) == 7 + 6 + 8
    assert found["x"] == ("shape=box color=red", r"x\nfloat32(('N', 2))")
    assert found["loss"] == ("shape=box color=green", r"loss\nfloat32((1, 1))")
    assert found["init"] == ("shape=box", r"init\nfloat32((1, 2))\n[[ 0.5 -0.33333]]")
    assert found["long"] == ("shape=box", r"long\nfloat32((11,))")
    assert found["y"] == ("shape=box", "y")
    assert found["Mul_2"] == (node, "Mul")
    assert found["ReduceSum"] == (node, r"ReduceSum\nkeepdims=1")
    made = arrows_of_dot(dot)
    assert made[:3] == [("x", "Mul"), ("x", "Mul"), ("Mul", "out_mul_0")]
    assert ("init", "Mul_1") in made
    assert len(made) == 7 * 2 + 1 + 8  # operands and results


def test_branches_and_functions():
    dot = to_dot(parse_model(BRANCHES))
    assert re.findall(r'cluster_(\d+) \{\n +label="(.*)";', dot) == [
        ("0", "then_branch"), ("1", "else_branch"), ("2", "own.twice")
    ]  # fmt: skip
    for edge in (("a", "Add"), ("a", "Identity"), ("p", "If"), ("q", "If"), ("v", "Add_1")):
        assert edge in arrows_of_dot(dot)
    first = dot.index("subgraph cluster_0")
    assert dot.index("  a [") < first < dot.index("    p [") < dot.index("subgraph cluster_1")
    assert dot.rindex("}\n  ") < dot.index(" -> ")  # no arrow draws a box into a cluster


def test_one_name_in_two_branches():
    made = parse_model("""g (float[N] x, bool c) => (float[N] y) { h = Exp(x)  y = If (c) <
            then_branch = t () => (float[N] h) { h = Neg(x) },
            else_branch = e () => (float[N] h) { k = Abs(x)  h = Exp(k) }> }""")
    found, made = boxes_of_dot(to_dot(made)), arrows_of_dot(to_dot(made))
    assert {"h", "h_1", "h_2"} <= found.keys()
    assert [a for a, b in made if b == "If"] == ["c", "h_1", "h_2"]
    assert {("Exp", "h"), ("Neg", "h_1"), ("Exp_1", "h_2"), ("k", "Exp_1")} <= set(made)


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
    dot = to_dot(made)
    found, made = boxes_of_dot(dot), arrows_of_dot(dot)
    assert found["v"] == ("shape=box color=red", r"v\nfloat32((2,))\n[4. 5.]")
    assert found["x_1"] == ("shape=box color=green", r"x\nfloat32(('N', 2))")
    assert ("x", "x_1") in made
    assert found["u_1"] == ("shape=box", r"u\nfloat32((2,))\n[4. 5.]")
    assert ("u_1", "u") in made
    assert found["top"] == ("shape=box", r"top\nsparse float32((2,))")
    assert ("top", "Clip") in made
    assert found["s"][1] == r"s\nsequence"
    assert found["text"][1] == r"text\nstring((1,))\n['a']"
    assert ("nothing", "Neg") in made


def test_attributes():
    found = boxes_of_dot(to_dot(parse_model(ATTRIBUTES)))
    assert found["Scaler"][1] == r"ai.onnx.ml.Scaler\noffset=[0.1]\nscale=[11 values]"
    made = parse_model(ATTRIBUTES)
    node = made.graph.node[1]
    node.attribute.add(name="text", s=b"t" * 100, type=AttributeProto.STRING)
    node.attribute.add(name="kind", type=AttributeProto.TYPE_PROTO).tp.tensor_type.elem_type = 1
    node.attribute.add(name="sparse", type=AttributeProto.SPARSE_TENSOR).sparse_tensor.dims[:] = [2]
    lines = boxes_of_dot(to_dot(made))["LeakyRelu"][1].split(r"\n")
    assert lines[2] == f"text='{'t' * 51}..."
    assert lines[3:] == ["kind=type_proto", "sparse=sparse_tensor"]


def test_odd_names():
    dot = to_dot(oddly_named_model())
    labels = [label for style, label in boxes_of_dot(dot).values() if "filled" not in style]
    assert sorted(label.split(r"\nfloat32")[0] for label in labels) == sorted(
        [r"a\"b", r"a\\", r"new\\nline", "a<b>|{c}", "&amp;lt;", "é 字", "node", "1", "a.b", "a_b",
         r"\\N"]
    )  # fmt: skip
    assert len(arrows_of_dot(dot)) == 2 * (len(ODD_NAMES) - 1)
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
    from xml.etree import ElementTree

    texts = {e.text for e in ElementTree.fromstring(done.stdout).iter() if e.tag.endswith("text")}
    for name in ODD_NAMES:
        assert name.replace("\n", "\\n") in texts
        assert f"({name})".replace("\n", "\\n") in texts or name == ODD_NAMES[-1]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("renderer", RENDERERS)
def test_figures(renderer, tmp_path):
    import matplotlib.pyplot as plt

    one = plot_onnxs(parse_model(SEED), renderer=renderer, title="loss")
    assert one.get_title() == "loss"
    several = plot_onnxs(
        parse_model(BRANCHES),
        parse_model(ATTRIBUTES),
        oddly_named_model(),
        renderer=renderer,
        title=["a", "b", "c"],
    )
    assert [ax.get_title() for ax in several] == ["a", "b", "c"]
    for ax in (one, several[0]):
        ax.figure.savefig(tmp_path / "f.png")
        pixels = plt.imread(tmp_path / "f.png")[..., :3]
        orange = (abs(pixels - [1, 165 / 255, 0]).max(axis=2) < 0.05).mean()
        assert orange > 0.01
        plt.close(ax.figure)


@pytest.mark.parametrize("renderer", RENDERERS)
def test_circles_are_drawn(renderer):
    """No file is valid with them, and a picture shows where they are."""
    import matplotlib.pyplot as plt

    model = parse_model("""f (float[2] x) => (float[2] y) {
        a = Add(x, c)  b = Relu(a)  c = Exp(b)  y = Neg(c)  own = Abs(own) }""")
    ax = plot_onnxs(model, renderer=renderer)
    texts = " ".join(text.get_text() for text in ax.texts)
    assert renderer == "dot" or all(kind in texts for kind in ("Add", "Relu", "Exp", "Abs"))
    plt.close(ax.figure)


@pytest.mark.parametrize("ax", [None, "new"])
def test_one_title_for_several_models(ax):
    import matplotlib.pyplot as plt

    axes = plot_onnxs(
        parse_model(SEED), parse_model(BRANCHES), ax=ax, renderer="matplotlib", title="both"
    )
    assert [axes[0].figure.get_suptitle(), axes[0].get_title()] == ["both", ""]
    assert axes[0].figure is axes[1].figure
    one = plot_onnxs(parse_model(SEED), ax="new", renderer="matplotlib", title="loss")
    assert one.get_title() == "loss"
    assert one.figure is not axes[0].figure
    for figure in (one.figure, axes[0].figure):
        plt.close(figure)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script in place of Graphviz")
@pytest.mark.parametrize(
    ("dpi", "asked"), [(50, "40.0,200.0"), (96, "40.0,200.0"), (200, "19.2,96.0")]
)
def test_resolution(monkeypatch, tmp_path, dpi, asked):
    import matplotlib.pyplot as plt

    plt.imsave(tmp_path / "p.png", np.zeros((600, 400, 3)))
    program = tmp_path / "dot"
    program.write_text(
        f"""#!/bin/sh
        echo "$@" > {tmp_path}/asked
        while read line; do :; done
        /bin/cat {tmp_path}/p.png"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    ax = plot_onnxs(parse_model(SEED), ax="new", dpi=dpi)
    given = (tmp_path / "asked").read_text().split()
    sizes = [float(n) for a in given if a.startswith("-Gsize=") for n in a[7:].split(",")]
    assert f"-Gdpi={dpi}" in given
    np.testing.assert_allclose(sizes, [float(n) for n in asked.split(",")])
    np.testing.assert_allclose(ax.figure.get_size_inches(), [400 / dpi, 600 / dpi])
    plt.close(ax.figure)


def test_lines_of_a_figure_are_as_thick_as_its_font_is_large():
    shares = []
    for size in (2, 6):
        ax = Figure(figsize=(size, size)).add_subplot()
        plot_onnxs(parse_model(SEED), ax=ax, renderer="matplotlib")
        [font] = {t.get_fontsize() for t in ax.texts if t.get_text()}
        arrows = [t.arrow_patch for t in ax.texts if not t.get_text()]
        boxes = [t.get_bbox_patch() for t in ax.texts if t.get_text()]
        shares.append([line.get_linewidth() / font for line in (arrows[0], boxes[0])])
    np.testing.assert_allclose(*shares)


@pytest.mark.newest  # matplotlib 3.9 ends arrows at other points
def test_boxes_of_a_figure_do_not_overlap():
    figure = Figure(figsize=(4, 4))
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    assert plot_onnxs(parse_model(SEED), ax=ax, renderer="matplotlib") is ax
    figure.draw_without_rendering()
    texts = [t for t in ax.texts if t.get_text()]
    assert len(texts) == 21
    places = [t.get_bbox_patch().get_window_extent() for t in texts]
    for i, a in enumerate(places):
        assert not any(a.overlaps(b) for b in places[:i])
    written = {t.get_text(): place.y0 for t, place in zip(texts, places, strict=True)}
    assert written["x\nfloat32(('N', 2))"] > written["out_mul_0"] > written["loss_diff"]
    arrows = [t for t in ax.texts if not t.get_text()]
    line = texts[0].get_fontsize() * 1.4 * figure.dpi / 72
    starts, tips = (
        ax.transData.transform([getattr(t, end) for t in arrows]) for end in ("xyann", "xy")
    )
    assert len(arrows) == 23
    for start, (x, y) in zip(starts, tips, strict=True):  # just above the middle of a box
        middles = [p for p in places if abs((p.x0 + p.x1) / 2 - x) < 1 and 0 < y - p.y1 < line / 3]
        (end,) = middles
        (begin,) = [p for p in places if p.contains(*start)]
        assert begin.y0 > end.y1


def test_given_axes():
    figure = Figure()
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 1)
    axes = plot_onnxs(parse_model(SEED), parse_model(BRANCHES), ax=grid, renderer="matplotlib")
    assert list(axes) == list(grid)


def test_without_graphviz(monkeypatch):
    monkeypatch.setenv("PATH", "")
    figure = Figure()
    FigureCanvasAgg(figure)
    assert plot_onnxs(parse_model(SEED), ax=figure.add_subplot()).texts


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script in place of Graphviz")
def test_where_graphviz_fails_or_takes_too_long(monkeypatch, tmp_path, caplog):
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    figure = Figure()
    FigureCanvasAgg(figure)
    with pytest.raises(RuntimeError, match=r"dot.*luck"):
        plot_onnxs(parse_model(SEED), ax=figure.add_subplot())
    program.write_text("#!/bin/sh\nread line\nexec /bin/sleep 60\n")
    monkeypatch.setattr(figure_module, "PATIENCE", 0.1)
    assert plot_onnxs(parse_model(SEED), ax=figure.add_subplot()).texts
    assert "matplotlib" in caplog.text


def test_show(monkeypatch):
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(1))
    figure = Figure()
    FigureCanvasAgg(figure)
    for show in (False, True):
        plot_onnxs(parse_model(SEED), ax=figure.add_subplot(), renderer="matplotlib", show=show)
    assert shown == [1]


def test_wrong_arguments():
    with pytest.raises(ValueError, match="model"):
        plot_onnxs()
    with pytest.raises(ValueError, match="renderer 'svg'"):
        plot_onnxs(parse_model(SEED), renderer="svg")
    with pytest.raises(ValueError, match=r"1 models.* 2 titles"):
        plot_onnxs(parse_model(SEED), title=["a", "b"])
    for dpi in (0, -96, np.nan, np.inf):
        with pytest.raises(ValueError, match="dpi"):
            plot_onnxs(parse_model(SEED), dpi=dpi)
    grid = Figure().subplots(2, 1)
    with pytest.raises(ValueError, match=r"title.* 2 models"):
        plot_onnxs(parse_model(SEED), parse_model(SEED), ax=grid, title="both")
    with pytest.raises(ValueError, match=r"2 models.* 1 axes"):
        plot_onnxs(parse_model(SEED), parse_model(SEED), ax=Figure().add_subplot())
    with pytest.raises(ModelError):
        to_dot(b"no model")
